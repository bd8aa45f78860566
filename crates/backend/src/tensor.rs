//! Owns tensors as they lie in host memory: raw little-endian bytes with a dtype and a shape, and projections made of them.

use bytes::Bytes;

/// Element type of stored or device data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit IEEE 754.
    F32,
    /// The upper 16 bits of an `F32`.
    BF16,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 => 2,
        }
    }
}

/// A row-major tensor in host memory. `data` may borrow from a memory-mapped file, so it need not be aligned and
/// cloning is cheap.
#[derive(Clone, Debug)]
pub struct HostTensor {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// `shape.product() * dtype.size()` little-endian bytes.
    pub data: Bytes,
}

impl HostTensor {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A projection `[out, in]`, possibly with a low-rank adapter that is not merged into it.
///
/// The `exact` profile computes `x (W + scale B A)^T` without ever rounding the sum to BF16, because that is what the
/// FP32 reference does: rounding the merged weight moves probabilities by up to 0.02 on a small random model. A
/// backend may add `scale (x A^T) B^T` to `x W^T`, or form the FP32 sum when it prepares the weight.
#[derive(Clone, Debug)]
pub struct Projection {
    /// W `[out, in]`.
    pub weight: HostTensor,
    /// B A, `None` when the weight is already merged or never had an adapter.
    pub adapter: Option<LowRank>,
}

/// A low-rank adapter of a projection: `scale * b a`.
#[derive(Clone, Debug)]
pub struct LowRank {
    /// A `[rank, in]`, FP32.
    pub a: HostTensor,
    /// B `[out, rank]`, FP32.
    pub b: HostTensor,
    /// LoRA alpha / rank.
    pub scale: f32,
}

impl From<HostTensor> for Projection {
    fn from(weight: HostTensor) -> Self {
        Self { weight, adapter: None }
    }
}
