//! Owns the operations that stay within a row: embedding, norms, the MLP's product, gathering of rows.

use backend::Result;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::layout::CpuLayout;
use crate::math::{rms_norm, silu};
use crate::memory::{CpuWeight, contract, widen_bytes};

/// Rows of a job, at least: less work than this is not worth another thread.
const ROWS: usize = 8;

/// `out[r] = table[tokens[r]]`.
pub(crate) fn embed(table: &CpuWeight, layout: &CpuLayout, out: &mut [f32]) -> Result<()> {
    let [part] = &table.parts[..] else { return Err(contract("embed", "a table has one part")) };
    if part.adapter.is_some() {
        return Err(contract("embed", "a table has no adapter"));
    }
    if let Some(token) = layout.pass.tokens.iter().find(|token| **token as usize >= table.output) {
        return Err(contract("embed", format!("token {token} of a vocabulary of {}", table.output)));
    }
    let bytes = table.input * part.tensor.dtype.size();
    let rows = out.par_chunks_mut(table.input).zip(&layout.pass.tokens).with_min_len(ROWS);
    rows.for_each(|(out, token)| {
        let start = *token as usize * bytes;
        let row = &part.tensor.data[start..start + bytes];
        widen_bytes(part.tensor.dtype, row, out);
    });
    Ok(())
}

/// RMSNorm of every row.
pub(crate) fn norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    let rows = out.par_chunks_mut(width).zip(x.par_chunks(width)).with_min_len(ROWS);
    rows.for_each(|(out, x)| Arch::new().dispatch(Norm { x, weight, eps, out }));
}

/// `residual += delta`, then RMSNorm of every row of it.
pub(crate) fn add_norm(residual: &mut [f32], delta: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    let inputs = residual.par_chunks_mut(width).zip(delta.par_chunks(width));
    inputs.zip(out.par_chunks_mut(width)).with_min_len(ROWS).for_each(|((residual, delta), out)| {
        residual.iter_mut().zip(delta).for_each(|(residual, delta)| *residual += delta);
        Arch::new().dispatch(Norm { x: residual, weight, eps, out });
    });
}

/// One row. Bodies are given to the dispatcher as types, because a closure is inlined into vector code only if it is small.
struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl WithSimd for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        rms_norm(self.x, self.weight, self.eps, self.out);
    }
}

/// `out = silu(gate) * up` of every row.
pub(crate) fn swiglu(gate_up: &[f32], inner: usize, out: &mut [f32]) {
    out.par_chunks_mut(inner).zip(gate_up.par_chunks(2 * inner)).for_each(|(out, gate_up)| {
        let (gate, up) = gate_up.split_at(inner);
        Arch::new().dispatch(GatedProduct { gate, up, out });
    });
}

struct GatedProduct<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for GatedProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for ((out, gate), up) in self.out.iter_mut().zip(self.gate).zip(self.up) {
            *out = silu(*gate) * up;
        }
    }
}

/// Copies the readout rows in order.
pub(crate) fn gather(x: &[f32], width: usize, layout: &CpuLayout, out: &mut [f32]) {
    for (row, out) in layout.readout_rows().zip(out.chunks_exact_mut(width)) {
        out.copy_from_slice(&x[row * width..(row + 1) * width]);
    }
}
