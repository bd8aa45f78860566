//! Owns recording a run of operations as a CUDA graph and replaying it. Knows no operation.
#![allow(unsafe_code)] // Calls into the CUDA driver.

use std::sync::Arc;

use backend::{BackendError, Result};
use cudarc::driver::{CudaGraph, sys};

use crate::device::{Device, failure};
use crate::turn::turn;

/// A recorded run of operations. Replaying it repeats the same launches on the same buffers, which the caller keeps.
pub struct Recording {
    // `None` only while it is dropped.
    graph: Option<CudaGraph>,
    device: Arc<Device>,
}

impl Recording {
    /// Records what `submit` submits to the device, without running it. `submit` must not wait for the device. Other threads wait
    /// with what would spoil the record, [`turn`].
    ///
    /// # Errors
    /// Errors of `submit`; [`BackendError::Device`] when it did something that cannot be recorded, or nothing.
    pub fn new(device: &Arc<Device>, submit: impl FnOnce() -> Result<()>) -> Result<Self> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let _turn = turn();
        device.stream.begin_capture(mode).map_err(|error| failure("starting a recording", error))?;
        let submitted = submit();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = device.stream.end_capture(flags).map_err(|error| failure("ending a recording", error));
        submitted?;
        let graph = graph?.ok_or_else(|| BackendError::Device("the recording is empty".to_owned()))?;
        Ok(Self { graph: Some(graph), device: Arc::clone(device) })
    }

    /// Submits the recorded work once.
    ///
    /// # Errors
    /// [`BackendError::Device`] when the driver refuses.
    pub fn replay(&self) -> Result<()> {
        self.device.context.bind_to_thread().map_err(|error| failure("binding the context", error))?;
        let Some(graph) = &self.graph else { return Ok(()) };
        graph.launch().map_err(|error| failure("replaying a recording", error))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let _turn = turn();
        drop(self.graph.take());
    }
}

// SAFETY: a graph handle may be used from any thread that has the context bound; replays are ordered by the stream.
unsafe impl Send for Recording {}
// SAFETY: as above; `replay` changes nothing.
unsafe impl Sync for Recording {}
