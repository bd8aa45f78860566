//! Owns how long work reports on itself. Knows no terminal.

/// Receives the progress of an export, a verification or a synthesis. Called from several threads.
pub trait Progress: Sync {
    /// A phase of known size begins.
    fn begin(&self, phase: &str, bytes: u64);
    /// `bytes` more of the phase are done.
    fn advance(&self, bytes: u64);
}

/// Reports to nobody.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _phase: &str, _bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
}
