//! Owns the unit of work: a state and the branches that continue it, as token ids, and what comes back for them.

use std::sync::Arc;

/// One question as the model reads it: a run of tokens that continues the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Token ids, question start first, `decide` last.
    pub tokens: Vec<u32>,
    /// Index in `tokens` of the `decide` token.
    pub decide: usize,
    /// Index in `tokens` of each option's end token, in option order.
    pub option_ends: Vec<usize>,
}

/// A state and the branches that continue it. The state takes positions `0..state.len()`; every branch starts
/// again at `state.len()`, and branches never see each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Token ids, state start first; never empty.
    pub state: Arc<[u32]>,
    /// One branch per question, in request order; never empty.
    pub branches: Vec<Branch>,
}

impl Tree {
    /// Tokens of the state counted once plus those of every branch: `usage.input_tokens`.
    pub fn input_tokens(&self) -> usize {
        self.state.len() + self.branches.iter().map(|b| b.tokens.len()).sum::<usize>()
    }
}

/// What the model computed for one tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Per branch, per option: the FP32 pointer logit before the temperature.
    pub logits: Vec<Vec<f32>>,
    /// Tokens of the state that came from the prefix cache: all of them or none.
    pub cached_tokens: usize,
}
