//! Owns one GPU: its context, the one stream all work is ordered by, and device memory. Knows no operation.
//!
//! The driver is opened at run time; a machine without it gets an error, not a failed load.
#![allow(unsafe_code)] // Calls into the CUDA driver.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use backend::{BackendError, DType, Result};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use crate::module::Module;
use crate::turn::turn;

/// A GPU with its stream and its loaded kernels.
#[derive(Debug)]
pub struct Device {
    // Dropped in this order: kernels and stream belong to the context.
    module: Module,
    /// The stream that orders all work of this device.
    pub stream: Arc<CudaStream>,
    /// The device's primary context.
    pub context: Arc<CudaContext>,
    spare: Mutex<Vec<RawMemory>>,
    shared_memory: usize,
}

/// Names a failed driver call; nothing computed since the failure can be trusted.
pub(crate) fn failure(call: &str, error: DriverError) -> BackendError {
    BackendError::Device(format!("{call}: {error}"))
}

impl Device {
    /// Opens GPU `ordinal` and loads the kernels for it.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the machine has no driver or no such device, or the kernels are missing, of
    /// another version, or not built for this device.
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        // SAFETY: only opens and closes the driver library by its usual names.
        if !unsafe { sys::is_culib_present() } {
            return Err(BackendError::Device(
                "the NVIDIA driver library libcuda.so.1 was not found on this machine".to_owned(),
            ));
        }
        let _turn = turn();
        let context = CudaContext::new(ordinal).map_err(|error| failure("opening the device", error))?;
        // SAFETY: all work goes through one stream, so nothing needs events to be ordered.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(|error| failure("creating a stream", error))?;
        let module = Module::load(&context)?;
        let shared_memory = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            .map_err(|error| failure("asking for the size of shared memory", error))?;
        let shared_memory = usize::try_from(shared_memory).unwrap_or_default();
        Ok(Arc::new(Self { module, stream, context, spare: Mutex::new(Vec::new()), shared_memory }))
    }

    /// How many GPUs this machine has; none where there is no driver.
    pub fn count() -> usize {
        // SAFETY: only opens and closes the driver library by its usual names.
        if !unsafe { sys::is_culib_present() } {
            return 0;
        }
        CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
    }

    /// Name, compute capability and memory of the device, for logs.
    pub fn describe(&self) -> String {
        let name = self.context.name().unwrap_or_else(|error| format!("unnamed device ({error})"));
        let (major, minor) = self.context.compute_capability().unwrap_or_default();
        let gib = self.context.total_mem().unwrap_or_default() >> 30;
        format!("{name}, compute capability {major}.{minor}, {gib} GiB")
    }

    /// What results may depend on, by name: device, driver, kernels.
    pub fn identity(&self) -> BTreeMap<String, String> {
        let driver = std::fs::read_to_string("/sys/module/nvidia/version")
            .map(|version| version.trim().to_owned())
            .ok()
            .filter(|version| !version.is_empty())
            .unwrap_or_else(|| {
                let mut version = 0;
                // SAFETY: writes one number.
                let _ = unsafe { sys::cuDriverGetVersion(&raw mut version) };
                format!("CUDA {version}")
            });
        BTreeMap::from([
            ("device".to_owned(), self.describe()),
            ("driver".to_owned(), driver),
            ("kernels".to_owned(), self.module.digest().to_owned()),
        ])
    }

    /// Bytes of shared memory that a block may have.
    pub(crate) fn shared_memory(&self) -> usize {
        self.shared_memory
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the driver fails.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.context.mem_get_info().map_err(|error| failure("cuMemGetInfo", error))
    }

    /// Waits for all work submitted so far.
    ///
    /// # Errors
    /// [`BackendError::Device`] when any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(|error| failure("waiting for the device", error))
    }

    /// Submits a kernel.
    ///
    /// # Safety
    /// `arguments` are the parameters of kernel `name` in order and type, and every buffer among them is as large as
    /// the kernel's contract with this grid says.
    pub(crate) unsafe fn launch(
        &self,
        name: &str,
        grid: (u32, u32, u32),
        threads: u32,
        shared: u32,
        mut arguments: Arguments,
    ) -> Result<()> {
        let function = self.module.function(name, shared)?;
        self.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let mut pointers = arguments.pointers();
        // SAFETY: the caller's duty; `pointers` point into `arguments`, which outlives the call.
        unsafe {
            result::launch_kernel(
                function,
                grid,
                (threads, 1, 1),
                shared,
                self.stream.cu_stream(),
                &mut pointers[..arguments.len],
            )
        }
        .map_err(|error| failure(name, error))
    }

    /// Memory with undefined contents.
    ///
    /// # Errors
    /// [`BackendError::Memory`] when the device has not enough left.
    pub fn allocate(self: &Arc<Self>, what: &str, bytes: usize) -> Result<Memory> {
        self.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let _turn = turn();
        // SAFETY: a plain allocation; a size of zero is not allowed by the driver.
        let pointer = unsafe { result::malloc_sync(bytes.max(16)) }.map_err(|error| {
            BackendError::Memory { what: what.to_owned(), bytes, reason: error.to_string() }
        })?;
        Ok(Memory {
            raw: RawMemory { pointer, bytes: bytes.max(16) },
            device: Arc::clone(self),
            pooled: false,
        })
    }

    /// Memory with undefined contents that returns to a pool when dropped, for what a pass needs and its successor
    /// needs again: after the first passes nothing is allocated.
    ///
    /// # Errors
    /// [`BackendError::Memory`] when the device has not enough left.
    pub(crate) fn borrow(self: &Arc<Self>, what: &str, bytes: usize) -> Result<Memory> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // Sizes are powers of two: what is much larger is left for what needs it.
        let size = bytes.next_power_of_two().max(1 << 16);
        let fitting = spare.iter().enumerate().filter(|(_, raw)| (size..=4 * size).contains(&raw.bytes));
        if let Some((index, _)) = fitting.min_by_key(|(_, raw)| raw.bytes) {
            let raw = spare.swap_remove(index);
            return Ok(Memory { raw, device: Arc::clone(self), pooled: true });
        }
        drop(spare);
        let mut memory = self.allocate(what, size)?;
        memory.pooled = true;
        Ok(memory)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let spare = self.spare.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _turn = turn();
        if self.context.bind_to_thread().is_ok() {
            for raw in spare.drain(..) {
                // SAFETY: allocated by `allocate`, and no other owner is left.
                let _ = unsafe { result::free_sync(raw.pointer) };
            }
        }
    }
}

#[derive(Debug)]
struct RawMemory {
    pointer: sys::CUdeviceptr,
    bytes: usize,
}

/// A range of device memory, freed (or returned to the pool) when dropped.
#[derive(Debug)]
pub struct Memory {
    raw: RawMemory,
    device: Arc<Device>,
    pooled: bool,
}

impl Memory {
    /// Device address of the first byte.
    pub fn pointer(&self) -> sys::CUdeviceptr {
        self.raw.pointer
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.raw.bytes
    }

    /// Sets every byte to zero, in stream order.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the driver refuses.
    pub fn clear(&mut self) -> Result<()> {
        self.device.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        // SAFETY: the range is owned by `self`.
        unsafe {
            result::memset_d8_async(self.raw.pointer, 0, self.raw.bytes, self.device.stream.cu_stream())
        }
        .map_err(|error| failure("cuMemsetD8Async", error))
    }

    /// Copies `data` to byte `offset`, in stream order; `data` may be dropped when this returns.
    ///
    /// # Errors
    /// [`BackendError::Contract`] when `data` does not fit, [`BackendError::Device`] when the driver fails.
    pub fn upload(&mut self, offset: usize, data: &[u8]) -> Result<()> {
        if offset + data.len() > self.raw.bytes {
            return Err(BackendError::Contract {
                operation: "upload",
                reason: format!("{} bytes at {offset} do not fit into {}", data.len(), self.raw.bytes),
            });
        }
        self.device.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let target = self.raw.pointer + offset as u64;
        // SAFETY: source and target ranges are valid; the driver has read pageable host memory when it returns.
        unsafe { result::memcpy_htod_async(target, data, self.device.stream.cu_stream()) }
            .map_err(|error| failure("copying to the device", error))
    }

    /// Copies the first `bytes` bytes to the host, after all earlier work.
    ///
    /// # Errors
    /// [`BackendError::Contract`] when there are fewer bytes, [`BackendError::Device`] when earlier work or the copy failed.
    pub fn download(&self, bytes: usize) -> Result<Vec<u8>> {
        if bytes > self.raw.bytes {
            return Err(BackendError::Contract {
                operation: "read",
                reason: format!("{bytes} bytes of a buffer of {}", self.raw.bytes),
            });
        }
        self.device.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let mut data = vec![0_u8; bytes];
        // SAFETY: source and target ranges are valid until the stream was waited for, below.
        unsafe { result::memcpy_dtoh_async(&mut data, self.raw.pointer, self.device.stream.cu_stream()) }
            .map_err(|error| failure("copying from the device", error))?;
        self.device.synchronize()?;
        Ok(data)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let raw = RawMemory { pointer: self.raw.pointer, bytes: self.raw.bytes };
        if self.pooled {
            // Work that still reads it is ahead, in the one stream, of whatever writes it next.
            self.device.spare.lock().unwrap_or_else(PoisonError::into_inner).push(raw);
        } else if self.device.context.bind_to_thread().is_ok() {
            let _turn = turn();
            // SAFETY: allocated by `allocate`, freed once. A failure here means that the device is lost, which the
            // next operation reports.
            let _ = unsafe { result::free_sync(raw.pointer) };
        }
    }
}

/// Device memory with a dtype.
#[derive(Debug)]
pub struct Buffer {
    /// The bytes.
    pub(crate) memory: Memory,
    /// Element type.
    pub(crate) dtype: DType,
    /// Number of elements.
    pub(crate) elements: usize,
}

impl Buffer {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }
}

/// Kernel parameters, in order.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    // Every parameter of every kernel fits 16 bytes and wants at most 8-byte alignment.
    slots: [[u64; 2]; Self::MOST],
    len: usize,
}

impl Arguments {
    const MOST: usize = 16;

    fn push(mut self, slot: [u64; 2]) -> Self {
        // A list longer than any kernel's would be a defect here; the launch then fails on the missing parameters.
        if let Some(free) = self.slots.get_mut(self.len) {
            *free = slot;
            self.len += 1;
        }
        self
    }

    pub(crate) fn pointer(self, pointer: sys::CUdeviceptr) -> Self {
        self.push([pointer, 0])
    }

    pub(crate) fn buffer(self, buffer: &Buffer) -> Self {
        self.pointer(buffer.memory.pointer())
    }

    pub(crate) fn int(self, value: usize) -> Self {
        // Sizes were checked against i32 when buffers and layouts were made.
        self.push([value as u32 as u64, 0])
    }

    pub(crate) fn float(self, value: f32) -> Self {
        self.push([u64::from(value.to_bits()), 0])
    }

    /// A struct of four ints.
    pub(crate) fn ints(self, values: [usize; 4]) -> Self {
        let pair = |low: usize, high: usize| low as u32 as u64 | (high as u32 as u64) << 32;
        self.push([pair(values[0], values[1]), pair(values[2], values[3])])
    }

    fn pointers(&mut self) -> [*mut std::ffi::c_void; Self::MOST] {
        self.slots.each_mut().map(|slot| std::ptr::from_mut(slot).cast())
    }
}
