//! Owns the exporter: a checkpoint in, a merged, hashed, atomically written export out. Streams one tensor at a time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::adapter::{Adapter, as_f32_tensor, read_json};
use crate::base::Base;
use crate::error::{ArtifactError, Result};
use crate::geometry::TensorSpec;
use crate::manifest::{
    CUSTOM, ExporterRecord, FORMAT, FileRecord, LoraRecord, MANIFEST, Manifest, Pins, SEAL, Source, VERSION,
};
use crate::merge::{CpuMerger, Merger};
use crate::progress::Progress;
use crate::shards::{Planned, header, shards};
use crate::staging::Staging;
use crate::tokenizer::{PreTokenizer, Tokenizer};
use crate::weights::{Tensor, TensorType};

/// Prefix of backbone tensors in an export.
pub const PREFIX: &str = "model.language_model.";
/// Index of the merged weights.
pub const INDEX: &str = "model.safetensors.index.json";
/// The pointer head.
pub const HEAD: &str = "head.safetensors";
/// Tokenizer files that an export carries.
pub const TOKENIZER_FILES: [&str; 2] = ["tokenizer.json", "tokenizer_config.json"];
/// Bytes written at a time from a mapped tensor.
const CHUNK: usize = 8 << 20;

/// What to export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Directory of the adapter and head.
    pub adapter: PathBuf,
    /// Directory of the base.
    pub base: PathBuf,
    /// Directory to create.
    pub out: PathBuf,
    /// Identity the result must have.
    pub pins: Option<Pins>,
    /// Whether to carry the unmerged projections that profile `exact` needs.
    pub exact_companion: bool,
    /// Commit of the running build, where known.
    pub commit: Option<String>,
}

/// What was exported.
#[derive(Clone, Debug)]
pub struct ExportSummary {
    /// Its manifest.
    pub manifest: Manifest,
    /// Bytes of all files.
    pub bytes: u64,
}

/// A tensor to write, made when its turn comes.
struct Pending<'a> {
    name: String,
    dtype: TensorType,
    shape: Vec<usize>,
    make: Box<dyn Fn() -> Result<bytes::Bytes> + 'a>,
}

impl Planned for Pending<'_> {
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

/// Exports a checkpoint, merged on the CPU.
///
/// # Errors
/// As [`export_with`].
pub fn export(options: &ExportOptions, progress: &dyn Progress) -> Result<ExportSummary> {
    export_with(options, &CpuMerger, progress)
}

/// Exports a checkpoint.
///
/// # Errors
/// [`ArtifactError`]: nothing of the output directory exists afterwards.
pub fn export_with(
    options: &ExportOptions,
    merger: &dyn Merger,
    progress: &dyn Progress,
) -> Result<ExportSummary> {
    let base = Base::open(&options.base)?;
    let adapter = Adapter::open(&options.adapter, &base.geometry)?;
    let tokenizer_config = read_json(&options.base.join(TOKENIZER_FILES[1]))?;
    let pre_tokenizer = PreTokenizer::for_config(&tokenizer_config)?;
    Tokenizer::open(&options.base, pre_tokenizer)?;
    let mut manifest = identity(options, merger, &base, &adapter, pre_tokenizer);
    if let Some(pins) = &options.pins {
        Pins { files: BTreeMap::new(), ..pins.clone() }.check(&manifest)?;
    }

    let staging = Staging::begin(&options.out)?;
    let merged = merged_tensors(&base, &adapter, merger);
    let companion = if options.exact_companion { companion_tensors(&base, &adapter) } else { Vec::new() };
    progress.begin("export", merged.iter().chain(&companion).map(Planned::bytes).sum());
    let mut files = BTreeMap::new();
    let map = write_shards(&staging, "model", &merged, &mut files, progress)?;
    write_shards(&staging, "exact", &companion, &mut files, progress)?;
    let total: u64 = merged.iter().map(Planned::bytes).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    files.insert(INDEX.to_owned(), staging.write(INDEX, &pretty(&index)?)?);
    let head: Vec<Pending<'_>> = adapter
        .head
        .tensors()
        .into_iter()
        .map(|(name, tensor)| stored(name.to_owned(), tensor.clone()))
        .collect();
    files.insert(HEAD.to_owned(), write_file(&staging, HEAD, &head, &|_| {})?);
    for name in ["config.json", TOKENIZER_FILES[0], TOKENIZER_FILES[1]] {
        let path = options.base.join(name);
        let bytes = std::fs::read(&path).map_err(ArtifactError::io(path, "read"))?;
        files.insert(name.to_owned(), staging.write(name, &bytes)?);
    }
    manifest.files = files;
    if let Some(pins) = &options.pins {
        pins.check(&manifest)?;
    }
    let text = pretty(&manifest)?;
    let seal = seal(&text);
    staging.write(SEAL, seal.as_bytes())?;
    staging.write(MANIFEST, &text)?;
    let listed = manifest.files.values().map(|record| record.size).sum::<u64>();
    let bytes = listed + (text.len() + seal.len()) as u64;
    staging.finish()?;
    Ok(ExportSummary { manifest, bytes })
}

fn identity(
    options: &ExportOptions,
    merger: &dyn Merger,
    base: &Base,
    adapter: &Adapter,
    pre_tokenizer: PreTokenizer,
) -> Manifest {
    let mut manifest = Manifest {
        format: FORMAT.to_owned(),
        version: VERSION,
        profile: CUSTOM.to_owned(),
        reference: None,
        base: Source {
            name: adapter.base_name.clone(),
            revision: adapter.base_revision.clone().or_else(|| snapshot_revision(&options.base)),
        },
        adapter: Source {
            name: source_name(&options.adapter),
            revision: snapshot_revision(&options.adapter),
        },
        temperature: adapter.temperature,
        geometry: (&base.geometry).into(),
        lora: LoraRecord { rank: adapter.rank, alpha: adapter.alpha, modules: adapter.modules.len() },
        merge: merger.record(),
        pre_tokenizer,
        backbone_dtype: "BF16".to_owned(),
        head_dtype: "F32".to_owned(),
        head_dim: adapter.head.head_dim,
        exact_companion: options.exact_companion,
        exporter: ExporterRecord {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: options.commit.clone(),
        },
        files: BTreeMap::new(),
    };
    // A release is recognised by everything its pins name; anything else is a checkpoint of its own.
    let known = Pins::kev_4b();
    let candidate =
        Manifest { profile: known.profile.clone(), reference: known.reference.clone(), ..manifest.clone() };
    if known.check(&candidate).is_ok() {
        manifest = candidate;
    }
    manifest
}

/// The revision of a hub snapshot directory, whose name is its commit.
fn snapshot_revision(dir: &Path) -> Option<String> {
    let name = dir.canonicalize().ok()?.file_name()?.to_str()?.to_owned();
    (name.len() == 40 && name.bytes().all(|b| b.is_ascii_hexdigit())).then_some(name)
}

fn source_name(dir: &Path) -> String {
    dir.file_name().map_or_else(|| "adapter".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn stored<'a>(name: String, tensor: Tensor) -> Pending<'a> {
    Pending {
        name,
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        make: Box::new(move || Ok(tensor.data.clone())),
    }
}

/// The base's own tensor, read when its turn comes. [`Base::open`] has checked every one already.
fn unchanged<'a>(base: &'a Base, spec: TensorSpec, name: String) -> Option<Pending<'a>> {
    let dtype = base.tensor(&spec).ok()?.dtype;
    let shape = spec.shape.clone();
    Some(Pending { name, dtype, shape, make: Box::new(move || Ok(base.read(&spec)?.data)) })
}

fn merged_tensors<'a>(base: &'a Base, adapter: &'a Adapter, merger: &'a dyn Merger) -> Vec<Pending<'a>> {
    let tensors = base.geometry.tensors().into_iter();
    tensors
        .filter_map(|spec| {
            let name = format!("{PREFIX}{}", spec.name);
            let Some(lora) = adapter.modules.get(&spec.name) else { return unchanged(base, spec, name) };
            let shape = spec.shape.clone();
            let make = Box::new(move || Ok(merger.merge(&base.read(&spec)?, lora)?.into()));
            Some(Pending { name, dtype: TensorType::BF16, shape, make })
        })
        .collect()
}

fn companion_tensors<'a>(base: &'a Base, adapter: &'a Adapter) -> Vec<Pending<'a>> {
    let mut pending = Vec::new();
    for spec in base.geometry.tensors() {
        let Some(lora) = adapter.modules.get(&spec.name) else { continue };
        let stem = format!("{PREFIX}{}", spec.name.trim_end_matches(".weight"));
        pending.extend(unchanged(base, spec, format!("{stem}.weight")));
        pending.push(stored(format!("{stem}.lora_A.weight"), as_f32_tensor(&lora.a)));
        pending.push(stored(format!("{stem}.lora_B.weight"), as_f32_tensor(&lora.b)));
    }
    pending
}

/// Writes tensors to `stem-0000i-of-0000n.safetensors` and returns which tensor lies where.
fn write_shards(
    staging: &Staging,
    stem: &str,
    tensors: &[Pending<'_>],
    files: &mut BTreeMap<String, FileRecord>,
    progress: &dyn Progress,
) -> Result<BTreeMap<String, String>> {
    let shards = shards(tensors);
    let mut map = BTreeMap::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = format!("{stem}-{:05}-of-{:05}.safetensors", index + 1, shards.len());
        files.insert(name.clone(), write_file(staging, &name, shard, &|bytes| progress.advance(bytes))?);
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone())));
    }
    Ok(map)
}

fn write_file(
    staging: &Staging,
    name: &str,
    tensors: &[Pending<'_>],
    advance: &dyn Fn(u64),
) -> Result<FileRecord> {
    let header = header(name, tensors)?;
    let mut file = staging.create(name)?;
    file.write(&header)?;
    for tensor in tensors {
        let data = (tensor.make)()?;
        for chunk in data.chunks(CHUNK) {
            file.write(chunk)?;
            advance(chunk.len() as u64);
        }
    }
    file.finish()
}

/// What the seal of a manifest's bytes must hold.
pub(crate) fn seal(manifest: &[u8]) -> String {
    format!("{}  {MANIFEST}\n", hex::encode(Sha256::digest(manifest)))
}

/// Indented JSON with a line end.
pub(crate) fn pretty(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|error| ArtifactError::format(MANIFEST, format!("cannot be written: {error}")))?;
    text.push(b'\n');
    Ok(text)
}
