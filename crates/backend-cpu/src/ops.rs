//! Owns the implementation of `backend::Ops`: checks every operand's size, then runs the operation's body in its pool.

use backend::{Attention, DeltaNet, HostTensor, Ops, Pass, Projection, Result, Role};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::attention::{self, Projections};
use crate::memory::{CpuBuffer, CpuLayout, CpuWeight, contract, widen, widen_bytes};
use crate::{elementwise, linear, mixer};

/// The operations on this machine's cores.
#[derive(Debug)]
pub struct CpuOps {
    pool: ThreadPool,
}

impl CpuOps {
    /// A backend with its own pool of threads; 0 means one per core.
    ///
    /// # Errors
    /// [`backend::BackendError::Device`] when the system gives no threads.
    pub fn new(threads: usize) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("cpu-ops-{index}"))
            .build()
            .map_err(|error| {
                backend::BackendError::Device(format!("cannot start {threads} threads: {error}"))
            })?;
        Ok(Self { pool })
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

impl Ops for CpuOps {
    type Buffer = CpuBuffer;
    type Weight = CpuWeight;
    type Layout = CpuLayout;

    fn describe(&self) -> String {
        format!("cpu, {} threads, profile exact (fp32)", self.threads())
    }

    fn zeros(&self, _role: Role, elements: usize) -> Result<CpuBuffer> {
        CpuBuffer::zeros(elements)
    }

    fn parameter(&self, tensor: &HostTensor) -> Result<CpuBuffer> {
        Ok(CpuBuffer { data: widen(tensor)? })
    }

    fn weight(&self, parts: &[Projection]) -> Result<CpuWeight> {
        CpuWeight::new(parts)
    }

    fn read(&self, buffer: &CpuBuffer, elements: usize) -> Result<Vec<f32>> {
        buffer.get("read", elements).map(<[f32]>::to_vec)
    }

    fn layout(&self, pass: &Pass, inv_freq: &[f32]) -> Result<CpuLayout> {
        Ok(CpuLayout::new(pass, inv_freq))
    }

    fn embed(&self, table: &CpuWeight, layout: &CpuLayout, out: &mut CpuBuffer) -> Result<()> {
        let [part] = &table.parts[..] else { return Err(contract("embed", "a table has one part")) };
        let (width, element) = (table.input, part.tensor.dtype.size());
        let out = out.get_mut("embed", layout.pass.rows() * width)?;
        for (token, out) in layout.pass.tokens.iter().zip(out.chunks_exact_mut(width)) {
            let start = *token as usize * width * element;
            let Some(bytes) = part.tensor.data.get(start..start + width * element) else {
                return Err(contract("embed", format!("token {token} of a vocabulary of {}", table.output)));
            };
            widen_bytes(part.tensor.dtype, bytes, out);
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &CpuBuffer,
        weight: &CpuBuffer,
        eps: f32,
        rows: usize,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let width = weight.data.len();
        let x = x.get("rms_norm", rows * width)?;
        let out = out.get_mut("rms_norm", rows * width)?;
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            pulp::Arch::new().dispatch(|| elementwise::rms_norm(x, &weight.data, eps, out));
        }
        Ok(())
    }

    fn add_rms_norm(
        &self,
        residual: &mut CpuBuffer,
        delta: &CpuBuffer,
        weight: &CpuBuffer,
        eps: f32,
        rows: usize,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let width = weight.data.len();
        let delta = delta.get("add_rms_norm", rows * width)?;
        for (residual, delta) in residual.get_mut("add_rms_norm", rows * width)?.iter_mut().zip(delta) {
            *residual += delta;
        }
        self.rms_norm(residual, weight, eps, rows, out)
    }

    fn linear(&self, x: &CpuBuffer, weight: &CpuWeight, rows: usize, out: &mut CpuBuffer) -> Result<()> {
        self.pool.install(|| linear::linear(&x.data, weight, rows, &mut out.data))
    }

    fn swiglu(&self, gate_up: &CpuBuffer, inner: usize, rows: usize, out: &mut CpuBuffer) -> Result<()> {
        let gate_up = gate_up.get("swiglu", rows * 2 * inner)?;
        let out = out.get_mut("swiglu", rows * inner)?;
        self.pool.install(|| {
            out.par_chunks_mut(inner).zip(gate_up.par_chunks(2 * inner)).for_each(|(out, gate_up)| {
                let (gate, up) = gate_up.split_at(inner);
                for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                    *out = elementwise::silu(*gate) * up;
                }
            });
        });
        Ok(())
    }

    fn conv_silu(
        &self,
        projected: &CpuBuffer,
        weight: &CpuBuffer,
        shape: &DeltaNet,
        layout: &CpuLayout,
        tails: &mut CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "conv_silu";
        let rows = layout.pass.rows();
        let projected = projected.get(OP, rows * shape.projected_width())?;
        let weight = weight.get(OP, shape.conv_dim() * shape.kernel)?;
        let tails = tails.get_mut(OP, slots(layout) * (shape.kernel - 1) * shape.conv_dim())?;
        let out = out.get_mut(OP, rows * shape.conv_dim())?;
        self.pool.install(|| mixer::conv_silu(projected, weight, shape, layout, tails, out))
    }

    fn delta_gates(
        &self,
        projected: &CpuBuffer,
        a_log: &CpuBuffer,
        dt_bias: &CpuBuffer,
        shape: &DeltaNet,
        rows: usize,
        gates: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "delta_gates";
        let projected = projected.get(OP, rows * shape.projected_width())?;
        let a_log = a_log.get(OP, shape.value_heads)?;
        let dt_bias = dt_bias.get(OP, shape.value_heads)?;
        mixer::delta_gates(
            projected,
            a_log,
            dt_bias,
            shape,
            gates.get_mut(OP, rows * 2 * shape.value_heads)?,
        );
        Ok(())
    }

    fn delta_rule(
        &self,
        qkv: &CpuBuffer,
        gates: &CpuBuffer,
        shape: &DeltaNet,
        layout: &CpuLayout,
        states: &mut CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "delta_rule";
        let rows = layout.pass.rows();
        let qkv = qkv.get(OP, rows * shape.conv_dim())?;
        let gates = gates.get(OP, rows * 2 * shape.value_heads)?;
        let states =
            states.get_mut(OP, slots(layout) * shape.value_heads * shape.key_dim * shape.value_dim)?;
        let out = out.get_mut(OP, rows * shape.value_width())?;
        self.pool.install(|| mixer::delta_rule(qkv, gates, shape, layout, states, out))
    }

    fn gated_rms_norm(
        &self,
        o: &mut CpuBuffer,
        projected: &CpuBuffer,
        weight: &CpuBuffer,
        eps: f32,
        shape: &DeltaNet,
        rows: usize,
    ) -> Result<()> {
        const OP: &str = "gated_rms_norm";
        let o = o.get_mut(OP, rows * shape.value_width())?;
        let projected = projected.get(OP, rows * shape.projected_width())?;
        self.pool.install(|| mixer::gated_rms_norm(o, projected, &weight.data, eps, shape))
    }

    fn query_key_value(
        &self,
        projected: &CpuBuffer,
        query_norm: &CpuBuffer,
        key_norm: &CpuBuffer,
        eps: f32,
        shape: &Attention,
        layout: &CpuLayout,
        query: &mut CpuBuffer,
        keys: &mut CpuBuffer,
        values: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "query_key_value";
        let rows = layout.pass.rows();
        check_rotary(OP, shape, layout)?;
        let arena = key_rows(layout) * shape.kv_heads * shape.head_dim;
        let from = Projections {
            projected: projected.get(OP, rows * shape.projected_width())?,
            query_norm: query_norm.get(OP, shape.head_dim)?,
            key_norm: key_norm.get(OP, shape.head_dim)?,
            eps,
        };
        let query = query.get_mut(OP, rows * shape.heads * shape.head_dim)?;
        let (keys, values) = (keys.get_mut(OP, arena)?, values.get_mut(OP, arena)?);
        self.pool.install(|| attention::query_key_value(&from, shape, layout, query, keys, values));
        Ok(())
    }

    fn attention(
        &self,
        query: &CpuBuffer,
        projected: &CpuBuffer,
        keys: &CpuBuffer,
        values: &CpuBuffer,
        shape: &Attention,
        layout: &CpuLayout,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "attention";
        let rows = layout.pass.rows();
        let arena = key_rows(layout) * shape.kv_heads * shape.head_dim;
        let query = query.get(OP, rows * shape.heads * shape.head_dim)?;
        let projected = projected.get(OP, rows * shape.projected_width())?;
        let (keys, values) = (keys.get(OP, arena)?, values.get(OP, arena)?);
        let out = out.get_mut(OP, rows * shape.heads * shape.head_dim)?;
        self.pool.install(|| attention::attention(query, projected, keys, values, shape, layout, out))
    }

    fn gather_readouts(
        &self,
        x: &CpuBuffer,
        width: usize,
        layout: &CpuLayout,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "gather_readouts";
        let x = x.get(OP, layout.pass.rows() * width)?;
        let rows: Vec<usize> = layout
            .pass
            .readouts
            .iter()
            .flat_map(|readout| std::iter::once(readout.decide).chain(readout.options.iter().copied()))
            .collect();
        let out = out.get_mut(OP, rows.len() * width)?;
        for (row, out) in rows.into_iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&x[row * width..(row + 1) * width]);
        }
        Ok(())
    }

    fn pointer_head(
        &self,
        h: &CpuBuffer,
        query_weight: &CpuWeight,
        query_bias: &CpuBuffer,
        key_weight: &CpuWeight,
        key_bias: &CpuBuffer,
        hidden: usize,
        head_dim: usize,
        layout: &CpuLayout,
    ) -> Result<Vec<f32>> {
        const OP: &str = "pointer_head";
        if [query_weight, key_weight].iter().any(|weight| weight.input != hidden || weight.output != head_dim)
        {
            return Err(contract(OP, format!("weights are not [{head_dim}, {hidden}]")));
        }
        let rows: usize = layout.pass.readouts.iter().map(|readout| 1 + readout.options.len()).sum();
        let h = h.get(OP, rows * hidden)?;
        let (mut queries, mut keys) = (vec![0.0; rows * head_dim], vec![0.0; rows * head_dim]);
        self.pool.install(|| {
            linear::linear(h, query_weight, rows, &mut queries)?;
            linear::linear(h, key_weight, rows, &mut keys)
        })?;
        for (values, bias) in [(&mut queries, query_bias), (&mut keys, key_bias)] {
            let bias = bias.get(OP, head_dim)?;
            values
                .chunks_exact_mut(head_dim)
                .for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
        }
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut logits = Vec::with_capacity(rows);
        let mut row = 0;
        for readout in &layout.pass.readouts {
            let query = &queries[row * head_dim..(row + 1) * head_dim];
            for option in 1..=readout.options.len() {
                let key = &keys[(row + option) * head_dim..(row + option + 1) * head_dim];
                logits.push(elementwise::dot(key, query) * scale);
            }
            row += 1 + readout.options.len();
        }
        Ok(logits)
    }
}

/// Slots an arena must have for a pass.
fn slots(layout: &CpuLayout) -> usize {
    let named =
        layout.pass.segments.iter().flat_map(|segment| segment.initial.into_iter().chain(segment.last));
    named.max().map_or(0, |slot| slot + 1)
}

/// Key rows an arena must have for a pass.
fn key_rows(layout: &CpuLayout) -> usize {
    let ranges = layout.pass.segments.iter().flat_map(|segment| &segment.keys);
    ranges.map(|range| range.row + range.len).max().unwrap_or(0)
}

fn check_rotary(operation: &'static str, shape: &Attention, layout: &CpuLayout) -> Result<()> {
    let expected = layout.pass.rows() * shape.rotary_dim;
    if layout.rotary.len() == expected && shape.rotary_dim <= shape.head_dim {
        return Ok(());
    }
    let reason = format!("layout has {} rotary values, expected {expected}", layout.rotary.len());
    Err(contract(operation, reason))
}
