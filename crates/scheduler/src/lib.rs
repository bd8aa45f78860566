//! Owns admission, batching and deadlines. Knows no model, no device, no HTTP, and needs no asynchronous runtime: two
//! threads of its own do the work, and a caller awaits a channel.
//!
//! A request is *admitted* (a [`Permit`] for one request), *submitted* (its tokens reserved, its tree queued),
//! *dispatched* (in a batch that the device runs) and *answered*. Until it is dispatched it is dropped when its caller
//! leaves or its deadline passes; from then on its permit is held until the device is done.

mod admission;
mod batcher;
mod execute;
mod scheduler;
mod stats;
mod threads;

pub use admission::Refusal;
pub use execute::{Execute, ExecuteError};
pub use scheduler::{
    DrainTimeout, Failure, Outcome, Permit, Scheduler, SchedulerOptions, StartError, Timings,
};
pub use stats::Stats;
