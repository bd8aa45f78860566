//! Owns the delta rule of the DeltaNet mixer, its gates and its gated norm. The state goes from token to token in order, so
//! a segment split anywhere gives the same bits.

use std::cell::RefCell;

use backend::{DeltaNet, Segment};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::layout::CpuLayout;
use crate::math::{dot, exp, inverse_rms, sigmoid, silu, softplus};
use crate::tiles::{Tile, grid};

/// Tokens that a block of columns runs through before the next block does.
const TOKENS: usize = 64;
/// Added to a squared norm before its root; a constant of the model, not its RMS epsilon.
const L2_EPS: f32 = 1e-6;

/// Per row: beta of every value head, then decay of every value head.
pub(crate) fn gates(projected: &[f32], a_log: &[f32], dt_bias: &[f32], shape: &DeltaNet, gates: &mut [f32]) {
    let (width, heads) = (shape.projected_width(), shape.value_heads);
    let rates: Vec<f32> = a_log.iter().map(|a_log| -a_log.exp()).collect();
    gates.par_chunks_mut(2 * heads).zip(projected.par_chunks(width)).with_min_len(32).for_each(
        |(gates, row)| {
            let (b, a) = row[width - 2 * heads..].split_at(heads);
            let (betas, decays) = gates.split_at_mut(heads);
            betas.iter_mut().zip(b).for_each(|(beta, b)| *beta = sigmoid(*b));
            for (((decay, a), rate), bias) in decays.iter_mut().zip(a).zip(&rates).zip(dt_bias) {
                *decay = rate * softplus(a + bias);
            }
        },
    );
}

/// `o = weight * (o / rms(o)) * silu(z)` per value head.
pub(crate) fn gated_rms_norm(o: &mut [f32], projected: &[f32], weight: &[f32], eps: f32, shape: &DeltaNet) {
    let (width, dim, first) = (shape.projected_width(), shape.value_dim, shape.conv_dim());
    o.par_chunks_mut(shape.value_width()).zip(projected.par_chunks(width)).for_each(|(o, row)| {
        let heads = o.chunks_exact_mut(dim).zip(row[first..].chunks_exact(dim));
        heads.for_each(|(o, z)| Arch::new().dispatch(GatedNorm { o, z, weight, eps }));
    });
}

/// One head of a row.
struct GatedNorm<'a> {
    o: &'a mut [f32],
    z: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl WithSimd for GatedNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let scale = inverse_rms(self.o, self.eps);
        for ((o, z), weight) in self.o.iter_mut().zip(self.z).zip(self.weight) {
            *o = weight * (*o * scale) * silu(*z);
        }
    }
}

/// The gated delta rule of every segment and value head, level by level.
pub(crate) fn rule(
    qkv: &[f32],
    gates: &[f32],
    shape: &DeltaNet,
    layout: &CpuLayout,
    states: &mut [f32],
    out: &mut [f32],
) {
    let (heads, width) = (shape.value_heads, shape.value_width());
    let size = shape.key_dim * shape.value_dim;
    for level in layout.levels() {
        let span = CpuLayout::level_rows(level);
        let rows = &mut out[span.start * width..span.end * width];
        let tiles =
            grid(rows, width, level.iter().map(|segment| segment.rows.len()), vec![shape.value_dim; heads]);
        let before: &[f32] = states;
        let jobs = tiles.into_par_iter().enumerate().with_max_len(1);
        let kept: Vec<Option<Vec<f32>>> = jobs
            .map(|(job, mut out)| {
                let (segment, head) = (&level[job / heads], job % heads);
                let initial = segment.initial.map(|slot| &before[(slot * heads + head) * size..][..size]);
                let job = Job { qkv, gates, shape, segment, head };
                SCRATCH.with_borrow_mut(|scratch| {
                    Arch::new().dispatch(HeadRule { job: &job, initial, out: &mut out, scratch })
                })
            })
            .collect();
        for (job, state) in kept.into_iter().enumerate() {
            if let (Some(slot), Some(state)) = (level[job / heads].last, state) {
                states[(slot * heads + job % heads) * size..][..size].copy_from_slice(&state);
            }
        }
    }
}

thread_local! {
    /// A head's state and some tokens' queries and keys: 130 KiB for heads of 128, made once a thread.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    /// The state, block of columns by block: `[key_dim, two vectors]` each, zero past the last column. A block of heads of
    /// 128 takes 16 KiB at most, so it stays in the first-level cache while tokens go by.
    state: Vec<f32>,
    /// Normalised `[TOKENS, key_dim]`.
    queries: Vec<f32>,
    keys: Vec<f32>,
}

/// One head of one segment.
struct Job<'a> {
    qkv: &'a [f32],
    gates: &'a [f32],
    shape: &'a DeltaNet,
    segment: &'a Segment,
    head: usize,
}

/// Runs a head through its segment; returns the final state if the segment keeps it.
struct HeadRule<'a, 'b> {
    job: &'a Job<'a>,
    initial: Option<&'a [f32]>,
    out: &'a mut Tile<'b>,
    scratch: &'a mut Scratch,
}

impl WithSimd for HeadRule<'_, '_> {
    type Output = Option<Vec<f32>>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Option<Vec<f32>> {
        let Self { job, initial, out, scratch } = self;
        let (dk, dv, columns) = (job.shape.key_dim, job.shape.value_dim, 2 * S::F32_LANES);
        let Scratch { state, queries, keys } = scratch;
        state.clear();
        state.resize(dv.next_multiple_of(columns) * dk, 0.0);
        for (from, block) in (0..dv).step_by(columns).zip(state.chunks_exact_mut(dk * columns)) {
            let initial = initial.into_iter().flat_map(|state| state.chunks_exact(dv));
            for (line, initial) in block.chunks_exact_mut(columns).zip(initial) {
                let initial = &initial[from..dv.min(from + columns)];
                line[..initial.len()].copy_from_slice(initial);
            }
        }
        queries.resize(TOKENS * dk, 0.0);
        keys.resize(TOKENS * dk, 0.0);
        for first in (0..job.segment.rows.len()).step_by(TOKENS) {
            let count = TOKENS.min(job.segment.rows.len() - first);
            job.normalise(first, count, queries, keys);
            for (from, block) in (0..dv).step_by(columns).zip(state.chunks_exact_mut(dk * columns)) {
                let (lines, _) = bytemuck::cast_slice_mut::<f32, S::f32s>(block).as_chunks_mut();
                for (t, (query, key)) in
                    queries.chunks_exact(dk).zip(keys.chunks_exact(dk)).take(count).enumerate()
                {
                    job.token(simd, first + t, from, query, key, lines, out);
                }
            }
        }
        job.segment.last?;
        let mut kept = vec![0.0; dk * dv];
        for (from, block) in (0..dv).step_by(columns).zip(state.chunks_exact(dk * columns)) {
            for (kept, line) in kept.chunks_exact_mut(dv).zip(block.chunks_exact(columns)) {
                let kept = &mut kept[from..dv.min(from + columns)];
                kept.copy_from_slice(&line[..kept.len()]);
            }
        }
        Some(kept)
    }
}

impl Job<'_> {
    /// Queries and keys of `count` tokens from the segment's `first` on, of length 1 and the queries scaled.
    #[inline(always)]
    fn normalise(&self, first: usize, count: usize, queries: &mut [f32], keys: &mut [f32]) {
        let (dk, width) = (self.shape.key_dim, self.shape.conv_dim());
        let head = self.head / (self.shape.value_heads / self.shape.key_heads);
        let scale = 1.0 / (dk as f32).sqrt();
        let tokens = queries.chunks_exact_mut(dk).zip(keys.chunks_exact_mut(dk)).take(count);
        for (t, (query, key)) in tokens.enumerate() {
            let row = &self.qkv[(self.segment.rows.start + first + t) * width..][..width];
            let q = &row[head * dk..][..dk];
            let k = &row[(self.shape.key_heads + head) * dk..][..dk];
            let q_norm = 1.0 / (dot(q, q) + L2_EPS).sqrt() * scale;
            let k_norm = 1.0 / (dot(k, k) + L2_EPS).sqrt();
            query.iter_mut().zip(q).for_each(|(query, q)| *query = q * q_norm);
            key.iter_mut().zip(k).for_each(|(key, k)| *key = k * k_norm);
        }
    }

    /// A token of the segment on a block of columns from `column` on, `lines` `[key_dim]`: columns never meet, so every
    /// block runs through the tokens by itself.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // The operands of the rule's inner loop.
    fn token<S: Simd>(
        &self,
        simd: S,
        token: usize,
        column: usize,
        query: &[f32],
        key: &[f32],
        lines: &mut [[S::f32s; 2]],
        out: &mut Tile<'_>,
    ) {
        let (dk, dv, heads) = (self.shape.key_dim, self.shape.value_dim, self.shape.value_heads);
        let row = self.segment.rows.start + token;
        let gates = &self.gates[row * 2 * heads..(row + 1) * 2 * heads];
        let beta = simd.splat_f32s(gates[self.head]);
        let seen = decay_and_see(simd, lines, exp(gates[heads + self.head]), key);
        let first = row * self.shape.conv_dim() + 2 * self.shape.key_heads * dk + self.head * dv + column;
        let n = (dv - column).min(2 * S::F32_LANES);
        let mut value = [simd.splat_f32s(0.0); 2];
        bytemuck::cast_slice_mut::<S::f32s, f32>(&mut value)[..n]
            .copy_from_slice(&self.qkv[first..first + n]);
        let error = [0, 1].map(|v| simd.mul_f32s(beta, simd.sub_f32s(value[v], seen[v])));
        let result = write_and_read(simd, lines, error, key, query);
        let result = bytemuck::cast_slice::<S::f32s, f32>(&result);
        out.row(token)[column..column + n].copy_from_slice(&result[..n]);
    }
}

/// `S <- decay S`, returns `S^T k`: lines of even and of odd index each in a chain of their own, so that one need not wait
/// for the other.
#[inline(always)]
fn decay_and_see<S: Simd>(simd: S, lines: &mut [[S::f32s; 2]], decay: f32, key: &[f32]) -> [S::f32s; 2] {
    let decay = simd.splat_f32s(decay);
    let mut sums = [[simd.splat_f32s(0.0); 2]; 2];
    let (pairs, last) = lines.as_chunks_mut::<2>();
    let (keys, last_key) = key.as_chunks::<2>();
    for (pair, key) in pairs.iter_mut().zip(keys) {
        for p in 0..2 {
            let k = simd.splat_f32s(key[p]);
            for v in 0..2 {
                pair[p][v] = simd.mul_f32s(pair[p][v], decay);
                sums[p][v] = simd.mul_add_f32s(pair[p][v], k, sums[p][v]);
            }
        }
    }
    for (line, key) in last.iter_mut().zip(last_key) {
        for v in 0..2 {
            line[v] = simd.mul_f32s(line[v], decay);
            sums[0][v] = simd.mul_add_f32s(line[v], simd.splat_f32s(*key), sums[0][v]);
        }
    }
    [0, 1].map(|v| simd.add_f32s(sums[0][v], sums[1][v]))
}

/// `S <- S + k e^T`, returns `S^T q`, in the chains of [`decay_and_see`].
#[inline(always)]
fn write_and_read<S: Simd>(
    simd: S,
    lines: &mut [[S::f32s; 2]],
    error: [S::f32s; 2],
    key: &[f32],
    query: &[f32],
) -> [S::f32s; 2] {
    let mut sums = [[simd.splat_f32s(0.0); 2]; 2];
    let (pairs, last) = lines.as_chunks_mut::<2>();
    let ((keys, last_key), (queries, last_query)) = (key.as_chunks::<2>(), query.as_chunks::<2>());
    for ((pair, key), query) in pairs.iter_mut().zip(keys).zip(queries) {
        for p in 0..2 {
            let (k, q) = (simd.splat_f32s(key[p]), simd.splat_f32s(query[p]));
            for v in 0..2 {
                pair[p][v] = simd.mul_add_f32s(error[v], k, pair[p][v]);
                sums[p][v] = simd.mul_add_f32s(pair[p][v], q, sums[p][v]);
            }
        }
    }
    for ((line, key), query) in last.iter_mut().zip(last_key).zip(last_query) {
        for v in 0..2 {
            line[v] = simd.mul_add_f32s(error[v], simd.splat_f32s(*key), line[v]);
            sums[0][v] = simd.mul_add_f32s(line[v], simd.splat_f32s(*query), sums[0][v]);
        }
    }
    [0, 1].map(|v| simd.add_f32s(sums[0][v], sums[1][v]))
}
