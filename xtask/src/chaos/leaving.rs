//! Owns the scenario of a worker that is told to stop under load: nobody loses a request that it had accepted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::http::{Client, Event, Outcome, get};
use super::load;
use super::tally::{Tally, latencies, ms, rule};
use super::worker::Worker;

/// Clients with a request in flight each.
const CLIENTS: usize = 8;
/// When the balancer's clients stop after `/ready` has said no: two checks, one a second.
const NOTICE: Duration = Duration::from_secs(2);
/// How soon `/ready` says no.
const AT_ONCE: Duration = Duration::from_millis(200);

/// Half of the clients leave as a balancer would, the others go on until the worker is gone.
pub(crate) fn run(mut worker: Worker, delay: Duration, timeout: Duration) -> Result<(), String> {
    let requests = load::requests(10, "");
    let address = worker.address;
    let (balanced, stubborn) = (AtomicBool::new(false), AtomicBool::new(false));
    let forever = Duration::from_secs(600);
    let mut noticed = None;
    let mut status = None;
    let mut told = Instant::now();
    let (left, stayed) = std::thread::scope(|scope| {
        let left = scope.spawn(|| load::closed(address, &requests, CLIENTS / 2, forever, &balanced));
        let stayed = scope.spawn(|| load::closed(address, &requests, CLIENTS / 2, forever, &stubborn));
        std::thread::sleep(Duration::from_secs(2));
        told = Instant::now();
        let signalled = worker.signal("TERM");
        while signalled.is_ok() && noticed.is_none() && told.elapsed() < delay {
            if Client::new(address).exchange(&get("/ready")).is_ok_and(|answer| answer.status == 503) {
                noticed = Some(told.elapsed());
            }
        }
        std::thread::sleep(NOTICE);
        balanced.store(true, Ordering::Relaxed);
        status = signalled.and_then(|()| worker.ended(delay + timeout)).ok();
        stubborn.store(true, Ordering::Relaxed);
        (left.join().unwrap_or_default(), stayed.join().unwrap_or_default())
    });
    let ended = told.elapsed();
    let closing = told + delay;
    let early: Vec<_> = stayed.iter().filter(|event| event.sent < closing).cloned().collect();
    let late: Vec<_> = stayed.iter().filter(|event| event.sent >= closing).cloned().collect();
    let accepted = left.iter().chain(&early).filter(|event| event.sent >= told).count();
    let (left, late) = (Tally::of(&left), Tally::of(&late));
    let early_tally = Tally::of(&early);
    println!(
        "6 SIGTERM: /ready said 503 after {:.0} ms, {accepted} requests sent in the drain delay; clients of a balancer: {left}; others, \
         before the door closed: {early_tally}, after: {late}; answers {}; ended after {:.1} s with {status:?}",
        noticed.map_or(f64::NAN, ms),
        latencies(&left.answered),
        ended.as_secs_f64(),
    );
    rule(noticed.is_some_and(|time| time < AT_ONCE), || "/ready did not say 503 at once".to_owned())?;
    rule(left.answered.len() == left.sent(), || format!("clients of a balancer: {left}"))?;
    // One that was on its way when the door closed may find it closed: nothing of it was read.
    let margin = Duration::from_millis(100);
    let excused = |event: &Event| event.outcome == Outcome::Closed && event.sent + margin >= closing;
    let broken = early.iter().filter(|event| event.outcome != Outcome::Answered && !excused(event));
    rule(broken.count() == 0, || format!("requests sent in the drain delay: {early_tally}"))?;
    rule(!late.failed.keys().any(|name| name == "cut answer"), || format!("after it: {late}"))?;
    rule(accepted > 0, || "nothing was sent in the drain delay".to_owned())?;
    rule(status.is_some_and(|status| status.code() == Some(0)), || format!("it ended with {status:?}"))
}
