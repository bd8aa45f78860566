//! Owns the line and the batch in the making: first in, first out, within a budget, without the dead. Pure data: it
//! knows no thread and no clock of its own.

use std::collections::VecDeque;
use std::time::Instant;

/// What the line needs to know of an entry.
pub(crate) trait Entry {
    /// Tokens the model reads for it.
    fn tokens(&self) -> usize;
    /// The moment from which on nobody wants its answer.
    fn deadline(&self) -> Instant;
    /// Whether its caller left.
    fn departed(&self) -> bool;
}

/// Why an entry was dropped before dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    Departed,
    Expired,
}

/// How large a batch may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Most entries.
    pub(crate) requests: usize,
    /// Most tokens; an entry larger than this goes alone.
    pub(crate) tokens: usize,
}

/// The line, and the batch that its head has become. The batch grows until the device takes it: requests that arrive
/// while the device is busy share the next batch instead of trailing it.
pub(crate) struct Batcher<E> {
    budget: Budget,
    waiting: VecDeque<E>,
    next: Vec<E>,
}

impl<E: Entry> Batcher<E> {
    pub(crate) fn new(budget: Budget) -> Self {
        Self { budget, waiting: VecDeque::new(), next: Vec::new() }
    }

    /// Puts an entry at the end of the line.
    pub(crate) fn push(&mut self, entry: E) {
        self.waiting.push_back(entry);
    }

    /// Removes everything nobody waits for any more, from the line and from the batch.
    pub(crate) fn sweep(&mut self, now: Instant) -> Vec<(E, Death)> {
        let mut dead = Vec::new();
        let next = std::mem::take(&mut self.next);
        self.next = next.into_iter().filter_map(|entry| living(entry, now, &mut dead)).collect();
        // Most sweeps find nobody dead: leave a long line where it is.
        if self.waiting.iter().any(|entry| death(entry, now).is_some()) {
            let waiting = std::mem::take(&mut self.waiting);
            self.waiting = waiting.into_iter().filter_map(|entry| living(entry, now, &mut dead)).collect();
        }
        dead
    }

    /// Moves as much of the head of the line into the batch as the budget allows; never overtakes. Returns whether there
    /// is a batch.
    pub(crate) fn fill(&mut self) -> bool {
        let mut tokens: usize = self.next.iter().map(Entry::tokens).sum();
        while let Some(head) = self.waiting.front() {
            let fits = self.next.len() < self.budget.requests
                && tokens.saturating_add(head.tokens()) <= self.budget.tokens;
            // An empty batch takes anyone: what is larger than the budget goes alone instead of waiting for ever.
            if !(fits || self.next.is_empty()) {
                break;
            }
            tokens = tokens.saturating_add(head.tokens());
            self.next.extend(self.waiting.pop_front());
        }
        !self.next.is_empty()
    }

    /// The batch, for a device, with everyone in the line who still fits; whoever died is returned apart. Of `sharers` devices that
    /// have nothing to do each gets its part, the first ones of the line first.
    pub(crate) fn take(&mut self, now: Instant, sharers: usize) -> (Vec<E>, Vec<(E, Death)>) {
        let dead = self.sweep(now);
        // The queue thread may not have seen the newest arrivals yet: they would needlessly trail this batch.
        self.fill();
        let part = self.next.len().div_ceil(sharers.max(1));
        let rest = self.next.split_off(part);
        (std::mem::replace(&mut self.next, rest), dead)
    }

    /// Everyone, in order; leaves nobody.
    pub(crate) fn clear(&mut self) -> Vec<E> {
        std::mem::take(&mut self.next).into_iter().chain(std::mem::take(&mut self.waiting)).collect()
    }

    /// The moment at which the next entry dies of its deadline.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next.iter().chain(&self.waiting).map(Entry::deadline).min()
    }

    /// Entries and tokens not taken yet.
    pub(crate) fn depth(&self) -> (usize, usize) {
        let entries = || self.next.iter().chain(&self.waiting);
        (entries().count(), entries().map(Entry::tokens).sum())
    }
}

fn death(entry: &impl Entry, now: Instant) -> Option<Death> {
    if entry.departed() {
        Some(Death::Departed)
    } else if entry.deadline() <= now {
        Some(Death::Expired)
    } else {
        None
    }
}

fn living<E: Entry>(entry: E, now: Instant, dead: &mut Vec<(E, Death)>) -> Option<E> {
    match death(&entry, now) {
        Some(death) => {
            dead.push((entry, death));
            None
        }
        None => Some(entry),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Item {
        id: usize,
        tokens: usize,
        deadline: Instant,
        departed: bool,
    }

    impl Entry for Item {
        fn tokens(&self) -> usize {
            self.tokens
        }
        fn deadline(&self) -> Instant {
            self.deadline
        }
        fn departed(&self) -> bool {
            self.departed
        }
    }

    fn batcher(requests: usize, tokens: usize, sizes: &[usize], now: Instant) -> Batcher<Item> {
        let mut batcher = Batcher::new(Budget { requests, tokens });
        for (id, tokens) in sizes.iter().enumerate() {
            let deadline = now + Duration::from_secs(60);
            batcher.push(Item { id, tokens: *tokens, deadline, departed: false });
        }
        batcher
    }

    fn ids(items: &[Item]) -> Vec<usize> {
        items.iter().map(|item| item.id).collect()
    }

    /// Takes batches until nothing is left.
    fn batches(batcher: &mut Batcher<Item>, now: Instant) -> Vec<Vec<usize>> {
        let mut all = Vec::new();
        while batcher.fill() {
            all.push(ids(&batcher.take(now, 1).0));
        }
        all
    }

    #[test]
    fn batches_keep_order_and_budget() {
        let now = Instant::now();
        type Case<'a> = (usize, usize, &'a [usize], &'a [&'a [usize]]);
        let cases: [Case<'_>; 7] = [
            (64, 10, &[3, 3, 3], &[&[0, 1, 2]]),
            (64, 10, &[3, 7, 1], &[&[0, 1], &[2]]),
            (64, 10, &[6, 6, 1], &[&[0], &[1, 2]]),
            (2, 10, &[1, 1, 1, 1, 1], &[&[0, 1], &[2, 3], &[4]]),
            // Larger than the budget: alone, and nobody overtakes it.
            (64, 10, &[1, 11, 1], &[&[0], &[1], &[2]]),
            (64, 10, &[usize::MAX, usize::MAX, 1], &[&[0], &[1], &[2]]),
            (64, 10, &[], &[]),
        ];
        for (requests, tokens, sizes, expected) in cases {
            assert_eq!(batches(&mut batcher(requests, tokens, sizes, now), now), expected, "{sizes:?}");
        }
    }

    #[test]
    fn a_batch_grows_until_it_is_taken() {
        let now = Instant::now();
        let mut batcher = batcher(64, 10, &[3], now);
        assert!(batcher.fill());
        batcher.push(Item { id: 1, tokens: 3, deadline: now + Duration::from_secs(1), departed: false });
        assert!(batcher.fill());
        assert_eq!(ids(&batcher.take(now, 1).0), [0, 1]);
        assert!(!batcher.fill());
    }

    #[test]
    fn devices_with_nothing_to_do_share_a_batch_in_order() {
        let now = Instant::now();
        let mut batcher = batcher(64, 100, &[1; 7], now);
        let mut taken = Vec::new();
        for sharers in [3, 2, 1, 1] {
            taken.push(ids(&batcher.take(now, sharers).0));
        }
        assert_eq!(taken, [vec![0, 1, 2], vec![3, 4], vec![5, 6], vec![]]);
    }

    #[test]
    fn the_dead_leave_the_line_and_the_batch() {
        let now = Instant::now();
        let mut batcher = batcher(2, 10, &[1, 1, 1, 1], now);
        batcher.fill();
        batcher.next[0].departed = true;
        batcher.waiting[1].deadline = now;
        let dead = batcher.sweep(now);
        assert_eq!(
            dead.iter().map(|(item, why)| (item.id, *why)).collect::<Vec<_>>(),
            [(0, Death::Departed), (3, Death::Expired)]
        );
        assert_eq!(batcher.depth(), (2, 2));
        // The freed place in the batch is used.
        batcher.fill();
        assert_eq!(ids(&batcher.next), [1, 2]);
        batcher.next[1].departed = true;
        let (batch, dead) = batcher.take(now, 1);
        assert_eq!((ids(&batch), dead.len()), (vec![1], 1));
        assert_eq!(batcher.depth(), (0, 0));
    }

    #[test]
    fn knows_the_next_deadline_and_can_be_emptied() {
        let now = Instant::now();
        let mut batcher = batcher(1, 10, &[1, 1], now);
        assert_eq!(batcher.next_deadline(), Some(now + Duration::from_secs(60)));
        batcher.fill();
        batcher.waiting[0].deadline = now;
        assert_eq!(batcher.next_deadline(), Some(now));
        assert_eq!(ids(&batcher.clear()), [0, 1]);
        assert_eq!(batcher.next_deadline(), None);
    }

    proptest! {
        /// Whatever arrives and dies in between: everyone leaves exactly once, the living in order and within budget.
        #[test]
        fn nobody_is_lost_overtaken_or_over_budget(
            steps in proptest::collection::vec((0usize..40, any::<bool>(), 0u8..4), 1..60),
            requests in 1usize..5,
            tokens in 1usize..50,
        ) {
            let now = Instant::now();
            let mut batcher = Batcher::new(Budget { requests, tokens });
            let (mut taken, mut dead) = (Vec::new(), 0);
            let check = |batch: &[Item], taken: &mut Vec<usize>| {
                let total: usize = batch.iter().map(|item| item.tokens).sum();
                prop_assert!(batch.len() <= requests && (total <= tokens || batch.len() == 1));
                taken.extend(ids(batch));
                Ok(())
            };
            for (id, (size, departed, action)) in steps.iter().enumerate() {
                let deadline = if *action == 3 { now } else { now + Duration::from_secs(1) };
                batcher.push(Item { id, tokens: *size, deadline, departed: *departed });
                match action {
                    0 => dead += batcher.sweep(now).len(),
                    1 => {
                        batcher.fill();
                    }
                    2 => {
                        let (batch, lost) = batcher.take(now, 1);
                        dead += lost.len();
                        check(&batch, &mut taken)?;
                    }
                    _ => {}
                }
            }
            for _ in 0..=steps.len() {
                if batcher.fill() {
                    let (batch, lost) = batcher.take(now, 1);
                    dead += lost.len();
                    check(&batch, &mut taken)?;
                }
            }
            prop_assert_eq!(batcher.depth(), (0, 0));
            prop_assert!(taken.is_sorted());
            let living = steps.iter().filter(|(_, departed, action)| !departed && *action != 3).count();
            prop_assert_eq!((taken.len(), dead), (living, steps.len() - living));
        }
    }
}
