//! Owns the geometry of a Qwen3.5 text backbone: what `config.json` says, and which tensors that implies.

use serde_json::Value;

use crate::error::{ArtifactError, Result};

const FILE: &str = "config.json";

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Gated DeltaNet (`linear_attention`).
    Linear,
    /// Softmax attention (`full_attention`).
    Full,
}

/// Sizes of a backbone. Released sizes differ only in these numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of the MLP.
    pub intermediate: usize,
    /// Kind of every layer, first to last.
    pub layers: Vec<LayerKind>,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Query heads of full attention.
    pub heads: usize,
    /// Key and value heads of full attention.
    pub kv_heads: usize,
    /// Dimension of an attention head.
    pub head_dim: usize,
    /// Rotated dimensions of a head.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Key heads of DeltaNet.
    pub linear_key_heads: usize,
    /// Value heads of DeltaNet.
    pub linear_value_heads: usize,
    /// Dimension of a DeltaNet key head.
    pub linear_key_dim: usize,
    /// Dimension of a DeltaNet value head.
    pub linear_value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
    /// Epsilon of every RMSNorm.
    pub rms_eps: f64,
    /// Longest sequence the base was made for.
    pub max_positions: usize,
    /// Whether the base has no `lm_head` of its own; nothing here reads it.
    pub tied_embeddings: bool,
}

/// A tensor the backbone needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name without the backbone's prefix.
    pub name: String,
    /// Exact shape.
    pub shape: Vec<usize>,
    /// Whether an adapter may target it: it is a projection.
    pub projection: bool,
    /// Whether F32 is accepted besides BF16.
    pub f32_allowed: bool,
}

impl Geometry {
    /// Reads a multimodal (`text_config`) or a text-only configuration.
    ///
    /// # Errors
    /// [`ArtifactError::Field`] naming the key whose value is missing, malformed or not supported.
    pub fn from_config(json: &Value) -> Result<Self> {
        let text = match json.get("text_config") {
            Some(text) => text,
            None => json,
        };
        let model_type = text.get("model_type").and_then(Value::as_str).unwrap_or("");
        if !matches!(model_type, "qwen3_5_text" | "qwen3_5") {
            return Err(ArtifactError::field(
                FILE,
                "model_type",
                "qwen3_5 or qwen3_5_text",
                shown(text.get("model_type")),
            ));
        }
        for (key, wanted) in [("hidden_act", "silu")] {
            if let Some(found) = text.get(key)
                && found.as_str() != Some(wanted)
            {
                return Err(ArtifactError::field(FILE, key, wanted, found));
            }
        }
        if text.get("attention_bias").is_some_and(|bias| bias != &Value::Bool(false)) {
            return Err(ArtifactError::field(
                FILE,
                "attention_bias",
                "false",
                shown(text.get("attention_bias")),
            ));
        }
        let rope = text.get("rope_parameters").unwrap_or(&Value::Null);
        if let Some(kind) = rope.get("rope_type").and_then(Value::as_str)
            && kind != "default"
        {
            return Err(ArtifactError::field(FILE, "rope_parameters.rope_type", "default", kind));
        }
        let head_dim = size(text, "head_dim")?;
        // The nested factor wins; saved configurations carry a top-level one even where the nested one differs.
        let factor = rope
            .get("partial_rotary_factor")
            .or_else(|| text.get("partial_rotary_factor"))
            .map_or(Some(1.0), Value::as_f64)
            .filter(|factor| *factor > 0.0 && *factor <= 1.0)
            .ok_or_else(|| {
                ArtifactError::field(
                    FILE,
                    "partial_rotary_factor",
                    "0 < factor <= 1",
                    shown(rope.get("partial_rotary_factor")),
                )
            })?;
        let rotary_dim = (head_dim as f64 * factor) as usize;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(ArtifactError::field(
                FILE,
                "partial_rotary_factor",
                "an even number of rotated dimensions",
                rotary_dim,
            ));
        }
        let geometry = Self {
            hidden: size(text, "hidden_size")?,
            intermediate: size(text, "intermediate_size")?,
            layers: layer_kinds(text)?,
            vocab: size(text, "vocab_size")?,
            heads: size(text, "num_attention_heads")?,
            kv_heads: size(text, "num_key_value_heads")?,
            head_dim,
            rotary_dim,
            rope_theta: positive(rope, "rope_theta", 10_000.0)?,
            linear_key_heads: size(text, "linear_num_key_heads")?,
            linear_value_heads: size(text, "linear_num_value_heads")?,
            linear_key_dim: size(text, "linear_key_head_dim")?,
            linear_value_dim: size(text, "linear_value_head_dim")?,
            conv_kernel: size(text, "linear_conv_kernel_dim")?,
            rms_eps: positive(text, "rms_norm_eps", 1e-6)?,
            max_positions: size(text, "max_position_embeddings")?,
            tied_embeddings: json
                .get("tie_word_embeddings")
                .or_else(|| text.get("tie_word_embeddings"))
                .and_then(Value::as_bool)
                .unwrap_or(true),
        };
        for (field, many, few) in [
            ("num_attention_heads", geometry.heads, geometry.kv_heads),
            ("linear_num_value_heads", geometry.linear_value_heads, geometry.linear_key_heads),
        ] {
            if many % few != 0 {
                return Err(ArtifactError::field(FILE, field, format!("a multiple of {few}"), many));
            }
        }
        Ok(geometry)
    }

    /// Width of the convolved DeltaNet inputs: q, k and v.
    pub fn conv_dim(&self) -> usize {
        2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim
    }

    /// Every tensor of the backbone, in a fixed order.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut specs = Vec::new();
        let mut add = |name: String, shape: Vec<usize>, projection: bool, f32_allowed: bool| {
            specs.push(TensorSpec { name, shape, projection, f32_allowed });
        };
        add("embed_tokens.weight".to_owned(), vec![self.vocab, self.hidden], false, false);
        let value_width = self.linear_value_heads * self.linear_value_dim;
        for (index, kind) in self.layers.iter().enumerate() {
            let at = |name: &str| format!("layers.{index}.{name}");
            add(at("input_layernorm.weight"), vec![self.hidden], false, false);
            match kind {
                LayerKind::Linear => {
                    let heads = self.linear_value_heads;
                    add(
                        at("linear_attn.in_proj_qkv.weight"),
                        vec![self.conv_dim(), self.hidden],
                        true,
                        false,
                    );
                    add(at("linear_attn.in_proj_z.weight"), vec![value_width, self.hidden], true, false);
                    add(at("linear_attn.in_proj_b.weight"), vec![heads, self.hidden], true, false);
                    add(at("linear_attn.in_proj_a.weight"), vec![heads, self.hidden], true, false);
                    add(
                        at("linear_attn.conv1d.weight"),
                        vec![self.conv_dim(), 1, self.conv_kernel],
                        false,
                        false,
                    );
                    add(at("linear_attn.dt_bias"), vec![heads], false, false);
                    add(at("linear_attn.A_log"), vec![heads], false, true);
                    add(at("linear_attn.norm.weight"), vec![self.linear_value_dim], false, true);
                    add(at("linear_attn.out_proj.weight"), vec![self.hidden, value_width], true, false);
                }
                LayerKind::Full => {
                    let (query, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
                    add(at("self_attn.q_proj.weight"), vec![2 * query, self.hidden], true, false);
                    add(at("self_attn.k_proj.weight"), vec![kv, self.hidden], true, false);
                    add(at("self_attn.v_proj.weight"), vec![kv, self.hidden], true, false);
                    add(at("self_attn.o_proj.weight"), vec![self.hidden, query], true, false);
                    add(at("self_attn.q_norm.weight"), vec![self.head_dim], false, false);
                    add(at("self_attn.k_norm.weight"), vec![self.head_dim], false, false);
                }
            }
            add(at("post_attention_layernorm.weight"), vec![self.hidden], false, false);
            add(at("mlp.gate_proj.weight"), vec![self.intermediate, self.hidden], true, false);
            add(at("mlp.up_proj.weight"), vec![self.intermediate, self.hidden], true, false);
            add(at("mlp.down_proj.weight"), vec![self.hidden, self.intermediate], true, false);
        }
        add("norm.weight".to_owned(), vec![self.hidden], false, false);
        specs
    }
}

fn shown(value: Option<&Value>) -> String {
    value.map_or_else(|| "nothing".to_owned(), |value| value.to_string().chars().take(80).collect())
}

/// Sizes are bounded so that products of two or three of them cannot overflow.
fn size(json: &Value, key: &str) -> Result<usize> {
    json.get(key)
        .and_then(Value::as_u64)
        .filter(|value| (1..=1 << 24).contains(value))
        .map(|value| value as usize)
        .ok_or_else(|| ArtifactError::field(FILE, key, "a whole number from 1 to 2^24", shown(json.get(key))))
}

fn positive(json: &Value, key: &str, default: f64) -> Result<f64> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => value
            .as_f64()
            .filter(|value| value.is_finite() && *value > 0.0)
            .ok_or_else(|| ArtifactError::field(FILE, key, "a positive number", value)),
    }
}

fn layer_kinds(text: &Value) -> Result<Vec<LayerKind>> {
    let count = size(text, "num_hidden_layers")?;
    if count > 4096 {
        return Err(ArtifactError::field(FILE, "num_hidden_layers", "at most 4096", count));
    }
    if let Some(kinds) = text.get("layer_types").filter(|kinds| !kinds.is_null()) {
        let listed = kinds.as_array().map_or(&[][..], Vec::as_slice);
        if listed.len() != count {
            return Err(ArtifactError::field(FILE, "layer_types", format!("{count} entries"), listed.len()));
        }
        return listed
            .iter()
            .map(|kind| match kind.as_str() {
                Some("linear_attention") => Ok(LayerKind::Linear),
                Some("full_attention") => Ok(LayerKind::Full),
                _ => {
                    Err(ArtifactError::field(FILE, "layer_types", "linear_attention or full_attention", kind))
                }
            })
            .collect();
    }
    let interval = match text.get("full_attention_interval") {
        None | Some(Value::Null) => 4,
        Some(_) => size(text, "full_attention_interval")?,
    };
    Ok((0..count)
        .map(|i| if (i + 1) % interval == 0 { LayerKind::Full } else { LayerKind::Linear })
        .collect())
}
