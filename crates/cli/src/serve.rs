//! Owns `omni-kev serve`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use server::Tls;

use crate::worker::{Worker, WorkerArguments, stop_signal};

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
    /// Speak TLS with this certificate and its chain, a PEM file, read again on SIGHUP; needs --tls-key
    #[arg(long, env = "OMNI_KEV_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, a PEM file without a password; needs --tls-cert
    #[arg(long, env = "OMNI_KEV_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Send a span for every request to the OpenTelemetry collector at this URL, http://host:port or with a path after it
    #[cfg(feature = "otlp")]
    #[arg(long, env = "OMNI_KEV_OTLP_ENDPOINT", value_name = "URL")]
    pub(crate) otlp_endpoint: Option<crate::otlp::Endpoint>,
    #[command(flatten)]
    worker: WorkerArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let tls = match (&arguments.tls_cert, &arguments.tls_key) {
        (Some(certificate), Some(key)) => Some(Tls::open(certificate, key)?),
        _ => None,
    };
    let worker = Worker::start(&arguments.export, &arguments.worker)?.with_tls(tls);
    #[cfg(feature = "otlp")]
    let worker = if arguments.otlp_endpoint.is_some() {
        worker.with_span_parent(crate::otlp::span_parent())
    } else {
        worker
    };
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    runtime.block_on(async {
        let stop = stop_signal()?;
        worker.listen(&arguments.host, arguments.port, |_| {}, stop).await
    })
}
