//! Owns the adapter side of a checkpoint: `adapter_config.json`, the LoRA tensors and `head.pt`, with every rule that
//! says whether this program can reproduce what the adapter was trained to do.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value as Json;

use crate::error::{ArtifactError, Result};
use crate::geometry::Geometry;
use crate::pickle::{Value, read_torch_zip};
use crate::weights::{Tensor, TensorFile, TensorType, expect_shape};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const HEAD: &str = "head.pt";

/// Prefixes that peft puts before a module's name, by what it wrapped.
const PREFIXES: [&str; 3] =
    ["base_model.model.model.language_model.", "base_model.model.model.", "base_model.model."];

/// One module's low-rank factors, FP32.
#[derive(Clone, Debug)]
pub struct LoraPair {
    /// A `[rank, in]`.
    pub a: Tensor,
    /// B `[out, rank]`.
    pub b: Tensor,
    /// alpha / rank.
    pub scale: f32,
}

/// The pointer head, FP32.
#[derive(Clone, Debug)]
pub struct Head {
    /// Dimension of queries and keys.
    pub head_dim: usize,
    /// `[head_dim, hidden]`
    pub query_weight: Tensor,
    /// `[head_dim]`
    pub query_bias: Tensor,
    /// `[head_dim, hidden]`
    pub key_weight: Tensor,
    /// `[head_dim]`
    pub key_bias: Tensor,
}

impl Head {
    /// The four tensors with their names in a head file.
    pub fn tensors(&self) -> [(&'static str, &Tensor); 4] {
        [
            ("q.weight", &self.query_weight),
            ("q.bias", &self.query_bias),
            ("k.weight", &self.key_weight),
            ("k.bias", &self.key_bias),
        ]
    }

    /// Takes the four tensors by name, checks shapes and that every value is finite.
    ///
    /// # Errors
    /// [`ArtifactError::Field`] naming the tensor.
    pub(crate) fn from_tensors(
        file: &str,
        head_dim: usize,
        hidden: usize,
        mut take: impl FnMut(&str) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut get = |name: &str, shape: &[usize]| {
            let tensor = take(name)?;
            expect_shape(file, name, &tensor, shape, true, false)?;
            if let Some(at) = tensor.to_f32().iter().position(|value| !value.is_finite()) {
                return Err(ArtifactError::field(
                    file,
                    name,
                    "finite values",
                    format!("a non-finite one at {at}"),
                ));
            }
            Ok(tensor)
        };
        Ok(Self {
            head_dim,
            query_weight: get("q.weight", &[head_dim, hidden])?,
            query_bias: get("q.bias", &[head_dim])?,
            key_weight: get("k.weight", &[head_dim, hidden])?,
            key_bias: get("k.bias", &[head_dim])?,
        })
    }
}

/// An adapter that passed every identity check.
#[derive(Debug)]
pub struct Adapter {
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha.
    pub alpha: f64,
    /// Factors by projection name (without prefix, with `.weight`).
    pub modules: BTreeMap<String, LoraPair>,
    /// The pointer head.
    pub head: Head,
    /// Divisor of the logits.
    pub temperature: f64,
    /// Name of the base it was trained on.
    pub base_name: String,
    /// Revision of that base, if it says so.
    pub base_revision: Option<String>,
}

impl Adapter {
    /// Reads and checks an adapter directory against the base's geometry.
    ///
    /// # Errors
    /// [`ArtifactError`] naming the first file and field that cannot be reproduced.
    pub fn open(dir: &Path, geometry: &Geometry) -> Result<Self> {
        let config = read_json(&dir.join(CONFIG))?;
        let (rank, alpha) = check_config(&config)?;
        let modules = read_modules(&dir.join(WEIGHTS), geometry, rank, (alpha / rank as f64) as f32)?;
        let Value::Dict(head) = read_torch_zip(&dir.join(HEAD))? else {
            return Err(ArtifactError::format(HEAD, "holds no dict"));
        };
        refuse_flags(&head)?;
        let base_name =
            match (config.get("base_model_name_or_path").and_then(Json::as_str), text(&head, "base")) {
                (Some(config), Some(head)) if config != head => {
                    return Err(ArtifactError::field(
                        HEAD,
                        "base",
                        format!("{config:?}, as in {CONFIG}"),
                        format!("{head:?}"),
                    ));
                }
                (Some(name), _) => name.to_owned(),
                (None, Some(name)) => name,
                (None, None) => {
                    return Err(ArtifactError::field(CONFIG, "base_model_name_or_path", "a name", "nothing"));
                }
            };
        let head_dim = match head.get("head_dim") {
            None => 256,
            Some(Value::Int(dim)) if (1..=65_536).contains(dim) => *dim as usize,
            Some(other) => return Err(ArtifactError::field(HEAD, "head_dim", "1 to 65536", brief(other))),
        };
        let temperature = match head.get("temperature") {
            None => 1.0,
            Some(Value::Float(value)) if value.is_finite() && *value > 0.0 => *value,
            Some(Value::Int(value)) if *value > 0 => *value as f64,
            Some(other) => {
                return Err(ArtifactError::field(HEAD, "temperature", "a positive number", brief(other)));
            }
        };
        let Some(Value::Dict(state)) = head.get("head") else {
            return Err(ArtifactError::field(
                HEAD,
                "head",
                "a state dict",
                head.get("head").map_or("nothing".into(), brief),
            ));
        };
        let weights = Head::from_tensors(HEAD, head_dim, geometry.hidden, |name| match state.get(name) {
            Some(Value::Tensor(tensor)) => Ok(tensor.clone()),
            other => {
                Err(ArtifactError::field(HEAD, name, "an FP32 tensor", other.map_or("nothing".into(), brief)))
            }
        })?;
        if let Some(extra) =
            state.keys().find(|key| !["q.weight", "q.bias", "k.weight", "k.bias"].contains(&key.as_str()))
        {
            return Err(ArtifactError::field(
                HEAD,
                "head",
                "q and k, weight and bias",
                format!("also {extra:?}"),
            ));
        }
        let base_revision = text(&head, "base_revision");
        Ok(Self { rank, alpha, modules, head: weights, temperature, base_name, base_revision })
    }
}

/// Reads a JSON file of bounded size.
pub(crate) fn read_json(path: &Path) -> Result<Json> {
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let size = crate::map::regular(path)?;
    if size > 64 << 20 {
        return Err(ArtifactError::format(name, format!("is {size} bytes, expected at most 64 MiB")));
    }
    let bytes = std::fs::read(path).map_err(ArtifactError::io(path, "read"))?;
    serde_json::from_slice(&bytes).map_err(|error| ArtifactError::format(name, error.to_string()))
}

/// Rank and alpha of a plain LoRA; everything that changes the arithmetic is refused.
fn check_config(config: &Json) -> Result<(usize, f64)> {
    let found = |key: &str| {
        config.get(key).map_or_else(|| "nothing".to_owned(), |v| v.to_string().chars().take(80).collect())
    };
    if config.get("peft_type").and_then(Json::as_str) != Some("LORA") {
        return Err(ArtifactError::field(CONFIG, "peft_type", "LORA", found("peft_type")));
    }
    let rank = config
        .get("r")
        .and_then(Json::as_u64)
        .filter(|rank| (1..=1024).contains(rank))
        .ok_or_else(|| ArtifactError::field(CONFIG, "r", "a rank from 1 to 1024", found("r")))?
        as usize;
    let alpha = config
        .get("lora_alpha")
        .and_then(Json::as_f64)
        .filter(|alpha| alpha.is_finite() && *alpha > 0.0)
        .ok_or_else(|| {
            ArtifactError::field(CONFIG, "lora_alpha", "a positive number", found("lora_alpha"))
        })?;
    if config.get("bias").and_then(Json::as_str).unwrap_or("none") != "none" {
        return Err(ArtifactError::field(CONFIG, "bias", "none", found("bias")));
    }
    const UNSUPPORTED: [&str; 15] = [
        "use_rslora",
        "use_dora",
        "use_qalora",
        "use_bdlora",
        "lora_bias",
        "fan_in_fan_out",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "trainable_token_indices",
        "target_parameters",
        "layer_replication",
        "layers_to_transform",
        "alora_invocation_tokens",
        "exclude_modules",
    ];
    for key in UNSUPPORTED {
        let plain = match config.get(key) {
            None | Some(Json::Null | Json::Bool(false)) => true,
            Some(Json::Object(map)) => map.is_empty(),
            Some(Json::Array(list)) => list.is_empty(),
            Some(_) => false,
        };
        if !plain {
            return Err(ArtifactError::field(
                CONFIG,
                key,
                "unset: this program merges plain LoRA only",
                found(key),
            ));
        }
    }
    let targets = config.get("target_modules").and_then(Json::as_array);
    let mut names: Vec<&str> = targets.into_iter().flatten().filter_map(Json::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let mut wanted = TARGETS;
    wanted.sort_unstable();
    if names != wanted {
        return Err(ArtifactError::field(
            CONFIG,
            "target_modules",
            format!("{wanted:?}"),
            format!("{names:?}"),
        ));
    }
    Ok((rank, alpha))
}

/// The projections a Kev adapter wraps.
pub const TARGETS: [&str; 12] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
    "out_proj",
];

fn refuse_flags(head: &BTreeMap<String, Value>) -> Result<()> {
    for key in ["option_isolation", "special_embeddings"] {
        match head.get(key) {
            None | Some(Value::None | Value::Bool(false)) => {}
            Some(other) => {
                return Err(ArtifactError::field(
                    HEAD,
                    key,
                    "false: no released hybrid checkpoint uses it",
                    brief(other),
                ));
            }
        }
    }
    match head.get("weights") {
        None => Ok(()),
        Some(Value::Text(kind)) if kind == "lora" => Ok(()),
        Some(other) => Err(ArtifactError::field(HEAD, "weights", "lora", brief(other))),
    }
}

fn read_modules(
    path: &Path,
    geometry: &Geometry,
    rank: usize,
    scale: f32,
) -> Result<BTreeMap<String, LoraPair>> {
    let file = TensorFile::open(path)?;
    let mut halves: BTreeMap<String, (Option<Tensor>, Option<Tensor>)> = BTreeMap::new();
    for key in file.names() {
        let stripped = PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix));
        let Some((module, half)) = stripped.and_then(|rest| {
            rest.strip_suffix(".lora_A.weight")
                .map(|m| (m, 'A'))
                .or_else(|| rest.strip_suffix(".lora_B.weight").map(|m| (m, 'B')))
        }) else {
            return Err(ArtifactError::field(
                WEIGHTS,
                key,
                "only lora_A and lora_B tensors",
                "another tensor",
            ));
        };
        let pair = halves.entry(format!("{module}.weight")).or_default();
        let slot = if half == 'A' { &mut pair.0 } else { &mut pair.1 };
        if slot.replace(file.tensor(key)?).is_some() {
            return Err(ArtifactError::field(
                WEIGHTS,
                key,
                "one tensor for a module",
                "the same module under two prefixes",
            ));
        }
    }
    let mut modules = BTreeMap::new();
    for spec in geometry.tensors().into_iter().filter(|spec| spec.projection) {
        let (a, b) = match halves.remove(&spec.name) {
            Some((Some(a), Some(b))) => (a, b),
            Some(_) => {
                return Err(ArtifactError::field(
                    WEIGHTS,
                    spec.name,
                    "lora_A and lora_B",
                    "only one of them",
                ));
            }
            None => {
                return Err(ArtifactError::field(
                    WEIGHTS,
                    spec.name,
                    "lora_A and lora_B",
                    "nothing: the adapter is for another base",
                ));
            }
        };
        let (out, input) = (spec.shape[0], spec.shape[1]);
        for (half, tensor, shape) in [("lora_A", &a, [rank, input]), ("lora_B", &b, [out, rank])] {
            let name = format!("{}.{half}", spec.name.trim_end_matches(".weight"));
            expect_shape(WEIGHTS, &name, tensor, &shape, true, false)?;
            if tensor.to_f32().iter().any(|value| !value.is_finite()) {
                return Err(ArtifactError::field(WEIGHTS, name, "finite values", "a non-finite one"));
            }
        }
        modules.insert(spec.name, LoraPair { a, b, scale });
    }
    match halves.into_keys().next() {
        Some(extra) => Err(ArtifactError::field(
            WEIGHTS,
            extra,
            "modules of this base only",
            "a module it does not have",
        )),
        None => Ok(modules),
    }
}

fn text(dict: &BTreeMap<String, Value>, key: &str) -> Option<String> {
    match dict.get(key) {
        Some(Value::Text(text)) => Some(text.clone()),
        _ => None,
    }
}

fn brief(value: &Value) -> String {
    match value {
        Value::Tensor(tensor) => format!("a tensor {} {:?}", tensor.dtype.as_str(), tensor.shape),
        Value::Dict(dict) => format!("a dict of {}", dict.len()),
        Value::List(list) => format!("a list of {}", list.len()),
        other => format!("{other:?}").chars().take(80).collect(),
    }
}

/// FP32 bytes of a tensor, whatever it is stored in.
pub(crate) fn as_f32_tensor(tensor: &Tensor) -> Tensor {
    match tensor.dtype {
        TensorType::F32 => tensor.clone(),
        TensorType::BF16 => Tensor {
            dtype: TensorType::F32,
            shape: tensor.shape.clone(),
            data: tensor.to_f32().iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into(),
        },
    }
}
