//! Owns the calls of cuBLAS that the official service's products and triangular solves come down to: the same functions with the
//! same arguments, types and workspace as torch gives them, so that the library chooses the same kernels. Knows no operation.
#![allow(unsafe_code)] // Calls into cuBLAS.

use std::ffi::c_void;
use std::sync::Arc;

use backend::{BackendError, Result};
use cudarc::cublas::sys;

use crate::device::{Device, Memory, failure};
use crate::turn::turn;

/// What torch gives cuBLAS on sm_90; the library's choice depends on it.
const WORKSPACE: usize = 32 << 20;

/// One FP32 product of many: column-major `c = op(a) op(b)`, `[m, n]`, sums over `depth`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batched {
    pub(crate) transposed: (bool, bool),
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) depth: usize,
    /// Address, leading dimension, elements from one matrix to the next.
    pub(crate) a: (u64, usize, usize),
    pub(crate) b: (u64, usize, usize),
    pub(crate) c: (u64, usize, usize),
    pub(crate) count: usize,
}

/// cuBLAS on one device's stream.
pub(crate) struct Blas {
    handle: sys::cublasHandle_t,
    device: Arc<Device>,
    _workspace: Memory,
}

// SAFETY: a handle may be used from several threads one at a time; every method takes the one stream's order.
unsafe impl Send for Blas {}
// SAFETY: as above; calls only submit to the stream and change no state of the handle.
unsafe impl Sync for Blas {}

fn int(value: usize) -> i32 {
    // What does not fit is refused by the library.
    i32::try_from(value).unwrap_or(-1)
}

fn operation(transposed: bool) -> sys::cublasOperation_t {
    if transposed { sys::cublasOperation_t::CUBLAS_OP_T } else { sys::cublasOperation_t::CUBLAS_OP_N }
}

fn checked(call: &str, status: sys::cublasStatus_t) -> Result<()> {
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(BackendError::Device(format!("cuBLAS: {call}: {status:?}")))
}

impl Blas {
    /// Opens the library.
    ///
    /// # Errors
    /// [`BackendError::Device`] when it is not on the loader's path or refuses.
    pub(crate) fn open(device: &Arc<Device>) -> Result<Self> {
        // SAFETY: only opens and closes the library by its usual names.
        if !unsafe { sys::is_culib_present() } {
            return Err(BackendError::Device(
                "cuBLAS (libcublas.so) was not found; profile service needs it: put its folder into LD_LIBRARY_PATH"
                    .to_owned(),
            ));
        }
        device.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let _turn = turn();
        let workspace = device.allocate("cuBLAS's workspace", WORKSPACE)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is written once; the stream and the workspace outlive it.
        unsafe {
            checked("cublasCreate", sys::cublasCreate_v2(&raw mut handle))?;
            let blas = Self { handle, device: Arc::clone(device), _workspace: workspace };
            let stream = device.stream.cu_stream();
            checked("cublasSetStream", sys::cublasSetStream_v2(handle, stream.cast()))?;
            let workspace = blas._workspace.pointer() as *mut c_void;
            checked("cublasSetWorkspace", sys::cublasSetWorkspace_v2(handle, workspace, WORKSPACE))?;
            checked(
                "cublasSetMathMode",
                sys::cublasSetMathMode(handle, sys::cublasMath_t::CUBLAS_DEFAULT_MATH),
            )?;
            Ok(blas)
        }
    }

    /// Version of the library, e.g. 130100.
    pub(crate) fn version(&self) -> i32 {
        let mut version = 0;
        // SAFETY: writes one number.
        let _ = unsafe { sys::cublasGetVersion_v2(self.handle, &raw mut version) };
        version
    }

    fn bind(&self) -> Result<()> {
        self.device.context.bind_to_thread().map_err(|error| failure("binding the context", error))
    }

    /// `out [rows, columns] = x [rows, depth] weight [columns, depth]^T`, BF16 with FP32 sums.
    pub(crate) fn linear(
        &self,
        x: u64,
        weight: u64,
        out: u64,
        (rows, columns, depth): (usize, usize, usize),
    ) -> Result<()> {
        self.bind()?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let half = sys::cudaDataType::CUDA_R_16BF;
        // SAFETY: the caller has checked that the three buffers hold these shapes.
        let status = unsafe {
            sys::cublasGemmEx(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                int(columns),
                int(rows),
                int(depth),
                (&raw const one).cast(),
                weight as *const c_void,
                half,
                int(depth),
                x as *const c_void,
                half,
                int(depth),
                (&raw const zero).cast(),
                out as *mut c_void,
                half,
                int(columns),
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        };
        checked("cublasGemmEx", status)
    }

    /// `out [rows, columns] = left [rows, depth] right [depth, columns]`, FP32, no TF32, all row-major.
    pub(crate) fn product(
        &self,
        left: u64,
        right: u64,
        out: u64,
        (rows, columns, depth): (usize, usize, usize),
    ) -> Result<()> {
        self.bind()?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        // SAFETY: the caller has checked that the three buffers hold these shapes.
        let status = unsafe {
            sys::cublasSgemm_v2(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_N,
                sys::cublasOperation_t::CUBLAS_OP_N,
                int(columns),
                int(rows),
                int(depth),
                &raw const one,
                right as *const f32,
                int(columns),
                left as *const f32,
                int(depth),
                &raw const zero,
                out as *mut f32,
                int(columns),
            )
        };
        checked("cublasSgemm", status)
    }

    /// Many FP32 products, no TF32.
    pub(crate) fn batched(&self, product: Batched) -> Result<()> {
        self.bind()?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let Batched { transposed, m, n, depth, a, b, c, count } = product;
        // SAFETY: the caller has checked that the buffers hold `count` matrices of these shapes and strides.
        let status = unsafe {
            sys::cublasSgemmStridedBatched(
                self.handle,
                operation(transposed.0),
                operation(transposed.1),
                int(m),
                int(n),
                int(depth),
                &raw const one,
                a.0 as *const f32,
                int(a.1),
                a.2 as i64,
                b.0 as *const f32,
                int(b.1),
                b.2 as i64,
                &raw const zero,
                c.0 as *mut f32,
                int(c.1),
                c.2 as i64,
                int(count),
            )
        };
        checked("cublasSgemmStridedBatched", status)
    }

    /// Solves `l x = b` in place for many row-major lower triangles `l [size, size]` with unit diagonals, whose diagonal and
    /// upper part are not read; every `b` is `[right, size]`, a right-hand side a row. `triangles` and `sides` are addresses of
    /// arrays of `count` addresses.
    pub(crate) fn solve(
        &self,
        triangles: u64,
        sides: u64,
        size: usize,
        right: usize,
        count: usize,
    ) -> Result<()> {
        self.bind()?;
        let one = 1.0_f32;
        // SAFETY: the caller has made the arrays of addresses of buffers that hold these shapes.
        let status = unsafe {
            sys::cublasStrsmBatched(
                self.handle,
                sys::cublasSideMode_t::CUBLAS_SIDE_LEFT,
                // Row-major lower is column-major upper, transposed.
                sys::cublasFillMode_t::CUBLAS_FILL_MODE_UPPER,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasDiagType_t::CUBLAS_DIAG_UNIT,
                int(size),
                int(right),
                &raw const one,
                triangles as *const *const f32,
                int(size),
                sides as *const *mut f32,
                int(size),
                int(count),
            )
        };
        checked("cublasStrsmBatched", status)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _turn = turn();
        if self.bind().is_ok() {
            // SAFETY: created once, destroyed once; a failure means that the device is lost.
            let _ = unsafe { sys::cublasDestroy_v2(self.handle) };
        }
    }
}
