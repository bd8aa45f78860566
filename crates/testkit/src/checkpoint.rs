//! Exports of synthetic checkpoints for tests.

use artifact::synth::{Preset, synthesize};
use artifact::{ArtifactError, Export, ExportOptions, OpenOptions, Silent, export};
use tempfile::TempDir;

/// An export of the tiny geometry, and the directory that holds it until it is dropped.
///
/// # Errors
/// [`ArtifactError`] of any step.
pub fn tiny(seed: u64) -> Result<(TempDir, Export), ArtifactError> {
    let dir = tempfile::tempdir().map_err(|source| ArtifactError::Io {
        path: std::env::temp_dir(),
        action: "create a directory in",
        source,
    })?;
    let checkpoint = dir.path().join("checkpoint");
    synthesize(&Preset::Tiny.recipe(), seed, &checkpoint, &Silent)?;
    let options = ExportOptions {
        adapter: checkpoint.join("adapter"),
        base: checkpoint.join("base"),
        out: dir.path().join("export"),
        pins: None,
        exact_companion: true,
        commit: None,
    };
    export(&options, &Silent)?;
    let export = Export::open(&options.out, &OpenOptions::default())?;
    Ok((dir, export))
}
