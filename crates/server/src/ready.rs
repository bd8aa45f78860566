//! Owns readiness: whether a balancer should send requests here, and why not.

use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::StatusCode;
use axum::response::Response;
use scheduler::Refusal;
use serde_json::json;

use crate::service::App;
use crate::wire;

/// Set by the stop signal, while requests are still accepted.
#[derive(Debug, Default)]
pub(crate) struct Leaving(AtomicBool);

impl Leaving {
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Why no more requests should come, as one word; `None` when ready.
pub(crate) fn reason(app: &App) -> Option<&'static str> {
    match app.service.scheduler.closed() {
        Some(Refusal::Retired { .. }) => Some("model_unavailable"),
        Some(_) => Some("stopping"),
        None => app.leaving.begun().then_some("stopping"),
    }
}

/// Answer of `GET /ready`, with the limits that a client may want to know.
pub(crate) fn respond(app: &App) -> Response {
    let processor = app.service.processor.options();
    let limits = json!({
        "max_state_tokens": processor.max_state_tokens,
        "max_row_tokens": processor.max_row_tokens,
        "max_question_tokens": processor.max_question_tokens,
        "max_body_bytes": app.options.max_body_bytes,
        "deadline_ms": app.options.deadline.as_millis() as u64,
        "max_deadline_ms": app.options.max_deadline.as_millis() as u64,
    });
    let Some(reason) = reason(app) else {
        return wire::json(StatusCode::OK, json!({ "status": "ready", "limits": limits }).to_string());
    };
    let body = json!({ "status": "not_ready", "reason": reason, "limits": limits }).to_string();
    let mut response = wire::json(StatusCode::SERVICE_UNAVAILABLE, body);
    wire::come_back(response.headers_mut());
    response
}
