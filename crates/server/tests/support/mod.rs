//! A server on a real socket with a fake executor behind it, and a client that can misbehave.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)] // Test support, shared by test files.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use artifact::{PreTokenizer, Tokenizer};
use processor::{Processor, ProcessorOptions};
use scheduler::{Scheduler, SchedulerOptions};
use serde_json::{Value, json};
use server::{CacheProbe, CacheSnapshot, ModelCard, ServeError, ServerOptions, Service};
use testkit::fake::{FakeHandle, fake};
use tokio::sync::oneshot;

/// How long a test waits for bytes before it gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A tokenizer of single bytes and the five delimiters: tokens are easy to count.
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    let dir = tempfile::tempdir().unwrap();
    // The printable stand-ins of byte-level encoding: printable bytes stand for themselves, others for 256 and up.
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256..;
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255u8 {
        let stand_in = if printable(&byte) { u32::from(byte) } else { others.next().unwrap() };
        vocab.insert(char::from_u32(stand_in).unwrap().to_string(), json!(byte));
    }
    let names = ["<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"];
    let added: Vec<Value> = names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            json!({ "id": 256 + index, "content": name, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false })
        })
        .collect();
    let definition = json!({
        "version": "1.0",
        "added_tokens": added,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    std::fs::write(dir.path().join("tokenizer.json"), definition.to_string()).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), "{}").unwrap();
    Arc::new(Tokenizer::open(dir.path(), PreTokenizer::Qwen2).unwrap())
}

/// What a test wants to be different.
#[derive(Default)]
pub(crate) struct Setup {
    pub(crate) server: ServerOptions,
    pub(crate) scheduler: SchedulerOptions,
    pub(crate) processor: ProcessorOptions,
}

/// A running server.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) model: FakeHandle,
    stop: Option<oneshot::Sender<()>>,
    ended: Option<std::thread::JoinHandle<Result<(), ServeError>>>,
}

impl Server {
    pub(crate) fn new() -> Self {
        Self::with(Setup::default())
    }

    pub(crate) fn with(setup: Setup) -> Self {
        let (executor, model) = fake();
        let card = |name: &str| ModelCard {
            name: name.to_owned(),
            description: "A fake model.".to_owned(),
            release_date: "2026-01-01".to_owned(),
            details: serde_json::Map::new(),
        };
        let service = Service {
            processor: Processor::new(tokenizer(), 2.0, setup.processor),
            scheduler: Scheduler::start(executor, setup.scheduler).unwrap(),
            models: vec![card("kev-latest"), card("jev-latest")],
            qualification: "unqualified",
            cache: Some(CacheProbe::new(CacheSnapshot::default)),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ended = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                listener.set_nonblocking(true).unwrap();
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let shutdown = async {
                    let _ = stopped.await;
                };
                server::serve(listener, service, setup.server, shutdown).await
            })
        });
        Self { address, model, stop: Some(stop), ended: Some(ended) }
    }

    pub(crate) fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream: BufReader::new(stream) }
    }

    /// One request on a connection of its own.
    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Response {
        self.connect().request(method, path, headers, body)
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        self.request("GET", path, &[], b"")
    }

    /// A body to `/v1/systemone`, as JSON.
    pub(crate) fn post(&self, body: impl AsRef<[u8]>) -> Response {
        self.post_to("/v1/systemone", body)
    }

    pub(crate) fn post_to(&self, path: &str, body: impl AsRef<[u8]>) -> Response {
        self.request("POST", path, &[("content-type", "application/json")], body.as_ref())
    }

    /// A body that must be answered.
    pub(crate) fn answer(&self, body: &Value) -> Value {
        let response = self.post(body.to_string());
        assert_eq!(response.status, 200, "{body}: {}", response.text());
        response.json()
    }

    /// Asks to stop, without waiting.
    pub(crate) fn begin_stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Waits for the end.
    pub(crate) fn join(&mut self) -> Result<(), ServeError> {
        self.ended.take().unwrap().join().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.model.release();
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(ended) = self.ended.take() {
            let _ = ended.join();
        }
    }
}

/// One connection.
pub(crate) struct Client {
    stream: BufReader<TcpStream>,
}

/// A response as it came.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Kind and place of each item of a validation error, joined by dots.
    pub(crate) fn violations(&self) -> Vec<(String, String)> {
        assert_eq!(self.status, 422, "{}", self.text());
        let json = self.json();
        let items = json["detail"].as_array().unwrap_or_else(|| panic!("no list: {}", self.text()));
        items
            .iter()
            .map(|item| {
                assert!(item["msg"].is_string() && item["loc"][0] == "body", "{item}");
                let loc: Vec<String> = item["loc"].as_array().unwrap().iter().map(plain).collect();
                (item["type"].as_str().unwrap().to_owned(), loc.join("."))
            })
            .collect()
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl Client {
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).unwrap();
    }

    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Says that nothing more will be sent.
    pub(crate) fn finish(&self) {
        self.stream.get_ref().shutdown(Shutdown::Write).unwrap();
    }

    pub(crate) fn send_head(&mut self, method: &str, path: &str, headers: &[(&str, &str)]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        self.send(head.as_bytes());
    }

    pub(crate) fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Response {
        let length = body.len().to_string();
        let mut headers = headers.to_vec();
        if method == "POST" {
            headers.push(("content-length", &length));
        }
        self.send_head(method, path, &headers);
        self.send(body);
        self.response(method == "HEAD")
    }

    pub(crate) fn post(&mut self, body: &Value) -> Response {
        let json = ("content-type", "application/json");
        self.request("POST", "/v1/systemone", &[json], body.to_string().as_bytes())
    }

    /// The next response; a HEAD request's has no body.
    pub(crate) fn response(&mut self, head: bool) -> Response {
        self.try_response(head).expect("a whole response")
    }

    pub(crate) fn try_response(&mut self, head: bool) -> std::io::Result<Response> {
        let bad = |what: &str| std::io::Error::other(what.to_owned());
        let status = self.line()?;
        let status =
            status.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| bad(&status))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(": ").ok_or_else(|| bad(&line))?;
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        let mut response = Response { status, headers, body: Vec::new() };
        if !head && status != 100 {
            let length = response.header("content-length").map_or(Ok(0), str::parse);
            response.body = vec![0; length.map_err(|_| bad("content-length"))?];
            self.stream.read_exact(&mut response.body)?;
        }
        Ok(response)
    }

    /// Whether the server has closed its side, with nothing left to read.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0))
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }
}

/// A request with one question `q`.
pub(crate) fn one(question: Value) -> Value {
    json!({ "model": "jev-latest", "state": "I was charged twice.", "questions": { "q": question } })
}

pub(crate) fn noul() -> Value {
    json!({ "type": "noul", "instructions": "Wants money back?" })
}

/// A choice of options without descriptions.
pub(crate) fn choice<T: AsRef<str>>(options: &[T]) -> Value {
    let criteria: serde_json::Map<String, Value> =
        options.iter().map(|name| (name.as_ref().to_owned(), Value::Null)).collect();
    json!({ "type": "choice", "instructions": "Who handles it?", "criteria": criteria })
}

pub(crate) fn score<T: AsRef<str>>(levels: &[T]) -> Value {
    let levels: Vec<&str> = levels.iter().map(AsRef::as_ref).collect();
    json!({ "type": "score", "instructions": "How upset?", "criteria": levels })
}

/// `prefix0`, `prefix1`, ….
pub(crate) fn numbered(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|index| format!("{prefix}{index}")).collect()
}

/// Waits until something that other threads do becomes true.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(std::time::Instant::now() < end, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
