//! Owns whose turn it is to do what touches a whole context. While a stream is being recorded, whatever waits for its context
//! (loading a library's kernels, unloading a module, destroying a handle, freeing memory) spoils the record, from any thread.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// The turn of this thread, until dropped. It belongs to the thread.
pub struct Turn {
    _guard: Option<MutexGuard<'static, ()>>,
    _thread: PhantomData<*const ()>,
}

/// Waits until no other thread of this process opens, records or gives back what belongs to a GPU. A thread that has the turn
/// gets it again at once.
///
/// Whoever opens an engine keeps it until everything that a request needs was run once, since kernels are loaded when they first run.
pub fn turn() -> Turn {
    let outermost = DEPTH.replace(DEPTH.get() + 1) == 0;
    let guard = outermost.then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
    Turn { _guard: guard, _thread: PhantomData }
}

impl Drop for Turn {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::turn;

    #[test]
    fn a_thread_gets_its_own_turn_again_and_another_waits() {
        let left = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let outer = turn();
            drop(turn());
            let other = scope.spawn(|| {
                let _turn = turn();
                left.load(Ordering::SeqCst)
            });
            std::thread::sleep(std::time::Duration::from_millis(50));
            left.store(true, Ordering::SeqCst);
            drop(outer);
            assert!(other.join().is_ok_and(|left| left));
        });
    }
}
