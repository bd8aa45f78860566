//! Owns `omni-kev trace`: profile `service` against a trace of the reference, layer by layer, naming the first element that
//! differs.

use std::path::PathBuf;

use anyhow::{Context, Result};
use artifact::{TensorFile, TensorType};
use executor::TraceTensor;
use processor::parse_request;
use scheduler::ExecuteError;

use crate::engine::{EngineArguments, ProcessorArguments, open, read_corpus};
use crate::{Denied, Internal};

/// Arguments of `trace`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// Corpus that holds the request
    #[arg(long, env = "OMNI_KEV_CORPUS", value_name = "FILE")]
    corpus: PathBuf,
    /// Name of the request in the corpus
    #[arg(long, env = "OMNI_KEV_CASE", value_name = "NAME")]
    case: String,
    /// What `tools/reference/service.py trace` wrote for the same request
    #[arg(long, env = "OMNI_KEV_REFERENCE", value_name = "FILE")]
    reference: PathBuf,
    /// A layer of which every operation is compared; the reference's trace must have the same one
    #[arg(long, env = "OMNI_KEV_INSIDE", value_name = "LAYER")]
    inside: Option<usize>,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let reference = TensorFile::open(&arguments.reference)?;
    let (lines, _) = read_corpus(&arguments.corpus)?;
    let line = lines
        .iter()
        .find(|line| line.name == arguments.case)
        .with_context(|| format!("{} has no request {:?}", arguments.corpus.display(), arguments.case))?;
    let export = open(&arguments.export, None)?;
    let mut executor = arguments.engine.service_executor(&export, &arguments.processor)?;
    let processor = arguments.processor.alone(&export);
    let prepared = processor.prepare(&parse_request(&line.body)?)?;
    let failed = |error: ExecuteError| Internal(error.to_string());
    let (tensors, logits) = executor.trace(&prepared.tree, arguments.inside).map_err(failed)?;
    let mut first = None;
    for tensor in &tensors {
        let found = compare(tensor, &reference)?;
        println!("{}", found.line);
        if first.is_none() {
            first = found.first;
        }
    }
    let wanted = reference.tensor("logits")?.to_f32();
    anyhow::ensure!(
        wanted.len() == logits.len(),
        "logits: expected {}, found {}",
        wanted.len(),
        logits.len()
    );
    let worst = wanted.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("logits, FP32: {} of them, largest difference {worst:.3e}", logits.len());
    match first {
        None => {
            println!("EQUAL: every bit of {} tensors", tensors.len());
            Ok(())
        }
        Some(place) => Err(Denied(format!("the first difference is {place}")).into()),
    }
}

struct Compared {
    line: String,
    first: Option<String>,
}

fn compare(tensor: &TraceTensor, reference: &TensorFile) -> Result<Compared> {
    let name = &tensor.name;
    let theirs = reference.tensor(name)?;
    anyhow::ensure!(
        theirs.dtype == TensorType::BF16 && theirs.elements() == tensor.values.len(),
        "{name}: expected BF16 {:?}, the reference has {:?} {:?}",
        tensor.shape,
        theirs.dtype,
        theirs.shape
    );
    let wanted = theirs.to_f32();
    let (mut different, mut worst, mut first) = (0_usize, 0.0_f32, None);
    for (index, (ours, theirs)) in tensor.values.iter().map(|value| value.to_f32()).zip(&wanted).enumerate() {
        // Zeros of both signs are one value; a NaN is never equal.
        if ours == *theirs {
            continue;
        }
        different += 1;
        worst = worst.max((ours - theirs).abs());
        if first.is_none() {
            let width = tensor.shape.last().copied().unwrap_or(1).max(1);
            let length = tensor.shape.get(1).copied().unwrap_or(1).max(1);
            let (row, column) = (index / width, index % width);
            first = Some(format!(
                "{name} at row {}, token {}, element {column}: reference {theirs:e}, native {ours:e}",
                row / length,
                row % length
            ));
        }
    }
    let line =
        format!("{name}: {:?}, {different} of {} differ, by {worst:.3e} at most", tensor.shape, wanted.len());
    Ok(Compared { line, first })
}
