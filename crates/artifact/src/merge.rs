//! Owns the merge of an adapter into a projection, in an order of arithmetic that any CPU repeats bit for bit, and the place of
//! other orders.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::adapter::LoraPair;
use crate::error::Result;
use crate::manifest::MergeRecord;
use crate::weights::{Tensor, TensorType};

/// Merges adapters somewhere, in an order of arithmetic of its own.
pub trait Merger {
    /// What the manifest says of it.
    fn record(&self) -> MergeRecord;

    /// `r(W + s * (B A))` as BF16 bytes; `W [out, in]`, `A [rank, in]`, `B [out, rank]`.
    ///
    /// # Errors
    /// [`crate::ArtifactError::Merge`] when the place it merges at fails.
    fn merge(&self, weight: &Tensor, lora: &LoraPair) -> Result<Vec<u8>>;
}

/// Merges on this machine's cores, as peft does on a CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuMerger;

impl Merger for CpuMerger {
    fn record(&self) -> MergeRecord {
        MergeRecord {
            device: "cpu".to_owned(),
            accumulation: "fp32, rank ascending, fused multiply-add, one rounding to bf16".to_owned(),
            libraries: BTreeMap::new(),
        }
    }

    fn merge(&self, weight: &Tensor, lora: &LoraPair) -> Result<Vec<u8>> {
        Ok(merge(weight, lora))
    }
}

/// `r(W + s * (B A))` as BF16 bytes: per element the sum over the rank in ascending order with fused multiply-adds in
/// FP32, times the scale, added to the widened base weight, and rounded once, to nearest even.
///
/// This order reproduces peft's merge on a CPU, and the bits do not depend on the number of threads or the CPU.
pub(crate) fn merge(weight: &Tensor, lora: &LoraPair) -> Vec<u8> {
    let (out, input) = (weight.shape[0], weight.shape[1]);
    let rank = lora.a.shape[0];
    let (a, b) = (lora.a.to_f32(), lora.b.to_f32());
    let mut merged = vec![0u8; out * input * 2];
    let element = weight.dtype.size();
    let arch = pulp::Arch::new();
    merged.par_chunks_mut(input * 2).enumerate().for_each_init(
        || vec![0f32; input],
        |sum, (row, target)| {
            let source = &weight.data[row * input * element..(row + 1) * input * element];
            let factors = &b[row * rank..(row + 1) * rank];
            arch.dispatch(Row {
                dtype: weight.dtype,
                source,
                factors,
                a: &a,
                scale: lora.scale,
                sum,
                target,
            });
        },
    );
    merged
}

/// One row of a merge. As a body of its own, inlined, it is compiled for the fused multiply-add of the CPU it runs on; as a
/// closure it would call a library for each. Without such an instruction `mul_add` gives the same bits slowly.
struct Row<'a> {
    dtype: TensorType,
    source: &'a [u8],
    factors: &'a [f32],
    a: &'a [f32],
    scale: f32,
    sum: &'a mut [f32],
    target: &'a mut [u8],
}

impl pulp::NullaryFnOnce for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { dtype, source, factors, a, scale, sum, target } = self;
        let input = sum.len();
        sum.fill(0.0);
        for (r, factor) in factors.iter().enumerate() {
            for (total, value) in sum.iter_mut().zip(&a[r * input..(r + 1) * input]) {
                *total = factor.mul_add(*value, *total);
            }
        }
        match dtype {
            TensorType::BF16 => {
                for ((total, pair), target) in
                    sum.iter().zip(source.chunks_exact(2)).zip(target.chunks_exact_mut(2))
                {
                    let base = f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
                    target.copy_from_slice(&round_bf16(base + scale * total).to_le_bytes());
                }
            }
            TensorType::F32 => {
                for ((total, word), target) in
                    sum.iter().zip(source.chunks_exact(4)).zip(target.chunks_exact_mut(2))
                {
                    let base = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    target.copy_from_slice(&round_bf16(base + scale * total).to_le_bytes());
                }
            }
        }
    }
}

/// Round to nearest even; NaN stays NaN.
#[inline(always)]
fn round_bf16(value: f32) -> u16 {
    half::bf16::from_f32(value).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: TensorType, shape: [usize; 2], values: &[f32]) -> Tensor {
        let data: Vec<u8> = match dtype {
            TensorType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            TensorType::BF16 => values.iter().flat_map(|v| round_bf16(*v).to_le_bytes()).collect(),
        };
        Tensor { dtype, shape: shape.to_vec(), data: data.into() }
    }

    fn noise(count: usize, mut seed: u64) -> Vec<f32> {
        (0..count)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    #[test]
    fn is_within_one_unit_of_exact_arithmetic_and_repeats_for_any_thread_count() {
        let (out, input, rank) = (37, 65, 16);
        let weight = tensor(TensorType::BF16, [out, input], &noise(out * input, 1));
        let lora = LoraPair {
            a: tensor(TensorType::F32, [rank, input], &noise(rank * input, 2)),
            b: tensor(TensorType::F32, [out, rank], &noise(out * rank, 3)),
            scale: 2.0,
        };
        let merged = merge(&weight, &lora);
        let (w, a, b) = (weight.to_f32(), lora.a.to_f32(), lora.b.to_f32());
        for row in 0..out {
            for column in 0..input {
                let exact: f64 = (0..rank)
                    .map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * input + column]))
                    .sum::<f64>()
                    * 2.0
                    + f64::from(w[row * input + column]);
                let at = 2 * (row * input + column);
                let found = f32::from_bits(u32::from(u16::from_le_bytes([merged[at], merged[at + 1]])) << 16);
                // Half a unit of BF16 is at most 2^-8 of the value; the FP32 sum of terms up to 1 adds at most 1e-5.
                assert!(
                    (f64::from(found) - exact).abs() <= exact.abs() / 256.0 + 1e-5,
                    "{row},{column}: {found} {exact}"
                );
            }
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| merge(&weight, &lora)), merged);
        }
    }

    #[test]
    fn rounds_once_to_even() {
        let weight = tensor(TensorType::BF16, [1, 1], &[1.0]);
        let lora = |delta: f32| LoraPair {
            a: tensor(TensorType::F32, [1, 1], &[delta]),
            b: tensor(TensorType::F32, [1, 1], &[1.0]),
            scale: 1.0,
        };
        // 1 + 2^-8 is halfway between 1 and the next BF16, 1 + 2^-7: even is 1.
        assert_eq!(merge(&weight, &lora(2f32.powi(-8))), 0x3f80u16.to_le_bytes());
        assert_eq!(merge(&weight, &lora(2f32.powi(-8) * 1.01)), 0x3f81u16.to_le_bytes());
    }
}
