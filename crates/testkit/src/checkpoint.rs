//! Exports of synthetic checkpoints for tests.

use artifact::synth::{Preset, Recipe, synthesize};
use artifact::{
    ArtifactError, CpuMerger, Export, ExportOptions, Geometry, Merger, OpenOptions, Silent, export_with,
};
use tempfile::TempDir;

/// An export of the tiny geometry, and the directory that holds it until it is dropped.
///
/// # Errors
/// [`ArtifactError`] of any step.
pub fn tiny(seed: u64) -> Result<(TempDir, Export), ArtifactError> {
    exported(&Preset::Tiny.recipe(), seed, &CpuMerger)
}

/// As [`tiny`], with the head shapes of the released models, for which GPUs have kernels of their own.
///
/// # Errors
/// As [`tiny`].
pub fn released_heads(seed: u64) -> Result<(TempDir, Export), ArtifactError> {
    released_heads_merged(seed, &CpuMerger)
}

/// As [`released_heads`], merged elsewhere.
///
/// # Errors
/// As [`tiny`].
pub fn released_heads_merged(seed: u64, merger: &dyn Merger) -> Result<(TempDir, Export), ArtifactError> {
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
    exported(&recipe, seed, merger)
}

fn exported(recipe: &Recipe, seed: u64, merger: &dyn Merger) -> Result<(TempDir, Export), ArtifactError> {
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
    export_with(&options, merger, &Silent)?;
    let export = Export::open(&options.out, &OpenOptions::default())?;
    Ok((dir, export))
}
