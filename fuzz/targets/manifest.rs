//! Any bytes as the manifest of an export.
#![no_main]

use artifact::{Manifest, Pins};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(manifest) = Manifest::parse(data) {
        let _ = Pins::kev_4b().check(&manifest);
        assert!(Pins::of(&manifest).check(&manifest).is_ok());
    }
});
