//! Owns the DeltaNet mixer: causal convolution, gates, the delta rule, the gated norm. State goes from token to token in
//! order, so a segment split anywhere gives the same bits.

use std::ops::Range;

use backend::{DeltaNet, Result, Segment};
use rayon::prelude::*;

use crate::elementwise::{dot, sigmoid, silu, softplus, sum_squares};
use crate::memory::{CpuLayout, contract};

/// Columns of a delta-rule state worked on at a time; `key_dim` rows of them stay in the first-level cache.
const COLUMNS: usize = 32;
/// Added to a squared norm before its root; a constant of the model, not its RMS epsilon.
const L2_EPS: f32 = 1e-6;

/// Causal depthwise convolution, then silu; tails of `kernel - 1` inputs, oldest first.
pub(crate) fn conv_silu(
    projected: &[f32],
    weight: &[f32],
    shape: &DeltaNet,
    layout: &CpuLayout,
    tails: &mut [f32],
    out: &mut [f32],
) -> Result<()> {
    let (width, channels, kernel) = (shape.projected_width(), shape.conv_dim(), shape.kernel);
    let history = kernel - 1;
    // Tap-major, so that a tap's weights are next to each other as the channels are.
    let taps: Vec<f32> =
        (0..kernel).flat_map(|j| (0..channels).map(move |c| weight[c * kernel + j])).collect();
    for segment in &layout.pass.segments {
        let tail: Vec<f32> = match segment.initial {
            Some(slot) => tails[slot * history * channels..(slot + 1) * history * channels].to_vec(),
            None => vec![0.0; history * channels],
        };
        // Input `history + t` of a segment is its row t; the ones before it are the tail.
        let input = |index: usize| -> &[f32] {
            if index < history {
                &tail[index * channels..(index + 1) * channels]
            } else {
                let row = segment.rows.start + index - history;
                &projected[row * width..row * width + channels]
            }
        };
        let rows = &mut out[segment.rows.start * channels..segment.rows.end * channels];
        rows.par_chunks_mut(channels).enumerate().for_each(|(t, out)| {
            pulp::Arch::new().dispatch(|| {
                out.fill(0.0);
                for j in 0..kernel {
                    let taps = &taps[j * channels..(j + 1) * channels];
                    for ((out, tap), x) in out.iter_mut().zip(taps).zip(input(t + j)) {
                        *out = tap.mul_add(*x, *out);
                    }
                }
            });
            out.iter_mut().for_each(|value| *value = silu(*value));
        });
        if let Some(slot) = segment.last {
            let newest: Vec<f32> =
                (0..history).flat_map(|i| input(segment.rows.len() + i).iter().copied()).collect();
            tails[slot * history * channels..(slot + 1) * history * channels].copy_from_slice(&newest);
        }
    }
    Ok(())
}

/// Per row: beta of every value head, then decay of every value head.
pub(crate) fn delta_gates(
    projected: &[f32],
    a_log: &[f32],
    dt_bias: &[f32],
    shape: &DeltaNet,
    gates: &mut [f32],
) {
    let (width, heads) = (shape.projected_width(), shape.value_heads);
    for (row, gates) in gates.chunks_exact_mut(2 * heads).enumerate() {
        let ba = &projected[(row + 1) * width - 2 * heads..(row + 1) * width];
        for head in 0..heads {
            gates[head] = sigmoid(ba[head]);
            gates[heads + head] = -a_log[head].exp() * softplus(ba[heads + head] + dt_bias[head]);
        }
    }
}

/// What one head of one segment leaves: its outputs `[rows, value_dim]`, and its final state.
struct HeadResult {
    out: Vec<f32>,
    state: Vec<f32>,
}

/// The gated delta rule of every segment and value head, level by level.
pub(crate) fn delta_rule(
    qkv: &[f32],
    gates: &[f32],
    shape: &DeltaNet,
    layout: &CpuLayout,
    states: &mut [f32],
    out: &mut [f32],
) -> Result<()> {
    let heads = shape.value_heads;
    let state_size = shape.key_dim * shape.value_dim;
    let segments = &layout.pass.segments;
    let mut first = 0;
    while first < segments.len() {
        let level = segments[first].level;
        let count = segments[first..].iter().take_while(|segment| segment.level == level).count();
        let group = &segments[first..first + count];
        let readable: &[f32] = states;
        let results: Vec<HeadResult> = (0..count * heads)
            .into_par_iter()
            .with_max_len(1)
            .map(|job| {
                let (segment, head) = (&group[job / heads], job % heads);
                let state = match segment.initial {
                    Some(slot) => readable[(slot * heads + head) * state_size..][..state_size].to_vec(),
                    None => vec![0.0; state_size],
                };
                head_rule(qkv, gates, shape, segment, head, state)
            })
            .collect();
        for (job, result) in results.iter().enumerate() {
            let (segment, head) = (&group[job / heads], job % heads);
            for (row, values) in segment.rows.clone().zip(result.out.chunks_exact(shape.value_dim)) {
                out[(row * heads + head) * shape.value_dim..][..shape.value_dim].copy_from_slice(values);
            }
            if let Some(slot) = segment.last {
                states[(slot * heads + head) * state_size..][..state_size].copy_from_slice(&result.state);
            }
        }
        first += count;
    }
    Ok(())
}

fn head_rule(
    qkv: &[f32],
    gates: &[f32],
    shape: &DeltaNet,
    segment: &Segment,
    head: usize,
    state: Vec<f32>,
) -> HeadResult {
    let (dk, dv, width) = (shape.key_dim, shape.value_dim, shape.conv_dim());
    let key_head = head / (shape.value_heads / shape.key_heads);
    let rows = segment.rows.clone();
    let mut queries = vec![0.0; rows.len() * dk];
    let mut keys = vec![0.0; rows.len() * dk];
    let mut decays = vec![0.0; rows.len()];
    let scale = 1.0 / (dk as f32).sqrt();
    for (t, row) in rows.clone().enumerate() {
        let input = &qkv[row * width..(row + 1) * width];
        let q = &input[key_head * dk..(key_head + 1) * dk];
        let k = &input[(shape.key_heads + key_head) * dk..][..dk];
        let q_norm = 1.0 / (sum_squares(q) + L2_EPS).sqrt();
        let k_norm = 1.0 / (sum_squares(k) + L2_EPS).sqrt();
        for i in 0..dk {
            queries[t * dk + i] = q[i] * q_norm * scale;
            keys[t * dk + i] = k[i] * k_norm;
        }
        decays[t] = gates[row * 2 * shape.value_heads + shape.value_heads + head].exp();
    }
    let value_start = 2 * shape.key_heads * dk + head * dv;
    let mut out = vec![0.0; rows.len() * dv];
    let mut state = state;
    for from in (0..dv).step_by(COLUMNS) {
        let columns = from..dv.min(from + COLUMNS);
        let inputs = ColumnInputs {
            qkv,
            width,
            value_start,
            queries: &queries,
            keys: &keys,
            decays: &decays,
            rows: rows.clone(),
            dk,
            dv,
        };
        let beta = |row: usize| gates[row * 2 * shape.value_heads + head];
        pulp::Arch::new().dispatch(|| column_rule(&inputs, &beta, columns.clone(), &mut state, &mut out));
    }
    HeadResult { out, state }
}

struct ColumnInputs<'a> {
    qkv: &'a [f32],
    width: usize,
    value_start: usize,
    queries: &'a [f32],
    keys: &'a [f32],
    decays: &'a [f32],
    rows: Range<usize>,
    dk: usize,
    dv: usize,
}

/// The rule on some columns of a state: columns never meet, so each block runs through all tokens by itself.
#[inline(always)]
fn column_rule(
    inputs: &ColumnInputs<'_>,
    beta: &impl Fn(usize) -> f32,
    columns: Range<usize>,
    state: &mut [f32],
    out: &mut [f32],
) {
    let (dk, dv, n) = (inputs.dk, inputs.dv, columns.len());
    let mut block = vec![[0f32; COLUMNS]; dk];
    for (i, line) in block.iter_mut().enumerate() {
        line[..n].copy_from_slice(&state[i * dv + columns.start..i * dv + columns.end]);
    }
    for (t, row) in inputs.rows.clone().enumerate() {
        let key = &inputs.keys[t * dk..(t + 1) * dk];
        let query = &inputs.queries[t * dk..(t + 1) * dk];
        let decay = inputs.decays[t];
        let mut seen = [0f32; COLUMNS];
        for (line, k) in block.iter_mut().zip(key) {
            for c in 0..COLUMNS {
                line[c] *= decay;
                seen[c] = line[c].mul_add(*k, seen[c]);
            }
        }
        let value = &inputs.qkv[row * inputs.width + inputs.value_start + columns.start..][..n];
        let mut error = [0f32; COLUMNS];
        let beta = beta(row);
        for (c, value) in value.iter().enumerate() {
            error[c] = beta * (value - seen[c]);
        }
        let mut result = [0f32; COLUMNS];
        for ((line, k), q) in block.iter_mut().zip(key).zip(query) {
            for c in 0..COLUMNS {
                line[c] = error[c].mul_add(*k, line[c]);
                result[c] = line[c].mul_add(*q, result[c]);
            }
        }
        out[t * dv + columns.start..t * dv + columns.end].copy_from_slice(&result[..n]);
    }
    for (i, line) in block.iter().enumerate() {
        state[i * dv + columns.start..i * dv + columns.end].copy_from_slice(&line[..n]);
    }
}

/// `o = weight * (o / rms(o)) * silu(z)` per value head.
pub(crate) fn gated_rms_norm(
    o: &mut [f32],
    projected: &[f32],
    weight: &[f32],
    eps: f32,
    shape: &DeltaNet,
) -> Result<()> {
    let (width, dv) = (shape.projected_width(), shape.value_dim);
    if weight.len() != dv {
        return Err(contract(
            "gated_rms_norm",
            format!("weight has {} elements, expected {dv}", weight.len()),
        ));
    }
    let z_start = shape.conv_dim();
    o.par_chunks_mut(shape.value_width()).enumerate().for_each(|(row, o)| {
        let z = &projected[row * width + z_start..][..shape.value_width()];
        for (o, z) in o.chunks_exact_mut(dv).zip(z.chunks_exact(dv)) {
            let scale = 1.0 / (dot(o, o) / dv as f32 + eps).sqrt();
            for ((o, z), weight) in o.iter_mut().zip(z).zip(weight) {
                *o = weight * (*o * scale) * silu(*z);
            }
        }
    });
    Ok(())
}
