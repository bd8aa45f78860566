//! Owns how an export's tensors become a backend's weights: names, fusions, parameters. One place knows tensor names.

use artifact::{ArtifactError, Export, LayerKind, Tensor, TensorType};
use backend::{Attention, BackendError, DType, DeltaNet, HostTensor, LowRank, Ops, Projection};

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The export lacks something.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A pass is larger than what was planned for.
    #[error("a pass of {found} {what} exceeds the {planned} planned at start")]
    Capacity {
        /// Rows, readouts.
        what: &'static str,
        /// In the pass.
        found: usize,
        /// Planned.
        planned: usize,
    },
}

/// Which of an export's two sets of projections a profile multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSet {
    /// The base's projections with their adapters, never rounded: profile `exact`.
    Exact,
    /// The merged BF16 projections.
    Merged,
}

pub(crate) enum Mixer<B: Ops> {
    Linear {
        in_proj: B::Weight,
        conv: B::Buffer,
        a_log: B::Buffer,
        dt_bias: B::Buffer,
        norm: B::Buffer,
        out_proj: B::Weight,
    },
    Full {
        in_proj: B::Weight,
        query_norm: B::Buffer,
        key_norm: B::Buffer,
        out_proj: B::Weight,
    },
}

pub(crate) struct Layer<B: Ops> {
    pub(crate) input_norm: B::Buffer,
    pub(crate) mixer: Mixer<B>,
    pub(crate) post_norm: B::Buffer,
    pub(crate) gate_up: B::Weight,
    pub(crate) down: B::Weight,
}

pub(crate) struct Weights<B: Ops> {
    pub(crate) embedding: B::Weight,
    pub(crate) layers: Vec<Layer<B>>,
    pub(crate) final_norm: B::Buffer,
    pub(crate) query_weight: B::Weight,
    pub(crate) query_bias: B::Buffer,
    pub(crate) key_weight: B::Weight,
    pub(crate) key_bias: B::Buffer,
}

pub(crate) fn delta_net(export: &Export) -> DeltaNet {
    let g = &export.geometry;
    DeltaNet {
        key_heads: g.linear_key_heads,
        value_heads: g.linear_value_heads,
        key_dim: g.linear_key_dim,
        value_dim: g.linear_value_dim,
        kernel: g.conv_kernel,
    }
}

pub(crate) fn attention(export: &Export) -> Attention {
    let g = &export.geometry;
    Attention { heads: g.heads, kv_heads: g.kv_heads, head_dim: g.head_dim, rotary_dim: g.rotary_dim }
}

impl<B: Ops> Weights<B> {
    pub(crate) fn load(ops: &B, export: &Export, set: WeightSet) -> Result<Self, ModelError> {
        let loader = Loader { ops, export, set };
        let layers = export
            .geometry
            .layers
            .iter()
            .enumerate()
            .map(|(index, kind)| loader.layer(index, *kind))
            .collect::<Result<Vec<_>, ModelError>>()?;
        let head = &export.head;
        Ok(Self {
            embedding: ops.weight(&[host(&export.tensor("embed_tokens.weight")?).into()])?,
            layers,
            final_norm: loader.parameter("norm.weight")?,
            query_weight: ops.weight(&[host(&head.query_weight).into()])?,
            query_bias: ops.parameter(&host(&head.query_bias))?,
            key_weight: ops.weight(&[host(&head.key_weight).into()])?,
            key_bias: ops.parameter(&host(&head.key_bias))?,
        })
    }
}

struct Loader<'a, B: Ops> {
    ops: &'a B,
    export: &'a Export,
    set: WeightSet,
}

impl<B: Ops> Loader<'_, B> {
    fn layer(&self, index: usize, kind: LayerKind) -> Result<Layer<B>, ModelError> {
        let at = |name: &str| format!("layers.{index}.{name}");
        let mixer = match kind {
            LayerKind::Linear => Mixer::Linear {
                in_proj: self.weight(
                    &["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
                        .map(|n| at(&format!("linear_attn.{n}.weight"))),
                )?,
                conv: self.parameter(&at("linear_attn.conv1d.weight"))?,
                a_log: self.parameter(&at("linear_attn.A_log"))?,
                dt_bias: self.parameter(&at("linear_attn.dt_bias"))?,
                norm: self.parameter(&at("linear_attn.norm.weight"))?,
                out_proj: self.weight(&[at("linear_attn.out_proj.weight")])?,
            },
            LayerKind::Full => Mixer::Full {
                in_proj: self
                    .weight(&["q_proj", "k_proj", "v_proj"].map(|n| at(&format!("self_attn.{n}.weight"))))?,
                query_norm: self.parameter(&at("self_attn.q_norm.weight"))?,
                key_norm: self.parameter(&at("self_attn.k_norm.weight"))?,
                out_proj: self.weight(&[at("self_attn.o_proj.weight")])?,
            },
        };
        Ok(Layer {
            input_norm: self.parameter(&at("input_layernorm.weight"))?,
            mixer,
            post_norm: self.parameter(&at("post_attention_layernorm.weight"))?,
            gate_up: self.weight(&[at("mlp.gate_proj.weight"), at("mlp.up_proj.weight")])?,
            down: self.weight(&[at("mlp.down_proj.weight")])?,
        })
    }

    fn parameter(&self, name: &str) -> Result<B::Buffer, ModelError> {
        Ok(self.ops.parameter(&host(&self.export.tensor(name)?))?)
    }

    fn weight(&self, names: &[String]) -> Result<B::Weight, ModelError> {
        let parts = names
            .iter()
            .map(|name| match self.set {
                WeightSet::Merged => Ok(host(&self.export.tensor(name)?).into()),
                WeightSet::Exact => {
                    let exact = self.export.projection(name)?;
                    let adapter =
                        LowRank { a: host(&exact.lora.a), b: host(&exact.lora.b), scale: exact.lora.scale };
                    Ok(Projection { weight: host(&exact.weight), adapter: Some(adapter) })
                }
            })
            .collect::<Result<Vec<Projection>, ModelError>>()?;
        Ok(self.ops.weight(&parts)?)
    }
}

fn host(tensor: &Tensor) -> HostTensor {
    let dtype = match tensor.dtype {
        TensorType::F32 => DType::F32,
        TensorType::BF16 => DType::BF16,
    };
    HostTensor { dtype, shape: tensor.shape.clone(), data: tensor.data.clone() }
}
