//! Owns what the operations work on: FP32 buffers, and weights in the dtype they are stored in.

use backend::{BackendError, DType, HostTensor, Projection, Result, Role};

/// FP32 memory. Zeroed memory comes from the system untouched, so a large arena costs only what is used of it.
#[derive(Debug)]
pub struct CpuBuffer {
    pub(crate) data: Vec<f32>,
}

impl CpuBuffer {
    pub(crate) fn zeros(role: Role, elements: usize) -> Result<Self> {
        let mut data: Vec<f32> = Vec::new();
        data.try_reserve_exact(elements).map_err(|error| BackendError::Memory {
            what: format!("{role:?} values"),
            bytes: elements.saturating_mul(4),
            reason: error.to_string(),
        })?;
        drop(data);
        Ok(Self { data: vec![0.0; elements] })
    }

    /// The matrix of this shape at the buffer's start, or a contract error naming the operation.
    pub(crate) fn get(&self, operation: &'static str, shape: [usize; 2]) -> Result<&[f32]> {
        let found = self.data.len();
        self.data.get(..elements(shape)).ok_or_else(|| short(operation, shape, found))
    }

    /// As [`Self::get`], to write.
    pub(crate) fn get_mut(&mut self, operation: &'static str, shape: [usize; 2]) -> Result<&mut [f32]> {
        let found = self.data.len();
        self.data.get_mut(..elements(shape)).ok_or_else(|| short(operation, shape, found))
    }

    /// The whole buffer as a vector of `len`.
    pub(crate) fn vector(&self, operation: &'static str, len: usize) -> Result<&[f32]> {
        if self.data.len() == len {
            return Ok(&self.data);
        }
        Err(contract(operation, format!("a parameter has {} elements, expected {len}", self.data.len())))
    }
}

/// No buffer has as many elements as a product that overflows.
fn elements([rows, width]: [usize; 2]) -> usize {
    rows.saturating_mul(width)
}

fn short(operation: &'static str, [rows, width]: [usize; 2], found: usize) -> BackendError {
    contract(operation, format!("a buffer has {found} elements, expected at least {rows} rows of {width}"))
}

pub(crate) fn contract(operation: &'static str, reason: impl Into<String>) -> BackendError {
    BackendError::Contract { operation, reason: reason.into() }
}

/// One part of a weight.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) tensor: HostTensor,
    pub(crate) rows: usize,
    /// A `[rank, in]` and scale·B `[out, rank]` of an unmerged adapter.
    pub(crate) adapter: Option<Adapter>,
}

#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) rank: usize,
    pub(crate) a: Vec<f32>,
    pub(crate) b: Vec<f32>,
}

/// A weight `[out, in]` in parts; BF16 parts borrow the mapped file.
#[derive(Debug)]
pub struct CpuWeight {
    pub(crate) parts: Vec<Part>,
    pub(crate) input: usize,
    pub(crate) output: usize,
}

impl CpuWeight {
    pub(crate) fn new(projections: &[Projection]) -> Result<Self> {
        const OP: &str = "weight";
        let mut parts = Vec::with_capacity(projections.len());
        let mut input = None;
        for projection in projections {
            let tensor = projection.weight.clone();
            let [rows, columns] = tensor.shape[..] else {
                return Err(contract(OP, format!("shape {:?}, expected two dimensions", tensor.shape)));
            };
            if *input.get_or_insert(columns) != columns || columns == 0 {
                return Err(contract(OP, format!("{columns} columns beside parts of {input:?}")));
            }
            if rows == 0 {
                return Err(contract(OP, "a part without rows"));
            }
            if tensor.data.len() != rows * columns * tensor.dtype.size() {
                return Err(contract(OP, format!("{} bytes for {:?}", tensor.data.len(), tensor.shape)));
            }
            let adapter = projection
                .adapter
                .as_ref()
                .map(|low_rank| {
                    let rank = low_rank.a.shape.first().copied().unwrap_or(0);
                    if low_rank.a.shape != [rank, columns] || low_rank.b.shape != [rows, rank] || rank == 0 {
                        let (a, b) = (&low_rank.a.shape, &low_rank.b.shape);
                        return Err(contract(OP, format!("adapter {b:?} x {a:?} for [{rows}, {columns}]")));
                    }
                    let b = widen(&low_rank.b)?.into_iter().map(|value| low_rank.scale * value).collect();
                    Ok(Adapter { rank, a: widen(&low_rank.a)?, b })
                })
                .transpose()?;
            parts.push(Part { tensor, rows, adapter });
        }
        let output = parts.iter().map(|part| part.rows).sum();
        Ok(Self { input: input.ok_or_else(|| contract(OP, "no parts"))?, output, parts })
    }
}

/// All elements of a tensor as FP32.
pub(crate) fn widen(tensor: &HostTensor) -> Result<Vec<f32>> {
    if tensor.data.len() != tensor.elements() * tensor.dtype.size() {
        return Err(contract("parameter", format!("{} bytes for {:?}", tensor.data.len(), tensor.shape)));
    }
    let mut out = vec![0.0; tensor.elements()];
    widen_bytes(tensor.dtype, &tensor.data, &mut out);
    Ok(out)
}

/// Widens little-endian bytes, aligned or not.
#[inline(always)]
pub(crate) fn widen_bytes(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::BF16 => {
            let (pairs, _) = bytes.as_chunks::<2>();
            for (value, pair) in out.iter_mut().zip(pairs) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16);
            }
        }
        DType::F32 => {
            let (fours, _) = bytes.as_chunks::<4>();
            for (value, four) in out.iter_mut().zip(fours) {
                *value = f32::from_le_bytes(*four);
            }
        }
    }
}
