//! Owns the geometries that synthetic checkpoints come in: the released ones, and a tiny one that runs anywhere.

use serde_json::{Value, json};

use crate::geometry::{Geometry, LayerKind};

/// A geometry by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// Eight small layers, 2 million parameters.
    Tiny,
    /// Kev-0.8B.
    Kev08b,
    /// Kev-4B.
    Kev4b,
    /// Kev-9B.
    Kev9b,
    /// Kev-27B.
    Kev27b,
}

impl Preset {
    /// All of them, smallest first.
    pub const ALL: [Self; 5] = [Self::Tiny, Self::Kev08b, Self::Kev4b, Self::Kev9b, Self::Kev27b];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Kev08b => "kev-0.8b",
            Self::Kev4b => "kev-4b",
            Self::Kev9b => "kev-9b",
            Self::Kev27b => "kev-27b",
        }
    }

    /// What a checkpoint of it is made from. Released sizes are those of docs/architecture.md's sources; the temperatures are
    /// the published ones.
    pub fn recipe(self) -> Recipe {
        let released = |hidden, intermediate, layers, heads, kv_heads, value_heads, tied| Geometry {
            hidden,
            intermediate,
            layers: hybrid(layers),
            vocab: 248_320,
            heads,
            kv_heads,
            head_dim: 256,
            rotary_dim: 64,
            rope_theta: 1e7,
            linear_key_heads: 16,
            linear_value_heads: value_heads,
            linear_key_dim: 128,
            linear_value_dim: 128,
            conv_kernel: 4,
            rms_eps: 1e-6,
            max_positions: 262_144,
            tied_embeddings: tied,
        };
        let (geometry, temperature, head_dim) = match self {
            Self::Tiny => (
                Geometry {
                    hidden: 128,
                    intermediate: 256,
                    layers: hybrid(8),
                    vocab: 4096,
                    heads: 4,
                    kv_heads: 2,
                    head_dim: 64,
                    rotary_dim: 16,
                    linear_key_heads: 2,
                    linear_value_heads: 4,
                    linear_key_dim: 32,
                    linear_value_dim: 32,
                    ..released(0, 0, 0, 0, 0, 0, true)
                },
                2.406050072164233,
                64,
            ),
            Self::Kev08b => (released(1024, 3584, 24, 8, 2, 16, true), 2.35, 256),
            Self::Kev4b => (released(2560, 9216, 32, 16, 4, 32, true), 2.406050072164233, 256),
            Self::Kev9b => (released(4096, 12_288, 32, 16, 4, 32, false), 2.30, 256),
            Self::Kev27b => (released(5120, 17_408, 64, 24, 4, 48, false), 1.38, 256),
        };
        Recipe { name: self.name().to_owned(), geometry, temperature, rank: 16, alpha: 32, head_dim }
    }
}

/// Three DeltaNet layers, then one of attention, and again.
fn hybrid(count: usize) -> Vec<LayerKind> {
    (1..=count).map(|layer| if layer % 4 == 0 { LayerKind::Full } else { LayerKind::Linear }).collect()
}

/// What a synthetic checkpoint is made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Name of the geometry.
    pub name: String,
    /// Sizes of the backbone.
    pub geometry: Geometry,
    /// Divisor of the logits.
    pub temperature: f64,
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha.
    pub alpha: u32,
    /// Dimension of the pointer head's queries and keys.
    pub head_dim: usize,
}

impl Recipe {
    /// `config.json` in the published, multimodal layout.
    pub(crate) fn config(&self) -> Value {
        let g = &self.geometry;
        let layer_types: Vec<&str> = g
            .layers
            .iter()
            .map(|kind| match kind {
                LayerKind::Linear => "linear_attention",
                LayerKind::Full => "full_attention",
            })
            .collect();
        // Half of the rotated dimensions, split over three axes as the releases do (11, 11, 10 of 32).
        let pairs = g.rotary_dim / 2;
        let section = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3];
        let factor = g.rotary_dim as f64 / g.head_dim as f64;
        json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "dtype": "bfloat16",
            "model_type": "qwen3_5",
            "text_config": {
                "attention_bias": false,
                "attention_dropout": 0.0,
                "attn_output_gate": true,
                "dtype": "bfloat16",
                "full_attention_interval": 4,
                "head_dim": g.head_dim,
                "hidden_act": "silu",
                "hidden_size": g.hidden,
                "initializer_range": 0.02,
                "intermediate_size": g.intermediate,
                "layer_types": layer_types,
                "linear_conv_kernel_dim": g.conv_kernel,
                "linear_key_head_dim": g.linear_key_dim,
                "linear_num_key_heads": g.linear_key_heads,
                "linear_num_value_heads": g.linear_value_heads,
                "linear_value_head_dim": g.linear_value_dim,
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": g.max_positions,
                "model_type": "qwen3_5_text",
                "num_attention_heads": g.heads,
                "num_hidden_layers": g.layers.len(),
                "num_key_value_heads": g.kv_heads,
                "partial_rotary_factor": factor,
                "rms_norm_eps": g.rms_eps,
                "rope_parameters": {
                    "mrope_interleaved": true,
                    "mrope_section": section,
                    "partial_rotary_factor": factor,
                    "rope_theta": g.rope_theta,
                    "rope_type": "default",
                },
                "tie_word_embeddings": g.tied_embeddings,
                "vocab_size": g.vocab,
            },
            "tie_word_embeddings": g.tied_embeddings,
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 64,
                "model_type": "qwen3_5_vision",
                "num_heads": 2,
                "num_position_embeddings": 16,
                "out_hidden_size": g.hidden,
                "patch_size": 4,
            },
        })
    }
}
