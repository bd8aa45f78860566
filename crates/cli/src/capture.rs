//! Owns `omni-kev capture`: unrounded outputs for a corpus, with all that is needed to recompute a verdict from them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use artifact::Export;
use processor::pytext::{self, JsonStyle};
use processor::{Prepared, parse_request};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::Internal;
use crate::engine::{
    CorpusLine, Engine, EngineArguments, Labels, ProcessorArguments, open_engine, read_corpus, run_trees,
};

/// Arguments of `capture`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// Requests, one JSON object a line
    #[arg(long, env = "OMNI_KEV_CORPUS", value_name = "FILE")]
    corpus: PathBuf,
    /// File to write, compressed when it ends in .zst; `-` for standard output
    #[arg(long, env = "OMNI_KEV_OUT", value_name = "FILE")]
    out: PathBuf,
    /// Requests that share a batch
    #[arg(long, env = "OMNI_KEV_BATCH", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: u16,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let (lines, corpus_sha256) = read_corpus(&arguments.corpus)?;
    let (export, mut engine) =
        open_engine(&arguments.export, None, &arguments.engine, &arguments.processor, |_| Ok(()))?;
    let captured = record(&lines, &corpus_sha256, &export, &mut engine, arguments.batch)?;
    write_out(&arguments.out, captured.text.as_bytes())?;
    let Captured { questions, refused, .. } = captured;
    eprintln!("captured {questions} questions of {} requests, {refused} refused", lines.len());
    Ok(())
}

/// A capture in memory.
pub(crate) struct Captured {
    /// The file's text.
    pub(crate) text: String,
    /// Questions in it.
    pub(crate) questions: usize,
    /// Requests that were refused.
    pub(crate) refused: usize,
}

/// Runs a corpus, `batch` requests together.
pub(crate) fn record(
    lines: &[CorpusLine],
    corpus_sha256: &str,
    export: &Export,
    engine: &mut Engine,
    batch: u16,
) -> Result<Captured> {
    let mut text = String::new();
    let mut push = |value: serde_json::Value| {
        text.push_str(&value.to_string());
        text.push('\n');
    };
    push(json!({
        "omni_kev_capture": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "commit": option_env!("OMNI_KEV_COMMIT"),
        "manifest_sha256": export.manifest_sha256,
        "corpus_sha256": corpus_sha256,
        "profile": engine.profile.name(),
        "form": engine.form,
        "backend": engine.backend,
        "device": engine.description,
        "identity": engine.identity,
        "batch": batch,
        "temperature": export.temperature,
        "unix_time": unix_time(),
    }));
    let (mut questions, mut refused) = (0, 0);
    for batch in lines.chunks(usize::from(batch)) {
        let mut ready: Vec<(&str, &Labels, Prepared)> = Vec::new();
        for line in batch {
            match parse_request(&line.body).and_then(|request| engine.processor.prepare(&request)) {
                Ok(prepared) => ready.push((&line.name, &line.expected, prepared)),
                Err(error) => {
                    refused += 1;
                    push(json!({ "name": line.name, "error": error.to_string() }));
                }
            }
        }
        let trees: Vec<_> = ready.iter().map(|(_, _, prepared)| prepared.tree.clone()).collect();
        let outcomes = run_trees(&mut engine.execute, &trees)?;
        for ((name, expected, prepared), outcome) in ready.iter().zip(outcomes) {
            let finished = engine
                .processor
                .finish(&prepared.context, &outcome.logits)
                .map_err(|error| Internal(error.to_string()))?;
            let answers: serde_json::Value =
                serde_json::from_str(&pytext::answers(&finished.answers, JsonStyle::Compact))?;
            for (index, (id, question_type)) in prepared.context.questions().enumerate() {
                let branch = &prepared.tree.branches[index];
                let mut ids = Sha256::new();
                for token in prepared.tree.state.iter().chain(&branch.tokens) {
                    ids.update(token.to_le_bytes());
                }
                let logits = &outcome.logits[index];
                push(json!({
                    "name": name,
                    "id": id,
                    "type": question_type.as_str(),
                    "ids_sha256": hex::encode(ids.finalize()),
                    "readouts": { "decide": branch.decide, "option_ends": branch.option_ends },
                    "logits": logits.iter().map(|value| f64::from(*value)).collect::<Vec<_>>(),
                    "logits_hex": logits.iter().map(|value| format!("{:08x}", value.to_bits())).collect::<Vec<_>>(),
                    "probabilities": finished.probabilities[index].iter().map(|p| f64::from(*p)).collect::<Vec<_>>(),
                    "usage": {
                        "input_tokens": finished.usage.input_tokens,
                        "output_tokens": finished.usage.output_tokens,
                    },
                    "answer": answers[id],
                    "expected": expected.get(id),
                }));
                questions += 1;
            }
        }
    }
    Ok(Captured { text, questions, refused })
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Writes a whole file or nothing.
pub(crate) fn write_out(path: &Path, bytes: &[u8]) -> Result<()> {
    if path == Path::new("-") {
        return Ok(std::io::stdout().lock().write_all(bytes)?);
    }
    let fail = || format!("cannot write {}", path.display());
    let compressed = path.extension().is_some_and(|extension| extension == "zst");
    let data = if compressed { zstd::encode_all(bytes, 3).with_context(fail)? } else { bytes.to_vec() };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(fail)?;
    file.write_all(&data).with_context(fail)?;
    file.as_file().sync_all().with_context(fail)?;
    file.persist(path).with_context(fail)?;
    Ok(())
}
