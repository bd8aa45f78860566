//! Owns `cargo xtask chaos`: load and misfortune over loopback against workers of its own, each scenario one line of counts and
//! a few rules. It takes minutes and measures time, so the gate does not run it.

mod clients;
mod http;
mod leaving;
mod load;
mod overload;
mod proxy;
mod tally;
pub(crate) mod worker;

use std::path::{Path, PathBuf};
use std::time::Duration;

use self::worker::Worker;

/// A worker's deadline here.
const DEADLINE: Duration = Duration::from_secs(10);
const DRAIN_DELAY: Duration = Duration::from_secs(4);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest body here.
const BODY: usize = 1 << 20;

/// What the arguments ask for.
struct Options {
    time: Duration,
    binary: PathBuf,
    /// Numbers of scenarios; all if empty.
    only: Vec<u32>,
}

/// Runs the scenarios.
///
/// # Errors
/// Every rule that was broken.
pub(crate) fn run(root: &Path, binary: PathBuf, arguments: &[String]) -> Result<(), String> {
    let options = parse(binary, arguments)?;
    let folder = root.join("target/chaos");
    let export = worker::export(&options.binary, &folder)?;
    let wanted = |number: u32| options.only.is_empty() || options.only.contains(&number);
    let start = |queue: &str| Worker::start(&options.binary, &export, 0, &settings(queue));
    let mut broken = Vec::new();
    let mut judge = |number: u32, result: Result<(), String>| {
        if let Err(reason) = result {
            println!("{number} BROKEN: {reason}");
            broken.push(format!("{number}: {reason}"));
        }
    };
    // One worker goes through the first five: what one scenario leaves behind would show in the next.
    if (1..=5).any(wanted) {
        let worker = start("16")?;
        if wanted(1) {
            judge(1, overload::run(&worker, options.time, DEADLINE));
        }
        if wanted(3) {
            judge(3, clients::slow(&worker));
        }
        if wanted(4) {
            judge(4, clients::idle(&worker));
        }
        if wanted(5) {
            judge(5, clients::nonsense(&worker, BODY));
        }
        drop(worker);
    }
    if wanted(2) {
        // Forty must get in.
        judge(2, clients::disconnect(&start("64")?));
    }
    if wanted(6) {
        judge(6, leaving::run(start("16")?, DRAIN_DELAY, DRAIN_TIMEOUT));
    }
    if wanted(7) {
        judge(7, proxy::run(root, &options.binary, &export, &folder));
    }
    if broken.is_empty() {
        println!("chaos: every rule was kept");
        return Ok(());
    }
    Err(format!("chaos: {} scenarios broke a rule:\n  {}", broken.len(), broken.join("\n  ")))
}

/// Arguments of a worker: one core for the model, so that the other is left for clients; few inside and small batches, so
/// that the queue is full soon.
fn settings(queue: &str) -> Vec<String> {
    let number = |time: Duration| time.as_millis().to_string();
    [
        "--threads",
        "1",
        "--queue-requests",
        queue,
        "--batch-requests",
        "4",
        "--deadline-ms",
        &number(DEADLINE),
        "--drain-delay",
        &number(DRAIN_DELAY),
        "--drain-timeout",
        &number(DRAIN_TIMEOUT),
        "--max-body-bytes",
        &BODY.to_string(),
    ]
    .map(str::to_owned)
    .to_vec()
}

fn parse(binary: PathBuf, arguments: &[String]) -> Result<Options, String> {
    let usage = "usage: cargo xtask chaos [--seconds N] [--binary PATH] [--only N,N…]";
    let mut options = Options { time: Duration::from_secs(60), binary, only: Vec::new() };
    let mut rest = arguments.iter();
    while let Some(name) = rest.next() {
        let value = rest.next().ok_or(usage)?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| format!("{text:?} is no number; {usage}"));
        match name.as_str() {
            "--seconds" => options.time = Duration::from_secs(number(value)?.max(1).into()),
            "--binary" => options.binary = PathBuf::from(value),
            "--only" => options.only = value.split(',').map(number).collect::<Result<_, _>>()?,
            _ => return Err(usage.to_owned()),
        }
    }
    if options.binary.exists() {
        return Ok(options);
    }
    Err(format!("{}: does not exist; cargo build --release makes it", options.binary.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_and_others_refused() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let here = || PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let options = parse(here(), &words("--seconds 5 --only 1,7")).unwrap();
        assert_eq!((options.time, options.only), (Duration::from_secs(5), vec![1, 7]));
        for bad in ["--seconds", "--seconds x", "--only 1,", "--what 1", "--binary nowhere/at/all"] {
            assert!(parse(here(), &words(bad)).is_err(), "{bad}");
        }
    }
}
