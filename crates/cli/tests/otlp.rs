//! Traces as a collector receives them, and what becomes of requests when there is no collector.

#![allow(clippy::panic, clippy::unwrap_used)] // Tests fail by panicking.

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use support::{REQUEST, code, export_text, omni_kev, served, signal, stderr};

/// A collector that takes whatever comes, and the bodies that it was sent with their paths.
fn collector() -> (String, Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, received) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let mut stream = BufReader::new(stream.unwrap());
                while let Some(message) = message(&mut stream) {
                    // The test may have ended.
                    let _ = sender.send(message);
                    let answer =
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
                    stream.get_mut().write_all(answer).unwrap();
                }
            });
        }
    });
    (url, received)
}

/// The next request of a connection: its first line and its body.
fn message(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut line = || {
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|read| *read > 0).map(|_| line.trim().to_owned())
    };
    let first = line()?;
    let mut length = 0;
    let mut protobuf = false;
    loop {
        let header = line()?.to_ascii_lowercase();
        match header.split_once(": ") {
            Some(("content-length", value)) => length = value.parse().unwrap(),
            Some(("content-type", value)) => protobuf = value == "application/x-protobuf",
            Some(_) => {}
            None => break,
        }
    }
    assert!(protobuf);
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    Some((first, body))
}

/// A field of a protobuf message: integers and fixed numbers as their bits.
#[derive(Debug)]
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn bytes(&self) -> &'a [u8] {
        match self {
            Field::Bytes(bytes) => bytes,
            Field::Number(number) => panic!("expected bytes, found {number}"),
        }
    }

    fn number(&self) -> u64 {
        match self {
            Field::Number(number) => *number,
            Field::Bytes(bytes) => panic!("expected a number, found {bytes:?}"),
        }
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}

/// The fields of a message by their numbers.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut bytes)),
            1 => Field::Number(u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
            2 => {
                let length = varint(&mut bytes) as usize;
                Field::Bytes(take(&mut bytes, length))
            }
            5 => Field::Number(u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap()).into()),
            kind => panic!("wire type {kind}"),
        };
        found.push((tag >> 3, field));
    }
    found
}

/// The messages of one field.
fn children(bytes: &[u8], number: u64) -> impl Iterator<Item = &[u8]> {
    fields(bytes).into_iter().filter(move |(found, _)| *found == number).map(|(_, field)| field.bytes())
}

/// Attributes, `KeyValue`s in one field, as text.
fn attributes(bytes: &[u8], number: u64) -> BTreeMap<String, String> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    children(bytes, number)
        .map(|pair| {
            let (kind, value) = children(pair, 2).flat_map(fields).next().unwrap();
            let value = match kind {
                1 => text(value.bytes()),
                3 => (value.number() as i64).to_string(),
                4 => f64::from_bits(value.number()).to_string(),
                _ => panic!("a value of kind {kind}"),
            };
            (text(children(pair, 1).next().unwrap()), value)
        })
        .collect()
}

/// What is tested of a `Span` of opentelemetry/proto/trace/v1/trace.proto.
#[derive(Debug)]
struct Span {
    trace: String,
    parent: String,
    name: String,
    kind: u64,
    nanoseconds: u64,
    /// The code of its status, 0 for none.
    status: u64,
    attributes: BTreeMap<String, String>,
}

impl Span {
    fn read(bytes: &[u8]) -> Self {
        let hex = |number| children(bytes, number).flatten().map(|byte| format!("{byte:02x}")).collect();
        let number = |number| {
            let found = fields(bytes).into_iter().find(|(found, _)| *found == number);
            found.map_or(0, |(_, field)| field.number())
        };
        let status = children(bytes, 15).flat_map(fields).find(|(number, _)| *number == 3);
        assert_eq!(
            (children(bytes, 3).flatten().count(), children(bytes, 11).count()),
            (0, 0),
            "state, events"
        );
        Self {
            trace: hex(1),
            parent: hex(4),
            name: String::from_utf8(children(bytes, 5).next().unwrap().to_vec()).unwrap(),
            kind: number(6),
            nanoseconds: number(8) - number(7),
            status: status.map_or(0, |(_, code)| code.number()),
            attributes: attributes(bytes, 9),
        }
    }

    fn says(&self, key: &str) -> Option<&str> {
        self.attributes.get(key).map(String::as_str)
    }
}

/// All spans of a request to a collector, by the id of the request.
fn spans(body: &[u8]) -> BTreeMap<String, Span> {
    children(body, 1)
        .flat_map(|resource| children(resource, 2).collect::<Vec<_>>())
        .flat_map(|scope| children(scope, 2).collect::<Vec<_>>())
        .map(Span::read)
        .map(|span| (span.says("request_id").unwrap().to_owned(), span))
        .collect()
}

/// The status of a request with this path, these headers and this body.
fn ask(url: &str, path: &str, headers: &str, body: &[u8]) -> u16 {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
    let method = if body.is_empty() { "GET" } else { "POST" };
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{headers}\r\n",
        body.len()
    )
    .unwrap();
    stream.write_all(body).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.split(' ').nth(1).unwrap().parse().unwrap()
}

const STAGES: [&str; 4] = ["queue_ms", "prepare_ms", "model_ms", "finish_ms"];

#[test]
fn a_collector_receives_a_span_for_every_request_before_the_end() {
    let (collector, received) = collector();
    let (child, url) = served(&[
        "--otlp-endpoint",
        &collector,
        "--drain-delay",
        "0",
        "--log-level",
        "debug",
        "--log-format",
        "text",
    ]);
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let id = |id: &str| format!("x-typesafe-request-id: {id}\r\n");
    let under = |flags: &str| {
        format!("traceparent: 00-{trace}-{parent}-{flags}\r\ntracestate: vendor=text-of-the-caller\r\n")
    };
    assert_eq!(ask(&url, "/v1/systemone", &(id("one") + &under("01")), REQUEST), 200);
    assert_eq!(ask(&url, "/v1/systemone/separate", &id("two"), REQUEST), 200);
    let broken = format!("{}traceparent: 00-{trace}-text-of-the-caller-01\r\n", id("three"));
    assert_eq!(ask(&url, "/v1/systemone", &broken, b"{\"text-of-the-caller\":1}"), 422);
    assert_eq!(ask(&url, "/v1/models?text-of-the-caller", &id("four"), b""), 200);
    // Neither is a request of the protocol, and a caller may ask for no span.
    assert_eq!(ask(&url, "/health", &id("five"), b""), 200);
    assert_eq!(ask(&url, "/v1/text-of-the-caller", &id("six"), b""), 404);
    assert_eq!(ask(&url, "/v1/systemone", &(id("seven") + &under("00")), REQUEST), 200);
    signal(&child, "-TERM");
    let output = child.wait_with_output().unwrap();
    let log = stderr(&output);
    assert_eq!(code(&output), 0, "{log}");

    let mut found = BTreeMap::new();
    while let Ok((line, body)) = received.try_recv() {
        assert_eq!(line, "POST /v1/traces HTTP/1.1");
        for text in ["charged twice", "refund", "billing", "text-of-the-caller", "vendor"] {
            assert!(!body.windows(text.len()).any(|part| part == text.as_bytes()), "{text}");
        }
        let resource =
            children(&body, 1).flat_map(|sent| children(sent, 1).collect::<Vec<_>>()).next().unwrap();
        assert_eq!(attributes(resource, 1)["service.name"], "omni-kev");
        found.extend(spans(&body));
    }
    assert_eq!(found.keys().collect::<Vec<_>>(), ["four", "one", "three", "two"]);
    let (one, two, three, four) = (&found["one"], &found["two"], &found["three"], &found["four"]);
    assert_eq!((one.trace.as_str(), one.parent.as_str()), (trace, parent));
    assert_eq!((one.name.as_str(), one.kind, one.status), ("/v1/systemone", 2, 0));
    for span in [two, three, four] {
        assert!(span.trace != trace && span.trace.len() == 32 && span.parent.is_empty(), "{span:?}");
    }
    for (span, route, questions) in [(one, "/v1/systemone", "3"), (two, "/v1/systemone/separate", "3")] {
        assert_eq!(span.says("http.route"), Some(route));
        assert_eq!(span.says("http.response.status_code"), Some("200"));
        assert_eq!(span.says("questions"), Some(questions));
        assert!(span.says("input_tokens").unwrap().parse::<u64>().unwrap() > 10, "{span:?}");
        let stages: f64 = STAGES.iter().map(|stage| span.says(stage).unwrap().parse::<f64>().unwrap()).sum();
        // The clock of the span may be another than that of the stages.
        assert!(stages > 0.0 && stages < span.nanoseconds as f64 / 1e6 + 50.0, "{span:?}");
        assert_eq!(span.attributes.len(), 9, "{span:?}");
    }
    assert_eq!((three.says("http.response.status_code"), three.status), (Some("422"), 0));
    assert_eq!(four.says("http.route"), Some("/v1/models"));
    assert!(STAGES.iter().all(|stage| three.says(stage).is_none() && four.says(stage).is_none()));

    // The log has each request once, and no span around its lines.
    let lines: Vec<_> = log.lines().filter(|line| line.contains("two")).collect();
    assert!(lines.len() == 1 && lines[0].contains("server::observe") && !lines[0].contains("span"), "{log}");
    assert!(!log.contains("otel") && !log.contains("text-of-the-caller"), "{log}");
}

#[test]
fn without_a_collector_requests_are_answered_and_the_end_is_clean() {
    // Bound and closed: whoever connects is refused.
    let refusing = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    // Takes connections into its queue and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [refusing, silent.local_addr().unwrap()] {
        let endpoint = format!("http://{address}");
        let (child, url) = served(&["--otlp-endpoint", &endpoint, "--drain-delay", "0"]);
        let started = Instant::now();
        // More than a batch, so that it is tried to send while requests come.
        for _ in 0..600 {
            assert_eq!(ask(&url, "/v1/models", "", b""), 200);
        }
        assert_eq!(ask(&url, "/v1/systemone", "", REQUEST), 200);
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
        signal(&child, "-TERM");
        let stopped = Instant::now();
        let output = child.wait_with_output().unwrap();
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        // The limit is 5 s; the rest is for a busy machine.
        assert!(stopped.elapsed() < Duration::from_secs(15), "{:?}", stopped.elapsed());
        assert_eq!(
            stderr(&output).matches("the collector cannot be reached").count(),
            1,
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn an_endpoint_that_is_none_is_refused_at_the_start() {
    for bad in ["collector:4318", "https://127.0.0.1:4318", "http://127.0.0.1:99999", ""] {
        let refused = omni_kev(&["serve", &export_text(), "--otlp-endpoint", bad], b"");
        let message = stderr(&refused);
        assert_eq!(code(&refused), 2, "{bad}: {message}");
        assert!(message.contains("--otlp-endpoint") && message.contains("http://host"), "{bad}: {message}");
        assert!(refused.stdout.is_empty());
    }
}
