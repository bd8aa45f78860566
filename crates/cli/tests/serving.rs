//! `omni-kev serve` as its operators run it: TLS, keys, SIGHUP, and what is refused at the start.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::crypto::ring;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use support::{REQUEST, code, export_text, omni_kev, served, signal, stderr};

/// A directory of small files.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        self.text(name)
    }

    /// A certificate for `localhost` and its key, in `cert.pem` and `key.pem`; what clients must trust.
    fn certificate(&self) -> RootCertStore {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        self.write("cert.pem", &made.cert.pem());
        self.write("key.pem", &made.signing_key.serialize_pem());
        let mut roots = RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        roots
    }
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The status of a request over TLS.
fn ask(url: &str, roots: &RootCertStore) -> std::io::Result<String> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots.clone())
        .with_no_client_auth();
    let session = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let socket = TcpStream::connect(url.strip_prefix("https://").unwrap())?;
    let mut stream = StreamOwned::new(session, socket);
    write!(
        stream,
        "POST /v1/systemone HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        REQUEST.len()
    )?;
    stream.write_all(REQUEST)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.lines().next().unwrap_or("").to_owned())
}

#[test]
fn tls_is_served_and_a_hangup_brings_the_new_certificate_but_no_broken_one() {
    let files = Files::new();
    let old = files.certificate();
    let (certificate, key) = (files.text("cert.pem"), files.text("key.pem"));
    let (child, url) = served(&["--tls-cert", &certificate, "--tls-key", &key, "--drain-delay", "0"]);
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    assert_eq!(ask(&url, &old).unwrap(), "HTTP/1.1 200 OK");
    let new = files.certificate();
    signal(&child, "-HUP");
    until("the new certificate is in force", || ask(&url, &new).is_ok());
    assert!(ask(&url, &old).is_err());
    fs::write(&certificate, "nonsense").unwrap();
    signal(&child, "-HUP");
    // Nothing tells when a signal has done nothing.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(ask(&url, &new).unwrap(), "HTTP/1.1 200 OK");
    signal(&child, "-TERM");
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 0);
    let log = stderr(&output);
    assert!(log.contains("ERROR") && log.contains("the certificate stays as it is"), "{log}");
    assert!(log.contains("cert.pem: expected PEM blocks CERTIFICATE, found no PEM block"), "{log}");
}

#[test]
fn a_hangup_brings_new_keys_and_a_broken_file_none() {
    let files = Files::new();
    let file = files.write("keys", "team-a first-secret\n");
    let arguments =
        ["--api-key-file", &file, "--log-level", "info", "--log-format", "json", "--drain-delay", "0"];
    let (child, url) = served(&arguments);
    let config = ureq::Agent::config_builder().http_status_as_error(false).build();
    let agent = ureq::Agent::new_with_config(config);
    let status = |key: &str| {
        let call = agent.get(format!("{url}/v1/models")).header("authorization", format!("Bearer {key}"));
        call.call().unwrap().status().as_u16()
    };
    assert_eq!((status("first-secret"), status("team-a")), (200, 401));
    files.write("keys", "team-b second-secret\nthird:secret\n");
    signal(&child, "-HUP");
    until("the new keys are in force", || status("second-secret") == 200);
    assert_eq!((status("first-secret"), status("third:secret")), (401, 200));
    let broken: [&dyn Fn(); 3] = [
        &|| drop(files.write("keys", "first-secret\nsha256:12\n")),
        &|| drop(files.write("keys", "# all gone\n")),
        &|| fs::remove_file(&file).unwrap(),
    ];
    for spoil in broken {
        spoil();
        signal(&child, "-HUP");
        // Nothing tells when a signal has done nothing.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!((status("second-secret"), status("first-secret"), status("")), (200, 401, 401));
    }
    signal(&child, "-TERM");
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 0);
    let log = stderr(&output);
    assert_eq!(log.matches("the API keys stay as they are").count(), 3, "{log}");
    assert!(!log.contains("secret"), "{log}");
    let lines = log.lines().filter(|line| line.contains("/v1/models"));
    let requests: Vec<serde_json::Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let key = |index: usize| {
        (requests[index]["fields"]["status"].as_u64(), requests[index]["fields"]["key"].clone())
    };
    assert_eq!(key(0), (Some(200), "team-a".into()));
    assert_eq!(key(1), (Some(401), serde_json::Value::Null));
    let named = |name: &str| requests.iter().filter(|line| line["fields"]["key"] == name).count();
    assert_eq!((named("team-a"), named("team-b")), (1, 4));
}

#[test]
fn without_files_a_hangup_changes_nothing() {
    let (mut child, url) = served(&["--drain-delay", "0"]);
    signal(&child, "-HUP");
    std::thread::sleep(Duration::from_millis(200));
    assert!(posted(&url).starts_with("HTTP/1.1 200"));
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// The response to the request of all tests.
fn posted(url: &str) -> String {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
    write!(
        stream,
        "POST /v1/systemone HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        REQUEST.len()
    )
    .unwrap();
    stream.write_all(REQUEST).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn several_devices_serve_one_queue_and_answer_alike() {
    let (mut child, url) = served(&["--devices", "0,1", "--threads", "1", "--drain-delay", "0"]);
    let answers: Vec<String> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..32).map(|_| scope.spawn(|| posted(&url))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let body = |text: &str| text.split_once("\r\n\r\n").unwrap().1.to_owned();
    assert!(answers.iter().all(|text| text.starts_with("HTTP/1.1 200") && body(text) == body(&answers[0])));
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).unwrap();
    for line in ["omni_kev_devices 2", "omni_kev_working_devices 2", "omni_kev_batched_requests_total 32"] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    signal(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(0));

    let refused = omni_kev(&["serve", &export_text(), "--backend", "cpu", "--devices", "1,1"], b"");
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("has a device twice"), "{}", stderr(&refused));
    let refused = omni_kev(&["decide", &export_text(), "--backend", "cpu", "--devices", "0,1"], REQUEST);
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("runs on one device"), "{}", stderr(&refused));
}

#[test]
fn what_cannot_be_served_is_refused_at_the_start() {
    let files = Files::new();
    files.certificate();
    let other = Files::new();
    other.certificate();
    let (certificate, key) = (files.text("cert.pem"), files.text("key.pem"));
    let (wrong_key, gone) = (other.text("key.pem"), files.text("gone.pem"));
    let keys = files.write("keys", "na:me secret\n");
    let cases: [(&[&str], &[&str]); 10] = [
        (&["--tls-cert", &certificate], &["--tls-key"]),
        (&["--tls-key", &key], &["--tls-cert"]),
        (&["--tls-cert", &gone, "--tls-key", &key], &["gone.pem", "No such file"]),
        (
            &["--tls-cert", &key, "--tls-key", &key],
            &["key.pem", "expected PEM blocks CERTIFICATE", "PRIVATE KEY"],
        ),
        (&["--tls-cert", &certificate, "--tls-key", &wrong_key], &[&wrong_key, &certificate, "another key"]),
        (&["--api-key-file", &keys], &["keys", "line 1", "name"]),
        (&["--cors-origin", "app.example"], &["--cors-origin", "app.example", "scheme://host"]),
        (&["--cors-origin", "https://app.example/x"], &["--cors-origin", "path"]),
        (&["--cors-origin", "*", "--cors-origin", "https://app.example"], &["--cors-origin", "no other"]),
        (&["--deadline-ms", "5000", "--max-deadline-ms", "4999"], &["--max-deadline-ms", "5000", "4999"]),
    ];
    for (arguments, named) in cases {
        let output = omni_kev(&[&["serve", &export_text(), "--port", "0"], arguments].concat(), b"");
        let message = stderr(&output);
        assert_eq!(code(&output), 2, "{arguments:?}: {message}");
        assert!(named.iter().all(|part| message.contains(part)), "{named:?}: {message}");
        assert!(output.stdout.is_empty() && !message.contains("secret"), "{message}");
    }
}

#[test]
fn a_longer_deadline_needs_no_second_option() {
    let agent = ureq::Agent::new_with_defaults();
    for (deadline, limit) in [("120000", 120_000), ("1000", 60_000)] {
        let (mut child, url) = served(&["--deadline-ms", deadline, "--drain-delay", "0"]);
        let ready = agent.get(format!("{url}/ready")).call().unwrap().body_mut().read_to_string().unwrap();
        let ready: serde_json::Value = serde_json::from_str(&ready).unwrap();
        assert_eq!(ready["limits"]["max_deadline_ms"], limit, "{ready}");
        signal(&child, "-TERM");
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn tls_is_no_key() {
    let files = Files::new();
    files.certificate();
    let (certificate, key) = (files.text("cert.pem"), files.text("key.pem"));
    let export = export_text();
    let arguments =
        ["serve", &export, "--port", "0", "--host", "0.0.0.0", "--tls-cert", &certificate, "--tls-key", &key];
    let refused = omni_kev(&arguments, b"");
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("--api-key-file"), "{}", stderr(&refused));
}

#[test]
fn pages_are_let_in_by_name_only() {
    let agent = ureq::Agent::new_with_defaults();
    let allowed = |url: &str, origin: &str| {
        let response = agent.get(format!("{url}/health")).header("origin", origin).call().unwrap();
        let value = response.headers().get("access-control-allow-origin");
        value.map(|value| value.to_str().unwrap().to_owned())
    };
    let one = "https://app.example";
    let expected = [
        (&[][..], None),
        (&["--cors-origin", one, "--cors-origin", "http://localhost:3000"], Some(one)),
        (&["--cors-origin", "*"], Some("*")),
    ];
    for (arguments, origin) in expected {
        let (mut child, url) = served(&[arguments, &["--drain-delay", "0"]].concat());
        assert_eq!(allowed(&url, one).as_deref(), origin);
        signal(&child, "-TERM");
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}
