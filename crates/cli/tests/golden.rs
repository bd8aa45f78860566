//! The binary against the reference service's recorded outputs. Runs only in the golden tier.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use testkit::golden::{Case, cases, folder, numbers};

/// How far a probability may lie from the reference's.
const NEAR: f64 = 1e-5;

fn run(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_omni-kev")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// The golden checkpoint exported, and the corpus beside it.
fn exported(dir: &Path) -> (String, String) {
    let out = text(&dir.join("export"));
    let (adapter, base) = (folder().join("tiny-a/adapter"), folder().join("tiny-a/base"));
    run(&["export", "--adapter", &text(&adapter), "--base", &text(&base), "--out", &out]);
    (out, text(&folder().join("cases.jsonl")))
}

fn answered(case: &Case) -> bool {
    case.status == 200
}

#[test]
fn tokens_and_captures_equal_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let (export, corpus) = exported(dir.path());
    let printed = run(&["tokens", &export, "--corpus", &corpus]);
    let printed: Vec<Value> = printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let all = cases();
    assert_eq!(printed.len(), all.len());
    let mut equal = 0;
    for (case, line) in all.iter().zip(&printed) {
        assert_eq!(line["name"], case.name.as_str());
        if !answered(case) {
            assert!(line["error"].is_string(), "{}: not refused", case.name);
            continue;
        }
        let (texts, tokens) = (&case.reference["texts"], &case.reference["tokens"]);
        assert_eq!(line["state"]["text"], texts["state"], "{}", case.name);
        assert_eq!(line["state"]["ids"], tokens["state_ids"], "{}", case.name);
        assert_eq!(line["input_tokens"], case.reference["input_tokens"], "{}", case.name);
        let (questions, branches) =
            (line["questions"].as_array().unwrap(), tokens["branches"].as_array().unwrap());
        assert_eq!(questions.len(), branches.len(), "{}", case.name);
        for ((question, branch), texts) in
            questions.iter().zip(branches).zip(texts["questions"].as_array().unwrap())
        {
            for key in ["id", "instructions", "options"] {
                assert_eq!(question[key], texts[key], "{} {key}", case.name);
            }
            for key in ["ids", "positions", "decide", "option_ends"] {
                assert_eq!(question[key], branch[key], "{} {key}", case.name);
            }
        }
        equal += 1;
    }

    let out = text(&dir.path().join("capture.jsonl.zst"));
    run(&["capture", &export, "--corpus", &corpus, "--out", &out, "--profile", "exact", "--backend", "cpu"]);
    let capture = acceptance::Capture::read(Path::new(&out)).unwrap();
    let questions: HashMap<(&str, &str), &acceptance::Question> = capture
        .questions()
        .map(|question| ((question.name.as_str(), question.id.as_str()), question))
        .collect();
    let (mut worst, mut count) = (0f64, 0);
    for case in all.iter().filter(|case| answered(case)) {
        let texts = case.reference["texts"]["questions"].as_array().unwrap();
        let recorded = case.reference["a_fp32"]["probabilities"].as_array().unwrap();
        for (text, recorded) in texts.iter().zip(recorded) {
            let question = questions[&(case.name.as_str(), text["id"].as_str().unwrap())];
            let recorded = numbers(recorded);
            assert_eq!(question.probabilities.len(), recorded.len(), "{}", case.name);
            for (ours, theirs) in question.probabilities.iter().zip(&recorded) {
                worst = worst.max((ours - theirs).abs());
            }
            assert_eq!(question.usage.input_tokens, case.reference["input_tokens"].as_u64().unwrap());
            count += 1;
        }
    }
    let refused = all.iter().filter(|case| !answered(case)).count();
    assert_eq!(capture.entries.len(), count + refused);
    println!(
        "{equal} requests with equal tokens, {refused} refused; {count} questions, largest error {worst:.2e}"
    );
    assert!(equal > 400 && worst <= NEAR, "{worst}");
}

/// A served export, killed when dropped.
struct Server(Child, String);

impl Server {
    fn start(export: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_omni-kev"))
            .args(["serve", export, "--port", "0", "--backend", "cpu", "--deadline-ms", "120000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self(child, url)
    }

    fn post(&self, agent: &ureq::Agent, body: &[u8]) -> (u16, String) {
        let request = agent.post(format!("{}/v1/systemone", self.1)).content_type("application/json");
        let mut response = request.send(body).unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every number of an answer before rounding, from the reference's probabilities, and how far ours may lie from it.
fn unrounded(answer: &Value, p: &[f64]) -> Vec<(String, f64, f64)> {
    let count = p.len();
    let best = (0..count).fold(0, |best, index| if p[index] > p[best] { index } else { best });
    let total: f64 = p.iter().sum();
    let mut all = Vec::new();
    if answer["type"] == "noul" {
        return vec![("noul".to_owned(), p[1], NEAR)];
    }
    let keys = answer["probabilities"].as_object().unwrap().keys();
    all.extend(keys.zip(p).map(|(key, p)| (format!("probabilities {key}"), *p, NEAR)));
    if answer["type"] == "choice" {
        let even = 1.0 / count as f64;
        let confidence = if count == 1 { 1.0 } else { (p[best] / total - even) / (1.0 - even) };
        all.push(("confidence".to_owned(), confidence, 2.0 * NEAR));
        return all;
    }
    let levels = NEAR * (count * count) as f64;
    all.push(("score".to_owned(), p.iter().enumerate().map(|(level, p)| level as f64 * p).sum(), levels));
    let centre = (count as f64 - 1.0) / 2.0;
    let spread: f64 = (0..count).map(|level| (level as f64 - centre).abs()).sum::<f64>() / count as f64;
    let distance: f64 =
        p.iter().enumerate().map(|(level, p)| p / total * (level as f64 - best as f64).abs()).sum();
    let confidence = if count == 1 { 1.0 } else { (1.0 - distance / spread).max(0.0) };
    all.push(("confidence".to_owned(), confidence, levels));
    all
}

/// Compares answers; returns how many last decimals differ, all of them beside their rounding boundary.
fn last_decimals(name: &str, ours: &Value, theirs: &Value, probabilities: &Value) -> usize {
    let mut differing = 0;
    let (ours, theirs) = (ours.as_object().unwrap(), theirs.as_object().unwrap());
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{name}");
    for (((id, ours), theirs), p) in ours.iter().zip(theirs.values()).zip(probabilities.as_array().unwrap()) {
        let mut expected = theirs.clone();
        for (path, value, near) in unrounded(theirs, &numbers(p)) {
            let (place, key) = path.split_once(' ').unwrap_or(("", &path));
            let at = |answer: &Value| {
                if place.is_empty() { answer[key].clone() } else { answer[place][key].clone() }
            };
            let (our, their) = (at(ours), at(theirs));
            if our == their {
                continue;
            }
            // Four decimals of neighbouring values, with the boundary between them within reach.
            let boundary = (value * 1e4 - 0.5).round() / 1e4 + 0.5e-4;
            let gap = (our.as_f64().unwrap() - their.as_f64().unwrap()).abs();
            assert!(
                gap < 1.5e-4 && (value - boundary).abs() <= near,
                "{name} {id} {path}: {our} and {their}, unrounded {value}"
            );
            if place.is_empty() {
                expected[key] = our;
            } else {
                expected[place][key] = our;
            }
            differing += 1;
        }
        assert_eq!(ours, &expected, "{name} {id}");
    }
    differing
}

#[test]
fn served_answers_equal_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let (export, _) = exported(dir.path());
    let server = Server::start(&export);
    let agent =
        ureq::Agent::new_with_config(ureq::Agent::config_builder().http_status_as_error(false).build());
    let (mut same, mut differing, mut decimals, mut refused) = (0, 0, 0, 0);
    for case in cases() {
        let (status, body) = server.post(&agent, case.request.as_bytes());
        if !answered(&case) {
            assert!((400..500).contains(&status), "{}: {status} {body}", case.name);
            refused += 1;
            continue;
        }
        assert_eq!(status, 200, "{}: {body}", case.name);
        let recorded = &case.reference["a_fp32"];
        let theirs_text = recorded["answers_text"].as_str().unwrap();
        let body_json: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body_json["model"], case.reference["model"], "{}", case.name);
        assert_eq!(body_json["usage"]["input_tokens"], case.reference["input_tokens"], "{}", case.name);
        if body.contains(&format!("\"answers\":{theirs_text},\"usage\"")) {
            assert_eq!(body_json["usage"]["output_tokens"], recorded["output_tokens"], "{}", case.name);
            same += 1;
            continue;
        }
        let theirs: Value = serde_json::from_str(theirs_text).unwrap();
        let found = last_decimals(&case.name, &body_json["answers"], &theirs, &recorded["probabilities"]);
        assert!(found > 0, "{}: other text, equal values: {body}", case.name);
        differing += 1;
        decimals += found;
    }
    println!(
        "{same} answers byte for byte, {differing} with {decimals} last decimals beside their rounding boundary, \
         {refused} refused"
    );
    std::io::stdout().flush().unwrap();
    assert!(same > 350, "{same}");
}
