//! Owns what a server is made of and how it may be set up.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderMap;
use processor::Processor;
use scheduler::Scheduler;
use tokio::sync::Semaphore;
use tracing::Span;

use crate::auth::ApiKeys;
use crate::cors::Cors;
use crate::metrics::Metrics;
use crate::openapi;
use crate::pool::Pool;
use crate::ready::Leaving;
use crate::tls::Tls;
use crate::wire::ModelCard;

/// What answers requests.
#[derive(Debug)]
pub struct Service {
    /// Prepares requests and finishes answers.
    pub processor: Processor,
    /// Admits and runs them.
    pub scheduler: Scheduler,
    /// What `GET /v1/models` lists. Clients expect `kev-latest` and `jev-latest` among the names.
    pub models: Vec<ModelCard>,
    /// Whether what runs was qualified: `qualified`, `failed` or `unqualified`, for `GET /metrics`.
    pub qualification: &'static str,
    /// Counters of the prefix cache, for `GET /metrics`.
    pub cache: Option<CacheProbe>,
}

/// Counters of a prefix cache at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSnapshot {
    /// States that were kept from an earlier batch, total.
    pub hits: u64,
    /// States that were computed, total.
    pub misses: u64,
    /// States given up for others, total.
    pub evictions: u64,
    /// States kept now.
    pub states: u64,
    /// Bytes of the states kept now.
    pub bytes: u64,
}

/// A way to read the counters of a cache that lives elsewhere.
pub struct CacheProbe(Box<dyn Fn() -> CacheSnapshot + Send + Sync>);

impl CacheProbe {
    /// A probe.
    pub fn new(read: impl Fn() -> CacheSnapshot + Send + Sync + 'static) -> Self {
        Self(Box::new(read))
    }

    pub(crate) fn read(&self) -> CacheSnapshot {
        (self.0)()
    }
}

impl std::fmt::Debug for CacheProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.read().fmt(f)
    }
}

/// A way to give the span of a request its parent by the request's headers. What a span becomes is not the server's to know.
#[derive(Clone)]
pub struct SpanParent(Arc<SetParent>);

type SetParent = dyn Fn(&HeaderMap, &Span) + Send + Sync;

impl SpanParent {
    /// By this function, which is called once for every span, before anything is recorded in it.
    pub fn new(set: impl Fn(&HeaderMap, &Span) + Send + Sync + 'static) -> Self {
        Self(Arc::new(set))
    }

    pub(crate) fn set(&self, headers: &HeaderMap, span: &Span) {
        (self.0)(headers, span);
    }
}

impl std::fmt::Debug for SpanParent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SpanParent")
    }
}

/// Limits and switches of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The keys of which every path under `/v1` asks for one; none accepts and ignores any.
    pub api_keys: ApiKeys,
    /// The certificate; none speaks plain HTTP.
    pub tls: Option<Tls>,
    /// How the spans of requests find their parents; none leaves each by itself.
    pub span_parent: Option<SpanParent>,
    /// Which web pages may read answers.
    pub cors: Cors,
    /// Longest body in bytes, before and after decompression.
    pub max_body_bytes: usize,
    /// Bytes of all bodies held at once.
    pub body_memory_bytes: usize,
    /// From a request's headers to its answer, where the request says nothing else.
    pub deadline: Duration,
    /// The longest that a request may ask for by `x-request-timeout-ms`.
    pub max_deadline: Duration,
    /// From a connection to the end of its TLS handshake.
    pub handshake_timeout: Duration,
    /// How long a connection may be silent between requests. Clients reuse connections that were idle for 30 s.
    pub idle_timeout: Duration,
    /// From the first byte of a request to the end of its headers.
    pub head_timeout: Duration,
    /// How long a client may leave an answer unread.
    pub write_timeout: Duration,
    /// Connections at once; one more is told so and closed.
    pub max_connections: usize,
    /// How long requests are still accepted after the shutdown signal, while `/ready` already says no: balancers need to
    /// notice before anything is refused.
    pub drain_delay: Duration,
    /// How long requests may take to finish after the shutdown signal.
    pub drain_timeout: Duration,
    /// Ends the server when the model is retired, instead of refusing every request from then on.
    pub exit_on_failure: bool,
    /// Threads that validate and tokenise; 0 means one per core.
    pub prepare_threads: usize,
    /// Refuses requests that name a model which is not listed, instead of answering under any name.
    pub strict_models: bool,
    /// Adds `latency_ms` to answers, as the reference service does.
    pub kev_latency_ms: bool,
    /// Adds `usage.input_tokens_details.cached_tokens` to answers.
    pub cached_token_details: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            api_keys: ApiKeys::default(),
            tls: None,
            span_parent: None,
            cors: Cors::default(),
            max_body_bytes: 16 << 20,
            body_memory_bytes: 256 << 20,
            deadline: Duration::from_secs(10),
            max_deadline: Duration::from_secs(60),
            handshake_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            head_timeout: Duration::from_secs(15),
            write_timeout: Duration::from_secs(30),
            max_connections: 4096,
            drain_delay: Duration::ZERO,
            drain_timeout: Duration::from_secs(30),
            exit_on_failure: false,
            prepare_threads: 0,
            strict_models: false,
            kev_latency_ms: false,
            cached_token_details: false,
        }
    }
}

/// What every handler shares.
pub(crate) struct App {
    pub(crate) service: Service,
    pub(crate) options: ServerOptions,
    pub(crate) pool: Pool,
    /// One permit per byte of a body held.
    pub(crate) body_memory: Arc<Semaphore>,
    pub(crate) models: Bytes,
    pub(crate) openapi: Bytes,
    pub(crate) metrics: Metrics,
    pub(crate) leaving: Leaving,
}

impl App {
    pub(crate) fn new(service: Service, options: ServerOptions) -> Result<Arc<Self>, serde_json::Error> {
        let models = crate::wire::models(&service.models)?.into();
        let openapi = openapi::openapi(!options.api_keys.is_empty())?.into();
        let threads = match options.prepare_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let memory = options.body_memory_bytes.min(Semaphore::MAX_PERMITS);
        Ok(Arc::new(Self {
            service,
            options,
            pool: Pool::new(threads),
            body_memory: Arc::new(Semaphore::new(memory)),
            models,
            openapi,
            metrics: Metrics::default(),
            leaving: Leaving::default(),
        }))
    }
}
