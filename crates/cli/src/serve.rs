//! Owns `omni-kev serve`: verify, load, warm up, then listen.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use scheduler::{Scheduler, SchedulerOptions};
use server::{ApiKey, ModelCard, ServerOptions, Service};

use crate::Internal;
use crate::engine::{EngineArguments, ProcessorArguments, open};

/// Arguments of `serve`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// Address to listen on
    #[arg(long, env = "OMNI_KEV_HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, env = "OMNI_KEV_PORT", default_value_t = 8009)]
    port: u16,
    /// File whose first line is the API key that clients must send
    #[arg(long, env = "OMNI_KEV_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Requests waiting or running at most
    #[arg(long, env = "OMNI_KEV_QUEUE_REQUESTS", default_value_t = 1024)]
    queue_requests: usize,
    /// Their tokens at most
    #[arg(long, env = "OMNI_KEV_QUEUE_TOKENS", default_value_t = 1 << 20)]
    queue_tokens: usize,
    /// Time from a request's headers to its answer, in milliseconds
    #[arg(long, env = "OMNI_KEV_DEADLINE_MS", default_value_t = 10_000)]
    deadline_ms: u64,
    /// Longest body, in bytes
    #[arg(long, env = "OMNI_KEV_MAX_BODY_BYTES", default_value_t = 16 << 20)]
    max_body_bytes: usize,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let api_key = arguments.api_key_file.as_ref().map(read_key).transpose()?;
    let export = open(&arguments.export, None)?;
    let processor = arguments.processor.processor(&export);
    let mut engine = arguments.engine.engine(&export, &processor)?;
    executor::warm_up(&mut engine, &export).map_err(|error| Internal(error.to_string()))?;
    let limits = SchedulerOptions {
        queue_requests: arguments.queue_requests,
        queue_tokens: arguments.queue_tokens,
        ..SchedulerOptions::default()
    };
    let service = Service {
        processor,
        scheduler: Scheduler::start(engine, limits).context("cannot start the executor")?,
        models: ["kev-latest", "jev-latest"]
            .map(|name| ModelCard {
                name: name.to_owned(),
                description: format!(
                    "{} on {}, profile {}, not qualified",
                    export.manifest.profile,
                    arguments.engine.backend(),
                    arguments.engine.profile()
                ),
                release_date: "2026-12-01T00:00:00.000000Z".to_owned(),
                ..ModelCard::default()
            })
            .to_vec(),
    };
    let options = ServerOptions {
        max_body_bytes: arguments.max_body_bytes,
        deadline: Duration::from_millis(arguments.deadline_ms),
        api_key,
        ..ServerOptions::default()
    };
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    runtime.block_on(async {
        let address = format!("{}:{}", arguments.host, arguments.port);
        let listener = tokio::net::TcpListener::bind(&address)
            .await
            .with_context(|| format!("cannot listen on {address}"))?;
        println!("listening on http://{}", listener.local_addr()?);
        server::serve(listener, service, options, stop_signal()).await.context("the server failed")
    })
}

fn read_key(path: &PathBuf) -> Result<ApiKey> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let key = text.lines().next().unwrap_or("").trim().to_owned();
    anyhow::ensure!(!key.is_empty(), "{}: the first line is empty, expected an API key", path.display());
    Ok(ApiKey::new(&key))
}

/// SIGINT or SIGTERM.
async fn stop_signal() {
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
