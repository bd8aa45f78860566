//! Owns the scenarios of bad clients: who leave, who are slow, who say nothing, who send nonsense. Others must not notice.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::http::{Client, Connection, Event, Outcome};
use super::load;
use super::tally::{Tally, latencies, ms, quantile, rule};
use super::worker::{Worker, until_idle};

/// Clients that leave.
const LEAVERS: usize = 40;
/// Slow connections, half of them within heads, half within bodies.
const SLOW: usize = 200;
/// How long the slow ones are kept up: longer than a worker waits for a head (15 s) or a body (its deadline).
const SLOW_TIME: Duration = Duration::from_secs(20);
/// Silent connections.
const IDLE: usize = 1000;
const IDLE_TIME: Duration = Duration::from_secs(10);
/// How soon they are connected, one after the other.
const CONNECTED: Duration = Duration::from_secs(1);
/// Slowest answer of a small request beside an attack, in milliseconds, on a machine where both share the cores.
const BESIDE: f64 = 1000.0;
/// How soon nonsense is answered or closed.
const VERDICT: Duration = Duration::from_secs(5);

/// Forty clients send a request, or half of one, and leave.
pub(crate) fn disconnect(worker: &Worker) -> Result<(), String> {
    let requests = load::requests(10, "");
    let before = alone(worker)?;
    let departed = worker.metrics()?.value("omni_kev_departed_total");
    let mut events = Vec::new();
    let connections: Vec<(Connection, Instant)> = (0..LEAVERS)
        .map(|index| {
            let mut connection = Connection::open(worker.address)?;
            let sent = Instant::now();
            let request = &requests[index];
            // Every fourth leaves within its body.
            let end = if index % 4 == 0 { request.len() - 100 } else { request.len() };
            connection.send(&request[..end]);
            Ok((connection, sent))
        })
        .collect::<Result<_, Outcome>>()
        .map_err(|outcome| format!("a client cannot connect: {outcome:?}"))?;
    std::thread::sleep(Duration::from_millis(30));
    for (connection, sent) in connections {
        drop(connection);
        events.push(Event { sent, took: sent.elapsed(), outcome: Outcome::Cancelled });
    }
    let next = Client::new(worker.address).ask(&load::small(""));
    let idle = until_idle(worker, Duration::from_secs(10))?;
    let dropped = worker.metrics()?.value("omni_kev_departed_total") - departed;
    let after = alone(worker)?;
    println!(
        "2 disconnects: {}; {dropped} dropped before they ran; a small request right after took {:.1} ms ({:?}), gauges were 0 \
         {:.0} ms later; small requests alone {before:.1} ms before, {after:.1} ms after",
        Tally::of(&events),
        ms(next.took),
        next.outcome,
        ms(idle),
    );
    rule(next.outcome == Outcome::Answered, || format!("the next request ended as {:?}", next.outcome))?;
    // What runs already cannot be called back: one batch.
    rule(ms(next.took) < BESIDE, || format!("the next request took {:.0} ms", ms(next.took)))?;
    rule(after < 3.0 * before + 20.0, || format!("small requests went from {before:.1} to {after:.1} ms"))
}

/// Median of small requests when nothing else is asked, in milliseconds.
fn alone(worker: &Worker) -> Result<f64, String> {
    let mut client = Client::new(worker.address);
    let events: Vec<Event> = (0..10).map(|_| client.ask(&load::small(""))).collect();
    let tally = Tally::of(&events);
    rule(tally.answered.len() == events.len(), || format!("small requests alone: {tally}"))?;
    Ok(quantile(&tally.answered, 0.5))
}

/// Two hundred connections that send a byte a second.
pub(crate) fn slow(worker: &Worker) -> Result<(), String> {
    let before = alone(worker)?;
    let (ended, events) = load::beside(worker.address, Duration::from_millis(50), || dribble(worker.address));
    let ended = ended?;
    until_idle(worker, Duration::from_secs(10))?;
    let tally = Tally::of(&events);
    println!(
        "3 slow clients: {SLOW} connections, a byte a second for {} s: {} ended by the worker, last after {:.1} s ({} were told \
         408 or 504); beside them {tally}, {} (alone {before:.1} ms)",
        SLOW_TIME.as_secs(),
        ended.count,
        ended.last.as_secs_f64(),
        ended.told,
        latencies(&tally.answered),
    );
    rule(ended.count == SLOW, || format!("{} slow connections are still open", SLOW - ended.count))?;
    undisturbed(&tally)
}

struct Ended {
    count: usize,
    told: usize,
    last: Duration,
}

/// Sends the bytes and sees when the worker has had enough.
fn dribble(address: SocketAddr) -> Result<Ended, String> {
    let head =
        b"POST /v1/systemone HTTP/1.1\r\nhost: chaos\r\nx-filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    let body = b"{\"state\":\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    let whole =
        b"POST /v1/systemone HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n";
    let fail = |error: std::io::Error| format!("a slow client: {error}");
    let mut open = Vec::new();
    for index in 0..SLOW {
        let mut stream = TcpStream::connect(address).map_err(fail)?;
        let bytes: &[u8] = if index % 2 == 0 { head } else { body };
        if index % 2 == 1 {
            stream.write_all(whole).map_err(fail)?;
        }
        stream.set_nonblocking(true).map_err(fail)?;
        open.push((stream, bytes));
    }
    let started = Instant::now();
    let mut ended = Ended { count: 0, told: 0, last: Duration::ZERO };
    for second in 0.. {
        if started.elapsed() > SLOW_TIME || open.is_empty() {
            break;
        }
        open.retain_mut(|(stream, bytes)| {
            let mut answer = [0; 1024];
            let over = match stream.read(&mut answer) {
                Ok(count) => {
                    let text = String::from_utf8_lossy(&answer[..count]);
                    ended.told += usize::from(text.contains(" 408 ") || text.contains(" 504 "));
                    // Told, it is over for a client that understands.
                    true
                }
                Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
            };
            let over = over || stream.write_all(&bytes[second..=second]).is_err();
            if over {
                ended.count += 1;
                ended.last = started.elapsed();
            }
            !over
        });
        std::thread::sleep(Duration::from_secs(1));
    }
    Ok(ended)
}

fn undisturbed(tally: &Tally) -> Result<(), String> {
    rule(tally.answered.len() == tally.sent() && tally.sent() > 0, || {
        format!("not all were answered: {tally}")
    })?;
    let worst = quantile(&tally.answered, 0.99);
    rule(worst < BESIDE, || format!("p99 of small requests was {worst:.0} ms"))
}

/// A thousand connections that say nothing.
pub(crate) fn idle(worker: &Worker) -> Result<(), String> {
    let before = alone(worker)?;
    let memory = worker.rss()?;
    let fail = |error: std::io::Error| format!("an idle client: {error}");
    let (open, events) = load::beside(worker.address, Duration::from_millis(50), || {
        let started = Instant::now();
        let connections: Vec<TcpStream> =
            (0..IDLE).map(|_| TcpStream::connect(worker.address)).collect::<Result<_, _>>().map_err(fail)?;
        let connected = started.elapsed();
        std::thread::sleep(IDLE_TIME);
        let mut open = 0;
        for mut connection in connections {
            connection.set_nonblocking(true).map_err(fail)?;
            let read = connection.read(&mut [0; 1]);
            open += usize::from(read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
        }
        Ok::<_, String>((open, connected))
    });
    let (open, connected) = open?;
    let tally = Tally::of(&events);
    println!(
        "4 idle connections: {IDLE} connected within {:.0} ms, {open} open after {} s; beside them {tally}, {} (alone {before:.1} ms); RSS {memory:.1} to {:.1} MiB",
        ms(connected),
        IDLE_TIME.as_secs(),
        latencies(&tally.answered),
        worker.rss()?,
    );
    // A queue of connections that is too short makes clients of a burst wait for a second each.
    rule(connected < CONNECTED, || format!("{IDLE} connections took {:.0} ms", ms(connected)))?;
    rule(open == IDLE, || "idle connections within their time were closed".to_owned())?;
    undisturbed(&tally)
}

/// What nonsense got.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Status(u16),
    Closed,
    Nothing,
}

/// Bytes that are no request the worker can answer. `limit` is its largest body.
pub(crate) fn nonsense(worker: &Worker, limit: usize) -> Result<(), String> {
    let mut wrong = Vec::new();
    let (mut statuses, mut closed) = (std::collections::BTreeMap::<u16, usize>::new(), 0);
    let cases = cases(limit);
    let count = cases.len();
    for Case { name, bytes, finish, expected } in cases {
        let verdict = send(worker.address, &bytes, finish)?;
        match verdict {
            Verdict::Status(status) => *statuses.entry(status).or_default() += 1,
            Verdict::Closed => closed += 1,
            Verdict::Nothing => {}
        }
        let right = match (expected, &verdict) {
            (Some(expected), Verdict::Status(status)) => *status == expected,
            (Some(_), _) | (None, Verdict::Nothing) => false,
            (None, Verdict::Status(status)) => (400..500).contains(status),
            (None, Verdict::Closed) => true,
        };
        if !right {
            wrong.push(format!("{name}: {verdict:?}"));
        }
    }
    until_idle(worker, Duration::from_secs(10))?;
    let normal = alone(worker)?;
    println!(
        "5 nonsense: {count} cases, answered by status {statuses:?}, {closed} closed without an answer; normal requests after: {normal:.1} ms"
    );
    rule(wrong.is_empty(), || wrong.join("; "))
}

struct Case {
    name: String,
    bytes: Vec<u8>,
    /// Whether the sender ends its side after these bytes.
    finish: bool,
    /// The one right status; without it any 4xx or a close will do.
    expected: Option<u16>,
}

fn cases(limit: usize) -> Vec<Case> {
    let head = |headers: &str| {
        format!(
            "POST /v1/systemone HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n{headers}\r\n"
        )
        .into_bytes()
    };
    let mut cases = Vec::new();
    let mut case = |name: String, bytes: Vec<u8>, finish: bool, expected: Option<u16>| {
        cases.push(Case { name, bytes, finish, expected });
    };
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut byte = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 32) as u8
    };
    for index in 0..50 {
        let bytes: Vec<u8> = (0..16 + 40 * index).map(|_| byte()).collect();
        case(format!("random bytes {index}"), bytes, true, None);
    }
    for index in 0..20 {
        let mut bytes = head("content-length: 300\r\n");
        bytes.extend((0..300).map(|_| byte()));
        case(format!("a random body {index}"), bytes, false, None);
    }
    let request = load::small("");
    for cut in (1..request.len()).step_by(request.len() / 25) {
        case(format!("cut after {cut} bytes"), request[..cut].to_vec(), true, None);
    }
    // The rest of the body never comes, so the answer cannot have waited for it.
    let announced = head(&format!("content-length: {}\r\n", limit + 1));
    case("an oversized body announced".to_owned(), announced, false, Some(413));
    let mut chunked = head("transfer-encoding: chunked\r\n");
    chunked.extend(format!("{:x}\r\n", 4 * limit).into_bytes());
    chunked.extend(vec![b' '; limit + 1]);
    case("an oversized body in chunks".to_owned(), chunked, false, Some(413));
    let mut nested = head("content-length: 200000\r\n");
    nested.extend(vec![b'['; 200_000]);
    case("deep nesting".to_owned(), nested, false, Some(400));
    let mut bad = head("transfer-encoding: chunked\r\n");
    bad.extend(b"zz\r\n");
    case("a bad chunk".to_owned(), bad, false, None);
    case("two lengths".to_owned(), head("content-length: 5\r\ncontent-length: 6\r\n"), false, None);
    case("a huge header".to_owned(), head(&format!("x: {}\r\n", "a".repeat(200_000))), false, None);
    case("a TLS hello".to_owned(), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), true, None);
    case("HTTP/2".to_owned(), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), false, None);
    case("HTTP/0.9".to_owned(), b"GET /\r\n".to_vec(), true, None);
    case("only line ends".to_owned(), b"\r\n".repeat(1000), true, None);
    cases
}

/// Sends bytes and sees what comes.
fn send(address: SocketAddr, bytes: &[u8], finish: bool) -> Result<Verdict, String> {
    let mut connection = Connection::open(address).map_err(|outcome| format!("nonsense: {outcome:?}"))?;
    let timeout = connection.stream.set_read_timeout(Some(VERDICT));
    timeout.map_err(|error| format!("nonsense: {error}"))?;
    connection.send(bytes);
    if finish {
        let _ = connection.stream.shutdown(Shutdown::Write);
    }
    Ok(match connection.receive() {
        Ok(answer) => Verdict::Status(answer.status),
        Err(Outcome::Closed | Outcome::Cut) => Verdict::Closed,
        Err(_) => Verdict::Nothing,
    })
}
