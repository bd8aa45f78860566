//! Owns the formulas in FP64 as plain loops, over one sequence at a time. Knows no pass, slot or arena: whatever a
//! backend does with them must come out as if every branch had been run alone, from its state's first token.

use backend::{Attention, DeltaNet};

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

pub(super) fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `x / sqrt(mean(x^2) + eps)` over a row.
pub(super) fn rms(x: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().map(|x| x / (mean + eps).sqrt()).collect()
}

/// RMSNorm whose stored weight is the offset from 1.
pub(super) fn zero_centred(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    rms(x, eps).iter().zip(weight).map(|(x, w)| x * (1.0 + w)).collect()
}

/// `x w^T`, `x [rows, input]`, `w [out, input]`.
pub(super) fn linear(x: &[f64], w: &[f64], input: usize) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        w.chunks(input).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    x.chunks(input).flat_map(row).collect()
}

/// Convolution and silu of a whole sequence; `projected [rows, projected_width]`.
pub(super) fn conv_silu(projected: &[f64], weight: &[f64], shape: &DeltaNet) -> Vec<f64> {
    let (width, channels) = (shape.projected_width(), shape.conv_dim());
    let rows = projected.len() / width;
    let mut out = vec![0.0; rows * channels];
    for t in 0..rows {
        for c in 0..channels {
            let mut sum = 0.0;
            for j in 0..shape.kernel {
                if t + j + 1 >= shape.kernel {
                    let from = t + j + 1 - shape.kernel;
                    sum += weight[c * shape.kernel + j] * projected[from * width + c];
                }
            }
            out[t * channels + c] = silu(sum);
        }
    }
    out
}

/// The delta rule over a whole sequence from S = 0. Returns the outputs `[rows, value_heads * value_dim]`, and S after
/// every token asked for in `keep` (as a number of tokens).
pub(super) fn delta_rule(
    qkv: &[f64],
    gates: &[f64],
    shape: &DeltaNet,
    keep: &[usize],
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let (dk, dv, heads) = (shape.key_dim, shape.value_dim, shape.value_heads);
    let rows = qkv.len() / shape.conv_dim();
    let mut s = vec![0.0; heads * dk * dv];
    let mut out = vec![0.0; rows * heads * dv];
    let mut kept = vec![Vec::new(); keep.len()];
    for t in 0..rows {
        let token = &qkv[t * shape.conv_dim()..(t + 1) * shape.conv_dim()];
        for h in 0..heads {
            let key_head = h / (heads / shape.key_heads);
            let unit = |x: &[f64]| -> Vec<f64> {
                let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|x| x / norm).collect()
            };
            let q = unit(&token[key_head * dk..(key_head + 1) * dk]);
            let k = unit(&token[(shape.key_heads + key_head) * dk..(shape.key_heads + key_head + 1) * dk]);
            let v = &token[2 * shape.key_heads * dk + h * dv..2 * shape.key_heads * dk + (h + 1) * dv];
            let (beta, decay) = (gates[t * 2 * heads + h], gates[t * 2 * heads + heads + h]);
            let s = &mut s[h * dk * dv..(h + 1) * dk * dv];
            s.iter_mut().for_each(|s| *s *= decay.exp());
            for c in 0..dv {
                let seen: f64 = (0..dk).map(|i| s[i * dv + c] * k[i]).sum();
                let e = beta * (v[c] - seen);
                (0..dk).for_each(|i| s[i * dv + c] += k[i] * e);
                let o: f64 = (0..dk).map(|i| s[i * dv + c] * q[i]).sum();
                out[(t * heads + h) * dv + c] = o / (dk as f64).sqrt();
            }
        }
        for (wanted, kept) in keep.iter().zip(&mut kept) {
            if *wanted == t + 1 {
                kept.clone_from(&s);
            }
        }
    }
    (out, kept)
}

/// One row of norms and rotary embedding: queries `[heads, head_dim]`, keys, values `[kv_heads, head_dim]`.
pub(super) fn query_key_value(
    projected: &[f64],
    norms: [&[f64]; 2],
    eps: f64,
    shape: &Attention,
    position: usize,
    inv_freq: &[f32],
) -> [Vec<f64>; 3] {
    let dim = shape.head_dim;
    let half = shape.rotary_dim / 2;
    let head = |x: &[f64], norm: &[f64]| {
        let mut x = zero_centred(x, norm, eps);
        for j in 0..half {
            // The angle is FP32 by contract: at far positions its rounding is part of the model.
            let angle = f64::from(position as f32 * inv_freq[j]);
            let (a, b) = (x[j], x[j + half]);
            x[j] = a * angle.cos() - b * angle.sin();
            x[j + half] = b * angle.cos() + a * angle.sin();
        }
        x
    };
    let keys_at = 2 * shape.heads * dim;
    let values_at = keys_at + shape.kv_heads * dim;
    let queries = (0..shape.heads).flat_map(|h| head(&projected[2 * h * dim..][..dim], norms[0])).collect();
    let keys =
        (0..shape.kv_heads).flat_map(|h| head(&projected[keys_at + h * dim..][..dim], norms[1])).collect();
    [queries, keys, projected[values_at..values_at + shape.kv_heads * dim].to_vec()]
}

/// One row of attention over the first `seen` keys of its sequence, gated. `keys`, `values` `[.., kv_heads, head_dim]`.
pub(super) fn attention(
    query: &[f64],
    projected: &[f64],
    keys: &[&[f64]],
    values: &[&[f64]],
    shape: &Attention,
) -> Vec<f64> {
    let dim = shape.head_dim;
    let mut out = Vec::with_capacity(shape.heads * dim);
    for h in 0..shape.heads {
        let at = h / (shape.heads / shape.kv_heads) * dim;
        let q = &query[h * dim..(h + 1) * dim];
        let scores: Vec<f64> = keys
            .iter()
            .map(|key| key[at..at + dim].iter().zip(q).map(|(k, q)| k * q).sum::<f64>() / (dim as f64).sqrt())
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        for d in 0..dim {
            let sum: f64 = weights.iter().zip(values).map(|(w, value)| w * value[at + d]).sum();
            out.push(sum / total * sigmoid(projected[(2 * h + 1) * dim + d]));
        }
    }
    out
}
