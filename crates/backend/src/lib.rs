//! Owns the contract between the forward pass and the machine that computes it: the operations as one trait,
//! with shapes, dtypes and rounding, and the plan of a pass. Knows no checkpoint, no request, no device.

pub mod ops;
pub mod pass;
pub mod tensor;

pub use ops::{Attention, BackendError, DeltaNet, Extent, Ops, Result, Role};
pub use pass::{KeyRange, Pass, PassError, Readout, Segment};
pub use tensor::{DType, HostTensor, LowRank, Projection};
