//! Owns inputs: numbers that depend on a seed only, and tensors made of them.

use backend::{DType, HostTensor, KeyRange, LowRank, Pass, Projection, Segment};

/// SplitMix64.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `[0, 1)`.
    pub(super) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Nearly normal: a sum of four uniform numbers, mean 0, variance 1.
    pub(super) fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform()).sum();
        (sum - 2.0) * 1.732
    }
}

/// `count` numbers of mean 0 and standard deviation `scale`.
pub(super) fn normals(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.normal() * scale).collect()
}

pub(super) fn tensor(dtype: DType, shape: &[usize], values: &[f32]) -> HostTensor {
    let data: Vec<u8> = match dtype {
        DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
    };
    HostTensor { dtype, shape: shape.to_vec(), data: data.into() }
}

/// The values a tensor of this dtype holds.
pub(super) fn stored(dtype: DType, values: &[f32]) -> Vec<f64> {
    values
        .iter()
        .map(|x| match dtype {
            DType::F32 => f64::from(*x),
            DType::BF16 => half::bf16::from_f32(*x).to_f64(),
        })
        .collect()
}

/// A projection `[out, in]`, unscaled so that outputs stay near 1, with an adapter of rank 16 or without.
pub(super) fn projection(dtype: DType, out: usize, input: usize, adapted: bool, seed: u64) -> Projection {
    let scale = 1.0 / (input as f32).sqrt();
    Projection {
        weight: tensor(dtype, &[out, input], &normals(seed, out * input, scale)),
        adapter: adapted.then(|| LowRank {
            a: tensor(DType::F32, &[16, input], &normals(seed + 1, 16 * input, scale)),
            b: tensor(DType::F32, &[out, 16], &normals(seed + 2, out * 16, 0.1)),
            scale: 2.0,
        }),
    }
}

/// A pass of one segment from nothing.
pub(super) fn flat_pass(tokens: &[u32]) -> Pass {
    let rows = tokens.len();
    let keys = vec![KeyRange { row: 0, len: rows }];
    let segment = Segment { rows: 0..rows, position: 0, initial: None, last: None, level: 0, keys };
    Pass { tokens: tokens.to_vec(), segments: vec![segment], readouts: Vec::new() }
}

pub(super) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}
