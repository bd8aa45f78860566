//! Owns `omni-kev bench`: model times of the fixed workloads of docs/performance.md, in process, on random tokens.

use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::ValueEnum;
use decision::{Branch, Tree};
use serde_json::{Value, json};

use crate::engine::{Engine, EngineArguments, ProcessorArguments, open_engine, run_trees};
use crate::http_bench;

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// Which workloads, separated by commas
    #[arg(long, env = "OMNI_KEV_WORKLOAD", value_enum, value_delimiter = ',',
          default_values = ["l1", "l2", "l3", "l4", "t1", "s2", "m1"])]
    workload: Vec<Workload>,
    /// Also measure 64 clients against a server of its own, over HTTP
    #[arg(long, env = "OMNI_KEV_HTTP")]
    http: bool,
    /// Runs of each, after two that warm up
    #[arg(long, env = "OMNI_KEV_RUNS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Write all times and the environment, as JSON
    #[arg(long, env = "OMNI_KEV_JSON_FILE", value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

/// A fixed workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Workload {
    /// Six questions about a new text of 45 tokens: 293 tokens.
    L1,
    /// The same text again, its state cached: 248 tokens.
    L2,
    /// Five questions about a new text of 2,200 tokens: 2,400 tokens.
    L3,
    /// The same text again, its state cached: 200 tokens.
    L4,
    /// 64 waiting requests like L1, distinct texts, in one batch.
    T1,
    /// From the start of a server's process to its first answer, three times.
    S1,
    /// Right after start: 200 requests of 200 different lengths.
    S2,
    /// Device memory with 64 cached states of 1,000 tokens.
    M1,
}

const SHORT_TEXT: usize = 45;
const SHORT_QUESTIONS: [usize; 6] = [38, 52, 30, 44, 36, 48];
const LONG_TEXT: usize = 2200;
const LONG_QUESTIONS: [usize; 5] = [40; 5];
const BATCH: usize = 64;
const LENGTHS: usize = 200;

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut results = serde_json::Map::new();
    // Servers of their own come first: a device may not hold two models.
    let own = arguments.engine.forwarded();
    if arguments.workload.contains(&Workload::S1) {
        results.insert("S1".to_owned(), http_bench::start(&arguments.export, &own).context("S1")?);
    }
    if arguments.http {
        let result = http_bench::load(&arguments.export, &own).context("T1 over HTTP")?;
        results.insert("T1_http".to_owned(), result);
    }
    let started = Instant::now();
    let (export, mut engine) =
        open_engine(&arguments.export, None, &arguments.engine, &arguments.processor, |_| Ok(()))?;
    executor::warm_up(&mut engine.execute, &export).map_err(|error| anyhow::anyhow!("{error}"))?;
    let load = started.elapsed();
    println!("{}; verified, loaded and warmed up in {:.2} s", engine.description, load.as_secs_f64());
    let mut bench = Bench {
        engine,
        tokens: Tokens { seed: 1, vocab: export.tokenizer().vocab_size().min(export.geometry.vocab) },
        runs: arguments.runs as usize,
    };
    // What measures the first requests comes first.
    let mut workloads = arguments.workload.clone();
    workloads.retain(|workload| *workload != Workload::S1);
    workloads.sort_by_key(|workload| *workload != Workload::S2);
    for workload in workloads {
        let name = format!("{workload:?}");
        let result = bench.workload(workload).with_context(|| name.clone())?;
        results.insert(name, result);
    }
    if let Some(path) = &arguments.json {
        let report = json!({
            "omni_kev_bench": 1,
            "version": env!("CARGO_PKG_VERSION"),
            "commit": option_env!("OMNI_KEV_COMMIT"),
            "device": bench.engine.description,
            "manifest_sha256": export.manifest_sha256,
            "load_seconds": load.as_secs_f64(),
            "unix_time": SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            "results": results,
        });
        std::fs::write(path, format!("{report:#}\n"))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

struct Bench {
    engine: Engine,
    tokens: Tokens,
    runs: usize,
}

impl Bench {
    fn workload(&mut self, workload: Workload) -> Result<Value> {
        match workload {
            Workload::L1 => self.requests("L1", SHORT_TEXT, &SHORT_QUESTIONS, true),
            Workload::L2 => self.requests("L2", SHORT_TEXT, &SHORT_QUESTIONS, false),
            Workload::L3 => self.requests("L3", LONG_TEXT, &LONG_QUESTIONS, true),
            Workload::L4 => self.requests("L4", LONG_TEXT, &LONG_QUESTIONS, false),
            Workload::T1 => self.together(),
            Workload::S1 => Ok(Value::Null), // measured before, with processes of its own
            Workload::S2 => self.lengths(),
            Workload::M1 => self.memory(),
        }
    }

    /// Milliseconds of one batch.
    fn time(&mut self, trees: &[Tree]) -> Result<f64> {
        let started = Instant::now();
        run_trees(&mut self.engine.execute, trees)?;
        Ok(1e3 * started.elapsed().as_secs_f64())
    }

    fn requests(&mut self, name: &str, text: usize, questions: &[usize], new: bool) -> Result<Value> {
        let kept = self.tokens.tree(text, questions);
        let mut times = Vec::new();
        for index in 0..self.runs + 2 {
            let tree = if new { self.tokens.tree(text, questions) } else { kept.clone() };
            let time = self.time(&[tree])?;
            if index >= 2 {
                times.push(time);
            }
        }
        Ok(summary(name, "ms", times))
    }

    fn together(&mut self) -> Result<Value> {
        let mut rates = Vec::new();
        for index in 0..self.runs.min(12) + 2 {
            let trees: Vec<Tree> =
                (0..BATCH).map(|_| self.tokens.tree(SHORT_TEXT, &SHORT_QUESTIONS)).collect();
            let time = self.time(&trees)?;
            if index >= 2 {
                rates.push(1e3 * BATCH as f64 / time);
            }
        }
        Ok(summary("T1, model time only", "requests/s", rates))
    }

    fn lengths(&mut self) -> Result<Value> {
        let mut times = Vec::new();
        for index in 0..LENGTHS {
            // Every length once, short and long in turn: 7 and 200 have no common factor.
            let tokens = 60 + (index * 7 % LENGTHS) * 2;
            let tree = self.tokens.tree(tokens / 2, &[tokens / 4, tokens / 4]);
            times.push(self.time(&[tree])?);
        }
        Ok(summary("S2", "ms", times))
    }

    fn memory(&mut self) -> Result<Value> {
        let trees: Vec<Tree> = (0..BATCH).map(|_| self.tokens.tree(1000, &[20])).collect();
        for tree in &trees {
            self.time(std::slice::from_ref(tree))?;
        }
        let Some((free, total)) = self.engine.memory.as_ref().and_then(|memory| memory()) else {
            println!("M1: not a GPU, nothing measured");
            return Ok(Value::Null);
        };
        let used = total - free;
        // The figure means what it says only if the cache had room for all; the newest first, since a miss evicts the oldest.
        let mut kept = 0;
        for tree in trees.iter().rev() {
            let outcomes = run_trees(&mut self.engine.execute, std::slice::from_ref(tree))?;
            kept += outcomes.iter().filter(|outcome| outcome.cached_tokens > 0).count();
        }
        println!("M1: {:.2} GB of device memory in use, {kept} of {BATCH} states kept", used as f64 / 1e9);
        Ok(json!({ "used_bytes": used, "total_bytes": total, "states_kept": kept }))
    }
}

pub(crate) fn summary(name: &str, unit: &str, mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[((share * values.len() as f64).ceil() as usize).clamp(1, values.len()) - 1];
    let (p50, p95, p99) = (at(0.5), at(0.95), at(0.99));
    println!("{name}: p50 {p50:.2}, p95 {p95:.2}, p99 {p99:.2} {unit} ({} runs)", values.len());
    json!({ "unit": unit, "p50": p50, "p95": p95, "p99": p99, "all": values })
}

/// Random tokens: no two texts are the same.
struct Tokens {
    seed: u64,
    vocab: usize,
}

impl Tokens {
    fn next(&mut self) -> u32 {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.seed >> 33) % self.vocab as u64) as u32
    }

    fn tree(&mut self, text: usize, questions: &[usize]) -> Tree {
        let state: Vec<u32> = (0..text.max(1)).map(|_| self.next()).collect();
        let branches = questions.iter().enumerate().map(|(index, length)| {
            let options = 2 + index % 2;
            let length = (*length).max(2 * options + 2);
            let option_ends = (0..options).map(|option| length - 2 * (options - option)).collect();
            Branch { tokens: (0..length).map(|_| self.next()).collect(), decide: length - 1, option_ends }
        });
        let branches = branches.collect();
        Tree { state: state.into(), branches }
    }
}
