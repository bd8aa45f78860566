//! Owns the workloads of `omni-kev bench` that need a server of their own: from the start of its process to its first answer,
//! and 64 clients over HTTP.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::bench::summary;

/// Clients that each have one request in flight.
const CLIENTS: usize = 64;
/// How long they send.
const LOAD: Duration = Duration::from_secs(10);

/// A served export, killed when dropped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(export: &Path, arguments: &[String]) -> Result<Self> {
        let binary = std::env::current_exe().context("this program's own file is not known")?;
        let mut child = Command::new(binary)
            .arg("serve")
            .arg(export)
            .args(["--port", "0", "--deadline-ms", "600000"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("a server cannot be started")?;
        let output = child.stdout.take().context("a server without output")?;
        let mut server = Self { child, url: String::new() };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).context("a server's output cannot be read")?;
        let address = line.trim().strip_prefix("listening on ").context("the server did not listen")?;
        server.url = format!("{address}/v1/systemone");
        Ok(server)
    }

    fn post(&self, agent: &ureq::Agent, request: &Value) -> Result<Value> {
        let mut response = agent
            .post(&self.url)
            .content_type("application/json")
            .send(request.to_string())
            .with_context(|| format!("POST {}", self.url))?;
        Ok(serde_json::from_str(&response.body_mut().read_to_string()?)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Seconds from the start of a process to its first answer.
pub(crate) fn start(export: &Path, arguments: &[String]) -> Result<Value> {
    let mut times = Vec::new();
    for _ in 0..3 {
        let started = Instant::now();
        let server = Server::start(export, arguments)?;
        server.post(&ureq::Agent::new_with_defaults(), &request(0, 0))?;
        times.push(started.elapsed().as_secs_f64());
    }
    Ok(summary("S1", "s", times))
}

/// Requests a second of 64 clients over HTTP, and how long each waited.
pub(crate) fn load(export: &Path, arguments: &[String]) -> Result<Value> {
    let server = Server::start(export, arguments)?;
    let (tokens, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let times = Mutex::new(Vec::new());
    let started = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, tokens, failed, times) = (&server, &tokens, &failed, &times);
            scope.spawn(move || {
                let agent = ureq::Agent::new_with_defaults();
                for index in 0.. {
                    if started.elapsed() > LOAD {
                        break;
                    }
                    let sent = Instant::now();
                    match server.post(&agent, &request(client, index)) {
                        Ok(answer) => {
                            let read = answer["usage"]["input_tokens"].as_u64().unwrap_or(0);
                            tokens.fetch_add(read as usize, Ordering::Relaxed);
                            let mut times = times.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                            times.push(1e3 * sent.elapsed().as_secs_f64());
                        }
                        Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
                    }
                }
            });
        }
    });
    let seconds = started.elapsed().as_secs_f64();
    let times = times.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    anyhow::ensure!(!times.is_empty(), "no request was answered");
    let (answered, failed) = (times.len(), failed.into_inner());
    let (requests, tokens) = (answered as f64 / seconds, tokens.into_inner() as f64 / seconds);
    println!(
        "T1, {CLIENTS} clients over HTTP: {requests:.1} requests/s, {tokens:.0} tokens/s, {answered} answered, {failed} failed"
    );
    let mut result = summary("T1, latency", "ms", times);
    result["requests_per_second"] = json!(requests);
    result["tokens_per_second"] = json!(tokens);
    result["failed"] = json!(failed);
    Ok(result)
}

/// A text that no other request has, and six questions with two or three options, about as long as L1.
fn request(client: usize, index: usize) -> Value {
    let mut questions = serde_json::Map::new();
    for question in 0..6 {
        let mut criteria = serde_json::Map::new();
        for option in 0..2 + question % 2 {
            criteria.insert(format!("team {option}"), json!("the payments and invoices"));
        }
        questions.insert(
            format!("q{question}"),
            json!({ "type": "choice", "instructions": "which of the teams should answer this?", "criteria": criteria }),
        );
    }
    let state = format!(
        "the order {client} of customer {index} was late and the payment was charged twice, please refund one of them"
    );
    json!({ "state": state, "questions": questions })
}
