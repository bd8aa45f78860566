//! Owns what the operations work on: FP32 buffers, weights in the dtype they are stored in, a prepared pass.

use backend::{BackendError, DType, HostTensor, Pass, Projection, Result};

/// FP32 memory. Zeroed memory comes from the system untouched, so a large arena costs only what is used of it.
#[derive(Debug)]
pub struct CpuBuffer {
    pub(crate) data: Vec<f32>,
}

impl CpuBuffer {
    pub(crate) fn zeros(elements: usize) -> Result<Self> {
        let mut data: Vec<f32> = Vec::new();
        data.try_reserve_exact(elements).map_err(|error| BackendError::Memory {
            what: "a buffer".to_owned(),
            bytes: elements.saturating_mul(4),
            reason: error.to_string(),
        })?;
        drop(data);
        Ok(Self { data: vec![0.0; elements] })
    }

    /// The first `elements`, or a contract error naming the operation.
    pub(crate) fn get(&self, operation: &'static str, elements: usize) -> Result<&[f32]> {
        self.data.get(..elements).ok_or_else(|| short(operation, elements, self.data.len()))
    }

    pub(crate) fn get_mut(&mut self, operation: &'static str, elements: usize) -> Result<&mut [f32]> {
        let found = self.data.len();
        self.data.get_mut(..elements).ok_or_else(|| short(operation, elements, found))
    }
}

fn short(operation: &'static str, expected: usize, found: usize) -> BackendError {
    contract(operation, format!("a buffer has {found} elements, expected at least {expected}"))
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

/// A pass with its rotary tables.
#[derive(Debug)]
pub struct CpuLayout {
    pub(crate) pass: Pass,
    /// Per row: cosines, then sines, `rotary_dim / 2` each.
    pub(crate) rotary: Vec<f32>,
    /// Per row: its row in the key arena.
    pub(crate) key_rows: Vec<usize>,
}

impl CpuLayout {
    pub(crate) fn new(pass: &Pass, inv_freq: &[f32]) -> Self {
        let half = inv_freq.len();
        let mut rotary = vec![0.0; pass.rows() * 2 * half];
        let mut key_rows = vec![0; pass.rows()];
        for segment in &pass.segments {
            let own = segment.keys.last().map_or(0, |range| range.row);
            for (offset, row) in segment.rows.clone().enumerate() {
                let position = (segment.position + offset) as f32;
                let table = &mut rotary[row * 2 * half..(row + 1) * 2 * half];
                for (j, frequency) in inv_freq.iter().enumerate() {
                    let angle = position * frequency;
                    table[j] = angle.cos();
                    table[half + j] = angle.sin();
                }
                key_rows[row] = own + offset;
            }
        }
        Self { pass: pass.clone(), rotary, key_rows }
    }
}
