//! Owns checkpoints and exports: reading them, merging the adapter, the manifest, the load contract, the tokenizer and
//! synthetic checkpoints. Knows no device and no request.

mod adapter;
mod base;
mod error;
pub mod export;
mod geometry;
mod manifest;
mod map;
mod merge;
mod opened;
mod pickle;
mod progress;
mod shards;
mod staging;
pub mod synth;
pub mod tokenizer;
mod weights;

pub use adapter::{Adapter, Head, LoraPair, TARGETS};
pub use base::Base;
pub use error::{ArtifactError, Result};
pub use export::{ExportOptions, ExportSummary, export, export_with};
pub use geometry::{Geometry, LayerKind, TensorSpec};
pub use manifest::{MANIFEST, Manifest, MergeRecord, Pins};
pub use merge::{CpuMerger, Merger};
pub use opened::{ExactProjection, Export, OpenOptions};
pub use pickle::{Value as PickleValue, parse_torch_zip, read_torch_zip};
pub use progress::{Progress, Silent};
pub use tokenizer::{Delimiters, PreTokenizer, Tokenizer};
pub use weights::{Tensor, TensorFile, TensorType};
