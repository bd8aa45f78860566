//! Owns finding HAProxy, and the deployed configuration with this machine's ports in it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::distribution::Program;

/// The configuration as deployed, but on these addresses and without the rights of a system service.
///
/// # Errors
/// A line that is expected there and is not.
pub(crate) fn local(
    root: &Path,
    listen: SocketAddr,
    tls: Option<(SocketAddr, &Path)>,
    workers: [SocketAddr; 2],
) -> Result<String, String> {
    let path = root.join("deploy/haproxy.cfg");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    replaced(&text, listen, tls, workers)
        .map_err(|line| format!("{}: expected {line:?} once", path.display()))
}

fn replaced(
    text: &str,
    listen: SocketAddr,
    tls: Option<(SocketAddr, &Path)>,
    workers: [SocketAddr; 2],
) -> Result<String, String> {
    let secure = "    # bind :8443 ssl crt /etc/haproxy/certs/omni-kev.pem alpn h2,http/1.1\n";
    let bind = tls.map_or(secure.to_owned(), |(address, pem)| {
        format!("    bind {address} ssl crt {} alpn h2,http/1.1\n", pem.display())
    });
    let replacements = [
        ("    user haproxy\n", String::new()),
        ("    group haproxy\n", String::new()),
        ("    bind :8080\n", format!("    bind {listen}\n")),
        (secure, bind),
        (" 192.0.2.11:8009\n", format!(" {}\n", workers[0])),
        (" 192.0.2.12:8009\n", format!(" {}\n", workers[1])),
    ];
    let mut text = text.to_owned();
    for (line, replacement) in replacements {
        if text.matches(line).count() != 1 {
            return Err(line.to_owned());
        }
        text = text.replace(line, &replacement);
    }
    Ok(text)
}

/// HAProxy of this machine, else of its distribution's packages.
///
/// # Errors
/// What is missing.
pub(crate) fn find(root: &Path) -> Result<Program, String> {
    Program::find(root, "haproxy", "haproxy")
}

/// Checks a configuration.
///
/// # Errors
/// What HAProxy said about it.
pub(crate) fn check(program: &Program, config: &Path) -> Result<(), String> {
    let output = program
        .command()
        .arg("-c")
        .arg("-f")
        .arg(config)
        .output()
        .map_err(|error| format!("haproxy: cannot be run: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // A warning is about what will not work as written.
    if output.status.success() && !said.contains("[WARNING]") { Ok(()) } else { Err(said) }
}

/// A running proxy, killed when dropped.
pub(crate) struct Proxy(Child);

impl Proxy {
    /// Starts it in the foreground and waits until it accepts connections; its log goes to `log`.
    pub(crate) fn start(program: &Program, config: &Path, listen: SocketAddr) -> Result<Self, String> {
        let log: PathBuf = config.with_extension("log");
        let file = std::fs::File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let child = program
            .command()
            .arg("-db")
            .arg("-f")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .map_err(|error| format!("haproxy: cannot be run: {error}"))?;
        let proxy = Self(child);
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(10) {
            if std::net::TcpStream::connect(listen).is_ok() {
                return Ok(proxy);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(format!("haproxy does not listen; see {}", log.display()))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deployed_configuration_gets_local_addresses() {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let text = local(
            &crate::root(),
            address(1),
            Some((address(4), Path::new("x.pem"))),
            [address(2), address(3)],
        )
        .unwrap();
        for line in [
            "bind 127.0.0.1:1\n",
            "worker-1 127.0.0.1:2\n",
            "worker-2 127.0.0.1:3\n",
            "bind 127.0.0.1:4 ssl crt x.pem",
        ] {
            assert_eq!(text.matches(line).count(), 1, "{line}");
        }
        assert!(replaced("    bind :8080\n", address(1), None, [address(2), address(3)]).is_err());
    }
}
