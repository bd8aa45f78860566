//! Owns `GET /metrics`: counters in Prometheus' text format. Knows no request's content.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;

use crate::observe::Stages;
use crate::ready;
use crate::service::App;
use crate::wire;

/// Upper ends of the time buckets, in seconds.
const BUCKETS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
const STAGES: [&str; 4] = ["queue", "prepare", "model", "finish"];

/// What the server counts itself.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Responses by route and status. Routes are those of the table, so their number is bounded.
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Refusals by reason. Reasons are those of the table of errors.
    refusals: Mutex<BTreeMap<&'static str, u64>>,
    stages: [Histogram; STAGES.len()],
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS.len()],
    count: AtomicU64,
    microseconds: AtomicU64,
}

impl Histogram {
    fn observe(&self, time: Duration) {
        for (bucket, end) in self.buckets.iter().zip(BUCKETS) {
            if time.as_secs_f64() <= end {
                bucket.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.microseconds.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Counts a refusal.
    pub(crate) fn refused(&self, reason: &'static str) {
        *self.refusals.lock().unwrap_or_else(PoisonError::into_inner).entry(reason).or_default() += 1;
    }

    /// Counts a response, and its stages if the model answered it.
    pub(crate) fn count(&self, route: &'static str, status: StatusCode, stages: Option<Stages>) {
        let mut responses = self.responses.lock().unwrap_or_else(PoisonError::into_inner);
        *responses.entry((route, status.as_u16())).or_default() += 1;
        drop(responses);
        if let Some(Stages { queue, prepare, model, finish }) = stages {
            for (histogram, time) in self.stages.iter().zip([queue, prepare, model, finish]) {
                histogram.observe(time);
            }
        }
    }
}

/// One metric with its help, its type and its samples.
fn family(out: &mut String, name: &str, kind: &str, help: &str, samples: &[(String, f64)]) {
    let _ = writeln!(out, "# HELP omni_kev_{name} {help}\n# TYPE omni_kev_{name} {kind}");
    for (labels, value) in samples {
        let _ = writeln!(out, "omni_kev_{name}{labels} {value}");
    }
}

fn plain(value: f64) -> [(String, f64); 1] {
    [(String::new(), value)]
}

/// Answer of `GET /metrics`.
pub(crate) fn respond(app: &App) -> Response {
    let mut response = wire::json(StatusCode::OK, text(app));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn text(app: &App) -> String {
    let mut out = String::new();
    let build = vec![(format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0)];
    family(&mut out, "build_info", "gauge", "Version of the program.", &build);
    let stats = app.service.scheduler.stats();
    family(
        &mut out,
        "devices",
        "gauge",
        "Devices that the worker started with.",
        &plain(stats.devices as f64),
    );
    let working = plain(stats.working_devices as f64);
    family(&mut out, "working_devices", "gauge", "Devices that have not failed.", &working);
    let qualified = [(format!("{{state=\"{}\"}}", app.service.qualification), 1.0)];
    family(&mut out, "qualification", "gauge", "Whether this configuration was qualified.", &qualified);
    let ready = ready::reason(app).is_none();
    family(&mut out, "ready", "gauge", "Whether requests should come.", &plain(f64::from(u8::from(ready))));

    let responses = app.metrics.responses.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let samples: Vec<(String, f64)> = responses
        .iter()
        .map(|((route, status), count)| (format!("{{route=\"{route}\",status=\"{status}\"}}"), *count as f64))
        .collect();
    family(&mut out, "responses_total", "counter", "Responses by route and status.", &samples);
    let refusals = app.metrics.refusals.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let samples: Vec<(String, f64)> =
        refusals.iter().map(|(reason, count)| (format!("{{reason=\"{reason}\"}}"), *count as f64)).collect();
    family(&mut out, "refusals_total", "counter", "Responses that are errors, by reason.", &samples);

    let gauges = [
        (
            "admitted_requests",
            "Requests inside: preparing, waiting, running or being answered.",
            stats.admitted_requests,
        ),
        ("admitted_tokens", "Tokens reserved by them.", stats.admitted_tokens),
        ("waiting_requests", "Requests that wait for the device.", stats.waiting_requests),
        ("waiting_tokens", "Tokens of the requests that wait.", stats.waiting_tokens),
        ("running_requests", "Requests that devices run now.", stats.running_requests),
    ];
    for (name, help, value) in gauges {
        family(&mut out, name, "gauge", help, &plain(value as f64));
    }
    let counters = [
        ("batches_total", "Batches run to their end.", stats.batches as f64),
        ("batched_requests_total", "Requests in those batches.", stats.batched_requests as f64),
        ("batched_tokens_total", "Tokens in those batches.", stats.batched_tokens as f64),
        (
            "waited_seconds_total",
            "Time that the requests of those batches waited.",
            stats.waited.as_secs_f64(),
        ),
        (
            "computed_seconds_total",
            "Time that the device took for those batches.",
            stats.computed.as_secs_f64(),
        ),
        ("departed_total", "Requests dropped because their caller left.", stats.departed as f64),
        ("expired_total", "Requests dropped because their deadline passed.", stats.expired as f64),
    ];
    for (name, help, value) in counters {
        family(&mut out, name, "counter", help, &plain(value));
    }
    if let Some(cache) = &app.service.cache {
        let cache = cache.read();
        let all = [
            (
                "prefix_cache_hits_total",
                "counter",
                "States that were kept from an earlier batch.",
                cache.hits,
            ),
            ("prefix_cache_misses_total", "counter", "States that were computed.", cache.misses),
            ("prefix_cache_evictions_total", "counter", "States given up for others.", cache.evictions),
            ("prefix_cache_states", "gauge", "States kept now.", cache.states),
            ("prefix_cache_bytes", "gauge", "Bytes of the states kept now.", cache.bytes),
        ];
        for (name, kind, help, counter) in all {
            family(&mut out, name, kind, help, &plain(counter as f64));
        }
    }
    let mut samples = Vec::new();
    let _ = writeln!(
        out,
        "# HELP omni_kev_stage_seconds Time of answered requests by stage.\n# TYPE omni_kev_stage_seconds histogram"
    );
    for (stage, histogram) in STAGES.iter().zip(&app.metrics.stages) {
        for (bucket, end) in histogram.buckets.iter().zip(BUCKETS) {
            samples.push((
                format!("_bucket{{stage=\"{stage}\",le=\"{end}\"}}"),
                bucket.load(Ordering::Relaxed) as f64,
            ));
        }
        let count = histogram.count.load(Ordering::Relaxed) as f64;
        samples.push((format!("_bucket{{stage=\"{stage}\",le=\"+Inf\"}}"), count));
        samples.push((format!("_count{{stage=\"{stage}\"}}"), count));
        let sum = histogram.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        samples.push((format!("_sum{{stage=\"{stage}\"}}"), sum));
    }
    for (labels, value) in samples {
        let _ = writeln!(out, "omni_kev_stage_seconds{labels} {value}");
    }
    out
}
