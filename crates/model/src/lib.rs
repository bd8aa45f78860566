//! Owns the Qwen3.5 hybrid backbone and the pointer head over any backend, and the making of passes.
//! Knows no queue, no request and no device.

mod forward;
mod pass_builder;
mod weights;

pub use forward::{Model, ModelSizes, key_row_bytes, slot_bytes};
pub use pass_builder::{Owner, PassBuilder, Piece};
pub use weights::{ModelError, WeightSet};
