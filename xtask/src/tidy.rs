//! Owns the tidy rules: what the compiler does not check and a reader relies on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates of ours that each crate may depend on outside tests (docs/decisions/0001-crates.md).
const DIRECTION: [(&str, &[&str]); 15] = [
    ("decision", &[]),
    ("backend", &[]),
    ("artifact", &["decision"]),
    ("scheduler", &["decision"]),
    ("processor", &["artifact", "decision"]),
    ("backend-cpu", &["backend"]),
    ("backend-cuda", &["backend"]),
    ("model", &["backend", "artifact", "decision"]),
    ("executor", &["scheduler", "model", "backend", "backend-cpu", "backend-cuda", "artifact", "decision"]),
    ("server", &["processor", "scheduler", "executor", "artifact", "decision"]),
    (
        "omni-kev",
        &[
            "server",
            "processor",
            "scheduler",
            "executor",
            "model",
            "backend-cpu",
            "artifact",
            "acceptance",
            "decision",
        ],
    ),
    ("testkit", &["artifact", "backend", "decision", "scheduler"]),
    ("acceptance", &[]),
    ("xtask", &[]),
    ("fuzz", &[]),
];

/// Files that may contain unsafe code: memory maps, the tiles that threads write side by side, the benchmark that calls the
/// matrix-product crate by itself; device code besides.
const UNSAFE: [&str; 3] =
    ["crates/artifact/src/map.rs", "crates/backend-cpu/src/tiles.rs", "crates/backend-cpu/benches/linear.rs"];

/// Longest source file without splitting it.
const MAX_LINES: usize = 800;

/// Checks every rule.
///
/// # Errors
/// Every violation, one a line.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let mut wrong = Vec::new();
    for path in sources(&root.join("crates")).into_iter().chain(sources(&root.join("xtask"))) {
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        wrong.extend(file_rules(&name, &text));
    }
    wrong.extend(direction(root)?);
    if wrong.is_empty() { Ok(()) } else { Err(format!("tidy:\n  {}", wrong.join("\n  "))) }
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn file_rules(name: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    if !text.starts_with("//!") {
        wrong.push(format!("{name}: does not open with //! saying what it owns"));
    }
    if text.lines().count() > MAX_LINES {
        wrong.push(format!("{name}: {} lines, more than {MAX_LINES}", text.lines().count()));
    }
    // Spelled in two halves, so that this file does not break its own rules.
    for word in [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("#[ign", "ore]"), concat!("/ro", "ot/")] {
        if text.contains(word) {
            wrong.push(format!("{name}: contains {word}"));
        }
    }
    let allowed = UNSAFE.contains(&name) || name.starts_with("crates/backend-cuda/");
    if !allowed && text.contains(concat!("allow(uns", "afe_code)")) {
        wrong.push(format!("{name}: may not contain unsafe code"));
    }
    wrong
}

/// Dependencies of ours as cargo sees them, against the table.
fn direction(root: &Path) -> Result<Vec<String>, String> {
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("cannot run cargo metadata: {error}"))?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default().to_owned();
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        let ours = dependencies
            .filter(|dependency| dependency["kind"].is_null() && dependency["path"].is_string())
            .filter_map(|dependency| dependency["name"].as_str().map(str::to_owned));
        edges.entry(name).or_default().extend(ours);
    }
    Ok(wrong_edges(&edges))
}

fn wrong_edges(edges: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, dependencies) in edges {
        let Some((_, allowed)) = DIRECTION.iter().find(|(known, _)| known == name) else {
            wrong.push(format!("{name}: a crate without a place in the table of directions"));
            continue;
        };
        for dependency in dependencies.iter().filter(|dependency| !allowed.contains(&dependency.as_str())) {
            wrong.push(format!("{name} may not depend on {dependency}"));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_tidy() {
        check(&crate::root()).unwrap();
    }

    #[test]
    fn every_file_rule_can_fail() {
        assert!(file_rules("a.rs", "//! Owns a.\n").is_empty());
        let long = format!("//! x\n{}", "\n".repeat(MAX_LINES));
        let broken = [
            "fn main() {}".to_owned(),
            long,
            format!("//! x\n// {}\n", concat!("TO", "DO")),
            format!("//! x\n#![{}]\n", concat!("allow(uns", "afe_code)")),
        ];
        for text in broken {
            assert_eq!(file_rules("a.rs", &text).len(), 1, "{text:.40}");
        }
        assert!(
            file_rules(UNSAFE[0], &format!("//! x\n#![{}]\n", concat!("allow(uns", "afe_code)"))).is_empty()
        );
    }

    #[test]
    fn a_wrong_direction_is_found() {
        let edges =
            |from: &str, to: &str| BTreeMap::from([(from.to_owned(), BTreeSet::from([to.to_owned()]))]);
        assert!(wrong_edges(&edges("model", "backend")).is_empty());
        assert_eq!(wrong_edges(&edges("scheduler", "model")).len(), 1);
        assert_eq!(wrong_edges(&edges("stranger", "decision")).len(), 1);
    }
}
