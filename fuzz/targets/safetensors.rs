//! Any bytes as a safetensors file, and any header before a body of 64 bytes.
#![no_main]

use artifact::TensorFile;
use libfuzzer_sys::fuzz_target;

fn read(bytes: Vec<u8>) {
    if let Ok(file) = TensorFile::parse("fuzz.safetensors".to_owned(), bytes.into()) {
        for name in file.names().map(str::to_owned).collect::<Vec<_>>() {
            if let Ok(tensor) = file.tensor(&name) {
                let _ = tensor.to_f32();
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    read(data.to_vec());
    let mut framed = (data.len() as u64).to_le_bytes().to_vec();
    framed.extend(data);
    framed.extend([0; 64]);
    read(framed);
});
