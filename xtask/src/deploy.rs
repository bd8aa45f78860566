//! Owns `cargo xtask deploy-check`: what `deploy/` holds is tried here, each file with the program that will read it.

pub(crate) mod container;
pub(crate) mod distribution;
pub(crate) mod haproxy;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::chaos::worker::{self, Worker};

/// Checks every file of `deploy/`.
///
/// # Errors
/// The file that is wrong and why, or what this machine lacks for the check.
pub(crate) fn check(root: &Path, binary: &Path, arguments: &[String]) -> Result<(), String> {
    let without_haproxy = match arguments {
        [] => false,
        [argument] if argument == "--without-haproxy" => true,
        _ => return Err("usage: cargo xtask deploy-check [--without-haproxy]".to_owned()),
    };
    let folder = root.join("target/deploy-check");
    let export = worker::export(binary, &folder.join("export"))?;
    proxy(root, &folder, without_haproxy)?;
    unit(root, binary, &folder)?;
    environment(root, binary)?;
    container::check(root, binary, &export, &folder.join("image"))?;
    reload(binary, &export)?;
    println!("deploy-check: ok");
    Ok(())
}

fn proxy(root: &Path, folder: &Path, without: bool) -> Result<(), String> {
    let program = match haproxy::find(root) {
        Ok(program) => program,
        Err(error) if without => {
            println!("deploy-check: haproxy.cfg NOT CHECKED, as --without-haproxy allows: {error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let text = haproxy::local(root, address(8080), None, [address(8009), address(8010)])?;
    let config = write(folder, "haproxy.cfg", &text)?;
    haproxy::check(&program, &config)?;
    println!("deploy-check: haproxy.cfg is accepted by {}", program.path().display());
    Ok(())
}

/// systemd's own check of the unit, with programs that exist here in the place of those it names.
fn unit(root: &Path, binary: &Path, folder: &Path) -> Result<(), String> {
    let text = read(&root.join("deploy/omni-kev.service"))?;
    let number = |name: &str| setting(&text, name).and_then(|value| value.parse::<u64>().ok());
    let variables = variables(&read(&root.join("deploy/omni-kev.env"))?);
    let ms = |name: &str| {
        let found = variables.iter().find(|(known, _)| known == name);
        found
            .and_then(|(_, value)| value.parse::<u64>().ok())
            .ok_or_else(|| format!("omni-kev.env: no {name}"))
    };
    let drain = ms("OMNI_KEV_DRAIN_DELAY")? + ms("OMNI_KEV_DRAIN_TIMEOUT")?;
    if number("TimeoutStopSec").is_none_or(|seconds| 1000 * seconds <= drain) {
        return Err(format!(
            "omni-kev.service: TimeoutStopSec is not above the {drain} ms that a drain may take"
        ));
    }
    if distribution::installed("systemd-analyze").is_none() {
        println!("deploy-check: omni-kev.service NOT VERIFIED, this machine has no systemd-analyze");
        return Ok(());
    }
    let local = text.replace("/usr/local/bin/omni-kev", &binary.display().to_string());
    let file = write(folder, "omni-kev.service", &local)?;
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(&file)
        .output()
        .map_err(|error| format!("systemd-analyze: cannot be run: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // Unknown settings are only warned about. Other units of this machine are not this check's.
    if !output.status.success() || said.lines().any(|line| line.contains("omni-kev.service")) {
        return Err(format!("omni-kev.service: {said}"));
    }
    println!("deploy-check: omni-kev.service is accepted by systemd-analyze verify");
    Ok(())
}

/// What ExecReload sends must not end a worker.
fn reload(binary: &Path, export: &Path) -> Result<(), String> {
    let mut worker = Worker::start(binary, export, 0, &[])?;
    worker.signal("HUP")?;
    match worker.ended(Duration::from_secs(1)) {
        Ok(status) => {
            Err(format!("omni-kev.service: ExecReload sends SIGHUP, which ends the worker: {status}"))
        }
        Err(_) => {
            println!("deploy-check: a worker goes on after SIGHUP");
            Ok(())
        }
    }
}

/// Every variable of the example is one that `serve` or the loader of kernels reads.
fn environment(root: &Path, binary: &Path) -> Result<(), String> {
    let output = Command::new(binary)
        .args(["serve", "--help"])
        .output()
        .map_err(|error| format!("{}: cannot be run: {error}", binary.display()))?;
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    let unit = read(&root.join("deploy/omni-kev.service"))?;
    let text = read(&root.join("deploy/omni-kev.env"))?;
    for (name, _) in variables(&text) {
        let known = help.contains(&format!("[env: {name}="))
            || unit.contains(&format!("${{{name}}}"))
            || name == "OMNI_KEV_KERNELS";
        if !known {
            return Err(format!("omni-kev.env: {name} is no variable of `omni-kev serve`"));
        }
    }
    println!("deploy-check: every variable of omni-kev.env is read");
    Ok(())
}

/// Names and values, those in comments too.
fn variables(text: &str) -> Vec<(String, String)> {
    let pair = |line: &str| {
        let (name, value) = line.trim_start_matches('#').split_once('=')?;
        let named = name.starts_with("OMNI_KEV_") && !name.contains(' ');
        named.then(|| (name.to_owned(), value.to_owned()))
    };
    text.lines().filter_map(pair).collect()
}

fn setting<'a>(unit: &'a str, name: &str) -> Option<&'a str> {
    unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(folder: &Path, name: &str, text: &str) -> Result<PathBuf, String> {
    let path = folder.join(name);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, text))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_and_settings_are_read() {
        let text = "# words = none\nOMNI_KEV_A=1\n#OMNI_KEV_B=/x\n";
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(variables(text), [pair("OMNI_KEV_A", "1"), pair("OMNI_KEV_B", "/x")]);
        assert_eq!(setting("A=1\nTimeoutStopSec=45\n", "TimeoutStopSec"), Some("45"));
        assert_eq!(setting("A=1\n", "B"), None);
    }
}
