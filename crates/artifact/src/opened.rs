//! Owns the load contract: an export is opened whole, verified whole, or refused. Nothing reads an export any other way.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::adapter::{Head, LoraPair, read_json};
use crate::error::{ArtifactError, Result};
use crate::export::{HEAD, INDEX, PREFIX, seal};
use crate::geometry::Geometry;
use crate::manifest::{CUSTOM, FileRecord, MANIFEST, Manifest, Pins, SEAL};
use crate::map::regular;
use crate::progress::{Progress, Silent};
use crate::tokenizer::Tokenizer;
use crate::weights::{Tensor, TensorFile, expect_shape};

/// How strictly, and for whom, an export is opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Pins it must agree with, besides those compiled in for its profile.
    pub pins: Option<Pins>,
}

/// An export that passed the whole load contract.
#[derive(Debug)]
pub struct Export {
    /// Where it lies.
    pub dir: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// SHA-256 of the manifest file: the identity of the export.
    pub manifest_sha256: String,
    /// Sizes of the backbone.
    pub geometry: Geometry,
    /// The pointer head.
    pub head: Head,
    /// Divisor of the logits.
    pub temperature: f64,
    tokenizer: Arc<Tokenizer>,
    merged: BTreeMap<String, Tensor>,
    exact: BTreeMap<String, ExactProjection>,
}

/// A projection as profile `exact` multiplies with it.
#[derive(Clone, Debug)]
pub struct ExactProjection {
    /// The base's own weight.
    pub weight: Tensor,
    /// The adapter's factors.
    pub lora: LoraPair,
}

impl Export {
    /// Opens an export.
    ///
    /// # Errors
    /// [`ArtifactError`]: the first rule of the load contract that is broken, with the file or field.
    pub fn open(dir: &Path, options: &OpenOptions) -> Result<Self> {
        Self::open_with_progress(dir, options, &Silent)
    }

    /// Opens an export and reports the bytes hashed.
    ///
    /// # Errors
    /// As [`Export::open`].
    pub fn open_with_progress(dir: &Path, options: &OpenOptions, progress: &dyn Progress) -> Result<Self> {
        let (export, ()) = Self::open_while(dir, options, progress, |_| ())?;
        Ok(export)
    }

    /// Opens an export and hashes its shards while `load` makes a model of them, whose result is only given out when every
    /// digest was right. Everything else of the load contract, the digests of all other files included, is checked before.
    ///
    /// # Errors
    /// As [`Export::open`]; a wrong digest goes before any outcome of `load`.
    pub fn open_while<T>(
        dir: &Path,
        options: &OpenOptions,
        progress: &dyn Progress,
        load: impl FnOnce(&Self) -> T,
    ) -> Result<(Self, T)> {
        let manifest_bytes = read_manifest(&dir.join(MANIFEST))?;
        check_seal(dir, &manifest_bytes)?;
        let manifest = Manifest::parse(&manifest_bytes)?;
        progress.begin("verify", manifest.files.values().map(|record| record.size).sum());
        let export = Self::checked(dir, options, manifest, &manifest_bytes, progress)?;
        let (hashed, loaded) = std::thread::scope(|scope| {
            let hashing = scope.spawn(|| check_hashes(dir, &export.manifest, Part::Shards, progress));
            let loaded = load(&export);
            (hashing.join(), loaded)
        });
        match hashed {
            Ok(outcome) => outcome?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        Ok((export, loaded))
    }

    /// The load contract but for the digests of shards.
    fn checked(
        dir: &Path,
        options: &OpenOptions,
        manifest: Manifest,
        manifest_bytes: &[u8],
        progress: &dyn Progress,
    ) -> Result<Self> {
        check_files(dir, &manifest)?;
        if manifest.profile != CUSTOM {
            let known = Pins::kev_4b();
            if manifest.profile != known.profile {
                let expected = format!("{CUSTOM} or {}", known.profile);
                return Err(ArtifactError::field(MANIFEST, "profile", expected, &manifest.profile));
            }
            known.check(&manifest)?;
        }
        if let Some(pins) = &options.pins {
            pins.check(&manifest)?;
        }
        check_hashes(dir, &manifest, Part::Others, progress)?;

        let geometry = Geometry::from_config(&read_json(&dir.join("config.json"))?)?;
        if manifest.geometry != (&geometry).into() {
            return Err(ArtifactError::field(MANIFEST, "geometry", "that of config.json", "another one"));
        }
        let merged = merged_weights(dir, &manifest, &geometry)?;
        let exact = exact_weights(dir, &manifest, &geometry)?;
        let head_file = TensorFile::open(&dir.join(HEAD))?;
        let head =
            Head::from_tensors(HEAD, manifest.head_dim, geometry.hidden, |name| head_file.tensor(name))?;
        let tokenizer = Tokenizer::open(dir, manifest.pre_tokenizer)?;
        if tokenizer.vocab_size() > geometry.vocab {
            let expected = format!("ids below {}", geometry.vocab);
            return Err(ArtifactError::field(
                "tokenizer.json",
                "vocabulary",
                expected,
                tokenizer.vocab_size() - 1,
            ));
        }
        Ok(Self {
            dir: dir.to_owned(),
            manifest_sha256: hex::encode(Sha256::digest(manifest_bytes)),
            temperature: manifest.temperature,
            manifest,
            geometry,
            head,
            tokenizer: Arc::new(tokenizer),
            merged,
            exact,
        })
    }

    /// A backbone tensor by its name without prefix; projections come merged.
    ///
    /// # Errors
    /// [`ArtifactError::Format`] for a name the geometry does not have.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        self.merged
            .get(name)
            .cloned()
            .ok_or_else(|| ArtifactError::format(INDEX, format!("has no tensor {name}")))
    }

    /// A projection as profile `exact` needs it.
    ///
    /// # Errors
    /// [`ArtifactError::Field`] when the export was made without its exact companion.
    pub fn projection(&self, name: &str) -> Result<&ExactProjection> {
        self.exact.get(name).ok_or_else(|| {
            ArtifactError::field(
                MANIFEST,
                "exact_companion",
                "true for profile exact: export again without --no-exact",
                self.manifest.exact_companion,
            )
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.tokenizer)
    }
}

fn read_manifest(path: &Path) -> Result<Vec<u8>> {
    if fs::symlink_metadata(path).is_err() {
        return Err(ArtifactError::FileSet {
            path: path.to_owned(),
            reason: "is missing: this is not an export".to_owned(),
            action: "make one with `omni-kev export`".to_owned(),
        });
    }
    let size = regular(path)?;
    if size > 16 << 20 {
        return Err(ArtifactError::format(MANIFEST, format!("is {size} bytes, expected at most 16 MiB")));
    }
    fs::read(path).map_err(ArtifactError::io(path, "read"))
}

/// The manifest is what it was when it was written.
fn check_seal(dir: &Path, manifest: &[u8]) -> Result<()> {
    let path = dir.join(SEAL);
    if fs::symlink_metadata(&path).is_err() {
        return Err(ArtifactError::FileSet {
            path,
            reason: "is missing: it holds the digest of the manifest".to_owned(),
            action: "restore it or export again".to_owned(),
        });
    }
    let found = if regular(&path)? < 256 {
        fs::read(&path).map_err(ArtifactError::io(&path, "read"))?
    } else {
        Vec::new()
    };
    let expected = seal(manifest);
    if found == expected.as_bytes() {
        return Ok(());
    }
    Err(ArtifactError::FileSet {
        path,
        reason: format!(
            "holds {:?}, expected {expected:?} for {MANIFEST}",
            String::from_utf8_lossy(&found).chars().take(96).collect::<String>()
        ),
        action: "one of the two was changed after export: restore them or export again".to_owned(),
    })
}

/// Exactly the listed files, each regular and of its size.
fn check_files(dir: &Path, manifest: &Manifest) -> Result<()> {
    for required in [INDEX, HEAD, "config.json", "tokenizer.json", "tokenizer_config.json"] {
        if !manifest.files.contains_key(required) {
            return Err(ArtifactError::field(MANIFEST, "files", required, "nothing of that name"));
        }
    }
    for entry in fs::read_dir(dir).map_err(ArtifactError::io(dir, "read"))? {
        let entry = entry.map_err(ArtifactError::io(dir, "read"))?;
        let listed = entry
            .file_name()
            .to_str()
            .is_some_and(|name| [MANIFEST, SEAL].contains(&name) || manifest.files.contains_key(name));
        if !listed {
            return Err(ArtifactError::FileSet {
                path: entry.path(),
                reason: "is not listed in the manifest".to_owned(),
                action: "remove it: an unlisted file could shadow a verified one".to_owned(),
            });
        }
    }
    for (name, record) in &manifest.files {
        let path = dir.join(name);
        if fs::symlink_metadata(&path).is_err() {
            return Err(ArtifactError::FileSet {
                path,
                reason: "is listed in the manifest and missing".to_owned(),
                action: "restore it or export again".to_owned(),
            });
        }
        let size = regular(&path)?;
        if size != record.size {
            return Err(ArtifactError::FileSet {
                path,
                reason: format!("has {size} bytes, the manifest has {}", record.size),
                action: "restore it or export again".to_owned(),
            });
        }
    }
    Ok(())
}

/// Which files are hashed: shards of weights while a model is made of them, all others before anything else is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Shards,
    Others,
}

/// Recomputes digests, several files at a time: SHA-256 itself is sequential.
fn check_hashes(dir: &Path, manifest: &Manifest, part: Part, progress: &dyn Progress) -> Result<()> {
    let shard = |name: &str| {
        name.ends_with(".safetensors") && ["model-", "exact-"].iter().any(|stem| name.starts_with(stem))
    };
    let mut files: Vec<(&String, &FileRecord)> =
        manifest.files.iter().filter(|(name, _)| shard(name) == (part == Part::Shards)).collect();
    files.sort_by_key(|(_, record)| std::cmp::Reverse(record.size));
    let mut failures: Vec<(usize, ArtifactError)> = files
        .par_iter()
        .with_max_len(1)
        .enumerate()
        .filter_map(|(index, (name, record))| {
            check_hash(&dir.join(name), record, progress).err().map(|e| (index, e))
        })
        .collect();
    failures.sort_by_key(|(index, _)| *index);
    failures.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
}

fn check_hash(path: &Path, record: &FileRecord, progress: &dyn Progress) -> Result<()> {
    let mut file = fs::File::open(path).map_err(ArtifactError::io(path, "open"))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(ArtifactError::io(path, "read"))?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        progress.advance(read as u64);
    }
    let found = hex::encode(hasher.finalize());
    if found == record.sha256 {
        return Ok(());
    }
    Err(ArtifactError::Hash { path: path.to_owned(), expected: record.sha256.clone(), found })
}

fn shards(dir: &Path, manifest: &Manifest, stem: &str) -> Result<BTreeMap<String, TensorFile>> {
    manifest
        .files
        .keys()
        .filter(|name| name.starts_with(stem) && name.ends_with(".safetensors"))
        .map(|name| Ok((name.clone(), TensorFile::open(&dir.join(name))?)))
        .collect()
}

/// The merged weights: the weight map names exactly the tensors the geometry needs, each in the shard that has it.
fn merged_weights(dir: &Path, manifest: &Manifest, geometry: &Geometry) -> Result<BTreeMap<String, Tensor>> {
    let index = read_json(&dir.join(INDEX))?;
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err(ArtifactError::field(INDEX, "weight_map", "an object", "nothing"));
    };
    let files = shards(dir, manifest, "model-")?;
    let mut placed = BTreeSet::new();
    for (name, file) in &files {
        for tensor in file.names() {
            if map.get(tensor).and_then(Value::as_str) != Some(name) {
                let found = map.get(tensor).map_or_else(|| "nothing".to_owned(), Value::to_string);
                return Err(ArtifactError::field(INDEX, tensor, name, found));
            }
            placed.insert(tensor.to_owned());
        }
    }
    if let Some(absent) = map.keys().find(|tensor| !placed.contains(*tensor)) {
        return Err(ArtifactError::field(INDEX, absent, "a tensor of a listed shard", "none"));
    }
    let mut tensors = BTreeMap::new();
    for spec in geometry.tensors() {
        let full = format!("{PREFIX}{}", spec.name);
        if !placed.remove(&full) {
            return Err(ArtifactError::field(INDEX, full, "a tensor: the geometry needs it", "none"));
        }
        let file = map.get(&full).and_then(Value::as_str).and_then(|name| files.get(name));
        let Some(file) = file else { return Err(ArtifactError::field(INDEX, full, "a shard", "none")) };
        let tensor = file.tensor(&full)?;
        expect_shape(file.name(), &full, &tensor, &spec.shape, spec.f32_allowed, true)?;
        tensors.insert(spec.name, tensor);
    }
    match placed.into_iter().next() {
        Some(extra) => Err(ArtifactError::field(
            INDEX,
            extra,
            "backbone tensors only",
            "a tensor the geometry does not have",
        )),
        None => Ok(tensors),
    }
}

/// The exact companion: base weight and both factors of every projection, and nothing else.
fn exact_weights(
    dir: &Path,
    manifest: &Manifest,
    geometry: &Geometry,
) -> Result<BTreeMap<String, ExactProjection>> {
    let mut tensors: BTreeMap<String, (String, Tensor)> = BTreeMap::new();
    for (name, file) in shards(dir, manifest, "exact-")? {
        for tensor in file.names() {
            if tensors.insert(tensor.to_owned(), (name.clone(), file.tensor(tensor)?)).is_some() {
                return Err(ArtifactError::field(&name, tensor, "one tensor of that name", "a second one"));
            }
        }
    }
    if manifest.exact_companion == tensors.is_empty() {
        let found = if tensors.is_empty() { "no exact shards" } else { "exact shards" };
        return Err(ArtifactError::field(MANIFEST, "exact_companion", manifest.exact_companion, found));
    }
    let mut exact = BTreeMap::new();
    if tensors.is_empty() {
        return Ok(exact);
    }
    let rank = manifest.lora.rank;
    let scale = (manifest.lora.alpha / rank as f64) as f32;
    for spec in geometry.tensors().into_iter().filter(|spec| spec.projection) {
        let stem = format!("{PREFIX}{}", spec.name.trim_end_matches(".weight"));
        let mut take = |half: &str, shape: &[usize], f32_allowed: bool, bf16_allowed: bool| {
            let name = format!("{stem}.{half}.weight").replace("..", ".");
            let Some((file, tensor)) = tensors.remove(&name) else {
                return Err(ArtifactError::field(MANIFEST, name, "a tensor of the exact companion", "none"));
            };
            expect_shape(&file, &name, &tensor, shape, f32_allowed, bf16_allowed)?;
            Ok(tensor)
        };
        let (out, input) = (spec.shape[0], spec.shape[1]);
        let weight = take("", &spec.shape, false, true)?;
        let a = take("lora_A", &[rank, input], true, false)?;
        let b = take("lora_B", &[out, rank], true, false)?;
        exact.insert(spec.name, ExactProjection { weight, lora: LoraPair { a, b, scale } });
    }
    match tensors.into_iter().next() {
        Some((extra, (file, _))) => {
            Err(ArtifactError::field(&file, extra, "projections of this geometry", "another tensor"))
        }
        None => Ok(exact),
    }
}
