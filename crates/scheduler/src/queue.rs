//! Owns the queue: bounded admission, first in first out, micro-batches under a token budget, deadlines, retirement.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use decision::{Outcome, Tree};
use tokio::sync::oneshot;

use crate::{Execute, ExecuteError};

/// Bounds of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Requests waiting or running at most.
    pub queue_requests: usize,
    /// Their tokens at most; one request alone is always admitted.
    pub queue_tokens: usize,
    /// Tokens of a batch; a larger request runs alone.
    pub batch_tokens: usize,
    /// Requests of a batch.
    pub batch_requests: usize,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self { queue_requests: 1024, queue_tokens: 1 << 20, batch_tokens: 8192, batch_requests: 64 }
    }
}

/// Why a request was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full; try again soon.
    #[error("the queue is full")]
    Overloaded,
    /// The model failed; this process will not answer again.
    #[error("the model has failed")]
    Retired,
    /// The scheduler is being shut down.
    #[error("the worker is stopping")]
    Stopping,
}

/// Why an admitted request was not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Its deadline passed before it was dispatched.
    #[error("the deadline passed while waiting")]
    Deadline,
    /// The model failed, with this batch or before it.
    #[error("the model has failed: {0}")]
    Retired(String),
}

/// What a request got.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered {
    /// The model's outcome.
    pub outcome: Outcome,
    /// Time from admission to dispatch.
    pub waited: Duration,
    /// Time of its batch on the model.
    pub model: Duration,
}

struct Waiting {
    tree: Tree,
    tokens: usize,
    admitted: Instant,
    deadline: Instant,
    reply: oneshot::Sender<Result<Answered, Failure>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    /// Requests and tokens admitted and not yet finished.
    requests: usize,
    tokens: usize,
    stopping: bool,
    retired: Option<String>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    options: SchedulerOptions,
}

impl Shared {
    /// The queue stays consistent at every step, so a panic elsewhere while it was held does no harm.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A queue and the thread that owns the executor.
pub struct Scheduler {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Scheduler {
    /// Starts the executor's thread.
    ///
    /// # Errors
    /// The system's reason when it gives no thread.
    pub fn start(executor: impl Execute, options: SchedulerOptions) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new(), options });
        let owned = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("executor".to_owned()).spawn(move || run(&owned, executor))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Whether a request would be admitted now; asked before a body is read.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check(&self) -> Result<(), Refusal> {
        self.admissible(&self.shared.lock(), 0)
    }

    fn admissible(&self, queue: &Queue, tokens: usize) -> Result<(), Refusal> {
        if queue.retired.is_some() {
            return Err(Refusal::Retired);
        }
        if queue.stopping {
            return Err(Refusal::Stopping);
        }
        let options = &self.shared.options;
        let full = queue.requests >= options.queue_requests
            || (queue.requests > 0 && queue.tokens + tokens > options.queue_tokens);
        if full { Err(Refusal::Overloaded) } else { Ok(()) }
    }

    /// Queues a tree. Dropping the receiver withdraws it, unless it was dispatched already.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was queued.
    pub fn submit(
        &self,
        tree: Tree,
        deadline: Instant,
    ) -> Result<oneshot::Receiver<Result<Answered, Failure>>, Refusal> {
        let tokens = tree.input_tokens();
        let (reply, receiver) = oneshot::channel();
        let mut queue = self.shared.lock();
        self.admissible(&queue, tokens)?;
        queue.requests += 1;
        queue.tokens += tokens;
        queue.waiting.push_back(Waiting { tree, tokens, admitted: Instant::now(), deadline, reply });
        self.shared.changed.notify_one();
        Ok(receiver)
    }

    /// Requests and tokens waiting or running.
    pub fn depth(&self) -> (usize, usize) {
        let queue = self.shared.lock();
        (queue.requests, queue.tokens)
    }

    /// Admits nothing more, finishes what was admitted and joins the thread.
    pub fn stop(&self) {
        self.shared.lock().stopping = true;
        self.shared.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the executor was caught and reported inside the thread.
            let _ = thread.join();
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(shared: &Shared, mut executor: impl Execute) {
    while let Some(batch) = next_batch(shared) {
        let started = Instant::now();
        let (trees, replies): (Vec<Tree>, Vec<_>) = batch
            .into_iter()
            .map(|waiting| (waiting.tree, (waiting.reply, waiting.tokens, started - waiting.admitted)))
            .unzip();
        let result = catch_unwind(AssertUnwindSafe(|| executor.execute(&trees)))
            .unwrap_or_else(|_| Err(ExecuteError { reason: "the executor panicked".to_owned() }));
        let model = started.elapsed();
        let outcomes = match result {
            Ok(outcomes) if outcomes.len() == trees.len() => outcomes,
            Ok(outcomes) => {
                let reason = format!("{} outcomes for {} trees", outcomes.len(), trees.len());
                return retire(shared, replies.into_iter().map(|(reply, ..)| reply), reason);
            }
            Err(error) => return retire(shared, replies.into_iter().map(|(reply, ..)| reply), error.reason),
        };
        for (outcome, (reply, tokens, waited)) in outcomes.into_iter().zip(replies) {
            release(&mut shared.lock(), tokens);
            // A client that left meanwhile has dropped its receiver; the work is done and nobody wants it.
            let _ = reply.send(Ok(Answered { outcome, waited, model }));
        }
    }
}

fn release(queue: &mut Queue, tokens: usize) {
    queue.requests -= 1;
    queue.tokens -= tokens;
}

/// The next requests that are still wanted, or nothing when the scheduler stops.
fn next_batch(shared: &Shared) -> Option<Vec<Waiting>> {
    let mut queue = shared.lock();
    loop {
        let mut batch: Vec<Waiting> = Vec::new();
        let mut tokens = 0;
        while let Some(front) = queue.waiting.front() {
            let full = batch.len() >= shared.options.batch_requests
                || (!batch.is_empty() && tokens + front.tokens > shared.options.batch_tokens);
            if full {
                break;
            }
            let Some(waiting) = queue.waiting.pop_front() else { break };
            if waiting.reply.is_closed() {
                release(&mut queue, waiting.tokens);
            } else if waiting.deadline <= Instant::now() {
                release(&mut queue, waiting.tokens);
                let _ = waiting.reply.send(Err(Failure::Deadline));
            } else {
                tokens += waiting.tokens;
                batch.push(waiting);
            }
        }
        if !batch.is_empty() {
            return Some(batch);
        }
        if queue.stopping {
            return None;
        }
        queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Readiness goes first, so that nobody is admitted after the failure; then everyone who waits is told.
fn retire(
    shared: &Shared,
    running: impl Iterator<Item = oneshot::Sender<Result<Answered, Failure>>>,
    reason: String,
) {
    let mut queue = shared.lock();
    queue.retired = Some(reason.clone());
    let waiting: Vec<Waiting> = queue.waiting.drain(..).collect();
    queue.requests = 0;
    queue.tokens = 0;
    drop(queue);
    for reply in running.chain(waiting.into_iter().map(|waiting| waiting.reply)) {
        let _ = reply.send(Err(Failure::Retired(reason.clone())));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use decision::Branch;

    use super::*;

    /// Records batches, and waits for a permission before each.
    struct Fake {
        go: mpsc::Receiver<bool>,
        batches: Arc<Mutex<Vec<Vec<usize>>>>,
    }

    impl Execute for Fake {
        fn execute(&mut self, trees: &[Tree]) -> Result<Vec<Outcome>, ExecuteError> {
            let healthy = self.go.recv().unwrap_or(true);
            self.batches.lock().unwrap().push(trees.iter().map(Tree::input_tokens).collect());
            if !healthy {
                return Err(ExecuteError { reason: "injected".to_owned() });
            }
            Ok(trees
                .iter()
                .map(|tree| Outcome { logits: vec![vec![tree.state[0] as f32]], cached_tokens: 0 })
                .collect())
        }
    }

    fn tree(tokens: usize) -> Tree {
        let branch = Branch { tokens: vec![0], decide: 0, option_ends: vec![0] };
        Tree { state: vec![tokens as u32; tokens - 1].into(), branches: vec![branch] }
    }

    struct Bench {
        scheduler: Scheduler,
        go: mpsc::Sender<bool>,
        batches: Arc<Mutex<Vec<Vec<usize>>>>,
    }

    impl Bench {
        fn new(options: SchedulerOptions) -> Self {
            let (go, receiver) = mpsc::channel();
            let batches = Arc::default();
            let fake = Fake { go: receiver, batches: Arc::clone(&batches) };
            Self { scheduler: Scheduler::start(fake, options).unwrap(), go, batches }
        }

        fn submit(&self, tokens: usize) -> oneshot::Receiver<Result<Answered, Failure>> {
            self.scheduler.submit(tree(tokens), Instant::now() + Duration::from_secs(60)).unwrap()
        }

        /// A first request that keeps the executor busy, so that the following ones wait together.
        fn occupy(&self) -> oneshot::Receiver<Result<Answered, Failure>> {
            let first = self.submit(3);
            while !self.scheduler.shared.lock().waiting.is_empty() {
                std::thread::yield_now();
            }
            first
        }
    }

    #[test]
    fn waiting_requests_share_batches_in_order_under_the_budget() {
        let bench =
            Bench::new(SchedulerOptions { batch_tokens: 100, batch_requests: 3, ..Default::default() });
        let first = bench.occupy();
        let waiting: Vec<_> =
            [40, 50, 20, 500, 5, 6, 7, 8].into_iter().map(|tokens| bench.submit(tokens)).collect();
        (0..6).for_each(|_| bench.go.send(true).unwrap());
        assert!(first.blocking_recv().unwrap().is_ok());
        for (receiver, tokens) in waiting.into_iter().zip([40, 50, 20, 500, 5, 6, 7, 8]) {
            assert_eq!(receiver.blocking_recv().unwrap().unwrap().outcome.logits, [[tokens as f32]]);
        }
        let expected = [vec![3], vec![40, 50], vec![20], vec![500], vec![5, 6, 7], vec![8]];
        assert_eq!(*bench.batches.lock().unwrap(), expected);
        assert_eq!(bench.scheduler.depth(), (0, 0));
    }

    #[test]
    fn departed_and_late_work_is_dropped_before_dispatch() {
        let bench = Bench::new(SchedulerOptions::default());
        let first = bench.occupy();
        drop(bench.submit(10));
        let late = bench.scheduler.submit(tree(11), Instant::now()).unwrap();
        let wanted = bench.submit(12);
        (0..2).for_each(|_| bench.go.send(true).unwrap());
        assert!(first.blocking_recv().unwrap().is_ok());
        assert_eq!(late.blocking_recv().unwrap(), Err(Failure::Deadline));
        assert!(wanted.blocking_recv().unwrap().is_ok());
        assert_eq!(*bench.batches.lock().unwrap(), [vec![3], vec![12]]);
        assert_eq!(bench.scheduler.depth(), (0, 0));
    }

    #[test]
    fn the_queue_is_bounded_in_requests_and_tokens() {
        let bench =
            Bench::new(SchedulerOptions { queue_requests: 3, queue_tokens: 50, ..Default::default() });
        let first = bench.occupy();
        let deadline = Instant::now() + Duration::from_secs(60);
        assert_eq!(bench.scheduler.submit(tree(48), deadline).err(), Some(Refusal::Overloaded));
        let (second, third) = (bench.submit(20), bench.submit(20));
        assert_eq!(bench.scheduler.check(), Err(Refusal::Overloaded));
        (0..2).for_each(|_| bench.go.send(true).unwrap());
        for receiver in [first, second, third] {
            assert!(receiver.blocking_recv().unwrap().is_ok());
        }
        assert_eq!(bench.scheduler.check(), Ok(()));
    }

    #[test]
    fn a_failure_retires_everyone() {
        let bench = Bench::new(SchedulerOptions::default());
        let first = bench.occupy();
        let second = bench.submit(10);
        bench.go.send(false).unwrap();
        for receiver in [first, second] {
            assert_eq!(receiver.blocking_recv().unwrap(), Err(Failure::Retired("injected".to_owned())));
        }
        assert_eq!(bench.scheduler.check(), Err(Refusal::Retired));
    }

    #[test]
    fn stopping_finishes_what_was_admitted() {
        let bench = Bench::new(SchedulerOptions::default());
        let first = bench.occupy();
        let second = bench.submit(10);
        (0..2).for_each(|_| bench.go.send(true).unwrap());
        bench.scheduler.stop();
        assert!(first.blocking_recv().unwrap().is_ok());
        assert!(second.blocking_recv().unwrap().is_ok());
        assert_eq!(bench.scheduler.check(), Err(Refusal::Stopping));
    }
}
