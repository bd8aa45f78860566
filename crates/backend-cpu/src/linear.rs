//! Owns the matrix products: rows times a weight that stays BF16 in memory. The one file of this crate with unsafe code.
//!
//! A weight is worked through in panels of output rows and blocks of the inner dimension. A panel's block is widened to
//! FP32 in a scratch buffer that fits a core's cache and multiplied with all rows by the `gemm` crate. The inner
//! dimension is cut at the same places for every weight and the blocks are added in order, so the order of additions of
//! a result depends on the weight's shape alone.
#![allow(unsafe_code)] // `gemm` takes raw pointers and strides; every call states why its accesses are in bounds.

use backend::Result;
use gemm::Parallelism;
use rayon::prelude::*;

use crate::memory::{CpuWeight, Part, contract, widen_bytes};

/// Output rows of a panel: a multiple of every register tile of `gemm`.
const PANEL: usize = 192;
/// Inner columns of a block; with a panel, 192 KiB of FP32.
const INNER: usize = 256;
/// Fewer rows are padded to this many: `gemm` treats vectors differently, with another order of additions.
const MIN_ROWS: usize = 4;

/// `out = x weight^T` for `rows` rows, adapters included.
pub(crate) fn linear(x: &[f32], weight: &CpuWeight, rows: usize, out: &mut [f32]) -> Result<()> {
    let (Some(x), Some(out)) = (x.get(..rows * weight.input), out.get_mut(..rows * weight.output)) else {
        return Err(contract("linear", format!("buffers are too small for {rows} rows")));
    };
    if rows >= MIN_ROWS {
        product(x, weight, rows, out);
    } else if rows > 0 {
        let mut padded = x.to_vec();
        padded.resize(MIN_ROWS * weight.input, 0.0);
        let mut wide = vec![0.0; MIN_ROWS * weight.output];
        product(&padded, weight, MIN_ROWS, &mut wide);
        out.copy_from_slice(&wide[..rows * weight.output]);
    }
    Ok(())
}

/// One panel of a part and where its columns go.
struct Job<'a> {
    part: &'a Part,
    first: usize,
    column: usize,
    low: Option<&'a [f32]>,
}

/// The output, written by several threads at disjoint columns.
#[derive(Clone, Copy)]
struct Output {
    start: *mut f32,
    stride: usize,
}

// SAFETY: jobs write disjoint columns of one exclusively borrowed slice, and none reads what another writes.
unsafe impl Send for Output {}
// SAFETY: as above; the pointer itself is only copied.
unsafe impl Sync for Output {}

fn product(x: &[f32], weight: &CpuWeight, rows: usize, out: &mut [f32]) {
    let x = &transposed(x, weight.input, rows)[..];
    let lows: Vec<Option<Vec<f32>>> =
        weight.parts.iter().map(|part| low_rank(x, weight.input, part, rows)).collect();
    let mut jobs = Vec::new();
    let mut column = 0;
    for (part, low) in weight.parts.iter().zip(&lows) {
        jobs.extend((0..part.rows).step_by(PANEL).map(|first| Job {
            part,
            first,
            column: column + first,
            low: low.as_deref(),
        }));
        column += part.rows;
    }
    let output = Output { start: out.as_mut_ptr(), stride: weight.output };
    jobs.par_iter().with_max_len(1).for_each_init(
        || vec![0f32; PANEL * INNER],
        |scratch, job| panel(x, weight.input, job, rows, scratch, output),
    );
}

/// `[rows, width]` as `[width, rows]`. With both operands contiguous along the inner dimension `gemm` may take dot
/// products of another order for small products; with this one it never does.
fn transposed(x: &[f32], width: usize, rows: usize) -> Vec<f32> {
    let mut turned = vec![0.0; width * rows];
    turned.par_chunks_mut(rows * 64).enumerate().for_each(|(block, turned)| {
        for (offset, column) in turned.chunks_exact_mut(rows).enumerate() {
            for (row, value) in column.iter_mut().enumerate() {
                *value = x[row * width + block * 64 + offset];
            }
        }
    });
    turned
}

/// `A x^T` `[rank, rows]` of a part's adapter, from `x` turned.
fn low_rank(x: &[f32], input: usize, part: &Part, rows: usize) -> Option<Vec<f32>> {
    let adapter = part.adapter.as_ref()?;
    let mut low = vec![0.0; rows * adapter.rank];
    for from in (0..input).step_by(INNER) {
        let to = input.min(from + INNER);
        let a = Matrix { start: adapter.a[from..].as_ptr(), stride: input };
        let x = Matrix { start: x[from * rows..].as_ptr(), stride: rows };
        let target = Output { start: low.as_mut_ptr(), stride: adapter.rank };
        // SAFETY: A is `[rank, input]` read at columns `from..to`, x `[input, rows]` read at those rows; `low` is
        // `[rows, rank]`.
        unsafe { multiply_add(adapter.rank, rows, to - from, a, x, target, from > 0) };
    }
    Some(transposed(&low, adapter.rank, rows))
}

fn panel(x: &[f32], input: usize, job: &Job<'_>, rows: usize, scratch: &mut [f32], output: Output) {
    let count = PANEL.min(job.part.rows - job.first);
    let element = job.part.tensor.dtype.size();
    // SAFETY: `column + count` is at most the output's stride, so the panel's first element lies inside the first row.
    let target = Output { start: unsafe { output.start.add(job.column) }, ..output };
    for from in (0..input).step_by(INNER) {
        let to = input.min(from + INNER);
        let width = to - from;
        let dtype = job.part.tensor.dtype;
        pulp::Arch::new().dispatch(|| {
            for (row, wide) in scratch.chunks_exact_mut(width).take(count).enumerate() {
                let start = ((job.first + row) * input + from) * element;
                widen_bytes(dtype, &job.part.tensor.data[start..start + width * element], wide);
            }
        });
        let w = Matrix { start: scratch.as_ptr(), stride: width };
        let x = Matrix { start: x[from * rows..].as_ptr(), stride: rows };
        // SAFETY: the scratch holds `[count, width]`; x is `[input, rows]` read at rows `from..to`; the target is
        // `count` columns of `rows` rows of the output.
        unsafe { multiply_add(count, rows, width, w, x, target, from > 0) };
    }
    if let (Some(adapter), Some(low)) = (&job.part.adapter, job.low) {
        let b = Matrix { start: adapter.b[job.first * adapter.rank..].as_ptr(), stride: adapter.rank };
        let x = Matrix { start: low.as_ptr(), stride: rows };
        // SAFETY: B holds `count` rows of `rank` from `first` on; `low` is `[rank, rows]`; the target as above.
        unsafe { multiply_add(count, rows, adapter.rank, b, x, target, true) };
    }
}

/// A row-major matrix whose rows lie `stride` apart.
struct Matrix {
    start: *const f32,
    stride: usize,
}

/// `out[r, c] (+)= sum_k w[c, k] x[k, r]` for `columns` c, `rows` r.
///
/// # Safety
/// `w` must be readable as `[columns, inner]`, `x` as `[inner, rows]`, `out` writable as `[rows, columns]`, each with its
/// stride, and no other thread may touch those elements of `out`.
unsafe fn multiply_add(
    columns: usize,
    rows: usize,
    inner: usize,
    w: Matrix,
    x: Matrix,
    out: Output,
    add: bool,
) {
    // SAFETY: the caller's promise, in `gemm`'s terms: the destination is `[columns, rows]` with unit row stride.
    unsafe {
        gemm::gemm(
            columns,
            rows,
            inner,
            out.start,
            out.stride as isize,
            1,
            add,
            w.start,
            1,
            w.stride as isize,
            x.start,
            1,
            x.stride as isize,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            Parallelism::None,
        );
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

    fn weight(outputs: &[usize], input: usize, adapted: bool) -> CpuWeight {
        let parts: Vec<Projection> = outputs
            .iter()
            .enumerate()
            .map(|(index, output)| Projection {
                weight: tensor(DType::BF16, [*output, input], &noise(output * input, index as u64)),
                adapter: adapted.then(|| LowRank {
                    a: tensor(DType::F32, [16, input], &noise(16 * input, 90 + index as u64)),
                    b: tensor(DType::F32, [*output, 16], &noise(output * 16, 190 + index as u64)),
                    scale: 2.0,
                }),
            })
            .collect();
        CpuWeight::new(&parts).unwrap()
    }

    #[test]
    fn a_row_has_the_same_bits_among_any_number_of_rows_and_threads() {
        for (outputs, input) in
            [(&[200usize, 8, 8][..], 128usize), (&[300, 7], 700), (&[64], 33), (&[256, 256], 512)]
        {
            let weight = weight(outputs, input, true);
            let rows = 293;
            let x = noise(rows * input, 7);
            let mut all = vec![0.0; rows * weight.output];
            linear(&x, &weight, rows, &mut all).unwrap();
            for threads in [1, 2, 5] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                for count in [1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 65, 128, 200, 293] {
                    let first = (rows - count) / 2;
                    let mut some = vec![f32::NAN; count * weight.output];
                    pool.install(|| {
                        linear(&x[first * input..(first + count) * input], &weight, count, &mut some)
                    })
                    .unwrap();
                    let same = some == all[first * weight.output..(first + count) * weight.output];
                    assert!(same, "{outputs:?} x {input}, {count} rows, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn agrees_with_fp64() {
        let (outputs, input, rows) = ([201, 8], 300, 9);
        for adapted in [false, true] {
            let weight = weight(&outputs, input, adapted);
            let x = noise(rows * input, 3);
            let mut out = vec![f32::NAN; rows * weight.output];
            linear(&x, &weight, rows, &mut out).unwrap();
            let mut column = 0;
            for part in &weight.parts {
                let w = crate::memory::widen(&part.tensor).unwrap();
                for row in 0..rows {
                    for o in 0..part.rows {
                        let mut exact = 0f64;
                        for i in 0..input {
                            let mut total = f64::from(w[o * input + i]);
                            if let Some(adapter) = &part.adapter {
                                for r in 0..adapter.rank {
                                    total += f64::from(adapter.b[o * adapter.rank + r])
                                        * f64::from(adapter.a[r * input + i]);
                                }
                            }
                            exact += total * f64::from(x[row * input + i]);
                        }
                        let found = f64::from(out[row * weight.output + column + o]);
                        // 300 FP32 additions of terms up to 33 in size.
                        assert!((found - exact).abs() < 2e-3, "{found} {exact}");
                    }
                }
                column += part.rows;
            }
        }
    }
}
