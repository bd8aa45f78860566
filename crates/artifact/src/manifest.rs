//! Owns the manifest of an export and the pins of known profiles: what an export says it is, and what it must be.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{ArtifactError, Result};
use crate::geometry::Geometry;
use crate::tokenizer::PreTokenizer;

/// File name of the manifest.
pub const MANIFEST: &str = "kev_export.json";
/// File with the digest of the manifest, as `sha256sum --check` reads it. Without it a changed bit in a name or number of
/// the manifest itself would go unnoticed.
pub(crate) const SEAL: &str = "kev_export.sha256";
/// Format id in the manifest.
pub(crate) const FORMAT: &str = "omni-kev export";
/// Format version in the manifest.
pub(crate) const VERSION: u32 = 1;
/// Profile name of everything that is not a pinned release.
pub(crate) const CUSTOM: &str = "custom";

/// `kev_export.json`: exactly these keys, no more, no fewer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// Name of the pinned profile whose identity this export has, or [`CUSTOM`].
    pub profile: String,
    /// Commit of the reference service, for pinned profiles.
    pub reference: Option<String>,
    /// The base.
    pub base: Source,
    /// The adapter and head.
    pub adapter: Source,
    /// Divisor of the logits.
    pub temperature: f64,
    /// Sizes of the backbone.
    pub geometry: GeometryRecord,
    /// LoRA settings.
    pub lora: LoraRecord,
    /// How the adapter was merged.
    pub merge: MergeRecord,
    /// How text is split before byte-pair encoding; a choice of the exporter, never of whatever file was found.
    pub pre_tokenizer: PreTokenizer,
    /// Element type of the merged projections.
    pub backbone_dtype: String,
    /// Element type of the pointer head.
    pub head_dtype: String,
    /// Dimension of the pointer head's queries and keys.
    pub head_dim: usize,
    /// Whether the unmerged projections of the `exact` profile are there.
    pub exact_companion: bool,
    /// The program that wrote the export.
    pub exporter: ExporterRecord,
    /// Every other file of the directory.
    pub files: BTreeMap<String, FileRecord>,
}

/// Where weights came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Repository or directory name, as the checkpoint states it.
    pub name: String,
    /// Revision, where it is known.
    pub revision: Option<String>,
}

/// LoRA settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraRecord {
    /// Rank.
    pub rank: usize,
    /// Alpha; the scale is alpha / rank.
    pub alpha: f64,
    /// Number of adapted projections.
    pub modules: usize,
}

/// Numerics of the merge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeRecord {
    /// Where it ran: `cpu`, or `cuda` and the device.
    pub device: String,
    /// Order of the arithmetic.
    pub accumulation: String,
    /// Versions of numeric libraries that took part; none on a CPU.
    pub libraries: BTreeMap<String, String>,
}

/// The writing program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExporterRecord {
    /// Version of omni-kev.
    pub version: String,
    /// Its commit, where the build knew it.
    pub commit: Option<String>,
}

/// Size and digest of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Bytes.
    pub size: u64,
    /// SHA-256, lower-case hexadecimal.
    pub sha256: String,
}

/// The sizes of [`Geometry`] as the manifest records them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeometryRecord {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of the MLP.
    pub intermediate: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of full-attention layers among them.
    pub full_attention_layers: usize,
    /// Rows of the embedding.
    pub vocab: usize,
}

impl From<&Geometry> for GeometryRecord {
    fn from(geometry: &Geometry) -> Self {
        Self {
            hidden: geometry.hidden,
            intermediate: geometry.intermediate,
            layers: geometry.layers.len(),
            full_attention_layers: geometry
                .layers
                .iter()
                .filter(|kind| **kind == crate::LayerKind::Full)
                .count(),
            vocab: geometry.vocab,
        }
    }
}

impl Manifest {
    /// Parses and checks what can be checked without the other files.
    ///
    /// # Errors
    /// [`ArtifactError::Format`] for anything but exactly the keys above, [`ArtifactError::Field`] for a value.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| {
            ArtifactError::format(MANIFEST, format!("{error}; export again with this version of omni-kev"))
        })?;
        let check = |field: &str, expected: &str, found: &str| {
            if expected == found {
                Ok(())
            } else {
                Err(ArtifactError::field(MANIFEST, field, expected, found))
            }
        };
        check("format", FORMAT, &manifest.format)?;
        check("version", &VERSION.to_string(), &manifest.version.to_string())?;
        check("backbone_dtype", "BF16", &manifest.backbone_dtype)?;
        check("head_dtype", "F32", &manifest.head_dtype)?;
        if !(manifest.temperature.is_finite() && manifest.temperature > 0.0) {
            return Err(ArtifactError::field(
                MANIFEST,
                "temperature",
                "a positive number",
                manifest.temperature,
            ));
        }
        for (name, record) in &manifest.files {
            if !crate::base::plain_name(name) || [MANIFEST, SEAL].contains(&name.as_str()) {
                return Err(ArtifactError::field(MANIFEST, "files", "plain file names", format!("{name:?}")));
            }
            let digest = &record.sha256;
            if digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
            {
                return Err(ArtifactError::field(
                    MANIFEST,
                    format!("files.{name}.sha256"),
                    "64 hexadecimal digits",
                    digest,
                ));
            }
        }
        Ok(manifest)
    }
}

/// Hashes and identity a user trusts: every field present must agree.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Pins {
    /// Name shown in messages.
    pub profile: String,
    /// Commit of the reference service.
    pub reference: Option<String>,
    /// Name of the base.
    pub base: Option<String>,
    /// Revision of the base.
    pub base_revision: Option<String>,
    /// Revision of the adapter.
    pub adapter_revision: Option<String>,
    /// Divisor of the logits.
    pub temperature: Option<f64>,
    /// LoRA rank.
    pub rank: Option<usize>,
    /// LoRA alpha.
    pub alpha: Option<f64>,
    /// Number of adapted projections.
    pub modules: Option<usize>,
    /// Dimension of the head.
    pub head_dim: Option<usize>,
    /// SHA-256 of files of the export, by name.
    pub files: BTreeMap<String, String>,
}

impl Pins {
    /// The compiled-in identity of the release `kev-4b`. Hashes of its files are not published, so none are here.
    pub fn kev_4b() -> Self {
        Self {
            profile: "kev-4b".to_owned(),
            reference: Some("2074cc44256200bb37540103fa4572901faa10f3".to_owned()),
            base: Some("Qwen/Qwen3.5-4B-Base".to_owned()),
            base_revision: Some("1001bb4d826a52d1f399e183466143f4da7b741b".to_owned()),
            adapter_revision: Some("139fdd94f1b6a6ad80cc15e08fcb99cac885a101".to_owned()),
            temperature: Some(2.406_050_072_164_233),
            rank: Some(16),
            alpha: Some(32.0),
            modules: Some(248),
            head_dim: Some(256),
            files: BTreeMap::new(),
        }
    }

    /// Reads a pins file.
    ///
    /// # Errors
    /// [`ArtifactError`] naming the file and what is wrong in it.
    pub fn read(path: &Path) -> Result<Self> {
        let size = crate::map::regular(path)?;
        let shown = path.display().to_string();
        if size > 16 << 20 {
            return Err(ArtifactError::format(shown, format!("is {size} bytes, expected at most 16 MiB")));
        }
        let bytes = std::fs::read(path).map_err(ArtifactError::io(path, "read"))?;
        serde_json::from_slice(&bytes).map_err(|error| ArtifactError::format(shown, error.to_string()))
    }

    /// Pins that hold an export to exactly what it is now.
    pub fn of(manifest: &Manifest) -> Self {
        Self {
            profile: manifest.profile.clone(),
            reference: manifest.reference.clone(),
            base: Some(manifest.base.name.clone()),
            base_revision: manifest.base.revision.clone(),
            adapter_revision: manifest.adapter.revision.clone(),
            temperature: Some(manifest.temperature),
            rank: Some(manifest.lora.rank),
            alpha: Some(manifest.lora.alpha),
            modules: Some(manifest.lora.modules),
            head_dim: Some(manifest.head_dim),
            files: manifest
                .files
                .iter()
                .map(|(name, record)| (name.clone(), record.sha256.clone()))
                .collect(),
        }
    }

    /// Checks an export against every pinned field.
    ///
    /// # Errors
    /// [`ArtifactError::Pin`] naming the first field that disagrees.
    pub fn check(&self, manifest: &Manifest) -> Result<()> {
        let wrong = |field: &str, expected: String, found: String| {
            Err(ArtifactError::Pin {
                profile: self.profile.clone(),
                field: field.to_owned(),
                expected,
                found,
            })
        };
        let unknown = || "nothing".to_owned();
        let texts = [
            ("reference", &self.reference, manifest.reference.clone()),
            ("base", &self.base, Some(manifest.base.name.clone())),
            ("base_revision", &self.base_revision, manifest.base.revision.clone()),
            ("adapter_revision", &self.adapter_revision, manifest.adapter.revision.clone()),
        ];
        for (field, pinned, found) in texts {
            if let Some(pinned) = pinned
                && found.as_ref() != Some(pinned)
            {
                return wrong(field, pinned.clone(), found.unwrap_or_else(unknown));
            }
        }
        let numbers = [
            ("temperature", self.temperature, manifest.temperature),
            ("rank", self.rank.map(|n| n as f64), manifest.lora.rank as f64),
            ("alpha", self.alpha, manifest.lora.alpha),
            ("modules", self.modules.map(|n| n as f64), manifest.lora.modules as f64),
            ("head_dim", self.head_dim.map(|n| n as f64), manifest.head_dim as f64),
        ];
        for (field, pinned, found) in numbers {
            if let Some(pinned) = pinned
                && pinned != found
            {
                return wrong(field, pinned.to_string(), found.to_string());
            }
        }
        for (name, digest) in &self.files {
            let found = manifest.files.get(name).map_or_else(unknown, |record| record.sha256.clone());
            if &found != digest {
                return wrong(&format!("files.{name}"), digest.clone(), found);
            }
        }
        Ok(())
    }
}
