//! Owns `omni-kev synth`.

use std::path::PathBuf;

use anyhow::Result;
use artifact::synth::{Preset, synthesize};
use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::progress::Shown;

/// A preset on the command line.
#[derive(Clone, Copy)]
struct Geometry(Preset);

impl ValueEnum for Geometry {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [Geometry; Preset::ALL.len()] = {
            let mut all = [Geometry(Preset::Tiny); Preset::ALL.len()];
            let mut index = 0;
            while index < all.len() {
                all[index] = Geometry(Preset::ALL[index]);
                index += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// Arguments of `synth`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Sizes of the model
    #[arg(long, env = "OMNI_KEV_GEOMETRY", value_enum)]
    geometry: Geometry,
    /// Seed of the random weights
    #[arg(long, env = "OMNI_KEV_SEED", default_value_t = 0)]
    seed: u64,
    /// Directory to create; it gets a base and an adapter directory
    #[arg(long, env = "OMNI_KEV_OUT")]
    out: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let summary = synthesize(&arguments.geometry.0.recipe(), arguments.seed, &arguments.out, &Shown::new())?;
    eprintln!(
        "synthesized {} with seed {}: {} bytes in {}, random weights",
        arguments.geometry.0.name(),
        arguments.seed,
        summary.bytes,
        arguments.out.display()
    );
    println!("{}", summary.sha256);
    Ok(())
}
