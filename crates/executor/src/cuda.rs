//! Owns opening an executor on a GPU: which weights a profile takes, and whether the device has the memory that the options
//! need, before anything is loaded.

use std::collections::BTreeMap;
use std::sync::Arc;

use artifact::Export;
use backend_cuda::{CudaOps, CudaOptions, Profile, turn};
use model::WeightSet;

use crate::worker::{Executor, ExecutorError, ExecutorOptions, sizes};

/// Device memory for what is not planned to the byte: tables of a pass, chunks of the delta rule, partial sums of attention,
/// cuBLASLt's workspace, the operands that products are measured with.
const RESERVE: usize = 1 << 30;

/// How many GPUs this machine has.
pub fn cuda_devices() -> usize {
    backend_cuda::Device::count()
}

/// Asks for free and total bytes of a device; `None` when the driver fails.
pub type DeviceMemory = Box<dyn Fn() -> Option<(usize, usize)> + Send>;

impl Executor<CudaOps> {
    /// Makes the device fail asynchronously; for tests of what follows.
    ///
    /// # Errors
    /// [`backend::BackendError::Device`].
    #[cfg(feature = "gpu")]
    pub fn fail_device(&self) -> backend::Result<()> {
        self.ops().fail()
    }

    /// What results may depend on, by name: device, driver, kernels, libraries.
    pub fn identity(&self) -> BTreeMap<String, String> {
        self.ops().identity()
    }

    /// A way to ask for the device's memory while the executor is busy.
    pub fn device_memory(&self) -> DeviceMemory {
        let device = Arc::clone(self.ops().device());
        Box::new(move || device.memory_info().ok())
    }
}

/// An executor on a GPU.
///
/// # Errors
/// [`ExecutorError::Memory`] when the device has less free memory than weights, arenas and workspace need, otherwise as
/// [`Executor::open`].
pub fn open_cuda(
    export: &Export,
    options: &ExecutorOptions,
    cuda: CudaOptions,
) -> Result<Executor<CudaOps>, ExecutorError> {
    let _turn = turn();
    let ops = CudaOps::open(cuda)?;
    let set = match cuda.profile {
        Profile::Exact => WeightSet::Exact,
        Profile::Fast => WeightSet::Merged,
    };
    let weights = weight_bytes(export, cuda.profile);
    let planned = sizes(&ops, export, options);
    let needed =
        [("weights", weights), ("arenas and workspace", planned.bytes(&ops, export)), ("reserve", RESERVE)];
    let (free, _) = ops.device().memory_info()?;
    let total: usize = needed.iter().map(|(_, bytes)| bytes).sum();
    if total > free {
        let parts: Vec<String> =
            needed.iter().map(|(what, bytes)| format!("{:.2} GB {what}", *bytes as f64 / 1e9)).collect();
        return Err(ExecutorError::Memory {
            device: ops.device().describe(),
            free,
            total,
            parts: parts.join(", "),
        });
    }
    let mut executor = Executor::open(ops, export, set, options)?;
    executor.exercise()?;
    Ok(executor)
}

/// Bytes of all weights on the device.
fn weight_bytes(export: &Export, profile: Profile) -> usize {
    // `exact` keeps the unrounded sums of projections and adapters.
    let summed = profile == Profile::Exact;
    let backbone: usize = export
        .geometry
        .tensors()
        .iter()
        .map(|spec| {
            let elements: usize = spec.shape.iter().product();
            elements * if spec.projection && !summed || spec.name == "embed_tokens.weight" { 2 } else { 4 }
        })
        .sum();
    backbone + 8 * export.head.head_dim * (export.geometry.hidden + 1)
}
