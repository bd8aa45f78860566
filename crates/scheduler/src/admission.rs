//! Owns admission: how many requests and tokens may be inside at once, and whether anyone is let in at all. This is
//! admission only: it knows no queue and no executor.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Why a request was not let in. Everything but [`Refusal::TooLarge`] may be different a moment later or at another
/// worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// As many requests are inside as may be.
    #[error("the queue is full: {limit} requests are waiting or running")]
    Requests {
        /// Most requests inside at once.
        limit: usize,
    },
    /// The request's tokens do not fit beside those already inside.
    #[error("the queue is full: {tokens} more tokens do not fit into {limit}")]
    Tokens {
        /// Tokens of the request.
        tokens: usize,
        /// Most tokens inside at once.
        limit: usize,
    },
    /// The request's tokens would not fit into an empty queue.
    #[error("the request has {tokens} tokens, over the limit of {limit}: split it")]
    TooLarge {
        /// Tokens of the request.
        tokens: usize,
        /// Most tokens inside at once.
        limit: usize,
    },
    /// Nobody is let in any more; what is inside is finished.
    #[error("the worker is stopping")]
    Draining,
    /// The executor failed and nothing can be answered any more.
    #[error("the model is retired: {reason}")]
    Retired {
        /// What failed.
        reason: Arc<str>,
    },
}

/// Who is let in.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Draining,
    Retired(Arc<str>),
}

#[derive(Debug)]
struct Inside {
    requests: usize,
    tokens: usize,
    phase: Phase,
}

/// The door. One lock holds the counts and the phase, so that nobody can be let in, and no place can be given back,
/// without a failure that was announced before being seen.
#[derive(Debug)]
pub(crate) struct Admission {
    requests: usize,
    tokens: usize,
    inside: Mutex<Inside>,
    left: Condvar,
}

/// A place inside, given back when dropped. Not `Clone`: a request has exactly one.
#[derive(Debug)]
pub(crate) struct Place {
    admission: Arc<Admission>,
    tokens: usize,
}

impl Admission {
    /// A door for at most so many requests and tokens at once.
    pub(crate) fn new(requests: usize, tokens: usize) -> Arc<Self> {
        let inside = Inside { requests: 0, tokens: 0, phase: Phase::Open };
        Arc::new(Self { requests, tokens, inside: Mutex::new(inside), left: Condvar::new() })
    }

    /// Lets one request in; its tokens are not known yet.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<Place, Refusal> {
        let mut inside = self.lock();
        self.permits(&inside)?;
        inside.requests += 1;
        Ok(Place { admission: Arc::clone(self), tokens: 0 })
    }

    /// Whether [`Admission::admit`] would let a request in at this moment.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        self.permits(&self.lock())
    }

    /// Requests and tokens inside.
    pub(crate) fn inside(&self) -> (usize, usize) {
        let inside = self.lock();
        (inside.requests, inside.tokens)
    }

    /// Lets nobody in any more. A retired door stays retired.
    pub(crate) fn drain(&self) {
        let mut inside = self.lock();
        if inside.phase == Phase::Open {
            inside.phase = Phase::Draining;
        }
    }

    /// Lets nobody in any more, for a reason that stays.
    pub(crate) fn retire(&self, reason: &Arc<str>) {
        let mut inside = self.lock();
        if !matches!(inside.phase, Phase::Retired(_)) {
            inside.phase = Phase::Retired(Arc::clone(reason));
        }
    }

    /// Why nobody is let in whatever the load, if so.
    pub(crate) fn closed(&self) -> Option<Refusal> {
        refusal(&self.lock().phase)
    }

    /// Waits until nobody is inside. Returns how many still are when the time is over.
    pub(crate) fn wait_empty(&self, timeout: Duration) -> usize {
        let end = Instant::now().checked_add(timeout);
        let mut inside = self.lock();
        while inside.requests > 0 {
            let Some(rest) = end.map_or(Some(Duration::from_secs(3600)), |end| {
                end.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())
            }) else {
                break;
            };
            inside = self.left.wait_timeout(inside, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        inside.requests
    }

    fn permits(&self, inside: &Inside) -> Result<(), Refusal> {
        if let Some(refusal) = refusal(&inside.phase) {
            return Err(refusal);
        }
        if inside.requests >= self.requests {
            return Err(Refusal::Requests { limit: self.requests });
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        // Counts are changed in one step each: a panic elsewhere cannot leave them half changed.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refusal(phase: &Phase) -> Option<Refusal> {
    match phase {
        Phase::Open => None,
        Phase::Draining => Some(Refusal::Draining),
        Phase::Retired(reason) => Some(Refusal::Retired { reason: Arc::clone(reason) }),
    }
}

impl Place {
    /// Reserves tokens up to this many in all; a place never gives tokens back before it is left.
    pub(crate) fn reserve(&mut self, tokens: usize) -> Result<(), Refusal> {
        let limit = self.admission.tokens;
        if tokens > limit {
            return Err(Refusal::TooLarge { tokens, limit });
        }
        let more = tokens.saturating_sub(self.tokens);
        let mut inside = self.admission.lock();
        if more > limit - inside.tokens {
            return Err(Refusal::Tokens { tokens, limit });
        }
        inside.tokens += more;
        self.tokens += more;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inside = self.admission.lock();
        inside.requests -= 1;
        inside.tokens -= self.tokens;
        drop(inside);
        self.admission.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_bounded_and_given_back() {
        let door = Admission::new(2, 10);
        let first = door.admit().unwrap();
        let second = door.admit().unwrap();
        assert_eq!(door.admit().unwrap_err(), Refusal::Requests { limit: 2 });
        assert_eq!(door.check(), Err(Refusal::Requests { limit: 2 }));
        drop(first);
        assert_eq!(door.check(), Ok(()));
        drop(second);
        assert_eq!(door.inside(), (0, 0));
    }

    #[test]
    fn tokens_are_bounded_and_given_back() {
        let door = Admission::new(9, 10);
        let (mut first, mut second) = (door.admit().unwrap(), door.admit().unwrap());
        assert_eq!(first.reserve(11), Err(Refusal::TooLarge { tokens: 11, limit: 10 }));
        first.reserve(7).unwrap();
        assert_eq!(second.reserve(4), Err(Refusal::Tokens { tokens: 4, limit: 10 }));
        second.reserve(3).unwrap();
        // Reserving again counts only what is more.
        first.reserve(7).unwrap();
        first.reserve(2).unwrap();
        assert_eq!(door.inside(), (2, 10));
        drop(first);
        assert_eq!(door.inside(), (1, 3));
        second.reserve(10).unwrap();
        drop(second);
        assert_eq!(door.inside(), (0, 0));
    }

    #[test]
    fn a_closed_door_says_why_and_retirement_wins() {
        let door = Admission::new(1, 1);
        let inside = door.admit().unwrap();
        door.drain();
        assert_eq!(door.admit().unwrap_err(), Refusal::Draining);
        let reason: Arc<str> = "boom".into();
        door.retire(&reason);
        door.drain();
        door.retire(&"later".into());
        assert_eq!(door.closed(), Some(Refusal::Retired { reason }));
        assert_eq!(door.wait_empty(Duration::ZERO), 1);
        drop(inside);
        assert_eq!(door.wait_empty(Duration::MAX), 0);
    }
}
