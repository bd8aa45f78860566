//! Owns the reading of captures: JSON Lines, compressed or not, a header and then a line a question. Whatever can be
//! recomputed from a line is recomputed, so that no line can say two things.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::Invalid;

/// The largest capture read, after decompression.
const MAX_BYTES: u64 = 4 << 30;
/// How far recorded probabilities may lie from the softmax of the recorded logits: FP32 against FP64.
const SOFTMAX: f64 = 2e-6;
/// How far returned numbers may lie from the four decimals of the recorded probabilities: one unit, for sums that end on a
/// rounding boundary.
const RETURNED: f64 = 1.0001e-4;

/// First line of a capture. Fields that only people read stay in `details`.
#[derive(Clone, Debug, Deserialize)]
pub struct Header {
    /// Version of the format: 1.
    pub omni_kev_capture: u32,
    /// SHA-256 of the export's manifest.
    pub manifest_sha256: String,
    /// SHA-256 of the corpus file.
    pub corpus_sha256: String,
    /// Arithmetic: `exact`, `fast`, `service`, or the reference's description of itself.
    pub profile: String,
    /// Divisor of the logits.
    pub temperature: f64,
    /// Everything else: versions, device, batching, date.
    #[serde(flatten)]
    pub details: serde_json::Map<String, Value>,
}

/// Type of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One of several options.
    Choice,
    /// No or yes.
    Noul,
    /// A level.
    Score,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Choice, Self::Noul, Self::Score];

    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Choice => "choice",
            Self::Noul => "noul",
            Self::Score => "score",
        }
    }
}

/// Where hidden states were read.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Readouts {
    /// Index of the deciding token in the branch.
    pub decide: usize,
    /// Index of every option's last token in the branch.
    pub option_ends: Vec<usize>,
}

/// Token counts of the whole request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens read.
    pub input_tokens: u64,
    /// Tokens of the answers' text.
    pub output_tokens: u64,
}

/// One question.
#[derive(Clone, Debug, Deserialize)]
pub struct Question {
    /// The case.
    pub name: String,
    /// The question's id in its request.
    pub id: String,
    /// Its type.
    #[serde(rename = "type")]
    pub kind: Kind,
    /// SHA-256 of the token ids, state and branch.
    pub ids_sha256: String,
    /// Where hidden states were read.
    pub readouts: Readouts,
    /// Logits before temperature.
    pub logits: Vec<f64>,
    /// The same, the bits of FP32 in hexadecimal.
    pub logits_hex: Vec<String>,
    /// Unrounded probabilities.
    pub probabilities: Vec<f64>,
    /// Token counts of the request.
    pub usage: Usage,
    /// The answer as returned.
    pub answer: Value,
    /// The right answer, where the corpus has one: an option's name, true or false, or a level.
    #[serde(default)]
    pub expected: Option<Value>,
}

impl Question {
    /// Index of the largest probability, the first of equals.
    pub fn decision(&self) -> usize {
        let mut best = 0;
        for (index, p) in self.probabilities.iter().enumerate() {
            if *p > self.probabilities[best] {
                best = index;
            }
        }
        best
    }

    /// Σ i·p, of a score.
    pub fn score(&self) -> f64 {
        self.probabilities.iter().enumerate().map(|(level, p)| level as f64 * p).sum()
    }

    /// Index of the right answer among the options.
    pub fn expected_index(&self) -> Option<usize> {
        match (self.kind, self.expected.as_ref()?) {
            (Kind::Noul, Value::Bool(yes)) => Some(usize::from(*yes)),
            (Kind::Score, Value::Number(level)) => level.as_u64().map(|level| level as usize),
            (Kind::Choice, Value::String(name)) => {
                self.answer.get("probabilities")?.as_object()?.keys().position(|key| key == name)
            }
            _ => None,
        }
    }
}

/// One line after the header.
#[derive(Clone, Debug)]
pub enum Entry {
    /// A question's outputs.
    Question(Box<Question>),
    /// A request that was refused.
    Refused {
        /// The case.
        name: String,
    },
}

/// A capture, checked line by line.
#[derive(Clone, Debug)]
pub struct Capture {
    /// Its name, for messages.
    pub file: String,
    /// SHA-256 of the file's text, whether it is compressed or not.
    pub sha256: String,
    /// First line.
    pub header: Header,
    /// The others, in order.
    pub entries: Vec<Entry>,
}

impl Capture {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Invalid`] naming the file and the line.
    pub fn read(path: &Path) -> Result<Self, Invalid> {
        let file = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| Invalid::Io { file: file.clone(), source })?;
        Self::parse(file, &bytes)
    }

    /// Reads a file's bytes.
    ///
    /// # Errors
    /// [`Invalid`] naming the file and the line.
    pub fn parse(file: String, bytes: &[u8]) -> Result<Self, Invalid> {
        let fail = |line: usize, reason: String| Invalid::Format { file: file.clone(), line, reason };
        let unpacked = if bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            let mut unpacked = Vec::new();
            zstd::Decoder::new(bytes)
                .and_then(|decoder| decoder.take(MAX_BYTES).read_to_end(&mut unpacked))
                .map_err(|error| fail(1, format!("cannot be decompressed: {error}")))?;
            unpacked
        } else {
            bytes.to_vec()
        };
        let sha256 = hex::encode(Sha256::digest(&unpacked));
        let text =
            std::str::from_utf8(&unpacked).map_err(|error| fail(1, format!("is not UTF-8: {error}")))?;
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        let (_, first) = lines.next().ok_or_else(|| fail(1, "is empty, expected a header".to_owned()))?;
        let header: Header =
            serde_json::from_str(first).map_err(|error| fail(1, format!("is no header: {error}")))?;
        if header.omni_kev_capture != 1 || !(header.temperature.is_finite() && header.temperature > 0.0) {
            return Err(fail(1, "expected format 1 and a positive temperature".to_owned()));
        }
        let mut entries = Vec::new();
        let mut seen = BTreeSet::new();
        for (number, line) in lines {
            let entry = entry(line, header.temperature).map_err(|reason| fail(number, reason))?;
            let key = match &entry {
                Entry::Question(question) => (question.name.clone(), Some(question.id.clone())),
                Entry::Refused { name } => (name.clone(), None),
            };
            if !seen.insert(key.clone()) {
                let id = key.1.map_or_else(String::new, |id| format!(", question {id:?}"));
                return Err(fail(number, format!("case {:?}{id} is there twice", key.0)));
            }
            entries.push(entry);
        }
        if entries.is_empty() {
            return Err(fail(1, "has a header and nothing else".to_owned()));
        }
        Ok(Self { file, sha256, header, entries })
    }

    /// Its questions, in order.
    pub fn questions(&self) -> impl Iterator<Item = &Question> {
        self.entries.iter().filter_map(|entry| match entry {
            Entry::Question(question) => Some(&**question),
            Entry::Refused { .. } => None,
        })
    }
}

fn entry(line: &str, temperature: f64) -> Result<Entry, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("is not JSON: {error}"))?;
    if value.get("error").is_some() {
        let name = value.get("name").and_then(Value::as_str).ok_or("a refusal without a name")?;
        return Ok(Entry::Refused { name: name.to_owned() });
    }
    let question: Question = serde_json::from_value(value).map_err(|error| error.to_string())?;
    consistent(&question, temperature).map_err(|reason| format!("question {:?}: {reason}", question.id))?;
    Ok(Entry::Question(Box::new(question)))
}

/// Refuses a line whose numbers do not follow from each other.
fn consistent(question: &Question, temperature: f64) -> Result<(), String> {
    let options = question.readouts.option_ends.len();
    for (name, count) in [
        ("logits", question.logits.len()),
        ("logits_hex", question.logits_hex.len()),
        ("probabilities", question.probabilities.len()),
    ] {
        if count != options || options == 0 {
            return Err(format!("{name}: expected {options} values, one an option, found {count}"));
        }
    }
    let mut logits = Vec::with_capacity(options);
    for (hex, decimal) in question.logits_hex.iter().zip(&question.logits) {
        let bits = u32::from_str_radix(hex, 16).map_err(|_| format!("logits_hex: {hex:?} is not FP32"))?;
        let logit = f32::from_bits(bits);
        if hex.len() != 8 || !logit.is_finite() || f64::from(logit) != *decimal {
            return Err(format!("logits_hex: {hex:?} is {logit}, logits has {decimal}"));
        }
        logits.push(f64::from(logit) / temperature);
    }
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
    for (index, (logit, p)) in logits.iter().zip(&question.probabilities).enumerate() {
        let softmax = (logit - largest).exp() / total;
        if !p.is_finite() || (p - softmax).abs() > SOFTMAX {
            return Err(format!("probabilities: {p} at {index}, the logits give {softmax}"));
        }
    }
    returned(question)
}

/// Four decimals as Python rounds them: correctly, ties to even.
fn rounded(value: f64) -> f64 {
    format!("{value:.4}").parse().unwrap_or(f64::NAN)
}

fn returned(question: &Question) -> Result<(), String> {
    let number = |key: &str| {
        question.answer.get(key).and_then(Value::as_f64).ok_or_else(|| format!("answer has no number {key}"))
    };
    let near = |key: &str, found: f64, value: f64| {
        if (found - rounded(value)).abs() <= RETURNED {
            return Ok(());
        }
        Err(format!("answer.{key} is {found}, the probabilities give {}", rounded(value)))
    };
    if question.kind == Kind::Noul {
        let yes = question.probabilities.get(1).ok_or("a noul has two options")?;
        return near("noul", number("noul")?, *yes);
    }
    let listed = question.answer.get("probabilities").and_then(Value::as_object);
    let listed = listed.ok_or("answer has no probabilities")?;
    if listed.len() != question.probabilities.len() {
        return Err(format!("answer.probabilities has {} of {}", listed.len(), question.probabilities.len()));
    }
    for ((key, value), p) in listed.iter().zip(&question.probabilities) {
        near(&format!("probabilities.{key}"), value.as_f64().unwrap_or(f64::NAN), *p)?;
    }
    if question.kind == Kind::Score {
        return near("score", number("score")?, question.score());
    }
    let chosen = question.answer.get("choice").and_then(Value::as_str).ok_or("answer has no choice")?;
    let place = listed.keys().position(|key| key == chosen);
    if place != Some(question.decision()) {
        return Err(format!("answer.choice is {chosen:?}, not the most probable option"));
    }
    Ok(())
}
