//! Owns the model while it serves: passes over trees, the prefix cache, warm-up, and retirement after a failure. Knows no
//! HTTP and no text.

mod cuda;
mod key_rows;
mod prefix_cache;
mod service;
mod warmup;
mod worker;

pub use backend_cuda::{CudaOptions, Profile as CudaProfile};
pub use cuda::{DeviceMemory, cuda_devices, open_cuda};
pub use prefix_cache::{CacheLimits, CacheStats};
pub use service::{CudaMerger, SERVICE_REQUESTS, ServiceExecutor, ServiceOptions, TraceTensor};
pub use warmup::warm_up;
pub use worker::{Executor, ExecutorError, ExecutorOptions, open_cpu};
