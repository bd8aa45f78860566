//! Owns tensor-core projections through cuBLASLt: which algorithm for which shape, and proof that a row's bits do not
//! depend on the number of rows. Knows nothing of the layers that project.
//!
//! What changes the bits of a row is a split of the sum over the inner dimension, not the tile. Therefore only
//! algorithms without such a split are asked for, and [`Gemm::warm_up`] keeps an algorithm only if all its output
//! equals, bit for bit, that of one reference algorithm on the same rows.
#![allow(unsafe_code)] // Calls into cuBLASLt.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use backend::{BackendError, DType, Result};
use cudarc::cublaslt::{result, sys};

use crate::device::{Device, Memory, failure};
use crate::turn::turn;

/// Row counts that have an algorithm of their own: (up to, in steps of). A product uses that of the next larger class,
/// so steps are about as wide as a tile.
const CLASSES: [(usize, usize); 6] =
    [(512, 16), (1024, 64), (2048, 128), (4096, 256), (8192, 1024), (16_384, 4096)];
/// More columns than any projection has, fewer than any vocabulary.
const VOCABULARY: usize = 100_000;
/// `CUBLAS_OP_T`.
const TRANSPOSED: u32 = 1;
/// Scratch memory an algorithm may ask for.
const WORKSPACE: usize = 32 << 20;
/// Algorithms asked for.
const CANDIDATES: usize = 8;

/// A product's weight shape and output type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Shape {
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) wide_output: bool,
}

/// What was chosen for one shape and class.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) algorithm: sys::cublasLtMatmulAlgo_t,
    /// Measured time, where it was.
    pub(crate) microseconds: Option<f32>,
    /// Candidates tried, and those among them whose bits differed from the reference.
    pub(crate) tried: usize,
    pub(crate) different: usize,
}

/// cuBLASLt on one device.
pub(crate) struct Gemm {
    pub(crate) device: Arc<Device>,
    handle: sys::cublasLtHandle_t,
    operation: sys::cublasLtMatmulDesc_t,
    preference: sys::cublasLtMatmulPreference_t,
    workspace: Memory,
    plans: RwLock<HashMap<(Shape, usize), Plan>>,
    pub(crate) shapes: Mutex<BTreeSet<(usize, usize)>>,
}

// SAFETY: a cuBLASLt handle may be used from several threads; the descriptors are only read after `new`.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

fn refused(call: &str, error: result::CublasError) -> BackendError {
    BackendError::Device(format!("cuBLASLt: {call}: {error}"))
}

/// A matrix descriptor, destroyed when dropped.
struct Matrix(sys::cublasLtMatrixLayout_t);

impl Matrix {
    fn new(dtype: DType, rows: usize, columns: usize) -> Result<Self> {
        let kind = match dtype {
            DType::F32 => sys::cudaDataType::CUDA_R_32F,
            DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        };
        result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
            .map(Self)
            .map_err(|error| refused("describing a matrix", error))
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// The descriptors of one product. cuBLASLt counts in columns first: out^T [columns, rows] = weight x^T.
pub(crate) struct Problem {
    weight: Matrix,
    x: Matrix,
    out: Matrix,
}

impl Problem {
    pub(crate) fn new(shape: Shape, rows: usize) -> Result<Self> {
        let output = if shape.wide_output { DType::F32 } else { DType::BF16 };
        Ok(Self {
            weight: Matrix::new(DType::BF16, shape.depth, shape.columns)?,
            x: Matrix::new(DType::BF16, shape.depth, rows)?,
            out: Matrix::new(output, shape.columns, rows)?,
        })
    }
}

/// Device addresses of one product.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) weight: u64,
    pub(crate) x: u64,
    pub(crate) out: u64,
}

/// Every class, ascending.
pub(crate) fn classes() -> Vec<usize> {
    let mut classes = vec![16];
    for (end, step) in CLASSES {
        let first = classes.last().copied().unwrap_or_default();
        classes.extend((first / step * step + step..=end).step_by(step));
    }
    classes
}

/// The class that serves `rows`; beyond the largest, the largest.
pub(crate) fn class_of(rows: usize) -> usize {
    let most = CLASSES[CLASSES.len() - 1].0;
    let step = CLASSES.into_iter().find(|(end, _)| rows <= *end).map_or(most, |(_, step)| step);
    if rows <= 16 { 16 } else { rows.next_multiple_of(step).min(most) }
}

impl Gemm {
    /// Version of cuBLASLt, e.g. 130100. Only asked once the library is there.
    pub(crate) fn version() -> usize {
        // SAFETY: takes nothing and returns a number.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Opens cuBLASLt.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the library is missing or refuses.
    pub(crate) fn open(device: &Arc<Device>) -> Result<Self> {
        // SAFETY: only opens and closes the library by its usual names.
        if !unsafe { sys::is_culib_present() } {
            let reason =
                "libcublasLt was not found; profile `fast` needs it (LD_LIBRARY_PATH names where to look)";
            return Err(BackendError::Device(reason.to_owned()));
        }
        device.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let _turn = turn();
        let workspace = device.allocate("cuBLASLt's workspace", WORKSPACE)?;
        let handle = result::create_handle().map_err(|error| refused("opening", error))?;
        let operation = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )
        .map_err(|error| refused("describing the product", error))?;
        let preference =
            result::create_matmul_pref().map_err(|error| refused("making preferences", error))?;
        let gemm = Self {
            device: Arc::clone(device),
            handle,
            operation,
            preference,
            workspace,
            plans: RwLock::new(HashMap::new()),
            shapes: Mutex::new(BTreeSet::new()),
        };
        gemm.configure()?;
        Ok(gemm)
    }

    fn configure(&self) -> Result<()> {
        let transposed = TRANSPOSED;
        let no_split = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        let workspace = WORKSPACE;
        // SAFETY: live descriptors, and values of the types the attributes have.
        unsafe {
            result::set_matmul_desc_attribute(
                self.operation,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )
            .and_then(|()| {
                result::set_matmul_pref_attribute(
                    self.preference,
                    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                    std::ptr::from_ref(&no_split).cast(),
                    size_of_val(&no_split),
                )
            })
            .and_then(|()| {
                result::set_matmul_pref_attribute(
                    self.preference,
                    sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    std::ptr::from_ref(&workspace).cast(),
                    size_of_val(&workspace),
                )
            })
        }
        .map_err(|error| refused("setting preferences", error))
    }

    /// Notes a BF16 weight that products may use, so that [`Gemm::warm_up`] prepares its shape. What has as many
    /// columns as a vocabulary has entries is an embedding table.
    pub(crate) fn register(&self, columns: usize, depth: usize) {
        if Self::serves(columns, depth) && columns < VOCABULARY {
            self.shapes.lock().unwrap_or_else(PoisonError::into_inner).insert((columns, depth));
        }
    }

    /// Whether tensor cores can take a BF16 weight `[columns, depth]`: rows of all matrices on 16-byte boundaries.
    pub(crate) fn serves(columns: usize, depth: usize) -> bool {
        columns.is_multiple_of(8) && depth.is_multiple_of(8)
    }

    /// `out [rows, columns] = x [rows, depth] weight[columns, depth]^T`, all at device addresses, BF16 operands.
    ///
    /// # Safety
    /// The addresses are of buffers of these sizes, `out` FP32 if `wide_output`, else BF16.
    pub(crate) unsafe fn multiply(
        &self,
        (x, weight, out): (u64, u64, u64),
        (rows, columns, depth): (usize, usize, usize),
        wide_output: bool,
    ) -> Result<()> {
        let shape = Shape { columns, depth, wide_output };
        let problem = Problem::new(shape, rows)?;
        let plan = match self.plan(shape, class_of(rows)) {
            Some(plan) => plan,
            None => self.first_plan(shape, class_of(rows))?,
        };
        // SAFETY: the caller's duty.
        unsafe { self.run(&problem, Operands { weight, x, out }, &plan.algorithm) }
    }

    fn plan(&self, shape: Shape, class: usize) -> Option<Plan> {
        self.plans.read().unwrap_or_else(PoisonError::into_inner).get(&(shape, class)).copied()
    }

    pub(crate) fn keep(&self, shape: Shape, class: usize, plan: Plan) {
        self.plans.write().unwrap_or_else(PoisonError::into_inner).insert((shape, class), plan);
    }

    /// The library's first suggestion, for a class that was not warmed up.
    fn first_plan(&self, shape: Shape, class: usize) -> Result<Plan> {
        let candidates = self.candidates(&Problem::new(shape, class)?)?;
        let first = candidates.first().ok_or_else(|| no_algorithm(shape, class))?;
        let plan = Plan { algorithm: first.algo, microseconds: None, tried: 1, different: 0 };
        self.keep(shape, class, plan);
        Ok(plan)
    }

    /// Algorithms without a split of the inner dimension, the library's favourite first.
    pub(crate) fn candidates(&self, problem: &Problem) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>> {
        let mut found = Vec::with_capacity(CANDIDATES);
        let mut count = 0;
        // SAFETY: live descriptors; the library writes at most CANDIDATES results and their number.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                self.operation,
                problem.weight.0,
                problem.x.0,
                problem.out.0,
                problem.out.0,
                self.preference,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
            .result()
            .map_err(|error| refused("looking for algorithms", error))?;
            found.set_len((count.max(0) as usize).min(CANDIDATES));
        }
        found.retain(|candidate| {
            candidate.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && splits(&candidate.algo) <= 1
        });
        Ok(found)
    }

    /// # Safety
    /// `operands` are buffers of the sizes and types that `problem` describes.
    pub(crate) unsafe fn run(
        &self,
        problem: &Problem,
        operands: Operands,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<()> {
        self.device.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let (one, zero) = (1_f32, 0_f32);
        // SAFETY: the caller's duty for the operands; everything else lives in `self`.
        unsafe {
            result::matmul(
                self.handle,
                self.operation,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&zero).cast(),
                operands.weight as *const _,
                problem.weight.0,
                operands.x as *const _,
                problem.x.0,
                operands.out as *const _,
                problem.out.0,
                operands.out as *mut _,
                problem.out.0,
                algorithm,
                self.workspace.pointer() as *mut _,
                WORKSPACE,
                self.device.stream.cu_stream().cast(),
            )
        }
        .map_err(|error| refused("multiplying", error))
    }

    /// Whether the library can run an algorithm on a problem that it was not suggested for.
    pub(crate) fn accepts(&self, problem: &Problem, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let mut result = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: live descriptors; the library writes the result before it says success.
        unsafe {
            let status = sys::cublasLtMatmulAlgoCheck(
                self.handle,
                self.operation,
                problem.weight.0,
                problem.x.0,
                problem.out.0,
                problem.out.0,
                algorithm,
                result.as_mut_ptr(),
            );
            status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && result.assume_init().workspaceSize <= WORKSPACE
        }
    }

    /// What was chosen, one line a shape and class, for logs and docs.
    pub(crate) fn report(&self) -> Vec<String> {
        let plans = self.plans.read().unwrap_or_else(PoisonError::into_inner);
        let mut entries: Vec<_> = plans.iter().collect();
        entries.sort_by_key(|((shape, class), _)| (*shape, *class));
        let line = |((shape, class), plan): &(&(Shape, usize), &Plan)| {
            let time =
                plan.microseconds.map_or_else(|| "not measured".to_owned(), |time| format!("{time:.1} us"));
            format!(
                "[{}, {}] {} rows <= {class}: {} {time}, {} of {} candidates had other bits",
                shape.columns,
                shape.depth,
                if shape.wide_output { "FP32" } else { "BF16" },
                configuration(&plan.algorithm),
                plan.different,
                plan.tried,
            )
        };
        entries.iter().map(line).collect()
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        let _turn = turn();
        // SAFETY: created in `open`, destroyed once.
        unsafe {
            let _ = sys::cublasLtMatmulPreferenceDestroy(self.preference);
            let _ = result::destroy_matmul_desc(self.operation);
            let _ = result::destroy_handle(self.handle);
        }
    }
}

pub(crate) fn no_algorithm(shape: Shape, class: usize) -> BackendError {
    BackendError::Device(format!(
        "cuBLASLt offers no algorithm with one order of summation for [{}, {}] at {class} rows",
        shape.columns, shape.depth
    ))
}

/// An attribute of an algorithm that is a 32-bit number; 0 where it has none.
fn attribute(algorithm: &sys::cublasLtMatmulAlgo_t, which: sys::cublasLtMatmulAlgoConfigAttributes_t) -> u32 {
    let mut value = 0_u32;
    let mut written = 0;
    // SAFETY: the library writes at most four bytes.
    let _ = unsafe {
        sys::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            which,
            std::ptr::from_mut(&mut value).cast(),
            size_of_val(&value),
            &raw mut written,
        )
    };
    value
}

fn splits(algorithm: &sys::cublasLtMatmulAlgo_t) -> u32 {
    attribute(algorithm, sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_SPLITK_NUM)
}

fn configuration(algorithm: &sys::cublasLtMatmulAlgo_t) -> String {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Which;
    format!(
        "algorithm {} tile {} stages {}",
        attribute(algorithm, Which::CUBLASLT_ALGO_CONFIG_ID),
        attribute(algorithm, Which::CUBLASLT_ALGO_CONFIG_TILE_ID),
        attribute(algorithm, Which::CUBLASLT_ALGO_CONFIG_STAGES_ID)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_count_has_a_class_and_classes_ascend() {
        let classes = classes();
        assert!(classes.is_sorted());
        assert_eq!([1, 16, 17, 293, 2400, 99_999].map(class_of), [16, 16, 32, 304, 2560, 16_384]);
        for rows in 1..=16_384 {
            let expected = classes.iter().find(|class| rows <= **class);
            assert_eq!(expected, Some(&class_of(rows)), "{rows} rows");
        }
    }
}
