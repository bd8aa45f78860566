//! Owns the matrix products: rows times a weight that stays BF16 in memory.
//!
//! `out[r, c]` is the sum, over blocks of [`INNER`] inner columns in order, of one chain of fused multiply-adds a block; then
//! the adapter's product, a block of its own. That is the whole definition: rows of the batch are lanes of vectors, so the
//! number of rows, of threads or of the weight's parts, and the width of the machine's vectors, change no bit.
//!
//! A panel of output rows of the weight is widened to FP32 block by block in a scratch that fits a core's cache, and
//! multiplied with all rows of the batch, which are turned to `[inner, lanes]` once.

use std::cell::RefCell;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::kernel::{GROUP, INNER, lane_tiles, multiply};
use crate::memory::{CpuWeight, Part, widen_bytes};
use crate::tiles::{Tile, grid};

/// Rows of the batch that share one widening of the weight; their turned block and sums fit a second-level cache.
const ROWS: usize = 512;
/// Output rows of a panel, at most; fewer where a weight would give too few panels to share between threads.
const PANEL: usize = 96;
/// FP32 of a widened panel, about.
const WIDE: usize = 1 << 17;
/// Panels that every thread should get, so that an uneven share costs little.
const SHARES: usize = 8;

thread_local! {
    /// Widened block and sums of a panel: at most `PANEL * (INNER + ROWS)` FP32, 288 KiB a thread, made once.
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { block: Vec::new(), sums: Vec::new() }) };
}

struct Scratch {
    block: Vec<[f32; INNER]>,
    sums: Vec<f32>,
}

/// `out = x weight^T` for all rows of `x`, adapters included. `turned` is memory to be used again by the next call.
pub(crate) fn linear(x: &[f32], weight: &CpuWeight, out: &mut [f32], turned: &mut Vec<f32>) {
    let lanes = Arch::new().dispatch(Lanes);
    let blocks = x.chunks(ROWS * weight.input).zip(out.chunks_mut(ROWS * weight.output));
    blocks.for_each(|(x, out)| product(x, weight, lanes, out, turned));
}

/// Lanes of a vector of this machine.
struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    fn with_simd<S: Simd>(self, _simd: S) -> usize {
        S::F32_LANES
    }
}

fn product(x: &[f32], weight: &CpuWeight, lanes: usize, out: &mut [f32], turned: &mut Vec<f32>) {
    let rows = x.len() / weight.input;
    let padded = rows.next_multiple_of(lanes);
    let needed = padded * weight.input;
    turned.resize(needed.max(turned.len()), 0.0);
    turn(x, weight.input, lanes, &mut turned[..needed]);
    let x = &turned[..needed];
    let low = low_products(x, weight, rows, lanes);
    let panel = panel_width(weight.output, weight.input);
    let jobs: Vec<(&Part, usize, Option<&[f32]>)> = weight
        .parts
        .iter()
        .zip(&low)
        .flat_map(|(part, low)| (0..part.rows).step_by(panel).map(move |first| (part, first, low.as_deref())))
        .collect();
    let widths: Vec<usize> = jobs.iter().map(|(part, first, _)| panel.min(part.rows - first)).collect();
    let tiles = grid(out, weight.output, [rows], widths);
    jobs.into_par_iter().zip(tiles).with_max_len(1).for_each(|((part, first, low), out)| {
        SCRATCH.with_borrow_mut(|scratch| {
            Arch::new().dispatch(Panel { x, rows, input: weight.input, part, first, low, out, scratch });
        });
    });
}

fn panel_width(output: usize, input: usize) -> usize {
    let wanted = (output / (SHARES * rayon::current_num_threads())).min(WIDE / input);
    (wanted / GROUP * GROUP).clamp(GROUP, PANEL)
}

/// `[rows, width]` to tiles of `[width, lanes]`; lanes past the last row are zero.
fn turn(x: &[f32], width: usize, lanes: usize, turned: &mut [f32]) {
    turned.par_chunks_mut(2 * lanes * width).zip(x.par_chunks(2 * lanes * width)).for_each(|(turned, x)| {
        let lanes = turned.len() / width;
        // Sixteen columns at a time: a cache line of every row is read once.
        for from in (0..width).step_by(16) {
            let to = width.min(from + 16);
            for (lane, row) in x.chunks_exact(width).enumerate() {
                for (column, value) in (from..to).zip(&row[from..to]) {
                    turned[column * lanes + lane] = *value;
                }
            }
        }
        for lane in (x.len() / width)..lanes {
            turned.iter_mut().skip(lane).step_by(lanes).for_each(|value| *value = 0.0);
        }
    });
}

/// Per part `A x^T` of its adapter, `[rank, lanes]` tile by tile: what the panels multiply B with.
fn low_products(x: &[f32], weight: &CpuWeight, rows: usize, lanes: usize) -> Vec<Option<Vec<f32>>> {
    let padded = rows.next_multiple_of(lanes);
    let product = |part: &Part| {
        let adapter = part.adapter.as_ref()?;
        let mut low = vec![0.0; padded * adapter.rank];
        let tiles = low
            .par_chunks_mut(2 * lanes * adapter.rank)
            .zip(x.par_chunks(2 * lanes * weight.input))
            .with_max_len(1);
        tiles.for_each(|(low, x)| {
            SCRATCH.with_borrow_mut(|scratch| {
                Arch::new().dispatch(Low { x, input: weight.input, a: &adapter.a, low, scratch });
            });
        });
        Some(low)
    };
    weight.parts.iter().map(product).collect()
}

/// One tile's `A x^T`.
struct Low<'a> {
    x: &'a [f32],
    input: usize,
    a: &'a [f32],
    low: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl WithSimd for Low<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, input, a, low, scratch } = self;
        let (rank, lanes) = (a.len() / input, x.len() / input);
        let count = rank.next_multiple_of(GROUP);
        scratch.block.resize(count.max(scratch.block.len()), [0.0; INNER]);
        scratch.sums.resize((count * lanes).max(scratch.sums.len()), 0.0);
        let (block, sums) = (&mut scratch.block[..count], &mut scratch.sums[..count * lanes]);
        for from in (0..input).step_by(INNER) {
            let width = INNER.min(input - from);
            for (r, wide) in block.iter_mut().enumerate() {
                match a.get(r * input + from..r * input + from + width) {
                    Some(a) => wide[..width].copy_from_slice(a),
                    None => wide.fill(0.0),
                }
            }
            multiply(simd, lanes, &x[from * lanes..(from + width) * lanes], block, sums, from > 0);
        }
        low.copy_from_slice(&sums[..rank * lanes]);
    }
}

/// One panel of a part for all rows of a block of the batch.
struct Panel<'a> {
    x: &'a [f32],
    rows: usize,
    input: usize,
    part: &'a Part,
    first: usize,
    low: Option<&'a [f32]>,
    out: Tile<'a>,
    scratch: &'a mut Scratch,
}

impl WithSimd for Panel<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, rows, input, part, first, low, mut out, scratch } = self;
        let count = out.width();
        let padded = count.next_multiple_of(GROUP);
        let all = rows.next_multiple_of(S::F32_LANES);
        let blocks = input.div_ceil(INNER).max(1);
        scratch.block.resize((blocks * padded).max(scratch.block.len()), [0.0; INNER]);
        scratch.sums.resize((padded * all).max(scratch.sums.len()), 0.0);
        let (wide, sums) = (&mut scratch.block[..blocks * padded], &mut scratch.sums[..padded * all]);
        let tiles = lane_tiles(rows, S::F32_LANES);
        widen_panel(part, first, count, input, padded, wide);
        for (from, block) in (0..input).step_by(INNER).zip(wide.chunks_exact(padded)) {
            let width = INNER.min(input - from);
            for (tile, lanes) in tiles.clone() {
                let x = &x[tile * input + from * lanes..][..width * lanes];
                multiply(simd, lanes, x, block, &mut sums[tile * padded..][..lanes * padded], from > 0);
            }
        }
        let block = &mut wide[..padded];
        if let (Some(adapter), Some(low)) = (&part.adapter, low) {
            let rank = adapter.rank;
            for from in (0..rank).step_by(INNER) {
                let width = INNER.min(rank - from);
                for (wide, b) in block.iter_mut().zip(adapter.b[first * rank..].chunks_exact(rank)) {
                    wide[..width].copy_from_slice(&b[from..from + width]);
                }
                for (tile, lanes) in tiles.clone() {
                    let low = &low[tile * rank + from * lanes..][..width * lanes];
                    multiply(simd, lanes, low, block, &mut sums[tile * padded..][..lanes * padded], true);
                }
            }
        }
        for (tile, lanes) in tiles {
            let sums = &sums[tile * padded..][..lanes * padded];
            for lane in 0..lanes.min(rows - tile) {
                for (out, sums) in out.row(tile + lane).iter_mut().zip(sums.chunks_exact(lanes)) {
                    *out = sums[lane];
                }
            }
        }
    }
}

/// `count` output rows from `first` on as FP32, block of the inner dimension by block; rows past them are zero.
#[inline(always)]
fn widen_panel(
    part: &Part,
    first: usize,
    count: usize,
    input: usize,
    padded: usize,
    wide: &mut [[f32; INNER]],
) {
    let element = part.tensor.dtype.size();
    for row in 0..padded {
        let start = (first + row) * input * element;
        for (block, from) in (0..input).step_by(INNER).enumerate() {
            let wide = &mut wide[block * padded + row];
            if row >= count {
                wide.fill(0.0);
                continue;
            }
            let width = INNER.min(input - from);
            let bytes = &part.tensor.data[start + from * element..][..width * element];
            widen_bytes(part.tensor.dtype, bytes, &mut wide[..width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use backend::{DType, HostTensor, LowRank, Projection};

    use super::*;

    fn noise(count: usize, mut seed: u64) -> Vec<f32> {
        (0..count)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn tensor(dtype: DType, shape: [usize; 2], values: &[f32]) -> HostTensor {
        let data: Vec<u8> = match dtype {
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::BF16 => {
                values.iter().flat_map(|v| half::bf16::from_f32(*v).to_bits().to_le_bytes()).collect()
            }
        };
        HostTensor { dtype, shape: shape.to_vec(), data: data.into() }
    }

    fn projections(outputs: &[usize], input: usize, rank: usize) -> Vec<Projection> {
        let part = |(index, output): (usize, &usize)| {
            let seed = index as u64;
            Projection {
                weight: tensor(DType::BF16, [*output, input], &noise(output * input, seed)),
                adapter: (rank > 0).then(|| LowRank {
                    a: tensor(DType::F32, [rank, input], &noise(rank * input, 90 + seed)),
                    b: tensor(DType::F32, [*output, rank], &noise(output * rank, 190 + seed)),
                    scale: 2.0,
                }),
            }
        };
        outputs.iter().enumerate().map(part).collect()
    }

    fn run(x: &[f32], weight: &CpuWeight, rows: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows * weight.output];
        linear(&x[..rows * weight.input], weight, &mut out, &mut Vec::new());
        out
    }

    /// The definition at the top of this file, as loops.
    fn defined(x: &[f32], weight: &CpuWeight) -> Vec<f32> {
        let dot = |x: &[f32], w: &[f32], start: Option<f32>| {
            let blocks = x.chunks(INNER).zip(w.chunks(INNER));
            let chains = blocks.map(|(x, w)| x.iter().zip(w).fold(0.0f32, |sum, (x, w)| x.mul_add(*w, sum)));
            start.into_iter().chain(chains).reduce(|sum, chain| sum + chain).unwrap_or(0.0)
        };
        let mut out = Vec::new();
        for part in &weight.parts {
            let w = crate::memory::widen(&part.tensor).unwrap();
            for (row, w) in w.chunks(weight.input).enumerate() {
                let base = dot(x, w, None);
                out.push(match &part.adapter {
                    None => base,
                    Some(adapter) => {
                        let low: Vec<f32> = adapter.a.chunks(weight.input).map(|a| dot(x, a, None)).collect();
                        dot(&low, &adapter.b[row * adapter.rank..][..adapter.rank], Some(base))
                    }
                });
            }
        }
        out
    }

    #[test]
    fn gives_the_bits_of_its_definition_for_any_rows_threads_and_parts() {
        let shapes: [(&[usize], usize, usize); 8] = [
            (&[200, 8, 8], 128, 16),
            (&[300, 7], 700, 16),
            (&[64], 33, 0),
            (&[256, 256], 512, 8),
            (&[1], 1, 1),
            (&[97], 257, 300),
            (&[31], 3584, 16),
            (&[1100], 64, 0),
        ];
        for (outputs, input, rank) in shapes {
            let weight = CpuWeight::new(&projections(outputs, input, rank)).unwrap();
            let most = 1000;
            let x = noise(most * input, 7);
            let sample = [0, 1, 2, 292, 511, 512, 999];
            let all = run(&x, &weight, most);
            for row in sample {
                let expected = defined(&x[row * input..(row + 1) * input], &weight);
                assert!(
                    expected == all[row * weight.output..(row + 1) * weight.output],
                    "{outputs:?} x {input} row {row}"
                );
            }
            for threads in [1, 2, 5] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                for count in [1, 2, 3, 7, 16, 17, 64, 65, 293, 1000] {
                    let first = (most - count) / 2;
                    let some = pool.install(|| run(&x[first * input..], &weight, count));
                    let same = some == all[first * weight.output..(first + count) * weight.output];
                    assert!(same, "{outputs:?} x {input}, {count} rows, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn a_weight_in_parts_gives_the_bits_of_the_whole_and_need_not_be_aligned() {
        let (input, rows) = (300, 9);
        let x = noise(rows * input, 3);
        let whole = noise(209 * input, 5);
        let weight = |cuts: &[usize], dtype, shift: usize| {
            let mut first = 0;
            let parts: Vec<Projection> = cuts
                .iter()
                .map(|count| {
                    let mut part =
                        tensor(dtype, [*count, input], &whole[first * input..(first + count) * input]);
                    let shifted: bytes::Bytes = [&vec![0; shift][..], &part.data[..]].concat().into();
                    part.data = shifted.slice(shift..);
                    first += count;
                    part.into()
                })
                .collect();
            CpuWeight::new(&parts).unwrap()
        };
        for dtype in [DType::BF16, DType::F32] {
            let expected = run(&x, &weight(&[209], dtype, 0), rows);
            for cuts in [&[1usize, 208][..], &[100, 100, 9], &[96, 96, 17]] {
                assert!(run(&x, &weight(cuts, dtype, 1), rows) == expected, "{dtype:?} {cuts:?}");
            }
        }
    }

    #[test]
    fn values_that_are_not_numbers_stay_in_their_row() {
        let weight = CpuWeight::new(&projections(&[40], 64, 4)).unwrap();
        let mut x = noise(3 * 64, 1);
        let clean = run(&x, &weight, 3);
        x[64] = f32::NAN;
        let found = run(&x, &weight, 3);
        assert!(found[..40] == clean[..40] && found[80..] == clean[80..]);
        assert!(found[40..80].iter().all(|x| x.is_nan()));
    }
}
