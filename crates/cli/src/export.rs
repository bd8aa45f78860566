//! Owns `omni-kev export`.

use std::path::PathBuf;

use anyhow::Result;
use artifact::{CpuMerger, ExportOptions, Merger, Pins, export_with};
use clap::ValueEnum;
use executor::CudaMerger;

use crate::progress::Shown;

/// Where an adapter is merged.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum MergeDevice {
    /// On this machine's cores: the same bits everywhere.
    Cpu,
    /// On a GPU by cuBLAS, as the official service does; profile service asks for it.
    Cuda,
}

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
    /// Where the adapter is merged
    #[arg(long, env = "OMNI_KEV_MERGE_DEVICE", value_enum, default_value = "cpu")]
    merge_device: MergeDevice,
    /// GPU that merges, in the driver's order
    #[arg(long, env = "OMNI_KEV_DEVICES", default_value_t = 0)]
    devices: usize,
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
    let merger: Box<dyn Merger> = match arguments.merge_device {
        MergeDevice::Cpu => Box::new(CpuMerger),
        MergeDevice::Cuda => Box::new(CudaMerger::open(arguments.devices)?),
    };
    let summary = export_with(&options, merger.as_ref(), &Shown::new())?;
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
