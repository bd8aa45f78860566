//! Exports that end badly: killed at any moment, or out of space. The next run finds nothing half done.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

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
    let finish = || {
        let finished = Command::new(BINARY).args(&arguments).output().unwrap();
        assert!(finished.status.success(), "{}", String::from_utf8_lossy(&finished.stderr));
        let mut left: Vec<String> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["checkpoint", "export"]);
        fs::remove_dir_all(&out).unwrap();
    };
    let started = Instant::now();
    finish();
    // Kills fall between all writes of an export as long as this one, and after its end.
    let step = started.elapsed() / 40;
    let (mut absent, mut whole) = (0, 0);
    for round in 0..60 {
        let mut child = Command::new(BINARY).args(&arguments).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(step * round);
        child.kill().unwrap();
        child.wait().unwrap();
        if out.exists() {
            let verified = run(&["verify", &out.display().to_string()]);
            assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
            fs::remove_dir_all(&out).unwrap();
            whole += 1;
        } else {
            absent += 1;
            // What the killed run left does not stand in the way of the next.
            if round % 3 == 0 {
                finish();
            }
        }
    }
    println!("{absent} killed before the end, {whole} after");
    assert!(absent > 0 && whole > 0, "{absent} {whole}");
    finish();
}

#[test]
fn without_space_an_export_is_refused_and_leaves_nothing() {
    // A limit on the size of files fails a write as a full disk does, at the first byte and further on.
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

#[test]
fn on_a_full_disk_an_export_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let arguments = checkpoint(dir.path(), &disk.join("export"));
    // A file system of one's own, where the kernel lets anybody have one; the limit above covers the others.
    let script = "mount -t tmpfs -o size=$0 none \"$1\" || exit 77; disk=$1; shift; \"$@\"; code=$?; ls -A \"$disk\"; exit $code";
    let mut files = std::collections::BTreeSet::new();
    for kilobytes in [64, 1000, 4000, 5200, 6000, 7800, 8100, 8140, 8148, 8152] {
        let output = Command::new("unshare")
            .args(["-rm", "sh", "-c", script, &format!("{kilobytes}k"), &disk.display().to_string(), BINARY])
            .args(&arguments)
            .output();
        let Ok(output) = output else { return println!("NOT RUN: no unshare") };
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.code() == Some(77) || message.contains("unshare failed") {
            return println!("NOT RUN: {message}");
        }
        assert_eq!(output.status.code(), Some(2), "{kilobytes}: {message}");
        assert!(message.contains("No space left on device"), "{kilobytes}: {message}");
        assert!(output.stdout.is_empty(), "{kilobytes}: {}", String::from_utf8_lossy(&output.stdout));
        let file = message.split(".partial/").nth(1).and_then(|rest| rest.split(':').next());
        files.insert(file.unwrap_or(&message).to_owned());
    }
    println!("ran out of space in {files:?}");
    assert!(files.len() > 2, "{files:?}");
}
