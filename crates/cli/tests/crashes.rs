//! Exports that end badly: killed at any moment, or out of space. The next run finds nothing half done.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const BINARY: &str = env!("CARGO_BIN_EXE_omni-kev");

fn run(arguments: &[&str]) -> Output {
    Command::new(BINARY).args(arguments).output().unwrap()
}

/// A checkpoint in `dir`, and the arguments that export it to `out`.
fn checkpoint(dir: &Path, out: &Path) -> Vec<String> {
    let path = |name: &str| dir.join(name).display().to_string();
    let made = run(&["synth", "--geometry", "tiny", "--out", &path("checkpoint")]);
    assert!(made.status.success());
    let (adapter, base) = (path("checkpoint/adapter"), path("checkpoint/base"));
    ["export", "--adapter", &adapter, "--base", &base, "--out", &out.display().to_string()]
        .map(str::to_owned)
        .to_vec()
}

#[test]
fn killed_at_any_moment_an_export_is_whole_or_absent() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("export");
    let arguments = checkpoint(dir.path(), &out);
    let (mut absent, mut whole) = (0, 0);
    // The wait grows until an export gets through, so that kills fall between all of its writes on any machine.
    for step in 0..400u32 {
        let mut child = Command::new(BINARY).args(&arguments).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(u64::from(step) * 500));
        child.kill().unwrap();
        child.wait().unwrap();
        if out.exists() {
            let verified = run(&["verify", &out.display().to_string()]);
            assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
            fs::remove_dir_all(&out).unwrap();
            whole += 1;
            if whole == 10 {
                break;
            }
        } else {
            absent += 1;
        }
    }
    println!("{absent} killed before the end, {whole} after");
    assert!(absent > 0 && whole > 0, "{absent} {whole}");
    let finished = Command::new(BINARY).args(&arguments).output().unwrap();
    assert!(finished.status.success(), "{}", String::from_utf8_lossy(&finished.stderr));
    let mut left: Vec<String> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["checkpoint", "export"]);
}

#[test]
fn without_space_an_export_is_refused_and_leaves_nothing() {
    // A limit on the size of files fails a write as a full disk does. Every size ends in another file.
    for (blocks, named) in [("1", "model-00001"), ("2000", "model-00001"), ("3000", "model-00001")] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("export");
        let arguments = checkpoint(dir.path(), &out);
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
        let output =
            Command::new("bash").args(["-c", &script, "bash", BINARY]).args(&arguments).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{blocks}: {message}");
        assert!(message.contains(named) && message.contains("cannot write"), "{blocks}: {message}");
        let left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["checkpoint"], "{blocks}");
    }
}

#[test]
fn two_exports_to_one_place_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("export");
    let arguments = checkpoint(dir.path(), &out);
    let children: Vec<_> = (0..4)
        .map(|_| Command::new(BINARY).args(&arguments).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    let codes: Vec<i32> =
        children.into_iter().map(|child| child.wait_with_output().unwrap().status.code().unwrap()).collect();
    assert!(codes.contains(&0) && codes.iter().all(|code| [0, 2].contains(code)), "{codes:?}");
    let verified = run(&["verify", &out.display().to_string()]);
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
}
