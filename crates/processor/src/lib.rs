//! Owns what the model reads and what its numbers mean: body → validated request → text → tokens → tree, and logits →
//! calibrated, typed answers. Knows no HTTP status and no device.

mod dates;
mod finish;
mod prepare;
pub mod pytext;
mod render;
mod request;

pub use finish::{FinishError, Finished, answers, softmax};
pub use prepare::{Prepared, Processor, ProcessorOptions, QuestionTexts, ResponseContext, Texts};
pub use request::{
    DEFAULT_MODEL, PathItem, RequestError, Violation, parse_json, parse_request, validate_request,
};
