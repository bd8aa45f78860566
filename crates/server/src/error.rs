//! Owns the table from everything that can go wrong to a status and a body. No other file chooses a status.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use processor::pytext::{JsonStyle, write_json};
use processor::{PathItem, RequestError, Violation};
use scheduler::{Failure, Refusal};
use serde_json::{Value, json};

/// Everything a request can end in besides an answer.
#[derive(Debug)]
pub(crate) enum ApiError {
    /// The request itself is wrong.
    Request(RequestError),
    /// The body's media type or encoding is not one this server reads.
    Unsupported(&'static str),
    /// The body, as sent or decoded, is longer than the limit.
    TooLarge(usize),
    /// The body could not be read or decoded.
    Unreadable,
    /// No key, or a wrong one.
    Unauthorized,
    /// No such path.
    NotFound,
    /// Another method is wanted.
    Method(&'static str),
    /// Not admitted.
    Refused(Refusal),
    /// Admitted and not answered.
    Failed(Failure),
    /// A defect.
    Internal,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, detail) = match &self {
            Self::Request(error) => request_error(error),
            Self::Unsupported(reason) => (StatusCode::UNSUPPORTED_MEDIA_TYPE, usage(reason)),
            Self::TooLarge(limit) => {
                (StatusCode::PAYLOAD_TOO_LARGE, usage(&format!("The body is longer than {limit} bytes.")))
            }
            Self::Unreadable => (StatusCode::BAD_REQUEST, json!("There was an error parsing the body")),
            Self::Unauthorized => {
                let message = "A valid API key is needed: Authorization: Bearer <key>.";
                (
                    StatusCode::UNAUTHORIZED,
                    json!({ "error_type": "authentication_error", "message": message }),
                )
            }
            Self::NotFound => (StatusCode::NOT_FOUND, json!("Not Found")),
            Self::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, json!("Method Not Allowed")),
            Self::Refused(refusal) => (StatusCode::SERVICE_UNAVAILABLE, unavailable(&refusal.to_string())),
            Self::Failed(Failure::Deadline) => {
                (StatusCode::SERVICE_UNAVAILABLE, unavailable("the deadline passed while waiting"))
            }
            Self::Failed(Failure::Retired(_)) => {
                (StatusCode::SERVICE_UNAVAILABLE, unavailable("the model has failed"))
            }
            Self::Internal => (
                StatusCode::INTERNAL_SERVER_ERROR,
                json!({ "error_type": "internal_error", "message": "Internal error." }),
            ),
        };
        let body = json!({ "detail": detail }).to_string();
        let mut response = (status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
        let headers = response.headers_mut();
        match self {
            Self::Unauthorized => {
                _ = headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
            }
            Self::Method(allowed) => _ = headers.insert(header::ALLOW, HeaderValue::from_static(allowed)),
            Self::Refused(_) | Self::Failed(_) => {
                _ = headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"))
            }
            _ => {}
        }
        response
    }
}

fn usage(message: &str) -> Value {
    json!({ "error_type": "api_usage_error", "message": message })
}

fn unavailable(message: &str) -> Value {
    json!({ "error_type": "overloaded_error", "message": message })
}

fn item(kind: &str, path: &[Value], message: &str) -> Value {
    let loc: Vec<Value> = std::iter::once(json!("body")).chain(path.iter().cloned()).collect();
    json!({ "type": kind, "loc": loc, "msg": message })
}

fn request_error(error: &RequestError) -> (StatusCode, Value) {
    let unprocessable = |detail| (StatusCode::UNPROCESSABLE_ENTITY, detail);
    match error {
        RequestError::NotJson { message, position } => {
            let mut item = item("json_invalid", &[json!(position)], "JSON decode error");
            item["input"] = json!({});
            item["ctx"] = json!({ "error": message });
            unprocessable(json!([item]))
        }
        RequestError::Unparsable(_) => {
            (StatusCode::BAD_REQUEST, json!("There was an error parsing the body"))
        }
        RequestError::Violations(list) => unprocessable(list.iter().map(violation).collect()),
        RequestError::TooLong { .. } | RequestError::TooLarge { .. } | RequestError::Tokenizer { .. } => {
            unprocessable(json!([item("too_long", &[], &error.to_string())]))
        }
    }
}

fn violation(violation: &Violation) -> Value {
    let path: Vec<Value> = violation
        .path
        .iter()
        .map(|step| match step {
            PathItem::Key(key) => json!(key),
            PathItem::Index(index) => json!(index),
        })
        .collect();
    let mut item = item(violation.kind, &path, &violation.message);
    if let Some(input) = &violation.input {
        let mut text = String::new();
        write_json(&mut text, input, JsonStyle::Compact);
        item["input"] = serde_json::from_str(&text).unwrap_or(Value::Null);
    }
    item
}
