//! Owns the proof of agreement: captures of unrounded outputs, the gates between two of them, and the verdict. Everything is
//! recomputed from the files; no model and no device is needed.

mod capture;
mod gates;
mod judge;
mod noise;
mod plan;
mod qualification;

pub use capture::{Capture, Entry, Header, Kind, Question, Readouts, Usage};
pub use gates::{GATES, Gates};
pub use judge::{Flip, Gate, Report, Status, judge};
pub use noise::{Distribution, distribution};
pub use plan::Plan;
pub use qualification::{Configuration, Qualification, Standing};

/// Why captures cannot be judged at all. A run that is invalid has neither passed nor failed.
#[derive(Debug, thiserror::Error)]
pub enum Invalid {
    /// A file cannot be read.
    #[error("{file}: cannot read: {source}")]
    Io {
        /// The file.
        file: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("{file}: cannot write: {source}")]
    Write {
        /// The file.
        file: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not a capture or a plan.
    #[error("{file} line {line}: {reason}")]
    Format {
        /// The file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong, with what was expected.
        reason: String,
    },
    /// Captures do not belong together, or not to the plan.
    #[error("{what}: {first} and {second}")]
    Mismatch {
        /// What differs.
        what: String,
        /// The reference's, or the plan's.
        first: String,
        /// The other.
        second: String,
    },
}
