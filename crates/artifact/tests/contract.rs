//! The load contract, rule by rule: every way to break an export is refused, and the refusal names what is broken.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use artifact::{Export, OpenOptions, Pins, Silent};
use serde_json::{Value, json};
use support::{Copy, EXACT, HEAD, INDEX, MANIFEST, SEAL, SHARD, joined, span, split};

const PREFIX: &str = "model.language_model.";

fn listed() -> Vec<String> {
    let mut names: Vec<String> =
        Copy::export().json(MANIFEST)["files"].as_object().unwrap().keys().cloned().collect();
    names.extend([MANIFEST.to_owned(), SEAL.to_owned()]);
    names
}

#[test]
fn an_export_that_nobody_touched_opens() {
    assert!(Copy::export().open().is_ok());
    assert_eq!(listed().len(), 9, "{:?}", listed());
}

#[test]
fn a_missing_file_is_named() {
    for name in listed() {
        let copy = Copy::export();
        fs::remove_file(copy.path(&name)).unwrap();
        copy.refused(&[&name, "missing"]);
    }
}

#[test]
fn an_unlisted_file_is_named_above_all_one_that_would_shadow_verified_weights() {
    for name in
        ["model.safetensors", "pytorch_model.bin", "model-00002-of-00002.safetensors", ".hidden", "a b"]
    {
        let copy = Copy::export();
        copy.write(name, b"");
        copy.refused(&[name, "not listed", "remove it"]);
    }
    let copy = Copy::export();
    fs::create_dir(copy.path("folder")).unwrap();
    copy.refused(&["folder", "not listed"]);
}

#[test]
fn only_regular_files_are_read_and_nothing_waits_for_a_pipe() {
    for name in listed() {
        let copy = Copy::export();
        let elsewhere = copy.root().with_file_name("elsewhere");
        fs::rename(copy.path(&name), &elsewhere).unwrap();
        symlink(&elsewhere, copy.path(&name)).unwrap();
        copy.refused(&[&name, "a symbolic link", "regular file"]);

        fs::remove_file(copy.path(&name)).unwrap();
        assert!(Command::new("mkfifo").arg(copy.path(&name)).status().unwrap().success());
        copy.refused(&[&name, "a special file"]);

        fs::remove_file(copy.path(&name)).unwrap();
        fs::create_dir(copy.path(&name)).unwrap();
        copy.refused(&[&name, "a directory"]);
    }
}

#[test]
fn names_with_a_path_in_them_are_refused() {
    for name in ["../outside", "a/b", "/etc/hostname", "..", ".", "", "a\\b", "a\u{0}b", MANIFEST, SEAL] {
        let copy = Copy::export();
        copy.manifest(|manifest| {
            let record = manifest["files"][HEAD].clone();
            manifest["files"][name] = record;
        });
        copy.refused(&[MANIFEST, "plain file names"]);
    }
}

#[test]
fn one_flipped_bit_in_any_file_is_found_and_the_file_named() {
    for name in listed() {
        for place in [0, 1, 2, 3] {
            let copy = Copy::export();
            let mut bytes = copy.read(&name);
            let at = (bytes.len() - 1) * place / 3;
            bytes[at] ^= 1 << (place * 2);
            copy.write(&name, &bytes);
            copy.refused(&[&name]);
        }
    }
}

#[test]
fn nothing_loaded_beside_a_wrong_digest_is_given_out() {
    let copy = Copy::export();
    let mut bytes = copy.read(SHARD);
    let at = bytes.len() - 1;
    bytes[at] ^= 1;
    copy.write(SHARD, &bytes);
    let loads = std::cell::Cell::new(0);
    let opened =
        Export::open_while(&copy.root(), &OpenOptions::default(), &Silent, |_| loads.set(loads.get() + 1));
    let message = opened.map(|_| ()).unwrap_err().to_string();
    assert!(message.contains(SHARD) && message.contains("SHA-256"), "{message}");
    assert_eq!(loads.get(), 1, "the shards are hashed while a model is made of them");
    let good = Export::open_while(&Copy::export().root(), &OpenOptions::default(), &Silent, |export| {
        export.temperature
    });
    assert_eq!(good.unwrap().1, 2.406050072164233);
}

#[test]
fn a_file_of_another_size_is_named_with_both_sizes() {
    for name in listed().iter().filter(|name| ![MANIFEST, SEAL].contains(&name.as_str())) {
        let copy = Copy::export();
        let mut bytes = copy.read(name);
        bytes.push(b' ');
        copy.write(name, &bytes);
        copy.refused(&[name, &bytes.len().to_string(), &(bytes.len() - 1).to_string()]);
        copy.write(name, &bytes[..bytes.len() - 2]);
        copy.refused(&[name, "bytes"]);
        copy.write(name, b"");
        copy.refused(&[name]);
    }
}

#[test]
fn the_manifests_keys_and_types_are_exact() {
    let keys: Vec<String> = Copy::export().json(MANIFEST).as_object().unwrap().keys().cloned().collect();
    for key in &keys {
        let copy = Copy::export();
        copy.manifest(|manifest| drop(manifest.as_object_mut().unwrap().remove(key)));
        // `reference` is null in an export that is not a pinned release, and null is what its absence means.
        if key != "reference" {
            copy.refused(&[MANIFEST, key]);
        }
        let copy = Copy::export();
        copy.manifest(|manifest| manifest[key] = json!([[]]));
        copy.refused(&[MANIFEST]);
    }
    for nested in ["base", "adapter", "geometry", "lora", "merge", "exporter"] {
        let copy = Copy::export();
        copy.manifest(|manifest| manifest[nested]["surplus"] = json!(1));
        copy.refused(&[MANIFEST, "surplus"]);
    }
    let copy = Copy::export();
    copy.manifest(|manifest| manifest["surplus"] = json!(1));
    copy.refused(&[MANIFEST, "surplus"]);
    let copy = Copy::export();
    copy.manifest(|manifest| manifest["files"][HEAD]["surplus"] = json!(1));
    copy.refused(&[MANIFEST, "surplus"]);
    for (key, value) in [
        ("format", json!("another")),
        ("version", json!(2)),
        ("backbone_dtype", json!("F32")),
        ("head_dtype", json!("BF16")),
        ("temperature", json!(0.0)),
        ("temperature", json!(-1.0)),
        ("profile", json!("kev-5b")),
        ("head_dim", json!(63)),
        ("exact_companion", json!(false)),
    ] {
        let copy = Copy::export();
        copy.manifest(|manifest| manifest[key] = value);
        copy.refused(&[]);
    }
    for bad in ["", "xyz", "AB", &"0".repeat(63), &"G".repeat(64)] {
        let copy = Copy::export();
        copy.manifest(|manifest| manifest["files"][HEAD]["sha256"] = json!(bad));
        copy.refused(&[MANIFEST, HEAD, "64 hexadecimal digits"]);
    }
    for bytes in [&b""[..], b"null", b"[]", b"{", b"\xff\xfe", b"{\"format\":1}"] {
        let copy = Copy::export();
        copy.sealed(bytes);
        copy.refused(&[MANIFEST]);
    }
}

#[test]
fn a_key_given_twice_in_the_manifest_is_refused() {
    let copy = Copy::export();
    let text = String::from_utf8(copy.read(MANIFEST)).unwrap();
    copy.sealed(text.replacen('{', "{\"temperature\": 1.0,", 1).as_bytes());
    copy.refused(&[MANIFEST, "temperature"]);
}

#[test]
fn the_manifest_and_its_seal_belong_together() {
    let copy = Copy::export();
    let mut manifest = copy.json(MANIFEST);
    manifest["exporter"]["version"] = json!("0.1.1");
    copy.write(MANIFEST, &serde_json::to_vec(&manifest).unwrap());
    copy.refused(&[SEAL, MANIFEST]);
    let copy = Copy::export();
    copy.write(SEAL, &vec![b'a'; 1 << 20]);
    copy.refused(&[SEAL]);
}

#[test]
fn the_geometry_of_the_manifest_is_that_of_the_configuration() {
    let copy = Copy::export();
    copy.manifest(|manifest| manifest["geometry"]["hidden"] = json!(256));
    copy.refused(&[MANIFEST, "geometry"]);
    let copy = Copy::export();
    let mut config = copy.json("config.json");
    config["text_config"]["num_attention_heads"] = json!(8);
    copy.replace("config.json", config.to_string().as_bytes());
    copy.refused(&[SHARD, "q_proj", "[1024, 128]"]);
    for (key, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!("128")),
        ("num_hidden_layers", json!(100_000)),
        ("layer_types", json!(["linear_attention"])),
        ("model_type", json!("llama")),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
    ] {
        let copy = Copy::export();
        let mut config = copy.json("config.json");
        config["text_config"][key] = value;
        copy.replace("config.json", config.to_string().as_bytes());
        copy.refused(&["config.json", key]);
    }
}

#[test]
fn pins_hold_an_export_to_every_field_they_name() {
    let copy = Copy::export();
    let export = copy.open().unwrap();
    let own = Pins::of(&export.manifest);
    let opened = |pins: Pins| {
        Export::open(&copy.root(), &OpenOptions { pins: Some(pins) })
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    opened(own.clone()).unwrap();
    let text = || Some("another".to_owned());
    let changed: [(&str, Pins); 8] = [
        ("reference", Pins { reference: text(), ..own.clone() }),
        ("base", Pins { base: text(), ..own.clone() }),
        ("base_revision", Pins { base_revision: text(), ..own.clone() }),
        ("adapter_revision", Pins { adapter_revision: text(), ..own.clone() }),
        ("temperature", Pins { temperature: Some(1.5), ..own.clone() }),
        ("rank", Pins { rank: Some(8), ..own.clone() }),
        ("alpha", Pins { alpha: Some(8.0), ..own.clone() }),
        ("modules", Pins { modules: Some(8), ..own.clone() }),
    ];
    for (field, pins) in changed {
        let message = opened(pins).unwrap_err();
        assert!(message.contains(field), "{field}: {message}");
    }
    let message = opened(Pins { head_dim: Some(8), ..own.clone() }).unwrap_err();
    assert!(message.contains("head_dim"), "{message}");
    for name in own.files.keys() {
        let mut pins = own.clone();
        pins.files.insert(name.clone(), "0".repeat(64));
        let message = opened(pins).unwrap_err();
        assert!(message.contains(name.as_str()), "{name}: {message}");
    }
    // The compiled-in release names all that its publishers give.
    let known = Pins::kev_4b();
    let texts =
        [&known.reference, &known.base, &known.base_revision, &known.adapter_revision].map(Clone::clone);
    let revisions = [
        "2074cc44256200bb37540103fa4572901faa10f3",
        "Qwen/Qwen3.5-4B-Base",
        "1001bb4d826a52d1f399e183466143f4da7b741b",
        "139fdd94f1b6a6ad80cc15e08fcb99cac885a101",
    ];
    assert_eq!(texts, revisions.map(|text| Some(text.to_owned())));
    assert_eq!((known.temperature, known.rank, known.alpha), (Some(2.406050072164233), Some(16), Some(32.0)));
    assert_eq!((known.modules, known.files.len()), (Some(248), 0));
    // What names the pinned release must be it.
    let copy = Copy::export();
    copy.manifest(|manifest| manifest["profile"] = json!("kev-4b"));
    copy.refused(&["kev-4b", "pinned"]);
}

/// A change of a safetensors file's header and body.
type Change<'a> = dyn Fn(&mut serde_json::Map<String, Value>, &mut Vec<u8>) + 'a;

#[test]
fn safetensors_headers_are_checked_to_the_byte() {
    for name in [SHARD, EXACT, HEAD] {
        let first =
            split(&Copy::export().read(name)).0.keys().find(|key| *key != "__metadata__").unwrap().clone();
        let with = |named: &[&str], change: &Change<'_>| {
            let copy = Copy::export();
            copy.tensors(name, |header, body| change(header, body));
            copy.refused(named);
        };
        let offsets = |start: i64, end: i64| {
            let first = first.clone();
            move |header: &mut serde_json::Map<String, Value>, _: &mut Vec<u8>| {
                let range = span(header, &first);
                let moved = |at: usize, by: i64| at as i64 + by;
                header[&first]["data_offsets"] = json!([moved(range.start, start), moved(range.end, end)]);
            }
        };
        with(&[name, &first], &offsets(0, 2));
        with(&[name], &offsets(2, 2));
        with(&[name], &offsets(0, 1 << 40));
        with(&[name, "overlap"], &|header, body| {
            // A second tensor over the same bytes.
            header.insert("another".to_owned(), header[&first].clone());
            let _ = body;
        });
        with(&[name, "end at byte"], &|_, body| body.extend([0; 16]));
        with(&[name], &|_, body| body.truncate(body.len() - 2));
        with(&[name], &|header, _| header[&first]["dtype"] = json!("F16"));
        with(&[name], &|header, _| header[&first]["dtype"] = json!("F7"));
        with(&[name], &|header, _| header[&first]["shape"] = json!([1u64 << 40, 1u64 << 40]));
        with(&[name], &|header, _| header[&first]["shape"] = json!([-1]));
        with(&[name], &|header, _| drop(header.remove(&first)));

        let copy = Copy::export();
        let (header, body) = split(&copy.read(name));
        let text = serde_json::to_string(&header).unwrap();
        let again = format!("{{{}:{},{}", json!(first), header[&first], &text[1..]);
        copy.replace(name, &joined(again.as_bytes(), &body));
        copy.refused(&[name, "listed twice"]);
        for length in [u64::MAX, 1 << 62, body.len() as u64 + 1_000_000, 0, 1] {
            let copy = Copy::export();
            let mut bytes = copy.read(name);
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            copy.replace(name, &bytes);
            copy.refused(&[name]);
        }
        for bytes in [&b""[..], b"1234567", &[0; 8]] {
            let copy = Copy::export();
            copy.replace(name, bytes);
            copy.refused(&[name]);
        }
        let copy = Copy::export();
        copy.replace(name, &joined(b"\xff\xfe{}", &body));
        copy.refused(&[name, "UTF-8"]);
        copy.replace(name, &joined(&b"[".repeat(100_000), &body));
        copy.refused(&[name]);
    }
}

#[test]
fn the_weight_map_covers_exactly_the_backbone() {
    let embedding = format!("{PREFIX}embed_tokens.weight");
    let copy = Copy::export();
    let mut index = copy.json(INDEX);
    index["weight_map"].as_object_mut().unwrap().remove(&embedding);
    copy.replace(INDEX, index.to_string().as_bytes());
    copy.refused(&[INDEX, &embedding]);

    let copy = Copy::export();
    let mut index = copy.json(INDEX);
    index["weight_map"]["lm_head.weight"] = json!(SHARD);
    copy.replace(INDEX, index.to_string().as_bytes());
    copy.refused(&[INDEX, "lm_head.weight"]);

    let copy = Copy::export();
    let mut index = copy.json(INDEX);
    index["weight_map"][&embedding] = json!(EXACT);
    copy.replace(INDEX, index.to_string().as_bytes());
    copy.refused(&[INDEX, &embedding]);

    // A tensor too many and one too few, in map and shard alike.
    let copy = Copy::export();
    copy.tensors(SHARD, |header, body| {
        let end = body.len();
        body.extend([0; 4]);
        header.insert(
            "lm_head.weight".to_owned(),
            json!({"dtype": "BF16", "shape": [2], "data_offsets": [end, end + 4]}),
        );
    });
    let mut index = copy.json(INDEX);
    index["weight_map"]["lm_head.weight"] = json!(SHARD);
    copy.replace(INDEX, index.to_string().as_bytes());
    copy.refused(&[INDEX, "lm_head.weight"]);

    let copy = Copy::export();
    let last = format!("{PREFIX}norm.weight");
    copy.tensors(SHARD, |header, body| {
        body.truncate(span(header, &last).start);
        header.remove(&last);
    });
    let mut index = copy.json(INDEX);
    index["weight_map"].as_object_mut().unwrap().remove(&last);
    copy.replace(INDEX, index.to_string().as_bytes());
    copy.refused(&[INDEX, &last]);

    // The same tensor in two shards.
    let copy = Copy::export();
    copy.replace("model-00002-of-00002.safetensors", &copy.read(SHARD));
    copy.refused(&[INDEX]);
}

#[test]
fn shapes_and_dtypes_are_those_of_the_geometry() {
    let transposed = format!("{PREFIX}layers.0.mlp.gate_proj.weight");
    let copy = Copy::export();
    copy.tensors(SHARD, |header, _| header[&transposed]["shape"] = json!([128, 256]));
    copy.refused(&[SHARD, &transposed, "[256, 128]"]);
    let wide = format!("{PREFIX}norm.weight");
    let copy = Copy::export();
    copy.tensors(SHARD, |header, _| {
        header[&wide]["dtype"] = json!("F32");
        header[&wide]["shape"] = json!([64]);
    });
    copy.refused(&[SHARD, &wide]);
}

#[test]
fn decays_and_the_gated_norm_may_be_f32_or_bf16() {
    // The synthetic checkpoint has both in F32; a later release stores them in BF16.
    let copy = Copy::export();
    copy.tensors(SHARD, |header, body| {
        let names: Vec<String> = header
            .keys()
            .filter(|name| name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight"))
            .cloned()
            .collect();
        assert_eq!(names.len(), 12);
        let mut packed = Vec::new();
        let mut order: Vec<String> = header.keys().filter(|name| *name != "__metadata__").cloned().collect();
        order.sort_by_key(|name| span(header, name).start);
        for name in order {
            let data = &body[span(header, &name)];
            let start = packed.len();
            if names.contains(&name) {
                packed.extend(data.chunks_exact(4).flat_map(|word| [word[2], word[3]]));
                header[&name]["dtype"] = json!("BF16");
            } else {
                packed.extend(data);
            }
            header[&name]["data_offsets"] = json!([start, packed.len()]);
        }
        *body = packed;
    });
    copy.open().unwrap();
}

#[test]
fn the_head_has_its_shapes_and_is_finite() {
    for name in ["q.weight", "q.bias", "k.weight", "k.bias"] {
        for bits in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let copy = Copy::export();
            copy.tensors(HEAD, |header, body| {
                let end = span(header, name).end;
                body[end - 4..end].copy_from_slice(&bits.to_le_bytes());
            });
            copy.refused(&[HEAD, name, "finite"]);
        }
        let copy = Copy::export();
        copy.tensors(HEAD, |header, _| {
            let elements = span(header, name).len() / 4;
            header[name]["shape"] = json!([elements, 1]);
        });
        copy.refused(&[HEAD, name]);
    }
}

#[test]
fn the_exact_companion_is_whole_or_absent() {
    let copy = Copy::export();
    copy.tensors(EXACT, |header, _| {
        let name = header.keys().find(|name| name.ends_with("lora_B.weight")).unwrap().clone();
        let entry = header.remove(&name).unwrap();
        header.insert(name.replace("lora_B", "lora_C"), entry);
    });
    copy.refused(&["lora_"]);
    let copy = Copy::export();
    fs::remove_file(copy.path(EXACT)).unwrap();
    copy.manifest(|manifest| drop(manifest["files"].as_object_mut().unwrap().remove(EXACT)));
    copy.refused(&[]);
}

#[test]
fn delimiters_are_single_distinct_tokens() {
    for name in ["<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"] {
        let copy = Copy::export();
        let without = |file: &str| {
            let text = String::from_utf8(copy.read(file)).unwrap();
            copy.replace(file, text.replace(name, "<|another|>").as_bytes());
        };
        without("tokenizer.json");
        without("tokenizer_config.json");
        copy.refused(&["tokenizer.json", name]);
    }
    // A delimiter that is a word of the vocabulary and no token of its own: text would be split before it is looked up.
    let copy = Copy::export();
    let mut definition = copy.json("tokenizer.json");
    let added = definition["added_tokens"].as_array_mut().unwrap();
    let place = added.iter().position(|token| token["content"] == "<|box_end|>").unwrap();
    let id = added.remove(place)["id"].as_u64().unwrap();
    let words = definition["model"]["vocab"].as_object().unwrap().len();
    definition["model"]["vocab"]["<|box_end|>"] = json!(words);
    copy.replace("tokenizer.json", definition.to_string().as_bytes());
    let mut config = copy.json("tokenizer_config.json");
    config["added_tokens_decoder"].as_object_mut().unwrap().remove(&id.to_string());
    copy.replace("tokenizer_config.json", config.to_string().as_bytes());
    copy.refused(&["<|box_end|>", "expected one"]);
    // Two delimiters of one id.
    let copy = Copy::export();
    let mut definition = copy.json("tokenizer.json");
    let added = definition["added_tokens"].as_array_mut().unwrap();
    let id = added.iter().find(|token| token["content"] == "<|box_start|>").unwrap()["id"].clone();
    for token in added.iter_mut().filter(|token| token["content"] == "<|box_end|>") {
        token["id"] = id.clone();
    }
    copy.replace("tokenizer.json", definition.to_string().as_bytes());
    copy.refused(&["tokenizer.json", "<|box_"]);
    // A tokenizer for a larger embedding than there is.
    let copy = Copy::export();
    let mut definition = copy.json("tokenizer.json");
    definition["model"]["vocab"]["zzzz"] = json!(5000);
    copy.replace("tokenizer.json", definition.to_string().as_bytes());
    copy.refused(&["tokenizer"]);
    for bytes in [&b""[..], b"{}", b"[]", b"\xff"] {
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            let copy = Copy::export();
            copy.replace(file, bytes);
            if !(file == "tokenizer_config.json" && bytes == b"{}") {
                copy.refused(&["tokenizer"]);
            }
        }
    }
}
