//! The binary, an export for it, and a worker that serves it.

#![allow(dead_code, clippy::unwrap_used)] // Test support, shared by test files.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// Runs the binary with arguments and something on standard input, and without this process's own settings.
pub(crate) fn omni_kev(arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_omni-kev"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OMNI_KEV_")) {
        command.env_remove(name);
    }
    let mut child = command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that refuses its arguments does not read.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// One export for every test, made by the binary itself.
pub(crate) fn export() -> &'static Path {
    static EXPORT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    &EXPORT
        .get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let path = |name: &str| dir.path().join(name).display().to_string();
            let made = omni_kev(&["synth", "--geometry", "tiny", "--out", &path("checkpoint")], b"");
            assert_eq!(code(&made), 0, "{}", stderr(&made));
            let (adapter, base, out) = (path("checkpoint/adapter"), path("checkpoint/base"), path("export"));
            let arguments = ["export", "--adapter", &adapter, "--base", &base, "--out", &out];
            let exported = omni_kev(&arguments, b"");
            assert_eq!(code(&exported), 0, "{}", stderr(&exported));
            (dir, PathBuf::from(out))
        })
        .1
}

pub(crate) fn export_text() -> String {
    export().display().to_string()
}

pub(crate) const REQUEST: &[u8] = br#"{"state":"I was charged twice.","questions":{
    "refund":{"type":"noul","instructions":"Is money wanted back?"},
    "team":{"type":"choice","criteria":{"billing":null,"shipping":null}},
    "urgency":{"type":"score","criteria":["low","high"]}}}"#;

/// A served export that is told to stop.
pub(crate) fn served(arguments: &[&str]) -> (std::process::Child, String) {
    use std::io::BufRead;
    let mut child = Command::new(env!("CARGO_BIN_EXE_omni-kev"))
        .args(["serve", &export_text(), "--backend", "cpu", "--port", "0"])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().strip_prefix("listening on ").unwrap().to_owned())
}

pub(crate) fn signal(child: &std::process::Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}
