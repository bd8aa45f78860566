//! Owns `omni-kev tokens`: what the model reads of a request.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use processor::{Prepared, Processor, parse_request};
use serde_json::{Value, json};

use crate::engine::{ProcessorArguments, open, read_corpus, read_input};

/// Arguments of `tokens`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// The request; standard input without it or for `-`
    #[arg(conflicts_with = "corpus")]
    file: Option<PathBuf>,
    /// Print one line for every request of a corpus instead
    #[arg(long, env = "OMNI_KEV_CORPUS", value_name = "FILE")]
    corpus: Option<PathBuf>,
    #[command(flatten)]
    processor: ProcessorArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let export = open(&arguments.export, None)?;
    let processor = arguments.processor.alone(&export);
    let mut out = std::io::stdout().lock();
    let Some(corpus) = &arguments.corpus else {
        let body = read_input(arguments.file.as_deref())?;
        writeln!(out, "{}", described(&processor.prepare(&parse_request(&body)?)?))?;
        return Ok(());
    };
    for line in read_corpus(corpus)?.0 {
        let mut value = match prepared(&processor, &line.body) {
            Ok(prepared) => described(&prepared),
            Err(error) => json!({ "error": error.to_string() }),
        };
        value["name"] = line.name.into();
        writeln!(out, "{value}")?;
    }
    Ok(())
}

fn prepared(processor: &Processor, body: &[u8]) -> Result<Prepared, processor::RequestError> {
    processor.prepare(&parse_request(body)?)
}

fn described(prepared: &Prepared) -> Value {
    let start = prepared.tree.state.len();
    let questions: Vec<Value> = prepared
        .tree
        .branches
        .iter()
        .zip(&prepared.texts.questions)
        .zip(prepared.context.questions())
        .map(|((branch, texts), (id, _))| {
            json!({
                "id": id,
                "instructions": texts.instructions,
                "options": texts.options,
                "ids": branch.tokens,
                "positions": [start, start + branch.tokens.len() - 1],
                "decide": branch.decide,
                "option_ends": branch.option_ends,
            })
        })
        .collect();
    json!({
        "state": { "text": prepared.texts.state, "ids": *prepared.tree.state },
        "questions": questions,
        "input_tokens": prepared.context.input_tokens,
    })
}
