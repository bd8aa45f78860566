//! Owns the routes: one handler path from body to answer, and what every response carries.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use processor::pytext::{JsonStyle, answers, write_string};
use processor::{Processor, parse_request};
use scheduler::Scheduler;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::body;
use crate::error::ApiError;

/// Limits and switches of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Longest body in bytes, as sent and decoded.
    pub max_body_bytes: usize,
    /// Time a request may take until it is dispatched.
    pub deadline: Duration,
    /// Key that every `/v1` route demands.
    pub api_key: Option<String>,
    /// Requests prepared at a time.
    pub prepare_threads: usize,
}

/// An entry of `/v1/models`.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// What is served, for people.
    pub description: String,
    /// A date that clients show.
    pub release_date: String,
}

/// What answers.
pub struct Service {
    /// Bodies to trees and back.
    pub processor: Processor,
    /// The queue.
    pub scheduler: Scheduler,
    /// What `/v1/models` says.
    pub card: ModelCard,
}

struct App {
    service: Service,
    options: ServerOptions,
    preparing: Semaphore,
    requests: AtomicU64,
}

/// Serves until `shutdown` resolves, then finishes what was admitted.
///
/// # Errors
/// The listener's.
pub async fn serve(
    listener: TcpListener,
    service: Service,
    options: ServerOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let preparing = Semaphore::new(options.prepare_threads.max(1));
    let app = Arc::new(App { service, options, preparing, requests: AtomicU64::new(0) });
    let router = Router::new()
        .route("/v1/systemone", post(systemone).fallback(|| async { ApiError::Method("POST") }))
        .route(
            "/v1/models",
            get(models)
                .head(|| async { ApiError::Method("GET") })
                .fallback(|| async { ApiError::Method("GET") }),
        )
        .route("/health", get(health).fallback(|| async { ApiError::Method("GET") }))
        .fallback(|| async { ApiError::NotFound })
        .layer(from_fn_with_state(Arc::clone(&app), frame))
        .with_state(app);
    axum::serve(listener, router).with_graceful_shutdown(shutdown).await
}

/// Authentication before anything else is read, and the headers that every response carries, errors included.
async fn frame(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(&app, request.headers());
    let guarded = request.uri().path().starts_with("/v1") && request.method() != Method::OPTIONS;
    let mut response = if guarded && !authorized(app.options.api_key.as_deref(), request.headers()) {
        ApiError::Unauthorized.into_response()
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    headers.insert(HeaderName::from_static("x-typesafe-request-id"), id);
    let mut timing = format!("app;dur={:.1}", started.elapsed().as_secs_f64() * 1e3);
    if let Some(stages) = headers.get("server-timing").and_then(|value| value.to_str().ok()) {
        timing = format!("{timing}, {stages}");
    }
    if let Ok(value) = HeaderValue::from_str(&timing) {
        headers.insert(HeaderName::from_static("server-timing"), value);
    }
    response
}

/// The caller's id when it is sane, else one of ours.
fn request_id(app: &App, headers: &HeaderMap) -> HeaderValue {
    let given = headers.get("x-typesafe-request-id").filter(|value| {
        let bytes = value.as_bytes();
        (1..=128).contains(&bytes.len()) && bytes.iter().all(|byte| byte.is_ascii_graphic())
    });
    if let Some(value) = given {
        return value.clone();
    }
    let count = app.requests.fetch_add(1, Ordering::Relaxed);
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64);
    HeaderValue::from_str(&format!("req_{time:016x}{count:016x}"))
        .unwrap_or(HeaderValue::from_static("req_0"))
}

/// Without a key configured every header is fine; with one, `Bearer <key>`, compared in constant time.
fn authorized(key: Option<&str>, headers: &HeaderMap) -> bool {
    let Some(key) = key else { return true };
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or("").trim();
    let Some((scheme, token)) = given.split_once(' ') else { return false };
    let token = token.trim();
    let differing =
        token.bytes().zip(key.bytes()).fold(token.len() ^ key.len(), |all, (a, b)| all | usize::from(a ^ b));
    scheme.eq_ignore_ascii_case("bearer") && differing == 0
}

async fn systemone(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let deadline = Instant::now() + app.options.deadline;
    app.service.scheduler.check().map_err(ApiError::Refused)?;
    let (parts, body) = request.into_parts();
    let body = body::read(&parts.headers, body, app.options.max_body_bytes).await?;
    let begun = Instant::now();
    let permit = app.preparing.acquire().await.map_err(|_| ApiError::Internal)?;
    let processor = app.service.processor.clone();
    let prepared = tokio::task::spawn_blocking(move || {
        let request = parse_request(&body)?;
        processor.prepare(&request)
    })
    .await
    // A panic while preparing costs this request only.
    .map_err(|_| ApiError::Internal)?
    .map_err(ApiError::Request)?;
    drop(permit);
    let prepare = begun.elapsed();
    let receiver = app.service.scheduler.submit(prepared.tree, deadline).map_err(ApiError::Refused)?;
    let answered = receiver.await.map_err(|_| ApiError::Internal)?.map_err(ApiError::Failed)?;
    let begun = Instant::now();
    let finished = app
        .service
        .processor
        .finish(&prepared.context, &answered.outcome.logits)
        .map_err(|_| ApiError::Internal)?;
    let mut text = String::from("{\"model\":");
    write_string(&mut text, &prepared.context.model, JsonStyle::Compact);
    let usage = finished.usage;
    let _ = write!(
        text,
        ",\"answers\":{},\"usage\":{{\"input_tokens\":{},\"output_tokens\":{}}}}}",
        answers(&finished.answers, JsonStyle::Compact),
        usage.input_tokens,
        usage.output_tokens
    );
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let timing = format!(
        "queue;dur={:.1}, prepare;dur={:.1}, model;dur={:.1}, finish;dur={:.1}",
        ms(answered.waited),
        ms(prepare),
        ms(answered.model),
        ms(begun.elapsed())
    );
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (HeaderName::from_static("server-timing"), timing),
    ];
    Ok((StatusCode::OK, headers, text).into_response())
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let card = &app.service.card;
    let cards: Vec<_> = ["kev-latest", "jev-latest"]
        .into_iter()
        .map(|name| json!({ "name": name, "description": card.description, "release_date": card.release_date }))
        .collect();
    ([(header::CONTENT_TYPE, "application/json")], json!({ "models": cards }).to_string()).into_response()
}

async fn health() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], json!({ "status": "ok" }).to_string()).into_response()
}
