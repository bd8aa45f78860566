//! Owns the scenarios behind the deployed proxy: a worker killed, a worker restarted, and public clients through it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::http::{Client, Event, Outcome, post};
use super::load;
use super::tally::{Tally, latencies, ms, rule};
use super::worker::Worker;
use crate::certificate;
use crate::conformance;
use crate::deploy::container::free_port;
use crate::deploy::haproxy::{self, Proxy};

const KEY: &str = "chaos-key";
/// Clients with a request in flight each.
const CLIENTS: usize = 8;
/// Clients that keep a worker full: more than may be inside.
const FILLERS: usize = 20;
/// How long the load goes on before and after a misfortune.
const PART: Duration = Duration::from_secs(5);
/// How long a worker that came back may wait for its first request: two checks, one a second, and a margin.
const BACK: Duration = Duration::from_secs(8);
/// How long a worker may take to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two workers and what is in front of them.
struct Site<'a> {
    binary: &'a Path,
    export: &'a Path,
    arguments: Vec<String>,
    workers: [Worker; 2],
    proxy: SocketAddr,
    /// The same over TLS, and the certificate that clients must trust.
    secure: SocketAddr,
    certificate: PathBuf,
    /// Headers of every request: the key, and a session for each number.
    headers: String,
    requests: Vec<Vec<u8>>,
    _running: Proxy,
}

/// Runs all of them.
pub(crate) fn run(root: &Path, binary: &Path, export: &Path, folder: &Path) -> Result<(), String> {
    let mut site = Site::start(root, binary, export, folder)?;
    let mut broken = Vec::new();
    for result in [
        site.killed(),
        site.restarted(),
        site.full(),
        site.sticky(),
        site.identified(),
        conformance::through(root, &format!("http://{}", site.proxy), KEY, None),
        conformance::through(root, &format!("https://{}", site.secure), KEY, Some(&site.certificate)),
    ] {
        broken.extend(result.err());
    }
    rule(broken.is_empty(), || broken.join("; "))
}

impl<'a> Site<'a> {
    fn start(root: &Path, binary: &'a Path, export: &'a Path, folder: &Path) -> Result<Self, String> {
        let keys: PathBuf = folder.join("api-keys");
        std::fs::write(&keys, format!("{KEY}\n")).map_err(|error| format!("{}: {error}", keys.display()))?;
        let mut arguments = super::settings("16");
        arguments.push("--strict-models".to_owned());
        arguments.extend(["--api-key-file".to_owned(), keys.display().to_string()]);
        let worker = || Worker::start(binary, export, 0, &arguments);
        let workers = [worker()?, worker()?];
        let proxy = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let made = certificate::make(folder)?;
        let secure = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let addresses = [workers[0].address, workers[1].address];
        let text = haproxy::local(root, proxy, Some((secure, &made.both)), addresses)?;
        let config = folder.join("haproxy.cfg");
        std::fs::write(&config, text).map_err(|error| format!("{}: {error}", config.display()))?;
        let program = haproxy::find(root)?;
        haproxy::check(&program, &config)?;
        let running = Proxy::start(&program, &config, proxy)?;
        let headers = format!("authorization: Bearer {KEY}\r\nx-session-id: session-{{}}\r\n");
        let requests = load::requests(6, &headers);
        let certificate = made.certificate;
        Ok(Self {
            binary,
            export,
            arguments,
            workers,
            proxy,
            secure,
            certificate,
            headers,
            requests,
            _running: running,
        })
    }

    /// Load through the proxy while something is done; what was done returns when it began to hurt.
    fn under_load(
        &mut self,
        misfortune: impl FnOnce(&mut Self) -> Result<Instant, String>,
    ) -> Result<(Vec<Event>, Instant), String> {
        let stop = AtomicBool::new(false);
        let (proxy, requests) = (self.proxy, self.requests.clone());
        std::thread::scope(|scope| {
            let load =
                scope.spawn(|| load::closed(proxy, &requests, CLIENTS, Duration::from_secs(600), &stop));
            std::thread::sleep(PART);
            let done = misfortune(self);
            std::thread::sleep(PART);
            stop.store(true, Ordering::Relaxed);
            Ok((load.join().unwrap_or_default(), done?))
        })
    }

    /// Starts the second worker again on its port and waits until the proxy sends it requests; returns how long that took.
    fn back(&mut self) -> Result<Duration, String> {
        let port = self.workers[1].address.port();
        self.workers[1] = Worker::start(self.binary, self.export, port, &self.arguments)?;
        let started = Instant::now();
        while self.workers[1].metrics()?.responses(200) == 0.0 {
            if started.elapsed() > BACK {
                return Err("the worker that came back got no request".to_owned());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(started.elapsed())
    }

    /// `kill -9` under load.
    fn killed(&mut self) -> Result<(), String> {
        let mut inside = 0.0;
        let mut returned = Duration::ZERO;
        let (events, killed) = self.under_load(|site| {
            inside = site.workers[1].metrics()?.value("omni_kev_admitted_requests");
            let killed = Instant::now();
            site.workers[1].signal("KILL")?;
            site.workers[1].ended(PATIENCE)?;
            std::thread::sleep(PART);
            returned = site.back()?;
            Ok(killed)
        })?;
        let tally = Tally::of(&events);
        let bad = |event: &&Event| event.outcome != Outcome::Answered;
        let flying = |event: &Event| event.sent <= killed && event.sent + event.took >= killed;
        let in_flight = events.iter().filter(|event| flying(event));
        let hit = in_flight.clone().filter(bad).count();
        let others = events.iter().filter(|event| !flying(event)).filter(bad).count();
        let slowest = in_flight.map(|event| ms(event.took)).fold(0.0, f64::max);
        println!(
            "7 kill -9 of one of two workers: {tally}; {inside} inside the worker that died: {hit} of the requests in flight failed, \
             the slowest of them took {slowest:.0} ms, {others} others failed; answers {}; the new worker got requests after {:.1} s",
            latencies(&tally.answered),
            returned.as_secs_f64(),
        );
        rule(inside > 0.0, || "nothing was inside the worker that was killed".to_owned())?;
        rule(others == 0, || format!("{others} requests failed that were not on the dead worker: {tally}"))?;
        rule(hit as f64 <= inside, || format!("{hit} requests in flight failed, {inside} were inside"))?;
        rule(tally.lost == 0, || format!("{} requests ended without a word", tally.lost))
    }

    /// SIGTERM and a start again under load: what an update does.
    fn restarted(&mut self) -> Result<(), String> {
        let mut code = None;
        let mut returned = Duration::ZERO;
        let (events, _) = self.under_load(|site| {
            let told = Instant::now();
            site.workers[1].signal("TERM")?;
            code = site.workers[1].ended(PATIENCE)?.code();
            returned = site.back()?;
            Ok(told)
        })?;
        let tally = Tally::of(&events);
        println!(
            "7 restart of one of two workers: {tally}; answers {}; exit code {code:?}; the new worker got requests after {:.1} s",
            latencies(&tally.answered),
            returned.as_secs_f64(),
        );
        rule(tally.answered.len() == tally.sent(), || format!("not all were answered: {tally}"))?;
        rule(code == Some(0), || format!("the worker ended with {code:?}"))
    }

    /// One worker is kept full by others: its refusals are tried on the other worker.
    fn full(&mut self) -> Result<(), String> {
        let stop = AtomicBool::new(false);
        let (near, full, proxy) = (self.workers[1].address, &self.requests, self.proxy);
        let refused = self.workers[1].metrics()?.responses(503);
        let (events, beside) = std::thread::scope(|scope| {
            let fill = scope.spawn(|| load::closed(near, full, FILLERS, 2 * PART, &stop));
            std::thread::sleep(PART / 5);
            let events = load::closed(proxy, full, CLIENTS / 2, PART, &AtomicBool::new(false));
            stop.store(true, Ordering::Relaxed);
            (events, fill.join().unwrap_or_default())
        });
        let (tally, beside) = (Tally::of(&events), Tally::of(&beside));
        let tried = self.workers[1].metrics()?.responses(503) - refused - beside.refused.len() as f64;
        println!(
            "7 one of two workers full: {tally}, answers {}; {tried} of its refusals were tried again on the other; those who filled it: {beside}",
            latencies(&tally.answered),
        );
        rule(tried > 0.0, || "the full worker refused nothing of the proxy's".to_owned())?;
        rule(tally.answered.len() == tally.sent(), || format!("with one worker full: {tally}"))
    }

    /// One session stays on one worker; many are on both, and so are requests without one.
    fn sticky(&mut self) -> Result<(), String> {
        let counts = |site: &Self| -> Result<[f64; 2], String> {
            Ok([site.workers[0].metrics()?.responses(200), site.workers[1].metrics()?.responses(200)])
        };
        let mut spread = BTreeMap::new();
        let key = format!("authorization: Bearer {KEY}\r\n");
        let session = |number: usize| load::small(&self.headers.replace("{}", &number.to_string()));
        let kinds: [(&str, Vec<Vec<u8>>); 3] = [
            ("one session", vec![session(1); 20]),
            ("many sessions", (0..20).map(session).collect()),
            ("no session", vec![load::small(&key); 20]),
        ];
        for (name, requests) in kinds {
            let before = counts(self)?;
            let mut client = Client::new(self.proxy);
            let events: Vec<Event> = requests.iter().map(|request| client.ask(request)).collect();
            let tally = Tally::of(&events);
            rule(tally.answered.len() == requests.len(), || format!("{name}: {tally}"))?;
            let after = counts(self)?;
            spread.insert(name, [after[0] - before[0], after[1] - before[1]]);
        }
        println!("7 sessions: requests on each worker {spread:?}");
        let both = |name: &str| spread[name].iter().all(|count| *count > 0.0);
        rule(!both("one session"), || "one session was on both workers".to_owned())?;
        rule(both("many sessions") && both("no session"), || "one worker got everything".to_owned())
    }

    /// The id of a request passes through, and so do the worker's refusals.
    fn identified(&mut self) -> Result<(), String> {
        let headers = format!("authorization: Bearer {KEY}\r\nx-typesafe-request-id: chaos-id-1\r\n");
        let mut client = Client::new(self.proxy);
        let answer = client.exchange(&load::small(&headers)).map_err(|outcome| format!("{outcome:?}"))?;
        rule(answer.head.contains("x-typesafe-request-id: chaos-id-1"), || "the id was lost".to_owned())?;
        let answer = client.exchange(&load::small("")).map_err(|outcome| format!("{outcome:?}"))?;
        rule(answer.status == 401, || format!("without a key: {}", answer.status))?;
        let large = post(&" ".repeat(super::BODY + 1), &headers);
        let answer = client.exchange(&large).map_err(|outcome| format!("a large body: {outcome:?}"))?;
        rule(answer.status == 413, || format!("a large body: {}", answer.status))?;
        // More than the proxy's buffer holds: passed on, though not retried.
        let padded = format!("{}{}", load::small_body(), " ".repeat(700 << 10));
        let answer = client.exchange(&post(&padded, &headers)).map_err(|outcome| format!("{outcome:?}"))?;
        rule(answer.status == 200, || format!("a body larger than the proxy's buffer: {}", answer.status))?;
        println!(
            "7 headers and bodies: request ids pass, no key is 401, a body over the worker's limit is 413, one over the proxy's buffer is \
             answered"
        );
        Ok(())
    }
}
