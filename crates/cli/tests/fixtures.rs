//! The binary against recorded outputs of transformers on a checkpoint that it makes itself: no data outside `fixtures/`.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use std::path::{Path, PathBuf};
use std::process::Command;

use acceptance::{Capture, Entry, distribution};

/// How far a probability may lie from the reference's.
const NEAR: f64 = 1e-5;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny").join(name)
}

fn run(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_omni-kev")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn exact_outputs_equal_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let made = run(&["synth", "--geometry", "tiny", "--seed", "0", "--out", &path("checkpoint")]);
    assert_eq!(made, std::fs::read_to_string(fixture("checkpoint.sha256")).unwrap());
    let (adapter, base, export) = (path("checkpoint/adapter"), path("checkpoint/base"), path("export"));
    run(&["export", "--adapter", &adapter, "--base", &base, "--out", &export]);
    let corpus = fixture("corpus.jsonl").display().to_string();
    let out = path("capture.jsonl");
    run(&["capture", &export, "--corpus", &corpus, "--out", &out, "--profile", "exact", "--backend", "cpu"]);

    let reference = Capture::read(&fixture("reference.jsonl.zst")).unwrap();
    let native = Capture::read(Path::new(&out)).unwrap();
    assert_eq!(reference.header.corpus_sha256, native.header.corpus_sha256);
    assert_eq!(reference.entries.len(), native.entries.len());
    for (theirs, ours) in reference.entries.iter().zip(&native.entries) {
        let (Entry::Question(theirs), Entry::Question(ours)) = (theirs, ours) else {
            unreachable!("the corpus has no request that is refused")
        };
        assert_eq!((&theirs.name, &theirs.id, theirs.kind), (&ours.name, &ours.id, ours.kind));
        assert_eq!(theirs.ids_sha256, ours.ids_sha256, "{} {}", ours.name, ours.id);
        assert_eq!(theirs.readouts, ours.readouts, "{} {}", ours.name, ours.id);
        assert_eq!(theirs.usage.input_tokens, ours.usage.input_tokens, "{} {}", ours.name, ours.id);
    }
    let errors = distribution(&reference, &native);
    assert_eq!((errors.questions, errors.flips), (603, 0));
    assert!(errors.max <= NEAR, "{errors:?}");
}
