//! Owns a client on a plain socket: one request after the other on one connection, and how each of them ended. It knows no
//! more of HTTP than the worker and its proxy send.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long an answer may take before it counts as lost: more than any deadline of a worker here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// 200.
    Answered,
    /// 503.
    Refused,
    /// Any other status.
    Status(u16),
    /// The connection could not be made.
    Unreachable(String),
    /// The connection ended within an answer.
    Cut,
    /// The client left on purpose.
    Cancelled,
    /// The connection ended before a byte of the answer.
    Closed,
    /// Nothing came within [`PATIENCE`].
    Silent,
}

/// A request that was sent and what became of it.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// When its first byte was written.
    pub(crate) sent: Instant,
    /// From then to its end.
    pub(crate) took: Duration,
    /// Its end.
    pub(crate) outcome: Outcome,
}

/// An answer.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// Whether the sender will use this connection no more.
    fn closes(&self) -> bool {
        self.head.contains("connection: close")
    }
}

/// A connection and what has been read of it beyond the last answer.
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    unread: Vec<u8>,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// [`Outcome::Unreachable`].
    pub(crate) fn open(address: SocketAddr) -> Result<Self, Outcome> {
        let fail = |error: std::io::Error| Outcome::Unreachable(error.kind().to_string());
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).map_err(fail)?;
        stream.set_nodelay(true).map_err(fail)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(fail)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(fail)?;
        Ok(Self { stream, unread: Vec::new() })
    }

    /// Sends a whole request. A receiver may answer and close before it has read everything, so an error here says nothing.
    pub(crate) fn send(&mut self, request: &[u8]) {
        let _ = self.stream.write_all(request);
    }

    /// Reads an answer.
    ///
    /// # Errors
    /// How the connection ended instead.
    pub(crate) fn receive(&mut self) -> Result<Answer, Outcome> {
        let end = loop {
            if let Some(end) = find(&self.unread, b"\r\n\r\n") {
                break end + 4;
            }
            if !self.more()? {
                return Err(if self.unread.is_empty() { Outcome::Closed } else { Outcome::Cut });
            }
        };
        let head = String::from_utf8_lossy(&self.unread[..end]).to_ascii_lowercase();
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or(Outcome::Cut)?;
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"))
            .and_then(|length| length.trim().parse::<usize>().ok());
        match length {
            Some(length) => {
                while self.unread.len() < end + length {
                    if !self.more()? {
                        return Err(Outcome::Cut);
                    }
                }
            }
            None => while self.more()? {},
        }
        let rest = self.unread.split_off(length.map_or(self.unread.len(), |length| end + length));
        let body = self.unread.split_off(end);
        self.unread = rest;
        Ok(Answer { status, head, body })
    }

    /// Reads what has come; false at the end.
    fn more(&mut self) -> Result<bool, Outcome> {
        let mut chunk = [0; 16 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => Ok(false),
            Ok(count) => {
                self.unread.extend_from_slice(&chunk[..count]);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Err(Outcome::Silent)
            }
            Err(_) => Ok(false),
        }
    }
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// A client that keeps its connection as long as the other side does.
pub(crate) struct Client {
    address: SocketAddr,
    connection: Option<Connection>,
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, connection: None }
    }

    /// Sends a request and waits for its end.
    pub(crate) fn ask(&mut self, request: &[u8]) -> Event {
        let sent = Instant::now();
        let outcome = match self.exchange(request) {
            Ok(Answer { status: 200, .. }) => Outcome::Answered,
            Ok(Answer { status: 503, .. }) => Outcome::Refused,
            Ok(Answer { status, .. }) => Outcome::Status(status),
            Err(outcome) => outcome,
        };
        Event { sent, took: sent.elapsed(), outcome }
    }

    /// Sends a request and returns its answer.
    ///
    /// # Errors
    /// How it ended without one.
    pub(crate) fn exchange(&mut self, request: &[u8]) -> Result<Answer, Outcome> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => Connection::open(self.address)?,
        };
        connection.send(request);
        let answer = connection.receive()?;
        if !answer.closes() {
            self.connection = Some(connection);
        }
        Ok(answer)
    }
}

/// A GET request.
pub(crate) fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: chaos\r\n\r\n").into_bytes()
}

/// A request to the model, head and body in one piece; `headers` are whole lines.
pub(crate) fn post(body: &str, headers: &str) -> Vec<u8> {
    format!(
        "POST /v1/systemone HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n{headers}content-length: \
         {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What a client makes of what a server writes before it closes.
    fn ends(written: &'static [u8]) -> Outcome {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 1024]);
            stream.write_all(written).unwrap();
        });
        let event = Client::new(address).ask(&get("/"));
        server.join().unwrap();
        event.outcome
    }

    #[test]
    fn every_end_has_its_name() {
        assert_eq!(ends(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"), Outcome::Answered);
        assert_eq!(ends(b"HTTP/1.1 200 OK\r\n\r\nuntil the end"), Outcome::Answered);
        assert_eq!(ends(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"), Outcome::Refused);
        assert_eq!(ends(b"HTTP/1.1 413 No\r\ncontent-length: 0\r\n\r\n"), Outcome::Status(413));
        assert_eq!(ends(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok"), Outcome::Cut);
        assert_eq!(ends(b"HTTP/1.1 200"), Outcome::Cut);
        assert_eq!(ends(b""), Outcome::Closed);
    }
}
