//! Checkpoints and exports to break: one of each, made once, copied for every case.
#![allow(dead_code)] // Every test binary uses its part.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use artifact::synth::{Preset, synthesize};
use artifact::{ArtifactError, Export, ExportOptions, ExportSummary, OpenOptions, Silent, export};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

pub(crate) const MANIFEST: &str = "kev_export.json";
pub(crate) const SEAL: &str = "kev_export.sha256";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const SHARD: &str = "model-00001-of-00001.safetensors";
pub(crate) const EXACT: &str = "exact-00001-of-00001.safetensors";
pub(crate) const HEAD: &str = "head.safetensors";

/// Where the good checkpoint and its export lie.
fn good() -> &'static Path {
    static GOOD: OnceLock<tempfile::TempDir> = OnceLock::new();
    GOOD.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        synthesize(&Preset::Tiny.recipe(), 0, dir.path().join("checkpoint"), &Silent).unwrap();
        let checkpoint = dir.path().join("checkpoint");
        exported(&checkpoint, &dir.path().join("export")).unwrap();
        dir
    })
    .path()
}

/// Exports `checkpoint/adapter` and `checkpoint/base`.
pub(crate) fn exported(checkpoint: &Path, out: &Path) -> Result<ExportSummary, ArtifactError> {
    let options = ExportOptions {
        adapter: checkpoint.join("adapter"),
        base: checkpoint.join("base"),
        out: out.to_owned(),
        pins: None,
        exact_companion: true,
        commit: None,
    };
    export(&options, &Silent)
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// A directory of one's own to break.
pub(crate) struct Copy {
    dir: tempfile::TempDir,
}

impl Copy {
    pub(crate) fn export() -> Self {
        Self::of("export")
    }

    pub(crate) fn checkpoint() -> Self {
        Self::of("checkpoint")
    }

    fn of(what: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        copy(&good().join(what), &dir.path().join("copy"));
        Self { dir }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("copy")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap()
    }

    /// Opens it as an export.
    pub(crate) fn open(&self) -> Result<Export, String> {
        Export::open(&self.root(), &OpenOptions::default()).map_err(|error| error.to_string())
    }

    /// The refusal of it as an export, which must contain every one of `named`.
    pub(crate) fn refused(&self, named: &[&str]) {
        let message = self.open().err();
        assert!(message.is_some(), "opened, expected a refusal that names {named:?}");
        let message = message.unwrap_or_default();
        for name in named {
            assert!(message.contains(name), "{name:?} is not in {message:?}");
        }
    }

    /// Changes the manifest and seals it again, as somebody would who wants the change to go unnoticed.
    pub(crate) fn manifest(&self, change: impl FnOnce(&mut Value)) {
        let mut manifest = self.json(MANIFEST);
        change(&mut manifest);
        self.sealed(&serde_json::to_vec(&manifest).unwrap());
    }

    /// Writes a manifest and its seal.
    pub(crate) fn sealed(&self, manifest: &[u8]) {
        self.write(MANIFEST, manifest);
        let digest = hex::encode(Sha256::digest(manifest));
        self.write(SEAL, format!("{digest}  {MANIFEST}\n").as_bytes());
    }

    /// Replaces a listed file and its record, so that only what it says can be refused.
    pub(crate) fn replace(&self, name: &str, bytes: &[u8]) {
        self.write(name, bytes);
        let record = json!({ "size": bytes.len(), "sha256": hex::encode(Sha256::digest(bytes)) });
        self.manifest(|manifest| manifest["files"][name] = record);
    }

    /// Changes a listed safetensors file: its header and its body.
    pub(crate) fn tensors(&self, name: &str, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
        let (mut header, mut body) = split(&self.read(name));
        change(&mut header, &mut body);
        self.replace(name, &joined(&serde_json::to_vec(&header).unwrap(), &body));
    }
}

/// Header and body of a safetensors file.
pub(crate) fn split(bytes: &[u8]) -> (Map<String, Value>, Vec<u8>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let Value::Object(header) = serde_json::from_slice(&bytes[8..8 + length]).unwrap() else {
        unreachable!("a header is an object")
    };
    (header, bytes[8 + length..].to_vec())
}

pub(crate) fn joined(header: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(body);
    bytes
}

/// Bytes of one tensor.
pub(crate) fn span(header: &Map<String, Value>, tensor: &str) -> std::ops::Range<usize> {
    let at = |index: usize| header[tensor]["data_offsets"][index].as_u64().unwrap() as usize;
    at(0)..at(1)
}
