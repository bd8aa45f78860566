//! Owns the operations on a CPU, FP32 throughout: the oracle of every other backend, and what serves without a GPU.
//! Knows no checkpoint and no plan beyond `backend::Pass`.
//!
//! A row's result depends on nothing but the row: every sum runs in an order fixed by the operation's shape, never by the
//! number of rows, of threads or by what shares the pass.

mod ops;

mod attention;
mod conv;
mod delta;
mod head;
mod linear;
mod query_key_value;
mod rows;

mod kernel;
mod math;

mod layout;
mod memory;
mod tiles;

pub use layout::CpuLayout;
pub use memory::{CpuBuffer, CpuWeight};
pub use ops::CpuOps;
