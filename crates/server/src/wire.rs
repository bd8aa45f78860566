//! Owns the wire's response forms: their keys, their order, their text. Numbers and strings are printed by the processor,
//! as Python prints them.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use decision::{Answers, Usage};
use processor::pytext::{self, JsonStyle, write_string};
use serde::Serialize;
use utoipa::ToSchema;

/// One model of `GET /v1/models`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct ModelCard {
    /// The name that requests use.
    pub name: String,
    /// For people.
    pub description: String,
    /// When it was released, as its publisher writes it; never empty.
    pub release_date: String,
    /// More about it: device, profile, revision, ….
    #[serde(flatten)]
    #[schema(ignore)]
    pub details: serde_json::Map<String, serde_json::Value>,
}

/// Body of `GET /v1/models`.
#[derive(Serialize, ToSchema)]
pub(crate) struct Models<'a> {
    /// What requests may name.
    models: &'a [ModelCard],
}

/// The body of `GET /v1/models`.
pub(crate) fn models(cards: &[ModelCard]) -> Result<String, serde_json::Error> {
    serde_json::to_string(&Models { models: cards })
}

/// A JSON response.
pub(crate) fn json(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// What every 503 says: when to try again, in both of the forms that clients read.
pub(crate) fn come_back(headers: &mut HeaderMap) {
    headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    headers.insert(RETRY_AFTER_MS, HeaderValue::from_static("1000"));
}

/// The answer to a request, with the parts that are switched on.
#[derive(Clone, Copy, Debug)]
pub struct Answered<'a> {
    /// The request's model name.
    pub model: &'a str,
    /// The answers, in request order.
    pub answers: &'a Answers,
    /// Token counts.
    pub usage: Usage,
    /// Tokens of the state that came from the prefix cache, if callers are to know.
    pub cached_tokens: Option<usize>,
    /// Tokens of the state before and after truncation, if states may be cut.
    pub state_tokens: Option<(usize, usize)>,
    /// Model time, if callers are to know.
    pub latency: Option<Duration>,
}

impl Answered<'_> {
    /// Compact JSON in the order of the wire contract.
    pub fn text(&self) -> String {
        let mut out = String::from("{\"model\":");
        write_string(&mut out, self.model, JsonStyle::Compact);
        out.push_str(",\"answers\":");
        out.push_str(&pytext::answers(self.answers, JsonStyle::Compact));
        let Usage { input_tokens, output_tokens } = self.usage;
        out.push_str(&format!(
            ",\"usage\":{{\"input_tokens\":{input_tokens},\"output_tokens\":{output_tokens}"
        ));
        if let Some(cached) = self.cached_tokens {
            out.push_str(&format!(",\"input_tokens_details\":{{\"cached_tokens\":{cached}}}"));
        }
        if let Some((full, used)) = self.state_tokens {
            out.push_str(&format!(",\"state_tokens\":{full},\"state_tokens_used\":{used}"));
        }
        out.push('}');
        if let Some(latency) = self.latency {
            out.push_str(&format!(",\"latency_ms\":{}", milliseconds(latency)));
        }
        if let Some((full, used)) = self.state_tokens {
            out.push_str(&format!(",\"truncated\":{}", full != used));
        }
        out.push('}');
        out
    }
}

/// Milliseconds with one decimal, as Python prints them.
pub(crate) fn milliseconds(duration: Duration) -> String {
    let text = format!("{:.1}", duration.as_secs_f64() * 1e3);
    text.parse().map_or(text, pytext::float)
}

#[cfg(test)]
mod tests {
    use decision::Answer;

    use super::*;

    #[test]
    fn switches_add_their_fields_and_nothing_else() {
        let answers: Answers = vec![("질문 \"1\"".to_owned(), Answer::Noul { noul: 0.25 })];
        let usage = Usage { input_tokens: 12, output_tokens: 3 };
        let plain = Answered {
            model: "jev-latest",
            answers: &answers,
            usage,
            cached_tokens: None,
            state_tokens: None,
            latency: None,
        };
        assert_eq!(
            plain.text(),
            "{\"model\":\"jev-latest\",\"answers\":{\"질문 \\\"1\\\"\":{\"type\":\"noul\",\"noul\":0.25}},\
             \"usage\":{\"input_tokens\":12,\"output_tokens\":3}}"
        );
        let all = Answered {
            cached_tokens: Some(4),
            state_tokens: Some((9, 5)),
            latency: Some(Duration::from_micros(12_340)),
            ..plain
        };
        assert!(
            all.text().ends_with(
                "\"usage\":{\"input_tokens\":12,\"output_tokens\":3,\"input_tokens_details\":{\"cached_tokens\":4},\
                 \"state_tokens\":9,\"state_tokens_used\":5},\"latency_ms\":12.3,\"truncated\":true}"
            ),
            "{}",
            all.text()
        );
    }
}
