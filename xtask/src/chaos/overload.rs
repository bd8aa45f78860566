//! Owns the first scenario: twice as much as the worker can do. It must go on doing what it can and refuse the rest at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::http::Event;
use super::load;
use super::tally::{Tally, latencies, ms, quantile, rule};
use super::worker::Worker;

/// Clients that find the capacity: enough to keep a batch waiting, fewer than may be inside.
const CLIENTS: usize = 8;
/// How long they look.
const LOOK: Duration = Duration::from_secs(10);
/// Connections of the open loop: more than may be inside.
const CONNECTIONS: usize = 64;
/// Share of the capacity that must be left under overload.
const KEPT: f64 = 0.95;
/// Slowest refusal, in milliseconds.
const REFUSAL: f64 = 50.0;
/// Largest growth of resident memory after the closed loop has warmed it up.
const GROWTH: f64 = 1.25;

/// Runs it for `time` on a worker with this deadline.
pub(crate) fn run(worker: &Worker, time: Duration, deadline: Duration) -> Result<(), String> {
    let requests = load::requests(10, "");
    capacity(worker, &requests)?;
    let before = capacity(worker, &requests)?;
    let warm = worker.rss()?;
    let counted = worker.metrics()?;
    let (opened, memory) =
        watched(worker, || load::open(worker.address, &requests, CONNECTIONS, 2.0 * before, time))?;
    let metrics = worker.metrics()?;
    let last = worker.rss()?;
    let after = capacity(worker, &requests)?;
    let capacity = f64::midpoint(before, after);
    let tally = Tally::of(&opened.events);
    let rate = tally.answered.len() as f64 / span(&opened.events);
    let counted = [200, 503].map(|status| metrics.responses(status) - counted.responses(status));
    println!(
        "1 overload: capacity {before:.1}/s before, {after:.1}/s after; {:.1}/s sent for {:.0} s (sent late p99 {:.1} ms); \
         {tally}; answered {rate:.1}/s = {:.1} % of capacity; answers {}; refusals {}; the worker counted {} and {}; RSS {warm:.1} MiB, \
         at the end {last:.1}, at most {memory:.1}",
        2.0 * before,
        time.as_secs_f64(),
        quantile(&opened.late, 0.99),
        100.0 * rate / capacity,
        latencies(&tally.answered),
        latencies(&tally.refused),
        counted[0],
        counted[1],
    );
    rule(!tally.refused.is_empty(), || "twice the capacity was never refused".to_owned())?;
    rule(rate >= KEPT * capacity, || format!("answered {rate:.1}/s, less than {KEPT} of {capacity:.1}/s"))?;
    rule(quantile(&tally.refused, 1.0) < REFUSAL, || format!("a refusal took {REFUSAL} ms or more"))?;
    rule(quantile(&tally.answered, 1.0) <= ms(deadline), || "an answer came after the deadline".to_owned())?;
    rule(tally.failures() + tally.lost == 0, || format!("failed or lost: {tally}"))?;
    rule(counted == [tally.answered.len() as f64, tally.refused.len() as f64], || {
        "client and worker count differently".to_owned()
    })?;
    rule(memory <= GROWTH * warm, || format!("resident memory grew from {warm:.1} to {memory:.1} MiB"))
}

/// Answers a second of clients that wait for their answers.
fn capacity(worker: &Worker, requests: &[Vec<u8>]) -> Result<f64, String> {
    let events = load::closed(worker.address, requests, CLIENTS, LOOK, &AtomicBool::new(false));
    let tally = Tally::of(&events);
    rule(tally.answered.len() == tally.sent() && tally.sent() > 0, || {
        format!("{CLIENTS} clients were not all answered: {tally}")
    })?;
    Ok(tally.answered.len() as f64 / span(&events))
}

/// Seconds from the first request sent to the last end.
fn span(events: &[Event]) -> f64 {
    let first = events.iter().map(|event| event.sent).min();
    let last = events.iter().map(|event| event.sent + event.took).max();
    first.zip(last).map_or(f64::INFINITY, |(first, last)| (last - first).as_secs_f64())
}

/// Does something while the worker's memory is watched; returns the largest seen, in MiB.
fn watched<T>(worker: &Worker, work: impl FnOnce() -> T) -> Result<(T, f64), String> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0.0f64;
            while !done.load(Ordering::Relaxed) {
                most = most.max(worker.rss()?);
                std::thread::sleep(Duration::from_millis(200));
            }
            Ok(most)
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        let most = watch.join().map_err(|_| "the watch ended early".to_owned())?;
        most.map(|most| (result, most))
    })
}
