//! Owns the gates. They are constants: a run with others is invalid, never a pass.

use serde::{Deserialize, Serialize};

/// Limits of an acceptance run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gates {
    /// Largest error of an unrounded probability.
    pub probability: f64,
    /// Largest error of a score, in levels: from unrounded probabilities and from the returned number, each by itself.
    pub score_levels: f64,
    /// A choice is near its boundary up to this margin between its two best options.
    pub near_choice: f64,
    /// A noul is near its boundary up to this distance from 1/2.
    pub near_noul: f64,
    /// Near-boundary questions of each of both types that a corpus must have.
    pub near_count: usize,
    /// Largest drop of labelled accuracy in percentage points, all types together.
    pub accuracy_total: f64,
    /// Largest drop of labelled accuracy in percentage points, of any type.
    pub accuracy_type: f64,
    /// Largest change of the Brier score.
    pub brier: f64,
    /// Largest change of the mean absolute error of scores, as a share of the scale.
    pub score_error: f64,
}

/// The gates of every acceptance run.
pub const GATES: Gates = Gates {
    probability: 0.01,
    score_levels: 0.1,
    near_choice: 0.02,
    near_noul: 0.01,
    near_count: 10,
    accuracy_total: 1.0,
    accuracy_type: 2.0,
    brier: 0.01,
    score_error: 0.005,
};
