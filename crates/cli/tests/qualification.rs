//! Qualification from end to end: recorded on this machine, looked up at start, never counted for anything else.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_omni-kev"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("OMNI_KEV_")) {
        command.env_remove(name);
    }
    command.args(arguments);
    command
}

fn run(arguments: &[&str], expected: i32) -> String {
    let Output { status, stdout, stderr } = command(arguments).output().unwrap();
    let text = String::from_utf8(stdout).unwrap() + &String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(expected), "{arguments:?}: {text}");
    text
}

/// A server that is killed when dropped.
struct Served {
    child: Child,
    address: String,
}

impl Served {
    fn start(arguments: &[&str]) -> Self {
        let mut child = command(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.trim().strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { child, address }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_record_is_made_found_and_insisted_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (export, corpus, few) = (at("export"), at("corpus.jsonl"), at("few.jsonl"));
    run(&["synth", "--geometry", "tiny", "--out", &at("checkpoint")], 0);
    let (adapter, base) = (at("checkpoint/adapter"), at("checkpoint/base"));
    run(&["export", "--adapter", &adapter, "--base", &base, "--out", &export], 0);
    run(&["corpus", "--questions", "900", "--state-words", "20", "--out", &corpus], 0);
    run(&["corpus", "--questions", "5", "--state-words", "20", "--out", &few], 0);
    for (requests, out) in [(&corpus, at("reference.jsonl")), (&few, at("few-reference.jsonl"))] {
        run(&["capture", &export, "--backend", "cpu", "--corpus", requests, "--out", &out], 0);
    }
    let serve = ["serve", &export, "--backend", "cpu", "--port", "0"];
    let with =
        |more: &[&str]| -> Vec<String> { serve.iter().chain(more).map(|word| (*word).to_owned()).collect() };
    let words = |list: &[String]| -> Vec<String> { list.to_vec() };
    let refuse = |more: &[&str], expected: &str| {
        let list = with(more);
        let list: Vec<&str> = list.iter().map(String::as_str).collect();
        let text = run(&list, 2);
        assert!(text.contains(expected), "{text}");
    };
    let start = |more: &[&str]| {
        let list = words(&with(more));
        Served::start(&list.iter().map(String::as_str).collect::<Vec<_>>())
    };

    // Nothing recorded: served, and said so; refused where a record is insisted on.
    let served = start(&[]);
    assert!(served.get("/v1/models").contains("not qualified"));
    assert!(served.get("/metrics").contains("omni_kev_qualification{state=\"unqualified\"} 1"));
    drop(served);
    refuse(&["--require-qualified"], "is not qualified: expected a record");

    // Too few near-boundary questions: a gate fails, and the worker refuses unless told.
    let qualify = |corpus: &str, reference: &str, expected: i32| {
        let arguments =
            ["qualify", &export, "--backend", "cpu", "--corpus", corpus, "--reference", reference];
        run(&arguments, expected)
    };
    let text = qualify(&few, &at("few-reference.jsonl"), 1);
    assert!(text.contains("FAILED") && text.contains("not qualified"), "{text}");
    refuse(&[], "near-boundary choices");
    let served = start(&["--allow-failed-qualification"]);
    assert!(served.get("/v1/models").contains("qualification failed"));
    drop(served);

    // Every gate passed: found, shown, and enough for whoever insists.
    let text = qualify(&corpus, &at("reference.jsonl"), 0);
    assert!(text.contains("ACCEPTED"), "{text}");
    let served = start(&["--require-qualified"]);
    assert!(served.get("/v1/models").contains(", qualified"));
    assert!(served.get("/metrics").contains("omni_kev_qualification{state=\"qualified\"} 1"));
    drop(served);
    let folder = dir.path().join("export.qualifications");
    let kept: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(kept.iter().any(|name| name.ends_with(".capture.jsonl.zst")), "{kept:?}");

    // The capture that was kept gives the same verdict to anybody.
    let capture = kept.iter().find(|name| name.ends_with(".zst")).unwrap();
    let native = folder.join(capture).display().to_string();
    let plan = at("plan.json");
    run(&["accept", "--reference", &at("reference.jsonl"), "--freeze", &plan], 0);
    run(&["accept", "--reference", &at("reference.jsonl"), "--native", &native, "--plan", &plan], 0);

    // Neither another folder nor another export has it, and a changed record is not believed.
    refuse(&["--require-qualified", "--qualifications", &at("elsewhere")], "is not qualified");
    let record = kept.iter().find(|name| name.ends_with(".json")).unwrap();
    let path = folder.join(record);
    let changed = fs::read_to_string(&path).unwrap().replace("\"flips\": 0", "\"flips\": 1");
    fs::write(&path, changed).unwrap();
    refuse(&[], "changed after it was written");
    assert!(Path::new(&export).join("kev_export.json").exists());
}

#[test]
fn the_evidence_that_is_kept_gives_its_verdict_again() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence/service-h200");
    let at = |name: &str| folder.join(name).display().to_string();
    let (reference, native, plan) = (at("reference.jsonl.zst"), at("native.jsonl.zst"), at("plan.json"));
    let text = run(&["accept", "--reference", &reference, "--native", &native, "--plan", &plan], 0);
    assert!(
        text.contains("2000 questions") && text.contains("max 4.17e-7, 0 over the gate, 0 flips"),
        "{text}"
    );
    assert!(text.contains("near-boundary choices: 79") && text.contains("near-boundary nouls: 32"), "{text}");
}
