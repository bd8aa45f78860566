//! The kept captures of tier 1, bent in every way that docs/acceptance.md lists: `omni-kev accept` must notice each.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

/// The lines of a capture (header first), or of a plan (one line).
type Lines = Vec<Value>;

/// Reference, native, plan.
struct Evidence {
    files: [Lines; 3],
}

const NAMES: [&str; 3] = ["reference.jsonl.zst", "native.jsonl.zst", "plan.json"];
const REFERENCE: usize = 0;
const NATIVE: usize = 1;
const PLAN: usize = 2;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence/service-h200")
}

impl Evidence {
    fn read() -> Self {
        let bytes = |at: usize| fs::read(folder().join(NAMES[at])).unwrap();
        let capture = |at: usize| {
            let text = String::from_utf8(zstd::decode_all(&bytes(at)[..]).unwrap()).unwrap();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        let plan = serde_json::from_slice(&bytes(PLAN)).unwrap();
        Self { files: [capture(REFERENCE), capture(NATIVE), vec![plan]] }
    }

    /// What `omni-kev accept` says of these files after `bend`: exit code and output.
    fn judged(&self, dir: &Path, bend: &dyn Fn(&mut [Lines; 3])) -> (Option<i32>, String) {
        let mut files = self.files.clone();
        bend(&mut files);
        // The plan names the reference by the hash of its content: what was not bent stays the file it was.
        let paths: Vec<PathBuf> = (0..3)
            .map(|at| {
                if files[at] == self.files[at] {
                    return folder().join(NAMES[at]);
                }
                let path = dir.join(at.to_string());
                fs::write(&path, files[at].iter().map(|line| format!("{line}\n")).collect::<String>())
                    .unwrap();
                path
            })
            .collect();
        let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_omni-kev"))
            .args(["accept", "--reference"])
            .arg(&paths[REFERENCE])
            .arg("--native")
            .arg(&paths[NATIVE])
            .arg("--plan")
            .arg(&paths[PLAN])
            .output()
            .unwrap();
        (status.code(), String::from_utf8(stdout).unwrap() + &String::from_utf8(stderr).unwrap())
    }
}

/// Where the first noul stands whose probability of yes is as far from one half as `far` asks.
fn noul(lines: &Lines, far: impl Fn(f64) -> bool) -> usize {
    let matches =
        |line: &Value| line["type"] == "noul" && far(line["probabilities"][1].as_f64().unwrap() - 0.5);
    lines.iter().position(matches).unwrap()
}

/// Writes other logits into a noul so that everything else of the line follows from them.
fn set_noul(line: &mut Value, logits: [f32; 2], temperature: f64) {
    let [no, yes] = logits.map(|logit| f64::from(logit) / temperature);
    let yes = 1.0 / (1.0 + (no - yes).exp());
    line["logits"] = json!(logits.map(f64::from));
    line["logits_hex"] = json!(logits.map(|logit| format!("{:08x}", logit.to_bits())));
    line["probabilities"] = json!([1.0 - yes, yes]);
    line["answer"]["noul"] = json!(format!("{yes:.4}").parse::<f64>().unwrap());
}

fn logits(line: &Value) -> [f32; 2] {
    [0, 1].map(|at| line["logits"][at].as_f64().unwrap() as f32)
}

#[test]
fn every_tampering_is_noticed() {
    let evidence = Evidence::read();
    let dir = tempfile::tempdir().unwrap();
    let (code, text) = evidence.judged(dir.path(), &|_| {});
    assert_eq!(code, Some(0), "{text}");

    type Bend<'a> = dyn Fn(&mut [Lines; 3]) + 'a;
    let temperature = evidence.files[NATIVE][0]["temperature"].as_f64().unwrap();
    let invalid: [(&str, &Bend<'_>, &str); 16] = [
        ("a question missing", &|files| drop(files[NATIVE].remove(5)), "case 5"),
        ("the last questions missing", &|files| files[NATIVE].truncate(1_000), "the end"),
        (
            "a question twice",
            &|files| {
                let copy = files[NATIVE][5].clone();
                files[NATIVE].insert(6, copy);
            },
            "twice",
        ),
        ("two questions in another order", &|files| files[NATIVE].swap(5, 6), "case 5"),
        (
            "a question added",
            &|files| {
                let mut more = files[NATIVE][5].clone();
                more["name"] = json!("added");
                files[NATIVE].push(more);
            },
            "the end",
        ),
        (
            "a question refused that was answered",
            &|files| files[NATIVE][5] = json!({ "name": files[NATIVE][5]["name"], "error": "too long" }),
            "case 5",
        ),
        ("a logit that is not finite", &|files| files[NATIVE][1]["logits_hex"][0] = json!("7f800000"), "inf"),
        (
            "an option less",
            &|files| drop(files[NATIVE][1]["probabilities"].as_array_mut().unwrap().pop()),
            "expected",
        ),
        (
            "a probability that the logits do not give",
            &|files| files[NATIVE][1]["probabilities"][0] = json!(0.25),
            "the logits give",
        ),
        (
            "a returned number that the probabilities do not give",
            &|files| files[NATIVE][1]["answer"]["score"] = json!(0.5),
            "answer.score",
        ),
        ("another export", &|files| files[NATIVE][0]["manifest_sha256"] = json!("00"), "export"),
        ("another corpus", &|files| files[NATIVE][0]["corpus_sha256"] = json!("00"), "corpus"),
        ("another temperature", &|files| files[NATIVE][0]["temperature"] = json!(1.0), "the logits give"),
        ("a softer gate", &|files| files[PLAN][0]["gates"]["probability"] = json!(0.05), "gates"),
        (
            "a near-boundary question left out",
            &|files| drop(files[PLAN][0]["near"].as_array_mut().unwrap().pop()),
            "near-boundary",
        ),
        (
            "another reference than the plan's",
            &|files| {
                let near = noul(&files[REFERENCE], |distance| distance.abs() > 0.2);
                let [no, yes] = logits(&files[REFERENCE][near]);
                set_noul(&mut files[REFERENCE][near], [no, yes + 1e-4], temperature);
            },
            "reference capture",
        ),
    ];
    for (name, bend, reason) in invalid {
        let (code, text) = evidence.judged(dir.path(), bend);
        assert_eq!(code, Some(2), "{name}: {text}");
        assert!(text.contains("INVALID") && text.contains(reason), "{name}: {text}");
    }

    let failed: [(&str, &Bend<'_>, &str); 4] = [
        ("other tokens", &|files| files[NATIVE][1]["ids_sha256"] = json!("00"), "inputs"),
        ("a readout moved", &|files| files[NATIVE][1]["readouts"]["decide"] = json!(1), "inputs"),
        (
            "a probability moved, all else made to follow",
            &|files| {
                let far = noul(&files[NATIVE], |distance| distance > 0.1);
                let [no, yes] = logits(&files[NATIVE][far]);
                set_noul(&mut files[NATIVE][far], [no, yes + 0.3], temperature);
            },
            "probability",
        ),
        (
            "a decision turned, all else made to follow",
            &|files| {
                let far = noul(&files[NATIVE], |distance| distance > 0.02);
                let [no, yes] = logits(&files[NATIVE][far]);
                set_noul(&mut files[NATIVE][far], [yes, no], temperature);
            },
            "far-boundary decisions",
        ),
    ];
    for (name, bend, gate) in failed {
        let (code, text) = evidence.judged(dir.path(), bend);
        assert_eq!(code, Some(1), "{name}: {text}");
        let line = text.lines().find(|line| line.starts_with("FAIL") && line.contains(gate));
        assert!(line.is_some(), "{name}: {text}");
    }
}
