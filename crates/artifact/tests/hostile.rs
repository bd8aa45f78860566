//! Hostile and broken checkpoints: the exporter refuses each by name and leaves nothing under the output's name.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

mod support;

use std::fs;
use std::io::{Cursor, Write};
use std::os::unix::fs::symlink;
use std::process::Command;

use artifact::{TensorFile, parse_torch_zip};
use serde_json::{Value, json};
use support::{Copy, exported, joined, span, split};
use zip::write::SimpleFileOptions;

const ADAPTER: &str = "adapter/adapter_model.safetensors";
const CONFIG: &str = "adapter/adapter_config.json";
const HEAD: &str = "adapter/head.pt";

/// The only base shard's name.
fn shard(copy: &Copy) -> String {
    let index = copy.json("base/model.safetensors.index.json");
    let names: std::collections::BTreeSet<&str> =
        index["weight_map"].as_object().unwrap().values().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(names.len(), 1);
    format!("base/{}", names.first().unwrap())
}

/// The exporter's refusal, which must contain every one of `named`; nothing may be left.
fn refused(copy: &Copy, named: &[&str]) {
    let out = copy.root().with_file_name("export");
    let message = match exported(&copy.root(), &out) {
        Ok(_) => panic!("exported, expected a refusal that names {named:?}"),
        Err(error) => error.to_string(),
    };
    for name in named {
        assert!(message.contains(name), "{name:?} is not in {message:?}");
    }
    let left: Vec<_> =
        fs::read_dir(out.parent().unwrap()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("export")), "{left:?}");
}

fn edited(path: &str, named: &[&str], change: impl FnOnce(&mut Value)) {
    let copy = Copy::checkpoint();
    let mut value = copy.json(path);
    change(&mut value);
    copy.write(path, value.to_string().as_bytes());
    refused(&copy, named);
}

fn tensors(
    path: &str,
    named: &[&str],
    change: impl FnOnce(&mut serde_json::Map<String, Value>, &mut Vec<u8>),
) {
    let copy = Copy::checkpoint();
    let path = if path == "base" { shard(&copy) } else { path.to_owned() };
    let (mut header, mut body) = split(&copy.read(&path));
    change(&mut header, &mut body);
    copy.write(&path, &joined(&serde_json::to_vec(&header).unwrap(), &body));
    refused(&copy, named);
}

#[test]
fn an_untouched_checkpoint_is_exported_once() {
    let copy = Copy::checkpoint();
    let out = copy.root().with_file_name("export");
    exported(&copy.root(), &out).unwrap();
    let before = fs::read(out.join("kev_export.json")).unwrap();
    let again = exported(&copy.root(), &out).unwrap_err().to_string();
    assert!(again.contains("exists"), "{again}");
    assert_eq!(fs::read(out.join("kev_export.json")).unwrap(), before);
}

#[test]
fn every_missing_file_is_named() {
    let copy = Copy::checkpoint();
    let base = shard(&copy);
    for path in [
        CONFIG,
        ADAPTER,
        HEAD,
        "base/config.json",
        &base,
        "base/tokenizer.json",
        "base/tokenizer_config.json",
    ] {
        let copy = Copy::checkpoint();
        fs::remove_file(copy.path(path)).unwrap();
        refused(&copy, &[path.rsplit('/').next().unwrap()]);
    }
}

#[test]
fn pipes_and_links_are_refused_without_waiting() {
    let copy = Copy::checkpoint();
    let base = shard(&copy);
    for path in [CONFIG, ADAPTER, HEAD, "base/config.json", &base, "base/model.safetensors.index.json"] {
        let copy = Copy::checkpoint();
        let name = path.rsplit('/').next().unwrap();
        fs::remove_file(copy.path(path)).unwrap();
        assert!(Command::new("mkfifo").arg(copy.path(path)).status().unwrap().success());
        refused(&copy, &[name, "a special file"]);
        fs::remove_file(copy.path(path)).unwrap();
        symlink("/dev/zero", copy.path(path)).unwrap();
        refused(&copy, &[name, "a symbolic link"]);
    }
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let copy = Copy::checkpoint();
    let base = shard(&copy);
    for path in [ADAPTER, HEAD, CONFIG, &base] {
        let whole = copy.read(path);
        for keep in [0, 1, 7, 8, 9, 100, whole.len() / 2, whole.len() - 2] {
            let copy = Copy::checkpoint();
            copy.write(path, &whole[..keep.min(whole.len() - 2)]);
            refused(&copy, &[path.rsplit('/').next().unwrap()]);
        }
    }
}

#[test]
fn headers_and_bodies_that_disagree_are_refused() {
    for path in [ADAPTER, "base"] {
        tensors(path, &[".safetensors", "end at byte"], |_, body| body.extend([0; 8]));
        tensors(path, &[".safetensors", "overlap"], |header, _| {
            let first = header.keys().find(|name| *name != "__metadata__").unwrap().clone();
            header.insert("twin".to_owned(), header[&first].clone());
        });
        let copy = Copy::checkpoint();
        let name = if path == "base" { shard(&copy) } else { path.to_owned() };
        let mut bytes = copy.read(&name);
        bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        copy.write(&name, &bytes);
        refused(&copy, &[".safetensors", "header of"]);
    }
}

#[test]
fn a_tensor_in_two_shards_or_in_none_is_refused() {
    let embedding = "model.language_model.embed_tokens.weight";
    // None: the index names a shard that lacks it.
    tensors("base", &[embedding], |header, body| {
        let last =
            header.keys().max_by_key(|name| if *name == "__metadata__" { 0 } else { span(header, name).end });
        let last = last.unwrap().clone();
        let range = span(header, embedding);
        let moved = header[&last].clone();
        assert_ne!(last, embedding);
        // The embedding's bytes stay, under a name nobody knows.
        let entry = header.remove(embedding).unwrap();
        header.insert("model.visual.unknown".to_owned(), entry);
        let _ = (range, moved, body);
    });
    // Two: without an index, a single file is all there is; with one, what it does not name is not read.
    let copy = Copy::checkpoint();
    let name = shard(&copy);
    fs::copy(copy.path(&name), copy.path("base/extra.safetensors")).unwrap();
    let mut index = copy.json("base/model.safetensors.index.json");
    index["weight_map"][embedding] = json!("extra.safetensors");
    copy.write("base/model.safetensors.index.json", index.to_string().as_bytes());
    refused(&copy, &[embedding, "two shards"]);
}

#[test]
fn paths_in_an_index_are_refused() {
    for bad in ["../escape.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "a\u{0}b"] {
        edited("base/model.safetensors.index.json", &["a file name"], |index| {
            index["weight_map"]["model.language_model.norm.weight"] = json!(bad);
        });
    }
    edited("base/model.safetensors.index.json", &["weight_map"], |index| *index = json!({}));
    edited("base/model.safetensors.index.json", &["weight_map"], |index| index["weight_map"] = json!([1]));
}

#[test]
fn an_adapter_that_this_program_cannot_merge_is_refused_by_the_setting() {
    for (key, value) in [
        ("use_rslora", json!(true)),
        ("use_dora", json!(true)),
        ("use_qalora", json!(true)),
        ("lora_bias", json!(true)),
        ("fan_in_fan_out", json!(true)),
        ("rank_pattern", json!({ "q_proj": 8 })),
        ("alpha_pattern", json!({ "q_proj": 8 })),
        ("modules_to_save", json!(["embed_tokens"])),
        ("trainable_token_indices", json!([1])),
        ("target_parameters", json!(["x"])),
        ("layer_replication", json!([[0, 4]])),
        ("layers_to_transform", json!([1])),
        ("exclude_modules", json!(["q_proj"])),
        ("bias", json!("all")),
        ("peft_type", json!("IA3")),
        ("r", json!(0)),
        ("r", json!(1 << 20)),
        ("r", json!("16")),
        ("lora_alpha", json!(-1)),
        ("lora_alpha", json!("x")),
        ("target_modules", json!(["q_proj"])),
        ("target_modules", json!("all-linear")),
    ] {
        edited(CONFIG, &["adapter_config.json", key], |config| config[key] = value);
    }
}

#[test]
fn an_adapter_for_another_base_is_refused() {
    edited(CONFIG, &["head.pt", "base"], |config| config["base_model_name_or_path"] = json!("another/base"));
    edited(CONFIG, &[ADAPTER.rsplit('/').next().unwrap(), "lora_A", "[8, 128]"], |config| {
        config["r"] = json!(8)
    });
    // A module missing, one too many, half of a pair, wrong shapes, wrong numbers.
    let module = "base_model.model.layers.0.mlp.gate_proj";
    let (a, b) = (format!("{module}.lora_A.weight"), format!("{module}.lora_B.weight"));
    let renamed = |header: &mut serde_json::Map<String, Value>, from: &str, to: &str| {
        let entry = header.remove(from).unwrap();
        header.insert(to.to_owned(), entry);
    };
    tensors(ADAPTER, &["adapter_model.safetensors", "only one of them"], |header, _| {
        renamed(header, &a, &a.replace("layers.0", "layers.99"));
    });
    tensors(ADAPTER, &["adapter_model.safetensors", "gate_proj", "another base"], |header, _| {
        renamed(header, &a, &a.replace("layers.0", "layers.99"));
        renamed(header, &b, &b.replace("layers.0", "layers.99"));
    });
    tensors(ADAPTER, &["adapter_model.safetensors", "only lora_A and lora_B"], |header, _| {
        renamed(header, &a, "base_model.model.layers.0.mlp.gate_proj.lora_magnitude_vector");
    });
    tensors(ADAPTER, &["gate_proj", "[16, 128]"], |header, _| header[&a]["shape"] = json!([128, 16]));
    tensors(ADAPTER, &["gate_proj", "finite"], |header, body| {
        let end = span(header, &b).end;
        body[end - 4..end].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    tensors(ADAPTER, &["two prefixes"], |header, body| {
        let entry = header[&a].clone();
        let (start, data) = (body.len(), body[span(header, &a)].to_vec());
        body.extend(&data);
        let mut entry = entry;
        entry["data_offsets"] = json!([start, start + data.len()]);
        header.insert(a.replace("base_model.model.", "base_model.model.model."), entry);
    });
}

/// A torch zip with this pickle and this many bytes in storage 0.
fn torch_zip(pickle: &[u8], storage: &[u8], deflate: bool) -> Vec<u8> {
    let method = if deflate { zip::CompressionMethod::Deflated } else { zip::CompressionMethod::Stored };
    let options = SimpleFileOptions::default().compression_method(method);
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in [("head/data.pkl", pickle), ("head/data/0", storage), ("head/version", b"3\n")] {
        zip.start_file(name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn pickle_refusal(pickle: &[u8]) -> String {
    parse_torch_zip("head.pt", torch_zip(pickle, &[0; 64], false).into()).unwrap_err().to_string()
}

#[test]
fn a_pickle_may_build_values_and_nothing_else() {
    for (module, name) in [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "__import__"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("collections", "defaultdict"),
        ("posix", "system"),
    ] {
        let mut program = vec![0x80, 2, b'c'];
        program.extend(format!("{module}\n{name}\n(X").as_bytes());
        program.extend(4u32.to_le_bytes());
        program.extend(b"echotR.");
        let message = pickle_refusal(&program);
        assert!(message.contains("head.pt") && message.contains(name), "{message}");
    }
    // Operations that import, build objects or run code in another way.
    for operation in [b'i', b'o', 0x81, 0x82, 0x92, b'P', b'0', b'2', b'I', b'L', b'S', b'V'] {
        let mut program = vec![0x80, 2];
        program.push(operation);
        program.extend(b"1\n.");
        let message = pickle_refusal(&program);
        assert!(message.contains("head.pt"), "{operation}: {message}");
    }
}

#[test]
fn broken_pickles_and_zips_are_refused() {
    let short: [&[u8]; 9] = [
        b"",
        b".",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02}",
        b"\x80\x02(u.",
        b"\x80\x02X\xff\xff\xff\x7f",
        b"\x80\x02h\x05.",
        b"\x80\x02R.",
    ];
    for program in short {
        assert!(pickle_refusal(program).contains("head.pt"));
    }
    // Nesting, many values, and a memo that doubles with every step.
    let mut deep = vec![0x80, 2];
    deep.extend(b"(".repeat(1_000_000));
    deep.extend(b"t".repeat(1_000_000));
    deep.push(b'.');
    pickle_refusal(&deep);
    let mut many = vec![0x80, 2, b'}', b'('];
    for key in 0..1_000_000u32 {
        many.push(b'X');
        many.extend(8u32.to_le_bytes());
        many.extend(format!("{key:08}").as_bytes());
        many.push(b'N');
    }
    many.extend(b"u.");
    pickle_refusal(&many);
    let mut doubling = vec![0x80, 2, b')'];
    for _ in 0..200 {
        doubling.extend([b'q', 0, b'h', 0, 0x86]);
    }
    doubling.push(b'.');
    pickle_refusal(&doubling);
    for bytes in [&b""[..], b"PK", b"PK\x03\x04", &[0; 1000]] {
        assert!(parse_torch_zip("head.pt", bytes.to_vec().into()).is_err());
    }
}

#[test]
fn a_zip_bomb_is_refused_before_it_is_unpacked() {
    // 2 GiB of zeros are 2 MB deflated.
    let zeros = vec![0; 2 << 30];
    let bomb = torch_zip(b"\x80\x02}.", &zeros, true);
    drop(zeros);
    assert!(bomb.len() < 8 << 20);
    let copy = Copy::checkpoint();
    copy.write(HEAD, &bomb);
    refused(&copy, &["head.pt"]);
    let many = vec![b'N'; 64 << 20];
    let copy = Copy::checkpoint();
    copy.write(HEAD, &torch_zip(&many, &[], true));
    refused(&copy, &["head.pt"]);
}

#[test]
fn a_header_of_a_million_keys_is_refused() {
    let mut header = String::from("{");
    for key in 0..1_000_000 {
        header.push_str(&format!("\"{key}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}},"));
    }
    header.pop();
    header.push('}');
    let bytes = joined(header.as_bytes(), &[]);
    let message =
        TensorFile::parse("many.safetensors".to_owned(), bytes.clone().into()).unwrap_err().to_string();
    assert!(message.contains("many.safetensors") && message.contains("more than"), "{message}");
    let copy = Copy::checkpoint();
    copy.write(ADAPTER, &bytes);
    refused(&copy, &["adapter_model.safetensors"]);
}

#[test]
fn names_that_are_not_text_are_refused() {
    let copy = Copy::checkpoint();
    let (_, body) = split(&copy.read(ADAPTER));
    copy.write(ADAPTER, &joined(b"{\"\xff\xfe\":1}", &body));
    refused(&copy, &["adapter_model.safetensors", "UTF-8"]);
    for path in [CONFIG, "base/config.json", "base/tokenizer.json"] {
        let copy = Copy::checkpoint();
        copy.write(path, b"{\"a\":\"\xff\"}");
        refused(&copy, &[path.rsplit('/').next().unwrap()]);
    }
}

#[test]
fn a_tokenizer_without_a_known_class_is_refused() {
    edited("base/tokenizer_config.json", &["tokenizer_config.json", "tokenizer_class"], |config| {
        config["tokenizer_class"] = json!("LlamaTokenizer");
    });
}

#[test]
fn output_that_cannot_be_written_leaves_nothing() {
    let copy = Copy::checkpoint();
    // Below a file.
    copy.write("file", b"");
    let error = exported(&copy.root(), &copy.path("file/export")).unwrap_err().to_string();
    assert!(error.contains("file"), "{error}");
    // A link to nowhere under the output's name is somebody's file.
    let out = copy.root().with_file_name("export");
    symlink("nowhere", &out).unwrap();
    let error = exported(&copy.root(), &out).unwrap_err().to_string();
    assert!(error.contains("exists"), "{error}");
    assert!(fs::symlink_metadata(&out).is_ok());
}
