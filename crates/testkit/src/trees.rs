//! Random trees of tokens.

use decision::{Branch, Tree};

/// A reproducible stream of random trees over token ids below `vocab`.
pub struct Trees {
    seed: u64,
    vocab: usize,
}

impl Trees {
    /// A stream.
    pub fn new(seed: u64, vocab: usize) -> Self {
        Self { seed, vocab }
    }

    /// A number in `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.seed >> 33) % end.max(1) as u64) as usize
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(self.vocab) as u32).collect()
    }

    /// A tree with `state` tokens and as many questions as `questions` has lengths; every question gets 2 to 5 options.
    pub fn tree(&mut self, state: usize, questions: &[usize]) -> Tree {
        let state = self.tokens(state).into();
        let branches = questions
            .iter()
            .map(|length| {
                let options = 2 + self.below(4);
                let length = (*length).max(2 * options + 2);
                let option_ends = (0..options).map(|option| length - 2 * (options - option)).collect();
                Branch { tokens: self.tokens(length), decide: length - 1, option_ends }
            })
            .collect();
        Tree { state, branches }
    }
}
