//! Owns the way from logits to answers: temperature, softmax, the typed answers and their confidences, the token counts.

use decision::{Answer, Answers, QuestionType, Usage};

use crate::prepare::{AnswerContext, Processor, ResponseContext};
use crate::pytext::{self, JsonStyle, round4, sum};

/// Why logits could not become answers: a failure of the model or of this program, never of the caller.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FinishError {
    /// The number of questions or options differs from the request's.
    #[error("the model returned {found} {what}, expected {expected}")]
    Count {
        /// Questions or options.
        what: &'static str,
        /// Returned.
        found: usize,
        /// Asked.
        expected: usize,
    },
    /// A logit is NaN or infinite.
    #[error("the model returned a logit that is not finite")]
    NotFinite,
    /// The tokenizer failed on the answers.
    #[error("answers cannot be tokenised: {0}")]
    Tokenizer(String),
}

/// A finished request.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// The answers, in request order, rounded for the wire.
    pub answers: Answers,
    /// Token counts.
    pub usage: Usage,
    /// Per question and option: FP32 probabilities, unrounded.
    pub probabilities: Vec<Vec<f32>>,
}

impl Processor {
    /// Turns a tree's logits into its request's answers.
    ///
    /// # Errors
    /// [`FinishError`].
    pub fn finish(&self, context: &ResponseContext, logits: &[Vec<f32>]) -> Result<Finished, FinishError> {
        let probabilities =
            logits.iter().map(|row| softmax(row, self.temperature)).collect::<Result<Vec<_>, _>>()?;
        let answers = answers(context, &probabilities)?;
        let usage =
            Usage { input_tokens: context.input_tokens, output_tokens: self.output_tokens(&answers)? };
        Ok(Finished { answers, usage, probabilities })
    }

    /// Tokens of the answers as Python's `json.dumps` prints them. Not escaped: a delimiter in a legend is one token.
    ///
    /// # Errors
    /// [`FinishError::Tokenizer`].
    pub fn output_tokens(&self, answers: &Answers) -> Result<usize, FinishError> {
        let text = pytext::answers(answers, JsonStyle::Default);
        self.tokenizer
            .encode(&text)
            .map(|ids| ids.len())
            .map_err(|error| FinishError::Tokenizer(error.to_string()))
    }
}

/// `softmax(logits / temperature)` in FP32.
///
/// # Errors
/// [`FinishError::NotFinite`] for a logit that is not a finite number, or one so large that its quotient is not.
pub fn softmax(logits: &[f32], temperature: f64) -> Result<Vec<f32>, FinishError> {
    let scaled: Vec<f32> = logits.iter().map(|logit| logit / temperature as f32).collect();
    if scaled.iter().any(|value| !value.is_finite()) {
        return Err(FinishError::NotFinite);
    }
    let top = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scaled.iter().map(|value| (value - top).exp()).collect();
    let total: f32 = weights.iter().sum();
    Ok(weights.into_iter().map(|weight| weight / total).collect())
}

/// Typed answers of unrounded probabilities. Every printed number is rounded once, from FP64 values of the FP32
/// probabilities; formulas are those of the wire contract.
///
/// # Errors
/// [`FinishError::Count`] when the probabilities are not those of the request's questions.
pub fn answers(context: &ResponseContext, probabilities: &[Vec<f32>]) -> Result<Answers, FinishError> {
    if probabilities.len() != context.questions.len() {
        return Err(FinishError::Count {
            what: "questions",
            found: probabilities.len(),
            expected: context.questions.len(),
        });
    }
    context
        .questions
        .iter()
        .zip(probabilities)
        .map(|(question, row)| Ok((question.id.clone(), answer(question, row)?)))
        .collect()
}

fn answer(question: &AnswerContext, row: &[f32]) -> Result<Answer, FinishError> {
    let expected = if question.question_type == QuestionType::Noul { 2 } else { question.names.len() };
    if row.len() != expected {
        return Err(FinishError::Count { what: "options", found: row.len(), expected });
    }
    let p: Vec<f64> = row.iter().map(|value| f64::from(*value)).collect();
    Ok(match question.question_type {
        QuestionType::Noul => Answer::Noul { noul: round4(p[1]) },
        QuestionType::Choice => Answer::Choice {
            choice: question.names[first_maximum(&p)].clone(),
            confidence: round4(choice_confidence(&normalised(&p))),
            probabilities: question.names.iter().cloned().zip(p.iter().map(|value| round4(*value))).collect(),
        },
        QuestionType::Score => Answer::Score {
            score: round4(sum(p.iter().enumerate().map(|(level, value)| level as f64 * value))),
            legend: question.names.clone(),
            probabilities: p.iter().map(|value| round4(*value)).collect(),
            confidence: round4(score_confidence(&normalised(&p))),
        },
    })
}

fn first_maximum(p: &[f64]) -> usize {
    let mut best = 0;
    for (index, value) in p.iter().enumerate() {
        if *value > p[best] {
            best = index;
        }
    }
    best
}

/// Sums to one; all zero becomes even.
fn normalised(p: &[f64]) -> Vec<f64> {
    let total = sum(p.iter().copied());
    if total > 0.0 {
        p.iter().map(|value| value / total).collect()
    } else {
        vec![1.0 / p.len() as f64; p.len()]
    }
}

/// How far the winner stands above an even spread.
fn choice_confidence(p: &[f64]) -> f64 {
    if p.len() == 1 {
        return 1.0;
    }
    let even = 1.0 / p.len() as f64;
    (p[first_maximum(p)] - even) / (1.0 - even)
}

/// One minus the mean distance from the mode, in units of an even spread's distance from its centre.
fn score_confidence(p: &[f64]) -> f64 {
    let n = p.len();
    if n == 1 {
        return 1.0;
    }
    let mode = first_maximum(p) as f64;
    let distance = sum(p.iter().enumerate().map(|(level, value)| value * (level as f64 - mode).abs()));
    let centre = (n as f64 - 1.0) / 2.0;
    let even = sum((0..n).map(|level| (level as f64 - centre).abs())) / n as f64;
    (1.0 - distance / even).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(question_type: QuestionType, names: &[&str]) -> ResponseContext {
        ResponseContext {
            model: "m".to_owned(),
            input_tokens: 1,
            state_tokens: (1, 1),
            questions: vec![AnswerContext {
                id: "q".to_owned(),
                question_type,
                names: names.iter().map(|name| (*name).to_owned()).collect(),
            }],
        }
    }

    fn text(question_type: QuestionType, names: &[&str], p: &[f32]) -> String {
        pytext::answers(&answers(&context(question_type, names), &[p.to_vec()]).unwrap(), JsonStyle::Compact)
    }

    #[test]
    fn answers_follow_the_formulas() {
        let cases = [
            (QuestionType::Noul, &[][..], &[0.25f32, 0.75][..], r#"{"q":{"type":"noul","noul":0.75}}"#),
            (
                QuestionType::Choice,
                &["a", "b"],
                &[0.5, 0.5],
                r#"{"q":{"type":"choice","choice":"a","confidence":0.0,"probabilities":{"a":0.5,"b":0.5}}}"#,
            ),
            (
                QuestionType::Choice,
                &["only"],
                &[1.0],
                r#"{"q":{"type":"choice","choice":"only","confidence":1.0,"probabilities":{"only":1.0}}}"#,
            ),
            (
                QuestionType::Score,
                &["today"],
                &[1.0],
                r#"{"q":{"type":"score","score":0.0,"legend":{"0":"today"},"probabilities":{"0":1.0},"confidence":1.0}}"#,
            ),
        ];
        for (question_type, names, p, expected) in cases {
            assert_eq!(text(question_type, names, p), expected);
        }
        // The distance formula with an even spread as its unit gives 0.26 here; two other formulas in use give 0.75 and 0.5.
        let confidence = text(QuestionType::Score, &["a", "b", "c"], &[0.027, 0.507, 0.466]);
        assert!(confidence.ends_with("\"confidence\":0.2605}}"), "{confidence}");
    }

    #[test]
    fn softmax_is_fp32_and_refuses_what_is_not_finite() {
        let p = softmax(&[1.0, 3.0], 2.0).unwrap();
        let expected = 1.0 / (1.0 + std::f64::consts::E);
        assert!((f64::from(p[0]) - expected).abs() < 1e-7);
        assert_eq!(softmax(&[1e30, -1e30], 1.0).unwrap(), [1.0, 0.0]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(softmax(&[0.0, bad], 1.0), Err(FinishError::NotFinite));
        }
    }

    #[test]
    fn counts_must_match() {
        let context = context(QuestionType::Choice, &["a", "b"]);
        assert!(matches!(answers(&context, &[]), Err(FinishError::Count { what: "questions", .. })));
        assert!(matches!(answers(&context, &[vec![1.0]]), Err(FinishError::Count { what: "options", .. })));
    }
}
