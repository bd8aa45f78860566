//! Owns the checks of every operation on a real GPU against plain loops in FP64, and their timing (`bench`).
//!
//! The executable runs on a machine without Rust: copy it with `omni-kev.fatbin` beside it. Arguments: nothing checks
//! everything, `bench` times, other words select checks whose name contains one of them. Without a device it says
//! that nothing ran; with `REQUIRE_CUDA=1` that is a failure.

mod bench;
mod checks;
mod oracle;
mod tree;

use std::process::ExitCode;
use std::time::Instant;

use backend::{BackendError, Ops};
use backend_cuda::{CudaOps, CudaOptions, Profile};

/// What a check found out, or why it failed.
pub(crate) type Outcome = Result<String, String>;

fn open(profile: Profile) -> Result<CudaOps, BackendError> {
    CudaOps::open(CudaOptions { ordinal: 0, profile, graphs: false })
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let opened = open(Profile::Exact).and_then(|exact| Ok([exact, open(Profile::Fast)?]));
    let devices = match opened {
        Ok(devices) => devices,
        Err(error) => {
            println!("NOTHING RAN: {error}");
            let required = std::env::var("REQUIRE_CUDA").is_ok_and(|value| value == "1");
            return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    for device in &devices {
        println!("{}", device.describe());
    }
    if words.iter().any(|word| word == "bench") {
        return match bench::run(&devices, &words) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("FAILED: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let mut failures = 0;
    let mut ran = 0;
    for (name, check) in checks::ALL {
        for device in &devices {
            let name = format!("{name} ({:?})", device.profile());
            if !words.is_empty() && !words.iter().any(|word| name.contains(word.as_str())) {
                continue;
            }
            let start = Instant::now();
            let outcome = check(device);
            ran += 1;
            let (state, text) = match outcome {
                Ok(text) => ("ok    ", text),
                Err(text) => {
                    failures += 1;
                    ("FAILED", text)
                }
            };
            println!("{state} {name}: {text} [{:.1} s]", start.elapsed().as_secs_f32());
        }
    }
    println!("{ran} checks, {failures} failed");
    if failures == 0 && ran > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
