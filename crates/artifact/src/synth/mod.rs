//! Owns synthetic checkpoints: random weights of a released or a tiny geometry in the layout that Kev publishes, the same
//! bytes for a seed on any machine. They show how the program works and how fast; their answers mean nothing.

mod presets;
mod random;
mod tokenizer;
mod torch_zip;

use std::collections::BTreeMap;
use std::path::PathBuf;

use half::bf16;
use rayon::prelude::*;
use serde_json::{Value, json};

pub use presets::{Preset, Recipe};

use crate::adapter::TARGETS;
use crate::error::{ArtifactError, Result};
use crate::export::{INDEX, PREFIX, TOKENIZER_FILES, pretty};
use crate::geometry::TensorSpec;
use crate::manifest::FileRecord;
use crate::progress::Progress;
use crate::shards::{Planned, header, shards};
use crate::staging::Staging;
use crate::weights::TensorType;
use random::{Normal, Stream};
use torch_zip::{Entry, torch_zip};

/// Numbers the recipe: another version makes other bytes of the same seed.
const RECIPE: u32 = 1;
/// Elements made at a time, a multiple of four.
const BLOCK: usize = 1 << 20;

/// What was written.
#[derive(Clone, Debug)]
pub struct SynthSummary {
    /// Bytes of all files.
    pub bytes: u64,
    /// SHA-256 of the list of files and their digests: equal exactly when two checkpoints are equal.
    pub sha256: String,
}

/// Writes `out/base` and `out/adapter`, a checkpoint of a recipe and a seed, and `out/synthetic.json`, which says what it is
/// and lists the digest of every file.
///
/// # Errors
/// [`ArtifactError`]: nothing of `out` exists afterwards.
pub fn synthesize(
    recipe: &Recipe,
    seed: u64,
    out: impl Into<PathBuf>,
    progress: &dyn Progress,
) -> Result<SynthSummary> {
    let staging = Staging::begin(&out.into())?;
    let base = base_tensors(recipe);
    let adapter = adapter_tensors(recipe);
    progress.begin("synthesize", base.iter().chain(&adapter).map(Planned::bytes).sum());
    let writer = Writer { staging: &staging, seed, normal: Normal::new(), progress };

    let base_shards = shards(&base);
    let count = base_shards.len();
    let shard_name = |index: usize| format!("model.safetensors-{:05}-of-{count:05}.safetensors", index + 1);
    let mut map = BTreeMap::new();
    let mut jobs = vec![("adapter/adapter_model.safetensors".to_owned(), &adapter[..])];
    for (index, shard) in base_shards.into_iter().enumerate() {
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), shard_name(index))));
        jobs.push((format!("base/{}", shard_name(index)), shard));
    }
    let written: Result<Vec<_>> =
        jobs.into_par_iter().map(|(name, shard)| writer.file(name, shard)).collect();
    let mut files: BTreeMap<String, FileRecord> = written?.into_iter().collect();

    let total: u64 = base.iter().map(Planned::bytes).sum();
    let (definition, config) = tokenizer::files();
    let name = format!("omni-kev/synthetic-{}", recipe.name);
    let small = [
        (format!("base/{INDEX}"), json!({ "metadata": { "total_size": total }, "weight_map": map })),
        ("base/config.json".to_owned(), recipe.config()),
        (format!("base/{}", TOKENIZER_FILES[0]), definition),
        (format!("base/{}", TOKENIZER_FILES[1]), config),
        ("adapter/adapter_config.json".to_owned(), adapter_config(recipe, &name)),
    ];
    for (path, value) in small {
        let record = staging.write(&path, &pretty(&value)?)?;
        files.insert(path, record);
    }
    let head = torch_zip(&writer.head(recipe, name))?;
    files.insert("adapter/head.pt".to_owned(), staging.write("adapter/head.pt", &head)?);
    let bytes = files.values().map(|record| record.size).sum();
    let listed = pretty(&json!({
        "synthetic": "random weights: answers of this checkpoint mean nothing",
        "geometry": recipe.name,
        "seed": seed,
        "recipe": RECIPE,
        "files": files,
    }))?;
    let record = staging.write("synthetic.json", &listed)?;
    staging.finish()?;
    Ok(SynthSummary { bytes, sha256: record.sha256 })
}

/// How a tensor's elements are distributed; N is standard normal, u uniform in [0, 1).
#[derive(Clone, Copy)]
enum Law {
    /// `scale * N + shift`
    Normal { scale: f64, shift: f64 },
    /// `ln(0.02 + 0.5 u)`
    Decay,
}

/// A tensor to make.
struct Synthetic {
    name: String,
    dtype: TensorType,
    shape: Vec<usize>,
    law: Law,
}

impl Planned for Synthetic {
    fn name(&self) -> &str {
        &self.name
    }

    fn dtype(&self) -> TensorType {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }
}

fn normal(scale: f64) -> Law {
    Law::Normal { scale, shift: 0.0 }
}

/// The recipe of tier 1 of the acceptance corpora: it spreads probabilities and gives BF16 the noise that trained weights
/// show.
fn base_tensors(recipe: &Recipe) -> Vec<Synthetic> {
    let tensors = recipe.geometry.tensors().into_iter();
    tensors
        .map(|TensorSpec { name, shape, projection, f32_allowed }| {
            let ends = |end: &str| name.ends_with(end);
            let law = if projection {
                let residual = ends("o_proj.weight") || ends("out_proj.weight") || ends("down_proj.weight");
                normal(if residual { 0.1 } else { 1.0 } / (shape[1] as f64).sqrt())
            } else if ends("embed_tokens.weight") {
                normal(1.0)
            } else if ends("conv1d.weight") {
                normal(0.5)
            } else if ends("A_log") {
                Law::Decay
            } else if ends("dt_bias") {
                Law::Normal { scale: 1.0, shift: -1.0 }
            } else if ends("linear_attn.norm.weight") {
                Law::Normal { scale: 0.2, shift: 1.0 }
            } else {
                normal(0.2)
            };
            let dtype = if f32_allowed { TensorType::F32 } else { TensorType::BF16 };
            Synthetic { name: format!("{PREFIX}{name}"), dtype, shape, law }
        })
        .collect()
}

fn adapter_tensors(recipe: &Recipe) -> Vec<Synthetic> {
    let mut tensors = Vec::new();
    for spec in recipe.geometry.tensors().into_iter().filter(|spec| spec.projection) {
        let stem = format!("base_model.model.{}", spec.name.trim_end_matches(".weight"));
        let (out, input) = (spec.shape[0], spec.shape[1]);
        let mut add = |half: &str, shape: [usize; 2], scale: f64| {
            tensors.push(Synthetic {
                name: format!("{stem}.lora_{half}.weight"),
                dtype: TensorType::F32,
                shape: shape.to_vec(),
                law: normal(scale),
            });
        };
        add("A", [recipe.rank, input], 1.0 / (input as f64).sqrt());
        add("B", [out, recipe.rank], 0.02);
    }
    tensors
}

fn adapter_config(recipe: &Recipe, base: &str) -> Value {
    let mut targets = TARGETS;
    targets.sort_unstable();
    json!({
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "lora_alpha": recipe.alpha,
        "lora_dropout": 0.05,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": recipe.rank,
        "rank_pattern": {},
        "target_modules": targets,
        "task_type": "FEATURE_EXTRACTION",
        "use_dora": false,
        "use_rslora": false,
    })
}

struct Writer<'a> {
    staging: &'a Staging,
    seed: u64,
    normal: Normal,
    progress: &'a dyn Progress,
}

impl Writer<'_> {
    fn file(&self, path: String, tensors: &[Synthetic]) -> Result<(String, FileRecord)> {
        let mut file = self.staging.create(&path)?;
        file.write(&header(&path, tensors)?)?;
        for tensor in tensors {
            self.elements(tensor, &mut |bytes| {
                file.write(bytes)?;
                self.progress.advance(bytes.len() as u64);
                Ok(())
            })?;
        }
        Ok((path, file.finish()?))
    }

    /// Makes a tensor block by block.
    fn elements(&self, tensor: &Synthetic, write: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let count: usize = tensor.shape.iter().product();
        let stream = Stream::new(self.seed, &tensor.name);
        match (tensor.law, tensor.dtype) {
            (Law::Decay, TensorType::F32) => {
                let values: Vec<f32> = (0..count)
                    .map(|index| libm::log(0.02 + 0.5 * stream.uniform(index as u64)) as f32)
                    .collect();
                write(bytemuck::cast_slice(&values))
            }
            (Law::Decay, TensorType::BF16) => {
                Err(ArtifactError::format(tensor.name.clone(), "decays are made in F32 only"))
            }
            (Law::Normal { scale, shift }, TensorType::BF16) => {
                let table: Vec<bf16> = self.normal.bf16(scale, shift);
                blocks(&table, stream, count, &mut |values| write(bytemuck::cast_slice(values)))
            }
            (Law::Normal { scale, shift }, TensorType::F32) => {
                let table: Vec<f32> = self.normal.f32(scale, shift);
                blocks(&table, stream, count, &mut |values| write(bytemuck::cast_slice(values)))
            }
        }
    }

    fn head(&self, recipe: &Recipe, base: String) -> Entry {
        let hidden = recipe.geometry.hidden;
        let tensor = |name: &str, shape: Vec<usize>, scale: f64| {
            let count = shape.iter().product();
            let table = self.normal.f32(scale, 0.0);
            let mut values = Vec::with_capacity(count);
            let stream = Stream::new(self.seed, &format!("head.{name}"));
            for word in 0..count.div_ceil(4) {
                values.extend(stream.quarters(word as u64).map(|index| table[index]));
            }
            values.truncate(count);
            Entry::Tensor(shape, values)
        };
        let scale = 1.8 / (hidden as f64).sqrt();
        let state = vec![
            ("q.weight", tensor("q.weight", vec![recipe.head_dim, hidden], scale)),
            ("q.bias", tensor("q.bias", vec![recipe.head_dim], 0.3)),
            ("k.weight", tensor("k.weight", vec![recipe.head_dim, hidden], scale)),
            ("k.bias", tensor("k.bias", vec![recipe.head_dim], 0.3)),
        ];
        Entry::Dict(vec![
            ("base", Entry::Text(base)),
            ("base_revision", Entry::None),
            ("lora", Entry::Int(recipe.rank as u16)),
            ("head_dim", Entry::Int(recipe.head_dim as u16)),
            ("option_isolation", Entry::Bool(false)),
            ("special_embeddings", Entry::Bool(false)),
            ("weights", Entry::Text("lora".to_owned())),
            ("weights_dtype", Entry::Text("fp32".to_owned())),
            ("temperature", Entry::Float(recipe.temperature)),
            ("head", Entry::Dict(state)),
        ])
    }
}

/// Looks elements up in a table of quantiles, in blocks of a bounded size.
fn blocks<T: Copy>(
    table: &[T],
    stream: Stream,
    count: usize,
    write: &mut dyn FnMut(&[T]) -> Result<()>,
) -> Result<()> {
    let mut values: Vec<T> = Vec::with_capacity(BLOCK.min(count + 3));
    for start in (0..count).step_by(BLOCK) {
        let length = BLOCK.min(count - start);
        values.clear();
        for word in start / 4..(start + length).div_ceil(4) {
            values.extend(stream.quarters(word as u64).map(|index| table[index]));
        }
        write(&values[..length])?;
    }
    Ok(())
}
