//! Owns the contract's operations as launches: sizes checked here, then one kernel (or product) each. Knows no layer.
#![allow(unsafe_code)] // Hands device addresses to cuBLASLt.

use std::sync::{Arc, PoisonError};

use backend::{Attention, DType, DeltaNet, Extent, HostTensor, Ops, Pass, Projection, Result, Role};

use crate::device::{Arguments, Buffer};
use crate::engine::{CudaOps, Profile, Recorded, Weight, contract, holds, is, letter};
use crate::gemm::Gemm;
use crate::layout::{HISTORY, Layout, LayoutMemory};
use crate::mixers::attention_shared;
use crate::shapes::Shape;
use crate::weights::{check_tensor, floats, widened};

/// Rows that one thread of the convolution makes: `CONV_RUN` in `conv.cu`.
const CONV_RUN: usize = 4;
impl Ops for CudaOps {
    type Buffer = Buffer;
    type Weight = Weight;
    type Layout = Layout;

    fn describe(&self) -> String {
        let profile = match self.profile {
            Profile::Exact => "exact",
            Profile::Fast => "fast",
        };
        format!("cuda, {}, profile {profile}", self.device.describe())
    }

    fn warm_up(&self, rows: usize) -> Result<()> {
        let wide_output = self.profile.dtype(Role::Activation) == DType::F32;
        self.gemm.as_ref().map_or(Ok(()), |gemm| gemm.warm_up(rows, wide_output))
    }

    fn element_bytes(&self, role: Role) -> usize {
        self.profile.dtype(role).size()
    }

    fn zeros(&self, role: Role, elements: usize) -> Result<Buffer> {
        let mut buffer = self.buffer(self.profile.dtype(role), &format!("{role:?} values"), elements)?;
        buffer.memory.clear()?;
        Ok(buffer)
    }

    fn parameter(&self, tensor: &HostTensor) -> Result<Buffer> {
        check_tensor("parameter", tensor)?;
        let mut buffer = self.buffer(DType::F32, "a parameter", tensor.elements())?;
        match tensor.dtype {
            DType::F32 => buffer.memory.upload(0, &tensor.data)?,
            DType::BF16 => buffer.memory.upload(0, &widened(&tensor.data))?,
        }
        Ok(buffer)
    }

    fn weight(&self, parts: &[Projection]) -> Result<Weight> {
        self.stack(parts)
    }

    fn read(&self, buffer: &Buffer, elements: usize) -> Result<Vec<f32>> {
        holds("read", "the buffer", buffer, elements)?;
        let data = buffer.memory.download(elements * buffer.dtype.size())?;
        let data = match buffer.dtype {
            DType::F32 => data,
            DType::BF16 => widened(&data),
        };
        let values =
            data.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        Ok(values.collect())
    }

    fn layout(&self, pass: &Pass, inv_freq: &[f32]) -> Result<Layout> {
        let shape = if self.graphs { Shape::of(pass) } else { None };
        // A shape that was not recorded at start is not recorded while a request waits.
        let prepared = shape.and_then(|shape| self.prepared(shape)).filter(|(_, recorded)| *recorded);
        let (shape, memory) = (shape.filter(|_| prepared.is_some()), prepared.map(|(memory, _)| memory));
        let layout = Layout::new(&self.device, pass, inv_freq, shape, memory)?;
        self.rotate(&layout)?;
        Ok(layout)
    }

    fn extent(&self, layout: &Layout) -> Extent {
        Extent { rows: layout.host.rows, readout_rows: layout.host.readout_rows }
    }

    fn shapes(&self) -> usize {
        if self.graphs { Shape::all().len() } else { 0 }
    }

    fn padding(&self, index: usize, inv_freq: &[f32]) -> Result<Layout> {
        let shape = Shape::all().get(index).copied();
        let shape = shape.ok_or_else(|| contract("padding", format!("there is no shape {index}")))?;
        let memory = self.prepared(shape).map(|(memory, _)| memory);
        let layout = Layout::new(&self.device, &Pass::default(), inv_freq, Some(shape), memory)?;
        self.rotate(&layout)?;
        self.recordings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(shape)
            .or_insert_with(|| Recorded { recording: None, memory: layout.memory() });
        Ok(layout)
    }

    fn submit(&self, layout: &Layout, operations: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let Some(shape) = layout.shape else { return operations() };
        let mut recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(recorded) = recordings.get_mut(&shape) else { return operations() };
        match &recorded.recording {
            Some(recording) => recording.replay(),
            None => {
                // Once for real, so that everything they borrow is there, then for the record.
                operations()?;
                recorded.recording = Some(self.record(operations)?);
                Ok(())
            }
        }
    }

    fn embed(&self, table: &Weight, layout: &Layout, out: &mut Buffer) -> Result<()> {
        let rows = layout.host.rows;
        holds("embed", "out", out, rows * table.depth)?;
        if layout.host.vocabulary > table.columns {
            let reason = format!("token {} of a table of {}", layout.host.vocabulary - 1, table.columns);
            return Err(contract("embed", reason));
        }
        self.gather((table.dtype, table.memory.pointer()), layout.tokens(), rows, table.depth, out)
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f32, rows: usize, out: &mut Buffer) -> Result<()> {
        let width = weight.elements;
        holds("rms_norm", "x", x, rows * width)?;
        holds("rms_norm", "out", out, rows * width)?;
        let name = format!("rms_norm_{}{}", letter(x.dtype), letter(out.dtype));
        let arguments = Arguments::default().buffer(x).buffer(weight).buffer(out).int(width).float(eps);
        self.launch(&name, (rows, 1, 1), 256, arguments)
    }

    fn add_rms_norm(
        &self,
        residual: &mut Buffer,
        delta: &Buffer,
        weight: &Buffer,
        eps: f32,
        rows: usize,
        out: &mut Buffer,
    ) -> Result<()> {
        let width = weight.elements;
        for (what, buffer) in [("residual", &*residual), ("delta", delta), ("out", &*out)] {
            holds("add_rms_norm", what, buffer, rows * width)?;
        }
        is("add_rms_norm", "residual", residual, DType::F32)?;
        let name = format!("add_rms_norm_{}{}", letter(delta.dtype), letter(out.dtype));
        let arguments = Arguments::default()
            .buffer(residual)
            .buffer(delta)
            .buffer(weight)
            .buffer(out)
            .int(width)
            .float(eps);
        self.launch(&name, (rows, 1, 1), 256, arguments)
    }

    fn linear(&self, x: &Buffer, weight: &Weight, rows: usize, out: &mut Buffer) -> Result<()> {
        holds("linear", "x", x, rows * weight.depth)?;
        holds("linear", "out", out, rows * weight.columns)?;
        if rows == 0 {
            return Ok(());
        }
        match &self.gemm {
            Some(gemm)
                if x.dtype == DType::BF16
                    && weight.dtype == DType::BF16
                    && Gemm::serves(weight.columns, weight.depth) =>
            {
                // SAFETY: sizes and types were checked above.
                unsafe {
                    gemm.multiply(
                        (x.memory.pointer(), weight.memory.pointer(), out.memory.pointer()),
                        (rows, weight.columns, weight.depth),
                        out.dtype == DType::F32,
                    )
                }
            }
            _ => self.general_product(x, weight, rows, out),
        }
    }

    fn swiglu(&self, gate_up: &Buffer, inner: usize, rows: usize, out: &mut Buffer) -> Result<()> {
        holds("swiglu", "gate_up", gate_up, rows * 2 * inner)?;
        holds("swiglu", "out", out, rows * inner)?;
        let name = format!("swiglu_{}{}", letter(gate_up.dtype), letter(out.dtype));
        let arguments = Arguments::default().buffer(gate_up).buffer(out).int(inner);
        self.launch(&name, (rows, inner.div_ceil(4 * 256), 1), 256, arguments)
    }

    fn conv_silu(
        &self,
        projected: &Buffer,
        weight: &Buffer,
        shape: &DeltaNet,
        layout: &Layout,
        tails: &mut Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        let host = &layout.host;
        let width = shape.conv_dim();
        let stride = shape.projected_width();
        if shape.kernel == 0 || shape.kernel > HISTORY + 1 {
            let reason = format!("a kernel of {} taps, supported are 1 to {}", shape.kernel, HISTORY + 1);
            return Err(contract("conv_silu", reason));
        }
        holds("conv_silu", "projected", projected, host.rows * stride)?;
        holds("conv_silu", "weight", weight, width * shape.kernel)?;
        holds("conv_silu", "tails", tails, host.slots * (shape.kernel - 1) * width)?;
        holds("conv_silu", "out", out, host.rows * width)?;
        is("conv_silu", "tails", tails, projected.dtype)?;
        let types = format!("{}{}", letter(projected.dtype), letter(out.dtype));
        let fast = shape.kernel == 4 && (width | stride).is_multiple_of(4);
        let tables = Arguments::default()
            .buffer(projected)
            .buffer(weight)
            .buffer(tails)
            .buffer(out)
            .pointer(if fast { layout.locals() } else { layout.segments(0) })
            .pointer(layout.segment_of())
            .pointer(layout.histories());
        if fast {
            // Tensor cores cut TF32 operands off; rounding them here makes the delta rule's products unbiased.
            let rounds = out.dtype == DType::F32 && self.chunked(shape);
            let arguments = tables.int(host.rows).int(width).int(stride).int(usize::from(rounds));
            let blocks = (host.rows.div_ceil(CONV_RUN), width.div_ceil(4 * 128), 1);
            self.launch(&format!("conv_silu_4_{types}"), blocks, 128, arguments)?;
        } else {
            let arguments = tables.int(shape.kernel).int(width).int(stride);
            let blocks = (host.rows, width.div_ceil(4 * 128), 1);
            self.launch(&format!("conv_silu_{types}"), blocks, 128, arguments)?;
        }
        if !host.keeps || shape.kernel == 1 {
            return Ok(());
        }
        let arguments = Arguments::default()
            .buffer(projected)
            .buffer(tails)
            .pointer(layout.segments(0))
            .pointer(layout.histories())
            .int(shape.kernel)
            .int(width)
            .int(stride);
        let name = format!("conv_tails_{}", letter(projected.dtype));
        self.launch(&name, (width.div_ceil(256), host.segments, 1), 256, arguments)
    }

    fn delta_gates(
        &self,
        projected: &Buffer,
        a_log: &Buffer,
        dt_bias: &Buffer,
        shape: &DeltaNet,
        rows: usize,
        gates: &mut Buffer,
    ) -> Result<()> {
        let heads = shape.value_heads;
        holds("delta_gates", "projected", projected, rows * shape.projected_width())?;
        holds("delta_gates", "a_log", a_log, heads)?;
        holds("delta_gates", "dt_bias", dt_bias, heads)?;
        holds("delta_gates", "gates", gates, rows * 2 * heads)?;
        is("delta_gates", "gates", gates, DType::F32)?;
        let arguments = Arguments::default()
            .buffer(projected)
            .buffer(a_log)
            .buffer(dt_bias)
            .buffer(gates)
            .int(rows)
            .int(heads)
            .int(shape.projected_width())
            .int(shape.conv_dim() + shape.value_width());
        let name = format!("delta_gates_{}", letter(projected.dtype));
        self.launch(&name, ((rows * heads).div_ceil(128), 1, 1), 128, arguments)
    }

    fn delta_rule(
        &self,
        qkv: &Buffer,
        gates: &Buffer,
        shape: &DeltaNet,
        layout: &Layout,
        states: &mut Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        let host = &layout.host;
        holds("delta_rule", "qkv", qkv, host.rows * shape.conv_dim())?;
        holds("delta_rule", "gates", gates, host.rows * 2 * shape.value_heads)?;
        let state = shape.value_heads * shape.key_dim * shape.value_dim;
        holds("delta_rule", "states", states, host.slots * state)?;
        holds("delta_rule", "out", out, host.rows * shape.value_width())?;
        is("delta_rule", "gates", gates, DType::F32)?;
        is("delta_rule", "states", states, DType::F32)?;
        if qkv.dtype == DType::F32 && self.chunked(shape) {
            return self.delta_chunks(qkv, gates, shape, layout, states, out);
        }
        let Some(key) = [32, 64, 128, 256].into_iter().find(|key| shape.key_dim <= *key) else {
            return Err(contract(
                "delta_rule",
                format!("key_dim {}, supported are up to 256", shape.key_dim),
            ));
        };
        let name = format!("delta_rule_{}{}_{key}", letter(qkv.dtype), letter(out.dtype));
        for level in &host.levels {
            let arguments = Arguments::default()
                .buffer(qkv)
                .buffer(gates)
                .buffer(states)
                .buffer(out)
                .pointer(layout.segments(level.first))
                .ints([shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim]);
            self.launch(
                &name,
                (shape.value_dim.div_ceil(32), shape.value_heads, level.count),
                128,
                arguments,
            )?;
        }
        Ok(())
    }

    fn gated_rms_norm(
        &self,
        o: &mut Buffer,
        projected: &Buffer,
        weight: &Buffer,
        eps: f32,
        shape: &DeltaNet,
        rows: usize,
    ) -> Result<()> {
        let items = rows * shape.value_heads;
        holds("gated_rms_norm", "o", o, items * shape.value_dim)?;
        holds("gated_rms_norm", "projected", projected, rows * shape.projected_width())?;
        holds("gated_rms_norm", "weight", weight, shape.value_dim)?;
        let name = format!("gated_norm_{}{}", letter(projected.dtype), letter(o.dtype));
        let arguments = Arguments::default()
            .buffer(o)
            .buffer(projected)
            .buffer(weight)
            .int(items)
            .int(shape.value_heads)
            .int(shape.value_dim)
            .int(shape.projected_width())
            .int(shape.conv_dim())
            .float(eps);
        self.launch(&name, (items.div_ceil(8), 1, 1), 256, arguments)
    }

    fn query_key_value(
        &self,
        projected: &Buffer,
        query_norm: &Buffer,
        key_norm: &Buffer,
        eps: f32,
        shape: &Attention,
        layout: &Layout,
        query: &mut Buffer,
        keys: &mut Buffer,
        values: &mut Buffer,
    ) -> Result<()> {
        let host = &layout.host;
        check_head("query_key_value", shape)?;
        if host.rotary_pairs * 2 != shape.rotary_dim || shape.rotary_dim > shape.head_dim {
            let reason = format!("rotary_dim {} with {} frequencies", shape.rotary_dim, host.rotary_pairs);
            return Err(contract("query_key_value", reason));
        }
        let kv_width = shape.kv_heads * shape.head_dim;
        holds("query_key_value", "projected", projected, host.rows * shape.projected_width())?;
        holds("query_key_value", "query", query, host.rows * shape.heads * shape.head_dim)?;
        holds("query_key_value", "keys", keys, host.key_rows * kv_width)?;
        holds("query_key_value", "values", values, host.key_rows * kv_width)?;
        holds("query_key_value", "query_norm", query_norm, shape.head_dim)?;
        holds("query_key_value", "key_norm", key_norm, shape.head_dim)?;
        is("query_key_value", "values", values, keys.dtype)?;
        let name = format!(
            "query_key_value_{}{}{}",
            letter(projected.dtype),
            letter(query.dtype),
            letter(keys.dtype)
        );
        let arguments = Arguments::default()
            .buffer(projected)
            .buffer(query_norm)
            .buffer(key_norm)
            .float(eps)
            .ints([shape.heads, shape.kv_heads, shape.head_dim, shape.rotary_dim])
            .pointer(layout.rotary())
            .pointer(layout.key_rows())
            .buffer(query)
            .buffer(keys)
            .buffer(values);
        self.launch(&name, (host.rows, (shape.heads + 2 * shape.kv_heads).div_ceil(8), 1), 256, arguments)
    }

    fn attention(
        &self,
        query: &Buffer,
        projected: &Buffer,
        keys: &Buffer,
        values: &Buffer,
        shape: &Attention,
        layout: &Layout,
        out: &mut Buffer,
    ) -> Result<()> {
        let host = &layout.host;
        check_head("attention", shape)?;
        let width = shape.heads * shape.head_dim;
        let kv_width = shape.kv_heads * shape.head_dim;
        holds("attention", "query", query, host.rows * width)?;
        holds("attention", "projected", projected, host.rows * shape.projected_width())?;
        holds("attention", "keys", keys, host.key_rows * kv_width)?;
        holds("attention", "values", values, host.key_rows * kv_width)?;
        holds("attention", "out", out, host.rows * width)?;
        is("attention", "projected", projected, query.dtype)?;
        is("attention", "values", values, keys.dtype)?;
        let tensor_cores = keys.dtype == DType::BF16
            && out.dtype == DType::BF16
            && [64, 128, 256].contains(&shape.head_dim)
            && self.device.shared_memory() >= attention_shared(shape.head_dim);
        if tensor_cores {
            return self.attention_spans(query, projected, keys, values, shape, layout, out);
        }
        let arguments = Arguments::default()
            .buffer(query)
            .buffer(projected)
            .buffer(keys)
            .buffer(values)
            .buffer(out)
            .pointer(layout.tiles())
            .pointer(layout.segments(0))
            .pointer(layout.ranges())
            .ints([shape.heads, shape.kv_heads, shape.head_dim, shape.rotary_dim])
            .float(1.0 / (shape.head_dim as f32).sqrt());
        let group = shape.heads / shape.kv_heads;
        let types = format!("{}{}", letter(query.dtype), letter(projected.dtype));
        let head = if shape.head_dim <= 64 { 64 } else { shape.head_dim.next_power_of_two() };
        let name = format!("attention_{types}{}{}_{head}", letter(keys.dtype), letter(out.dtype));
        // `SimtShared` in attention.cu.
        let shared = 4 * (32 * head + 32 * (head + 4) + 32 * 36 + 4 * 32);
        self.launch_with(&name, (host.tiles, shape.kv_heads * group.div_ceil(2), 1), 256, shared, arguments)
    }

    fn gather_readouts(&self, x: &Buffer, width: usize, layout: &Layout, out: &mut Buffer) -> Result<()> {
        let host = &layout.host;
        holds("gather_readouts", "x", x, host.rows * width)?;
        holds("gather_readouts", "out", out, host.readout_rows * width)?;
        self.gather((x.dtype, x.memory.pointer()), layout.readouts(), host.readout_rows, width, out)
    }

    fn pointer_head(
        &self,
        h: &Buffer,
        query_weight: &Weight,
        query_bias: &Buffer,
        key_weight: &Weight,
        key_bias: &Buffer,
        hidden: usize,
        head_dim: usize,
        layout: &Layout,
    ) -> Result<Vec<f32>> {
        let host = &layout.host;
        is("pointer_head", "h", h, DType::F32)?;
        holds("pointer_head", "h", h, host.readout_rows * hidden)?;
        for (weight, bias) in [(query_weight, query_bias), (key_weight, key_bias)] {
            holds("pointer_head", "a bias", bias, head_dim)?;
            if (weight.columns, weight.depth) != (head_dim, hidden) {
                let reason = format!(
                    "a weight [{}, {}], expected [{head_dim}, {hidden}]",
                    weight.columns, weight.depth
                );
                return Err(contract("pointer_head", reason));
            }
        }
        if query_weight.dtype != key_weight.dtype {
            return Err(contract("pointer_head", "weights of two dtypes".to_owned()));
        }
        let elements = host.readout_rows * head_dim;
        let projected = self.device.borrow("the pointer head", 2 * elements * 4)?;
        let logits = self.device.borrow("logits", host.options * 4)?;
        let arguments = Arguments::default()
            .buffer(h)
            .pointer(query_weight.memory.pointer())
            .pointer(key_weight.memory.pointer())
            .buffer(query_bias)
            .buffer(key_bias)
            .pointer(projected.pointer())
            .int(host.readout_rows)
            .int(hidden)
            .int(head_dim);
        let blocks = (head_dim.div_ceil(8), host.readout_rows.div_ceil(4), 2);
        self.launch(&format!("pointer_project_{}", letter(query_weight.dtype)), blocks, 256, arguments)?;
        let arguments = Arguments::default()
            .pointer(projected.pointer())
            .pointer(projected.pointer() + 4 * elements as u64)
            .pointer(layout.scores())
            .pointer(logits.pointer())
            .int(host.options)
            .int(head_dim)
            .float(1.0 / (head_dim as f32).sqrt());
        self.launch("pointer_scores", (host.options.div_ceil(8), 1, 1), 256, arguments)?;
        Ok(floats(&logits.download(host.options * 4)?))
    }
}

impl CudaOps {
    /// Computes a layout's rotary angles.
    fn rotate(&self, layout: &Layout) -> Result<()> {
        let items = layout.host.rows * layout.host.rotary_pairs;
        let arguments = Arguments::default()
            .pointer(layout.positions())
            .pointer(layout.inv_freq())
            .pointer(layout.rotary())
            .int(layout.host.rows)
            .int(layout.host.rotary_pairs);
        self.launch("rotary_table", (items.div_ceil(256), 1, 1), 256, arguments)
    }

    /// The tables of a shape that [`Ops::padding`] made a layout of, and whether its operations are recorded.
    fn prepared(&self, shape: Shape) -> Option<(Arc<LayoutMemory>, bool)> {
        let recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        recordings.get(&shape).map(|prepared| (Arc::clone(&prepared.memory), prepared.recording.is_some()))
    }
}

fn check_head(operation: &'static str, shape: &Attention) -> Result<()> {
    if shape.head_dim == 0 || shape.head_dim > 256 {
        return Err(contract(operation, format!("head_dim {}, supported are 1 to 256", shape.head_dim)));
    }
    if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
        return Err(contract(operation, format!("{} heads over {} key heads", shape.heads, shape.kv_heads)));
    }
    Ok(())
}
