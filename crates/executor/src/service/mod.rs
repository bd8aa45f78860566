//! Owns profile `service`: requests on the passes of the official BF16 service, padded as it pads them, so that every product has
//! its shape and every operation its rounding. An answer depends on its batch mates here, as it does there.

mod merge;
mod model;
mod plan;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use artifact::Export;
use backend_cuda::{Grid, ServiceOps, turn};
use decision::{Outcome, Tree};
use scheduler::{Execute, ExecuteError};

use crate::cuda::DeviceMemory;
use crate::prefix_cache::CacheStats;
use crate::worker::ExecutorError;
use ::model::ModelError;
pub use merge::CudaMerger;
pub use model::TraceTensor;
use model::{Limits, PassInput, ServiceModel, StateMemory, Trace, check, planned_bytes, state_bytes};
use plan::{
    BANK_TOKENS, EAGER_TOKENS, GRAPH_TOKENS, KEYS_A_PASS, ROWS_A_PASS, STATES_A_PASS, bank, bucket,
    count_bucket, grouped,
};

/// States that the service's prefix cache keeps.
const CACHED_STATES: usize = 4;
/// Their tokens at most.
const CACHED_TOKENS: usize = 65_536;
/// Requests that share passes at most.
pub const SERVICE_REQUESTS: usize = 64;
/// Memory for what is not planned to the byte: ids, positions, the head, cuBLAS.
const RESERVE: usize = 1 << 30;

/// What profile `service` plans for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceOptions {
    /// Which GPU, in the driver's order.
    pub ordinal: usize,
    /// Longest state.
    pub max_state_tokens: usize,
    /// Longest state plus one question.
    pub max_row_tokens: usize,
    /// Longest question.
    pub max_question_tokens: usize,
    /// Pads passes as the service does where it records them as graphs; without it every pass runs as it is.
    pub bucketed: bool,
}

struct Kept {
    tokens: Arc<[u32]>,
    memory: StateMemory,
}

/// Runs trees as the official service does.
pub struct ServiceExecutor {
    model: ServiceModel,
    bucketed: bool,
    /// Oldest first.
    kept: Vec<Kept>,
    /// Bytes of a state, and of each of its tokens.
    state_bytes: (usize, usize),
    stats: Arc<CacheStats>,
    retired: Option<ExecuteError>,
}

/// One question of the batch.
struct Row<'a> {
    tree: usize,
    branch: usize,
    state: &'a Arc<[u32]>,
    tokens: &'a [u32],
    decide: usize,
    ends: &'a [usize],
}

fn limits(options: &ServiceOptions) -> Limits {
    let longest = options.max_row_tokens;
    let alone = options.max_state_tokens.max(options.max_question_tokens).min(longest);
    Limits {
        rows: (ROWS_A_PASS * GRAPH_TOKENS).max(alone),
        // A count is rounded up by a third at most.
        keys: (KEYS_A_PASS / 3 * 4 + 64).max(longest),
        batch: ROWS_A_PASS,
    }
}

impl ServiceExecutor {
    /// Opens a GPU and loads an export.
    ///
    /// # Errors
    /// [`ExecutorError::Merged`] for an export that was merged elsewhere, [`ExecutorError::Memory`] when the device has less free memory than is planned for, [`ExecutorError::Model`] for a geometry
    /// that the profile does not support, or a device that fails.
    pub fn open(export: &Export, options: &ServiceOptions) -> Result<Self, ExecutorError> {
        check(export)?;
        let merged_on = &export.manifest.merge.device;
        if !merged_on.starts_with("cuda") {
            return Err(ExecutorError::Merged { found: merged_on.clone() });
        }
        let _turn = turn();
        let ops = ServiceOps::open(options.ordinal)?;
        let limits = limits(options);
        let (weights, buffers) = planned_bytes(export, limits);
        let (fixed, token) = state_bytes(export);
        // Pooled memory is rounded up to powers of two.
        let states = 2
            * ((CACHED_STATES + SERVICE_REQUESTS) * fixed
                + (CACHED_TOKENS + options.max_state_tokens) * token);
        let needed = [("weights", weights), ("passes", buffers), ("states", states), ("reserve", RESERVE)];
        let (free, _) = ops.device().memory_info()?;
        let total: usize = needed.iter().map(|(_, bytes)| bytes).sum();
        if total > free {
            let parts: Vec<String> =
                needed.iter().map(|(what, bytes)| format!("{:.2} GB {what}", *bytes as f64 / 1e9)).collect();
            return Err(ExecutorError::Memory {
                device: ops.device().describe(),
                free,
                total,
                parts: parts.join(", "),
            });
        }
        Ok(Self {
            model: ServiceModel::load(ops, export, limits)?,
            bucketed: options.bucketed,
            kept: Vec::new(),
            state_bytes: (fixed, token),
            stats: Arc::new(CacheStats::default()),
            retired: None,
        })
    }

    /// Counters of the prefix cache.
    pub fn cache_stats(&self) -> Arc<CacheStats> {
        Arc::clone(&self.stats)
    }

    /// What results may depend on, by name: device, driver, kernels, cuBLAS.
    pub fn identity(&self) -> BTreeMap<String, String> {
        self.model.ops().identity()
    }

    /// A way to ask for the device's memory while the executor is busy.
    pub fn device_memory(&self) -> DeviceMemory {
        let device = Arc::clone(self.model.ops().device());
        Box::new(move || device.memory_info().ok())
    }

    /// One line about backend and profile.
    pub fn describe(&self) -> String {
        let form = if self.bucketed { "bucketed" } else { "eager" };
        format!("{}, {form}", self.model.ops().describe())
    }

    /// Runs one tree with nothing cached and returns what enters and leaves every layer of every pass, and every operation inside one
    /// layer where one is named, with its logits.
    ///
    /// # Errors
    /// [`ExecuteError`] as of [`Execute::execute`].
    pub fn trace(
        &mut self,
        tree: &Tree,
        inside: Option<usize>,
    ) -> Result<(Vec<TraceTensor>, Vec<f32>), ExecuteError> {
        self.kept.clear();
        self.model.trace = Some(Trace { tensors: Vec::new(), pass: String::new(), passes: 0, inside });
        let outcome = self.execute(std::slice::from_ref(tree));
        let tensors = self.model.trace.take().map_or_else(Vec::new, |trace| trace.tensors);
        let logits = outcome?.into_iter().flat_map(|outcome| outcome.logits).flatten().collect();
        Ok((tensors, logits))
    }

    /// Makes the device fail asynchronously; for tests of what follows.
    ///
    /// # Errors
    /// [`backend::BackendError::Device`].
    #[cfg(feature = "gpu")]
    pub fn fail_device(&self) -> backend::Result<()> {
        self.model.ops().fail()
    }

    fn name_pass(&mut self, name: &str) {
        if let Some(trace) = &mut self.model.trace {
            trace.pass = format!("{:02}.{name}", trace.passes);
            trace.passes += 1;
        }
    }

    fn batch(&mut self, trees: &[Tree]) -> Result<Vec<Outcome>, ModelError> {
        let cached = |kept: &[Kept], state: &Arc<[u32]>| kept.iter().any(|kept| kept.tokens == *state);
        let mut outcomes: Vec<Outcome> = trees
            .iter()
            .map(|tree| {
                let hit = cached(&self.kept, &tree.state);
                let counter = if hit { &self.stats.hits } else { &self.stats.misses };
                counter.fetch_add(1, Ordering::Relaxed);
                let cached_tokens = if hit { tree.state.len() } else { 0 };
                Outcome { logits: vec![Vec::new(); tree.branches.len()], cached_tokens }
            })
            .collect();
        let mut fresh: Vec<&Arc<[u32]>> = Vec::new();
        for tree in trees {
            if !cached(&self.kept, &tree.state) && !fresh.contains(&&tree.state) {
                fresh.push(&tree.state);
            }
        }
        let (short, long): (Vec<&Arc<[u32]>>, Vec<_>) =
            fresh.into_iter().partition(|state| self.bucketed && bucket(state.len()) <= GRAPH_TOKENS);
        let lengths: Vec<usize> = short.iter().map(|state| state.len()).collect();
        for group in grouped(&lengths, |_, _| STATES_A_PASS) {
            let states: Vec<&Arc<[u32]>> = group.iter().map(|index| short[*index]).collect();
            self.padded_states(&states)?;
        }
        for state in long {
            self.plain_state(state)?;
        }
        let rows: Vec<Row> = trees
            .iter()
            .enumerate()
            .flat_map(|(tree_index, tree)| {
                tree.branches.iter().enumerate().map(move |(branch, question)| Row {
                    tree: tree_index,
                    branch,
                    state: &tree.state,
                    tokens: &question.tokens,
                    decide: question.decide,
                    ends: &question.option_ends,
                })
            })
            .collect();
        let mut put = |row: &Row, logits: Vec<f32>| outcomes[row.tree].logits[row.branch] = logits;
        let fits = |row: &&Row| {
            self.bucketed && bucket(row.tokens.len()) <= GRAPH_TOKENS && row.state.len() <= BANK_TOKENS
        };
        let (padded, plain): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(fits);
        let lengths: Vec<usize> = padded.iter().map(|row| row.tokens.len()).collect();
        let most = |members: &[usize], longest: usize| {
            let state = members.iter().map(|index| padded[*index].state.len()).max().unwrap_or(0);
            ROWS_A_PASS.min(KEYS_A_PASS / (bank(state) + longest))
        };
        for group in grouped(&lengths, most) {
            let members: Vec<&Row> = group.iter().map(|index| padded[*index]).collect();
            for (row, logits) in members.iter().zip(self.padded_rows(&members)?) {
                put(row, logits);
            }
        }
        let mut states: Vec<&Arc<[u32]>> = Vec::new();
        for row in &plain {
            if !states.contains(&row.state) {
                states.push(row.state);
            }
        }
        for state in states {
            let members: Vec<&Row> = plain.iter().copied().filter(|row| row.state == state).collect();
            let longest = members.iter().map(|row| row.tokens.len()).max().unwrap_or(1);
            let step = (EAGER_TOKENS / (state.len() + longest)).clamp(1, ROWS_A_PASS);
            for part in members.chunks(step) {
                for (row, logits) in part.iter().zip(self.plain_rows(part)?) {
                    put(row, logits);
                }
            }
        }
        for row in &rows {
            if let Some(at) = self.kept.iter().position(|kept| kept.tokens == *row.state) {
                let kept = self.kept.remove(at);
                self.kept.push(kept);
            }
        }
        self.forget();
        Ok(outcomes)
    }

    /// Gives up the oldest states beyond what the service's cache keeps.
    fn forget(&mut self) {
        let tokens = |kept: &[Kept]| kept.iter().map(|kept| kept.tokens.len()).sum::<usize>();
        while self.kept.len() > CACHED_STATES || tokens(&self.kept) > CACHED_TOKENS {
            self.kept.remove(0);
            self.stats.evictions.fetch_add(1, Ordering::Relaxed);
        }
        let (fixed, token) = self.state_bytes;
        let bytes = self.kept.len() * fixed + tokens(&self.kept) * token;
        self.stats.states.store(self.kept.len() as u64, Ordering::Relaxed);
        self.stats.bytes.store(bytes as u64, Ordering::Relaxed);
    }

    fn padded_states(&mut self, states: &[&Arc<[u32]>]) -> Result<(), ModelError> {
        let longest = states.iter().map(|state| state.len()).max().unwrap_or(1);
        let grid = Grid { batch: count_bucket(states.len()), length: bucket(longest) };
        let mut ids = vec![0; grid.rows()];
        let mut positions = vec![0; grid.rows()];
        let mut hidden = vec![grid.length as i32; grid.batch];
        for (index, state) in states.iter().enumerate() {
            let first = grid.length - state.len();
            hidden[index] = first as i32;
            for (place, token) in state.iter().enumerate() {
                ids[index * grid.length + first + place] = *token as i32;
                positions[index * grid.length + first + place] = place as i32;
            }
        }
        self.name_pass("states");
        let input = PassInput { grid, ids, positions, hidden, left_padded: true, bank: 0, states: None };
        self.keep(states, &input)
    }

    fn plain_state(&mut self, state: &Arc<[u32]>) -> Result<(), ModelError> {
        let grid = Grid { batch: 1, length: state.len() };
        self.name_pass("state");
        let input = PassInput {
            grid,
            ids: state.iter().map(|token| *token as i32).collect(),
            positions: (0..state.len() as i32).collect(),
            hidden: vec![0],
            left_padded: false,
            bank: 0,
            states: None,
        };
        self.keep(&[state], &input)
    }

    fn keep(&mut self, states: &[&Arc<[u32]>], input: &PassInput) -> Result<(), ModelError> {
        let mut memories =
            states.iter().map(|state| self.model.state_memory(state.len())).collect::<Result<Vec<_>, _>>()?;
        self.model.run(input, &mut memories)?;
        for (state, memory) in states.iter().zip(memories) {
            self.kept.push(Kept { tokens: Arc::clone(state), memory });
        }
        Ok(())
    }

    fn padded_rows(&mut self, rows: &[&Row]) -> Result<Vec<Vec<f32>>, ModelError> {
        let longest = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(1);
        let state = rows.iter().map(|row| row.state.len()).max().unwrap_or(1);
        let grid = Grid { batch: count_bucket(rows.len()), length: bucket(longest) };
        self.name_pass("rows");
        self.rows(rows, grid, bank(state))
    }

    fn plain_rows(&mut self, rows: &[&Row]) -> Result<Vec<Vec<f32>>, ModelError> {
        let length = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(1);
        let state = rows.first().map_or(1, |row| row.state.len());
        self.name_pass("plain-rows");
        self.rows(rows, Grid { batch: rows.len(), length }, state)
    }

    /// Runs rows that continue kept states, padded on the right; what fills the batch up repeats its first row.
    fn rows(&mut self, rows: &[&Row], grid: Grid, bank: usize) -> Result<Vec<Vec<f32>>, ModelError> {
        let mut ids = vec![0; grid.rows()];
        let mut positions = vec![0; grid.rows()];
        let mut hidden = Vec::with_capacity(grid.batch);
        let mut states = Vec::with_capacity(grid.batch);
        for index in 0..grid.batch {
            let row = rows.get(index).unwrap_or(&rows[0]);
            let at = index * grid.length;
            for (place, token) in row.tokens.iter().enumerate() {
                ids[at + place] = *token as i32;
            }
            for place in 0..grid.length {
                positions[at + place] = (row.state.len() + place) as i32;
            }
            hidden.push((bank - row.state.len()) as i32);
            let kept = self.kept.iter().find(|kept| kept.tokens == *row.state);
            // The batch computed every state that was not kept, and gives none up before its end.
            let Some(kept) = kept else {
                let reason = "a state is missing".to_owned();
                return Err(backend::BackendError::Contract { operation: "rows", reason }.into());
            };
            states.push(&kept.memory);
        }
        let input =
            PassInput { grid, ids, positions, hidden, left_padded: false, bank, states: Some(states) };
        self.model.run(&input, &mut [])?;
        let read: Vec<(usize, Vec<usize>)> = rows
            .iter()
            .enumerate()
            .map(|(index, row)| {
                let at = index * grid.length;
                (at + row.decide, row.ends.iter().map(|end| at + end).collect())
            })
            .collect();
        self.model.logits(&read)
    }
}

impl Execute for ServiceExecutor {
    fn execute(&mut self, trees: &[Tree]) -> Result<Vec<Outcome>, ExecuteError> {
        if let Some(error) = &self.retired {
            return Err(error.clone());
        }
        let mut outcomes = Vec::with_capacity(trees.len());
        for wave in trees.chunks(SERVICE_REQUESTS) {
            match self.batch(wave) {
                Ok(more) => outcomes.extend(more),
                Err(error) => {
                    let error = ExecuteError { reason: error.to_string() };
                    self.retired = Some(error.clone());
                    return Err(error);
                }
            }
        }
        Ok(outcomes)
    }
}
