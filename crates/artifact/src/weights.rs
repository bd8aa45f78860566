//! Owns safetensors files: a strict header check and tensors that borrow the mapped file.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::Deserialize;

use crate::error::{ArtifactError, Result};
use crate::map::map_file;

/// The largest header accepted: the format's own limit.
const MAX_HEADER: usize = 100_000_000;
/// The most tensors a file may list; a published 27B checkpoint has 1,199 in all.
const MAX_TENSORS: usize = 200_000;

/// Element types this program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// 32-bit IEEE 754.
    F32,
    /// The upper 16 bits of an F32.
    BF16,
}

impl TensorType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 => 2,
        }
    }

    /// The name in a safetensors header.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::BF16 => "BF16",
        }
    }
}

/// A row-major tensor that may borrow a mapped file; cloning is cheap.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Element type.
    pub dtype: TensorType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// `shape.product() * dtype.size()` little-endian bytes, not necessarily aligned.
    pub data: Bytes,
}

impl Tensor {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// All elements as FP32; BF16 is widened exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            TensorType::F32 => {
                self.data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            TensorType::BF16 => self
                .data
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                .collect(),
        }
    }
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// One entry of a header whose dtype may be one that this program does not read.
#[derive(Clone, Debug)]
struct Located {
    dtype: String,
    shape: Vec<usize>,
    start: usize,
    end: usize,
}

/// A mapped safetensors file whose header was checked.
#[derive(Clone, Debug)]
pub struct TensorFile {
    name: String,
    /// Where it was opened, for reads that leave no mapped pages behind.
    path: Option<PathBuf>,
    body: Bytes,
    /// Where the body begins in the file.
    body_at: u64,
    entries: BTreeMap<String, Located>,
}

impl TensorFile {
    /// Maps and checks a file.
    ///
    /// # Errors
    /// [`ArtifactError::Format`] naming the file and what its header gets wrong.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        Ok(Self { path: Some(path.to_owned()), ..Self::parse(name, map_file(path)?)? })
    }

    /// Checks a file's bytes: header length, names, shapes, and offsets that cover the body once without gaps.
    ///
    /// # Errors
    /// [`ArtifactError::Format`].
    pub fn parse(name: String, bytes: Bytes) -> Result<Self> {
        let fail = |reason: String| Err(ArtifactError::format(name.clone(), reason));
        let Some(prefix) = bytes.get(..8).and_then(|b| <[u8; 8]>::try_from(b).ok()) else {
            return fail(format!("is {} bytes, shorter than a safetensors header", bytes.len()));
        };
        let length = u64::from_le_bytes(prefix);
        let available = bytes.len() - 8;
        if length > available as u64 || length > MAX_HEADER as u64 {
            return fail(format!("header of {length} bytes in a file of {}", bytes.len()));
        }
        let length = length as usize;
        let header = &bytes[8..8 + length];
        let Ok(text) = std::str::from_utf8(header) else {
            return fail("header is not UTF-8".to_owned());
        };
        let raw: BTreeMapNoDuplicates = serde_json::from_str(text)
            .map_err(|error| ArtifactError::format(name.clone(), format!("header: {error}")))?;
        let body = bytes.slice(8 + length..);
        let mut entries = BTreeMap::new();
        for (tensor, value) in raw.0 {
            if tensor == "__metadata__" {
                continue;
            }
            let entry: Entry = serde_json::from_value(value)
                .map_err(|error| ArtifactError::format(name.clone(), format!("tensor {tensor}: {error}")))?;
            let (start, end) = entry.data_offsets;
            let elements = entry.shape.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
            let wanted = elements.and_then(|n| n.checked_mul(element_size(&entry.dtype)?));
            if start > end || end > body.len() || wanted != Some(end - start) {
                return fail(format!(
                    "tensor {tensor}: {} {:?} at bytes {start}..{end} of a body of {}",
                    entry.dtype,
                    entry.shape,
                    body.len()
                ));
            }
            entries.insert(tensor, Located { dtype: entry.dtype, shape: entry.shape, start, end });
        }
        let mut spans: Vec<(usize, usize, &str)> =
            entries.iter().map(|(n, e)| (e.start, e.end, n.as_str())).collect();
        spans.sort_unstable();
        let mut at = 0;
        for (start, end, tensor) in spans {
            if start != at {
                return fail(format!(
                    "tensor {tensor} starts at byte {start}, expected {at}: tensors overlap or leave a gap"
                ));
            }
            at = end;
        }
        if at != body.len() {
            return fail(format!("tensors end at byte {at} of a body of {}", body.len()));
        }
        Ok(Self { name, path: None, body, body_at: 8 + length as u64, entries })
    }

    /// File name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// One tensor.
    ///
    /// # Errors
    /// [`ArtifactError::Format`] when there is none of that name, [`ArtifactError::Field`] for another dtype.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let entry = self
            .entries
            .get(name)
            .ok_or_else(|| ArtifactError::format(self.name.clone(), format!("has no tensor {name}")))?;
        let dtype = match entry.dtype.as_str() {
            "F32" => TensorType::F32,
            "BF16" => TensorType::BF16,
            other => return Err(ArtifactError::field(&self.name, name, "dtype F32 or BF16", other)),
        };
        Ok(Tensor { dtype, shape: entry.shape.clone(), data: self.body.slice(entry.start..entry.end) })
    }

    /// One tensor in memory of its own: what goes through every tensor of a model once must not keep them all resident.
    ///
    /// # Errors
    /// As [`TensorFile::tensor`], and [`ArtifactError::Io`].
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let tensor = self.tensor(name)?;
        let (Some(path), Some(entry)) = (&self.path, self.entries.get(name)) else { return Ok(tensor) };
        let mut data = vec![0; tensor.data.len()];
        let file = File::open(path).map_err(ArtifactError::io(path, "open"))?;
        file.read_exact_at(&mut data, self.body_at + entry.start as u64)
            .map_err(ArtifactError::io(path, "read"))?;
        Ok(Tensor { data: data.into(), ..tensor })
    }
}

fn element_size(dtype: &str) -> Option<usize> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => Some(1),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "F32" | "I32" | "U32" => Some(4),
        "F64" | "I64" | "U64" => Some(8),
        _ => None,
    }
}

/// A JSON object whose keys must be distinct: a repeated tensor name would let one of two shadow the other.
struct BTreeMapNoDuplicates(BTreeMap<String, serde_json::Value>);

impl<'de> Deserialize<'de> for BTreeMapNoDuplicates {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = BTreeMapNoDuplicates;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut access: A,
            ) -> std::result::Result<Self::Value, A::Error> {
                use serde::de::Error;
                let mut map = BTreeMap::new();
                while let Some(key) = access.next_key::<String>()? {
                    if map.len() == MAX_TENSORS {
                        return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                    let value = access.next_value()?;
                    if map.insert(key.clone(), value).is_some() {
                        return Err(A::Error::custom(format!("tensor {key:.120} is listed twice")));
                    }
                }
                Ok(BTreeMapNoDuplicates(map))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

/// Checks that a tensor has the dtype and shape it should.
pub(crate) fn expect_shape(
    file: &str,
    name: &str,
    tensor: &Tensor,
    shape: &[usize],
    f32_allowed: bool,
    bf16_allowed: bool,
) -> Result<()> {
    if tensor.shape != shape {
        return Err(ArtifactError::field(
            file,
            name,
            format!("shape {shape:?}"),
            format!("{:?}", tensor.shape),
        ));
    }
    let allowed = match tensor.dtype {
        TensorType::F32 => f32_allowed,
        TensorType::BF16 => bf16_allowed,
    };
    if !allowed {
        let expected = if f32_allowed { "F32" } else { "BF16" };
        return Err(ArtifactError::field(file, name, expected, tensor.dtype.as_str()));
    }
    Ok(())
}
