//! Owns what full attention reads: per-head norms, rotary embedding, and the rows of the key arena.

use backend::Attention;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::layout::CpuLayout;
use crate::math::rms_norm;

/// Operands of [`query_key_value`] that it only reads.
pub(crate) struct Projections<'a> {
    pub(crate) projected: &'a [f32],
    pub(crate) query_norm: &'a [f32],
    pub(crate) key_norm: &'a [f32],
    pub(crate) eps: f32,
}

/// Norms and rotates queries and keys; keys and values go to their rows of the key arena.
pub(crate) fn query_key_value(
    from: &Projections<'_>,
    shape: &Attention,
    layout: &CpuLayout,
    query: &mut [f32],
    keys: &mut [f32],
    values: &mut [f32],
) {
    let (width, dim) = (shape.projected_width(), shape.head_dim);
    query.par_chunks_mut(shape.heads * dim).enumerate().for_each(|(row, query)| {
        let projected = &from.projected[row * width..(row + 1) * width];
        for (out, head) in query.chunks_exact_mut(dim).zip(projected.chunks_exact(2 * dim)) {
            let (x, norm, eps, table) = (&head[..dim], from.query_norm, from.eps, layout.table(row));
            Arch::new().dispatch(Head { x, norm, eps, table, out });
        }
    });
    // Key rows lie anywhere in the arena; a key is a quarter of a query or less, so one thread does.
    let kv_width = shape.kv_heads * dim;
    for (row, own) in layout.own_keys.iter().enumerate() {
        let projected = &from.projected[row * width + 2 * shape.heads * dim..(row + 1) * width];
        let (key, value) = projected.split_at(kv_width);
        let place = keys[own * kv_width..(own + 1) * kv_width].chunks_exact_mut(dim);
        for (out, x) in place.zip(key.chunks_exact(dim)) {
            let (norm, eps, table) = (from.key_norm, from.eps, layout.table(row));
            Arch::new().dispatch(Head { x, norm, eps, table, out });
        }
        values[own * kv_width..(own + 1) * kv_width].copy_from_slice(value);
    }
}

/// RMSNorm of a head, then rotation of its first dimensions: pairs `(j, j + half)`.
struct Head<'a> {
    x: &'a [f32],
    norm: &'a [f32],
    eps: f32,
    /// Cosines and sines.
    table: (&'a [f32], &'a [f32]),
    out: &'a mut [f32],
}

impl WithSimd for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { x, norm, eps, table: (cos, sin), out } = self;
        rms_norm(x, norm, eps, out);
        let (low, rest) = out.split_at_mut(cos.len());
        for (((x, y), cos), sin) in low.iter_mut().zip(rest).zip(cos).zip(sin) {
            (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
        }
    }
}
