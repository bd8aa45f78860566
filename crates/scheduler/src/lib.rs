//! Owns admission, batching and deadlines over something that executes trees. Knows no model, no device, no HTTP.

mod execute;
mod queue;

pub use execute::{Execute, ExecuteError};
pub use queue::{Answered, Failure, Refusal, Scheduler, SchedulerOptions};
