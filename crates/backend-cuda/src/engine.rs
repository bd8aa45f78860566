//! Owns one engine: a GPU, an arithmetic, and the ways to submit work to them. Knows no operation's contract.
#![allow(unsafe_code)] // Submits kernels, whose parameters no compiler checks.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use backend::{BackendError, DType, Result, Role};
use half::bf16;

use crate::device::{Arguments, Buffer, Device, Memory};
use crate::gemm::Gemm;
use crate::graph::Recording;
use crate::layout::LayoutMemory;
use crate::shapes::Shape;

/// Arithmetic of all operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// FP32 values and products, no TF32; weights widened exactly from the dtype they are stored in.
    Exact,
    /// BF16 weights and operands of products, FP32 sums, residual stream, delta-rule states, gates and norms.
    Fast,
}

impl Profile {
    /// Dtype of a buffer's role.
    pub fn dtype(self, role: Role) -> DType {
        match (self, role) {
            (Self::Exact, _) => DType::F32,
            (Self::Fast, Role::Operand | Role::Activation | Role::ConvTail | Role::KeyValue) => DType::BF16,
            (Self::Fast, Role::Residual | Role::Convolved | Role::Gates | Role::Recurrent | Role::Head) => {
                DType::F32
            }
        }
    }
}

/// What to open.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Which GPU, in the driver's order.
    pub ordinal: usize,
    /// Arithmetic.
    pub profile: Profile,
    /// Whether small passes are padded to prepared shapes and replayed as graphs.
    pub graphs: bool,
}

/// A weight `[columns, depth]` on the device: `columns` outputs of `depth` inputs each.
#[derive(Debug)]
pub struct Weight {
    pub(crate) memory: Memory,
    pub(crate) dtype: DType,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
}

/// The operations on one GPU.
pub struct CudaOps {
    // Dropped before what they replay on.
    pub(crate) recordings: Mutex<HashMap<Shape, Recorded>>,
    /// Whether small passes are recorded.
    pub(crate) graphs: bool,
    // Dropped before the device it runs on.
    pub(crate) gemm: Option<Gemm>,
    pub(crate) device: Arc<Device>,
    pub(crate) profile: Profile,
}

/// A shape's tables and, once its operations were submitted, their record.
pub(crate) struct Recorded {
    pub(crate) recording: Option<Recording>,
    pub(crate) memory: Arc<LayoutMemory>,
}

/// The letter that kernels' names have for a dtype.
pub(crate) fn letter(dtype: DType) -> char {
    match dtype {
        DType::F32 => 'f',
        DType::BF16 => 'h',
    }
}

pub(crate) fn contract(operation: &'static str, reason: String) -> BackendError {
    BackendError::Contract { operation, reason }
}

pub(crate) fn holds(operation: &'static str, what: &str, buffer: &Buffer, elements: usize) -> Result<()> {
    if buffer.elements >= elements {
        return Ok(());
    }
    Err(contract(operation, format!("{what} has {} elements, {elements} are needed", buffer.elements)))
}

pub(crate) fn is(operation: &'static str, what: &str, buffer: &Buffer, dtype: DType) -> Result<()> {
    if buffer.dtype == dtype {
        return Ok(());
    }
    Err(contract(operation, format!("{what} is {:?}, expected {dtype:?}", buffer.dtype)))
}

/// A grid dimension; what exceeds the device's limits is refused by the driver.
pub(crate) fn grid(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

impl CudaOps {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`BackendError::Device`] when there is no driver, no such device, no kernels for it, or no cuBLASLt for `fast`.
    pub fn open(options: CudaOptions) -> Result<Self> {
        let device = Device::open(options.ordinal)?;
        let gemm = match options.profile {
            Profile::Exact => None,
            Profile::Fast => Some(Gemm::open(&device)?),
        };
        let recordings = Mutex::new(HashMap::new());
        Ok(Self { recordings, graphs: options.graphs, gemm, device, profile: options.profile })
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// What results may depend on, by name: device, driver, kernels, libraries.
    pub fn identity(&self) -> BTreeMap<String, String> {
        let mut identity = self.device.identity();
        if self.gemm.is_some() {
            identity.insert("cublaslt".to_owned(), Gemm::version().to_string());
        }
        identity
    }

    /// The arithmetic.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// What was chosen by measurement, one line each.
    pub fn report(&self) -> Vec<String> {
        self.gemm.as_ref().map(Gemm::report).unwrap_or_default()
    }

    /// Records operations for [`Recording::replay`].
    ///
    /// # Errors
    /// As [`Recording::new`].
    pub fn record(&self, submit: impl FnOnce() -> Result<()>) -> Result<Recording> {
        Recording::new(&self.device, submit)
    }

    /// Makes the device fail asynchronously, as a broken one does; nothing works in this process afterwards.
    ///
    /// # Errors
    /// [`BackendError::Device`] when not even this can be submitted.
    #[cfg(feature = "gpu")]
    pub fn fail(&self) -> Result<()> {
        self.launch("omni_kev_trap", (1, 1, 1), 1, Arguments::default())
    }

    /// A buffer with the dtype of `role` that holds `values`, rounded once if that is a lower dtype.
    ///
    /// # Errors
    /// [`BackendError::Memory`] when the device has not enough left, [`BackendError::Device`] when the copy failed.
    pub fn values(&self, role: Role, values: &[f32]) -> Result<Buffer> {
        let dtype = self.profile.dtype(role);
        let mut buffer = self.buffer(dtype, "given values", values.len())?;
        match dtype {
            DType::F32 => buffer.memory.upload(0, bytemuck::cast_slice(values))?,
            DType::BF16 => {
                let rounded: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
                buffer.memory.upload(0, &rounded)?;
            }
        }
        Ok(buffer)
    }

    pub(crate) fn buffer(&self, dtype: DType, what: &str, elements: usize) -> Result<Buffer> {
        if i32::try_from(elements / 16).is_err() {
            return Err(contract("zeros", format!("{elements} elements exceed what kernels count")));
        }
        Ok(Buffer { memory: self.device.allocate(what, elements * dtype.size())?, dtype, elements })
    }

    /// Submits a kernel whose operands the calling operation has checked.
    pub(crate) fn launch(
        &self,
        name: &str,
        blocks: (usize, usize, usize),
        threads: u32,
        arguments: Arguments,
    ) -> Result<()> {
        self.launch_with(name, blocks, threads, 0, arguments)
    }

    pub(crate) fn launch_with(
        &self,
        name: &str,
        (x, y, z): (usize, usize, usize),
        threads: u32,
        shared: usize,
        arguments: Arguments,
    ) -> Result<()> {
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        // SAFETY: every caller in this crate passes the parameters of its kernel, as declared beside the kernel's
        // contract in kernels/*.cu, after checking the sizes of all buffers.
        unsafe { self.device.launch(name, (grid(x), grid(y), grid(z)), threads, grid(shared), arguments) }
    }

    /// `out = x weight^T` by the general kernels.
    pub(crate) fn general_product(
        &self,
        x: &Buffer,
        weight: &Weight,
        rows: usize,
        out: &Buffer,
    ) -> Result<()> {
        // Both tiles give the same bits; the larger is faster once it fills the device.
        let tile = if rows.div_ceil(128) * weight.columns.div_ceil(128) >= 256 { 128 } else { 64 };
        let name = format!("gemm_{}{}{}_{tile}", letter(x.dtype), letter(weight.dtype), letter(out.dtype));
        let arguments = Arguments::default()
            .buffer(x)
            .pointer(weight.memory.pointer())
            .buffer(out)
            .int(rows)
            .int(weight.columns)
            .int(weight.depth);
        self.launch(&name, (weight.columns.div_ceil(tile), rows.div_ceil(tile), 1), 256, arguments)
    }

    pub(crate) fn gather(
        &self,
        (dtype, source): (DType, u64),
        rows: u64,
        count: usize,
        width: usize,
        out: &Buffer,
    ) -> Result<()> {
        let name = format!("gather_{}{}", letter(dtype), letter(out.dtype));
        let arguments = Arguments::default().pointer(source).pointer(rows).buffer(out).int(width);
        self.launch(&name, (count, 1, 1), 256, arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_keep_states_gates_and_residuals_in_fp32() {
        for role in [Role::Residual, Role::Convolved, Role::Recurrent, Role::Gates, Role::Head] {
            assert_eq!(Profile::Fast.dtype(role), DType::F32, "{role:?}");
        }
        assert_eq!(Profile::Fast.dtype(Role::ConvTail), Profile::Fast.dtype(Role::Activation));
        assert_eq!(Profile::Exact.dtype(Role::Operand), DType::F32);
    }
}
