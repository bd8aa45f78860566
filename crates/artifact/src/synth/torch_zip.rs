//! Owns the writing of `head.pt`: a torch zip whose pickle holds numbers, strings and FP32 tensors, which
//! `torch.load(weights_only=True)` and our own reader accept.

use std::io::{Cursor, Write};

use zip::write::SimpleFileOptions;

use crate::error::{ArtifactError, Result};

const NAME: &str = "head.pt";

/// A value to pickle.
pub(crate) enum Entry {
    None,
    Bool(bool),
    Int(u16),
    Float(f64),
    Text(String),
    Tensor(Vec<usize>, Vec<f32>),
    Dict(Vec<(&'static str, Entry)>),
}

/// Bytes of the zip.
pub(crate) fn torch_zip(root: &Entry) -> Result<Vec<u8>> {
    let mut pickle = vec![0x80, 2]; // protocol 2
    let mut storages = Vec::new();
    write(root, &mut pickle, &mut storages);
    pickle.push(b'.');
    let fail = |error: zip::result::ZipError| ArtifactError::format(NAME, error.to_string());
    let failed = |error: std::io::Error| ArtifactError::format(NAME, error.to_string());
    // Stored, and with the zip epoch as its time: the same bytes on every machine.
    let options = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let mut add = |name: &str, bytes: &[u8]| {
        zip.start_file(format!("head/{name}"), options).map_err(fail)?;
        zip.write_all(bytes).map_err(failed)
    };
    add("data.pkl", &pickle)?;
    add("byteorder", b"little")?;
    for (index, values) in storages.iter().enumerate() {
        add(&format!("data/{index}"), bytemuck::cast_slice(values))?;
    }
    add("version", b"3\n")?;
    Ok(zip.finish().map_err(fail)?.into_inner())
}

fn write<'a>(entry: &'a Entry, out: &mut Vec<u8>, storages: &mut Vec<&'a [f32]>) {
    match entry {
        Entry::None => out.push(b'N'),
        Entry::Bool(value) => out.push(if *value { 0x88 } else { 0x89 }),
        Entry::Int(value) => {
            out.push(b'M');
            out.extend(value.to_le_bytes());
        }
        Entry::Float(value) => {
            out.push(b'G');
            out.extend(value.to_be_bytes());
        }
        Entry::Text(value) => text(value, out),
        Entry::Dict(entries) => {
            out.extend(b"}(");
            for (key, value) in entries {
                text(key, out);
                write(value, out, storages);
            }
            out.push(b'u');
        }
        Entry::Tensor(shape, values) => {
            out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
            text("storage", out);
            out.extend(b"ctorch\nFloatStorage\n");
            text(&storages.len().to_string(), out);
            text("cpu", out);
            integer(values.len(), out);
            out.extend(b"tQ");
            integer(0, out);
            out.push(b'(');
            shape.iter().for_each(|size| integer(*size, out));
            out.extend(b"t(");
            (0..shape.len()).for_each(|axis| integer(shape[axis + 1..].iter().product(), out));
            out.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
            storages.push(values);
        }
    }
}

fn text(value: &str, out: &mut Vec<u8>) {
    out.push(b'X');
    out.extend((value.len() as u32).to_le_bytes());
    out.extend(value.as_bytes());
}

/// Sizes of a head stay far below 2^31.
fn integer(value: usize, out: &mut Vec<u8>) {
    out.push(b'J');
    out.extend((value as i32).to_le_bytes());
}
