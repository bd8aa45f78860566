//! Owns the threads: one keeps the line free of the dead and makes the next batch, the others own an executor each. Between
//! them is room for one batch, so the next is ready while these run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use decision::Tree;
use tokio::sync::oneshot;

use crate::admission::Admission;
use crate::batcher::{Batcher, Death, Entry};
use crate::scheduler::{Failure, Outcome, Permit, Timings};
use crate::stats::{Counters, Stats, add, nanos};
use crate::{Execute, Refusal};

/// A tree in the line, with the permit of its request.
pub(crate) struct Job {
    pub(crate) tree: Tree,
    pub(crate) tokens: usize,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Instant,
    pub(crate) permit: Permit,
    pub(crate) reply: oneshot::Sender<Result<Outcome, Failure>>,
}

impl Entry for Job {
    fn tokens(&self) -> usize {
        self.tokens
    }

    fn deadline(&self) -> Instant {
        self.deadline
    }

    fn departed(&self) -> bool {
        self.reply.is_closed()
    }
}

/// Why the line is closed.
#[derive(Clone, Debug)]
enum Closed {
    Retired(Arc<str>),
    Stopped,
}

impl Closed {
    fn failure(&self) -> Failure {
        match self {
            Self::Retired(reason) => Failure::Retired { reason: Arc::clone(reason) },
            Self::Stopped => Failure::Stopped,
        }
    }
}

struct Line {
    batcher: Batcher<Job>,
    closed: Option<Closed>,
    /// Devices that wait for a batch.
    idle: usize,
}

/// What callers and both threads share.
pub(crate) struct Shared {
    pub(crate) admission: Arc<Admission>,
    line: Mutex<Line>,
    /// Something changed that the queue thread must look at.
    changed: Condvar,
    /// A batch is ready, or none will ever be.
    ready: Condvar,
    /// Devices that have not failed.
    working: AtomicUsize,
    devices: usize,
    counters: Counters,
}

impl Shared {
    pub(crate) fn new(admission: Arc<Admission>, batcher: Batcher<Job>, devices: usize) -> Arc<Self> {
        Arc::new(Self {
            admission,
            line: Mutex::new(Line { batcher, closed: None, idle: 0 }),
            changed: Condvar::new(),
            ready: Condvar::new(),
            working: AtomicUsize::new(devices),
            devices,
            counters: Counters::default(),
        })
    }

    /// Puts a job at the end of the line.
    pub(crate) fn push(&self, job: Job) -> Result<(), Failure> {
        let mut line = self.lock();
        if let Some(closed) = &line.closed {
            return Err(closed.failure());
        }
        line.batcher.push(job);
        drop(line);
        self.changed.notify_one();
        Ok(())
    }

    /// Tells the queue thread that a caller left.
    pub(crate) fn departed(&self) {
        // With the lock once held, the queue thread either has not swept yet or already waits for the notice.
        drop(self.lock());
        self.changed.notify_one();
    }

    /// Ends both threads; whoever still waits is told so.
    pub(crate) fn stop(&self) {
        self.close(Closed::Stopped);
    }

    pub(crate) fn stats(&self) -> Stats {
        let depth = self.lock().batcher.depth();
        Stats {
            devices: self.devices,
            working_devices: self.working.load(Ordering::SeqCst),
            ..self.counters.read(self.admission.inside(), depth)
        }
    }

    fn close(&self, why: Closed) {
        self.lock().closed.get_or_insert(why);
        self.changed.notify_all();
        self.ready.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        // Nothing that can panic happens while the line is locked.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the dead; their places become free.
    fn bury(&self, dead: Vec<(Job, Death)>) {
        for (job, death) in dead {
            let Job { permit, reply, .. } = job;
            // Counted before the place is free, so that whoever sees the place also sees the count.
            match death {
                Death::Departed => add(&self.counters.departed, 1),
                Death::Expired => add(&self.counters.expired, 1),
            }
            drop(permit);
            if death == Death::Expired {
                // The caller may leave at this very moment, and then nobody needs to be told.
                let _ = reply.send(Err(Failure::Deadline));
            }
        }
    }
}

/// The queue thread: until the line closes.
pub(crate) fn keep_line(shared: &Shared) {
    let mut line = shared.lock();
    loop {
        if let Some(closed) = line.closed.clone() {
            let rest = line.batcher.clear();
            drop(line);
            fail(rest, &closed.failure());
            return;
        }
        let now = Instant::now();
        let dead = line.batcher.sweep(now);
        if line.batcher.fill() {
            shared.ready.notify_one();
        }
        if !dead.is_empty() {
            drop(line);
            shared.bury(dead);
            line = shared.lock();
            continue;
        }
        line = match line.batcher.next_deadline() {
            Some(deadline) => {
                let rest = deadline.saturating_duration_since(now);
                shared.changed.wait_timeout(line, rest).unwrap_or_else(PoisonError::into_inner).0
            }
            None => shared.changed.wait(line).unwrap_or_else(PoisonError::into_inner),
        };
    }
}

/// A device thread: until the line closes or the executor fails. The others go on; with the last one the model is retired.
pub(crate) fn run_batches(shared: &Shared, mut executor: impl Execute) {
    while let Some(batch) = next_batch(shared) {
        match run(shared, &mut executor, batch) {
            Ok(()) => {}
            // Waiting callers are told by the queue thread, which sees the closed line.
            Err(Failed { reason, last: true }) => return shared.close(Closed::Retired(reason)),
            Err(_) => return,
        }
    }
}

/// A device that cannot be trusted any more.
struct Failed {
    reason: Arc<str>,
    /// No other works.
    last: bool,
}

/// Waits for a batch; `None` when there will be no more.
fn next_batch(shared: &Shared) -> Option<Vec<Job>> {
    let mut line = shared.lock();
    loop {
        if line.closed.is_some() {
            return None;
        }
        // What is there is shared with the devices that have nothing to do.
        let sharers = line.idle + 1;
        let (batch, dead) = line.batcher.take(Instant::now(), sharers);
        if batch.is_empty() && dead.is_empty() {
            line.idle += 1;
            line = shared.ready.wait(line).unwrap_or_else(PoisonError::into_inner);
            line.idle -= 1;
            continue;
        }
        // Counted under the lock: a request is always either waiting or running.
        shared.counters.running.fetch_add(batch.len() as u64, Ordering::Relaxed);
        if sharers > 1 {
            shared.ready.notify_one();
        }
        drop(line);
        shared.changed.notify_one();
        shared.bury(dead);
        if !batch.is_empty() {
            return Some(batch);
        }
        line = shared.lock();
    }
}

/// Runs one batch and answers its callers; all of them or none.
fn run(shared: &Shared, executor: &mut impl Execute, batch: Vec<Job>) -> Result<(), Failed> {
    let started = Instant::now();
    let (trees, jobs): (Vec<Tree>, Vec<Waiting>) =
        batch.into_iter().map(|job| Waiting::new(job, started)).unzip();
    let result = catch_unwind(AssertUnwindSafe(|| executor.execute(&trees)));
    let model = started.elapsed();
    let outcomes = match result {
        Ok(Ok(outcomes)) => check(&trees, outcomes),
        Ok(Err(error)) => Err(error.reason),
        // The payload may quote anything; the panic hook has already reported it.
        Err(_) => Err("panic while a batch ran".to_owned()),
    };
    shared.counters.running.fetch_sub(jobs.len() as u64, Ordering::Relaxed);
    match outcomes {
        Ok(outcomes) => {
            count(&shared.counters, &jobs, model);
            let batch_size = jobs.len();
            for (job, outcome) in jobs.into_iter().zip(outcomes) {
                let timings = Timings { queue: job.waited, model, batch_size };
                let decision::Outcome { logits, cached_tokens } = outcome;
                // A caller that left after dispatch: its outcome, and with it the permit, is dropped here.
                let _ = job.reply.send(Ok(Outcome { logits, cached_tokens, timings, permit: job.permit }));
            }
            Ok(())
        }
        Err(reason) => {
            let reason: Arc<str> = reason.into();
            let last = shared.working.fetch_sub(1, Ordering::SeqCst) == 1;
            if last {
                // Before any permit is released: whoever gets a freed place must already see the failure.
                shared.admission.retire(&reason);
            }
            for Waiting { permit, reply, .. } in jobs {
                drop(permit);
                let _ = reply.send(Err(Failure::Inference { reason: Arc::clone(&reason) }));
            }
            Err(Failed { reason, last })
        }
    }
}

/// A dispatched job without its tree.
struct Waiting {
    tokens: usize,
    waited: Duration,
    permit: Permit,
    reply: oneshot::Sender<Result<Outcome, Failure>>,
}

impl Waiting {
    fn new(job: Job, now: Instant) -> (Tree, Self) {
        let Job { tree, tokens, submitted, permit, reply, .. } = job;
        (tree, Self { tokens, waited: now.saturating_duration_since(submitted), permit, reply })
    }
}

/// An executor that answers something else than it was asked cannot be trusted with the next batch either.
fn check(trees: &[Tree], outcomes: Vec<decision::Outcome>) -> Result<Vec<decision::Outcome>, String> {
    if outcomes.len() != trees.len() {
        return Err(format!("{} outcomes for {} trees", outcomes.len(), trees.len()));
    }
    for (tree, outcome) in trees.iter().zip(&outcomes) {
        let asked = tree.branches.iter().map(|branch| branch.option_ends.len());
        if !asked.eq(outcome.logits.iter().map(Vec::len)) {
            return Err("logits of another shape than the questions".to_owned());
        }
    }
    Ok(outcomes)
}

fn count(counters: &Counters, jobs: &[Waiting], model: Duration) {
    add(&counters.batches, 1);
    add(&counters.requests, jobs.len() as u64);
    add(&counters.tokens, jobs.iter().map(|job| job.tokens as u64).sum());
    add(&counters.waited_ns, jobs.iter().map(|job| nanos(job.waited)).sum());
    add(&counters.computed_ns, nanos(model));
}

fn fail(jobs: Vec<Job>, failure: &Failure) {
    for Job { permit, reply, .. } in jobs {
        drop(permit);
        let _ = reply.send(Err(failure.clone()));
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Retired { reason } => Self::Retired { reason },
            other => Self::Refused(other),
        }
    }
}
