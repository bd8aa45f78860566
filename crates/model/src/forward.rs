//! Owns the forward pass: one layer loop that runs any pass, and the memory it needs, planned at start.

use artifact::{Export, LayerKind};
use backend::{Attention, DeltaNet, Extent, Ops, Pass, Role};

use crate::weights::{Mixer, ModelError, WeightSet, Weights, attention, delta_net};

/// How much memory a model plans for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSizes {
    /// Rows of the largest pass.
    pub pass_rows: usize,
    /// Readout rows (one per question and one per option) of the largest pass.
    pub readout_rows: usize,
    /// Slots of recurrent state.
    pub slots: usize,
    /// Rows of the key arena.
    pub key_rows: usize,
}

/// A loaded backbone with its head, its workspace and its arenas.
pub struct Model<B: Ops> {
    ops: B,
    weights: Weights<B>,
    delta_net: DeltaNet,
    attention: Attention,
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    head_dim: usize,
    eps: f32,
    inv_freq: Vec<f32>,
    sizes: ModelSizes,
    work: Workspace<B>,
    /// Per layer: its part of the arenas.
    arenas: Vec<Arena<B>>,
}

enum Arena<B: Ops> {
    Linear { tails: B::Buffer, states: B::Buffer },
    Full { keys: B::Buffer, values: B::Buffer },
}

/// Widths of the buffers that mixers and MLP share in turn.
struct Widths {
    projected: usize,
    mixed: usize,
    inner: usize,
}

impl Widths {
    fn new(delta_net: &DeltaNet, attention: &Attention, intermediate: usize) -> Self {
        let mixed = delta_net.value_width().max(attention.heads * attention.head_dim);
        let mixer = delta_net.projected_width().max(attention.projected_width());
        Self { projected: mixer.max(2 * intermediate), mixed, inner: mixed.max(intermediate) }
    }
}

struct Workspace<B: Ops> {
    residual: B::Buffer,
    normed: B::Buffer,
    /// The mixer's input projection, then the MLP's.
    projected: B::Buffer,
    convolved: B::Buffer,
    gates: B::Buffer,
    /// The mixer's output, then the MLP's gated product.
    inner: B::Buffer,
    query: B::Buffer,
    delta: B::Buffer,
    readout_mixed: B::Buffer,
    readout_residual: B::Buffer,
    readout_hidden: B::Buffer,
}

impl ModelSizes {
    /// Bytes of workspace and arenas that [`Model::load`] allocates besides the weights.
    pub fn bytes<B: Ops>(&self, ops: &B, export: &Export) -> usize {
        let g = &export.geometry;
        let (delta_net, attention) = (delta_net(export), attention(export));
        let widths = Widths::new(&delta_net, &attention, g.intermediate);
        let bytes = |role, elements: usize| ops.element_bytes(role) * elements;
        let row = bytes(Role::Residual, g.hidden)
            + bytes(Role::Operand, g.hidden + widths.inner)
            + bytes(Role::Activation, widths.projected + attention.heads * attention.head_dim + g.hidden)
            + bytes(Role::Convolved, delta_net.conv_dim())
            + bytes(Role::Gates, 2 * delta_net.value_heads);
        let readout = bytes(Role::Operand, widths.mixed)
            + bytes(Role::Residual, g.hidden)
            + bytes(Role::Head, g.hidden);
        self.pass_rows * row
            + self.readout_rows * readout
            + self.slots * slot_bytes(ops, export)
            + self.key_rows * key_row_bytes(ops, export)
    }
}

fn layers(export: &Export, kind: LayerKind) -> usize {
    export.geometry.layers.iter().filter(|other| **other == kind).count()
}

/// Bytes of one slot of recurrent state, all layers.
pub fn slot_bytes<B: Ops>(ops: &B, export: &Export) -> usize {
    let shape = delta_net(export);
    let tail = ops.element_bytes(Role::ConvTail) * (shape.kernel - 1) * shape.conv_dim();
    let state = ops.element_bytes(Role::Recurrent) * shape.value_heads * shape.key_dim * shape.value_dim;
    layers(export, LayerKind::Linear) * (tail + state)
}

/// Bytes of one row of keys and values, all layers.
pub fn key_row_bytes<B: Ops>(ops: &B, export: &Export) -> usize {
    let shape = attention(export);
    2 * layers(export, LayerKind::Full) * ops.element_bytes(Role::KeyValue) * shape.kv_heads * shape.head_dim
}

impl<B: Ops> Model<B> {
    /// Loads an export and allocates everything a pass will need.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor the export lacks or memory the backend cannot give.
    pub fn load(ops: B, export: &Export, set: WeightSet, sizes: ModelSizes) -> Result<Self, ModelError> {
        let weights = Weights::load(&ops, export, set)?;
        let g = &export.geometry;
        let (delta_net, attention) = (delta_net(export), attention(export));
        let rows = sizes.pass_rows;
        let widths = Widths::new(&delta_net, &attention, g.intermediate);
        let work = Workspace {
            residual: ops.zeros(Role::Residual, rows * g.hidden)?,
            normed: ops.zeros(Role::Operand, rows * g.hidden)?,
            projected: ops.zeros(Role::Activation, rows * widths.projected)?,
            convolved: ops.zeros(Role::Convolved, rows * delta_net.conv_dim())?,
            gates: ops.zeros(Role::Gates, rows * 2 * delta_net.value_heads)?,
            query: ops.zeros(Role::Activation, rows * attention.heads * attention.head_dim)?,
            delta: ops.zeros(Role::Activation, rows * g.hidden)?,
            inner: ops.zeros(Role::Operand, rows * widths.inner)?,
            readout_mixed: ops.zeros(Role::Operand, sizes.readout_rows * widths.mixed)?,
            readout_residual: ops.zeros(Role::Residual, sizes.readout_rows * g.hidden)?,
            readout_hidden: ops.zeros(Role::Head, sizes.readout_rows * g.hidden)?,
        };
        let arenas = weights
            .layers
            .iter()
            .map(|layer| {
                Ok(match &layer.mixer {
                    Mixer::Linear { .. } => Arena::Linear {
                        tails: ops.zeros(
                            Role::ConvTail,
                            sizes.slots * (delta_net.kernel - 1) * delta_net.conv_dim(),
                        )?,
                        states: ops.zeros(
                            Role::Recurrent,
                            sizes.slots * delta_net.value_heads * delta_net.key_dim * delta_net.value_dim,
                        )?,
                    },
                    Mixer::Full { .. } => {
                        let elements = sizes.key_rows * attention.kv_heads * attention.head_dim;
                        Arena::Full {
                            keys: ops.zeros(Role::KeyValue, elements)?,
                            values: ops.zeros(Role::KeyValue, elements)?,
                        }
                    }
                })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        ops.warm_up(rows)?;
        let mut model = Self {
            inv_freq: inverse_frequencies(g.rope_theta, g.rotary_dim),
            eps: g.rms_eps as f32,
            vocab: g.vocab,
            hidden: g.hidden,
            intermediate: g.intermediate,
            head_dim: export.head.head_dim,
            ops,
            weights,
            delta_net,
            attention,
            sizes,
            work,
            arenas,
        };
        // Largest first: what it borrows serves the others.
        for index in (0..model.ops.shapes()).rev() {
            let padding = model.ops.padding(index, &model.inv_freq)?;
            if model.fits(&padding) {
                model.submit(&padding)?;
            }
        }
        Ok(model)
    }

    fn fits(&self, layout: &B::Layout) -> bool {
        let Extent { rows, readout_rows } = self.ops.extent(layout);
        rows <= self.sizes.pass_rows && readout_rows <= self.sizes.readout_rows
    }

    /// The backend.
    pub fn ops(&self) -> &B {
        &self.ops
    }

    /// What was planned for.
    pub fn sizes(&self) -> ModelSizes {
        self.sizes
    }

    /// One line about the backend.
    pub fn describe(&self) -> String {
        self.ops.describe()
    }

    /// Runs a pass and returns the pointer logits of all options of all readouts, in order.
    ///
    /// # Errors
    /// [`ModelError::Capacity`] for a pass larger than planned, [`ModelError::Backend`] otherwise.
    pub fn run(&mut self, pass: &Pass) -> Result<Vec<f32>, ModelError> {
        let readout_rows: usize = pass.readouts.iter().map(|readout| 1 + readout.options.len()).sum();
        let largest = pass.tokens.iter().max().map_or(0, |token| *token as usize);
        for (what, found, planned) in [
            ("as largest token id", largest, self.vocab - 1),
            ("rows", pass.rows(), self.sizes.pass_rows),
            ("readout rows", readout_rows, self.sizes.readout_rows),
        ] {
            if found > planned {
                return Err(ModelError::Capacity { what, found, planned });
            }
        }
        pass.validate(self.sizes.slots, self.sizes.key_rows).map_err(backend::BackendError::from)?;
        let layout = self.ops.layout(pass, &self.inv_freq)?;
        self.submit(&layout)?;
        if readout_rows == 0 {
            return Ok(Vec::new());
        }
        let mut logits = self.ops.pointer_head(
            &self.work.readout_hidden,
            &self.weights.query_weight,
            &self.weights.query_bias,
            &self.weights.key_weight,
            &self.weights.key_bias,
            self.hidden,
            self.head_dim,
            &layout,
        )?;
        // A padded layout has padding readouts behind its own.
        logits.truncate(readout_rows - pass.readouts.len());
        Ok(logits)
    }

    /// Submits everything from the embedding to the last norm.
    fn submit(&mut self, layout: &B::Layout) -> Result<(), ModelError> {
        let ops = &self.ops;
        let mut forward = Forward {
            ops,
            weights: &self.weights,
            delta_net: &self.delta_net,
            attention: &self.attention,
            hidden: self.hidden,
            intermediate: self.intermediate,
            eps: self.eps,
            work: &mut self.work,
            arenas: &mut self.arenas,
            layout,
            extent: ops.extent(layout),
        };
        Ok(ops.submit(layout, &mut || forward.operations())?)
    }
}

/// The operations of one pass.
struct Forward<'a, B: Ops> {
    ops: &'a B,
    weights: &'a Weights<B>,
    delta_net: &'a DeltaNet,
    attention: &'a Attention,
    hidden: usize,
    intermediate: usize,
    eps: f32,
    work: &'a mut Workspace<B>,
    arenas: &'a mut [Arena<B>],
    layout: &'a B::Layout,
    extent: Extent,
}

impl<B: Ops> Forward<'_, B> {
    fn operations(&mut self) -> backend::Result<()> {
        let Extent { rows, readout_rows } = self.extent;
        self.ops.embed(&self.weights.embedding, self.layout, &mut self.work.residual)?;
        let last = self.weights.layers.len() - 1;
        let first_norm = &self.weights.layers[0].input_norm;
        self.ops.rms_norm(&self.work.residual, first_norm, self.eps, rows, &mut self.work.normed)?;
        for index in 0..last {
            self.mixer(index)?;
            self.feed_forward(index, rows, false)?;
        }
        self.mixer(last)?;
        if readout_rows == 0 {
            return Ok(());
        }
        // Nothing after the last mixer looks at another row, so only the rows that are read go on.
        let mixed_width = match self.weights.layers[last].mixer {
            Mixer::Linear { .. } => self.delta_net.value_width(),
            Mixer::Full { .. } => self.attention.heads * self.attention.head_dim,
        };
        let work = &mut *self.work;
        self.ops.gather_readouts(&work.inner, mixed_width, self.layout, &mut work.readout_mixed)?;
        self.ops.gather_readouts(&work.residual, self.hidden, self.layout, &mut work.readout_residual)?;
        self.feed_forward(last, readout_rows, true)
    }

    /// From the normed residual stream to the mixer's output, before its output projection.
    fn mixer(&mut self, index: usize) -> backend::Result<()> {
        let (ops, work, shape, layout) = (self.ops, &mut *self.work, self.delta_net, self.layout);
        let rows = self.extent.rows;
        match (&self.weights.layers[index].mixer, &mut self.arenas[index]) {
            (Mixer::Linear { in_proj, conv, a_log, dt_bias, norm, .. }, Arena::Linear { tails, states }) => {
                ops.linear(&work.normed, in_proj, rows, &mut work.projected)?;
                ops.conv_silu(&work.projected, conv, shape, layout, tails, &mut work.convolved)?;
                ops.delta_gates(&work.projected, a_log, dt_bias, shape, rows, &mut work.gates)?;
                ops.delta_rule(&work.convolved, &work.gates, shape, layout, states, &mut work.inner)?;
                ops.gated_rms_norm(&mut work.inner, &work.projected, norm, self.eps, shape, rows)
            }
            (Mixer::Full { in_proj, query_norm, key_norm, .. }, Arena::Full { keys, values }) => {
                let shape = self.attention;
                ops.linear(&work.normed, in_proj, rows, &mut work.projected)?;
                let (from, query) = (&work.projected, &mut work.query);
                ops.query_key_value(
                    from, query_norm, key_norm, self.eps, shape, layout, query, keys, values,
                )?;
                ops.attention(&work.query, &work.projected, keys, values, shape, layout, &mut work.inner)
            }
            // Arenas are made from the layers, one for one.
            _ => Err(backend::PassError(format!("layer {index}: another kind of arena")).into()),
        }
    }

    /// Output projection, MLP and the norm that follows; on the gathered rows after the last mixer.
    fn feed_forward(&mut self, index: usize, rows: usize, gathered: bool) -> backend::Result<()> {
        let layer = &self.weights.layers[index];
        let out_proj = match &layer.mixer {
            Mixer::Linear { out_proj, .. } | Mixer::Full { out_proj, .. } => out_proj,
        };
        let (ops, work, eps) = (self.ops, &mut *self.work, self.eps);
        let (mixed, residual) = if gathered {
            (&work.readout_mixed, &mut work.readout_residual)
        } else {
            (&work.inner, &mut work.residual)
        };
        ops.linear(mixed, out_proj, rows, &mut work.delta)?;
        ops.add_rms_norm(residual, &work.delta, &layer.post_norm, eps, rows, &mut work.normed)?;
        ops.linear(&work.normed, &layer.gate_up, rows, &mut work.projected)?;
        ops.swiglu(&work.projected, self.intermediate, rows, &mut work.inner)?;
        ops.linear(&work.inner, &layer.down, rows, &mut work.delta)?;
        let (norm, out) = if gathered {
            (&self.weights.final_norm, &mut work.readout_hidden)
        } else {
            (&self.weights.layers[index + 1].input_norm, &mut work.normed)
        };
        ops.add_rms_norm(residual, &work.delta, norm, eps, rows, out)
    }
}

/// `1 / theta^(2j / rotary_dim)` in FP32, operation by operation as the reference computes it.
fn inverse_frequencies(theta: f64, rotary_dim: usize) -> Vec<f32> {
    (0..rotary_dim / 2)
        .map(|j| {
            let exponent = (2 * j) as f32 / rotary_dim as f32;
            1.0 / (theta as f32).powf(exponent)
        })
        .collect()
}
