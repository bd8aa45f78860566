//! Owns conformance by real clients: the public compatibility suite and SDK against the served demo, without and with a key, and
//! over TLS.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::certificate;
use crate::chaos::worker;
use crate::python::{environment, run};

/// How long the demo may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);
const KEY: &str = "conformance-key";

/// Runs every client.
///
/// # Errors
/// The client that failed, or the counts that were expected and found.
pub(crate) fn check(root: &Path, binary: &Path) -> Result<(), String> {
    let environment = installed(root)?;
    let key_file = root.join("target/conformance-key");
    std::fs::write(&key_file, format!("{KEY}\n"))
        .map_err(|error| format!("{}: {error}", key_file.display()))?;
    let key_path = key_file.display().to_string();
    // The suite exercises its rule about other errors only where an unknown model is refused.
    let strict = ["--strict-models"];
    let keyed = ["--strict-models", "--api-key-file", &key_path, "--api-key", KEY];
    for (arguments, key, expected) in [
        (&[][..], None, ["MUST 32/32", "SHOULD 12/12"]),
        (&strict, None, ["MUST 32/32", "SHOULD 13/13"]),
        (&keyed, Some(KEY), ["MUST 32/32", "SHOULD 15/15"]),
    ] {
        let demo = Demo::start(binary, &[&["demo"], arguments].concat())?;
        clients(root, &environment, &demo.url, key, None, expected)?;
    }
    let folder = root.join("target/conformance");
    let export = worker::export(binary, &folder)?;
    let made = certificate::make(&folder)?;
    let [export, chain, secret] =
        [&export, &made.certificate, &made.key].map(|path| path.display().to_string());
    let tls = ["--tls-cert", &chain, "--tls-key", &secret];
    let arguments =
        [&["serve", &export, "--backend", "cpu", "--strict-models", "--api-key-file", &key_path], &tls[..]]
            .concat();
    let served = Demo::start(binary, &arguments)?;
    if !served.url.starts_with("https://") {
        return Err(format!("{} is not TLS", served.url));
    }
    let expected = ["MUST 32/32", "SHOULD 15/15"];
    clients(root, &environment, &served.url, Some(KEY), Some(&made.certificate), expected)
}

/// Runs every client with a key against what is served already, with `--strict-models`.
///
/// # Errors
/// As [`check`].
pub(crate) fn through(root: &Path, url: &str, key: &str, trusted: Option<&Path>) -> Result<(), String> {
    clients(root, &installed(root)?, url, Some(key), trusted, ["MUST 32/32", "SHOULD 15/15"])
}

/// The environment with the clients.
fn installed(root: &Path) -> Result<PathBuf, String> {
    let list = root.join("tools/conformance/requirements.txt");
    let requirements =
        std::fs::read_to_string(&list).map_err(|error| format!("{}: {error}", list.display()))?;
    environment(root, "venv-conformance", &requirements)
}

fn clients(
    root: &Path,
    environment: &Path,
    url: &str,
    key: Option<&str>,
    trusted: Option<&Path>,
    expected: [&str; 2],
) -> Result<(), String> {
    suite(environment, url, key, trusted, expected)?;
    let mut sdk = Command::new(environment.join("bin/python"));
    sdk.arg(root.join("tools/conformance/sdk.py")).arg(url).args(key);
    sdk.envs(trusted.map(|path| ("SSL_CERT_FILE", path)));
    run(&mut sdk, "the SDK's check")
}

fn suite(
    environment: &Path,
    url: &str,
    key: Option<&str>,
    trusted: Option<&Path>,
    expected: [&str; 2],
) -> Result<(), String> {
    let mut command = Command::new(environment.join("bin/jevcompat"));
    command.args(["test", url]);
    command.envs(trusted.map(|path| ("SSL_CERT_FILE", path)));
    if let Some(key) = key {
        command.args(["--key", key]);
    }
    let output = command.output().map_err(|error| format!("jevcompat: cannot be run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if output.status.success() && expected.iter().all(|count| text.contains(count)) {
        println!(
            "jevcompat: {}, {}{}{}",
            expected[0],
            expected[1],
            if key.is_some() { ", with a key" } else { "" },
            if trusted.is_some() { ", over TLS" } else { "" }
        );
        return Ok(());
    }
    Err(format!("jevcompat ended with {}, expected {expected:?}:\n{text}", output.status))
}

/// A served demo or export, killed when dropped.
struct Demo {
    child: Child,
    url: String,
}

impl Demo {
    fn start(binary: &Path, arguments: &[&str]) -> Result<Self, String> {
        let mut child = Command::new(binary)
            .args(arguments)
            .args(["--port", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: cannot be run: {error}", binary.display()))?;
        let output = child.stdout.take();
        let mut demo = Self { child, url: String::new() };
        demo.url = listening(output)?;
        Ok(demo)
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address that a server prints; what it prints later is read and dropped, so that it never waits for a reader.
fn listening(output: Option<ChildStdout>) -> Result<String, String> {
    let output = output.ok_or("the worker has no standard output")?;
    let (found, wait) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Some(url) = line.strip_prefix("listening on ") {
                let _ = found.send(url.to_owned());
            }
        }
    });
    wait.recv_timeout(PATIENCE).map_err(|_| "the worker did not listen".to_owned())
}
