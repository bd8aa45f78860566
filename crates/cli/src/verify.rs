//! Owns `omni-kev verify`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use artifact::Pins;

use crate::engine::open;

/// Arguments of `verify`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// Identity and hashes that it must have, a JSON file
    #[arg(long, env = "OMNI_KEV_PINS")]
    pins: Option<PathBuf>,
    /// Write pins that hold this export to what it is now
    #[arg(long, env = "OMNI_KEV_WRITE_PINS", value_name = "FILE")]
    write_pins: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long, env = "OMNI_KEV_JSON")]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let export = open(&arguments.export, arguments.pins.as_ref())?;
    if let Some(path) = &arguments.write_pins {
        let text = serde_json::to_string_pretty(&Pins::of(&export.manifest))?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    if arguments.json {
        let result = serde_json::json!({
            "verified": true,
            "manifest_sha256": export.manifest_sha256,
            "manifest": export.manifest,
        });
        println!("{result}");
    } else {
        println!(
            "verified {}: {} files, manifest {}",
            arguments.export.display(),
            export.manifest.files.len() + 2,
            export.manifest_sha256
        );
    }
    Ok(())
}
