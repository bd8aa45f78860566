//! The binary as its users run it: exit codes, what goes to which stream, and the demo.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

mod support;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use support::{REQUEST, code, export, export_text, omni_kev, served, signal, stderr, stdout};

fn copied(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn the_demo_answers_three_requests_and_ends() {
    let output = omni_kev(&["demo", "--once", "--port", "0"], b"");
    let text = stdout(&output);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(text.starts_with("listening on http://127.0.0.1:"), "{text}");
    assert_eq!(text.matches("POST http://").count(), 3, "{text}");
    assert_eq!(text.matches("server-timing: app;dur=").count(), 3, "{text}");
    assert_eq!(text.matches("\"input_tokens\"").count(), 2, "{text}");
    assert!(text.contains("(the same answers, bit for bit)"), "{text}");
    assert!(text.contains("weights are random"), "{text}");
}

#[test]
fn the_demo_takes_the_options_that_change_a_response() {
    let output =
        omni_kev(&["demo", "--once", "--port", "0", "--kev-latency-ms", "--cached-token-details"], b"");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("latency_ms") && stdout(&output).contains("cached_tokens"));
}

#[test]
fn the_demo_with_a_key_needs_it_for_its_own_requests() {
    let mut key = tempfile::NamedTempFile::new().unwrap();
    key.write_all(b"secret\n").unwrap();
    let file = key.path().display().to_string();
    let arguments = ["demo", "--once", "--port", "0", "--api-key-file", &file];
    let without = omni_kev(&arguments, b"");
    assert_eq!(code(&without), 2);
    assert!(stderr(&without).contains("--api-key"), "{}", stderr(&without));
    let with = omni_kev(&[&arguments[..], &["--api-key", "secret"]].concat(), b"");
    assert_eq!(code(&with), 0, "{}", stderr(&with));
}

#[test]
fn decide_prints_one_answer_and_nothing_else() {
    let output = omni_kev(&["decide", &export_text()], REQUEST);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let text = stdout(&output);
    let body: serde_json::Value = serde_json::from_str(text.trim_end()).unwrap();
    assert_eq!(text.lines().count(), 1);
    let answers = body["answers"].as_object().unwrap();
    assert_eq!(answers.keys().collect::<Vec<_>>(), ["refund", "team", "urgency"]);
    assert!((0.0..=1.0).contains(&answers["refund"]["noul"].as_f64().unwrap()));
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), REQUEST).unwrap();
    let from_file = omni_kev(&["decide", &export_text(), &file.path().display().to_string()], b"");
    assert_eq!(from_file.stdout, output.stdout);
    let one_thread = omni_kev(&["decide", &export_text(), "--threads", "1", "--batch-tokens", "64"], REQUEST);
    assert_eq!(one_thread.stdout, output.stdout);
}

#[test]
fn tokens_tell_what_the_model_reads() {
    let output = omni_kev(&["tokens", &export_text(), "-"], REQUEST);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let body: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(body["state"]["text"], "I was charged twice.");
    let length = |value: &serde_json::Value| value.as_array().unwrap().len();
    let branches: usize =
        body["questions"].as_array().unwrap().iter().map(|branch| length(&branch["ids"])).sum();
    assert_eq!(body["input_tokens"], length(&body["state"]["ids"]) + branches);
}

#[test]
fn capture_records_answers_and_refusals() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus.jsonl");
    let request = String::from_utf8(REQUEST.to_vec()).unwrap().replace('\n', " ");
    let lines = format!(
        "{{\"name\":\"good\",\"request\":{request}}}\n{{\"name\":\"bad\",\"request_text\":\"{{\"}}\n"
    );
    fs::write(&corpus, lines).unwrap();
    let out = dir.path().join("capture.jsonl");
    let (corpus, out_text) = (corpus.display().to_string(), out.display().to_string());
    let output = omni_kev(&["capture", &export_text(), "--corpus", &corpus, "--out", &out_text], b"");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let lines: Vec<serde_json::Value> =
        fs::read_to_string(&out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["profile"], "exact");
    let named = |name: &str| lines.iter().filter(|line| line["name"] == name).collect::<Vec<_>>();
    assert_eq!(named("good").len(), 3);
    let sum: f64 =
        named("good")[1]["probabilities"].as_array().unwrap().iter().filter_map(|p| p.as_f64()).sum();
    assert!((sum - 1.0).abs() < 1e-6);
    assert!(named("bad")[0]["error"].is_string());
}

#[test]
fn bad_input_is_refused_with_exit_code_2_and_one_message() {
    let export = export_text();
    let cases: [(&[&str], &[u8], &str); 6] = [
        (&["decide", &export], b"{", "JSON"),
        (&["decide", &export], br#"{"state":"x","questions":{}}"#, "questions"),
        (&["decide", &export, "no-such-file.json"], b"", "no-such-file.json"),
        (&["decide", "no-such-export"], REQUEST, "no-such-export"),
        (&["decide", &export, "--batch-tokens", "63"], REQUEST, "63"),
        (&["serve", &export, "--api-key-file", "no-such-key"], b"", "no-such-key"),
    ];
    for (arguments, input, named) in cases {
        let output = omni_kev(arguments, input);
        let message = stderr(&output);
        assert_eq!(code(&output), 2, "{arguments:?}: {message}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(message.starts_with("omni-kev: ") && message.contains(named), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{message}");
    }
    assert_eq!(code(&omni_kev(&["synth", "--geometry", "kev-5b", "--out", "x"], b"")), 2);
    assert_eq!(code(&omni_kev(&[], b"")), 2);
}

#[test]
fn a_flipped_bit_or_a_stray_file_stops_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken");
    let names: Vec<PathBuf> = fs::read_dir(export()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(names.len() >= 8);
    for path in names {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        copied(export(), &broken);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(broken.join(&name), bytes).unwrap();
        let broken_text = broken.display().to_string();
        for arguments in [&["verify", &broken_text][..], &["serve", &broken_text, "--port", "0"]] {
            let output = omni_kev(arguments, b"");
            assert_eq!(code(&output), 2, "{name}");
            assert!(stderr(&output).contains(&name), "{name}: {}", stderr(&output));
            assert!(output.stdout.is_empty());
        }
        fs::remove_dir_all(&broken).unwrap();
    }
    copied(export(), &broken);
    fs::write(broken.join("model.safetensors"), b"").unwrap();
    let output = omni_kev(&["verify", &broken.display().to_string()], b"");
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("model.safetensors"), "{}", stderr(&output));
}

#[test]
fn tier_0_is_accepted_in_any_batching_and_a_missing_line_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (corpus, alone, together) = (path("corpus.jsonl"), path("alone.jsonl.zst"), path("together.jsonl"));
    let run = |arguments: &[&str]| omni_kev(arguments, b"");
    assert_eq!(code(&run(&["corpus", "--questions", "900", "--out", &corpus])), 0);
    let capture = ["capture", &export_text(), "--corpus", &corpus, "--out"];
    assert_eq!(code(&run(&[&capture[..], &[&alone]].concat())), 0);
    let batched = ["--batch", "16", "--batch-tokens", "2048", "--threads", "1"];
    assert_eq!(code(&run(&[&capture[..], &[&together], &batched[..]].concat())), 0);

    let plan = path("plan.json");
    assert_eq!(code(&run(&["accept", "--reference", &alone, "--freeze", &plan])), 0);
    let accept = ["accept", "--reference", &alone, "--native", &together, "--exact", &alone, "--plan", &plan];
    let accepted = run(&accept);
    assert_eq!(code(&accepted), 0, "{}", stdout(&accepted));
    let text = stdout(&accepted);
    assert!(text.ends_with("ACCEPTED\n") && text.contains("max 0.00e0, 0 over the gate, 0 flips"), "{text}");

    let lines = fs::read_to_string(&together).unwrap();
    let torn: Vec<&str> =
        lines.lines().enumerate().filter(|(at, _)| *at != 7).map(|(_, line)| line).collect();
    fs::write(&together, torn.join("\n")).unwrap();
    let invalid = run(&accept);
    assert_eq!(code(&invalid), 2);
    assert!(stderr(&invalid).contains("INVALID"), "{}", stderr(&invalid));
}

#[test]
fn the_readme_shows_a_real_answer() {
    let readme = include_str!("../../../README.md");
    let blocks: Vec<&str> =
        readme.split("```json\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let [request, answer] = blocks[..] else { panic!("{} blocks", blocks.len()) };
    let output = omni_kev(&["decide", &export_text(), "--backend", "cpu"], request.as_bytes());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let json = |text: &str| -> serde_json::Value { serde_json::from_str(text).unwrap() };
    assert_eq!(json(&stdout(&output)), json(answer));
}

#[test]
fn a_stop_signal_ends_with_exit_code_0_and_a_second_one_at_once() {
    for name in ["-TERM", "-INT"] {
        let (mut child, _) = served(&["--drain-delay", "0"]);
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(0), "{name}");
    }
    let (mut child, url) = served(&["--drain-delay", "600000"]);
    signal(&child, "-TERM");
    let agent =
        ureq::Agent::new_with_config(ureq::Agent::config_builder().http_status_as_error(false).build());
    // Still serving, and saying that it will not for long.
    while agent.get(format!("{url}/ready")).call().unwrap().status() != 503 {}
    let answered = agent.post(format!("{url}/v1/systemone")).content_type("application/json").send(REQUEST);
    assert_eq!(answered.unwrap().status(), 200);
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn other_machines_need_a_key_or_the_word_insecure() {
    let arguments = ["serve", &export_text(), "--backend", "cpu", "--port", "0", "--host", "0.0.0.0"];
    let refused = omni_kev(&arguments, b"");
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("--api-key-file") && stderr(&refused).contains("--insecure"));
    assert!(refused.stdout.is_empty());
    let (child, _) = served(&["--host", "0.0.0.0", "--insecure", "--drain-delay", "0"]);
    signal(&child, "-TERM");
    assert_eq!(code(&child.wait_with_output().unwrap()), 0);
}

#[test]
fn requests_are_logged_without_their_text() {
    let arguments = ["--log-level", "info", "--log-format", "json", "--drain-delay", "0"];
    let (child, url) = served(&arguments);
    let agent = ureq::Agent::new_with_defaults();
    agent.post(format!("{url}/v1/systemone")).content_type("application/json").send(REQUEST).unwrap();
    signal(&child, "-TERM");
    let output = child.wait_with_output().unwrap();
    let log = stderr(&output);
    let line: serde_json::Value =
        serde_json::from_str(log.lines().find(|line| line.contains("/v1/systemone")).unwrap()).unwrap();
    assert_eq!((&line["fields"]["status"], &line["fields"]["route"]), (&200.into(), &"/v1/systemone".into()));
    assert!(line["fields"]["model_ms"].as_f64().unwrap() > 0.0, "{line}");
    assert!(!log.contains("charged"), "{log}");
}
