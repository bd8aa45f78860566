//! Owns the random numbers of synthetic checkpoints: the same on every machine, any element without those before it.

use half::bf16;
use sha2::{Digest, Sha256};

/// Entries of the table of normal quantiles: one for every 16-bit number.
const ENTRIES: usize = 1 << 16;

/// Standard normal values at the middles of [`ENTRIES`] equal probabilities. They are symmetric and end at ±4.32, which is
/// as fine as BF16 weights need.
pub(crate) struct Normal(Vec<f64>);

impl Normal {
    pub(crate) fn new() -> Self {
        let upper: Vec<f64> = (ENTRIES / 2..ENTRIES)
            .map(|index| -quantile(1.0 - (index as f64 + 0.5) / ENTRIES as f64))
            .collect();
        Self(upper.iter().rev().map(|value| -value).chain(upper.iter().copied()).collect())
    }

    /// The table scaled and moved, as FP32.
    pub(crate) fn f32(&self, scale: f64, shift: f64) -> Vec<f32> {
        self.0.iter().map(|value| (value * scale + shift) as f32).collect()
    }

    /// The same as BF16, from FP32.
    pub(crate) fn bf16(&self, scale: f64, shift: f64) -> Vec<bf16> {
        self.f32(scale, shift).into_iter().map(bf16::from_f32).collect()
    }
}

/// Quantile of the standard normal distribution for 0 < p < 1/2, by Acklam's rational approximation (relative error below
/// 1.2e-9). Only IEEE operations and `libm`, so that every machine computes the same.
fn quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969683028665376e1,
        2.209460984245205e2,
        -2.759285104469687e2,
        1.38357751867269e2,
        -3.066479806614716e1,
        2.506628277459239,
    ];
    const B: [f64; 6] = [
        -5.447609879822406e1,
        1.615858368580409e2,
        -1.556989798598866e2,
        6.680131188771972e1,
        -1.328068155288572e1,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784894002430293e-3,
        -3.223964580411365e-1,
        -2.400758277161838,
        -2.549732539343734,
        4.374664141464968,
        2.938163982698783,
    ];
    const D: [f64; 5] =
        [7.784695709041462e-3, 3.224671290700398e-1, 2.445134137142996, 3.754408661907416, 1.0];
    fn polynomial(coefficients: &[f64], x: f64) -> f64 {
        coefficients.iter().fold(0.0, |sum, coefficient| sum * x + coefficient)
    }
    if p < 0.02425 {
        let q = libm::sqrt(-2.0 * libm::log(p));
        return polynomial(&C, q) / polynomial(&D, q);
    }
    let q = p - 0.5;
    let r = q * q;
    polynomial(&A, r) * q / polynomial(&B, r)
}

/// A stream of 64-bit numbers, by SplitMix64: number `index` is a hash of the key and the index.
#[derive(Clone, Copy)]
pub(crate) struct Stream(u64);

impl Stream {
    /// The stream of one tensor of one seed.
    pub(crate) fn new(seed: u64, tensor: &str) -> Self {
        let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(tensor).finalize();
        let mut key = [0; 8];
        key.copy_from_slice(&digest[..8]);
        Self(u64::from_le_bytes(key))
    }

    pub(crate) fn word(self, index: u64) -> u64 {
        let mut z = self.0.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in [0, 1) with 53 random bits.
    pub(crate) fn uniform(self, index: u64) -> f64 {
        (self.word(index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Table indexes of elements `4 * word` to `4 * word + 3`.
    pub(crate) fn quarters(self, word: u64) -> [usize; 4] {
        let bits = self.word(word);
        [0, 16, 32, 48].map(|shift| usize::from((bits >> shift) as u16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_a_standard_normal_distribution() {
        let table = Normal::new().0;
        let moment = |power: i32| table.iter().map(|value| value.powi(power)).sum::<f64>() / ENTRIES as f64;
        assert_eq!(table.len(), ENTRIES);
        assert!(table.is_sorted());
        assert!(moment(1).abs() < 1e-15, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 1e-4, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 4e-3, "{}", moment(4));
        assert!((-quantile(0.025) - 1.959963984540054).abs() < 1e-8);
        assert!((-quantile(0.001) - 3.090232306167813).abs() < 1e-8);
    }

    #[test]
    fn streams_differ_by_seed_tensor_and_index() {
        let words =
            [Stream::new(1, "a").word(0), Stream::new(2, "a").word(0), Stream::new(1, "b").word(0), {
                Stream::new(1, "a").word(1)
            }];
        for (index, word) in words.iter().enumerate() {
            assert!(!words[..index].contains(word));
        }
        let mean = (0..10_000).map(|index| Stream::new(1, "a").uniform(index)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn numbers_never_change() {
        // Checkpoints of a seed must stay what they were: figures and captures name them by seed.
        assert_eq!(Stream::new(0, "x").word(0), 3570598698299399063);
    }
}
