//! Owns the verdict: whether a native capture agrees with a reference, gate by gate.

use serde::Serialize;

use crate::capture::{Capture, Entry, Kind, Question};
use crate::gates::GATES;
use crate::noise::{Distribution, distribution, error};
use crate::{Invalid, Plan};

/// Outcome of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Within its limit.
    Passed,
    /// Over its limit.
    Failed,
    /// The corpus has nothing that it applies to.
    Absent,
}

/// One gate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gate {
    /// Its name.
    pub name: &'static str,
    /// Its outcome.
    pub status: Status,
    /// What was measured, against which limit, and where.
    pub detail: String,
}

/// A decision near its boundary that came out differently. Not a failure; always reported.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flip {
    /// The case.
    pub name: String,
    /// The question.
    pub id: String,
    /// Its type.
    pub kind: &'static str,
    /// Whether the reference is near its boundary there.
    pub near: bool,
    /// The reference's probabilities.
    pub reference: Vec<f64>,
    /// The native ones.
    pub native: Vec<f64>,
}

/// The verdict on two captures that belong together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Whether every gate that applies passed.
    pub passed: bool,
    /// The gates.
    pub gates: Vec<Gate>,
    /// Every decision that differs.
    pub flips: Vec<Flip>,
    /// Errors between reference and native.
    pub errors: Distribution,
    /// Errors of the reference and of the native capture against an exact one, where there is one.
    pub against_exact: Option<[Distribution; 2]>,
}

/// Judges a native capture.
///
/// # Errors
/// [`Invalid`] when the captures, the plan or the exact capture do not belong together: cases missing, added, repeated or
/// in another order, other corpora or exports, changed gates, a changed reference.
pub fn judge(
    reference: &Capture,
    native: &Capture,
    exact: Option<&Capture>,
    plan: Option<&Plan>,
) -> Result<Report, Invalid> {
    if let Some(plan) = plan {
        plan.check(reference)?;
    }
    together(reference, native)?;
    if let Some(exact) = exact {
        together(reference, exact)?;
    }
    let pairs: Vec<(&Question, &Question)> = reference.questions().zip(native.questions()).collect();
    let flips = flips(&pairs);
    let gates = vec![
        inputs(&pairs),
        probability(&pairs),
        scores("score from probabilities", &pairs, |question| Some(question.score())),
        scores("score as returned", &pairs, |question| question.answer.get("score")?.as_f64()),
        coverage("near-boundary choices", Kind::Choice, &pairs),
        coverage("near-boundary nouls", Kind::Noul, &pairs),
        far(&flips),
        accuracy(&pairs),
        brier(&pairs),
        score_error(&pairs),
    ];
    Ok(Report {
        passed: gates.iter().all(|gate| gate.status != Status::Failed),
        gates,
        flips,
        errors: distribution(reference, native),
        against_exact: exact.map(|exact| [distribution(exact, reference), distribution(exact, native)]),
    })
}

/// Same corpus, same export, same cases in the same order.
fn together(reference: &Capture, other: &Capture) -> Result<(), Invalid> {
    let (a, b) = (&reference.header, &other.header);
    for (what, first, second) in [
        ("corpus", &a.corpus_sha256, &b.corpus_sha256),
        ("export", &a.manifest_sha256, &b.manifest_sha256),
        ("temperature", &a.temperature.to_string(), &b.temperature.to_string()),
    ] {
        if first != second {
            let what = format!("{what} of {} and {}", reference.file, other.file);
            return Err(Invalid::Mismatch { what, first: first.clone(), second: second.clone() });
        }
    }
    let shown = |entry: Option<&Entry>| match entry {
        Some(Entry::Question(question)) => format!(
            "{:?} question {:?}, {} of {} options",
            question.name,
            question.id,
            question.kind.name(),
            question.probabilities.len()
        ),
        Some(Entry::Refused { name }) => format!("{name:?} refused"),
        None => "the end".to_owned(),
    };
    let count = reference.entries.len().max(other.entries.len());
    for index in 0..count {
        let (first, second) = (shown(reference.entries.get(index)), shown(other.entries.get(index)));
        if first != second {
            let what = format!("case {} of {} and {}", index + 1, reference.file, other.file);
            return Err(Invalid::Mismatch { what, first, second });
        }
    }
    Ok(())
}

/// Whether a question lies near its boundary, by its own unrounded probabilities.
pub(crate) fn near(question: &Question) -> bool {
    let mut sorted = question.probabilities.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    match question.kind {
        Kind::Choice => sorted.get(1).is_some_and(|second| sorted[0] - second <= GATES.near_choice),
        Kind::Noul => question.probabilities.get(1).is_some_and(|yes| (yes - 0.5).abs() <= GATES.near_noul),
        Kind::Score => false,
    }
}

fn gate(name: &'static str, passed: bool, detail: String) -> Gate {
    Gate { name, status: if passed { Status::Passed } else { Status::Failed }, detail }
}

fn absent(name: &'static str, detail: &str) -> Gate {
    Gate { name, status: Status::Absent, detail: detail.to_owned() }
}

fn place(question: &Question) -> String {
    format!("{:?} question {:?}", question.name, question.id)
}

fn inputs(pairs: &[(&Question, &Question)]) -> Gate {
    // Output tokens count the digits of the answers, which the other gates judge.
    let differs = |(a, b): &&(&Question, &Question)| {
        a.ids_sha256 != b.ids_sha256
            || a.readouts != b.readouts
            || a.usage.input_tokens != b.usage.input_tokens
    };
    let count = pairs.iter().filter(differs).count();
    let first = pairs.iter().find(differs).map_or_else(String::new, |(a, _)| format!(", first {}", place(a)));
    let detail = format!("{count} of {} differ in tokens, readouts or input tokens{first}", pairs.len());
    gate("inputs", count == 0, detail)
}

/// The largest of a measure, and the question it belongs to.
fn largest<'a>(
    pairs: &[(&'a Question, &'a Question)],
    measure: impl Fn(&Question, &Question) -> Option<f64>,
) -> Option<(f64, &'a Question)> {
    pairs
        .iter()
        .filter_map(|(a, b)| Some((measure(a, b)?, *a)))
        .max_by(|(first, _), (second, _)| first.total_cmp(second))
}

fn probability(pairs: &[(&Question, &Question)]) -> Gate {
    let name = "probability";
    let Some((worst, question)) = largest(pairs, |a, b| Some(error(a, b))) else {
        return gate(name, false, "no question".to_owned());
    };
    let over = pairs.iter().filter(|(a, b)| error(a, b) > GATES.probability).count();
    let detail = format!(
        "largest error {worst:.3e} in {}, limit {}; {over} of {} over it",
        place(question),
        GATES.probability,
        pairs.len()
    );
    gate(name, worst <= GATES.probability, detail)
}

fn scores(
    name: &'static str,
    pairs: &[(&Question, &Question)],
    score: impl Fn(&Question) -> Option<f64>,
) -> Gate {
    let scored: Vec<_> = pairs.iter().copied().filter(|(a, _)| a.kind == Kind::Score).collect();
    let error = |a: &Question, b: &Question| Some((score(a)? - score(b)?).abs());
    let Some((worst, question)) = largest(&scored, error) else {
        return absent(name, "the corpus has no score");
    };
    let detail =
        format!("largest error {worst:.3e} levels in {}, limit {}", place(question), GATES.score_levels);
    gate(name, worst <= GATES.score_levels, detail)
}

fn coverage(name: &'static str, kind: Kind, pairs: &[(&Question, &Question)]) -> Gate {
    let count = pairs.iter().filter(|(a, _)| a.kind == kind && near(a)).count();
    gate(name, count >= GATES.near_count, format!("{count}, at least {} wanted", GATES.near_count))
}

fn flips(pairs: &[(&Question, &Question)]) -> Vec<Flip> {
    pairs
        .iter()
        .filter(|(a, b)| a.kind != Kind::Score && decided(a) != decided(b))
        .map(|(a, b)| Flip {
            name: a.name.clone(),
            id: a.id.clone(),
            kind: a.kind.name(),
            near: near(a),
            reference: a.probabilities.clone(),
            native: b.probabilities.clone(),
        })
        .collect()
}

/// The decision a caller would take: the choice, or whether a noul is over one half.
fn decided(question: &Question) -> usize {
    match question.kind {
        Kind::Noul => usize::from(question.probabilities.get(1).is_some_and(|yes| *yes > 0.5)),
        _ => question.decision(),
    }
}

fn far(flips: &[Flip]) -> Gate {
    let far: Vec<&Flip> = flips.iter().filter(|flip| !flip.near).collect();
    let first = far.first().map_or_else(String::new, |flip| format!(", first {:?} {:?}", flip.name, flip.id));
    gate("far-boundary decisions", far.is_empty(), format!("{} differ{first}", far.len()))
}

/// Hits and labelled questions of a type, or of all.
fn hits(questions: &[&Question], kind: Option<Kind>) -> (usize, usize) {
    let labelled = questions.iter().filter(|question| kind.is_none_or(|kind| question.kind == kind));
    labelled
        .filter_map(|question| Some(question.expected_index()? == decided_level(question)))
        .fold((0, 0), |(hits, all), hit| (hits + usize::from(hit), all + 1))
}

/// The decision, for a score its nearest level.
fn decided_level(question: &Question) -> usize {
    match question.kind {
        Kind::Score => question.score().round() as usize,
        _ => decided(question),
    }
}

fn split<'a>(pairs: &[(&'a Question, &'a Question)]) -> (Vec<&'a Question>, Vec<&'a Question>) {
    pairs.iter().copied().unzip()
}

fn accuracy(pairs: &[(&Question, &Question)]) -> Gate {
    let name = "labelled accuracy";
    let (reference, native) = split(pairs);
    let mut worst: Option<(bool, String)> = None;
    for (kind, limit) in std::iter::once((None, GATES.accuracy_total))
        .chain(Kind::ALL.map(|kind| (Some(kind), GATES.accuracy_type)))
    {
        let ((before, count), (after, _)) = (hits(&reference, kind), hits(&native, kind));
        if count == 0 {
            continue;
        }
        let share = |hits: usize| 100.0 * hits as f64 / count as f64;
        let (ok, text) = worst.get_or_insert((true, String::new()));
        *ok &= share(before) - share(after) <= limit;
        let label = kind.map_or("all", Kind::name);
        text.push_str(&format!("{label} {:.4} % to {:.4} %; ", share(before), share(after)));
    }
    match worst {
        Some((ok, text)) => gate(name, ok, text.trim_end_matches("; ").to_owned()),
        None => absent(name, "the corpus has no labels"),
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

fn change(
    name: &'static str,
    limit: f64,
    pairs: &[(&Question, &Question)],
    measure: impl Fn(&Question) -> Option<f64>,
) -> Gate {
    let (reference, native) = split(pairs);
    let average = |questions: &[&Question]| mean(questions.iter().filter_map(|question| measure(question)));
    let (Some(before), Some(after)) = (average(&reference), average(&native)) else {
        return absent(name, "the corpus has no labels");
    };
    gate(name, (after - before).abs() <= limit, format!("changes by {:+.3e}, limit {limit}", after - before))
}

fn brier(pairs: &[(&Question, &Question)]) -> Gate {
    change("Brier score", GATES.brier, pairs, |question| {
        if question.kind == Kind::Score {
            return None;
        }
        let right = question.expected_index()?;
        let squares = question.probabilities.iter().enumerate();
        Some(squares.map(|(index, p)| (p - f64::from(u8::from(index == right))).powi(2)).sum())
    })
}

fn score_error(pairs: &[(&Question, &Question)]) -> Gate {
    change("normalised score error", GATES.score_error, pairs, |question| {
        let levels = question.probabilities.len();
        if question.kind != Kind::Score || levels < 2 {
            return None;
        }
        Some((question.score() - question.expected_index()? as f64).abs() / (levels - 1) as f64)
    })
}
