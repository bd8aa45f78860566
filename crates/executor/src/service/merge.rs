//! Owns the merge of an export on a GPU, as the official service merges: the product in FP32 by cuBLAS, whose order of summation
//! is its own.

use artifact::{ArtifactError, LoraPair, MergeRecord, Merger, Tensor};
use backend::{BackendError, LowRank};
use backend_cuda::{ServiceOps, turn};

use super::model::host;

/// Merges adapters on a GPU.
pub struct CudaMerger {
    ops: ServiceOps,
}

impl CudaMerger {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`BackendError::Device`] without a GPU, kernels or cuBLAS.
    pub fn open(ordinal: usize) -> Result<Self, BackendError> {
        Ok(Self { ops: ServiceOps::open(ordinal)? })
    }
}

impl Merger for CudaMerger {
    fn record(&self) -> MergeRecord {
        let library = ("cublas".to_owned(), self.ops.blas_version().to_string());
        MergeRecord {
            device: format!("cuda, {}", self.ops.device().describe()),
            accumulation: "fp32 by cublas, no tf32, one rounding to bf16".to_owned(),
            libraries: [library].into(),
        }
    }

    fn merge(&self, weight: &Tensor, lora: &LoraPair) -> artifact::Result<Vec<u8>> {
        let _turn = turn();
        let adapter = LowRank { a: host(&lora.a), b: host(&lora.b), scale: lora.scale };
        self.ops
            .merge(&host(weight), &adapter)
            .map_err(|error| ArtifactError::Merge { reason: error.to_string() })
    }
}
