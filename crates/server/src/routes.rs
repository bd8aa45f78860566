//! Owns the map from method and path to handler, and what lies around every handler: CORS, panics, the key.

use std::any::Any;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;

use crate::decide::{Endpoint, answer};
use crate::error::ApiError;
use crate::metrics;
use crate::observe::Caller;
use crate::ready;
use crate::service::App;
use crate::wire;

/// All questions of a request.
pub(crate) const SYSTEMONE: &str = "/v1/systemone";
/// Each question alone.
pub(crate) const SEPARATE: &str = "/v1/systemone/separate";
/// One choice under several orders.
pub(crate) const PERMUTE: &str = "/v1/systemone/permute";
/// What requests may name.
pub(crate) const MODELS: &str = "/v1/models";
/// Whether the process is alive.
pub(crate) const HEALTH: &str = "/health";
/// Whether requests should come.
pub(crate) const READY: &str = "/ready";
/// Counters.
pub(crate) const METRICS: &str = "/metrics";
/// The description of all of these.
pub(crate) const OPENAPI: &str = "/openapi.json";

/// The route that a path is counted under.
pub(crate) fn counted(path: &str) -> &'static str {
    [SYSTEMONE, SEPARATE, PERMUTE, MODELS, HEALTH, READY, METRICS, OPENAPI]
        .into_iter()
        .find(|route| *route == path)
        .unwrap_or("other")
}

/// Every route with everything around it, outermost last: a preflight needs no key, and errors carry CORS headers too.
pub(crate) fn router(app: &Arc<App>) -> Router {
    let decide = |endpoint: Endpoint| {
        post(move |State(app): State<Arc<App>>, request: Request| answer(app, endpoint, request))
    };
    let router = Router::new()
        .route(SYSTEMONE, decide(Endpoint::Systemone))
        .route(SEPARATE, decide(Endpoint::Separate))
        .route(PERMUTE, decide(Endpoint::Permute))
        .route(
            MODELS,
            get(async |State(app): State<Arc<App>>| wire::json(StatusCode::OK, app.models.clone())),
        )
        .route(READY, get(async |State(app): State<Arc<App>>| ready::respond(&app)))
        .route(METRICS, get(async |State(app): State<Arc<App>>| metrics::respond(&app)))
        .route(HEALTH, get(async || wire::json(StatusCode::OK, r#"{"status":"ok"}"#)))
        .route(
            OPENAPI,
            get(async |State(app): State<Arc<App>>| wire::json(StatusCode::OK, app.openapi.clone())),
        )
        .fallback(async || ApiError::NotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .with_state(Arc::clone(app))
        .layer(from_fn_with_state(Arc::clone(app), require_key))
        .layer(CatchPanicLayer::custom(panicked));
    match app.options.cors.layer() {
        Some(layer) => router.layer(layer),
        None => router,
    }
}

/// Before the body is read, and before a path is known to exist.
async fn require_key(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let path = request.uri().path();
    if path == "/v1" || path.starts_with("/v1/") {
        let name = app.options.api_keys.check(request.headers())?;
        if let (Some(name), Some(caller)) = (name, request.extensions().get::<Caller>()) {
            caller.is(name);
        }
    }
    Ok(next.run(request).await)
}

fn panicked(_: Box<dyn Any + Send>) -> Response {
    // The panic hook has already reported it, and the payload may quote a caller.
    ApiError::Internal.into_response()
}
