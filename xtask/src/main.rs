//! Repository tasks. `cargo xtask ci` is the gate: the same command for people and machines.

mod certificate;
mod chaos;
mod conformance;
mod deny;
mod deploy;
mod fuzz;
mod kernels;
mod python;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.first().map(String::as_str) {
        Some("ci") => ci(),
        Some("tidy") => tidy::check(&root()).map(|()| println!("tidy: ok")),
        Some("kernels") => kernels::build(&root(), &arguments[1..]).map(|_| ()),
        Some("advisories") => deny::advisories(&root()),
        Some("fuzz") => fuzz::all(&root(), arguments.get(1).map_or("60", String::as_str)),
        Some("conformance") => conformance::check(&root(), &binary(&root())),
        Some("deploy-check") => deploy::check(&root(), &binary(&root()), &arguments[1..]),
        Some("chaos") => chaos::run(&root(), binary(&root()), &arguments[1..]),
        _ => {
            Err("usage: cargo xtask ci | tidy | kernels [sm_90a …] | conformance | fuzz [SECONDS] | deploy-check | chaos | advisories".to_owned())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root: the folder above this crate.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// The release build of the product.
fn binary(root: &Path) -> PathBuf {
    root.join("target/release/omni-kev")
}

/// Every step in order; the first that fails ends the gate.
fn ci() -> Result<(), String> {
    let root = root();
    let mut done = 0;
    let mut step = |name: &str, arguments: &[&str], environment: &[(&str, &str)]| {
        println!("=== {name}: cargo {}", arguments.join(" "));
        let started = Instant::now();
        let status = Command::new("cargo")
            .args(arguments)
            .envs(environment.iter().copied())
            .current_dir(&root)
            .status()
            .map_err(|error| format!("{name}: cannot run cargo: {error}"))?;
        if !status.success() {
            return Err(format!("{name} failed: cargo {}", arguments.join(" ")));
        }
        println!("=== {name}: ok, {:.0} s", started.elapsed().as_secs_f64());
        done += 1;
        Ok(())
    };
    step("format", &["fmt", "--all", "--check"], &[])?;
    let features = concat!(
        "artifact/golden,processor/golden,executor/golden,executor/gpu,omni-kev/golden,omni-kev/otlp,",
        "backend-cuda/gpu"
    );
    let lints = ["clippy", "--workspace", "--all-targets", "--features", features, "--", "-D", "warnings"];
    step("lints", &lints, &[])?;
    step("docs", &["doc", "--workspace", "--no-deps"], &[("RUSTDOCFLAGS", "-D warnings")])?;
    tidy::check(&root)?;
    println!("=== tidy: ok");
    timed("dependencies", || deny::check(&root))?;
    // One build for all of them: what these features add are tests and, by `otlp`, one option.
    let golden = root.join("../shared/golden");
    let features = if golden.is_dir() {
        "omni-kev/otlp,artifact/golden,processor/golden,executor/golden,omni-kev/golden"
    } else {
        "omni-kev/otlp"
    };
    step("tests", &["test", "--workspace", "--features", features], &[])?;
    if golden.is_dir() {
        println!("=== golden tier: among the tests");
    } else {
        println!("=== golden tier: NOT RUN, {} is absent", golden.display());
    }
    step("release build", &["build", "--release"], &[])?;
    timed("kernels", || kernels::build(&root, &[]).map(|_| ()))?;
    timed("conformance", || conformance::check(&root, &binary(&root)))?;
    timed("deployment", || deploy::check(&root, &binary(&root), &[]))?;
    println!("=== gate: {} steps passed", done + 5);
    Ok(())
}

fn timed(name: &str, step: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    println!("=== {name}");
    let started = Instant::now();
    step().map_err(|error| format!("{name} failed: {error}"))?;
    println!("=== {name}: ok, {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}
