//! Owns `omni-kev export`.

use std::path::PathBuf;

use anyhow::Result;
use artifact::{ExportOptions, Pins, export};

use crate::progress::Shown;

/// Arguments of `export`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the adapter and head
    #[arg(long, env = "OMNI_KEV_ADAPTER")]
    adapter: PathBuf,
    /// Directory of the base checkpoint
    #[arg(long, env = "OMNI_KEV_BASE")]
    base: PathBuf,
    /// Directory to create
    #[arg(long, env = "OMNI_KEV_OUT")]
    out: PathBuf,
    /// Identity and hashes that the export must have, a JSON file
    #[arg(long, env = "OMNI_KEV_PINS")]
    pins: Option<PathBuf>,
    /// Leave out the unmerged projections; profile exact is then refused
    #[arg(long, env = "OMNI_KEV_NO_EXACT")]
    no_exact: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let options = ExportOptions {
        adapter: arguments.adapter.clone(),
        base: arguments.base.clone(),
        out: arguments.out.clone(),
        pins: arguments.pins.as_ref().map(|path| Pins::read(path)).transpose()?,
        exact_companion: !arguments.no_exact,
        commit: option_env!("OMNI_KEV_COMMIT").map(str::to_owned),
    };
    let summary = export(&options, &Shown::new())?;
    let manifest = &summary.manifest;
    eprintln!(
        "exported {} ({} modules merged, {} files, {} bytes) to {}",
        manifest.profile,
        manifest.lora.modules,
        manifest.files.len() + 2,
        summary.bytes,
        options.out.display()
    );
    Ok(())
}
