//! Owns the operations of profile `service`: those of the official BF16 service, on a padded batch, with its rounding points and
//! its calls of cuBLAS. Knows no layer and no plan.
//!
//! Shapes are `[batch, length, …]`, row-major; a row is a token. Everything is BF16 but where a contract says FP32. Every operation
//! is compared bit for bit with torch by `tools/reference/operators.py`, which also says what is not supported: DeltaNet heads
//! other than 128, four taps, attention heads other than 256.
#![allow(unsafe_code)] // Hands device addresses to cuBLAS.

use std::collections::BTreeMap;
use std::sync::Arc;

use backend::{DType, HostTensor, LowRank, Result};
use half::bf16;

use crate::blas::Blas;
use crate::device::{Arguments, Buffer, Device, Memory};
use crate::engine::{CudaOps, CudaOptions, Profile, contract, holds, is, letter};
use crate::weights::{check_tensor, floats};

mod delta;

pub use delta::DeltaScratch;

/// Width of a DeltaNet head.
pub const DELTA_DIM: usize = 128;
/// Width of an attention head.
pub const ATTENTION_DIM: usize = 256;
/// Rows that a convolution needs of what lies before it.
pub const HISTORY_ROWS: usize = 3;

/// Whole numbers on the device: ids, positions, offsets.
#[derive(Debug)]
pub struct Ints {
    memory: Memory,
    len: usize,
}

/// A padded batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Rows of tokens.
    pub batch: usize,
    /// Tokens of each, padding included.
    pub length: usize,
}

impl Grid {
    /// Tokens in all.
    pub fn rows(self) -> usize {
        self.batch * self.length
    }
}

/// Heads of a gated DeltaNet, each [`DELTA_DIM`] wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Key heads.
    pub keys: usize,
    /// Value heads, a multiple of `keys`.
    pub values: usize,
}

impl DeltaHeads {
    /// Width of q, k and v.
    pub fn channels(self) -> usize {
        (2 * self.keys + self.values) * DELTA_DIM
    }

    /// FP32 elements of a sequence's state.
    pub fn state(self) -> usize {
        self.values * DELTA_DIM * DELTA_DIM
    }
}

/// Heads of full attention, each [`ATTENTION_DIM`] wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Query heads.
    pub queries: usize,
    /// Key and value heads.
    pub keys: usize,
}

/// What normed and rotated heads are made with.
pub struct Rotation<'a> {
    /// Zero-centred norm weight `[ATTENTION_DIM]`.
    pub norm: &'a Buffer,
    /// Frequencies, FP32, `[rotary / 2]`, as they are after a rounding to BF16.
    pub frequencies: &'a Buffer,
    /// Positions, `[batch, length]`.
    pub positions: &'a Ints,
    /// Dimensions that are rotated.
    pub rotary: usize,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// Where heads lie in a projection.
#[derive(Clone, Copy, Debug)]
pub struct HeadSource {
    /// Heads.
    pub heads: usize,
    /// Elements of a token.
    pub row: usize,
    /// Elements from a head to the next.
    pub stride: usize,
}

/// The operations on one GPU.
pub struct ServiceOps {
    blas: Blas,
    cuda: CudaOps,
}

impl ServiceOps {
    /// Opens a GPU with cuBLAS.
    ///
    /// # Errors
    /// As [`CudaOps::open`]; [`backend::BackendError::Device`] without cuBLAS.
    pub fn open(ordinal: usize) -> Result<Self> {
        let cuda = CudaOps::open(CudaOptions { ordinal, profile: Profile::Exact, graphs: false })?;
        let blas = Blas::open(cuda.device())?;
        Ok(Self { blas, cuda })
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        self.cuda.device()
    }

    /// Makes the device fail asynchronously; nothing works in this process afterwards.
    ///
    /// # Errors
    /// [`backend::BackendError::Device`] when not even this can be submitted.
    #[cfg(feature = "gpu")]
    pub fn fail(&self) -> Result<()> {
        self.cuda.fail()
    }

    /// What results may depend on, by name: device, driver, kernels, cuBLAS.
    pub fn identity(&self) -> BTreeMap<String, String> {
        let mut identity = self.cuda.identity();
        identity.insert("cublas".to_owned(), self.blas.version().to_string());
        identity
    }

    /// Version of cuBLAS, e.g. 130100.
    pub fn blas_version(&self) -> i32 {
        self.blas.version()
    }

    /// `r(weight + scale (b a))` as BF16 bytes, the product by cuBLAS in FP32; `weight [out, in]`, `a [rank, in]` and `b [out, rank]`
    /// FP32.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn merge(&self, weight: &HostTensor, adapter: &LowRank) -> Result<Vec<u8>> {
        check_tensor("merge", weight)?;
        let ([columns, depth], [rank, _]) = (&weight.shape[..], &adapter.a.shape[..]) else {
            return Err(contract("merge", format!("shapes {:?}, {:?}", weight.shape, adapter.a.shape)));
        };
        for (what, tensor, shape) in
            [("a", &adapter.a, [*rank, *depth]), ("b", &adapter.b, [*columns, *rank])]
        {
            check_tensor("merge", tensor)?;
            if tensor.dtype != DType::F32 || tensor.shape != shape {
                let reason =
                    format!("{what} is {:?} {:?}, expected F32 {shape:?}", tensor.dtype, tensor.shape);
                return Err(contract("merge", reason));
            }
        }
        let copy = |tensor: &HostTensor| {
            let mut memory = self.device().borrow("merging an adapter", tensor.data.len())?;
            memory.upload(0, &tensor.data)?;
            Result::Ok(memory)
        };
        let [base, a, b] = [copy(weight)?, copy(&adapter.a)?, copy(&adapter.b)?];
        let count = columns * depth;
        let delta = self.device().borrow("merging an adapter", count * 4)?;
        let out = self.device().borrow("merging an adapter", count * 2)?;
        self.blas.product(b.pointer(), a.pointer(), delta.pointer(), (*columns, *depth, *rank))?;
        let arguments = Arguments::default()
            .pointer(base.pointer())
            .pointer(delta.pointer())
            .pointer(out.pointer())
            .float(adapter.scale)
            .int(count);
        let name = format!("service_merge_{}", letter(weight.dtype));
        self.cuda.launch(&name, (count.div_ceil(256), 1, 1), 256, arguments)?;
        out.download(count * 2)
    }

    /// Device, profile and version of cuBLAS.
    pub fn describe(&self) -> String {
        format!("cuda, {}, profile service, cuBLAS {}", self.device().describe(), self.blas.version())
    }

    /// An undefined buffer.
    ///
    /// # Errors
    /// [`backend::BackendError::Memory`].
    pub fn buffer(&self, what: &str, dtype: DType, elements: usize) -> Result<Buffer> {
        self.cuda.buffer(dtype, what, elements)
    }

    /// A buffer whose memory goes back to a pool when it is dropped.
    ///
    /// # Errors
    /// [`backend::BackendError::Memory`].
    pub fn borrowed(&self, what: &str, dtype: DType, elements: usize) -> Result<Buffer> {
        let memory = self.device().borrow(what, elements * dtype.size())?;
        Ok(Buffer { memory, dtype, elements })
    }

    /// A tensor as BF16, rounded once if it is FP32.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn half(&self, tensor: &HostTensor) -> Result<Buffer> {
        check_tensor("weight", tensor)?;
        let mut buffer = self.buffer("a weight", DType::BF16, tensor.elements())?;
        match tensor.dtype {
            DType::BF16 => buffer.memory.upload(0, &tensor.data)?,
            DType::F32 => {
                let rounded: Vec<u8> =
                    floats(&tensor.data).iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
                buffer.memory.upload(0, &rounded)?;
            }
        }
        Ok(buffer)
    }

    /// Values as FP32.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn wide(&self, values: &[f32]) -> Result<Buffer> {
        let mut buffer = self.buffer("given values", DType::F32, values.len())?;
        buffer.memory.upload(0, bytemuck::cast_slice(values))?;
        Ok(buffer)
    }

    /// Whole numbers, in pooled memory.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn ints(&self, values: &[i32]) -> Result<Ints> {
        let mut memory = self.device().borrow("ids and positions", values.len() * 4)?;
        memory.upload(0, bytemuck::cast_slice(values))?;
        Ok(Ints { memory, len: values.len() })
    }

    /// The first `elements` of a BF16 buffer, after all earlier work.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn read_half(&self, buffer: &Buffer, elements: usize) -> Result<Vec<bf16>> {
        is("read", "the buffer", buffer, DType::BF16)?;
        let bytes = buffer.memory.download(elements * 2)?;
        Ok(bytes.chunks_exact(2).map(|pair| bf16::from_le_bytes([pair[0], pair[1]])).collect())
    }

    fn check(&self, operation: &'static str, parts: &[(&str, &Buffer, usize)]) -> Result<()> {
        for (what, buffer, elements) in parts {
            is(operation, what, buffer, DType::BF16)?;
            holds(operation, what, buffer, *elements)?;
        }
        Ok(())
    }

    /// `out[r] = table[ids[r]]`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn embed(&self, table: &Buffer, ids: &Ints, width: usize, out: &mut Buffer) -> Result<()> {
        self.check("embed", &[("out", out, ids.len * width)])?;
        self.cuda.gather((DType::BF16, table.memory.pointer()), ids.memory.pointer(), ids.len, width, out)
    }

    /// Rows of `x [any, width]` by index, widened to FP32.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn gather_wide(&self, x: &Buffer, rows: &Ints, width: usize, out: &mut Buffer) -> Result<()> {
        holds("gather", "out", out, rows.len * width)?;
        self.cuda.gather((x.dtype, x.memory.pointer()), rows.memory.pointer(), rows.len, width, out)
    }

    /// `residual <- residual + delta` where there is one; `out = rms_norm(residual)`; rows before `first[b]` of a batch row are
    /// zero in `out`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    #[allow(clippy::too_many_arguments)] // One fused kernel: its operands are these.
    pub fn add_rms_norm(
        &self,
        residual: &mut Buffer,
        delta: Option<&Buffer>,
        weight: &Buffer,
        first: Option<&Ints>,
        eps: f32,
        grid: Grid,
        width: usize,
        out: &mut Buffer,
    ) -> Result<()> {
        let elements = grid.rows() * width;
        self.check(
            "add_rms_norm",
            &[("residual", residual, elements), ("weight", weight, width), ("out", out, elements)],
        )?;
        if let Some(delta) = delta {
            self.check("add_rms_norm", &[("delta", delta, elements)])?;
        }
        if !width.is_multiple_of(128) {
            return Err(contract("add_rms_norm", format!("width {width}, expected a multiple of 128")));
        }
        let arguments = Arguments::default()
            .buffer(residual)
            .pointer(delta.map_or(0, |delta| delta.memory.pointer()))
            .buffer(weight)
            .buffer(out)
            .pointer(first.map_or(0, |first| first.memory.pointer()))
            .float(eps)
            .int(grid.rows())
            .int(width)
            .int(grid.length);
        self.cuda.launch("service_add_rms_norm", (grid.rows().div_ceil(8), 1, 1), 256, arguments)
    }

    /// `out [rows, columns] = x [rows, depth] weight [columns, depth]^T`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn linear(
        &self,
        x: &Buffer,
        weight: &Buffer,
        (rows, columns, depth): (usize, usize, usize),
        out: &mut Buffer,
    ) -> Result<()> {
        self.check(
            "linear",
            &[("x", x, rows * depth), ("weight", weight, columns * depth), ("out", out, rows * columns)],
        )?;
        let [x, weight, out] = [x, weight, out].map(|buffer| buffer.memory.pointer());
        self.blas.linear(x, weight, out, (rows, columns, depth))
    }

    /// Causal convolution of four taps and silu; `history [batch, 3, channels]` precedes each row where it is given.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn conv(
        &self,
        u: &Buffer,
        weight: &Buffer,
        history: Option<&Buffer>,
        grid: Grid,
        channels: usize,
        out: &mut Buffer,
    ) -> Result<()> {
        let elements = grid.rows() * channels;
        self.check("conv", &[("u", u, elements), ("weight", weight, channels * 4), ("out", out, elements)])?;
        if let Some(history) = history {
            self.check("conv", &[("history", history, grid.batch * HISTORY_ROWS * channels)])?;
        }
        let arguments = Arguments::default()
            .buffer(u)
            .buffer(weight)
            .pointer(history.map_or(0, |history| history.memory.pointer()))
            .buffer(out)
            .int(grid.length)
            .int(channels);
        self.cuda.launch("service_conv", (grid.length, channels.div_ceil(256), grid.batch), 256, arguments)
    }

    /// `beta = sigmoid(b)` and `decay = -exp(a_log) softplus(a + dt_bias)`, FP32 `[rows, heads]`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn gates(
        &self,
        (b, a): (&Buffer, &Buffer),
        (a_log, dt_bias): (&Buffer, &Buffer),
        rows: usize,
        heads: usize,
        (beta, decay): (&mut Buffer, &mut Buffer),
    ) -> Result<()> {
        let count = rows * heads;
        self.check(
            "gates",
            &[("b", b, count), ("a", a, count), ("a_log", a_log, heads), ("dt_bias", dt_bias, heads)],
        )?;
        holds("gates", "beta", beta, count)?;
        holds("gates", "decay", decay, count)?;
        let arguments = Arguments::default()
            .buffer(b)
            .buffer(a)
            .buffer(a_log)
            .buffer(dt_bias)
            .buffer(beta)
            .buffer(decay)
            .int(count)
            .int(heads);
        self.cuda.launch("service_gates", (count.div_ceil(256), 1, 1), 256, arguments)
    }

    /// Gated RMSNorm over heads of 128, in place; `z` like `o`, `count` heads in all.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn gated_norm(
        &self,
        o: &mut Buffer,
        z: &Buffer,
        weight: &Buffer,
        eps: f32,
        count: usize,
    ) -> Result<()> {
        let elements = count * DELTA_DIM;
        self.check("gated_norm", &[("o", o, elements), ("z", z, elements), ("weight", weight, DELTA_DIM)])?;
        let arguments = Arguments::default().buffer(o).buffer(z).buffer(weight).float(eps).int(count);
        self.cuda.launch("service_gated_norm", (count.div_ceil(8), 1, 1), 256, arguments)
    }

    /// Heads of a projection, normed and rotated where `rotation` is given, to `out [batch, heads, capacity, 256]` from place
    /// `offset` on.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn heads(
        &self,
        source: &Buffer,
        place: HeadSource,
        rotation: Option<&Rotation>,
        grid: Grid,
        (capacity, offset): (usize, usize),
        out: &mut Buffer,
    ) -> Result<()> {
        self.check("heads", &[("source", source, grid.rows() * place.row)])?;
        self.check("heads", &[("out", out, grid.batch * place.heads * capacity * ATTENTION_DIM)])?;
        if offset + grid.length > capacity {
            return Err(contract(
                "heads",
                format!("{} tokens at {offset} of {capacity} places", grid.length),
            ));
        }
        let pointer = |pick: fn(&Rotation) -> u64| rotation.map_or(0, pick);
        let arguments = Arguments::default()
            .buffer(source)
            .pointer(pointer(|rotation| rotation.norm.memory.pointer()))
            .pointer(pointer(|rotation| rotation.frequencies.memory.pointer()))
            .pointer(pointer(|rotation| rotation.positions.memory.pointer()))
            .buffer(out)
            .float(rotation.map_or(0.0, |rotation| rotation.eps))
            .int(place.row)
            .int(place.stride)
            .int(grid.length)
            .int(ATTENTION_DIM)
            .int(rotation.map_or(0, |rotation| rotation.rotary))
            .int(capacity)
            .int(offset);
        self.cuda.launch("service_heads", (grid.length.div_ceil(8), place.heads, grid.batch), 256, arguments)
    }

    /// Attention over `keys` places, of which the batch's own begin at `own`; places before `hidden[b]` are masked.
    /// `query [batch, heads, length, 256]`, `out [rows, heads, 256]`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    #[allow(clippy::too_many_arguments)] // Its operands are these.
    pub fn attention(
        &self,
        query: &Buffer,
        (key, value): (&Buffer, &Buffer),
        hidden: &Ints,
        heads: AttentionHeads,
        grid: Grid,
        (keys, own): (usize, usize),
        out: &mut Buffer,
    ) -> Result<()> {
        let elements = grid.rows() * heads.queries * ATTENTION_DIM;
        let kept = grid.batch * heads.keys * keys * ATTENTION_DIM;
        self.check(
            "attention",
            &[("query", query, elements), ("key", key, kept), ("value", value, kept), ("out", out, elements)],
        )?;
        let arguments = Arguments::default()
            .buffer(query)
            .buffer(key)
            .buffer(value)
            .pointer(hidden.memory.pointer())
            .buffer(out)
            .int(grid.length)
            .int(keys)
            .int(own)
            .int(heads.queries)
            .int(heads.keys);
        let blocks = (grid.length.div_ceil(64), heads.queries, grid.batch);
        self.cuda.launch("service_attention", blocks, 128, arguments)
    }

    /// `out <- out sigmoid(gate)`, the gates behind the queries in `projected [rows, heads, 2 * 256]`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn output_gate(&self, out: &mut Buffer, projected: &Buffer, heads: usize, rows: usize) -> Result<()> {
        let elements = rows * heads * ATTENTION_DIM;
        self.check("output_gate", &[("out", out, elements), ("projected", projected, 2 * elements)])?;
        let arguments = Arguments::default().buffer(out).buffer(projected).int(heads).int(ATTENTION_DIM);
        self.cuda.launch("service_output_gate", (rows, 1, 1), 256, arguments)
    }

    /// `out = silu(gate) up`, all of `elements`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn swiglu(&self, gate: &Buffer, up: &Buffer, elements: usize, out: &mut Buffer) -> Result<()> {
        self.check("swiglu", &[("gate", gate, elements), ("up", up, elements), ("out", out, elements)])?;
        let arguments = Arguments::default().buffer(gate).buffer(up).buffer(out).int(elements);
        self.cuda.launch("service_swiglu", (elements.div_ceil(1024), 1, 1), 256, arguments)
    }

    /// Copies `rows` runs of `width` elements, a multiple of four: from element `from.0` on every `from.1`, to `to.0` on every `to.1`.
    /// FP32 buffers count as twice as many elements.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    pub fn copy(
        &self,
        source: &Buffer,
        target: &mut Buffer,
        (rows, width): (usize, usize),
        from: (usize, usize),
        to: (usize, usize),
    ) -> Result<()> {
        let room = |buffer: &Buffer| buffer.elements * buffer.dtype.size() / 2;
        for (what, buffer, (start, stride)) in [("source", source, from), ("target", &*target, to)] {
            let end = start + rows.saturating_sub(1) * stride + width;
            if end > room(buffer)
                || !start.is_multiple_of(4)
                || !stride.is_multiple_of(4)
                || !width.is_multiple_of(4)
            {
                let reason = format!(
                    "{what}: {rows} runs of {width} from {start} every {stride}, {} elements",
                    room(buffer)
                );
                return Err(contract("copy", reason));
            }
        }
        let arguments = Arguments::default()
            .pointer(source.memory.pointer() + 2 * from.0 as u64)
            .pointer(target.memory.pointer() + 2 * to.0 as u64)
            .int(width)
            .int(from.1)
            .int(to.1);
        self.cuda.launch("service_copy", (rows, 1, 1), 256, arguments)
    }

    /// Sets a buffer to zero.
    ///
    /// # Errors
    /// [`backend::BackendError::Device`].
    pub fn clear(&self, buffer: &mut Buffer) -> Result<()> {
        buffer.memory.clear()
    }

    /// Pointer logits, FP32: `(K h_option + b_k) . (Q h_decide + b_q) / sqrt(dim)`. `h [rows, hidden]`; `pairs` are (decide row,
    /// option row); weights `[dim, hidden]`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    #[allow(clippy::too_many_arguments)] // Two projections with their biases: its operands are these.
    pub fn pointer_head(
        &self,
        h: &Buffer,
        (query_weight, query_bias): (&Buffer, &Buffer),
        (key_weight, key_bias): (&Buffer, &Buffer),
        (rows, hidden, dim): (usize, usize, usize),
        pairs: &[[i32; 2]],
    ) -> Result<Vec<f32>> {
        for (what, buffer, elements) in [
            ("h", h, rows * hidden),
            ("query weight", query_weight, dim * hidden),
            ("key weight", key_weight, dim * hidden),
            ("query bias", query_bias, dim),
            ("key bias", key_bias, dim),
        ] {
            is("pointer_head", what, buffer, DType::F32)?;
            holds("pointer_head", what, buffer, elements)?;
        }
        if pairs.is_empty() {
            return Ok(Vec::new());
        }
        let elements = rows * dim;
        let projected = self.device().borrow("the pointer head", 2 * elements * 4)?;
        let logits = self.device().borrow("logits", pairs.len() * 4)?;
        let flat = self.ints(bytemuck::cast_slice(pairs))?;
        let arguments = Arguments::default()
            .buffer(h)
            .buffer(query_weight)
            .buffer(key_weight)
            .buffer(query_bias)
            .buffer(key_bias)
            .pointer(projected.pointer())
            .int(rows)
            .int(hidden)
            .int(dim);
        self.cuda.launch("pointer_project_f", (dim.div_ceil(8), rows.div_ceil(4), 2), 256, arguments)?;
        let arguments = Arguments::default()
            .pointer(projected.pointer())
            .pointer(projected.pointer() + 4 * elements as u64)
            .pointer(flat.memory.pointer())
            .pointer(logits.pointer())
            .int(pairs.len())
            .int(dim)
            .float(1.0 / (dim as f32).sqrt());
        self.cuda.launch("pointer_scores", (pairs.len().div_ceil(8), 1, 1), 256, arguments)?;
        Ok(floats(&logits.download(pairs.len() * 4)?))
    }
}
