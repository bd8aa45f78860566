//! Any program as the pickle of a torch zip, and any bytes as the zip.
#![no_main]

use std::io::{Cursor, Write};

use libfuzzer_sys::fuzz_target;
use zip::write::SimpleFileOptions;

fn archive(pickle: &[u8]) -> Option<Vec<u8>> {
    let options = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in [("head/data.pkl", pickle), ("head/data/0", &[0; 256][..])] {
        zip.start_file(name, options).ok()?;
        zip.write_all(bytes).ok()?;
    }
    Some(zip.finish().ok()?.into_inner())
}

fuzz_target!(|data: &[u8]| {
    if let Some(zip) = archive(data) {
        let _ = artifact::parse_torch_zip("head.pt", zip.into());
    }
    let _ = artifact::parse_torch_zip("head.pt", data.to_vec().into());
});
