//! Owns `omni-kev accept`: the verdict on a native capture, and the plan that is frozen before one is made.

use std::path::PathBuf;

use acceptance::{Capture, Distribution, GATES, Plan, Report, Status, judge};
use anyhow::{Context, Result};

use crate::Denied;

/// Arguments of `accept`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Capture of the reference
    #[arg(long, env = "OMNI_KEV_REFERENCE", value_name = "FILE")]
    reference: PathBuf,
    /// Capture to judge
    #[arg(long, env = "OMNI_KEV_NATIVE", value_name = "FILE", required_unless_present = "freeze")]
    native: Option<PathBuf>,
    /// Capture of the same weights in FP32, to report how far both are from it
    #[arg(long, env = "OMNI_KEV_EXACT", value_name = "FILE")]
    exact: Option<PathBuf>,
    /// Plan that was frozen before the native run
    #[arg(long, env = "OMNI_KEV_PLAN", value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Write the plan for this reference and judge nothing
    #[arg(long, env = "OMNI_KEV_FREEZE", value_name = "FILE", conflicts_with_all = ["native", "plan"])]
    freeze: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long, env = "OMNI_KEV_JSON")]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let invalid = "INVALID";
    let reference = Capture::read(&arguments.reference).context(invalid)?;
    if let Some(path) = &arguments.freeze {
        let plan = Plan::freeze(&reference);
        let text = serde_json::to_string_pretty(&plan)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("froze gates, corpus, export and {} near-boundary questions", plan.near.len());
        return Ok(());
    }
    let native = arguments.native.as_ref().context("--native: expected a capture to judge")?;
    let native = Capture::read(native).context(invalid)?;
    let exact = arguments.exact.as_ref().map(|path| Capture::read(path)).transpose().context(invalid)?;
    let plan = arguments.plan.as_ref().map(|path| Plan::read(path)).transpose().context(invalid)?;
    let report = judge(&reference, &native, exact.as_ref(), plan.as_ref()).context(invalid)?;
    if arguments.json {
        println!("{}", serde_json::json!({ "gates": GATES, "report": report }));
    } else {
        print(&report);
    }
    if report.passed { Ok(()) } else { Err(Denied("a gate failed".to_owned()).into()) }
}

/// Prints a report: gates, flips, distributions, verdict.
pub(crate) fn print(report: &Report) {
    for gate in &report.gates {
        let word = match gate.status {
            Status::Passed => "PASS",
            Status::Failed => "FAIL",
            Status::Absent => "NONE",
        };
        println!("{word}  {}: {}", gate.name, gate.detail);
    }
    for flip in &report.flips {
        let place = if flip.near { "near" } else { "far" };
        println!("FLIP  {place}: {:?} {} {:?}", flip.name, flip.kind, flip.id);
        println!("      reference {:?}", flip.reference);
        println!("      native    {:?}", flip.native);
    }
    distribution("native from reference", &report.errors);
    if let Some([reference, native]) = &report.against_exact {
        distribution("reference from exact", reference);
        distribution("native from exact", native);
    }
    println!("{}", if report.passed { "ACCEPTED" } else { "FAILED" });
}

fn distribution(name: &str, d: &Distribution) {
    println!(
        "NOISE {name}: {} questions, p50 {:.2e}, p90 {:.2e}, p99 {:.2e}, max {:.2e}, {} over the gate, {} flips",
        d.questions, d.p50, d.p90, d.p99, d.max, d.over_gate, d.flips
    );
}
