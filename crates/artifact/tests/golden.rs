//! The exporter against the reference's merge, on the golden checkpoint. Runs only in the golden tier.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

use std::path::PathBuf;

use artifact::{Export, ExportOptions, OpenOptions, Silent, export};
use sha2::{Digest, Sha256};

fn golden() -> PathBuf {
    std::env::var_os("OMNI_KEV_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden")),
        PathBuf::from,
    )
}

#[test]
fn merged_weights_have_the_hashes_of_the_reference() {
    let out = tempfile::tempdir().unwrap();
    let options = ExportOptions {
        adapter: golden().join("tiny-a/adapter"),
        base: golden().join("tiny-a/base"),
        out: out.path().join("export"),
        pins: None,
        exact_companion: true,
        commit: None,
    };
    export(&options, &Silent).unwrap();
    let opened = Export::open(&options.out, &OpenOptions::default()).unwrap();
    let recorded = std::fs::read(golden().join("merge-sha256.json")).unwrap();
    let recorded: serde_json::Value = serde_json::from_slice(&recorded).unwrap();
    let modules = recorded.get("modules").unwrap_or(&recorded).as_object().unwrap();
    let mut equal = 0;
    for (name, record) in modules {
        let Some(digest) = record["sha256"].as_str() else { continue };
        let name = name.rsplit("language_model.").next().unwrap().trim_start_matches("model.");
        let name = if name.ends_with(".weight") { name.to_owned() } else { format!("{name}.weight") };
        let tensor = opened.tensor(&name).unwrap();
        assert_eq!(hex::encode(Sha256::digest(&tensor.data)), digest, "{name}");
        equal += 1;
    }
    assert_eq!(equal, 62);
}
