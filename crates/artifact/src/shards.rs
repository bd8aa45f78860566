//! Owns how tensors are laid out in safetensors files: which go into which shard, and a shard's header.

use serde_json::json;

use crate::error::{ArtifactError, Result};
use crate::weights::TensorType;

/// Shards stay below this so that several can be hashed at once.
const SHARD_BYTES: u64 = 1 << 30;

/// A tensor that is to be written.
pub(crate) trait Planned {
    /// Its full name.
    fn name(&self) -> &str;
    /// Element type.
    fn dtype(&self) -> TensorType;
    /// Shape.
    fn shape(&self) -> &[usize];
    /// Size in the file.
    fn bytes(&self) -> u64 {
        (self.shape().iter().product::<usize>() * self.dtype().size()) as u64
    }
}

/// Consecutive tensors that share a shard; only a single larger tensor exceeds the limit.
pub(crate) fn shards<T: Planned>(tensors: &[T]) -> Vec<&[T]> {
    let mut shards = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (index, tensor) in tensors.iter().enumerate() {
        if index > start && size + tensor.bytes() > SHARD_BYTES {
            shards.push(&tensors[start..index]);
            (start, size) = (index, 0);
        }
        size += tensor.bytes();
    }
    if start < tensors.len() {
        shards.push(&tensors[start..]);
    }
    shards
}

/// Everything of a safetensors file that precedes its data: the header's length and the header.
pub(crate) fn header<T: Planned>(file: &str, tensors: &[T]) -> Result<Vec<u8>> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes();
        let entry = json!({
            "dtype": tensor.dtype().as_str(),
            "shape": tensor.shape(),
            "data_offsets": [offset, end],
        });
        header.insert(tensor.name().to_owned(), entry);
        offset = end;
    }
    let text = serde_json::to_vec(&header)
        .map_err(|error| ArtifactError::format(file, format!("cannot write its header: {error}")))?;
    // Tensor data begins at a multiple of 8 bytes.
    let length = text.len().next_multiple_of(8);
    let mut bytes = (length as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes.resize(8 + length, b' ');
    Ok(bytes)
}
