//! Owns the operations of the forward pass on NVIDIA GPUs, one device each. Knows no checkpoint, no request, no scheduler.
//!
//! Reading order: `engine` (a GPU and an arithmetic), `ops` (the contract's operations as kernel launches), `mixers`
//! (their tensor-core paths), `layout` (a pass as tables the kernels read), `shapes` (what passes are padded to), `gemm` and `tuning` (projections and how
//! their algorithms are chosen), `blas` and `service` (the operations of profile `service`), `weights`, `device` (context, stream, memory), `module` (finding and loading kernels),
//! `turn` (who may do what touches a whole context).
//! The kernels are in `kernels/*.cu`, one family a file; docs/cuda.md says how they are built and what was measured.

mod blas;
mod device;
mod engine;
mod gemm;
mod graph;
mod layout;
mod mixers;
mod module;
mod ops;
mod service;
mod shapes;
mod tuning;
mod turn;
mod weights;

pub use device::{Buffer, Device, Memory};
pub use engine::{CudaOps, CudaOptions, Profile, Weight};
pub use graph::Recording;
pub use layout::Layout;
pub use module::{FILE_NAME, PATH_VARIABLE};
pub use service::{
    ATTENTION_DIM, AttentionHeads, DELTA_DIM, DeltaHeads, DeltaScratch, Grid, HISTORY_ROWS, HeadSource, Ints,
    Rotation, ServiceOps,
};
pub use turn::{Turn, turn};
