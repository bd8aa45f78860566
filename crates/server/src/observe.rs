//! Owns what every response carries whatever happened: the request id and the timing.

use std::convert::Infallible;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use tower::ServiceExt;
use tracing::Span;
use tracing::field::Empty;

use crate::error::Refused;
use crate::routes::counted;
use crate::service::App;

/// The header that names a request.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-typesafe-request-id");
/// The header that says where the time went.
pub(crate) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Longest request id echoed.
const MAX_ID: usize = 128;

/// When the headers of a request had been read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival(pub(crate) Instant);

/// The name of the key that a request presented, for its log line: filled in where the key is checked, and read whatever
/// becomes of the request after that.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller(Arc<OnceLock<Arc<str>>>);

impl Caller {
    /// The key was the one of this name.
    pub(crate) fn is(&self, name: Arc<str>) {
        // A request presents one key, once.
        let _ = self.0.set(name);
    }

    fn name(&self) -> Option<&str> {
        self.0.get().map(AsRef::as_ref)
    }
}

/// The target of the spans of requests. They are at level `TRACE` and under a name that no log is asked for: a log has the
/// same in one line.
pub const SPAN_TARGET: &str = "omni_kev_requests";

/// The span of a request under `/v1`: from its headers to its answer, or to the moment its caller left. It ends with its last
/// holder.
#[derive(Clone, Debug)]
pub(crate) struct RequestSpan(Span);

impl RequestSpan {
    fn begin(app: &App, route: &'static str, id: &HeaderValue, headers: &HeaderMap) -> Self {
        if !route.starts_with("/v1/") {
            return Self(Span::none());
        }
        let span = tracing::trace_span!(
            target: SPAN_TARGET,
            parent: None,
            "request",
            otel.name = route,
            otel.kind = "server",
            otel.status_code = Empty,
            request_id = id.to_str().unwrap_or(""),
            http.route = route,
            http.response.status_code = Empty,
            questions = Empty,
            input_tokens = Empty,
            queue_ms = Empty,
            prepare_ms = Empty,
            model_ms = Empty,
            finish_ms = Empty,
        );
        if let Some(parent) = app.options.span_parent.as_ref().filter(|_| !span.is_disabled()) {
            parent.set(headers, &span);
        }
        Self(span)
    }

    /// What the request turned out to be.
    pub(crate) fn prepared(&self, questions: usize, input_tokens: usize) {
        self.0.record("questions", questions as i64).record("input_tokens", input_tokens as i64);
    }

    fn answered(&self, status: StatusCode, stages: Option<Stages>) {
        self.0.record("http.response.status_code", i64::from(status.as_u16()));
        if status.is_server_error() {
            self.0.record("otel.status_code", "error");
        }
        if let Some(Stages { queue, prepare, model, finish }) = stages {
            for (name, time) in
                [("queue_ms", queue), ("prepare_ms", prepare), ("model_ms", model), ("finish_ms", finish)]
            {
                self.0.record(name, 1e3 * time.as_secs_f64());
            }
        }
    }
}

/// Where the time of an answered request went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stages {
    pub(crate) queue: Duration,
    pub(crate) prepare: Duration,
    pub(crate) model: Duration,
    pub(crate) finish: Duration,
}

/// Answers a request and marks the response.
pub(crate) async fn respond(
    app: Arc<App>,
    router: Router,
    mut request: Request<Body>,
) -> Result<Response, Infallible> {
    let arrival = Instant::now();
    let route = counted(request.uri().path());
    let caller = Caller::default();
    request.extensions_mut().insert(Arrival(arrival));
    request.extensions_mut().insert(caller.clone());
    let id = request_id(request.headers());
    let span = RequestSpan::begin(&app, route, &id, request.headers());
    request.extensions_mut().insert(span.clone());
    let mut response = router.oneshot(request).await?;
    let stages = response.extensions_mut().remove::<Stages>();
    app.metrics.count(route, response.status(), stages);
    if let Some(Refused(reason)) = response.extensions_mut().remove::<Refused>() {
        app.metrics.refused(reason);
    }
    span.answered(response.status(), stages);
    let elapsed = arrival.elapsed();
    let ms = |time: fn(&Stages) -> Duration| stages.as_ref().map(|stages| 1e3 * time(stages).as_secs_f64());
    tracing::info!(
        id = id.to_str().unwrap_or(""),
        route,
        key = caller.name(),
        status = response.status().as_u16(),
        total_ms = 1e3 * elapsed.as_secs_f64(),
        queue_ms = ms(|stages| stages.queue),
        prepare_ms = ms(|stages| stages.prepare),
        model_ms = ms(|stages| stages.model),
        finish_ms = ms(|stages| stages.finish),
        "request"
    );
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id);
    if let Ok(timing) = timing(elapsed, stages).try_into() {
        headers.insert(SERVER_TIMING, timing);
    }
    Ok(response)
}

/// The caller's own id if it is short and printable, else a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let sane = |value: &&HeaderValue| {
        (1..=MAX_ID).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    headers.get(REQUEST_ID).filter(sane).cloned().unwrap_or_else(new_id)
}

/// A new id: unique, not secret.
pub(crate) fn new_id() -> HeaderValue {
    static KEYS: OnceLock<(RandomState, RandomState)> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let (high, low) = KEYS.get_or_init(|| (RandomState::new(), RandomState::new()));
    let half = |keys: &RandomState| {
        let mut hasher = keys.build_hasher();
        hasher.write_u64(number);
        hasher.finish()
    };
    let id = format!("req_{:016x}{:016x}", half(high), half(low));
    HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("req_0"))
}

/// `app` is the time inside the process from the headers on, in milliseconds; the stages are within it.
fn timing(app: Duration, stages: Option<Stages>) -> String {
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    let mut text = format!("app;dur={:.1}", ms(app));
    if let Some(Stages { queue, prepare, model, finish }) = stages {
        for (name, time) in [("queue", queue), ("prepare", prepare), ("model", model), ("finish", finish)] {
            text.push_str(&format!(", {name};dur={:.3}", ms(time)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sane_ids_are_echoed_and_others_replaced() {
        let echo = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(value).unwrap());
            request_id(&headers).as_bytes() == value
        };
        assert!(echo(b"req_1"));
        assert!(echo(&[b'a'; MAX_ID]));
        for bad in [&b""[..], b"a b", "\u{e9}".as_bytes(), &[b'a'; MAX_ID + 1]] {
            assert!(!echo(bad), "{bad:?}");
        }
        let (one, two) = (new_id(), new_id());
        assert_ne!(one, two);
        assert!(one.len() == 36 && one.to_str().unwrap().starts_with("req_"));
    }

    #[test]
    fn timing_begins_with_the_whole() {
        let part = Duration::from_micros(1250);
        let stages = Stages { queue: part, prepare: part, model: part * 2, finish: part };
        assert_eq!(timing(Duration::from_micros(12_340), None), "app;dur=12.3");
        assert_eq!(
            timing(part * 6, Some(stages)),
            "app;dur=7.5, queue;dur=1.250, prepare;dur=1.250, model;dur=2.500, finish;dur=1.250"
        );
    }
}
