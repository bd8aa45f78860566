//! A fake executor: answers at once with logits that depend on what a row reads and on nothing else, records its
//! batches, and can be held, slowed, failed or made to panic.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use decision::{Outcome, Tree};
use scheduler::{Execute, ExecuteError};

/// How a batch goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The executor reports an error.
    Error,
    /// The executor panics.
    Panic,
    /// The executor answers one tree too few.
    Missing,
}

/// The executor's half.
#[derive(Debug)]
pub struct FakeExecutor {
    shared: Arc<Shared>,
}

/// The test's half.
#[derive(Clone, Debug)]
pub struct FakeHandle {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    batches: Vec<Vec<Tree>>,
    held: bool,
    delay: Duration,
    fault: Option<Fault>,
}

/// A fake executor and the handle that controls it.
pub fn fake() -> (FakeExecutor, FakeHandle) {
    let shared = Arc::new(Shared::default());
    (FakeExecutor { shared: Arc::clone(&shared) }, FakeHandle { shared })
}

impl FakeHandle {
    /// Batches started from now on wait for [`FakeHandle::release`].
    pub fn hold(&self) {
        self.shared.lock().held = true;
    }

    /// Lets batches run.
    pub fn release(&self) {
        self.shared.lock().held = false;
        self.shared.changed.notify_all();
    }

    /// Every batch takes at least this long.
    pub fn delay(&self, delay: Duration) {
        self.shared.lock().delay = delay;
    }

    /// The next batch that runs goes wrong.
    pub fn fault(&self, fault: Fault) {
        self.shared.lock().fault = Some(fault);
    }

    /// Batches started so far, in order.
    pub fn batches(&self) -> Vec<Vec<Tree>> {
        self.shared.lock().batches.clone()
    }

    /// Waits until so many batches have started.
    ///
    /// # Panics
    /// When they have not after a minute: a test must end.
    pub fn wait_started(&self, batches: usize) {
        let end = Instant::now() + Duration::from_secs(60);
        let mut state = self.shared.lock();
        while state.batches.len() < batches {
            let rest = end.saturating_duration_since(Instant::now());
            assert!(!rest.is_zero(), "{} batches started, not {batches}", state.batches.len());
            state = self.shared.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Execute for FakeExecutor {
    #[allow(clippy::panic)] // A panic is one of the faults to be tested.
    fn execute(&mut self, trees: &[Tree]) -> Result<Vec<Outcome>, ExecuteError> {
        let mut state = self.shared.lock();
        state.batches.push(trees.to_vec());
        self.shared.changed.notify_all();
        while state.held {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (delay, fault) = (state.delay, state.fault.take());
        drop(state);
        std::thread::sleep(delay);
        let mut outcomes: Vec<Outcome> = trees.iter().map(outcome).collect();
        match fault {
            None => {}
            Some(Fault::Error) => return Err(ExecuteError { reason: "injected".to_owned() }),
            Some(Fault::Panic) => panic!("injected"),
            Some(Fault::Missing) => {
                outcomes.pop();
            }
        }
        Ok(outcomes)
    }
}

/// What the fake answers to a tree: a logit is a hash of the state and of its branch up to the option's end.
pub fn outcome(tree: &Tree) -> Outcome {
    let state = tree.state.iter().fold(0, mix);
    let logits = tree
        .branches
        .iter()
        .map(|branch| {
            let mut hash = state;
            let mut hashes = Vec::with_capacity(branch.tokens.len());
            for token in &branch.tokens {
                hash = mix(hash, token);
                hashes.push(hash);
            }
            branch.option_ends.iter().map(|end| logit(hashes[*end])).collect()
        })
        .collect();
    Outcome { logits, cached_tokens: 0 }
}

/// One step of splitmix64 over a token.
fn mix(hash: u64, token: &u32) -> u64 {
    let mut z = (hash ^ u64::from(*token)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// -4 to 4, in steps of 1/4096.
fn logit(hash: u64) -> f32 {
    ((hash >> 49) as f32) / 4096.0 - 4.0
}
