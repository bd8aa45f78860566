//! Owns the execution of batches: trees → passes → logits, with the prefix cache around it. One thread calls it.

use std::sync::Arc;

use artifact::Export;
use backend::{KeyRange, Ops};
use backend_cpu::CpuOps;
use decision::{Branch, Outcome, Tree};
use model::{Model, ModelError, ModelSizes, Owner, PassBuilder, Piece, WeightSet, key_row_bytes, slot_bytes};
use scheduler::{Execute, ExecuteError};

use crate::key_rows::KeyRows;
use crate::prefix_cache::{CacheLimits, CacheStats, PrefixCache, StateMemory};

/// A long state is cut at multiples of this, the chunk of the delta rule, so that a cut changes no bit.
const CHUNK: usize = 64;
/// States that a batch may use at once whatever the cache keeps.
const SCRATCH_SLOTS: usize = 8;

/// Segments of a pass: each needs memory of a chunk of the delta rule on a GPU, however short it is.
const PASS_SEGMENTS: usize = 256;

/// What an executor plans for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorOptions {
    /// Tokens of a pass, a multiple of 64. A question longer than this gets a pass of its own.
    pub pass_tokens: usize,
    /// Longest state plus one question.
    pub max_row_tokens: usize,
    /// Longest question.
    pub max_question_tokens: usize,
    /// The prefix cache.
    pub cache: CacheLimits,
    /// Threads of a CPU backend; 0 means one per core.
    pub threads: usize,
}

impl Default for ExecutorOptions {
    fn default() -> Self {
        Self {
            pass_tokens: 512,
            max_row_tokens: 73_728,
            max_question_tokens: 73_728,
            cache: CacheLimits { states: 4, bytes: 1 << 30 },
            threads: 0,
        }
    }
}

/// Why an executor could not start.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The model could not be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The first pass failed.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// The backend could not start.
    #[error(transparent)]
    Backend(#[from] backend::BackendError),
    /// Profile `service` needs the merge of a GPU.
    #[error(
        "the adapter of this export was merged on {found}; profile service expects the merge of a GPU, which sums some modules in \
         another order: export again with --merge-device cuda"
    )]
    Merged {
        /// Where the manifest says it was merged.
        found: String,
    },
    /// The device has not enough memory for these options.
    #[error(
        "{device} has {:.2} GB free, {:.2} GB are needed ({parts}): give the prefix cache, the longest rows or the batch \
         fewer tokens, or take another device", *free as f64 / 1e9, *total as f64 / 1e9
    )]
    Memory {
        /// The device.
        device: String,
        /// Bytes free.
        free: usize,
        /// Bytes needed.
        total: usize,
        /// What they are for.
        parts: String,
    },
    /// An option makes no sense.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// The option.
        option: &'static str,
        /// What is accepted.
        expected: &'static str,
        /// What was given.
        found: usize,
    },
}

/// Runs trees on a model.
pub struct Executor<B: Ops> {
    model: Model<B>,
    options: ExecutorOptions,
    cache: PrefixCache,
    slots: Vec<usize>,
    keys: KeyRows,
    slot_bytes: usize,
    key_row_bytes: usize,
    retired: Option<ExecuteError>,
}

/// An executor on this machine's cores, profile `exact`.
///
/// # Errors
/// [`ExecutorError`].
pub fn open_cpu(export: &Export, options: &ExecutorOptions) -> Result<Executor<CpuOps>, ExecutorError> {
    Executor::open(CpuOps::new(options.threads)?, export, WeightSet::Exact, options)
}

/// What a model must hold for these options: known at start, never exceeded.
pub(crate) fn sizes<B: Ops>(ops: &B, export: &Export, options: &ExecutorOptions) -> ModelSizes {
    let pass_rows = options.pass_tokens.max(options.max_question_tokens.min(options.max_row_tokens));
    let slots = options.cache.states.max(SCRATCH_SLOTS);
    let kept = options.cache.bytes.saturating_sub(options.cache.states * slot_bytes(ops, export));
    let kept_rows = kept / key_row_bytes(ops, export).max(1);
    ModelSizes {
        pass_rows,
        // A question has two tokens for every option and two more.
        readout_rows: pass_rows / 2 + 1,
        slots,
        // Either everything kept, or the longest row alone after all else was given up.
        key_rows: kept_rows.max(options.max_row_tokens) + pass_rows,
    }
}

impl<B: Ops> Executor<B> {
    /// Loads an export into a backend.
    ///
    /// # Errors
    /// [`ExecutorError`].
    pub fn open(
        ops: B,
        export: &Export,
        set: WeightSet,
        options: &ExecutorOptions,
    ) -> Result<Self, ExecutorError> {
        if options.pass_tokens == 0 || !options.pass_tokens.is_multiple_of(CHUNK) {
            let found = options.pass_tokens;
            return Err(ExecutorError::Option { option: "pass tokens", expected: "a multiple of 64", found });
        }
        let sizes = sizes(&ops, export, options);
        let (slot_bytes, key_row_bytes) = (slot_bytes(&ops, export), key_row_bytes(&ops, export).max(1));
        Ok(Self {
            model: Model::load(ops, export, set, sizes)?,
            options: *options,
            cache: PrefixCache::new(options.cache),
            slots: (0..sizes.slots).rev().collect(),
            keys: KeyRows::new(sizes.key_rows),
            slot_bytes,
            key_row_bytes,
            retired: None,
        })
    }

    /// Counters of the prefix cache.
    pub fn cache_stats(&self) -> Arc<CacheStats> {
        self.cache.stats()
    }

    /// Runs the pass that needs most memory, and keeps nothing of it: what a backend allocates when it first needs it is
    /// there before a request comes.
    ///
    /// # Errors
    /// [`ExecuteError`] as of [`Execute::execute`].
    pub fn exercise(&mut self) -> Result<(), ExecuteError> {
        let pass = self.options.pass_tokens.min(self.options.max_row_tokens);
        let question = Branch { tokens: vec![0; 8], decide: 7, option_ends: vec![3, 5] };
        let questions = (PASS_SEGMENTS - 1).min(pass / 32);
        let state = vec![0; pass - 8 * questions].into();
        self.execute(&[Tree { state, branches: vec![question; questions] }])?;
        while let Some(memory) = self.cache.evict() {
            self.slots.push(memory.slot);
            memory.keys.into_iter().for_each(|range| self.keys.give(range));
        }
        Ok(())
    }

    pub(crate) fn ops(&self) -> &B {
        self.model.ops()
    }

    /// One line about backend and profile.
    pub fn describe(&self) -> String {
        self.model.describe()
    }
}

impl<B: Ops> Execute for Executor<B> {
    fn execute(&mut self, trees: &[Tree]) -> Result<Vec<Outcome>, ExecuteError> {
        if let Some(error) = &self.retired {
            return Err(error.clone());
        }
        let result = Batch::new(self, trees).run();
        result.map_err(|error| {
            let error = ExecuteError { reason: error.to_string() };
            self.retired = Some(error.clone());
            error
        })
    }
}

/// A state in use by the batch.
struct Live {
    tokens: Arc<[u32]>,
    memory: StateMemory,
    cached: bool,
    /// The pass, by number, that wrote its final state.
    written: usize,
}

/// One batch on its way through the model.
struct Batch<'a, B: Ops> {
    executor: &'a mut Executor<B>,
    trees: &'a [Tree],
    outcomes: Vec<Outcome>,
    live: Vec<Live>,
    builder: PassBuilder<'a>,
    /// Key rows of the questions of the pass in the making.
    borrowed: Vec<KeyRange>,
    passes: usize,
}

impl<'a, B: Ops> Batch<'a, B> {
    fn new(executor: &'a mut Executor<B>, trees: &'a [Tree]) -> Self {
        let outcomes = trees
            .iter()
            .map(|tree| Outcome { logits: vec![Vec::new(); tree.branches.len()], cached_tokens: 0 })
            .collect();
        let builder = PassBuilder::default();
        Self { executor, trees, outcomes, live: Vec::new(), builder, borrowed: Vec::new(), passes: 1 }
    }

    fn run(mut self) -> Result<Vec<Outcome>, ModelError> {
        for (index, tree) in self.trees.iter().enumerate() {
            let live = self.state(&tree.state)?;
            self.outcomes[index].cached_tokens = if self.live[live].cached { tree.state.len() } else { 0 };
            for (branch_index, branch) in tree.branches.iter().enumerate() {
                let (live, own) = self.place(&tree.state, branch.tokens.len())?;
                self.borrowed.push(own);
                let state = &self.live[live];
                let mut keys = state.memory.keys.clone();
                keys.push(own);
                self.builder.add(Piece {
                    tokens: &branch.tokens,
                    position: tree.state.len(),
                    initial: Some(state.memory.slot),
                    last: None,
                    after_state: state.written == self.passes,
                    keys,
                    question: Some((Owner { tree: index, branch: branch_index }, branch)),
                });
            }
        }
        self.settle()?;
        Ok(self.outcomes)
    }

    /// The live state and key rows for one of its questions. Where rows are short, first the pass in the making is run and
    /// the batch's own states become kept ones, which can be given up; then everything is given up and the state is made
    /// again from an empty arena, where the longest row fits.
    fn place(&mut self, state: &'a Arc<[u32]>, len: usize) -> Result<(usize, KeyRange), ModelError> {
        for attempt in 0..3 {
            let live = self.state(state)?;
            let (rows, pieces) = (self.builder.rows(), self.builder.pieces());
            let full = rows + len > self.executor.options.pass_tokens || pieces >= PASS_SEGMENTS;
            if rows > 0 && full {
                self.flush()?;
            }
            if let Some(own) = self.rows(len) {
                return Ok((live, own));
            }
            self.settle()?;
            if attempt == 1 {
                self.give_up_all();
            }
        }
        Err(self.no_rows(len))
    }

    /// Index of a live state, computed now if it is neither live nor kept.
    fn state(&mut self, tokens: &'a Arc<[u32]>) -> Result<usize, ModelError> {
        if let Some(index) = self.live.iter().position(|live| live.tokens == *tokens) {
            return Ok(index);
        }
        if let Some(memory) = self.executor.cache.take(tokens) {
            self.live.push(Live { tokens: Arc::clone(tokens), memory, cached: true, written: 0 });
            return Ok(self.live.len() - 1);
        }
        for attempt in 0..3 {
            if let Some(memory) = self.computed(tokens)? {
                let written = self.passes;
                self.live.push(Live { tokens: Arc::clone(tokens), memory, cached: false, written });
                return Ok(self.live.len() - 1);
            }
            self.settle()?;
            if attempt == 1 {
                self.give_up_all();
            }
        }
        Err(self.no_rows(tokens.len()))
    }

    /// Computes a state; `None` when slots or key rows are short, with nothing left behind.
    fn computed(&mut self, tokens: &'a Arc<[u32]>) -> Result<Option<StateMemory>, ModelError> {
        let Some(slot) = self.slot() else { return Ok(None) };
        let mut memory = StateMemory { slot, keys: Vec::new() };
        let mut done = 0;
        while done < tokens.len() {
            if self.builder.pieces() >= PASS_SEGMENTS {
                self.flush()?;
            }
            let space = self.executor.options.pass_tokens.saturating_sub(self.builder.rows());
            let left = tokens.len() - done;
            let take = if left <= space { left } else { space / CHUNK * CHUNK };
            if take == 0 {
                self.flush()?;
                continue;
            }
            let Some(own) = self.rows(take) else {
                self.flush()?;
                self.free(memory);
                return Ok(None);
            };
            memory.keys.push(own);
            self.builder.add(Piece {
                tokens: &tokens[done..done + take],
                position: done,
                initial: (done > 0).then_some(slot),
                last: Some(slot),
                after_state: false,
                keys: memory.keys.clone(),
                question: None,
            });
            done += take;
            if done < tokens.len() {
                self.flush()?;
            }
        }
        Ok(Some(memory))
    }

    /// A free slot, at the cost of a kept state if need be.
    fn slot(&mut self) -> Option<usize> {
        if self.executor.slots.is_empty()
            && let Some(memory) = self.executor.cache.evict()
        {
            self.free(memory);
        }
        self.executor.slots.pop()
    }

    /// A range of key rows, at the cost of kept states if need be.
    fn rows(&mut self, len: usize) -> Option<KeyRange> {
        loop {
            if let Some(range) = self.executor.keys.take(len) {
                return Some(range);
            }
            let memory = self.executor.cache.evict()?;
            self.free(memory);
        }
    }

    fn give_up_all(&mut self) {
        while let Some(memory) = self.executor.cache.evict() {
            self.free(memory);
        }
    }

    fn no_rows(&self, found: usize) -> ModelError {
        ModelError::Capacity { what: "key rows", found, planned: self.executor.model.sizes().key_rows }
    }

    fn free(&mut self, memory: StateMemory) {
        self.executor.slots.push(memory.slot);
        memory.keys.into_iter().for_each(|range| self.executor.keys.give(range));
    }

    /// Runs the pass in the making.
    fn flush(&mut self) -> Result<(), ModelError> {
        let (pass, owners) = std::mem::take(&mut self.builder).build();
        if pass.rows() > 0 {
            let mut logits = self.executor.model.run(&pass)?.into_iter();
            for (owner, readout) in owners.iter().zip(&pass.readouts) {
                self.outcomes[owner.tree].logits[owner.branch] =
                    logits.by_ref().take(readout.options.len()).collect();
            }
        }
        self.passes += 1;
        self.borrowed.drain(..).for_each(|range| self.executor.keys.give(range));
        Ok(())
    }

    /// Runs what is pending and hands every live state to the cache.
    fn settle(&mut self) -> Result<(), ModelError> {
        self.flush()?;
        for live in std::mem::take(&mut self.live) {
            let bytes = self.executor.slot_bytes + live.tokens.len() * self.executor.key_row_bytes;
            for memory in self.executor.cache.put(live.tokens, live.memory, bytes) {
                self.free(memory);
            }
        }
        Ok(())
    }
}
