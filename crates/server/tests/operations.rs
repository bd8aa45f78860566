//! What an operator sets: deadlines that requests may change, keys that change while serving, web pages, and what becomes of
//! a server whose model fails.

#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests.

mod support;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use scheduler::SchedulerOptions;
use serde_json::json;
use server::{ApiKey, ApiKeys, Cors, ServeError, ServerOptions};
use support::{Client, Response, Server, Setup, noul, one, until};
use testkit::fake::Fault;

const TYPE: (&str, &str) = ("content-type", "application/json");
const SHORT: Duration = Duration::from_millis(200);
const ORIGIN: (&str, &str) = ("origin", "https://app.example");

fn with(server: ServerOptions) -> Server {
    Server::with(Setup { server, ..Setup::default() })
}

fn post(server: &Server, headers: &[(&str, &str)]) -> Response {
    let headers = [&[TYPE], headers].concat();
    server.request("POST", "/v1/systemone", &headers, one(noul()).to_string().as_bytes())
}

/// Sends a request and does not wait.
fn send(client: &mut Client) {
    let body = one(noul()).to_string();
    client.send_head("POST", "/v1/systemone", &[TYPE, ("content-length", &body.len().to_string())]);
    client.send(body.as_bytes());
}

#[test]
fn a_request_may_be_less_patient_than_the_server() {
    let server = Server::new();
    server.model.hold();
    let started = Instant::now();
    let late = post(&server, &[("x-request-timeout-ms", "100")]);
    assert_eq!((late.status, &late.json()["detail"]["error_type"]), (504, &json!("deadline_exceeded")));
    assert!(started.elapsed() >= SHORT / 2 && started.elapsed() < Duration::from_secs(9));
    // The body counts too: the time begins with the headers.
    let mut slow = server.connect();
    slow.send_head(
        "POST",
        "/v1/systemone",
        &[TYPE, ("content-length", "9"), ("x-request-timeout-ms", "100")],
    );
    assert_eq!(slow.response(false).status, 408);
}

#[test]
fn a_request_may_be_more_patient_up_to_the_maximum() {
    let options =
        ServerOptions { deadline: SHORT, max_deadline: Duration::from_secs(5), ..ServerOptions::default() };
    let server = with(options);
    server.model.delay(SHORT * 3);
    assert_eq!(post(&server, &[]).status, 504);
    assert_eq!(post(&server, &[("x-request-timeout-ms", "4000")]).status, 200);
    let limits = server.get("/ready").json()["limits"].clone();
    assert_eq!((&limits["deadline_ms"], &limits["max_deadline_ms"]), (&json!(200), &json!(5_000)));
    let capped = with(ServerOptions { deadline: SHORT, max_deadline: SHORT * 2, ..ServerOptions::default() });
    capped.model.hold();
    for asked in ["60000", "99999999999999999999999999"] {
        let started = Instant::now();
        assert_eq!(post(&capped, &[("x-request-timeout-ms", asked)]).status, 504);
        assert!(started.elapsed() >= SHORT * 2 && started.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn a_timeout_that_is_no_positive_integer_is_refused_by_name() {
    let server = Server::new();
    let name = "x-request-timeout-ms";
    let cases: [&[(&str, &str)]; 8] = [
        &[(name, "0")],
        &[(name, "")],
        &[(name, "-5")],
        &[(name, "1.5")],
        &[(name, "soon")],
        &[(name, "100, 100")],
        &[(name, "100"), (name, "100")],
        &[(name, "100"), ("X-Request-Timeout-Ms", "200")],
    ];
    for headers in cases {
        let refused = post(&server, headers);
        assert_eq!(refused.status, 400, "{headers:?}");
        let detail = &refused.json()["detail"];
        assert_eq!(detail["error_type"], json!("invalid_request_timeout"), "{headers:?}");
        assert!(detail["message"].as_str().unwrap().contains(name), "{detail}");
    }
    assert!(server.model.batches().is_empty());
    let described = server.get("/openapi.json").json();
    for path in ["/v1/systemone", "/v1/systemone/separate", "/v1/systemone/permute"] {
        let parameter = &described["paths"][path]["post"]["parameters"][0];
        assert_eq!((&parameter["name"], &parameter["in"]), (&json!(name), &json!("header")), "{path}");
        assert_eq!(parameter["required"], json!(false));
    }
}

#[test]
fn keys_change_while_the_server_serves() {
    let keys = ApiKeys::from(vec![ApiKey::new("old").named("first").unwrap()]);
    let server = with(ServerOptions { api_keys: keys.clone(), ..ServerOptions::default() });
    let status = |key: &str| post(&server, &[("authorization", &format!("Bearer {key}"))]).status;
    assert_eq!((status("old"), status("new"), status("first")), (200, 401, 401));
    assert!(keys.replace(vec![ApiKey::new("new"), ApiKey::new("newer")]));
    assert_eq!((status("old"), status("new"), status("newer")), (401, 200, 200));
    assert!(!keys.replace(Vec::new()), "no exchange opens the server");
    assert_eq!((status("new"), post(&server, &[]).status), (200, 401));
}

#[test]
fn pages_read_refusals_too_and_preflights_need_no_key() {
    let options = ServerOptions {
        api_keys: vec![ApiKey::new("sesame")].into(),
        cors: Cors::parse(&["https://app.example", "http://localhost:3000"]).unwrap(),
        ..ServerOptions::default()
    };
    let scheduler = SchedulerOptions { queue_requests: 1, ..SchedulerOptions::default() };
    let server = Server::with(Setup { server: options, scheduler, ..Setup::default() });
    let preflight = [
        ORIGIN,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    let allowed = |response: &Response| response.header("access-control-allow-origin").map(str::to_owned);
    let ours = Some(ORIGIN.1.to_owned());
    let response = server.request("OPTIONS", "/v1/systemone", &preflight, b"");
    assert_eq!((response.status, allowed(&response)), (200, ours.clone()));
    assert_eq!(response.header("access-control-allow-headers"), Some("authorization,content-type"));
    let refused = post(&server, &[ORIGIN]);
    assert_eq!((refused.status, allowed(&refused)), (401, ours.clone()));
    let key = ("authorization", "Bearer sesame");
    server.model.hold();
    let mut running = server.connect();
    let body = one(noul()).to_string();
    running.send_head("POST", "/v1/systemone", &[TYPE, key, ("content-length", &body.len().to_string())]);
    running.send(body.as_bytes());
    server.model.wait_started(1);
    let full = post(&server, &[ORIGIN, key]);
    assert_eq!((full.status, allowed(&full)), (503, ours));
    assert_eq!((full.header("retry-after"), full.header("retry-after-ms")), (Some("1"), Some("1000")));
    server.model.release();
    assert_eq!(running.response(false).status, 200);
    // Another page learns nothing, whatever the answer.
    let other = ("origin", "https://evil.example");
    for response in [post(&server, &[other]), post(&server, &[other, key])] {
        assert_eq!(allowed(&response), None);
    }
}

#[test]
fn without_cors_no_header_of_it_is_sent() {
    let server =
        with(ServerOptions { api_keys: vec![ApiKey::new("sesame")].into(), ..ServerOptions::default() });
    let key = ("authorization", "Bearer sesame");
    let preflight = [ORIGIN, ("access-control-request-method", "POST")];
    let responses = [
        post(&server, &[ORIGIN]),
        post(&server, &[ORIGIN, key]),
        server.request("OPTIONS", "/v1/systemone", &preflight, b""),
        server.request("OPTIONS", "/health", &preflight, b""),
        server.request("GET", "/health", &[ORIGIN], b""),
    ];
    let statuses = responses.each_ref().map(|response| response.status);
    assert_eq!(statuses, [401, 200, 401, 405, 200]);
    for response in responses {
        let related = |name: &str| name.starts_with("access-control-") || name == "vary";
        let sent: Vec<_> = response.headers.iter().filter(|(name, _)| related(name)).collect();
        assert!(sent.is_empty(), "{sent:?}");
    }
}

#[test]
fn a_server_ends_with_its_model_when_told_to_and_answers_what_is_inside() {
    for fault in [Fault::Error, Fault::Panic] {
        let mut server = with(ServerOptions {
            exit_on_failure: true,
            // Balancers are not waited for: nothing could be answered in that time.
            drain_delay: Duration::from_secs(600),
            ..ServerOptions::default()
        });
        let mut idle = server.connect();
        assert_eq!(idle.request("GET", "/health", &[], b"").status, 200);
        server.model.hold();
        let mut running = server.connect();
        send(&mut running);
        server.model.wait_started(1);
        let mut waiting = server.connect();
        send(&mut waiting);
        std::thread::sleep(SHORT);
        server.model.fault(fault);
        server.model.release();
        assert_eq!(running.response(false).status, 500, "{fault:?}");
        let refused = waiting.response(false);
        assert_eq!(refused.status, 503);
        assert_eq!(refused.json()["detail"]["error_type"], json!("model_unavailable"));
        assert!(idle.is_closed());
        let error = server.join().unwrap_err();
        assert!(matches!(error, ServeError::Retired { .. }), "{fault:?}: {error}");
        assert!(TcpStream::connect(server.address).is_err());
    }
}

#[test]
fn a_server_ends_with_its_model_even_if_nobody_is_left_to_hear_of_it() {
    let mut server = with(ServerOptions { exit_on_failure: true, ..ServerOptions::default() });
    server.model.hold();
    let mut client = server.connect();
    send(&mut client);
    server.model.wait_started(1);
    drop(client);
    server.model.fault(Fault::Error);
    server.model.release();
    assert!(matches!(server.join().unwrap_err(), ServeError::Retired { .. }));
}

#[test]
fn a_stop_signal_ends_such_a_server_as_any_other() {
    let mut server = with(ServerOptions { exit_on_failure: true, ..ServerOptions::default() });
    server.answer(&one(noul()));
    server.begin_stop();
    server.join().unwrap();
}

#[test]
fn without_the_switch_a_server_outlives_its_model() {
    let mut server = Server::new();
    server.model.fault(Fault::Error);
    assert_eq!(post(&server, &[]).status, 500);
    std::thread::sleep(SHORT * 2);
    let refused = post(&server, &[]);
    assert_eq!((refused.status, refused.header("retry-after-ms")), (503, Some("1000")));
    until("still not ready", || server.get("/ready").header("retry-after-ms") == Some("1000"));
    server.begin_stop();
    server.join().unwrap();
}

#[test]
fn the_operations_page_has_every_metric() {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md")).unwrap();
    let server = Server::new();
    let text = server.get("/metrics").text();
    let names: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split(' ').next()).collect();
    assert!(names.len() > 20, "{names:?}");
    let missing: Vec<&&str> = names
        .iter()
        .filter(|name| !page.contains(&format!("`{name}`")) && !page.contains(&format!("`{name}{{")))
        .collect();
    assert!(missing.is_empty(), "docs/operations.md lacks {missing:?}");
}
