//! Owns the vocabulary every other crate speaks: an ordered JSON value and its reader, a validated request, the token
//! tree it becomes, and the typed answers. No IO, no async, no HTTP, no model.

pub mod answer;
pub mod json;
pub mod parse;
pub mod request;
pub mod tree;

pub use answer::{Answer, Answers, Usage};
pub use json::{Json, Number};
pub use parse::JsonError;
pub use request::{DecisionRequest, Question, QuestionKind, QuestionType};
pub use tree::{Branch, Outcome, Tree};
