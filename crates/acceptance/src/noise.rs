//! Owns distributions of error: how far two captures lie apart, question by question.

use serde::Serialize;

use crate::capture::{Capture, Question};

/// Largest probability error of a question over its options, over all questions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// Questions compared.
    pub questions: usize,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
    /// Questions over the probability gate.
    pub over_gate: usize,
    /// Questions whose decision differs.
    pub flips: usize,
}

/// Largest error over the options of a question.
pub(crate) fn error(first: &Question, second: &Question) -> f64 {
    first.probabilities.iter().zip(&second.probabilities).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// The distribution between two captures that [`crate::judge()`] accepts as belonging together.
pub fn distribution(first: &Capture, second: &Capture) -> Distribution {
    let mut errors = Vec::new();
    let mut flips = 0;
    for (a, b) in first.questions().zip(second.questions()) {
        errors.push(error(a, b));
        flips += usize::from(a.decision() != b.decision());
    }
    errors.sort_by(f64::total_cmp);
    // Nearest rank.
    let at = |share: f64| match errors.len() {
        0 => 0.0,
        count => errors[((share * count as f64).ceil() as usize).clamp(1, count) - 1],
    };
    Distribution {
        questions: errors.len(),
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        max: at(1.0),
        over_gate: errors.iter().filter(|error| **error > crate::GATES.probability).count(),
        flips,
    }
}
