//! Owns finding the compiled kernels, loading them, and their functions. Knows no kernel's parameters.
#![allow(unsafe_code)] // Calls into the CUDA driver.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use backend::{BackendError, Result};
use cudarc::driver::{CudaContext, result, sys};
use sha2::{Digest, Sha256};

use crate::device::failure;
use crate::turn::turn;

/// Names the file of compiled kernels to load.
pub const PATH_VARIABLE: &str = "OMNI_KEV_KERNELS";
/// Name of the file of compiled kernels, looked for beside the executable.
pub const FILE_NAME: &str = "omni-kev.fatbin";
/// A kernel every build of matching kernels has; `kernels.cu` holds the same number.
const VERSION_MARK: &str = "omni_kev_kernels_8";
/// Dynamic shared memory that needs no permission.
const PLAIN_SHARED: u32 = 48 * 1024;

#[cfg(feature = "embed-kernels")]
const EMBEDDED: Option<&[u8]> =
    Some(include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/kernels/omni-kev.fatbin")));
#[cfg(not(feature = "embed-kernels"))]
const EMBEDDED: Option<&[u8]> = None;

/// The compiled kernels: the file named by [`PATH_VARIABLE`], else [`FILE_NAME`] beside the executable, else what the
/// build embedded.
fn image() -> Result<(String, Vec<u8>)> {
    let read = |path: PathBuf| {
        let name = path.display().to_string();
        let unreadable = |error| BackendError::Device(format!("cannot read the kernels in {name}: {error}"));
        std::fs::read(&path).map_err(unreadable).map(|data| (name.clone(), data))
    };
    if let Some(path) = std::env::var_os(PATH_VARIABLE) {
        return read(PathBuf::from(path));
    }
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(FILE_NAME)));
    if let Some(path) = beside.as_ref().filter(|path| path.exists()) {
        return read(path.clone());
    }
    match EMBEDDED {
        Some(data) => Ok(("this executable".to_owned(), data.to_vec())),
        None => Err(BackendError::Device(format!(
            "no compiled kernels: none were embedded, {PATH_VARIABLE} is not set and {} does not exist; build them \
             with `cargo xtask kernels`",
            beside.map_or_else(|| FILE_NAME.to_owned(), |path| path.display().to_string())
        ))),
    }
}

/// Loaded kernels.
#[derive(Debug)]
pub(crate) struct Module {
    raw: sys::CUmodule,
    context: Arc<CudaContext>,
    functions: RwLock<HashMap<String, Function>>,
    digest: String,
}

#[derive(Clone, Copy, Debug)]
struct Function(sys::CUfunction);

// SAFETY: handles of the driver, which may be used from any thread that has the context bound.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
// SAFETY: as above; `functions` is locked.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads the kernels into `context`.
    pub(crate) fn load(context: &Arc<CudaContext>) -> Result<Self> {
        let (name, mut data) = image()?;
        let digest = hex::encode(Sha256::digest(&data));
        data.push(0); // PTX text inside must end somewhere.
        context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        // SAFETY: the driver parses the image and copies what it needs; a malformed one is refused by its header.
        let raw = unsafe { result::module::load_data(data.as_ptr().cast()) }.map_err(|error| {
            BackendError::Device(format!("the kernels in {name} cannot be loaded on this device: {error}"))
        })?;
        let module =
            Self { raw, context: Arc::clone(context), functions: RwLock::new(HashMap::new()), digest };
        module.function(VERSION_MARK, 0).map_err(|_| {
            BackendError::Device(format!(
                "the kernels in {name} belong to another version of this program ({VERSION_MARK} is missing)"
            ))
        })?;
        Ok(module)
    }

    /// SHA-256 of the compiled kernels.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// The kernel of a name, allowed `shared` bytes of dynamic shared memory.
    pub(crate) fn function(&self, name: &str, shared: u32) -> Result<sys::CUfunction> {
        if let Some(function) = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(name) {
            return Ok(function.0);
        }
        self.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let symbol =
            CString::new(name).map_err(|_| BackendError::Device(format!("{name:?} is no kernel name")))?;
        // SAFETY: the module is loaded as long as `self` lives.
        let function = unsafe { result::module::get_function(self.raw, symbol) }
            .map_err(|error| BackendError::Device(format!("kernel {name}: {error}")))?;
        if shared > PLAIN_SHARED {
            // SAFETY: a valid function; the driver refuses more than the device has.
            unsafe {
                result::function::set_function_attribute(
                    function,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared as i32,
                )
            }
            .map_err(|error| failure(name, error))?;
        }
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        functions.insert(name.to_owned(), Function(function));
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _turn = turn();
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: loaded once, unloaded once; the device outlives no launch of its kernels.
            let _ = unsafe { result::module::unload(self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_mark_is_in_the_kernels() {
        let source = include_str!("../kernels/kernels.cu");
        assert!(source.contains(&format!("{VERSION_MARK}()")), "kernels.cu does not define {VERSION_MARK}");
    }
}
