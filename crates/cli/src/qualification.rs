//! Owns qualification on this machine: `omni-kev qualify`, and what a worker does with the records it finds.

use std::path::{Path, PathBuf};

use acceptance::{Capture, Configuration, Plan, Qualification, Standing, judge};
use anyhow::{Context, Result};
use artifact::Export;
use sha2::{Digest, Sha256};

use crate::Denied;
use crate::accept;
use crate::capture::{record, unix_time, write_out};
use crate::engine::{Engine, EngineArguments, ProcessorArguments, open_engine, read_corpus};

/// Where records lie.
#[derive(Clone, clap::Args)]
pub(crate) struct FolderArguments {
    /// Folder of qualification records; by default beside the export, with .qualifications behind its name
    #[arg(long, env = "OMNI_KEV_QUALIFICATIONS", value_name = "DIR")]
    qualifications: Option<PathBuf>,
}

impl FolderArguments {
    /// The folder for an export.
    pub(crate) fn folder(&self, export: &Path) -> PathBuf {
        let beside = || {
            let mut name = export.file_name().unwrap_or_default().to_owned();
            name.push(".qualifications");
            export.with_file_name(name)
        };
        self.qualifications.clone().unwrap_or_else(beside)
    }
}

/// Arguments of `qualify`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Directory of the export
    export: PathBuf,
    /// Requests that the reference answered, one JSON object a line
    #[arg(long, env = "OMNI_KEV_CORPUS", value_name = "FILE")]
    corpus: PathBuf,
    /// Capture of the reference
    #[arg(long, env = "OMNI_KEV_REFERENCE", value_name = "FILE")]
    reference: PathBuf,
    /// Plan that was frozen for the reference; frozen now, before the native run, without it
    #[arg(long, env = "OMNI_KEV_PLAN", value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Requests that share a batch, as many as the reference's
    #[arg(long, env = "OMNI_KEV_BATCH", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: u16,
    #[command(flatten)]
    folder: FolderArguments,
    #[command(flatten)]
    processor: ProcessorArguments,
    #[command(flatten)]
    engine: EngineArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let invalid = "INVALID";
    let reference = Capture::read(&arguments.reference).context(invalid)?;
    let plan = match &arguments.plan {
        Some(path) => Plan::read(path).context(invalid)?,
        None => Plan::freeze(&reference),
    };
    let (lines, corpus_sha256) = read_corpus(&arguments.corpus)?;
    let (export, mut engine) =
        open_engine(&arguments.export, None, &arguments.engine, &arguments.processor, |_| Ok(()))?;
    let configuration = configuration(&export, &engine)?;
    let captured = record(&lines, &corpus_sha256, &export, &mut engine, arguments.batch)?;
    let folder = arguments.folder.folder(&arguments.export);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // Kept whatever the verdict is: anybody can judge it again.
    let native_path = folder.join(format!("{}.capture.jsonl.zst", configuration.key()));
    write_out(&native_path, captured.text.as_bytes())?;
    let native = Capture::read(&native_path).context(invalid)?;
    let report = judge(&reference, &native, None, Some(&plan)).context(invalid)?;
    accept::print(&report);
    let hashes = [corpus_sha256, reference.sha256.clone(), native.sha256.clone()];
    let record = Qualification::new(configuration, &report, hashes, unix_time());
    let path = record.write(&folder)?;
    eprintln!("recorded in {}; the capture is {}", path.display(), native_path.display());
    if report.passed { Ok(()) } else { Err(Denied("a gate failed: not qualified".to_owned()).into()) }
}

/// The configuration of this process.
pub(crate) fn configuration(export: &Export, engine: &Engine) -> Result<Configuration> {
    let executable = std::env::current_exe().context("cannot find this executable")?;
    let bytes =
        std::fs::read(&executable).with_context(|| format!("cannot read {}", executable.display()))?;
    let profile = engine.profile.name();
    Ok(Configuration {
        manifest_sha256: export.manifest_sha256.clone(),
        profile: engine.form.map_or_else(|| profile.to_owned(), |form| format!("{profile}, {form}")),
        build_sha256: hex::encode(Sha256::digest(&bytes)),
        device: engine.identity.clone(),
    })
}

/// What a worker insists on.
#[derive(Clone, clap::Args)]
pub(crate) struct RequireArguments {
    #[command(flatten)]
    folder: FolderArguments,
    /// Refuse to serve a configuration that is not qualified
    #[arg(long, env = "OMNI_KEV_REQUIRE_QUALIFIED")]
    require_qualified: bool,
    /// Serve a configuration whose qualification failed
    #[arg(long, env = "OMNI_KEV_ALLOW_FAILED_QUALIFICATION", conflicts_with = "require_qualified")]
    allow_failed_qualification: bool,
}

impl RequireArguments {
    /// Looks this configuration up, and refuses what the arguments do not allow.
    pub(crate) fn standing(&self, dir: &Path, export: &Export, engine: &Engine) -> Result<Standing> {
        let folder = self.folder.folder(dir);
        let configuration = configuration(export, engine)?;
        let standing = Qualification::find(&folder, &configuration)?;
        let key = configuration.key();
        match &standing {
            Standing::Qualified(record) => tracing::info!(
                key,
                questions = record.questions,
                largest_error = record.largest_error,
                "this configuration is qualified"
            ),
            Standing::Failed(record) => {
                let gates = record.failed_gates.join("; ");
                anyhow::ensure!(
                    self.allow_failed_qualification,
                    "the qualification of this configuration failed ({gates}); give --allow-failed-qualification to serve it all \
                     the same, or qualify again: {}",
                    Qualification::path(&folder, &configuration).display()
                );
                tracing::warn!(key, gates, "serving a configuration whose qualification failed");
            }
            Standing::Unqualified => {
                anyhow::ensure!(
                    !self.require_qualified,
                    "this configuration is not qualified: expected a record {}; run omni-kev qualify, or leave \
                     --require-qualified out",
                    Qualification::path(&folder, &configuration).display()
                );
                tracing::warn!(key, "this configuration is not qualified");
            }
        }
        Ok(standing)
    }
}
