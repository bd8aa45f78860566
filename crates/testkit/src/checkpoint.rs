//! Exports of synthetic checkpoints for tests.

use artifact::synth::{Preset, Recipe, synthesize};
use artifact::{ArtifactError, Export, ExportOptions, Geometry, OpenOptions, Silent, export};
use tempfile::TempDir;

/// An export of the tiny geometry, and the directory that holds it until it is dropped.
///
/// # Errors
/// [`ArtifactError`] of any step.
pub fn tiny(seed: u64) -> Result<(TempDir, Export), ArtifactError> {
    exported(&Preset::Tiny.recipe(), seed)
}

/// As [`tiny`], with the head shapes of the released models, for which GPUs have kernels of their own.
///
/// # Errors
/// As [`tiny`].
pub fn released_heads(seed: u64) -> Result<(TempDir, Export), ArtifactError> {
    let mut recipe = Preset::Tiny.recipe();
    recipe.geometry = Geometry {
        hidden: 256,
        intermediate: 512,
        head_dim: 256,
        rotary_dim: 64,
        linear_key_dim: 128,
        linear_value_dim: 128,
        ..recipe.geometry
    };
    exported(&recipe, seed)
}

fn exported(recipe: &Recipe, seed: u64) -> Result<(TempDir, Export), ArtifactError> {
    let dir = tempfile::tempdir().map_err(|source| ArtifactError::Io {
        path: std::env::temp_dir(),
        action: "create a directory in",
        source,
    })?;
    let checkpoint = dir.path().join("checkpoint");
    synthesize(recipe, seed, &checkpoint, &Silent)?;
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
