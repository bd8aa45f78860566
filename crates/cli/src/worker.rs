//! Owns a worker's life in one process: verify, load, warm up, listen, drain. `serve` and `demo` are two ways to start it.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use acceptance::Standing;
use anyhow::{Context, Result};
use artifact::{Export, MANIFEST};
use executor::CacheStats;
use scheduler::{Scheduler, SchedulerOptions};
use server::{ApiKeys, CacheProbe, CacheSnapshot, Cors, ModelCard, ServerOptions, Service, Tls};
use tokio::net::{TcpListener, TcpSocket};

use crate::Internal;
use crate::engine::{Engine, EngineArguments, ProcessorArguments, open_engines};
use crate::hangup::Files;
use crate::keys;
use crate::qualification::RequireArguments;

/// Everything about a worker but where it listens and what it serves.
#[derive(Clone, clap::Args)]
pub(crate) struct WorkerArguments {
    /// File with the API keys that clients may send, one a line: a key, or sha256: and its digest, after a name for the
    /// log if it is to have one; # begins a comment
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
    /// The longest that a request may ask for instead, by x-request-timeout-ms; by default 60,000, or --deadline-ms if that is
    /// more
    #[arg(long, env = "OMNI_KEV_MAX_DEADLINE_MS")]
    max_deadline_ms: Option<u64>,
    /// Let web pages of this origin, scheme://host or scheme://host:port, read answers; again for each origin, or * alone for any
    #[arg(long = "cors-origin", env = "OMNI_KEV_CORS_ORIGIN", value_name = "ORIGIN", value_delimiter = ',')]
    cors_origins: Vec<String>,
    /// Longest body, in bytes, before and after decompression
    #[arg(long, env = "OMNI_KEV_MAX_BODY_BYTES", default_value_t = 16 << 20)]
    max_body_bytes: usize,
    /// Connections at once
    #[arg(long, env = "OMNI_KEV_MAX_CONNECTIONS", default_value_t = 4096)]
    max_connections: usize,
    /// Accept clients from other machines without a key
    #[arg(long, env = "OMNI_KEV_INSECURE")]
    insecure: bool,
    /// Time after a stop signal in which requests are still accepted while /ready says no, in milliseconds
    #[arg(long, env = "OMNI_KEV_DRAIN_DELAY", default_value_t = 5_000)]
    drain_delay: u64,
    /// Time that admitted requests get to finish after a stop signal, in milliseconds
    #[arg(long, env = "OMNI_KEV_DRAIN_TIMEOUT", default_value_t = 30_000)]
    drain_timeout: u64,
    /// End with exit code 70 when the model fails, instead of refusing every request until a restart
    #[arg(long, env = "OMNI_KEV_EXIT_ON_FAILURE")]
    exit_on_failure: bool,
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
    qualification: RequireArguments,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

impl WorkerArguments {
    /// These for a demonstration: the CPU where the choice was left open, since compiled kernels may not be there, and no
    /// waiting for balancers.
    pub(crate) fn demonstration(mut self) -> Self {
        self.engine = self.engine.on_cpu();
        self.drain_delay = 0;
        self
    }
}

/// A worker that has answered its warm-up and may listen.
pub(crate) struct Worker {
    service: Service,
    options: ServerOptions,
    key_file: Option<PathBuf>,
    insecure: bool,
    ends_with_terminal: bool,
}

impl Worker {
    /// Verifies an export, loads it and warms up.
    pub(crate) fn start(export: &Path, arguments: &WorkerArguments) -> Result<Self> {
        // What can be wrong with the arguments is said before anything takes long.
        let max_deadline_ms = arguments.max_deadline_ms.unwrap_or(arguments.deadline_ms.max(60_000));
        anyhow::ensure!(
            max_deadline_ms >= arguments.deadline_ms,
            "--max-deadline-ms: expected at least --deadline-ms, which is {}, found {max_deadline_ms}",
            arguments.deadline_ms
        );
        let cors = Cors::parse(&arguments.cors_origins).context("--cors-origin")?;
        let api_keys = arguments.api_key_file.as_deref().map(keys::read).transpose()?.unwrap_or_default();
        let released = written(export);
        let dir = export;
        let (export, mut engines) =
            open_engines(dir, arguments.pins.as_ref(), &arguments.engine, &arguments.processor)?;
        for engine in &mut engines {
            executor::warm_up(&mut engine.execute, &export).map_err(|error| Internal(error.to_string()))?;
        }
        let Some(engine) = engines.first() else { anyhow::bail!("--devices: expected at least one") };
        // One worker says one thing of itself, and a cached answer must not depend on the device that gives it.
        for other in &engines {
            anyhow::ensure!(
                other.identity == engine.identity,
                "--devices: {:?} and {:?} differ: give each kind a worker of its own",
                engine.identity,
                other.identity
            );
        }
        let standing = arguments.qualification.standing(dir, &export, engine)?;
        let models = cards(&export, engine, &standing, &released);
        let limits = SchedulerOptions {
            queue_requests: arguments.queue_requests,
            queue_tokens: arguments.queue_tokens,
            batch_requests: arguments.batch_requests,
            ..SchedulerOptions::default()
        };
        let caches: Vec<_> = engines.iter().map(|engine| Arc::clone(&engine.cache)).collect();
        let mut processor = None;
        let mut executors = Vec::new();
        for engine in engines {
            processor.get_or_insert(engine.processor);
            executors.push(engine.execute);
        }
        let service = Service {
            processor: processor.context("--devices: expected at least one")?,
            scheduler: Scheduler::start_all(executors, limits).context("cannot start the executors")?,
            models,
            qualification: standing.word(),
            cache: Some(CacheProbe::new(move || {
                let sum = |pick: fn(&CacheStats) -> &AtomicU64| {
                    caches.iter().map(|cache| pick(cache).load(Ordering::Relaxed)).sum()
                };
                CacheSnapshot {
                    hits: sum(|cache| &cache.hits),
                    misses: sum(|cache| &cache.misses),
                    evictions: sum(|cache| &cache.evictions),
                    states: sum(|cache| &cache.states),
                    bytes: sum(|cache| &cache.bytes),
                }
            })),
        };
        let options = ServerOptions {
            max_body_bytes: arguments.max_body_bytes,
            max_connections: arguments.max_connections,
            deadline: Duration::from_millis(arguments.deadline_ms),
            max_deadline: Duration::from_millis(max_deadline_ms),
            cors,
            exit_on_failure: arguments.exit_on_failure,
            drain_timeout: Duration::from_millis(arguments.drain_timeout),
            strict_models: arguments.strict_models,
            kev_latency_ms: arguments.kev_latency_ms,
            cached_token_details: arguments.cached_token_details,
            drain_delay: Duration::from_millis(arguments.drain_delay),
            api_keys: ApiKeys::from(api_keys),
            ..ServerOptions::default()
        };
        let key_file = arguments.api_key_file.clone();
        let (insecure, ends_with_terminal) = (arguments.insecure, false);
        Ok(Self { service, options, key_file, insecure, ends_with_terminal })
    }

    /// The same, ended by SIGHUP as any other process: a demonstration ends with its terminal.
    pub(crate) fn ending_with_terminal(mut self) -> Self {
        self.ends_with_terminal = true;
        self
    }

    /// The same over TLS.
    pub(crate) fn with_tls(mut self, tls: Option<Tls>) -> Self {
        self.options.tls = tls;
        self
    }

    /// The same with parents for its spans.
    #[cfg(feature = "otlp")]
    pub(crate) fn with_span_parent(mut self, parent: server::SpanParent) -> Self {
        self.options.span_parent = Some(parent);
        self
    }

    /// Binds, prints where it listens, serves until `stop` completes and drains.
    pub(crate) async fn listen(
        self,
        host: &str,
        port: u16,
        listening: impl FnOnce(SocketAddr),
        stop: impl Future<Output = ()>,
    ) -> Result<()> {
        let listener = bound(host, port).await.with_context(|| format!("cannot listen on {host}:{port}"))?;
        let address = listener.local_addr()?;
        // Whatever the transport: TLS keeps others from listening, not from asking.
        anyhow::ensure!(
            address.ip().is_loopback() || self.insecure || !self.options.api_keys.is_empty(),
            "{address} can be reached from other machines: give --api-key-file, or --insecure if that is meant"
        );
        let keys = self.key_file.map(|path| (path, self.options.api_keys.clone()));
        if self.ends_with_terminal {
            tracing::debug!("SIGHUP ends this process");
        } else {
            // Before anybody knows the address and may send the signal.
            Files { keys, tls: self.options.tls.clone() }.reread_on_hangup()?;
        }
        let scheme = if self.options.tls.is_some() { "https" } else { "http" };
        println!("listening on {scheme}://{address}");
        listening(address);
        server::serve(listener, self.service, self.options, stop).await.context("the server failed")
    }
}

/// Connections that may wait to be accepted. With the 128 that listeners have by default, a burst of clients waits for whole
/// seconds of retransmission.
const BACKLOG: u32 = 4096;

/// A listener on the first address of a name that can be had.
async fn bound(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut last = std::io::Error::other("the name has no address");
    for address in tokio::net::lookup_host((host, port)).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // As listeners of the library are: a restart does not wait for the old connections' end.
        socket.set_reuseaddr(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// When an export was written: the only date that is known of a model.
fn written(export: &Path) -> String {
    let modified = fs::metadata(export.join(MANIFEST)).and_then(|manifest| manifest.modified());
    humantime::format_rfc3339_micros(modified.unwrap_or(SystemTime::UNIX_EPOCH)).to_string()
}

/// Both names that clients use, for the same model.
fn cards(export: &Export, engine: &Engine, standing: &Standing, released: &str) -> Vec<ModelCard> {
    let description = format!(
        "{} on {}, profile {}, {}",
        export.manifest.profile,
        engine.backend,
        engine.profile.name(),
        match standing {
            Standing::Qualified(_) => "qualified",
            Standing::Failed(_) => "qualification failed",
            Standing::Unqualified => "not qualified",
        }
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

/// SIGINT or SIGTERM; a second one ends the process at once. Caught from the return of this on, so before anybody is told where the
/// worker listens. Needs a runtime.
pub(crate) fn stop_signal() -> Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let mut stopped = async move || {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    Ok(async move {
        stopped().await;
        tokio::spawn(async move {
            stopped().await;
            std::process::exit(130);
        });
    })
}
