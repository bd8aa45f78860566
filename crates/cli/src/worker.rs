//! Owns a worker's life in one process: verify, load, warm up, listen, drain. `serve` and `demo` are two ways to start it.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use artifact::{Export, MANIFEST};
use scheduler::{Scheduler, SchedulerOptions};
use server::{ApiKey, ModelCard, ServerOptions, Service};
use tokio::net::TcpListener;

use crate::Internal;
use crate::engine::{Engine, EngineArguments, ProcessorArguments, open_engine};

/// Everything about a worker but where it listens and what it serves.
#[derive(Clone, clap::Args)]
pub(crate) struct WorkerArguments {
    /// File whose first line is the API key that clients must send
    #[arg(long, env = "OMNI_KEV_API_KEY_FILE", value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Identity and hashes that the export must have, a JSON file
    #[arg(long, env = "OMNI_KEV_PINS", value_name = "FILE")]
    pins: Option<PathBuf>,
    /// Requests waiting or running at most
    #[arg(long, env = "OMNI_KEV_QUEUE_REQUESTS", default_value_t = 256)]
    queue_requests: usize,
    /// Their tokens at most
    #[arg(long, env = "OMNI_KEV_QUEUE_TOKENS", default_value_t = 1 << 20)]
    queue_tokens: usize,
    /// Requests that share a batch at most
    #[arg(long, env = "OMNI_KEV_BATCH_REQUESTS", default_value_t = 64)]
    batch_requests: usize,
    /// Time from a request's headers to its answer, in milliseconds
    #[arg(long, env = "OMNI_KEV_DEADLINE_MS", default_value_t = 10_000)]
    deadline_ms: u64,
    /// Longest body, in bytes, before and after decompression
    #[arg(long, env = "OMNI_KEV_MAX_BODY_BYTES", default_value_t = 16 << 20)]
    max_body_bytes: usize,
    /// Connections at once
    #[arg(long, env = "OMNI_KEV_MAX_CONNECTIONS", default_value_t = 4096)]
    max_connections: usize,
    /// Time that admitted requests get to finish after a stop signal, in milliseconds
    #[arg(long, env = "OMNI_KEV_DRAIN_TIMEOUT", default_value_t = 30_000)]
    drain_timeout: u64,
    /// Refuse requests that name a model which /v1/models does not list
    #[arg(long, env = "OMNI_KEV_STRICT_MODELS")]
    strict_models: bool,
    /// Put latency_ms into answers, as the reference service does
    #[arg(long, env = "OMNI_KEV_KEV_LATENCY_MS")]
    kev_latency_ms: bool,
    /// Put usage.input_tokens_details.cached_tokens into answers
    #[arg(long, env = "OMNI_KEV_CACHED_TOKEN_DETAILS")]
    cached_token_details: bool,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

impl WorkerArguments {
    /// These, with the CPU where they leave the choice open: a demonstration needs no compiled kernels.
    pub(crate) fn on_cpu(mut self) -> Self {
        self.engine = self.engine.on_cpu();
        self
    }
}

/// A worker that has answered its warm-up and may listen.
pub(crate) struct Worker {
    service: Service,
    options: ServerOptions,
}

impl Worker {
    /// Verifies an export, loads it and warms up.
    pub(crate) fn start(export: &Path, arguments: &WorkerArguments) -> Result<Self> {
        let api_key = arguments.api_key_file.as_deref().map(read_key).transpose()?;
        let released = written(export);
        let (export, mut engine) = open_engine(
            export,
            arguments.pins.as_ref(),
            &arguments.engine,
            &arguments.processor,
            |_| Ok(()),
        )?;
        executor::warm_up(&mut engine.execute, &export).map_err(|error| Internal(error.to_string()))?;
        let models = cards(&export, &engine, &released);
        let limits = SchedulerOptions {
            queue_requests: arguments.queue_requests,
            queue_tokens: arguments.queue_tokens,
            batch_requests: arguments.batch_requests,
            ..SchedulerOptions::default()
        };
        let service = Service {
            processor: engine.processor,
            scheduler: Scheduler::start(engine.execute, limits).context("cannot start the executor")?,
            models,
        };
        let options = ServerOptions {
            max_body_bytes: arguments.max_body_bytes,
            max_connections: arguments.max_connections,
            deadline: Duration::from_millis(arguments.deadline_ms),
            drain_timeout: Duration::from_millis(arguments.drain_timeout),
            strict_models: arguments.strict_models,
            kev_latency_ms: arguments.kev_latency_ms,
            cached_token_details: arguments.cached_token_details,
            api_key,
            ..ServerOptions::default()
        };
        Ok(Self { service, options })
    }

    /// Binds, prints where it listens, serves until `stop` completes and drains.
    pub(crate) async fn listen(
        self,
        host: &str,
        port: u16,
        listening: impl FnOnce(SocketAddr),
        stop: impl Future<Output = ()>,
    ) -> Result<()> {
        let listener = TcpListener::bind((host, port))
            .await
            .with_context(|| format!("cannot listen on {host}:{port}"))?;
        let address = listener.local_addr()?;
        println!("listening on http://{address}");
        listening(address);
        server::serve(listener, self.service, self.options, stop).await.context("the server failed")
    }
}

/// When an export was written: the only date that is known of a model.
fn written(export: &Path) -> String {
    let modified = fs::metadata(export.join(MANIFEST)).and_then(|manifest| manifest.modified());
    humantime::format_rfc3339_micros(modified.unwrap_or(SystemTime::UNIX_EPOCH)).to_string()
}

/// Both names that clients use, for the same model.
fn cards(export: &Export, engine: &Engine, released: &str) -> Vec<ModelCard> {
    let description = format!(
        "{} on {}, profile {}, not qualified",
        export.manifest.profile,
        engine.backend,
        engine.profile.name()
    );
    ["kev-latest", "jev-latest"]
        .map(|name| ModelCard {
            name: name.to_owned(),
            description: description.clone(),
            release_date: released.to_owned(),
            ..ModelCard::default()
        })
        .to_vec()
}

fn read_key(path: &Path) -> Result<ApiKey> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let key = text.lines().next().unwrap_or("").trim().to_owned();
    anyhow::ensure!(!key.is_empty(), "{}: the first line is empty, expected an API key", path.display());
    Ok(ApiKey::new(&key))
}

/// SIGINT or SIGTERM.
pub(crate) async fn stop_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        let _ = tokio::signal::ctrl_c().await;
        return;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}
