//! Owns full attention: per-head norms and rotary embedding, and softmax attention over a segment's keys in the order of
//! their positions, whatever ranges they lie in.

use backend::{Attention, KeyRange, Result};
use rayon::prelude::*;

use crate::elementwise::{dot, rms_norm, sigmoid};
use crate::memory::CpuLayout;

/// Query rows that share one walk over the keys.
const ROWS: usize = 8;

/// Rotates the first dimensions of a head: pairs `(j, j + half)`, half-split.
#[inline(always)]
fn rotate(head: &mut [f32], table: &[f32]) {
    let half = table.len() / 2;
    for j in 0..half {
        let (cos, sin) = (table[j], table[half + j]);
        let (x, y) = (head[j], head[j + half]);
        head[j] = x * cos - y * sin;
        head[j + half] = y * cos + x * sin;
    }
}

/// Operands of [`query_key_value`].
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
    let kv_width = shape.kv_heads * dim;
    let table_width = shape.rotary_dim;
    query.par_chunks_mut(shape.heads * dim).enumerate().for_each(|(row, query)| {
        let projected = &from.projected[row * width..(row + 1) * width];
        let table = &layout.rotary[row * table_width..(row + 1) * table_width];
        for (head, query) in query.chunks_exact_mut(dim).enumerate() {
            rms_norm(&projected[2 * head * dim..(2 * head + 1) * dim], from.query_norm, from.eps, query);
            rotate(query, table);
        }
    });
    for (row, key_row) in layout.key_rows.iter().enumerate() {
        let projected = &from.projected[row * width + 2 * shape.heads * dim..(row + 1) * width];
        let table = &layout.rotary[row * table_width..(row + 1) * table_width];
        let key = &mut keys[key_row * kv_width..(key_row + 1) * kv_width];
        for (head, key) in key.chunks_exact_mut(dim).enumerate() {
            rms_norm(&projected[head * dim..(head + 1) * dim], from.key_norm, from.eps, key);
            rotate(key, table);
        }
        values[key_row * kv_width..(key_row + 1) * kv_width]
            .copy_from_slice(&projected[kv_width..2 * kv_width]);
    }
}

/// Some consecutive rows of a segment and where their output goes.
struct Job<'a> {
    first: usize,
    position: usize,
    ranges: &'a [KeyRange],
    out: &'a mut [f32],
}

/// Causal attention of every row, gated.
pub(crate) fn attention(
    query: &[f32],
    projected: &[f32],
    keys: &[f32],
    values: &[f32],
    shape: &Attention,
    layout: &CpuLayout,
    out: &mut [f32],
) -> Result<()> {
    let row_width = shape.heads * shape.head_dim;
    let mut jobs = Vec::new();
    let mut rest = out;
    for segment in &layout.pass.segments {
        for first in segment.rows.clone().step_by(ROWS) {
            let count = ROWS.min(segment.rows.end - first);
            let (out, after) = rest.split_at_mut(count * row_width);
            rest = after;
            jobs.push(Job {
                first,
                position: segment.position + first - segment.rows.start,
                ranges: &segment.keys,
                out,
            });
        }
    }
    jobs.par_iter_mut().with_max_len(1).for_each_init(Vec::new, |scores, job| {
        pulp::Arch::new().dispatch(|| attend(query, keys, values, shape, job, scores));
        for (offset, out) in job.out.chunks_exact_mut(row_width).enumerate() {
            let row = (job.first + offset) * shape.projected_width();
            for (head, out) in out.chunks_exact_mut(shape.head_dim).enumerate() {
                let gate = &projected[row + (2 * head + 1) * shape.head_dim..][..shape.head_dim];
                for (out, gate) in out.iter_mut().zip(gate) {
                    *out *= sigmoid(*gate);
                }
            }
        }
    });
    Ok(())
}

#[inline(always)]
fn attend(
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    shape: &Attention,
    job: &mut Job<'_>,
    scores: &mut Vec<f32>,
) {
    let (dim, heads) = (shape.head_dim, shape.heads);
    let kv_width = shape.kv_heads * dim;
    let group = heads / shape.kv_heads;
    let rows = job.out.len() / (heads * dim);
    let visible = job.position + rows;
    let scale = 1.0 / (dim as f32).sqrt();
    for kv_head in 0..shape.kv_heads {
        // Scores of this head's queries, `[rows * group, visible]`.
        scores.clear();
        scores.resize(rows * group * visible, f32::NEG_INFINITY);
        for (index, key_row) in key_rows(job.ranges).take(visible).enumerate() {
            let key = &keys[key_row * kv_width + kv_head * dim..][..dim];
            for row in index.saturating_sub(job.position)..rows {
                for g in 0..group {
                    let start = ((job.first + row) * heads + kv_head * group + g) * dim;
                    scores[(row * group + g) * visible + index] =
                        dot(&query[start..start + dim], key) * scale;
                }
            }
        }
        for row in 0..rows {
            let seen = job.position + row + 1;
            for g in 0..group {
                let scores = &mut scores[(row * group + g) * visible..][..seen];
                let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut total = 0.0;
                for score in scores.iter_mut() {
                    *score = (*score - top).exp();
                    total += *score;
                }
                let norm = 1.0 / total;
                scores.iter_mut().for_each(|score| *score *= norm);
            }
        }
        for row in 0..rows {
            let start = (row * heads + kv_head * group) * dim;
            job.out[start..start + group * dim].fill(0.0);
        }
        for (index, key_row) in key_rows(job.ranges).take(visible).enumerate() {
            let value = &values[key_row * kv_width + kv_head * dim..][..dim];
            for row in index.saturating_sub(job.position)..rows {
                for g in 0..group {
                    let weight = scores[(row * group + g) * visible + index];
                    let out = &mut job.out[(row * heads + kv_head * group + g) * dim..][..dim];
                    for (out, value) in out.iter_mut().zip(value) {
                        *out = weight.mul_add(*value, *out);
                    }
                }
            }
        }
    }
}

fn key_rows(ranges: &[KeyRange]) -> impl Iterator<Item = usize> + '_ {
    ranges.iter().flat_map(|range| range.row..range.row + range.len)
}
