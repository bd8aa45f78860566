//! Owns which states are kept: least recently used, bounded in states and bytes, matched by all of a state's tokens.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use backend::KeyRange;

/// How much may be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// States at most.
    pub states: usize,
    /// Bytes at most, recurrent states, keys and values together.
    pub bytes: usize,
}

/// Counters of a cache, readable from any thread.
#[derive(Debug, Default)]
pub struct CacheStats {
    /// Trees whose state was kept from an earlier batch.
    pub hits: AtomicU64,
    /// Trees whose state was computed.
    pub misses: AtomicU64,
    /// States given up for others.
    pub evictions: AtomicU64,
    /// States kept now.
    pub states: AtomicU64,
    /// Bytes kept now.
    pub bytes: AtomicU64,
}

/// A computed state: where its memory lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateMemory {
    pub(crate) slot: usize,
    pub(crate) keys: Vec<KeyRange>,
}

#[derive(Debug)]
struct Entry {
    tokens: Arc<[u32]>,
    memory: StateMemory,
    used: u64,
    bytes: usize,
}

/// Kept states. It never frees memory itself: what it gives up, it returns.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    entries: Vec<Entry>,
    limits: CacheLimits,
    clock: u64,
    stats: Arc<CacheStats>,
}

impl PrefixCache {
    pub(crate) fn new(limits: CacheLimits) -> Self {
        Self { entries: Vec::new(), limits, clock: 0, stats: Arc::default() }
    }

    pub(crate) fn stats(&self) -> Arc<CacheStats> {
        Arc::clone(&self.stats)
    }

    /// Takes a state out for use: while it is out nothing can evict it.
    pub(crate) fn take(&mut self, tokens: &[u32]) -> Option<StateMemory> {
        let Some(index) = self.entries.iter().position(|entry| *entry.tokens == *tokens) else {
            self.stats.misses.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        self.stats.hits.fetch_add(1, Ordering::Relaxed);
        let entry = self.entries.remove(index);
        self.publish();
        Some(entry.memory)
    }

    /// Keeps a state if it fits at all; returns the memory of what is not kept, possibly the state itself.
    pub(crate) fn put(&mut self, tokens: Arc<[u32]>, memory: StateMemory, bytes: usize) -> Vec<StateMemory> {
        if self.limits.states == 0 || bytes > self.limits.bytes {
            return vec![memory];
        }
        self.clock += 1;
        self.entries.push(Entry { tokens, memory, used: self.clock, bytes });
        let mut freed = Vec::new();
        while self.entries.len() > self.limits.states || self.bytes() > self.limits.bytes {
            freed.extend(self.evict());
        }
        self.publish();
        freed
    }

    /// Gives up the least recently used state.
    pub(crate) fn evict(&mut self) -> Option<StateMemory> {
        let oldest = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.used)?.0;
        let entry = self.entries.swap_remove(oldest);
        self.stats.evictions.fetch_add(1, Ordering::Relaxed);
        self.publish();
        Some(entry.memory)
    }

    fn bytes(&self) -> usize {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }

    fn publish(&self) {
        self.stats.states.store(self.entries.len() as u64, Ordering::Relaxed);
        self.stats.bytes.store(self.bytes() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(slot: usize) -> StateMemory {
        StateMemory { slot, keys: Vec::new() }
    }

    #[test]
    fn the_least_recently_used_state_goes_first() {
        let mut cache = PrefixCache::new(CacheLimits { states: 2, bytes: 100 });
        let [a, b, c] = [&[1][..], &[1, 2], &[3]].map(Arc::<[u32]>::from);
        assert!(cache.put(a.clone(), memory(0), 10).is_empty());
        assert!(cache.put(b.clone(), memory(1), 10).is_empty());
        let used = cache.take(&a).unwrap();
        assert!(cache.put(a.clone(), used, 10).is_empty());
        assert_eq!(cache.put(c, memory(2), 10), [memory(1)]);
        // A strict prefix or extension of a kept state is another state.
        assert_eq!(cache.take(&b), None);
        assert_eq!(cache.take(&[1]), Some(memory(0)));
        assert_eq!(cache.stats().hits.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn bytes_are_bounded_and_a_state_larger_than_the_cache_is_not_kept() {
        let mut cache = PrefixCache::new(CacheLimits { states: 8, bytes: 100 });
        assert_eq!(cache.put([1].into(), memory(0), 101), [memory(0)]);
        assert!(cache.put([2].into(), memory(1), 60).is_empty());
        assert_eq!(cache.put([3].into(), memory(2), 60), [memory(1)]);
        assert_eq!(cache.stats().bytes.load(Ordering::Relaxed), 60);
    }
}
