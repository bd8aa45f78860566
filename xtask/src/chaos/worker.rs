//! Owns the workers under test: a small export made with the program itself, and processes that serve it.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::http::{Client, get};
use crate::python::run;

/// How long a worker may take to listen.
const START: Duration = Duration::from_secs(60);

/// Makes a checkpoint of random weights and exports it; returns the export.
pub(crate) fn export(binary: &Path, folder: &Path) -> Result<PathBuf, String> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let checkpoint = folder.join("checkpoint");
    let export = folder.join("export");
    let mut synth = Command::new(binary);
    synth.args(["synth", "--geometry", "tiny", "--out"]).arg(&checkpoint).stdout(Stdio::null());
    run(synth.stderr(Stdio::null()), "omni-kev synth")?;
    let mut merge = Command::new(binary);
    merge.arg("export").arg("--adapter").arg(checkpoint.join("adapter"));
    merge.arg("--base").arg(checkpoint.join("base")).arg("--out").arg(&export);
    run(merge.stdout(Stdio::null()).stderr(Stdio::null()), "omni-kev export")?;
    Ok(export)
}

/// A served export, killed when dropped.
pub(crate) struct Worker {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Worker {
    /// Starts a worker on the CPU and waits until it listens; port 0 takes a free one.
    pub(crate) fn start(
        binary: &Path,
        export: &Path,
        port: u16,
        arguments: &[String],
    ) -> Result<Self, String> {
        let mut child = Command::new(binary)
            .arg("serve")
            .arg(export)
            .args(["--backend", "cpu", "--port", &port.to_string()])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: cannot be run: {error}", binary.display()))?;
        let output = child.stdout.take().ok_or("the worker has no standard output")?;
        let mut worker = Self { child, address: SocketAddr::from(([127, 0, 0, 1], port)) };
        let (found, wait) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(address) = line.strip_prefix("listening on http://") {
                    let _ = found.send(address.to_owned());
                }
            }
        });
        let address = wait.recv_timeout(START).map_err(|_| "a worker did not listen".to_owned())?;
        worker.address = address.parse().map_err(|error| format!("{address}: {error}"))?;
        Ok(worker)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal by name.
    pub(crate) fn signal(&self, name: &str) -> Result<(), String> {
        run(Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()), "kill")
    }

    /// Waits for its end.
    pub(crate) fn ended(&mut self, patience: Duration) -> Result<ExitStatus, String> {
        let started = Instant::now();
        while started.elapsed() < patience {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(format!("the worker did not end within {patience:?}"))
    }

    /// Resident memory, in MiB.
    pub(crate) fn rss(&self) -> Result<f64, String> {
        let path = format!("/proc/{}/status", self.pid());
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
        kib.map(|kib| kib / 1024.0).ok_or_else(|| format!("{path}: no VmRSS"))
    }

    /// Its metrics now.
    pub(crate) fn metrics(&self) -> Result<Metrics, String> {
        Metrics::read(self.address)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What `/metrics` said.
pub(crate) struct Metrics(String);

impl Metrics {
    fn read(address: SocketAddr) -> Result<Self, String> {
        let answer = Client::new(address).exchange(&get("/metrics"));
        let answer = answer.map_err(|outcome| format!("/metrics: {outcome:?}"))?;
        Ok(Self(String::from_utf8_lossy(&answer.body).into_owned()))
    }

    /// A value by name and labels; 0 of a counter that has not counted yet.
    pub(crate) fn value(&self, name: &str) -> f64 {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or(0.0)
    }

    /// Responses of the model's route with this status.
    pub(crate) fn responses(&self, status: u16) -> f64 {
        self.value(&format!("omni_kev_responses_total{{route=\"/v1/systemone\",status=\"{status}\"}}"))
    }

    /// Whether nothing is inside.
    pub(crate) fn idle(&self) -> bool {
        let gauges = [
            "admitted_requests",
            "admitted_tokens",
            "waiting_requests",
            "waiting_tokens",
            "running_requests",
        ];
        gauges.iter().all(|gauge| {
            let name = format!("omni_kev_{gauge} ");
            // An absent gauge is no zero.
            self.0.lines().any(|line| line.starts_with(&name)) && self.value(name.trim_end()) == 0.0
        })
    }
}

/// How long it took until nothing was inside a worker.
pub(crate) fn until_idle(worker: &Worker, patience: Duration) -> Result<Duration, String> {
    let started = Instant::now();
    loop {
        if worker.metrics()?.idle() {
            return Ok(started.elapsed());
        }
        if started.elapsed() > patience {
            return Err(format!("the queue's gauges were not 0 within {patience:?}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
