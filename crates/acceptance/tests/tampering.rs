//! What a verdict must notice: a good pair passes, and every way to bend one gives INVALID or FAILED.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

use acceptance::{Capture, Invalid, Plan, Report, Status, judge};
use serde_json::{Value, json};

const T: f64 = 2.0;

fn header() -> Value {
    json!({
        "omni_kev_capture": 1, "manifest_sha256": "aa", "corpus_sha256": "bb", "profile": "service",
        "temperature": T, "gpu": "none",
    })
}

fn round4(value: f64) -> f64 {
    format!("{value:.4}").parse().unwrap()
}

/// A consistent line: everything follows from the logits.
fn line(name: &str, kind: &str, logits: &[f32]) -> Value {
    let scaled: Vec<f64> = logits.iter().map(|logit| f64::from(*logit) / T).collect();
    let largest = scaled.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = scaled.iter().map(|logit| (logit - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let p: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
    let listed: serde_json::Map<String, Value> =
        p.iter().enumerate().map(|(index, p)| (index.to_string(), json!(round4(*p)))).collect();
    let best = (0..p.len()).fold(0, |best, index| if p[index] > p[best] { index } else { best });
    let answer = match kind {
        "noul" => json!({ "type": "noul", "noul": round4(p[1]) }),
        "choice" => json!({ "type": "choice", "choice": best.to_string(), "probabilities": listed }),
        _ => {
            let score: f64 = p.iter().enumerate().map(|(level, p)| level as f64 * p).sum();
            json!({ "type": "score", "score": round4(score), "probabilities": listed })
        }
    };
    json!({
        "name": name, "id": "q", "type": kind, "ids_sha256": format!("ids of {name}"),
        "readouts": { "decide": 9, "option_ends": (0..p.len()).collect::<Vec<_>>() },
        "logits": logits.iter().map(|logit| f64::from(*logit)).collect::<Vec<_>>(),
        "logits_hex": logits.iter().map(|logit| format!("{:08x}", logit.to_bits())).collect::<Vec<_>>(),
        "probabilities": p, "usage": { "input_tokens": 50, "output_tokens": 20 }, "answer": answer,
    })
}

/// Enough of everything that all gates pass, with `shift` added to the first logit of every question.
fn lines(shift: f32) -> Vec<Value> {
    let mut lines = vec![header()];
    for index in 0..12 {
        let small = index as f32 * 1e-3;
        lines.push(line(&format!("near choice {index}"), "choice", &[1.0 + shift, 1.0 + small, -3.0]));
        lines.push(line(&format!("near noul {index}"), "noul", &[0.5 + shift, 0.5 + small]));
        lines.push(line(&format!("far choice {index}"), "choice", &[3.0 + shift, -1.0, 0.5]));
        lines.push(line(&format!("score {index}"), "score", &[0.1 + shift, 1.0, 0.3, small]));
    }
    lines.push(json!({ "name": "refused", "error": "too long" }));
    lines
}

fn text(lines: &[Value]) -> Vec<u8> {
    lines.iter().map(|line| format!("{line}\n")).collect::<String>().into_bytes()
}

fn capture(name: &str, lines: &[Value]) -> Result<Capture, Invalid> {
    Capture::parse(name.to_owned(), &text(lines))
}

fn judged(native: &[Value]) -> Result<Report, Invalid> {
    let reference = capture("reference", &lines(0.0))?;
    judge(&reference, &capture("native", native)?, None, Some(&Plan::freeze(&reference)))
}

fn invalid(native: &[Value]) -> String {
    match judged(native) {
        Err(error) => error.to_string(),
        Ok(report) => panic!("judged: {report:?}"),
    }
}

fn failed(native: &[Value]) -> Vec<&'static str> {
    let report = judged(native).unwrap();
    assert!(!report.passed);
    report.gates.iter().filter(|gate| gate.status == Status::Failed).map(|gate| gate.name).collect()
}

#[test]
fn a_near_capture_passes_and_every_near_flip_is_listed() {
    let report = judged(&lines(0.002)).unwrap();
    assert!(report.passed, "{report:?}");
    assert!(report.errors.max > 0.0 && report.errors.max < 1e-3);
    // The first logit rose over rivals that led by less than 0.002: 2 choices and as many nouls (ties go to the first).
    assert_eq!(report.flips.len(), 4, "{:?}", report.flips);
    assert!(report.flips.iter().all(|flip| flip.near));
    let labelled: Vec<_> = report.gates.iter().filter(|gate| gate.status == Status::Absent).collect();
    assert_eq!(labelled.len(), 3);
}

#[test]
fn compressed_captures_are_read() {
    let packed = zstd::encode_all(&text(&lines(0.0))[..], 3).unwrap();
    assert_eq!(Capture::parse("packed".to_owned(), &packed).unwrap().questions().count(), 48);
}

#[test]
fn tampered_cases_are_invalid() {
    let good = lines(0.001);
    let with = |change: &dyn Fn(&mut Vec<Value>)| {
        let mut lines = good.clone();
        change(&mut lines);
        invalid(&lines)
    };
    let missing = with(&|lines| drop(lines.remove(7)));
    assert!(missing.contains("case 7"), "{missing}");
    let missing_last = with(&|lines| drop(lines.pop()));
    assert!(missing_last.contains("the end"), "{missing_last}");
    let duplicate = with(&|lines| lines.insert(3, lines[2].clone()));
    assert!(duplicate.contains("twice"), "{duplicate}");
    let reordered = with(&|lines| lines.swap(2, 3));
    assert!(reordered.contains("case 2"), "{reordered}");
    let extra = with(&|lines| lines.push(line("extra", "noul", &[0.0, 1.0])));
    assert!(extra.contains("the end"), "{extra}");
    let answered = with(&|lines| *lines.last_mut().unwrap() = line("refused", "noul", &[0.0, 1.0]));
    assert!(answered.contains("refused"), "{answered}");
}

#[test]
fn tampered_numbers_are_invalid() {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut lines = lines(0.001);
        change(&mut lines[1]);
        invalid(&lines)
    };
    let not_finite = with(&|line| line["logits_hex"][0] = json!("7fc00000"));
    assert!(not_finite.contains("NaN"), "{not_finite}");
    let options = with(&|line| drop(line["probabilities"].as_array_mut().unwrap().pop()));
    assert!(options.contains("expected 3 values"), "{options}");
    let nicer = with(&|line| line["probabilities"][0] = json!(0.5));
    assert!(nicer.contains("the logits give"), "{nicer}");
    let hex = with(&|line| line["logits"][0] = json!(1.5));
    assert!(hex.contains("logits has 1.5"), "{hex}");
    let returned = with(&|line| line["answer"]["probabilities"]["0"] = json!(0.9));
    assert!(returned.contains("answer.probabilities.0"), "{returned}");
    let choice = with(&|line| line["answer"]["choice"] = json!("2"));
    assert!(choice.contains("answer.choice"), "{choice}");
    let kind = with(&|line| line["type"] = json!("score"));
    assert!(kind.contains("score"), "{kind}");
    // JSON has no NaN: such a line cannot be read at all.
    let mut broken = text(&lines(0.0));
    let at = broken.windows(14).position(|window| window == b"\"probabilities").unwrap();
    broken.splice(at..at, *b"\"x\":NaN,");
    assert!(Capture::parse("native".to_owned(), &broken).unwrap_err().to_string().contains("line 2"));
}

#[test]
fn another_export_corpus_plan_or_reference_is_invalid() {
    for (field, named) in [("manifest_sha256", "export"), ("corpus_sha256", "corpus")] {
        let mut lines = lines(0.0);
        lines[0][field] = json!("cc");
        assert!(invalid(&lines).starts_with(named));
    }
    let mut cooler = lines(0.0);
    cooler[0]["temperature"] = json!(1.0);
    assert!(judged(&cooler).is_err());

    let reference = capture("reference", &lines(0.0)).unwrap();
    let plan = Plan::freeze(&reference);
    let native = capture("native", &lines(0.001)).unwrap();
    let error = |plan: &Plan, reference: &Capture| {
        judge(reference, &native, None, Some(plan)).unwrap_err().to_string()
    };
    let mut softer = plan.clone();
    softer.gates.probability = 0.1;
    assert!(error(&softer, &reference).starts_with("gates"));
    let mut fewer = plan.clone();
    fewer.near.pop();
    assert!(error(&fewer, &reference).starts_with("near-boundary"));
    let changed = capture("reference", &lines(1e-6)).unwrap();
    assert!(error(&plan, &changed).starts_with("reference capture"));
    let exact = capture("exact", &lines(0.0)[..20]).unwrap();
    assert!(judge(&reference, &native, Some(&exact), None).is_err());
}

#[test]
fn captures_that_disagree_fail_by_name() {
    let with = |at: usize, value: Value| {
        let mut lines = lines(0.0);
        lines[at] = value;
        lines
    };
    let mut other = lines(0.0)[1].clone();
    other["ids_sha256"] = json!("others");
    assert_eq!(failed(&with(1, other)), ["inputs"]);
    let mut other = lines(0.0)[1].clone();
    other["usage"]["input_tokens"] = json!(51);
    assert_eq!(failed(&with(1, other)), ["inputs"]);
    // 0.03 in a noul that stays on its side.
    assert_eq!(failed(&with(2, line("near noul 0", "noul", &[0.5, 0.62]))), ["probability"]);
    // A decision that was not near.
    let flipped = failed(&with(3, line("far choice 0", "choice", &[-1.0, 3.0, 0.5])));
    assert_eq!(flipped, ["probability", "far-boundary decisions"]);
}

#[test]
fn a_score_fails_while_every_probability_passes() {
    // 40 levels: 0.4 % moved over 39 of them is 0.15 levels.
    let logits = |end: f32| {
        let mut logits = vec![0.0f32; 40];
        logits[39] = end;
        logits
    };
    let pair = |end: f32| {
        let mut lines = lines(0.0);
        lines.push(line("long scale", "score", &logits(end)));
        lines
    };
    let reference = capture("reference", &pair(0.0)).unwrap();
    let native = capture("native", &pair(0.5)).unwrap();
    let report = judge(&reference, &native, None, None).unwrap();
    let failed: Vec<_> = report.gates.iter().filter(|gate| gate.status == Status::Failed).collect();
    let names: Vec<_> = failed.iter().map(|gate| gate.name).collect();
    assert_eq!(names, ["score from probabilities", "score as returned"], "{report:?}");
}

#[test]
fn rounding_cannot_hide_a_failure() {
    // Both return 0.5100 and 0.5000; unrounded they are 0.010002 apart.
    let noul = |p: f64| line("edge", "noul", &[0.0, (T * (p / (1.0 - p)).ln()) as f32]);
    let pair = |p: f64| {
        let mut lines = lines(0.0);
        lines.push(noul(p));
        lines
    };
    let reference = capture("reference", &pair(0.499_999)).unwrap();
    let native = capture("native", &pair(0.510_001)).unwrap();
    let report = judge(&reference, &native, None, None).unwrap();
    let returned = |capture: &Capture| capture.questions().last().unwrap().answer["noul"].as_f64().unwrap();
    assert_eq!((returned(&reference), returned(&native)), (0.5, 0.51));
    assert!(report.gates.iter().any(|gate| gate.name == "probability" && gate.status == Status::Failed));
}

#[test]
fn labels_are_judged_in_total_and_by_type() {
    let labelled = |shift: f32, kind: &str| {
        let mut lines = lines(0.0);
        for index in 0..40 {
            let logits = if index == 0 { [1.0, 1.0001 + shift] } else { [1.0, 2.0] };
            let mut line = line(&format!("labelled {index}"), kind, &logits);
            line["expected"] = if kind == "noul" { json!(true) } else { json!("1") };
            lines.push(line);
        }
        lines
    };
    let reference = capture("reference", &labelled(0.0, "noul")).unwrap();
    let native = capture("native", &labelled(-0.001, "noul")).unwrap();
    let report = judge(&reference, &native, None, None).unwrap();
    // One of 40 is 2.5 points: over both limits although no probability is.
    let failed: Vec<_> =
        report.gates.iter().filter(|gate| gate.status == Status::Failed).map(|gate| gate.name).collect();
    assert_eq!(failed, ["labelled accuracy"]);
    assert!(report.gates.iter().any(|gate| gate.name == "Brier score" && gate.status == Status::Passed));
}

#[test]
fn the_distance_of_both_from_an_exact_capture_is_reported() {
    let reference = capture("reference", &lines(0.02)).unwrap();
    let native = capture("native", &lines(0.01)).unwrap();
    let exact = capture("exact", &lines(0.0)).unwrap();
    let [theirs, ours] = judge(&reference, &native, Some(&exact), None).unwrap().against_exact.unwrap();
    assert_eq!((theirs.questions, ours.questions), (48, 48));
    assert!(ours.p50 < theirs.p50 && ours.max < theirs.max && ours.p50 > 0.0);
}

#[test]
fn empty_and_torn_captures_are_invalid() {
    for bytes in [&b""[..], b"{}\n", b"\xff\n", b"\x28\xb5\x2f\xfdnonsense"] {
        assert!(Capture::parse("torn".to_owned(), bytes).is_err());
    }
    assert!(capture("torn", &[header()]).is_err());
    let whole = text(&lines(0.0));
    assert!(Capture::parse("torn".to_owned(), &whole[..whole.len() - 40]).is_err());
}
