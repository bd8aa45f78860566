//! Owns the backbone as the official service runs it: one padded pass at a time, layer by layer, over BF16 buffers. Knows no
//! request and no bucket.

use artifact::{Export, LayerKind, Tensor, TensorType};
use backend::{BackendError, DType, HostTensor};
use backend_cuda::{
    ATTENTION_DIM, AttentionHeads, Buffer, DELTA_DIM, DeltaHeads, DeltaScratch, Grid, HISTORY_ROWS,
    HeadSource, Rotation, ServiceOps,
};
use half::bf16;
use model::ModelError;

/// What passes may hold at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Tokens, padding included.
    pub(crate) rows: usize,
    /// Places of keys of all rows of a batch.
    pub(crate) keys: usize,
    /// Rows of a batch.
    pub(crate) batch: usize,
}

enum Mixer {
    Linear {
        qkv: Buffer,
        z: Buffer,
        b: Buffer,
        a: Buffer,
        conv: Buffer,
        a_log: Buffer,
        dt_bias: Buffer,
        norm: Buffer,
        out: Buffer,
    },
    Full {
        query: Buffer,
        key: Buffer,
        value: Buffer,
        query_norm: Buffer,
        key_norm: Buffer,
        out: Buffer,
    },
}

struct Layer {
    input_norm: Buffer,
    mixer: Mixer,
    post_norm: Buffer,
    gate: Buffer,
    up: Buffer,
    down: Buffer,
}

struct Head {
    query: (Buffer, Buffer),
    key: (Buffer, Buffer),
    dim: usize,
}

struct Work {
    residual: Buffer,
    normed: Buffer,
    /// qkv, or queries with their gates, or the MLP's gate.
    first: Buffer,
    /// z, or keys, or the MLP's up.
    second: Buffer,
    /// Convolved q, k and v, or values, or the MLP's product.
    third: Buffer,
    small: [Buffer; 2],
    gates: [Buffer; 2],
    states: Buffer,
    history: Buffer,
    query: Buffer,
    keys: Buffer,
    values: Buffer,
    mixed: Buffer,
    delta: Buffer,
    scratch: DeltaScratch,
}

/// What a state leaves for its questions.
pub(crate) struct StateMemory {
    /// Tokens of the state.
    pub(crate) len: usize,
    recurrent: Option<Buffer>,
    tails: Option<Buffer>,
    key_values: Option<Buffer>,
}

/// A padded batch of states or questions.
pub(crate) struct PassInput<'a> {
    pub(crate) grid: Grid,
    /// Token ids, `[batch, length]`.
    pub(crate) ids: Vec<i32>,
    /// Positions, `[batch, length]`.
    pub(crate) positions: Vec<i32>,
    /// Per batch row: places of keys before this one are hidden.
    pub(crate) hidden: Vec<i32>,
    /// Whether tokens before `hidden` are padding that DeltaNet must not see.
    pub(crate) left_padded: bool,
    /// Places of keys in front of the batch's own.
    pub(crate) bank: usize,
    /// Per batch row the state that it continues; none when the batch holds states.
    pub(crate) states: Option<Vec<&'a StateMemory>>,
}

/// One tensor of a trace.
#[derive(Clone, Debug)]
pub struct TraceTensor {
    /// Pass, layer and place, as the reference's trace names it.
    pub name: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    /// Values.
    pub values: Vec<bf16>,
}

/// A trace in the making, and the pass it is at.
pub(crate) struct Trace {
    pub(crate) tensors: Vec<TraceTensor>,
    pub(crate) pass: String,
    pub(crate) passes: usize,
    /// A layer of which every operation is kept.
    pub(crate) inside: Option<usize>,
}

pub(crate) struct ServiceModel {
    ops: ServiceOps,
    embedding: Buffer,
    layers: Vec<Layer>,
    final_norm: Buffer,
    head: Head,
    frequencies: Buffer,
    heads: DeltaHeads,
    attention: AttentionHeads,
    rotary: usize,
    hidden: usize,
    intermediate: usize,
    eps: f32,
    limits: Limits,
    work: Work,
    pub(crate) trace: Option<Trace>,
}

pub(crate) fn host(tensor: &Tensor) -> HostTensor {
    let dtype = match tensor.dtype {
        TensorType::F32 => DType::F32,
        TensorType::BF16 => DType::BF16,
    };
    HostTensor { dtype, shape: tensor.shape.clone(), data: tensor.data.clone() }
}

/// Widths that buffers share.
struct Widths {
    first: usize,
    second: usize,
    third: usize,
    mixed: usize,
}

fn widths(export: &Export) -> Widths {
    let g = &export.geometry;
    let channels = DeltaHeads { keys: g.linear_key_heads, values: g.linear_value_heads }.channels();
    let (values, queries) = (g.linear_value_heads * DELTA_DIM, g.heads * ATTENTION_DIM);
    Widths {
        first: channels.max(2 * queries).max(g.intermediate),
        second: values.max(g.kv_heads * ATTENTION_DIM).max(g.intermediate),
        third: channels.max(g.kv_heads * ATTENTION_DIM).max(g.intermediate),
        mixed: values.max(queries),
    }
}

fn layers_of(export: &Export, kind: LayerKind) -> usize {
    export.geometry.layers.iter().filter(|other| **other == kind).count()
}

/// Bytes of a state that does not grow with its tokens, and of every token.
pub(crate) fn state_bytes(export: &Export) -> (usize, usize) {
    let g = &export.geometry;
    let heads = DeltaHeads { keys: g.linear_key_heads, values: g.linear_value_heads };
    let linear =
        layers_of(export, LayerKind::Linear) * (heads.state() * 4 + HISTORY_ROWS * heads.channels() * 2);
    (linear, layers_of(export, LayerKind::Full) * 2 * g.kv_heads * ATTENTION_DIM * 2)
}

/// Bytes of everything that [`ServiceModel::load`] allocates: weights, then buffers.
pub(crate) fn planned_bytes(export: &Export, limits: Limits) -> (usize, usize) {
    let g = &export.geometry;
    let heads = DeltaHeads { keys: g.linear_key_heads, values: g.linear_value_heads };
    let weights: usize = g.tensors().iter().map(|spec| 2 * spec.shape.iter().product::<usize>()).sum();
    let w = widths(export);
    let row = 2 * (3 * g.hidden + w.first + w.second + w.third + w.mixed + g.heads * ATTENTION_DIM)
        + 12 * g.linear_value_heads;
    let buffers = limits.rows * row
        + limits.keys * 4 * g.kv_heads * ATTENTION_DIM
        + limits.batch * (heads.state() * 4 + HISTORY_ROWS * heads.channels() * 2)
        + ServiceOps::delta_scratch_bytes(heads, chunks(limits), limits.batch);
    (weights + 8 * export.head.head_dim * (g.hidden + 1), buffers)
}

/// Chunks of the delta rule that a pass has at most: each row of a batch may end in one that is not full.
fn chunks(limits: Limits) -> usize {
    limits.rows.div_ceil(64) + limits.batch
}

/// What of a geometry this profile's kernels do not support.
pub(crate) fn unsupported(export: &Export) -> Option<String> {
    let g = &export.geometry;
    [
        ("linear_key_head_dim", g.linear_key_dim, DELTA_DIM),
        ("linear_value_head_dim", g.linear_value_dim, DELTA_DIM),
        ("linear_conv_kernel_dim", g.conv_kernel, HISTORY_ROWS + 1),
        ("head_dim", g.head_dim, ATTENTION_DIM),
        ("hidden_size modulo 128", g.hidden % 128, 0),
    ]
    .into_iter()
    .find(|(_, found, expected)| found != expected)
    .map(|(what, found, expected)| {
        format!("config.json {what}: profile service supports {expected}, found {found}")
    })
}

struct Loader<'a> {
    ops: &'a ServiceOps,
    export: &'a Export,
}

impl Loader<'_> {
    fn half(&self, name: &str) -> Result<Buffer, ModelError> {
        Ok(self.ops.half(&host(&self.export.tensor(name)?))?)
    }

    fn wide(&self, tensor: &Tensor) -> Result<Buffer, ModelError> {
        let values: Vec<f32> = match tensor.dtype {
            TensorType::F32 => tensor
                .data
                .chunks_exact(4)
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect(),
            TensorType::BF16 => tensor
                .data
                .chunks_exact(2)
                .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
                .collect(),
        };
        Ok(self.ops.wide(&values)?)
    }

    fn layer(&self, index: usize, kind: LayerKind) -> Result<Layer, ModelError> {
        let at = |name: &str| self.half(&format!("layers.{index}.{name}"));
        let mixer = match kind {
            LayerKind::Linear => Mixer::Linear {
                qkv: at("linear_attn.in_proj_qkv.weight")?,
                z: at("linear_attn.in_proj_z.weight")?,
                b: at("linear_attn.in_proj_b.weight")?,
                a: at("linear_attn.in_proj_a.weight")?,
                conv: at("linear_attn.conv1d.weight")?,
                a_log: at("linear_attn.A_log")?,
                dt_bias: at("linear_attn.dt_bias")?,
                norm: at("linear_attn.norm.weight")?,
                out: at("linear_attn.out_proj.weight")?,
            },
            LayerKind::Full => Mixer::Full {
                query: at("self_attn.q_proj.weight")?,
                key: at("self_attn.k_proj.weight")?,
                value: at("self_attn.v_proj.weight")?,
                query_norm: at("self_attn.q_norm.weight")?,
                key_norm: at("self_attn.k_norm.weight")?,
                out: at("self_attn.o_proj.weight")?,
            },
        };
        Ok(Layer {
            input_norm: at("input_layernorm.weight")?,
            mixer,
            post_norm: at("post_attention_layernorm.weight")?,
            gate: at("mlp.gate_proj.weight")?,
            up: at("mlp.up_proj.weight")?,
            down: at("mlp.down_proj.weight")?,
        })
    }
}

/// `r(1 / theta^(2j / rotary))`: the service rounds every buffer of the model to BF16, this one too.
fn frequencies(theta: f64, rotary: usize) -> Vec<f32> {
    (0..rotary / 2)
        .map(|j| {
            let exponent = (2 * j) as f32 / rotary as f32;
            bf16::from_f32(1.0 / (theta as f32).powf(exponent)).to_f32()
        })
        .collect()
}

impl ServiceModel {
    pub(crate) fn load(ops: ServiceOps, export: &Export, limits: Limits) -> Result<Self, ModelError> {
        let g = &export.geometry;
        let loader = Loader { ops: &ops, export };
        let layers = g
            .layers
            .iter()
            .enumerate()
            .map(|(index, kind)| loader.layer(index, *kind))
            .collect::<Result<Vec<_>, ModelError>>()?;
        let heads = DeltaHeads { keys: g.linear_key_heads, values: g.linear_value_heads };
        let w = widths(export);
        let half = |what: &str, elements: usize| ops.buffer(what, DType::BF16, elements);
        let wide = |what: &str, elements: usize| ops.buffer(what, DType::F32, elements);
        let rows = limits.rows;
        let bank = limits.keys * g.kv_heads * ATTENTION_DIM;
        let work = Work {
            residual: half("the residual stream", rows * g.hidden)?,
            normed: half("normed rows", rows * g.hidden)?,
            first: half("projections", rows * w.first)?,
            second: half("projections", rows * w.second)?,
            third: half("projections", rows * w.third)?,
            small: [half("gates", rows * heads.values)?, half("gates", rows * heads.values)?],
            gates: [wide("gates", rows * heads.values)?, wide("gates", rows * heads.values)?],
            states: wide("states", limits.batch * heads.state())?,
            history: half("history", limits.batch * HISTORY_ROWS * heads.channels())?,
            query: half("queries", rows * g.heads * ATTENTION_DIM)?,
            keys: half("keys", bank)?,
            values: half("values", bank)?,
            mixed: half("mixed rows", rows * w.mixed)?,
            delta: half("what a block adds", rows * g.hidden)?,
            scratch: ops.delta_scratch(heads, chunks(limits), limits.batch)?,
        };
        let head = &export.head;
        Ok(Self {
            embedding: loader.half("embed_tokens.weight")?,
            final_norm: loader.half("norm.weight")?,
            head: Head {
                query: (loader.wide(&head.query_weight)?, loader.wide(&head.query_bias)?),
                key: (loader.wide(&head.key_weight)?, loader.wide(&head.key_bias)?),
                dim: head.head_dim,
            },
            frequencies: ops.wide(&frequencies(g.rope_theta, g.rotary_dim))?,
            layers,
            heads,
            attention: AttentionHeads { queries: g.heads, keys: g.kv_heads },
            rotary: g.rotary_dim,
            hidden: g.hidden,
            intermediate: g.intermediate,
            eps: g.rms_eps as f32,
            limits,
            work,
            ops,
            trace: None,
        })
    }

    pub(crate) fn ops(&self) -> &ServiceOps {
        &self.ops
    }

    fn kept(&self, kind: fn(&Mixer) -> bool) -> usize {
        self.layers.iter().filter(|layer| kind(&layer.mixer)).count()
    }

    /// Memory for what a state of `len` tokens leaves.
    pub(crate) fn state_memory(&self, len: usize) -> Result<StateMemory, ModelError> {
        let linear = self.kept(|mixer| matches!(mixer, Mixer::Linear { .. }));
        let full = self.layers.len() - linear;
        let some = |what: &str, dtype, elements: usize| {
            (elements > 0).then(|| self.ops.borrowed(what, dtype, elements)).transpose()
        };
        let mut tails = some("a kept tail", DType::BF16, linear * HISTORY_ROWS * self.heads.channels())?;
        if let Some(tails) = &mut tails {
            self.ops.clear(tails)?;
        }
        Ok(StateMemory {
            len,
            recurrent: some("a kept state", DType::F32, linear * self.heads.state())?,
            tails,
            key_values: some("kept keys", DType::BF16, full * 2 * self.attention.keys * len * ATTENTION_DIM)?,
        })
    }

    /// Runs a pass. With `keep`, batch row b leaves its state in `keep[b]`. Afterwards the normed rows of the last layer are in
    /// `normed`.
    pub(crate) fn run(&mut self, input: &PassInput, keep: &mut [StateMemory]) -> Result<(), ModelError> {
        let grid = input.grid;
        let places = input.bank + grid.length;
        for (what, found, planned) in [
            ("rows", grid.rows(), self.limits.rows),
            ("keys", grid.batch * places, self.limits.keys),
            ("batch rows", grid.batch, self.limits.batch),
        ] {
            if found > planned {
                return Err(ModelError::Capacity { what, found, planned });
            }
        }
        let ids = self.ops.ints(&input.ids)?;
        let positions = self.ops.ints(&input.positions)?;
        let hidden = self.ops.ints(&input.hidden)?;
        if input.states.is_some() {
            // Hidden places are read, masked; what is there must be finite.
            self.ops.clear(&mut self.work.keys)?;
            self.ops.clear(&mut self.work.values)?;
        }
        self.ops.embed(&self.embedding, &ids, self.hidden, &mut self.work.residual)?;
        self.note("layer00.in", grid, |work| &work.residual)?;
        let (mut linear, mut full) = (0, 0);
        for index in 0..self.layers.len() {
            let layer = &self.layers[index];
            let padding = input.left_padded && matches!(layer.mixer, Mixer::Linear { .. });
            let first = padding.then_some(&hidden);
            let (ops, work, eps) = (&self.ops, &mut self.work, self.eps);
            let delta = (index > 0).then_some(&work.delta);
            ops.add_rms_norm(
                &mut work.residual,
                delta,
                &layer.input_norm,
                first,
                eps,
                grid,
                self.hidden,
                &mut work.normed,
            )?;
            if index > 0 {
                self.note(&format!("layer{:02}.out", index - 1), grid, |work| &work.residual)?;
            }
            note_inside(
                &self.ops,
                &mut self.trace,
                (index, "input_norm"),
                grid,
                self.hidden,
                &self.work.normed,
            )?;
            match &self.layers[index].mixer {
                Mixer::Linear { .. } => {
                    self.delta_net(index, linear, input, keep)?;
                    linear += 1;
                }
                Mixer::Full { .. } => {
                    self.full_attention(index, full, input, &positions, &hidden, keep)?;
                    full += 1;
                }
            }
            self.note(&format!("layer{index:02}.mixer"), grid, |work| &work.delta)?;
            self.feed_forward(index, grid)?;
        }
        let (ops, work) = (&self.ops, &mut self.work);
        ops.add_rms_norm(
            &mut work.residual,
            Some(&work.delta),
            &self.final_norm,
            None,
            self.eps,
            grid,
            self.hidden,
            &mut work.normed,
        )?;
        let last = self.layers.len() - 1;
        self.note(&format!("layer{last:02}.out"), grid, |work| &work.residual)?;
        self.note("output", grid, |work| &work.normed)
    }

    fn delta_net(
        &mut self,
        index: usize,
        linear: usize,
        input: &PassInput,
        keep: &mut [StateMemory],
    ) -> Result<(), ModelError> {
        let Mixer::Linear { qkv, z, b, a, conv, a_log, dt_bias, norm, out } = &self.layers[index].mixer
        else {
            return Ok(());
        };
        let (ops, work, heads, grid) = (&self.ops, &mut self.work, self.heads, input.grid);
        let (rows, channels, values) = (grid.rows(), heads.channels(), heads.values * DELTA_DIM);
        // FP32 elements count as two in copies.
        let (state, matrix) = (2 * heads.state(), 2 * DELTA_DIM * DELTA_DIM);
        let tail = HISTORY_ROWS * channels;
        let from_states = match &input.states {
            None => {
                ops.clear(&mut work.states)?;
                false
            }
            Some(states) => {
                for (batch, memory) in states.iter().enumerate() {
                    if let (Some(recurrent), Some(tails)) = (&memory.recurrent, &memory.tails) {
                        let target = &mut work.states;
                        ops.copy(
                            recurrent,
                            target,
                            (heads.values, matrix),
                            (linear * state, matrix),
                            (batch * state, matrix),
                        )?;
                        let (from, to) = ((linear * tail, channels), (batch * tail, channels));
                        ops.copy(tails, &mut work.history, (HISTORY_ROWS, channels), from, to)?;
                    }
                }
                true
            }
        };
        ops.linear(&work.normed, qkv, (rows, channels, self.hidden), &mut work.first)?;
        ops.linear(&work.normed, z, (rows, values, self.hidden), &mut work.second)?;
        let [small_b, small_a] = &mut work.small;
        ops.linear(&work.normed, b, (rows, heads.values, self.hidden), small_b)?;
        ops.linear(&work.normed, a, (rows, heads.values, self.hidden), small_a)?;
        let parts = [
            ("in_proj_qkv", channels, &work.first),
            ("in_proj_z", values, &work.second),
            ("in_proj_b", heads.values, &*small_b),
            ("in_proj_a", heads.values, &*small_a),
        ];
        for (name, width, buffer) in parts {
            note_inside(ops, &mut self.trace, (index, name), grid, width, buffer)?;
        }
        let history = from_states.then_some(&work.history);
        ops.conv(&work.first, conv, history, grid, channels, &mut work.third)?;
        let [beta, decay] = &mut work.gates;
        ops.gates((small_b, small_a), (a_log, dt_bias), rows, heads.values, (beta, decay))?;
        ops.delta_rule(
            &work.third,
            (beta, decay),
            heads,
            grid,
            &mut work.states,
            &mut work.scratch,
            &mut work.mixed,
        )?;
        for (batch, memory) in keep.iter_mut().enumerate() {
            if let (Some(recurrent), Some(tails)) = (&mut memory.recurrent, &mut memory.tails) {
                ops.copy(
                    &work.states,
                    recurrent,
                    (heads.values, matrix),
                    (batch * state, matrix),
                    (linear * state, matrix),
                )?;
                // A state of fewer tokens has zeros before them, which its memory begins with.
                let count = HISTORY_ROWS.min(grid.length);
                let last = ((batch + 1) * grid.length - count) * channels;
                let to = linear * tail + (HISTORY_ROWS - count) * channels;
                ops.copy(&work.first, tails, (count, channels), (last, channels), (to, channels))?;
            }
        }
        note_inside(ops, &mut self.trace, (index, "core"), grid, values, &work.mixed)?;
        ops.gated_norm(&mut work.mixed, &work.second, norm, self.eps, rows * heads.values)?;
        note_inside(ops, &mut self.trace, (index, "mixed"), grid, values, &work.mixed)?;
        ops.linear(&work.mixed, out, (rows, self.hidden, values), &mut work.delta)?;
        Ok(())
    }

    fn full_attention(
        &mut self,
        index: usize,
        full: usize,
        input: &PassInput,
        positions: &backend_cuda::Ints,
        hidden: &backend_cuda::Ints,
        keep: &mut [StateMemory],
    ) -> Result<(), ModelError> {
        let Mixer::Full { query, key, value, query_norm, key_norm, out } = &self.layers[index].mixer else {
            return Ok(());
        };
        let (ops, work, heads, grid) = (&self.ops, &mut self.work, self.attention, input.grid);
        let (rows, places) = (grid.rows(), input.bank + grid.length);
        let (queries, keys) = (heads.queries * ATTENTION_DIM, heads.keys * ATTENTION_DIM);
        for (batch, memory) in input.states.iter().flatten().enumerate() {
            let Some(kept) = &memory.key_values else { continue };
            let run = memory.len * ATTENTION_DIM;
            for (side, target) in [&mut work.keys, &mut work.values].into_iter().enumerate() {
                let from = (full * 2 + side) * heads.keys * run;
                let to = (batch * heads.keys * places + input.bank - memory.len) * ATTENTION_DIM;
                ops.copy(kept, target, (heads.keys, run), (from, run), (to, places * ATTENTION_DIM))?;
            }
        }
        ops.linear(&work.normed, query, (rows, 2 * queries, self.hidden), &mut work.first)?;
        ops.linear(&work.normed, key, (rows, keys, self.hidden), &mut work.second)?;
        ops.linear(&work.normed, value, (rows, keys, self.hidden), &mut work.third)?;
        for (name, width, buffer) in [
            ("q_proj", 2 * queries, &work.first),
            ("k_proj", keys, &work.second),
            ("v_proj", keys, &work.third),
        ] {
            note_inside(ops, &mut self.trace, (index, name), grid, width, buffer)?;
        }
        let rotation = |norm| Rotation {
            norm,
            frequencies: &self.frequencies,
            positions,
            rotary: self.rotary,
            eps: self.eps,
        };
        let place = HeadSource { heads: heads.queries, row: 2 * queries, stride: 2 * ATTENTION_DIM };
        ops.heads(&work.first, place, Some(&rotation(query_norm)), grid, (grid.length, 0), &mut work.query)?;
        let place = HeadSource { heads: heads.keys, row: keys, stride: ATTENTION_DIM };
        let target = (places, input.bank);
        ops.heads(&work.second, place, Some(&rotation(key_norm)), grid, target, &mut work.keys)?;
        ops.heads(&work.third, place, None, grid, target, &mut work.values)?;
        let kept = (&work.keys, &work.values);
        ops.attention(&work.query, kept, hidden, heads, grid, (places, input.bank), &mut work.mixed)?;
        for (batch, memory) in keep.iter_mut().enumerate() {
            let run = memory.len * ATTENTION_DIM;
            let len = memory.len;
            let Some(kept) = &mut memory.key_values else { continue };
            for (side, source) in [&work.keys, &work.values].into_iter().enumerate() {
                let from = (batch * heads.keys * places + places - len) * ATTENTION_DIM;
                let to = (full * 2 + side) * heads.keys * run;
                ops.copy(source, kept, (heads.keys, run), (from, places * ATTENTION_DIM), (to, run))?;
            }
        }
        ops.output_gate(&mut work.mixed, &work.first, heads.queries, rows)?;
        note_inside(ops, &mut self.trace, (index, "mixed"), grid, queries, &work.mixed)?;
        ops.linear(&work.mixed, out, (rows, self.hidden, queries), &mut work.delta)?;
        Ok(())
    }

    fn feed_forward(&mut self, index: usize, grid: Grid) -> Result<(), ModelError> {
        let layer = &self.layers[index];
        let (ops, work, rows) = (&self.ops, &mut self.work, grid.rows());
        ops.add_rms_norm(
            &mut work.residual,
            Some(&work.delta),
            &layer.post_norm,
            None,
            self.eps,
            grid,
            self.hidden,
            &mut work.normed,
        )?;
        let shape = (rows, self.intermediate, self.hidden);
        ops.linear(&work.normed, &layer.gate, shape, &mut work.first)?;
        ops.linear(&work.normed, &layer.up, shape, &mut work.second)?;
        for (name, width, buffer) in [
            ("post_norm", self.hidden, &work.normed),
            ("gate_proj", self.intermediate, &work.first),
            ("up_proj", self.intermediate, &work.second),
        ] {
            note_inside(ops, &mut self.trace, (index, name), grid, width, buffer)?;
        }
        ops.swiglu(&work.first, &work.second, rows * self.intermediate, &mut work.third)?;
        ops.linear(&work.third, &layer.down, (rows, self.hidden, self.intermediate), &mut work.delta)?;
        note_inside(ops, &mut self.trace, (index, "down_proj"), grid, self.hidden, &work.delta)?;
        Ok(())
    }

    /// Pointer logits of rows of the pass that ran last: `read` holds the decide row of each question and its option rows.
    pub(crate) fn logits(&mut self, read: &[(usize, Vec<usize>)]) -> Result<Vec<Vec<f32>>, ModelError> {
        let (mut rows, mut pairs): (Vec<i32>, Vec<[i32; 2]>) = (Vec::new(), Vec::new());
        for (decide, options) in read {
            let at = rows.len();
            rows.extend(std::iter::once(decide).chain(options).map(|row| *row as i32));
            pairs.extend((1..=options.len()).map(|option| [at as i32, (at + option) as i32]));
        }
        let index = self.ops.ints(&rows)?;
        let mut h = self.ops.borrowed("rows that are read", DType::F32, rows.len() * self.hidden)?;
        self.ops.gather_wide(&self.work.normed, &index, self.hidden, &mut h)?;
        let ((query, query_bias), (key, key_bias)) = (&self.head.query, &self.head.key);
        let shape = (rows.len(), self.hidden, self.head.dim);
        let flat = self.ops.pointer_head(&h, (query, query_bias), (key, key_bias), shape, &pairs)?;
        let mut rest = flat.into_iter();
        Ok(read.iter().map(|(_, options)| rest.by_ref().take(options.len()).collect()).collect())
    }

    /// Keeps a buffer for the trace, if one is made.
    fn note(&mut self, name: &str, grid: Grid, pick: fn(&Work) -> &Buffer) -> Result<(), ModelError> {
        note(&self.ops, &mut self.trace, name, grid, self.hidden, pick(&self.work))
    }
}

fn note(
    ops: &ServiceOps,
    trace: &mut Option<Trace>,
    name: &str,
    grid: Grid,
    width: usize,
    buffer: &Buffer,
) -> Result<(), ModelError> {
    let Some(trace) = trace else { return Ok(()) };
    let values = ops.read_half(buffer, grid.rows() * width)?;
    let shape = vec![grid.batch, grid.length, width];
    trace.tensors.push(TraceTensor { name: format!("{}.{name}", trace.pass), shape, values });
    Ok(())
}

/// Keeps a buffer for the trace, if one is made of the inside of this layer.
fn note_inside(
    ops: &ServiceOps,
    trace: &mut Option<Trace>,
    (layer, name): (usize, &str),
    grid: Grid,
    width: usize,
    buffer: &Buffer,
) -> Result<(), ModelError> {
    if trace.as_ref().is_none_or(|trace| trace.inside != Some(layer)) {
        return Ok(());
    }
    note(ops, trace, &format!("layer{layer:02}.{name}"), grid, width, buffer)
}

/// Refuses an export that this profile cannot run.
pub(crate) fn check(export: &Export) -> Result<(), ModelError> {
    match unsupported(export) {
        None => Ok(()),
        Some(reason) => {
            Err(ModelError::Backend(BackendError::Contract { operation: "profile service", reason }))
        }
    }
}
