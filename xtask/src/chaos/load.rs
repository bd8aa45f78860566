//! Owns load: clients that each wait for their answer, arrivals that wait for nobody, and light traffic beside an attack.
//! Bodies are made beforehand and connections are kept, so that the model is what is busy.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::http::{Client, Event, Outcome, post};

/// Different requests of a load: more than a worker keeps states of, so that none is answered from its cache.
const VARIANTS: usize = 64;
/// Pause after a refusal or a failure, so that a full worker and a dead address are not hammered.
const PAUSE: Duration = Duration::from_millis(20);

/// Requests of about this many sentences and four questions each; `headers` are whole lines, with `{}` for a number.
pub(crate) fn requests(sentences: usize, headers: &str) -> Vec<Vec<u8>> {
    (0..VARIANTS)
        .map(|variant| {
            let state: String = (0..sentences)
                .map(|index| {
                    format!("Clause {index} of contract {variant}: goods are delivered within thirty days. ")
                })
                .collect();
            let questions: serde_json::Map<String, serde_json::Value> = (0..4)
                .map(|index| {
                    let question =
                        serde_json::json!({ "type": "noul", "instructions": format!("Is clause {index} met?") });
                    (format!("q{index}"), question)
                })
                .collect();
            let body = serde_json::json!({ "state": state, "questions": questions }).to_string();
            post(&body, &headers.replace("{}", &variant.to_string()))
        })
        .collect()
}

/// A request that costs little.
pub(crate) fn small(headers: &str) -> Vec<u8> {
    post(&small_body(), headers)
}

/// Its body.
pub(crate) fn small_body() -> String {
    serde_json::json!({
        "state": "The parcel came late.",
        "questions": { "late": { "type": "noul", "instructions": "Is it late?" } },
    })
    .to_string()
}

/// Clients with one request in flight each, until `stop` or the end of `time`.
pub(crate) fn closed(
    address: SocketAddr,
    requests: &[Vec<u8>],
    clients: usize,
    time: Duration,
    stop: &AtomicBool,
) -> Vec<Event> {
    let started = Instant::now();
    let next = AtomicUsize::new(0);
    let events = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                let mut client = Client::new(address);
                let mut mine = Vec::new();
                while started.elapsed() < time && !stop.load(Ordering::Relaxed) {
                    let event = client.ask(&requests[next.fetch_add(1, Ordering::Relaxed) % requests.len()]);
                    if event.outcome != Outcome::Answered {
                        std::thread::sleep(PAUSE);
                    }
                    mine.push(event);
                }
                collect(&events, mine);
            });
        }
    });
    events.into_inner().unwrap_or_default()
}

fn collect(all: &Mutex<Vec<Event>>, mine: Vec<Event>) {
    if let Ok(mut all) = all.lock() {
        all.extend(mine);
    }
}

/// What an open loop did.
pub(crate) struct Opened {
    pub(crate) events: Vec<Event>,
    /// How much later than planned each request was sent, in milliseconds: the generator's own fault.
    pub(crate) late: Vec<f64>,
}

/// So many requests a second, whether answers come or not. There must be more connections than requests can be inside, or the
/// load turns into a closed loop: `late` shows it.
pub(crate) fn open(
    address: SocketAddr,
    requests: &[Vec<u8>],
    connections: usize,
    rate: f64,
    time: Duration,
) -> Opened {
    let started = Instant::now() + Duration::from_millis(100);
    let total = (rate * time.as_secs_f64()) as usize;
    let next = AtomicUsize::new(0);
    let (events, late) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..connections {
            scope.spawn(|| {
                let mut client = Client::new(address);
                let mut mine = Vec::new();
                let mut delays = Vec::new();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= total {
                        break;
                    }
                    let due = started + Duration::from_secs_f64(index as f64 / rate);
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    let event = client.ask(&requests[index % requests.len()]);
                    delays.push(1e3 * event.sent.saturating_duration_since(due).as_secs_f64());
                    mine.push(event);
                }
                collect(&events, mine);
                if let Ok(mut late) = late.lock() {
                    late.extend(delays);
                }
            });
        }
    });
    Opened { events: events.into_inner().unwrap_or_default(), late: late.into_inner().unwrap_or_default() }
}

/// A small request every `pause` on two connections while `attack` goes on.
pub(crate) fn beside<T>(address: SocketAddr, pause: Duration, attack: impl FnOnce() -> T) -> (T, Vec<Event>) {
    let stop = AtomicBool::new(false);
    let request = small("");
    std::thread::scope(|scope| {
        let traffic: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = Client::new(address);
                    let mut mine = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        mine.push(client.ask(&request));
                        std::thread::sleep(pause);
                    }
                    mine
                })
            })
            .collect();
        let result = attack();
        stop.store(true, Ordering::Relaxed);
        let events = traffic.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect();
        (result, events)
    })
}
