//! Owns the bounded pool for blocking, CPU-bound work: no request's megabytes of text may hold up the threads that serve
//! sockets, and a panic is the fate of one request.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// The work panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panicked;

pub(crate) struct Pool {
    threads: Arc<Semaphore>,
}

impl Pool {
    /// A pool of so many threads.
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads: Arc::new(Semaphore::new(threads)) }
    }

    /// Runs work on a thread of the pool. Work that has begun is finished even if its caller leaves, and holds its thread
    /// until then.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Panicked> {
        // The semaphore is never closed.
        let thread = Arc::clone(&self.threads).acquire_owned().await.map_err(|_| Panicked)?;
        let result = tokio::task::spawn_blocking(move || {
            let result = work();
            drop(thread);
            result
        });
        result.await.map_err(|_| Panicked)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn work_is_bounded_and_a_panic_is_contained() {
        let pool = Arc::new(Pool::new(2));
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut tasks = tokio::task::JoinSet::new();
        for index in 0..20 {
            let (pool, now, most) = (Arc::clone(&pool), Arc::clone(&now), Arc::clone(&most));
            tasks.spawn(async move {
                pool.run(move || {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    now.fetch_sub(1, Ordering::SeqCst);
                    assert!(index % 5 != 0, "one in five fails");
                    index
                })
                .await
            });
        }
        let results = tasks.join_all().await;
        assert_eq!(results.iter().filter(|result| **result == Err(Panicked)).count(), 4);
        assert!(most.load(Ordering::SeqCst) <= 2);
    }
}
