//! Owns the validated request: what a caller asked, after every rule of the wire contract has been checked and
//! before any text is rendered.

use crate::Json;

/// One request: a state and the questions about it.
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionRequest {
    /// The model name the caller used; echoed in the response.
    pub model: String,
    /// Any JSON value.
    pub state: Json,
    /// At least one question, ids distinct, in request order.
    pub questions: Vec<Question>,
}

/// One question of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The caller's name for it; it never reaches the model.
    pub id: String,
    /// Any JSON value; `Json::Null` when absent.
    pub instructions: Json,
    /// What kind of answer is wanted, with its options.
    pub kind: QuestionKind,
}

/// The kind of a question and its options, in the order the model reads them.
#[derive(Clone, Debug, PartialEq)]
pub enum QuestionKind {
    /// A yes-or-no question: the descriptions of "no" (`criteria.false`) and "yes" (`criteria.true`).
    Noul {
        /// Description of the `no` option; `Json::Null` when absent.
        no: Json,
        /// Description of the `yes` option; `Json::Null` when absent.
        yes: Json,
    },
    /// One of 1 to 255 named options, each with a description (`Json::Null` when absent).
    Choice {
        /// Name and description, in request order.
        options: Vec<(String, Json)>,
    },
    /// A position on a scale of 1 to 255 levels.
    Score {
        /// The levels, lowest first.
        levels: Vec<Json>,
    },
}

/// The wire name of a question's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuestionType {
    /// `noul`
    Noul,
    /// `choice`
    Choice,
    /// `score`
    Score,
}

impl QuestionType {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Noul => "noul",
            Self::Choice => "choice",
            Self::Score => "score",
        }
    }
}

impl QuestionKind {
    /// The wire name of this kind.
    pub fn question_type(&self) -> QuestionType {
        match self {
            Self::Noul { .. } => QuestionType::Noul,
            Self::Choice { .. } => QuestionType::Choice,
            Self::Score { .. } => QuestionType::Score,
        }
    }

    /// The number of options the model chooses among.
    pub fn option_count(&self) -> usize {
        match self {
            Self::Noul { .. } => 2,
            Self::Choice { options } => options.len(),
            Self::Score { levels } => levels.len(),
        }
    }
}
