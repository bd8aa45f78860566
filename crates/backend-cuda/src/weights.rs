//! Owns making device weights of host tensors: stacking, widening, merging adapters. Knows no operation.

use backend::{DType, HostTensor, LowRank, Projection, Result};
use half::bf16;

use crate::device::{Arguments, Memory};
use crate::engine::{CudaOps, Profile, Weight, contract, letter};

impl CudaOps {
    /// Stacks parts along their outputs, each with its adapter merged.
    pub(crate) fn stack(&self, parts: &[Projection]) -> Result<Weight> {
        let (columns, depth) = stacked_shape(parts)?;
        let all_half = parts.iter().all(|part| part.weight.dtype == DType::BF16);
        let merges = parts.iter().any(|part| part.adapter.is_some());
        // `exact` never rounds the sum of a weight and its adapter; `fast` rounds it once.
        let dtype =
            if all_half && (self.profile == Profile::Fast || !merges) { DType::BF16 } else { DType::F32 };
        let mut memory = self.device.allocate("a weight", columns * depth * dtype.size())?;
        let mut offset = 0;
        for part in parts {
            let weight = &part.weight;
            match &part.adapter {
                Some(adapter) => self.merge(weight, adapter, memory.pointer() + offset as u64, dtype)?,
                None if weight.dtype == dtype => memory.upload(offset, &weight.data)?,
                None => memory.upload(offset, &widened(&weight.data))?,
            }
            offset += weight.elements() * dtype.size();
        }
        if let Some(gemm) = self.gemm.as_ref().filter(|_| dtype == DType::BF16) {
            gemm.register(columns, depth);
        }
        Ok(Weight { memory, dtype, columns, depth })
    }

    /// Writes `weight + scale b a` to device address `target`.
    fn merge(&self, weight: &HostTensor, adapter: &LowRank, target: u64, dtype: DType) -> Result<()> {
        let (columns, depth) = (weight.shape[0], weight.shape[1]);
        let rank = adapter.a.shape.first().copied().unwrap_or_default();
        for (what, tensor, shape) in [("a", &adapter.a, [rank, depth]), ("b", &adapter.b, [columns, rank])] {
            check_tensor("weight", tensor)?;
            if tensor.dtype != DType::F32 || tensor.shape != shape {
                let reason = format!(
                    "adapter {what} is {:?} {:?}, expected F32 {shape:?}",
                    tensor.dtype, tensor.shape
                );
                return Err(contract("weight", reason));
            }
        }
        let copy = |tensor: &HostTensor| -> Result<Memory> {
            let mut memory = self.device.allocate("merging an adapter", tensor.data.len())?;
            memory.upload(0, &tensor.data)?;
            Ok(memory)
        };
        let [base, a, b] = [copy(weight)?, copy(&adapter.a)?, copy(&adapter.b)?];
        let arguments = Arguments::default()
            .pointer(base.pointer())
            .pointer(a.pointer())
            .pointer(b.pointer())
            .pointer(target)
            .int(depth)
            .int(rank)
            .float(adapter.scale);
        let name = format!("merge_{}{}", letter(weight.dtype), letter(dtype));
        // Freeing the copies waits for the kernel.
        self.launch(&name, (columns, depth.div_ceil(256), 1), 256, arguments)
    }
}

/// Widens BF16 bytes to FP32 bytes.
pub(crate) fn widened(data: &[u8]) -> Vec<u8> {
    let values = data.chunks_exact(2).map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32());
    values.flat_map(f32::to_le_bytes).collect()
}

pub(crate) fn floats(data: &[u8]) -> Vec<f32> {
    data.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

pub(crate) fn check_tensor(operation: &'static str, tensor: &HostTensor) -> Result<()> {
    if tensor.data.len() == tensor.elements() * tensor.dtype.size() {
        return Ok(());
    }
    Err(contract(
        operation,
        format!("{} bytes for {:?} of {:?}", tensor.data.len(), tensor.shape, tensor.dtype),
    ))
}

/// Columns and depth of parts stacked along their outputs.
fn stacked_shape(parts: &[Projection]) -> Result<(usize, usize)> {
    let mut columns = 0;
    let mut depth = None;
    for part in parts {
        check_tensor("weight", &part.weight)?;
        let [out, inner] = part.weight.shape[..] else {
            let reason = format!("a part has shape {:?}, expected two dimensions", part.weight.shape);
            return Err(contract("weight", reason));
        };
        if *depth.get_or_insert(inner) != inner {
            return Err(contract("weight", format!("a part of {inner} inputs beside others of {depth:?}")));
        }
        columns += out;
    }
    let depth = depth.ok_or_else(|| contract("weight", "no parts".to_owned()))?;
    Ok((columns, depth))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_is_exact() {
        let bytes: Vec<u8> =
            [1.0_f32, -0.15625, 3.0e38].iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        let wide = widened(&bytes);
        assert_eq!(&wide[..8], [1.0_f32.to_le_bytes(), (-0.15625_f32).to_le_bytes()].concat());
        assert_eq!(wide.len(), 12);
    }
}
