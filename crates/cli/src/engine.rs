//! Owns what several commands share: opening an export, reading a request, running trees on the CPU.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use artifact::{Export, OpenOptions, Pins};
use clap::{Args, ValueEnum};
use decision::Tree;
use executor::{CacheLimits, ExecutorOptions, open_cpu};
use processor::{Processor, ProcessorOptions};
use scheduler::Execute;

use crate::Internal;

/// Longest body read from a file or standard input.
const MAX_BODY: u64 = 64 << 20;

/// How requests are prepared.
#[derive(Args)]
pub(crate) struct ProcessorArguments {
    /// Longest state, in tokens
    #[arg(long, env = "OMNI_KEV_MAX_STATE_TOKENS", default_value_t = 65_536)]
    max_state_tokens: usize,
    /// Longest state plus one question, in tokens
    #[arg(long, env = "OMNI_KEV_MAX_ROW_TOKENS", default_value_t = 73_728)]
    max_row_tokens: usize,
    /// Cut a state that is too long instead of refusing it
    #[arg(long, env = "OMNI_KEV_TRUNCATE_STATES")]
    truncate_states: bool,
    /// Add facts about the dates of a state
    #[arg(long, env = "OMNI_KEV_DATE_FACTS")]
    date_facts: bool,
}

impl ProcessorArguments {
    pub(crate) fn processor(&self, export: &Export) -> Processor {
        let options = ProcessorOptions {
            max_state_tokens: self.max_state_tokens,
            max_row_tokens: self.max_row_tokens,
            truncate_states: self.truncate_states,
            date_facts: self.date_facts,
        };
        Processor::new(export.tokenizer(), export.temperature, options)
    }
}

/// Where the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// The best that this build and machine have: the CPU.
    Auto,
    /// This machine's cores.
    Cpu,
}

/// The arithmetic it runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    /// FP32 throughout, over unrounded weights.
    Exact,
}

/// How the model runs.
#[derive(Args)]
pub(crate) struct EngineArguments {
    /// Where the model runs
    #[arg(long, env = "OMNI_KEV_BACKEND", value_enum, default_value = "auto")]
    backend: Backend,
    /// Arithmetic of the model
    #[arg(long, env = "OMNI_KEV_PROFILE", value_enum, default_value = "exact")]
    profile: Profile,
    /// Tokens of a pass, a multiple of 64
    #[arg(long, env = "OMNI_KEV_BATCH_TOKENS", default_value_t = 512)]
    batch_tokens: usize,
    /// Threads; 0 means one per core
    #[arg(long, env = "OMNI_KEV_THREADS", default_value_t = 0)]
    threads: usize,
    /// States kept in the prefix cache
    #[arg(long, env = "OMNI_KEV_PREFIX_CACHE_STATES", default_value_t = 4)]
    prefix_cache_states: usize,
    /// Bytes of the prefix cache
    #[arg(long, env = "OMNI_KEV_PREFIX_CACHE_BYTES", default_value_t = 1 << 30)]
    prefix_cache_bytes: usize,
}

impl EngineArguments {
    /// Name of the profile in captures.
    pub(crate) fn profile(&self) -> &'static str {
        match self.profile {
            Profile::Exact => "exact",
        }
    }

    /// Name of the backend that [`Backend`] resolves to.
    pub(crate) fn backend(&self) -> &'static str {
        match self.backend {
            Backend::Auto | Backend::Cpu => "cpu",
        }
    }

    /// Loads the model.
    pub(crate) fn engine(&self, export: &Export, processor: &Processor) -> Result<impl Execute + use<>> {
        let options = ExecutorOptions {
            pass_tokens: self.batch_tokens,
            max_row_tokens: processor.options().max_row_tokens,
            cache: CacheLimits { states: self.prefix_cache_states, bytes: self.prefix_cache_bytes },
            threads: self.threads,
        };
        Ok(open_cpu(export, &options)?)
    }
}

/// Runs trees; a failure here is never the caller's.
pub(crate) fn execute(engine: &mut impl Execute, trees: &[Tree]) -> Result<Vec<decision::Outcome>> {
    engine.execute(trees).map_err(|error| Internal(error.to_string()).into())
}

/// Opens and verifies an export.
pub(crate) fn open(dir: &Path, pins: Option<&PathBuf>) -> Result<Export> {
    let pins = pins.map(|path| Pins::read(path)).transpose()?;
    Ok(Export::open(dir, &OpenOptions { pins })?)
}

/// Bytes of a file, or of standard input for `-` or no name.
pub(crate) fn read_input(path: Option<&Path>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match path.filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let file =
                std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            file.take(MAX_BODY + 1)
                .read_to_end(&mut bytes)
                .with_context(|| format!("cannot read {}", path.display()))?;
        }
        None => {
            std::io::stdin()
                .lock()
                .take(MAX_BODY + 1)
                .read_to_end(&mut bytes)
                .context("cannot read standard input")?;
        }
    }
    anyhow::ensure!(bytes.len() as u64 <= MAX_BODY, "input is longer than {MAX_BODY} bytes");
    Ok(bytes)
}

/// Right answers by question id.
pub(crate) type Labels = serde_json::Map<String, serde_json::Value>;

/// One line of a corpus.
pub(crate) struct CorpusLine {
    /// The case.
    pub(crate) name: String,
    /// The request's body.
    pub(crate) body: Vec<u8>,
    /// Right answers, where the corpus has them.
    pub(crate) expected: Labels,
}

/// Reads a corpus: `{"name": …, "request": {…}}` or `{"name": …, "request_text": "…"}` a line, with `"expected": {…}` where
/// right answers are known; other keys are ignored.
pub(crate) fn read_corpus(path: &Path) -> Result<(Vec<CorpusLine>, String)> {
    use sha2::Digest;
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let digest = hex::encode(sha2::Sha256::digest(&bytes));
    let text = std::str::from_utf8(&bytes).with_context(|| format!("{} is not UTF-8", path.display()))?;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at = || format!("{} line {}", path.display(), number + 1);
        // Our own reader: a request keeps its numbers' spelling and the order of its keys.
        let json = decision::parse::parse(line.as_bytes()).with_context(at)?;
        let decision::Json::Object(map) = json else { anyhow::bail!("{}: expected an object", at()) };
        let Some(decision::Json::String(name)) = map.get("name") else {
            anyhow::bail!("{}: name: expected a string", at())
        };
        let body = match (map.get("request_text"), map.get("request")) {
            (Some(decision::Json::String(text)), None) => text.clone().into_bytes(),
            (None, Some(request)) => {
                let mut text = String::new();
                processor::pytext::write_json(&mut text, request, processor::pytext::JsonStyle::Compact);
                text.into_bytes()
            }
            _ => anyhow::bail!("{}: expected either request or request_text", at()),
        };
        let expected = match map.get("expected") {
            None => Labels::new(),
            Some(labels) => {
                let mut text = String::new();
                processor::pytext::write_json(&mut text, labels, processor::pytext::JsonStyle::Compact);
                serde_json::from_str(&text).with_context(|| format!("{}: expected", at()))?
            }
        };
        lines.push(CorpusLine { name: name.clone(), body, expected });
    }
    Ok((lines, digest))
}
