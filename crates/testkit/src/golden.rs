//! Golden data of the reference service: where it lies and how a case reads. Used by the golden tier only.

use std::path::PathBuf;

use serde_json::Value;

/// The folder of golden data: `OMNI_KEV_GOLDEN`, or `shared/golden` beside the repository.
pub fn folder() -> PathBuf {
    std::env::var_os("OMNI_KEV_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden")),
        PathBuf::from,
    )
}

/// One case.
pub struct Case {
    /// `group/slug`.
    pub name: String,
    /// The exact body.
    pub request: String,
    /// HTTP status the reference gave.
    pub status: u64,
    /// Everything recorded.
    pub reference: Value,
}

/// All cases.
///
/// # Panics
/// When the folder is missing or a line is not a case: the golden tier must not pass without its data.
#[allow(clippy::expect_used)] // Test support: a failure here is a failed test.
pub fn cases() -> Vec<Case> {
    let path = folder().join("cases.jsonl");
    let text = std::fs::read_to_string(&path).expect("golden cases are readable");
    text.lines()
        .map(|line| {
            let mut case: Value = serde_json::from_str(line).expect("a golden case is JSON");
            Case {
                name: case["name"].as_str().expect("a case has a name").to_owned(),
                request: case["request_text"].as_str().expect("a case has a body").to_owned(),
                status: case["reference"]["status"].as_u64().expect("a case has a status"),
                reference: case["reference"].take(),
            }
        })
        .collect()
}

/// A JSON array of numbers as FP64.
pub fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

/// A JSON array of token ids or offsets.
pub fn indices(value: &Value) -> Vec<u64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
}
