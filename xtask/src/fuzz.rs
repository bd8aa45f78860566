//! Owns the slow tier: every fuzz target for a bounded time. It needs a nightly compiler and cargo-fuzz, so the gate does not
//! run it.

use std::path::Path;
use std::process::Command;

use crate::python::run;

const TARGETS: [&str; 4] = ["pickle", "safetensors", "manifest", "request"];

/// Runs every target for so many seconds.
///
/// # Errors
/// The target that found something, or what is missing here.
pub(crate) fn all(root: &Path, seconds: &str) -> Result<(), String> {
    seconds.parse::<u32>().map_err(|_| format!("{seconds:?}: expected a number of seconds"))?;
    for target in TARGETS {
        let corpus = root.join("fuzz/seeds").join(target);
        let grown = root.join("target/fuzz-corpus").join(target);
        std::fs::create_dir_all(&grown).map_err(|error| format!("{}: {error}", grown.display()))?;
        let mut command = Command::new("cargo");
        command
            .args(["+nightly", "fuzz", "run", "--fuzz-dir"])
            .arg(root.join("fuzz"))
            .arg("--target-dir")
            .arg(root.join("target/fuzz"))
            .arg(target)
            .arg(&grown)
            .arg(&corpus)
            .args(["--", "-print_final_stats=1", "-timeout=10", "-rss_limit_mb=2048"])
            .arg(format!("-max_total_time={seconds}"))
            .current_dir(root);
        run(&mut command, "cargo fuzz (rustup toolchain install nightly; cargo install cargo-fuzz)")?;
        println!("=== fuzz {target}: nothing found in {seconds} s");
    }
    Ok(())
}
