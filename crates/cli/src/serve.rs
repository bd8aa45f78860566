//! Owns `omni-kev serve`.

use std::path::PathBuf;

use anyhow::{Context, Result};

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
    #[command(flatten)]
    worker: WorkerArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let worker = Worker::start(&arguments.export, &arguments.worker)?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    runtime.block_on(worker.listen(&arguments.host, arguments.port, |_| {}, stop_signal()))
}
