//! Owns admission, batching and deadlines. Knows no model, no device, no HTTP.

mod execute;

pub use execute::{Execute, ExecuteError};
