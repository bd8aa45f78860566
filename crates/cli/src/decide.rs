//! Owns `omni-kev decide`: one request in, its response body out, no server.

use std::path::PathBuf;

use anyhow::Result;
use artifact::Export;
use processor::parse_request;
use server::Answered;

use crate::Internal;
use crate::engine::{Engine, EngineArguments, ProcessorArguments, open_engine, read_input, run_trees};

/// Arguments of `decide`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// The request; standard input without it or for `-`
    file: Option<PathBuf>,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let body = read_input(arguments.file.as_deref())?;
    let request = parse_request(&body)?;
    // Bad input is refused before a model is loaded.
    let check = |export: &Export| Ok(arguments.processor.alone(export).prepare(&request).map(|_| ())?);
    let (_, engine) = open_engine(&arguments.export, None, &arguments.engine, &arguments.processor, check)?;
    let Engine { mut execute, processor, .. } = engine;
    let prepared = processor.prepare(&request)?;
    let outcome = run_trees(&mut execute, std::slice::from_ref(&prepared.tree))?.remove(0);
    let finished =
        processor.finish(&prepared.context, &outcome.logits).map_err(|error| Internal(error.to_string()))?;
    let answered = Answered {
        model: &prepared.context.model,
        answers: &finished.answers,
        usage: finished.usage,
        cached_tokens: None,
        state_tokens: processor.options().truncate_states.then_some(prepared.context.state_tokens),
        latency: None,
    };
    println!("{}", answered.text());
    Ok(())
}
