//! Owns what callers see: the scheduler, the permit of a request, and what comes back for it.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use decision::Tree;
use tokio::sync::oneshot;

use crate::admission::{Admission, Place, Refusal};
use crate::batcher::{Batcher, Budget};
use crate::execute::Execute;
use crate::stats::Stats;
use crate::threads::{Job, Shared, keep_line, run_batches};

/// What a scheduler admits and how it batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Requests inside at once: preparing, waiting, running or being answered.
    pub queue_requests: usize,
    /// Tokens of those requests.
    pub queue_tokens: usize,
    /// Requests of a batch.
    pub batch_requests: usize,
    /// Tokens of a batch; a request larger than this goes alone.
    pub batch_tokens: usize,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self { queue_requests: 256, queue_tokens: 1 << 20, batch_requests: 64, batch_tokens: 8192 }
    }
}

/// Why a scheduler could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An option makes no sense.
    #[error("{option}: expected at least 1, found 0")]
    Zero {
        /// The option.
        option: &'static str,
    },
    /// The system gave no thread.
    #[error("cannot start the {name} thread: {source}")]
    Thread {
        /// Which thread.
        name: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// Why an admitted request was not answered. Never a caller's fault, except that it may ask for too much at once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Its tokens do not fit.
    #[error(transparent)]
    Refused(Refusal),
    /// Its deadline passed before the device could take it.
    #[error("the deadline passed while the request waited")]
    Deadline,
    /// The executor failed on the batch it was in.
    #[error("inference failed: {reason}")]
    Inference {
        /// What failed.
        reason: Arc<str>,
    },
    /// The executor had failed on another batch.
    #[error("the model is retired: {reason}")]
    Retired {
        /// What failed.
        reason: Arc<str>,
    },
    /// The scheduler ended before the request could run.
    #[error("the worker stopped")]
    Stopped,
}

/// Work was still inside when the time to drain was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{left} requests were still unanswered when the time to finish them was over")]
pub struct DrainTimeout {
    /// Requests still inside.
    pub left: usize,
}

/// How long the parts of a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to dispatch.
    pub queue: Duration,
    /// The batch's time on the device.
    pub model: Duration,
    /// Trees in the batch.
    pub batch_size: usize,
}

/// What the model computed for a submitted tree.
#[derive(Debug)]
pub struct Outcome {
    /// Per branch, per option: the FP32 pointer logit before the temperature.
    pub logits: Vec<Vec<f32>>,
    /// Tokens of the state that came from the prefix cache: all of them or none.
    pub cached_tokens: usize,
    /// Where the time went.
    pub timings: Timings,
    /// The request's permit, given back: keep it while the answer is made, or submit another tree with it.
    pub permit: Permit,
}

/// The right of one request to be inside. Dropped, its place becomes free.
pub struct Permit {
    place: Place,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Permit").field(&self.place).finish()
    }
}

impl Permit {
    /// Reserves tokens, up to this many in all. [`Permit::submit`] does it for its own tree.
    ///
    /// # Errors
    /// [`Refusal::Tokens`] or [`Refusal::TooLarge`].
    pub fn reserve(&mut self, tokens: usize) -> Result<(), Refusal> {
        self.place.reserve(tokens)
    }

    /// Queues a tree and waits for its outcome. Dropping the future drops the work if it was not dispatched yet; after
    /// dispatch the place stays taken until the device is done. The deadline bounds the wait for the device, not the
    /// device.
    ///
    /// # Errors
    /// [`Failure`].
    pub async fn submit(mut self, tree: Tree, deadline: Instant) -> Result<Outcome, Failure> {
        let tokens = tree.input_tokens();
        self.reserve(tokens)?;
        let shared = Arc::clone(&self.shared);
        let (reply, receiver) = oneshot::channel();
        let job = Job { tree, tokens, submitted: Instant::now(), deadline, permit: self, reply };
        shared.push(job)?;
        let mut reply = Reply { receiver, shared };
        // A sender that vanished without a word can only be one whose thread died.
        (&mut reply.receiver).await.unwrap_or(Err(Failure::Stopped))
    }
}

/// The caller's end of a submitted job.
struct Reply {
    receiver: oneshot::Receiver<Result<Outcome, Failure>>,
    shared: Arc<Shared>,
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.receiver.is_terminated() {
            self.receiver.close();
            self.shared.departed();
        }
    }
}

/// Admits requests, batches them, and runs them on one or several executors.
pub struct Scheduler {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Scheduler {
    /// As [`Scheduler::start_all`] with one executor.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(executor: impl Execute, options: SchedulerOptions) -> Result<Self, StartError> {
        Self::start_all(vec![executor], options)
    }

    /// Starts the queue thread and a device thread for each executor, which owns it from now on. All serve one line; one that fails
    /// leaves the rest to the others, and with the last one the model is retired.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start_all<E: Execute>(executors: Vec<E>, options: SchedulerOptions) -> Result<Self, StartError> {
        let SchedulerOptions { queue_requests, queue_tokens, batch_requests, batch_tokens } = options;
        let named = [
            ("queue requests", queue_requests),
            ("queue tokens", queue_tokens),
            ("batch requests", batch_requests),
            ("batch tokens", batch_tokens),
            ("devices", executors.len()),
        ];
        if let Some((option, _)) = named.into_iter().find(|(_, value)| *value == 0) {
            return Err(StartError::Zero { option });
        }
        let batcher = Batcher::new(Budget { requests: batch_requests, tokens: batch_tokens });
        let shared = Shared::new(Admission::new(queue_requests, queue_tokens), batcher, executors.len());
        // Built first: should the second thread fail to start, dropping this ends the first.
        let scheduler = Self { shared: Arc::clone(&shared), threads: Mutex::default() };
        let line = Arc::clone(&shared);
        scheduler.spawn("queue", move || keep_line(&line))?;
        for executor in executors {
            let shared = Arc::clone(&shared);
            scheduler.spawn("device", move || run_batches(&shared, executor))?;
        }
        Ok(scheduler)
    }

    /// Lets one request in. Ask before decoding anything of it.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn admit(&self) -> Result<Permit, Refusal> {
        let place = self.shared.admission.admit()?;
        Ok(Permit { place, shared: Arc::clone(&self.shared) })
    }

    /// Whether [`Scheduler::admit`] would let a request in at this moment, without letting it in.
    ///
    /// # Errors
    /// The [`Refusal`] it would get.
    pub fn check(&self) -> Result<(), Refusal> {
        self.shared.admission.check()
    }

    /// Why no request is let in whatever the load: draining or retired. `None` means ready.
    pub fn closed(&self) -> Option<Refusal> {
        self.shared.admission.closed()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// Stops letting requests in; those inside are finished.
    pub fn begin_drain(&self) {
        self.shared.admission.drain();
    }

    /// Stops letting requests in, finishes those inside and ends all threads. Blocking.
    ///
    /// # Errors
    /// [`DrainTimeout`] when requests were still inside when the time was over. Those that wait are told
    /// [`Failure::Stopped`]; a batch that runs is left to itself.
    pub fn drain(&self, timeout: Duration) -> Result<(), DrainTimeout> {
        self.begin_drain();
        let left = self.shared.admission.wait_empty(timeout);
        self.shared.stop();
        if left > 0 {
            return Err(DrainTimeout { left });
        }
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A thread that panicked has nothing left to say.
            let _ = thread.join();
        }
        Ok(())
    }

    fn spawn(&self, name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<(), StartError> {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)
            .map_err(|source| StartError::Thread { name, source })?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.begin_drain();
        self.shared.stop();
    }
}
