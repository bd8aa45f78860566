//! Owns the one thing the scheduler knows of a model: something that turns trees into outcomes.

use decision::{Outcome, Tree};

/// Runs packed batches. One thread calls it, one batch at a time.
pub trait Execute: Send + 'static {
    /// Runs all trees and returns one outcome per tree, in order. The batch never changes an outcome.
    ///
    /// # Errors
    /// [`ExecuteError`]; whatever happened, no tree of the batch was answered.
    fn execute(&mut self, trees: &[Tree]) -> Result<Vec<Outcome>, ExecuteError>;
}

impl<E: Execute + ?Sized> Execute for Box<E> {
    fn execute(&mut self, trees: &[Tree]) -> Result<Vec<Outcome>, ExecuteError> {
        (**self).execute(trees)
    }
}

/// Why a batch was not answered. The executor cannot be trusted afterwards: bad input never reaches it, so a failure
/// here is one of the device or of the program.
#[derive(Debug, Clone, thiserror::Error)]
#[error("executor failed: {reason}")]
pub struct ExecuteError {
    /// What failed, without any text of a caller.
    pub reason: String,
}
