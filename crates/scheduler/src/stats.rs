//! Owns the counters an operator reads; nothing decides by them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A reading of the scheduler's counters. Totals count from the start and never fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Devices that the scheduler started with.
    pub devices: usize,
    /// Devices that have not failed.
    pub working_devices: usize,
    /// Requests inside: preparing, waiting, running or being answered.
    pub admitted_requests: usize,
    /// Tokens reserved by them.
    pub admitted_tokens: usize,
    /// Trees that wait for the device.
    pub waiting_requests: usize,
    /// Tokens of the trees that wait.
    pub waiting_tokens: usize,
    /// Trees that devices run now.
    pub running_requests: usize,
    /// Batches run to their end, total.
    pub batches: u64,
    /// Trees in those batches, total.
    pub batched_requests: u64,
    /// Tokens in those batches, total.
    pub batched_tokens: u64,
    /// Time that the trees of those batches waited, total.
    pub waited: Duration,
    /// Time that the device took for those batches, total.
    pub computed: Duration,
    /// Trees dropped because their caller left before dispatch, total.
    pub departed: u64,
    /// Trees dropped because their deadline passed before dispatch, total.
    pub expired: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) running: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) tokens: AtomicU64,
    pub(crate) waited_ns: AtomicU64,
    pub(crate) computed_ns: AtomicU64,
    pub(crate) departed: AtomicU64,
    pub(crate) expired: AtomicU64,
}

impl Counters {
    pub(crate) fn read(&self, admitted: (usize, usize), waiting: (usize, usize)) -> Stats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            devices: 0,
            working_devices: 0,
            admitted_requests: admitted.0,
            admitted_tokens: admitted.1,
            waiting_requests: waiting.0,
            waiting_tokens: waiting.1,
            running_requests: load(&self.running) as usize,
            batches: load(&self.batches),
            batched_requests: load(&self.requests),
            batched_tokens: load(&self.tokens),
            waited: Duration::from_nanos(load(&self.waited_ns)),
            computed: Duration::from_nanos(load(&self.computed_ns)),
            departed: load(&self.departed),
            expired: load(&self.expired),
        }
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// Nanoseconds of a duration; 584 years fit.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
