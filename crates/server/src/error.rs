//! Owns the one table from error to status, body and documentation. A handler returns an [`ApiError`]; nothing else in
//! this crate chooses a status.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use processor::pytext::{JsonStyle, write_json, write_string};
use processor::{PathItem, RequestError, Violation};
use scheduler::{Failure, Refusal};

use crate::wire;

/// Form of an error's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `{"detail":[{"type","loc","msg"}]}`: what is wrong with a request, and where.
    List,
    /// `{"detail":{"error_type","message"}}`.
    Object,
    /// `{"detail":"…"}`.
    Text,
}

/// Where an error can happen, for the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Any path under `/v1`.
    Keyed,
    /// Requests with a body.
    Body,
    /// `POST /v1/systemone/permute` only.
    Permute,
    /// Before any route is chosen; not part of a route's documentation.
    Framework,
}

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// Machine-readable name: `detail.error_type` of the object form.
    pub(crate) code: &'static str,
    pub(crate) status: StatusCode,
    pub(crate) shape: Shape,
    pub(crate) scope: Scope,
    pub(crate) doc: &'static str,
}

const fn row(code: &'static str, status: StatusCode, shape: Shape, scope: Scope, doc: &'static str) -> Row {
    Row { code, status, shape, scope, doc }
}

use Scope::{Body, Framework, Keyed, Permute};
use Shape::{List, Object, Text};
use StatusCode as S;

const JSON: Row = row("json_invalid", S::UNPROCESSABLE_ENTITY, List, Body, "The body is not JSON.");
const INVALID: Row =
    row("validation", S::UNPROCESSABLE_ENTITY, List, Body, "The body breaks rules of the schema.");
const TOO_LONG: Row = row(
    "max_tokens_exceeded",
    S::UNPROCESSABLE_ENTITY,
    List,
    Body,
    "A text is longer than this deployment accepts; the message names tokens and limit.",
);
const CONTENT_TYPE: Row = row(
    "content_type",
    S::UNPROCESSABLE_ENTITY,
    List,
    Body,
    "The Content-Type is absent or not a JSON type, so there is no object to read.",
);
const NOT_A_CHOICE: Row = row(
    "not_a_choice",
    S::UNPROCESSABLE_ENTITY,
    Text,
    Permute,
    "`question` does not name a choice question of the request.",
);
const UNREADABLE: Row = row(
    "unreadable_body",
    S::BAD_REQUEST,
    Text,
    Body,
    "The body is no Unicode text, nests too deep, or has an integer of too many digits.",
);
const UNKNOWN_MODEL: Row = row(
    "api_usage_error",
    S::BAD_REQUEST,
    Object,
    Body,
    "The request names a model that is not served, and this deployment is strict about names.",
);
const TIMEOUT: Row = row(
    "invalid_request_timeout",
    S::BAD_REQUEST,
    Object,
    Body,
    "`x-request-timeout-ms` is not one positive integer.",
);
const CORRUPT: Row =
    row("corrupt_encoding", S::BAD_REQUEST, Object, Body, "The compressed body cannot be decompressed.");
const BROKEN: Row = row("incomplete_body", S::BAD_REQUEST, Object, Body, "The body ended before its length.");
const MULTIPART: Row = row(
    "unsupported_media_type",
    S::UNSUPPORTED_MEDIA_TYPE,
    Object,
    Body,
    "Multipart bodies carry images, which are not supported.",
);
const ENCODING: Row = row(
    "unsupported_encoding",
    S::UNSUPPORTED_MEDIA_TYPE,
    Object,
    Body,
    "The Content-Encoding is none of identity, gzip and zstd.",
);
const TOO_LARGE: Row = row(
    "request_too_large",
    S::PAYLOAD_TOO_LARGE,
    Object,
    Body,
    "The body, before or after decompression, or the tokens of the whole request are over a limit.",
);
const SLOW: Row =
    row("body_timeout", S::REQUEST_TIMEOUT, Object, Body, "The body did not arrive within the deadline.");
const KEY: Row = row(
    "authentication_error",
    S::UNAUTHORIZED,
    Object,
    Keyed,
    "A key is configured, and the request has none or another one.",
);
const NOT_FOUND: Row = row("not_found", S::NOT_FOUND, Text, Framework, "The path is unknown.");
const METHOD: Row = row(
    "method_not_allowed",
    S::METHOD_NOT_ALLOWED,
    Text,
    Framework,
    "The path is known and its method is another; `Allow` lists it.",
);
const OVERLOADED: Row = row(
    "overloaded",
    S::SERVICE_UNAVAILABLE,
    Object,
    Body,
    "As much work is inside as may be. Try again after `Retry-After`.",
);
const STOPPING: Row = row("stopping", S::SERVICE_UNAVAILABLE, Object, Body, "The worker is stopping.");
const RETIRED: Row = row(
    "model_unavailable",
    S::SERVICE_UNAVAILABLE,
    Object,
    Body,
    "The model failed earlier and is retired until the worker is restarted.",
);
const DEADLINE: Row =
    row("deadline_exceeded", S::GATEWAY_TIMEOUT, Object, Body, "The request was not answered in time.");
const INFERENCE: Row = row(
    "inference_error",
    S::INTERNAL_SERVER_ERROR,
    Object,
    Body,
    "The model failed while it ran this request; never the request's fault.",
);
const INTERNAL: Row =
    row("internal_error", S::INTERNAL_SERVER_ERROR, Object, Keyed, "A defect of this program.");

/// Every row, in the order of their statuses.
pub(crate) const TABLE: [&Row; 23] = [
    &UNREADABLE,
    &UNKNOWN_MODEL,
    &TIMEOUT,
    &CORRUPT,
    &BROKEN,
    &KEY,
    &NOT_FOUND,
    &METHOD,
    &SLOW,
    &TOO_LARGE,
    &MULTIPART,
    &ENCODING,
    &JSON,
    &INVALID,
    &TOO_LONG,
    &CONTENT_TYPE,
    &NOT_A_CHOICE,
    &INFERENCE,
    &INTERNAL,
    &OVERLOADED,
    &STOPPING,
    &RETIRED,
    &DEADLINE,
];

/// Everything that can be answered instead of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ApiError {
    /// The processor refused the request, which lies under these keys of the body.
    Request {
        error: RequestError,
        prefix: &'static [&'static str],
    },
    /// The Content-Type is absent or not JSON.
    ContentType,
    /// `multipart/…`.
    Multipart,
    /// A Content-Encoding other than identity, gzip and zstd.
    Encoding,
    /// A compressed body that cannot be decompressed.
    CorruptBody {
        encoding: &'static str,
    },
    /// A body longer than this many bytes.
    BodyTooLarge {
        limit: usize,
    },
    /// The body stopped before its length.
    IncompleteBody,
    /// The body took longer than the deadline.
    SlowBody,
    /// All bodies together need more memory than there is.
    BodyMemory,
    /// More connections than allowed.
    Connections,
    /// No key or another one.
    Unauthenticated {
        missing: bool,
    },
    NotFound,
    MethodNotAllowed,
    /// The request names a model that is not served.
    UnknownModel,
    /// `question` of a permute request names no choice.
    NotAChoice,
    /// `x-request-timeout-ms` is not one positive integer.
    RequestTimeout,
    /// The scheduler let the request not in, or not through.
    Scheduler(Failure),
    /// The request was not answered in time.
    Deadline,
    /// This program has a defect.
    Internal,
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        Self::Request { error, prefix: &[] }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self::Scheduler(refusal.into())
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        Self::Scheduler(failure)
    }
}

impl ApiError {
    /// The row of the table.
    pub(crate) fn row(&self) -> &'static Row {
        match self {
            Self::Request { error, .. } => match error {
                RequestError::NotJson { .. } => &JSON,
                RequestError::Unparsable(_) => &UNREADABLE,
                RequestError::Violations(_) | RequestError::Tokenizer { .. } => &INVALID,
                RequestError::TooLong { .. } | RequestError::TooLarge { .. } => &TOO_LONG,
            },
            Self::ContentType => &CONTENT_TYPE,
            Self::Multipart => &MULTIPART,
            Self::Encoding => &ENCODING,
            Self::CorruptBody { .. } => &CORRUPT,
            Self::BodyTooLarge { .. } => &TOO_LARGE,
            Self::IncompleteBody => &BROKEN,
            Self::SlowBody => &SLOW,
            Self::BodyMemory | Self::Connections => &OVERLOADED,
            Self::Unauthenticated { .. } => &KEY,
            Self::NotFound => &NOT_FOUND,
            Self::MethodNotAllowed => &METHOD,
            Self::UnknownModel => &UNKNOWN_MODEL,
            Self::NotAChoice => &NOT_A_CHOICE,
            Self::RequestTimeout => &TIMEOUT,
            Self::Scheduler(failure) => match failure {
                Failure::Refused(Refusal::TooLarge { .. }) => &TOO_LARGE,
                Failure::Refused(Refusal::Requests { .. } | Refusal::Tokens { .. }) => &OVERLOADED,
                Failure::Refused(Refusal::Draining) | Failure::Stopped => &STOPPING,
                Failure::Refused(Refusal::Retired { .. }) | Failure::Retired { .. } => &RETIRED,
                Failure::Deadline => &DEADLINE,
                Failure::Inference { .. } => &INFERENCE,
            },
            Self::Deadline => &DEADLINE,
            Self::Internal => &INTERNAL,
        }
    }

    /// For people. Holds no text of a caller, and no reason of a device: those are the operator's.
    fn message(&self) -> String {
        match self {
            Self::Request { error: RequestError::Unparsable(error), .. } => {
                format!("There was an error parsing the body: {error}")
            }
            Self::Request { error, .. } => error.to_string(),
            Self::ContentType => "Content-Type must be application/json".to_owned(),
            Self::Multipart => "Images are not supported: send JSON as application/json".to_owned(),
            Self::Encoding => "Content-Encoding must be identity, gzip or zstd".to_owned(),
            Self::CorruptBody { encoding } => format!("The body is not valid {encoding} data"),
            Self::BodyTooLarge { limit } => format!("The body is larger than {limit} bytes"),
            Self::IncompleteBody => "The body ended before its length".to_owned(),
            Self::SlowBody => "The body did not arrive within the deadline".to_owned(),
            Self::BodyMemory => "Too many large bodies at once".to_owned(),
            Self::Connections => "Too many connections".to_owned(),
            Self::Unauthenticated { missing: true } => {
                "Missing API key: send Authorization: Bearer <key>".to_owned()
            }
            Self::Unauthenticated { missing: false } => "Invalid API key".to_owned(),
            Self::NotFound => "Not Found".to_owned(),
            Self::MethodNotAllowed => "Method Not Allowed".to_owned(),
            Self::UnknownModel => "Unknown model: GET /v1/models lists those that are served".to_owned(),
            Self::NotAChoice => "question must name a choice question of the request".to_owned(),
            Self::RequestTimeout => {
                "x-request-timeout-ms must be one positive integer: milliseconds from the headers to the answer"
                    .to_owned()
            }
            Self::Scheduler(failure) => match failure {
                Failure::Refused(Refusal::Retired { .. }) | Failure::Retired { .. } => {
                    "The model failed and is retired".to_owned()
                }
                Failure::Inference { .. } => "The model failed while it ran this request".to_owned(),
                other => other.to_string(),
            },
            Self::Deadline => "The request was not answered within its deadline".to_owned(),
            Self::Internal => "Internal error".to_owned(),
        }
    }

    /// The body, compact JSON.
    pub(crate) fn body(&self) -> String {
        let mut out = String::from("{\"detail\":");
        match self.row().shape {
            Text => write_string(&mut out, &self.message(), JsonStyle::Compact),
            Object => {
                out.push_str("{\"error_type\":");
                write_string(&mut out, self.row().code, JsonStyle::Compact);
                out.push_str(",\"message\":");
                write_string(&mut out, &self.message(), JsonStyle::Compact);
                out.push('}');
            }
            List => self.items(&mut out),
        }
        out.push('}');
        out
    }

    fn items(&self, out: &mut String) {
        let prefix = match self {
            Self::Request { prefix, .. } => *prefix,
            _ => &[],
        };
        let item = |kind, path: &[&str], message: String| Violation {
            kind,
            path: path.iter().map(|key| PathItem::from(*key)).collect(),
            message,
            input: None,
        };
        let one = match self {
            Self::Request { error: RequestError::Violations(violations), .. } => {
                return write_items(out, prefix, violations);
            }
            Self::Request { error: RequestError::NotJson { message, position }, .. } => {
                return write_json_error(out, message, *position);
            }
            Self::Request { error, .. } => {
                let (what, code) = match error {
                    RequestError::Tokenizer { what, .. } => (what.as_str(), "value_error"),
                    RequestError::TooLong { what, .. } | RequestError::TooLarge { what } => {
                        (what.as_str(), TOO_LONG.code)
                    }
                    _ => ("", INVALID.code),
                };
                let place = if what == "state" { "state" } else { "questions" };
                item(code, &[place], self.message())
            }
            _ => item("model_attributes_type", &[], self.message()),
        };
        write_items(out, prefix, &[one]);
    }
}

/// A list of violations in the form FastAPI's clients read.
fn write_items(out: &mut String, prefix: &[&str], violations: &[Violation]) {
    out.push('[');
    for (index, violation) in violations.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str("{\"type\":");
        write_string(out, violation.kind, JsonStyle::Compact);
        out.push_str(",\"loc\":[\"body\"");
        for key in prefix {
            out.push(',');
            write_string(out, key, JsonStyle::Compact);
        }
        for item in &violation.path {
            out.push(',');
            match item {
                PathItem::Key(key) => write_string(out, key, JsonStyle::Compact),
                PathItem::Index(index) => out.push_str(&index.to_string()),
            }
        }
        out.push_str("],\"msg\":");
        write_string(out, &violation.message, JsonStyle::Compact);
        if let Some(input) = &violation.input {
            out.push_str(",\"input\":");
            write_json(out, input, JsonStyle::Compact);
        }
        out.push('}');
    }
    out.push(']');
}

fn write_json_error(out: &mut String, message: &str, position: usize) {
    out.push_str("[{\"type\":\"json_invalid\",\"loc\":[\"body\",");
    out.push_str(&position.to_string());
    out.push_str("],\"msg\":\"JSON decode error\",\"input\":{},\"ctx\":{\"error\":");
    write_string(out, message, JsonStyle::Compact);
    out.push_str("}}]");
}

impl ApiError {
    /// Its name in the table.
    pub(crate) fn code(&self) -> &'static str {
        self.row().code
    }
}

/// The reason of a refusal, on its response, for whoever counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused(pub(crate) &'static str);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let row = self.row();
        let mut response = wire::json(row.status, self.body());
        response.extensions_mut().insert(Refused(row.code));
        let headers = response.headers_mut();
        if row.status == S::SERVICE_UNAVAILABLE {
            wire::come_back(headers);
        }
        if row.status == S::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if *row == ENCODING {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity, gzip, zstd"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use decision::{Json, JsonError};

    use super::*;

    fn violation() -> Violation {
        Violation {
            kind: "missing",
            path: vec![PathItem::Key("questions".into()), PathItem::Index(2)],
            message: "Field required".into(),
            input: Some(Json::Object(indexmap::IndexMap::new())),
        }
    }

    /// Every variant, with its status and exact body.
    fn every() -> Vec<(ApiError, u16, &'static str)> {
        let reason: Arc<str> = "CUDA error 700".into();
        let request = |error: RequestError| ApiError::from(error);
        let object = |failure: Failure| ApiError::from(failure);
        vec![
            (
                request(RequestError::NotJson { message: "Expecting value", position: 7 }),
                422,
                r#"{"detail":[{"type":"json_invalid","loc":["body",7],"msg":"JSON decode error","input":{},"ctx":{"error":"Expecting value"}}]}"#,
            ),
            (
                request(RequestError::Unparsable(JsonError::Depth)),
                400,
                r#"{"detail":"There was an error parsing the body: body nests deeper than 512 levels"}"#,
            ),
            (
                ApiError::Request {
                    error: RequestError::Violations(vec![violation()]),
                    prefix: &["request"],
                },
                422,
                r#"{"detail":[{"type":"missing","loc":["body","request","questions",2],"msg":"Field required","input":{}}]}"#,
            ),
            (
                request(RequestError::TooLong { what: "state".into(), tokens: 9, limit: 8 }),
                422,
                r#"{"detail":[{"type":"max_tokens_exceeded","loc":["body","state"],"msg":"state is 9 tokens, over the limit of 8: shorten it or split the request"}]}"#,
            ),
            (
                request(RequestError::TooLarge { what: "question 3".into() }),
                422,
                r#"{"detail":[{"type":"max_tokens_exceeded","loc":["body","questions"],"msg":"question 3 renders to more than 64 MiB of text: shorten it or split the request"}]}"#,
            ),
            (
                request(RequestError::Tokenizer { what: "state".into(), reason: "no".into() }),
                422,
                r#"{"detail":[{"type":"value_error","loc":["body","state"],"msg":"state cannot be tokenised: no"}]}"#,
            ),
            (
                ApiError::ContentType,
                422,
                r#"{"detail":[{"type":"model_attributes_type","loc":["body"],"msg":"Content-Type must be application/json"}]}"#,
            ),
            (
                ApiError::Multipart,
                415,
                r#"{"detail":{"error_type":"unsupported_media_type","message":"Images are not supported: send JSON as application/json"}}"#,
            ),
            (
                ApiError::Encoding,
                415,
                r#"{"detail":{"error_type":"unsupported_encoding","message":"Content-Encoding must be identity, gzip or zstd"}}"#,
            ),
            (
                ApiError::CorruptBody { encoding: "gzip" },
                400,
                r#"{"detail":{"error_type":"corrupt_encoding","message":"The body is not valid gzip data"}}"#,
            ),
            (
                ApiError::BodyTooLarge { limit: 10 },
                413,
                r#"{"detail":{"error_type":"request_too_large","message":"The body is larger than 10 bytes"}}"#,
            ),
            (
                ApiError::IncompleteBody,
                400,
                r#"{"detail":{"error_type":"incomplete_body","message":"The body ended before its length"}}"#,
            ),
            (
                ApiError::SlowBody,
                408,
                r#"{"detail":{"error_type":"body_timeout","message":"The body did not arrive within the deadline"}}"#,
            ),
            (
                ApiError::BodyMemory,
                503,
                r#"{"detail":{"error_type":"overloaded","message":"Too many large bodies at once"}}"#,
            ),
            (
                ApiError::Connections,
                503,
                r#"{"detail":{"error_type":"overloaded","message":"Too many connections"}}"#,
            ),
            (
                ApiError::Unauthenticated { missing: true },
                401,
                r#"{"detail":{"error_type":"authentication_error","message":"Missing API key: send Authorization: Bearer <key>"}}"#,
            ),
            (
                ApiError::Unauthenticated { missing: false },
                401,
                r#"{"detail":{"error_type":"authentication_error","message":"Invalid API key"}}"#,
            ),
            (ApiError::NotFound, 404, r#"{"detail":"Not Found"}"#),
            (ApiError::MethodNotAllowed, 405, r#"{"detail":"Method Not Allowed"}"#),
            (
                ApiError::UnknownModel,
                400,
                r#"{"detail":{"error_type":"api_usage_error","message":"Unknown model: GET /v1/models lists those that are served"}}"#,
            ),
            (
                ApiError::NotAChoice,
                422,
                r#"{"detail":"question must name a choice question of the request"}"#,
            ),
            (
                ApiError::RequestTimeout,
                400,
                r#"{"detail":{"error_type":"invalid_request_timeout","message":"x-request-timeout-ms must be one positive integer: milliseconds from the headers to the answer"}}"#,
            ),
            (
                Refusal::TooLarge { tokens: 9, limit: 8 }.into(),
                413,
                r#"{"detail":{"error_type":"request_too_large","message":"the request has 9 tokens, over the limit of 8: split it"}}"#,
            ),
            (
                Refusal::Requests { limit: 8 }.into(),
                503,
                r#"{"detail":{"error_type":"overloaded","message":"the queue is full: 8 requests are waiting or running"}}"#,
            ),
            (
                object(Failure::Refused(Refusal::Tokens { tokens: 9, limit: 8 })),
                503,
                r#"{"detail":{"error_type":"overloaded","message":"the queue is full: 9 more tokens do not fit into 8"}}"#,
            ),
            (
                Refusal::Draining.into(),
                503,
                r#"{"detail":{"error_type":"stopping","message":"the worker is stopping"}}"#,
            ),
            (
                object(Failure::Stopped),
                503,
                r#"{"detail":{"error_type":"stopping","message":"the worker stopped"}}"#,
            ),
            (
                Refusal::Retired { reason: Arc::clone(&reason) }.into(),
                503,
                r#"{"detail":{"error_type":"model_unavailable","message":"The model failed and is retired"}}"#,
            ),
            (
                // The scheduler itself says this as the failure below; the table has a row for either.
                object(Failure::Refused(Refusal::Retired { reason: Arc::clone(&reason) })),
                503,
                r#"{"detail":{"error_type":"model_unavailable","message":"The model failed and is retired"}}"#,
            ),
            (
                object(Failure::Deadline),
                504,
                r#"{"detail":{"error_type":"deadline_exceeded","message":"the deadline passed while the request waited"}}"#,
            ),
            (
                object(Failure::Inference { reason }),
                500,
                r#"{"detail":{"error_type":"inference_error","message":"The model failed while it ran this request"}}"#,
            ),
            (
                ApiError::Deadline,
                504,
                r#"{"detail":{"error_type":"deadline_exceeded","message":"The request was not answered within its deadline"}}"#,
            ),
            (
                ApiError::Internal,
                500,
                r#"{"detail":{"error_type":"internal_error","message":"Internal error"}}"#,
            ),
        ]
    }

    #[test]
    fn every_variant_has_its_status_and_body() {
        let mut rows = HashSet::new();
        for (error, status, body) in every() {
            assert_eq!((error.row().status.as_u16(), error.body().as_str()), (status, body), "{error:?}");
            assert!(serde_json::from_str::<serde_json::Value>(&error.body()).is_ok());
            rows.insert(error.row().code);
        }
        let table: HashSet<&str> = TABLE.iter().map(|row| row.code).collect();
        assert_eq!(table.len(), TABLE.len(), "a name appears twice");
        assert_eq!(rows, table, "rows without an error, or errors without a row");
    }

    /// A name for every variant. Without a wildcard: a new one does not compile until it is here, and then it is missed
    /// below until [`every`] has it.
    fn variant(error: &ApiError) -> &'static str {
        match error {
            ApiError::Request { error, .. } => match error {
                RequestError::NotJson { .. } => "not json",
                RequestError::Unparsable(_) => "unparsable",
                RequestError::Violations(_) => "violations",
                RequestError::Tokenizer { .. } => "tokenizer",
                RequestError::TooLong { .. } => "too long",
                RequestError::TooLarge { .. } => "too large to render",
            },
            ApiError::ContentType => "content type",
            ApiError::Multipart => "multipart",
            ApiError::Encoding => "encoding",
            ApiError::CorruptBody { .. } => "corrupt body",
            ApiError::BodyTooLarge { .. } => "body too large",
            ApiError::IncompleteBody => "incomplete body",
            ApiError::SlowBody => "slow body",
            ApiError::BodyMemory => "body memory",
            ApiError::Connections => "connections",
            ApiError::Unauthenticated { .. } => "unauthenticated",
            ApiError::NotFound => "not found",
            ApiError::MethodNotAllowed => "method not allowed",
            ApiError::UnknownModel => "unknown model",
            ApiError::NotAChoice => "not a choice",
            ApiError::RequestTimeout => "request timeout",
            ApiError::Scheduler(failure) => match failure {
                Failure::Refused(Refusal::TooLarge { .. }) => "request too large",
                Failure::Refused(Refusal::Requests { .. }) => "requests",
                Failure::Refused(Refusal::Tokens { .. }) => "tokens",
                Failure::Refused(Refusal::Draining) => "draining",
                Failure::Refused(Refusal::Retired { .. }) => "refused: retired",
                Failure::Retired { .. } => "retired",
                Failure::Stopped => "stopped",
                Failure::Deadline => "deadline while waiting",
                Failure::Inference { .. } => "inference",
            },
            ApiError::Deadline => "deadline",
            ApiError::Internal => "internal",
        }
    }

    #[test]
    fn every_503_says_when_to_come_back_in_both_forms() {
        let seen: HashSet<&str> = every().iter().map(|(error, ..)| variant(error)).collect();
        assert_eq!(seen.len(), 32, "a variant without a case: {seen:?}");
        let mut unavailable: Vec<&str> = Vec::new();
        for (error, ..) in every() {
            let response = error.clone().into_response();
            if response.status() != StatusCode::SERVICE_UNAVAILABLE {
                continue;
            }
            let value = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            assert_eq!(
                (value("retry-after"), value("retry-after-ms")),
                (Some("1"), Some("1000")),
                "{error:?}"
            );
            unavailable.push(variant(&error));
        }
        unavailable.sort_unstable();
        let expected = [
            "body memory",
            "connections",
            "draining",
            "refused: retired",
            "requests",
            "retired",
            "stopped",
            "tokens",
        ];
        assert_eq!(unavailable, expected);
    }

    #[test]
    fn headers_go_with_their_status() {
        for (error, status, _) in every() {
            let response = error.clone().into_response();
            let has = |name: &str| response.headers().contains_key(name);
            assert!(has("content-type"));
            let retry = [has("retry-after"), has("retry-after-ms")];
            assert_eq!(retry, [status == 503; 2], "{error:?}");
            assert_eq!(has("www-authenticate"), status == 401, "{error:?}");
            assert_eq!(has("accept-encoding"), error == ApiError::Encoding);
        }
    }
}
