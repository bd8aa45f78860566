//! Owns the typed answers and their counts, before they become JSON on a wire.

/// The answers of one request: question id and answer, in request order.
pub type Answers = Vec<(String, Answer)>;

/// One typed answer. Every number is already rounded to 4 decimals.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Probability that the answer is yes.
    Noul {
        /// P(yes), 0 to 1.
        noul: f64,
    },
    /// The most probable option.
    Choice {
        /// Name of the first most probable option.
        choice: String,
        /// How far the winner stands above an even spread, 0 to 1.
        confidence: f64,
        /// Option name and probability, in request order.
        probabilities: Vec<(String, f64)>,
    },
    /// The expected level.
    Score {
        /// Expected level index, 0 to levels − 1.
        score: f64,
        /// Rendered text of each level.
        legend: Vec<String>,
        /// Probability of each level.
        probabilities: Vec<f64>,
        /// How narrow the distribution is around its mode, 0 to 1.
        confidence: f64,
    },
}

/// Token counts of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// State once plus every branch.
    pub input_tokens: usize,
    /// Tokens of the answers serialised as Python's `json.dumps` does.
    pub output_tokens: usize,
}
