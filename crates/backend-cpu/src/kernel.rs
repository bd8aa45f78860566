//! Owns the inner products of blocks: lanes are rows of the batch (or queries), so a row's arithmetic is its lane's alone,
//! whatever the other lanes hold. Knows no weight, thread or shape beyond a block.
//!
//! The sum over a block of the inner dimension is one chain of fused multiply-adds in order, on every machine.

use pulp::Simd;

/// Inner columns of a block: sums restart here, so that a long product is a short sum of short sums.
pub(crate) const INNER: usize = 128;
/// Rows of a weight must come in multiples of this for [`multiply`].
pub(crate) const GROUP: usize = 12;
/// Rows (or columns) must come in multiples of this for [`scores`] and [`weighted_sums`].
pub(crate) const NARROW: usize = 8;

/// Lanes of a tile, at most: two vectors of this machine.
pub(crate) fn tile_lanes<S: Simd>() -> usize {
    2 * S::F32_LANES
}

/// The rows of a batch as tiles of lanes: pairs of vectors, then one vector if that is enough. A tile is its first lane and
/// its number of lanes; a matrix `[n, rows]` is kept tile by tile as `[n, lanes]`, from `first * n` on.
pub(crate) fn lane_tiles(rows: usize, vector: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    let padded = rows.next_multiple_of(vector);
    (0..padded).step_by(2 * vector).map(move |first| (first, (padded - first).min(2 * vector)))
}

/// `out[c][lane] (+)= sum_k x[k][lane] * w[c][k]` for all rows `c` of `w`, over `x.len() / lanes` values of k.
///
/// `x` is `[k, lanes]` with one or two vectors of lanes, `w` a multiple of [`GROUP`] rows, `out` `[w.len(), lanes]`.
#[inline(always)]
pub(crate) fn multiply<S: Simd>(
    simd: S,
    lanes: usize,
    x: &[f32],
    w: &[[f32; INNER]],
    out: &mut [f32],
    add: bool,
) {
    // As many sums as registers hold beside the operands.
    match (S::REGISTER_COUNT >= 32, lanes > S::F32_LANES) {
        (true, true) => rows::<S, 12, 2>(simd, x, w, out, add),
        (true, false) => rows::<S, 12, 1>(simd, x, w, out, add),
        (false, true) => rows::<S, 6, 2>(simd, x, w, out, add),
        (false, false) => rows::<S, 6, 1>(simd, x, w, out, add),
    }
}

/// As [`multiply`], for keys: a multiple of [`NARROW`] rows.
#[inline(always)]
pub(crate) fn scores<S: Simd>(
    simd: S,
    lanes: usize,
    x: &[f32],
    keys: &[[f32; INNER]],
    out: &mut [f32],
    add: bool,
) {
    match (S::REGISTER_COUNT >= 32, lanes > S::F32_LANES) {
        (true, true) => rows::<S, 8, 2>(simd, x, keys, out, add),
        (true, false) => rows::<S, 8, 1>(simd, x, keys, out, add),
        (false, true) => rows::<S, 4, 2>(simd, x, keys, out, add),
        (false, false) => rows::<S, 4, 1>(simd, x, keys, out, add),
    }
}

/// `out[c][lane] = out[c][lane] * factor[lane] + sum_k x[k][lane] * w[k][c]` for the [`NARROW`] columns `c` of `w`.
///
/// `x` is `[k, lanes]`, `factor` `[lanes]`, `out` `[NARROW, lanes]`.
#[inline(always)]
pub(crate) fn weighted_sums<S: Simd>(
    simd: S,
    lanes: usize,
    x: &[f32],
    w: &[[f32; NARROW]],
    factor: &[f32],
    out: &mut [f32],
) {
    match (S::REGISTER_COUNT >= 32, lanes > S::F32_LANES) {
        (true, true) => columns::<S, 8, 2>(simd, x, w, factor, out),
        (true, false) => columns::<S, 8, 1>(simd, x, w, factor, out),
        (false, true) => columns::<S, 4, 2>(simd, x, w, factor, out),
        (false, false) => columns::<S, 4, 1>(simd, x, w, factor, out),
    }
}

#[inline(always)]
fn rows<S: Simd, const C: usize, const V: usize>(
    simd: S,
    x: &[f32],
    w: &[[f32; INNER]],
    out: &mut [f32],
    add: bool,
) {
    let x = vectors::<S, V>(x);
    let (out, _) = vectors_mut::<S, V>(out).as_chunks_mut::<C>();
    let (w, _) = w.as_chunks::<C>();
    for (w, out) in w.iter().zip(out) {
        let mut sums = [[simd.splat_f32s(0.0); V]; C];
        for (k, x) in x.iter().take(INNER).enumerate() {
            for c in 0..C {
                let w = simd.splat_f32s(w[c][k]);
                for v in 0..V {
                    sums[c][v] = simd.mul_add_f32s(x[v], w, sums[c][v]);
                }
            }
        }
        for c in 0..C {
            for v in 0..V {
                out[c][v] = if add { simd.add_f32s(out[c][v], sums[c][v]) } else { sums[c][v] };
            }
        }
    }
}

#[inline(always)]
fn columns<S: Simd, const C: usize, const V: usize>(
    simd: S,
    x: &[f32],
    w: &[[f32; NARROW]],
    factor: &[f32],
    out: &mut [f32],
) {
    let x = vectors::<S, V>(x);
    let (out, _) = vectors_mut::<S, V>(out).as_chunks_mut::<C>();
    let Some(factor) = vectors::<S, V>(factor).first() else { return };
    for (part, out) in out.iter_mut().enumerate() {
        let mut sums = [[simd.splat_f32s(0.0); V]; C];
        for (x, w) in x.iter().zip(w) {
            let (w, _) = w.as_chunks::<C>();
            let Some(w) = w.get(part) else { return };
            for c in 0..C {
                let w = simd.splat_f32s(w[c]);
                for v in 0..V {
                    sums[c][v] = simd.mul_add_f32s(x[v], w, sums[c][v]);
                }
            }
        }
        for c in 0..C {
            for v in 0..V {
                out[c][v] = simd.mul_add_f32s(out[c][v], factor[v], sums[c][v]);
            }
        }
    }
}

#[inline(always)]
fn vectors<S: Simd, const V: usize>(x: &[f32]) -> &[[S::f32s; V]] {
    bytemuck::cast_slice::<f32, S::f32s>(x).as_chunks::<V>().0
}

#[inline(always)]
fn vectors_mut<S: Simd, const V: usize>(x: &mut [f32]) -> &mut [[S::f32s; V]] {
    bytemuck::cast_slice_mut::<f32, S::f32s>(x).as_chunks_mut::<V>().0
}
