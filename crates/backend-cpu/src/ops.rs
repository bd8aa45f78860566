//! Owns the implementation of `backend::Ops`: checks every operand against the contract, then runs the operation's body in
//! this backend's pool of threads. Past the checks a body trusts its operands.

use std::sync::{Mutex, PoisonError};

use backend::{Attention, BackendError, DeltaNet, Extent, HostTensor, Ops, Pass, Projection, Result, Role};
use rayon::ThreadPool;

use crate::layout::CpuLayout;
use crate::memory::{CpuBuffer, CpuWeight, contract, widen};
use crate::{attention, conv, delta, head, linear, query_key_value, rows};

/// The operations on this machine's cores.
#[derive(Debug)]
pub struct CpuOps {
    pool: ThreadPool,
    /// The turned rows of a product, kept from one to the next: at most 512 rows of the widest input.
    turned: Mutex<Vec<f32>>,
}

impl CpuOps {
    /// A backend with its own pool of threads; 0 means one per core.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the system gives no threads.
    pub fn new(threads: usize) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("cpu-ops-{index}"))
            .build()
            .map_err(|error| BackendError::Device(format!("cannot start {threads} threads: {error}")))?;
        Ok(Self { pool, turned: Mutex::default() })
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs a body in the pool.
    fn run<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        self.pool.install(body)
    }
}

impl Ops for CpuOps {
    type Buffer = CpuBuffer;
    type Weight = CpuWeight;
    type Layout = CpuLayout;

    fn describe(&self) -> String {
        format!("cpu, {} threads, profile exact (fp32)", self.threads())
    }

    fn element_bytes(&self, _role: Role) -> usize {
        size_of::<f32>()
    }

    fn zeros(&self, role: Role, elements: usize) -> Result<CpuBuffer> {
        CpuBuffer::zeros(role, elements)
    }

    fn parameter(&self, tensor: &HostTensor) -> Result<CpuBuffer> {
        Ok(CpuBuffer { data: widen(tensor)? })
    }

    fn weight(&self, parts: &[Projection]) -> Result<CpuWeight> {
        CpuWeight::new(parts)
    }

    fn read(&self, buffer: &CpuBuffer, elements: usize) -> Result<Vec<f32>> {
        buffer.get("read", [1, elements]).map(<[f32]>::to_vec)
    }

    fn layout(&self, pass: &Pass, inv_freq: &[f32]) -> Result<CpuLayout> {
        CpuLayout::new(pass, inv_freq)
    }

    fn extent(&self, layout: &CpuLayout) -> Extent {
        Extent { rows: layout.pass.rows(), readout_rows: layout.readout_rows().count() }
    }

    fn embed(&self, table: &CpuWeight, layout: &CpuLayout, out: &mut CpuBuffer) -> Result<()> {
        let out = out.get_mut("embed", [layout.rows(), table.input])?;
        self.run(|| rows::embed(table, layout, out))
    }

    fn rms_norm(
        &self,
        x: &CpuBuffer,
        weight: &CpuBuffer,
        eps: f32,
        rows: usize,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "rms_norm";
        let shape = [rows, weight.data.len()];
        positive(OP, &[("weight", shape[1])])?;
        let (x, out) = (x.get(OP, shape)?, out.get_mut(OP, shape)?);
        self.run(|| rows::norm(x, &weight.data, eps, out));
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
        const OP: &str = "add_rms_norm";
        let shape = [rows, weight.data.len()];
        positive(OP, &[("weight", shape[1])])?;
        let (residual, delta) = (residual.get_mut(OP, shape)?, delta.get(OP, shape)?);
        let out = out.get_mut(OP, shape)?;
        self.run(|| rows::add_norm(residual, delta, &weight.data, eps, out));
        Ok(())
    }

    fn linear(&self, x: &CpuBuffer, weight: &CpuWeight, rows: usize, out: &mut CpuBuffer) -> Result<()> {
        const OP: &str = "linear";
        let (x, out) = (x.get(OP, [rows, weight.input])?, out.get_mut(OP, [rows, weight.output])?);
        let turned = &mut *self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        self.run(|| linear::linear(x, weight, out, turned));
        Ok(())
    }

    fn swiglu(&self, gate_up: &CpuBuffer, inner: usize, rows: usize, out: &mut CpuBuffer) -> Result<()> {
        const OP: &str = "swiglu";
        positive(OP, &[("inner", inner)])?;
        let gate_up = gate_up.get(OP, [rows, inner.saturating_mul(2)])?;
        let out = out.get_mut(OP, [rows, inner])?;
        self.run(|| rows::swiglu(gate_up, inner, out));
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
        delta_net(OP, shape)?;
        let (rows, channels) = (layout.rows(), shape.conv_dim());
        let projected = projected.get(OP, [rows, shape.projected_width()])?;
        let weight = weight.vector(OP, channels * shape.kernel)?;
        let tails = tails.get_mut(OP, [layout.slots, (shape.kernel - 1) * channels])?;
        let out = out.get_mut(OP, [rows, channels])?;
        self.run(|| conv::conv_silu(projected, weight, shape, layout, tails, out));
        Ok(())
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
        delta_net(OP, shape)?;
        let projected = projected.get(OP, [rows, shape.projected_width()])?;
        let a_log = a_log.vector(OP, shape.value_heads)?;
        let dt_bias = dt_bias.vector(OP, shape.value_heads)?;
        let gates = gates.get_mut(OP, [rows, 2 * shape.value_heads])?;
        self.run(|| delta::gates(projected, a_log, dt_bias, shape, gates));
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
        delta_net(OP, shape)?;
        let rows = layout.rows();
        let qkv = qkv.get(OP, [rows, shape.conv_dim()])?;
        let gates = gates.get(OP, [rows, 2 * shape.value_heads])?;
        let state = shape.value_heads * shape.key_dim * shape.value_dim;
        let states = states.get_mut(OP, [layout.slots, state])?;
        let out = out.get_mut(OP, [rows, shape.value_width()])?;
        self.run(|| delta::rule(qkv, gates, shape, layout, states, out));
        Ok(())
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
        delta_net(OP, shape)?;
        let o = o.get_mut(OP, [rows, shape.value_width()])?;
        let projected = projected.get(OP, [rows, shape.projected_width()])?;
        let weight = weight.vector(OP, shape.value_dim)?;
        self.run(|| delta::gated_rms_norm(o, projected, weight, eps, shape));
        Ok(())
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
        heads(OP, shape)?;
        let rows = layout.rows();
        if layout.rotary_dim != shape.rotary_dim {
            let reason = format!("tables rotate {} dimensions, not {}", layout.rotary_dim, shape.rotary_dim);
            return Err(contract(OP, reason));
        }
        let arena = [layout.key_rows, shape.kv_heads * shape.head_dim];
        let from = query_key_value::Projections {
            projected: projected.get(OP, [rows, shape.projected_width()])?,
            query_norm: query_norm.vector(OP, shape.head_dim)?,
            key_norm: key_norm.vector(OP, shape.head_dim)?,
            eps,
        };
        let query = query.get_mut(OP, [rows, shape.heads * shape.head_dim])?;
        let (keys, values) = (keys.get_mut(OP, arena)?, values.get_mut(OP, arena)?);
        self.run(|| query_key_value::query_key_value(&from, shape, layout, query, keys, values));
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
        heads(OP, shape)?;
        let rows = layout.rows();
        let arena = [layout.key_rows, shape.kv_heads * shape.head_dim];
        let operands = attention::Operands {
            query: query.get(OP, [rows, shape.heads * shape.head_dim])?,
            projected: projected.get(OP, [rows, shape.projected_width()])?,
            keys: keys.get(OP, arena)?,
            values: values.get(OP, arena)?,
            shape,
        };
        let out = out.get_mut(OP, [rows, shape.heads * shape.head_dim])?;
        self.run(|| attention::attention(&operands, layout, out));
        Ok(())
    }

    fn gather_readouts(
        &self,
        x: &CpuBuffer,
        width: usize,
        layout: &CpuLayout,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        const OP: &str = "gather_readouts";
        positive(OP, &[("width", width)])?;
        let x = x.get(OP, [layout.rows(), width])?;
        let out = out.get_mut(OP, [layout.readout_rows().count(), width])?;
        rows::gather(x, width, layout, out);
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
        for weight in [query_weight, key_weight] {
            if [weight.output, weight.input] != [head_dim, hidden] {
                let reason =
                    format!("a weight is [{}, {}], not [{head_dim}, {hidden}]", weight.output, weight.input);
                return Err(contract(OP, reason));
            }
        }
        let h = h.get(OP, [layout.readout_rows().count(), hidden])?;
        let query = head::Projected { weight: query_weight, bias: query_bias.vector(OP, head_dim)? };
        let key = head::Projected { weight: key_weight, bias: key_bias.vector(OP, head_dim)? };
        let turned = &mut *self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.run(|| head::logits(h, &query, &key, layout, turned)))
    }
}

/// Largest dimension of a shape; products of four stay far from overflow.
const MAX_DIMENSION: usize = 1 << 15;

fn positive(operation: &'static str, dimensions: &[(&str, usize)]) -> Result<()> {
    match dimensions.iter().find(|(_, value)| *value == 0) {
        Some((name, _)) => Err(contract(operation, format!("{name} is 0"))),
        None => Ok(()),
    }
}

fn bounded(operation: &'static str, dimensions: &[(&str, usize)]) -> Result<()> {
    positive(operation, dimensions)?;
    match dimensions.iter().find(|(_, value)| *value > MAX_DIMENSION) {
        Some((name, value)) => Err(contract(operation, format!("{name} is {value}, above {MAX_DIMENSION}"))),
        None => Ok(()),
    }
}

/// Checks the shape of a DeltaNet mixer.
fn delta_net(operation: &'static str, shape: &DeltaNet) -> Result<()> {
    let DeltaNet { key_heads, value_heads, key_dim, value_dim, kernel } = *shape;
    let dimensions = [
        ("key_heads", key_heads),
        ("value_heads", value_heads),
        ("key_dim", key_dim),
        ("value_dim", value_dim),
        ("kernel", kernel),
    ];
    bounded(operation, &dimensions)?;
    if value_heads % key_heads != 0 {
        let reason = format!("{value_heads} value heads are no multiple of {key_heads} key heads");
        return Err(contract(operation, reason));
    }
    Ok(())
}

/// Checks the shape of a full-attention mixer.
fn heads(operation: &'static str, shape: &Attention) -> Result<()> {
    let Attention { heads, kv_heads, head_dim, rotary_dim } = *shape;
    bounded(operation, &[("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)])?;
    if heads % kv_heads != 0 {
        let reason = format!("{heads} query heads are no multiple of {kv_heads} key heads");
        return Err(contract(operation, reason));
    }
    if rotary_dim > head_dim || rotary_dim % 2 != 0 {
        return Err(contract(operation, format!("rotates {rotary_dim} of {head_dim} dimensions")));
    }
    Ok(())
}
