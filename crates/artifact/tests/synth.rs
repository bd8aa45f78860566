//! Synthetic checkpoints: the same bytes everywhere, and accepted by the exporter like published ones.
#![allow(clippy::unwrap_used)] // A failure here is a failed test.

use std::fs;
use std::path::Path;

use artifact::synth::{Preset, synthesize};
use artifact::{Adapter, Base, Export, ExportOptions, OpenOptions, Silent, TensorType, export};

fn made(dir: &Path, seed: u64) -> String {
    synthesize(&Preset::Tiny.recipe(), seed, dir, &Silent).unwrap().sha256
}

#[test]
fn a_seed_gives_the_same_bytes_on_every_machine() {
    let dir = tempfile::tempdir().unwrap();
    let one = made(&dir.path().join("one"), 0);
    // Figures and captures name checkpoints by geometry and seed. A change here needs a new number of the recipe.
    assert_eq!(one, "9135a4b490204d26a3da1d07f07e02048cb366117aa6dccb44cd262a398f0790");
    assert_eq!(one, made(&dir.path().join("two"), 0));
    assert_ne!(one, made(&dir.path().join("three"), 1));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    assert_eq!(one, pool.install(|| made(&dir.path().join("four"), 0)));
}

#[test]
fn the_exporter_takes_a_synthetic_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    made(&dir.path().join("checkpoint"), 0);
    let options = ExportOptions {
        adapter: dir.path().join("checkpoint/adapter"),
        base: dir.path().join("checkpoint/base"),
        out: dir.path().join("export"),
        pins: None,
        exact_companion: true,
        commit: None,
    };
    let manifest = export(&options, &Silent).unwrap().manifest;
    assert_eq!((manifest.lora.modules, manifest.profile.as_str()), (62, "custom"));
    let opened = Export::open(&options.out, &OpenOptions::default()).unwrap();
    assert_eq!(opened.geometry, Preset::Tiny.recipe().geometry);
    assert!(opened.tokenizer().vocab_size() <= opened.geometry.vocab);
}

#[test]
fn weights_follow_the_recipe() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("checkpoint");
    made(&out, 0);
    let base = Base::open(&out.join("base")).unwrap();
    for spec in base.geometry.tensors() {
        let tensor = base.tensor(&spec).unwrap();
        let values: Vec<f64> = tensor.to_f32().into_iter().map(f64::from).collect();
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt();
        let (centre, spread) = match spec.name.as_str() {
            name if name.ends_with("A_log") => {
                assert_eq!(tensor.dtype, TensorType::F32);
                assert!(values.iter().all(|value| (-3.92..-0.65).contains(value)), "{values:?}");
                continue;
            }
            name if name.ends_with("dt_bias") => (-1.0, 1.0),
            name if name.ends_with("linear_attn.norm.weight") => (1.0, 0.2),
            name if name.ends_with("conv1d.weight") => (0.0, 0.5),
            "embed_tokens.weight" => (0.0, 1.0),
            name if name.ends_with("norm.weight") => (0.0, 0.2),
            name if ["o_proj", "out_proj", "down_proj"].iter().any(|end| name.contains(end)) => {
                (0.0, 0.1 / (spec.shape[1] as f64).sqrt())
            }
            _ => (0.0, 1.0 / (spec.shape[1] as f64).sqrt()),
        };
        // Five standard errors of a mean and of a deviation.
        let error = 5.0 * spread / count.sqrt();
        assert!((mean - centre).abs() < error, "{}: mean {mean}", spec.name);
        assert!((deviation - spread).abs() < error, "{}: deviation {deviation}", spec.name);
    }
    let adapter = Adapter::open(&out.join("adapter"), &base.geometry).unwrap();
    assert_eq!((adapter.rank, adapter.alpha, adapter.modules.len()), (16, 32.0, 62));
    assert_eq!(adapter.temperature, 2.406050072164233);
}

#[test]
fn released_geometries_have_the_published_number_of_parameters() {
    let parameters = |preset: Preset| -> usize {
        let geometry = preset.recipe().geometry;
        let text: usize = geometry.tensors().iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
        // An untied output head is not part of what this program reads.
        text + if geometry.tied_embeddings { 0 } else { geometry.vocab * geometry.hidden }
    };
    assert_eq!(parameters(Preset::Kev08b), 752_393_024);
    assert_eq!(parameters(Preset::Kev4b), 4_205_751_296);
    assert_eq!(parameters(Preset::Kev9b), 8_953_803_264);
    assert_eq!(parameters(Preset::Kev27b), 26_895_998_464);
    let modules = |preset: Preset| preset.recipe().geometry.tensors().iter().filter(|s| s.projection).count();
    assert_eq!([Preset::Kev08b, Preset::Kev4b, Preset::Kev27b].map(modules), [186, 248, 496]);
}

#[test]
fn an_existing_directory_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("kept"), "kept").unwrap();
    let error = synthesize(&Preset::Tiny.recipe(), 0, dir.path(), &Silent).unwrap_err().to_string();
    assert!(error.contains(&dir.path().display().to_string()), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
