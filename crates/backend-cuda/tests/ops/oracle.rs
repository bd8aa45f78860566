//! Owns the operations as plain loops in FP64, straight from the contract, and error measures.

use backend::{Attention, DeltaNet};

use crate::tree::Tree;

/// Numbers that depend on the seed only.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 24) as f32
    }

    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform()).sum();
        (sum - 2.0) * 1.732
    }

    pub(crate) fn normals(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.normal() * scale).collect()
    }
}

/// Relative error in the 2-norm. NaN anywhere gives NaN, which passes no bound.
pub(crate) fn relative_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let (mut difference, mut size) = (0.0, 0.0);
    for (x, y) in found.iter().zip(expected) {
        difference += (f64::from(*x) - y).powi(2);
        size += y * y;
    }
    (difference / size.max(1e-300)).sqrt()
}

pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

pub(crate) fn rms_scale(x: &[f64], eps: f64) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + eps).sqrt()
}

pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

pub(crate) fn conv_silu(projected: &[f32], weight: &[f32], shape: &DeltaNet, tree: &Tree) -> Vec<f64> {
    let (width, stride) = (shape.conv_dim(), shape.projected_width());
    let mut out = vec![0.0; tree.rows() * width];
    for node in 0..tree.nodes.len() {
        let sequence = tree.sequence(node);
        for (t, row) in sequence.iter().enumerate().skip(sequence.len() - tree.nodes[node].len) {
            for c in 0..width {
                let tap = |j: usize| match (t + j).checked_sub(shape.kernel - 1) {
                    Some(source) => {
                        f64::from(weight[c * shape.kernel + j])
                            * f64::from(projected[sequence[source] * stride + c])
                    }
                    None => 0.0,
                };
                out[row * width + c] = silu((0..shape.kernel).map(tap).sum());
            }
        }
    }
    out
}

pub(crate) fn delta_rule(qkv: &[f32], gates: &[f32], shape: &DeltaNet, tree: &Tree) -> Vec<f64> {
    let (dk, dv) = (shape.key_dim, shape.value_dim);
    let (width, heads) = (shape.conv_dim(), shape.value_heads);
    let mut out = vec![0.0; tree.rows() * heads * dv];
    let mut states: Vec<Vec<f64>> = Vec::new();
    for node in 0..tree.nodes.len() {
        let mut state = tree.nodes[node]
            .parent
            .map_or_else(|| vec![0.0; heads * dk * dv], |parent| states[parent].clone());
        for row in tree.start(node)..tree.start(node) + tree.nodes[node].len {
            for head in 0..heads {
                let key_head = head / (heads / shape.key_heads);
                let unit = |first: usize| {
                    let x = wide(&qkv[row * width + first..][..dk]);
                    let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    x.into_iter().map(|x| x * scale).collect::<Vec<f64>>()
                };
                let q: Vec<f64> = unit(key_head * dk).into_iter().map(|x| x / (dk as f64).sqrt()).collect();
                let k = unit((shape.key_heads + key_head) * dk);
                let v = wide(&qkv[row * width + 2 * shape.key_heads * dk + head * dv..][..dv]);
                let beta = f64::from(gates[row * 2 * heads + head]);
                let g = f64::from(gates[row * 2 * heads + heads + head]).exp();
                let s = &mut state[head * dk * dv..][..dk * dv];
                for x in s.iter_mut() {
                    *x *= g;
                }
                let mut e = v;
                for i in 0..dk {
                    for j in 0..dv {
                        e[j] -= s[i * dv + j] * k[i];
                    }
                }
                let target = &mut out[(row * heads + head) * dv..][..dv];
                for i in 0..dk {
                    for j in 0..dv {
                        s[i * dv + j] += k[i] * beta * e[j];
                        target[j] += s[i * dv + j] * q[i];
                    }
                }
            }
        }
        states.push(state);
    }
    out
}

/// Queries, keys and values of all rows after norm and rotation.
pub(crate) struct Rotated {
    pub(crate) query: Vec<f64>,
    pub(crate) keys: Vec<f64>,
    pub(crate) values: Vec<f64>,
}

pub(crate) fn query_key_value(
    projected: &[f32],
    (query_norm, key_norm): (&[f32], &[f32]),
    eps: f64,
    shape: &Attention,
    inv_freq: &[f32],
    positions: &[usize],
) -> Rotated {
    let dim = shape.head_dim;
    let stride = shape.projected_width();
    let mut rotated = Rotated { query: Vec::new(), keys: Vec::new(), values: Vec::new() };
    let turn = |x: &[f32], norm: &[f32], position: usize| {
        let x = wide(x);
        let scale = rms_scale(&x, eps);
        let mut y: Vec<f64> = x.iter().zip(norm).map(|(x, w)| x * scale * (1.0 + f64::from(*w))).collect();
        let pairs = shape.rotary_dim / 2;
        for j in 0..pairs {
            let angle = f64::from(position as f32 * inv_freq[j]);
            let (a, b) = (y[j], y[j + pairs]);
            y[j] = a * angle.cos() - b * angle.sin();
            y[j + pairs] = b * angle.cos() + a * angle.sin();
        }
        y
    };
    for (row, position) in positions.iter().enumerate() {
        let x = &projected[row * stride..][..stride];
        for head in 0..shape.heads {
            rotated.query.extend(turn(&x[2 * head * dim..][..dim], query_norm, *position));
        }
        for head in 0..shape.kv_heads {
            rotated.keys.extend(turn(&x[(2 * shape.heads + head) * dim..][..dim], key_norm, *position));
            rotated.values.extend(wide(&x[(2 * shape.heads + shape.kv_heads + head) * dim..][..dim]));
        }
    }
    rotated
}

pub(crate) fn attention(rotated: &Rotated, projected: &[f32], shape: &Attention, tree: &Tree) -> Vec<f64> {
    let dim = shape.head_dim;
    let stride = shape.projected_width();
    let mut out = vec![0.0; tree.rows() * shape.heads * dim];
    for node in 0..tree.nodes.len() {
        let sequence = tree.sequence(node);
        for (t, row) in sequence.iter().enumerate().skip(sequence.len() - tree.nodes[node].len) {
            for head in 0..shape.heads {
                let kv = head / (shape.heads / shape.kv_heads);
                let q = &rotated.query[(row * shape.heads + head) * dim..][..dim];
                let part = |source: &'_ [f64], key: usize| {
                    source[(sequence[key] * shape.kv_heads + kv) * dim..][..dim].to_vec()
                };
                let scores: Vec<f64> = (0..=t)
                    .map(|key| {
                        let k = part(&rotated.keys, key);
                        q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>() / (dim as f64).sqrt()
                    })
                    .collect();
                let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
                let total: f64 = weights.iter().sum();
                let target = &mut out[(row * shape.heads + head) * dim..][..dim];
                for (key, weight) in weights.iter().enumerate() {
                    for (x, v) in target.iter_mut().zip(part(&rotated.values, key)) {
                        *x += weight / total * v;
                    }
                }
                for (d, x) in target.iter_mut().enumerate() {
                    *x *= sigmoid(f64::from(projected[row * stride + (2 * head + 1) * dim + d]));
                }
            }
        }
    }
    out
}
