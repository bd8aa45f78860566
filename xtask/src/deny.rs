//! Owns the check of dependencies by `cargo deny`: licences, bans and sources, which need the crates alone. Advisories need a
//! database that a gate cannot count on; `cargo xtask advisories` asks for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::python::run;

/// The release that the configuration is written for.
const VERSION: &str = "0.20.2";

/// Checks what needs no database.
///
/// # Errors
/// What `cargo deny` found, or why it cannot be had.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    // It resolves the dependencies of every platform, of which a build fetches those of its own.
    run(
        Command::new("cargo").args(["fetch", "--locked", "--quiet"]).current_dir(root),
        "fetching dependencies",
    )?;
    ask(root, &["--offline", "check", "licenses", "bans", "sources"])
}

/// Checks dependencies against the database of advisories.
///
/// # Errors
/// As [`check`], or that the database cannot be fetched.
pub(crate) fn advisories(root: &Path) -> Result<(), String> {
    ask(root, &["check", "advisories"])
}

fn ask(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new(program(root)?);
    run(command.args(arguments).current_dir(root), "cargo deny")
}

/// The program of this checkout, installed if it is not there. Without optimisation: it reads some hundred files.
fn program(root: &Path) -> Result<PathBuf, String> {
    let folder = root.join("target/tools");
    let program = folder.join("bin/cargo-deny");
    let version = Command::new(&program).arg("--version").output();
    if version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(VERSION)) {
        return Ok(program);
    }
    let mut install = Command::new("cargo");
    install
        .args(["install", "cargo-deny", "--locked", "--force", "--quiet", "--version", VERSION, "--root"])
        .arg(&folder)
        .env("CARGO_TARGET_DIR", folder.join("build"))
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .current_dir(root);
    run(&mut install, "installing cargo-deny")?;
    // Some hundred megabytes that nobody needs again.
    let _ = std::fs::remove_dir_all(folder.join("build"));
    Ok(program)
}
