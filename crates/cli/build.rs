//! Puts the commit into the binary, so that captures, exports and figures name the build they come from.

use std::path::Path;
use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn main() {
    println!("cargo::rerun-if-env-changed=OMNI_KEV_COMMIT");
    // Any change of a source makes this run again: a build of changed sources must not name a commit alone.
    println!("cargo::rerun-if-changed=..");
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]).filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    // Whoever builds without a repository may name the commit.
    if std::env::var_os("OMNI_KEV_COMMIT").is_some() {
        return;
    }
    if let Some(commit) = git(&["rev-parse", "HEAD"]) {
        let changed =
            git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|list| !list.is_empty());
        println!("cargo::rustc-env=OMNI_KEV_COMMIT={commit}{}", if changed { "-changed" } else { "" });
    }
}
