//! Owns the base side of a checkpoint: its configuration and the backbone tensors among its shards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::adapter::read_json;
use crate::error::{ArtifactError, Result};
use crate::geometry::{Geometry, TensorSpec};
use crate::weights::{Tensor, TensorFile, expect_shape};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Prefixes of backbone tensors, by which class saved the checkpoint.
const PREFIXES: [&str; 3] = ["model.language_model.", "model.", ""];

/// A base checkpoint with its backbone located; vision, multi-token-prediction and output-head tensors are ignored.
#[derive(Debug)]
pub struct Base {
    /// Sizes from `config.json`.
    pub geometry: Geometry,
    dir: PathBuf,
    prefix: &'static str,
    files: BTreeMap<String, TensorFile>,
    places: BTreeMap<String, String>,
}

impl Base {
    /// Opens a base directory, sharded or single.
    ///
    /// # Errors
    /// [`ArtifactError`] naming the file, and the tensor that is missing or has another shape.
    pub fn open(dir: &Path) -> Result<Self> {
        let geometry = Geometry::from_config(&read_json(&dir.join("config.json"))?)?;
        let mut files = BTreeMap::new();
        let mut places = BTreeMap::new();
        if dir.join(INDEX).exists() {
            let index = read_json(&dir.join(INDEX))?;
            let Some(map) = index.get("weight_map").and_then(Json::as_object) else {
                return Err(ArtifactError::field(INDEX, "weight_map", "an object", "nothing"));
            };
            for (tensor, file) in map {
                let Some(file) = file.as_str().filter(|name| plain_name(name)) else {
                    return Err(ArtifactError::field(INDEX, tensor, "a file name", file));
                };
                if !files.contains_key(file) {
                    files.insert(file.to_owned(), TensorFile::open(&dir.join(file))?);
                }
                places.insert(tensor.clone(), file.to_owned());
            }
        } else {
            let file = TensorFile::open(&dir.join(SINGLE))?;
            places.extend(file.names().map(|name| (name.to_owned(), SINGLE.to_owned())));
            files.insert(SINGLE.to_owned(), file);
        }
        let prefix = PREFIXES
            .into_iter()
            .find(|prefix| places.contains_key(&format!("{prefix}embed_tokens.weight")))
            .ok_or_else(|| ArtifactError::format(INDEX, "no embed_tokens.weight under any known prefix"))?;
        let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
        for (file, tensors) in &files {
            for tensor in tensors.names() {
                if let Some(first) = holders.insert(tensor, file) {
                    let reason =
                        format!("{tensor} is in two shards, here and in {first}: which one is meant?");
                    return Err(ArtifactError::format(file, reason));
                }
            }
        }
        let base = Self { geometry, dir: dir.to_owned(), prefix, files, places };
        for spec in base.geometry.tensors() {
            base.tensor(&spec)?;
        }
        Ok(base)
    }

    /// One backbone tensor, shape and dtype checked.
    ///
    /// # Errors
    /// [`ArtifactError`] naming file and tensor.
    pub fn tensor(&self, spec: &TensorSpec) -> Result<Tensor> {
        self.checked(spec, TensorFile::tensor)
    }

    /// As [`Base::tensor`], in memory of its own.
    ///
    /// # Errors
    /// As [`Base::tensor`], and [`ArtifactError::Io`].
    pub fn read(&self, spec: &TensorSpec) -> Result<Tensor> {
        self.checked(spec, TensorFile::read)
    }

    fn checked(
        &self,
        spec: &TensorSpec,
        get: impl Fn(&TensorFile, &str) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let full = format!("{}{}", self.prefix, spec.name);
        let file = self.places.get(&full).and_then(|file| self.files.get(file)).ok_or_else(|| {
            ArtifactError::format(INDEX, format!("{full} is missing from {}", self.dir.display()))
        })?;
        let tensor = get(file, &full)?;
        expect_shape(file.name(), &full, &tensor, &spec.shape, spec.f32_allowed, true)?;
        Ok(tensor)
    }
}

/// A file name without any path in it.
pub(crate) fn plain_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 200 && !name.contains(['/', '\\', '\0']) && name != "." && name != ".."
}
