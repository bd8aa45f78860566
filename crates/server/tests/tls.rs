//! TLS over real sockets: what is negotiated, what a broken file says, what SIGHUP's rereading changes, and that a handshake
//! is bounded in time and in number.

#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::crypto::ring;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion, version};
use rustls_pki_types::CertificateDer;
use server::{ServerOptions, Tls};
use support::{Server, Setup, noul, one, until};

const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(60);

/// A certificate and its key in files.
struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    /// Made anew, with the certificate for clients to trust.
    fn new() -> (Self, CertificateDer<'static>) {
        let files = Self { dir: tempfile::tempdir().unwrap() };
        let trusted = files.renew();
        (files, trusted)
    }

    fn certificate(&self) -> PathBuf {
        self.dir.path().join("cert.pem")
    }

    fn key(&self) -> PathBuf {
        self.dir.path().join("key.pem")
    }

    fn renew(&self) -> CertificateDer<'static> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        fs::write(self.certificate(), made.cert.pem()).unwrap();
        fs::write(self.key(), made.signing_key.serialize_pem()).unwrap();
        made.cert.der().clone()
    }

    fn open(&self) -> Tls {
        Tls::open(&self.certificate(), &self.key()).unwrap()
    }
}

fn serving(tls: Tls, options: ServerOptions) -> Server {
    let server = ServerOptions { tls: Some(tls), ..options };
    Server::with(Setup { server, ..Setup::default() })
}

type Stream = StreamOwned<ClientConnection, TcpStream>;

fn connect_as(
    address: SocketAddr,
    trusted: &CertificateDer<'static>,
    versions: &[&'static SupportedProtocolVersion],
    alpn: &[&[u8]],
) -> std::io::Result<Stream> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let mut socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(LONG))?;
    let mut session = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    while session.is_handshaking() {
        session.complete_io(&mut socket)?;
    }
    Ok(StreamOwned::new(session, socket))
}

fn connect(address: SocketAddr, trusted: &CertificateDer<'static>) -> std::io::Result<Stream> {
    connect_as(address, trusted, rustls::ALL_VERSIONS, &[b"http/1.1"])
}

/// One request on a connection that stays open: the status, and the body by its length.
fn ask(stream: &mut Stream) -> std::io::Result<(u16, String)> {
    let body = one(noul()).to_string();
    write!(
        stream,
        "POST /v1/systemone HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    answer(stream)
}

fn answer(stream: &mut Stream) -> std::io::Result<(u16, String)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body)?;
    Ok((head[9..12].parse().unwrap(), String::from_utf8(body).unwrap()))
}

#[test]
fn both_versions_are_spoken_and_one_protocol_is_offered() {
    let (files, trusted) = Files::new();
    let server = serving(files.open(), ServerOptions::default());
    for version in [&version::TLS12, &version::TLS13] {
        for alpn in [&[&b"http/1.1"[..]][..], &[b"h2", b"http/1.1"], &[]] {
            let mut stream = connect_as(server.address, &trusted, &[version], alpn).unwrap();
            let chosen = stream.conn.alpn_protocol().map(<[u8]>::to_vec);
            assert_eq!(chosen, (!alpn.is_empty()).then(|| b"http/1.1".to_vec()));
            let first = ask(&mut stream).unwrap();
            assert_eq!(first.0, 200, "{}", first.1);
            assert_eq!(ask(&mut stream).unwrap(), first);
        }
        assert!(connect_as(server.address, &trusted, &[version], &[b"h2"]).is_err(), "HTTP/2 is not spoken");
    }
}

#[test]
fn plain_text_on_the_port_is_no_request_and_the_server_lives_on() {
    let (files, trusted) = Files::new();
    let server = serving(files.open(), ServerOptions::default());
    let mut plain = TcpStream::connect(server.address).unwrap();
    plain.set_read_timeout(Some(LONG)).unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    assert_eq!(ask(&mut connect(server.address, &trusted).unwrap()).unwrap().0, 200);
}

#[test]
fn reread_files_are_for_new_connections_and_broken_ones_for_none() {
    let (files, old) = Files::new();
    let tls = files.open();
    let server = serving(tls.clone(), ServerOptions::default());
    let mut standing = connect(server.address, &old).unwrap();
    assert_eq!(ask(&mut standing).unwrap().0, 200);
    let new = files.renew();
    assert!(connect(server.address, &new).is_err(), "nobody asked for rereading");
    tls.reload().unwrap();
    assert!(connect(server.address, &old).is_err());
    assert_eq!(ask(&mut connect(server.address, &new).unwrap()).unwrap().0, 200);
    assert_eq!(ask(&mut standing).unwrap().0, 200, "a standing connection is left alone");
    // A new key beside the old certificate, half a file, no file: what was in force stays.
    let broken: [&dyn Fn(); 3] = [
        &|| {
            let certificate = fs::read(files.certificate()).unwrap();
            files.renew();
            fs::write(files.certificate(), certificate).unwrap();
        },
        &|| fs::write(files.certificate(), &fs::read(files.certificate()).unwrap()[..100]).unwrap(),
        &|| fs::remove_file(files.key()).unwrap(),
    ];
    for (number, spoil) in broken.into_iter().enumerate() {
        spoil();
        assert!(tls.reload().is_err(), "{number}");
        assert_eq!(ask(&mut connect(server.address, &new).unwrap()).unwrap().0, 200, "{number}");
    }
}

#[test]
fn a_file_that_cannot_be_used_is_named_with_what_was_expected_and_found() {
    let (files, _) = Files::new();
    let (other, _) = Files::new();
    let certificate = fs::read_to_string(files.certificate()).unwrap();
    let key = fs::read_to_string(files.key()).unwrap();
    let block = |name: &str, inner: &str| format!("-----BEGIN {name}-----\n{inner}\n-----END {name}-----\n");
    let write = |name: &str, text: &str| {
        let path = files.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let good = (files.certificate(), files.key());
    let cases = [
        (
            write("empty", ""),
            good.1.clone(),
            vec!["empty", "expected PEM blocks CERTIFICATE", "no PEM block"],
        ),
        (good.1.clone(), good.1.clone(), vec!["key.pem", "CERTIFICATE", "found PRIVATE KEY"]),
        (files.dir.path().join("gone"), good.1.clone(), vec!["cannot read", "gone", "No such file"]),
        (files.dir.path().to_owned(), good.1.clone(), vec!["cannot read", "directory"]),
        (write("cut", &certificate[..200]), good.1.clone(), vec!["cut", "CERTIFICATE", "found"]),
        (write("no.der", &block("CERTIFICATE", "AAAA")), good.1.clone(), vec!["no.der", "X.509", "found"]),
        (write("long", &"x".repeat(2 << 20)), good.1.clone(), vec!["long", "at most 1 MiB"]),
        (good.0.clone(), good.0.clone(), vec!["cert.pem", "PRIVATE KEY", "found CERTIFICATE"]),
        (
            good.0.clone(),
            write("two", &format!("{key}{key}")),
            vec!["two", "one PEM block", "PRIVATE KEY, PRIVATE KEY"],
        ),
        (
            good.0.clone(),
            write("locked", &block("ENCRYPTED PRIVATE KEY", "AAAA")),
            vec!["locked", "found ENCRYPTED PRIVATE KEY"],
        ),
        (
            good.0.clone(),
            write("no.key", &block("PRIVATE KEY", "AAAA")),
            vec!["no.key", "expected an RSA", "found"],
        ),
        (good.0.clone(), other.key(), vec!["expected the private key of the first certificate", "cert.pem"]),
    ];
    for (certificate, key, named) in cases {
        let error = Tls::open(&certificate, &key).unwrap_err().to_string();
        assert!(named.iter().all(|part| error.contains(part)), "{named:?}: {error}");
    }
    assert!(!format!("{:?}", files.open()).contains("KEY"));
}

#[test]
fn a_handshake_ends_in_time() {
    let (files, trusted) = Files::new();
    let options = ServerOptions { handshake_timeout: SHORT, ..ServerOptions::default() };
    let server = serving(files.open(), options);
    let started = Instant::now();
    // Silence, and a hello that never ends.
    for first in [&b""[..], b"\x16\x03\x01\x02\x00\x01\x00"] {
        let mut slow = TcpStream::connect(server.address).unwrap();
        slow.set_read_timeout(Some(LONG)).unwrap();
        slow.write_all(first).unwrap();
        assert!(matches!(slow.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    assert_eq!(ask(&mut connect(server.address, &trusted).unwrap()).unwrap().0, 200);
}

#[test]
fn handshakes_count_as_connections_and_one_more_is_told_so() {
    let (files, trusted) = Files::new();
    let options = ServerOptions { max_connections: 1, handshake_timeout: LONG, ..ServerOptions::default() };
    let mut server = serving(files.open(), options);
    let silent = TcpStream::connect(server.address).unwrap();
    let refused = || answer(&mut connect(server.address, &trusted)?);
    until("the silent one is counted", || refused().is_ok_and(|(status, _)| status == 503));
    let (_, body) = refused().unwrap();
    assert!(body.contains("Too many connections"), "{body}");
    drop(silent);
    until("a place is free", || {
        connect(server.address, &trusted)
            .and_then(|mut stream| ask(&mut stream))
            .is_ok_and(|(status, _)| status == 200)
    });
    // A stop does not wait for whoever has not even asked.
    let _silent = TcpStream::connect(server.address).unwrap();
    std::thread::sleep(SHORT);
    let started = Instant::now();
    server.begin_stop();
    server.join().unwrap();
    assert!(started.elapsed() < LONG / 4, "{:?}", started.elapsed());
}

#[test]
fn readers_that_stop_are_given_up_over_tls_too() {
    let (files, trusted) = Files::new();
    let options = ServerOptions { write_timeout: SHORT, ..ServerOptions::default() };
    let mut server = serving(files.open(), options);
    let mut stream = connect(server.address, &trusted).unwrap();
    // Tens of megabytes of answers, more than any socket buffer holds.
    let requests = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n".repeat(3_000);
    stream.write_all(&requests).unwrap();
    std::thread::sleep(SHORT * 10);
    let read = (0..3_000).take_while(|_| answer(&mut stream).is_ok()).count();
    assert!(read < 3_000, "every answer was still delivered");
    server.begin_stop();
    server.join().unwrap();
}
