//! Every row of the wire contract's table of checks that this crate can show, over a real socket. Rows 44 and 45 are runs
//! of real clients and belong to the gate.

#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests.

mod support;

use std::io::Write;

use serde_json::{Value, json};
use server::{ApiKey, Cors, ServerOptions};
use support::{Server, Setup, choice, noul, numbered, one, score};

const TYPE: (&str, &str) = ("content-type", "application/json");

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_object().unwrap().values().map(|p| p.as_f64().unwrap()).collect()
}

fn close(left: f64, right: f64, tolerance: f64) {
    assert!((left - right).abs() <= tolerance, "{left} is not within {tolerance} of {right}");
}

/// The answer to the one question of a request.
fn answer(server: &Server, question: Value) -> Value {
    server.answer(&one(question))["answers"]["q"].clone()
}

fn keyed() -> Server {
    let server = ServerOptions { api_keys: vec![ApiKey::new("sesame")].into(), ..ServerOptions::default() };
    Server::with(Setup { server, ..Setup::default() })
}

#[test]
fn r01_noul() {
    let server = Server::new();
    let response = server.post(one(noul()).to_string());
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    let answer = &response.json()["answers"]["q"];
    assert_eq!(keys(answer), ["type", "noul"]);
    assert!((0.0..=1.0).contains(&answer["noul"].as_f64().unwrap()));
    assert_eq!(keys(&response.json()), ["model", "answers", "usage"]);
}

#[test]
fn r02_choice() {
    let server = Server::new();
    for options in [&["billing", "other"][..], &["b", "a", "c"], &["1", "10", "100"]] {
        let answer = answer(&server, choice(options));
        assert_eq!(keys(&answer), ["type", "choice", "confidence", "probabilities"]);
        assert_eq!(keys(&answer["probabilities"]), options);
        let p = numbers(&answer["probabilities"]);
        let top = p.iter().copied().fold(0.0, f64::max);
        let chosen = answer["probabilities"][answer["choice"].as_str().unwrap()].as_f64();
        assert_eq!(chosen, Some(top));
        close(p.iter().sum(), 1.0, 0.005 * p.len() as f64);
    }
}

#[test]
fn r03_score() {
    let server = Server::new();
    let answer = answer(&server, score(&["calm", "annoyed", "furious"]));
    assert_eq!(keys(&answer), ["type", "score", "legend", "probabilities", "confidence"]);
    assert_eq!(answer["legend"], json!({ "0": "calm", "1": "annoyed", "2": "furious" }));
    assert_eq!(keys(&answer["probabilities"]), ["0", "1", "2"]);
    let expected: f64 = numbers(&answer["probabilities"]).iter().enumerate().map(|(i, p)| i as f64 * p).sum();
    close(answer["score"].as_f64().unwrap(), expected, 0.005 * 4.0);
}

#[test]
fn r04_confidence_of_a_choice() {
    let server = Server::new();
    for count in [2, 3, 7, 64] {
        let answer = answer(&server, choice(&numbered("option ", count)));
        let top = numbers(&answer["probabilities"]).into_iter().fold(0.0, f64::max);
        let even = 1.0 / count as f64;
        close(answer["confidence"].as_f64().unwrap(), (top - even) / (1.0 - even), 0.002);
    }
}

#[test]
fn r05_confidence_of_a_score() {
    let server = Server::new();
    for count in [2, 3, 5, 10] {
        let answer = answer(&server, score(&numbered("level ", count)));
        let p = numbers(&answer["probabilities"]);
        let mode = p.iter().enumerate().fold(0, |best, (i, value)| if *value > p[best] { i } else { best });
        let distance: f64 = p.iter().enumerate().map(|(i, p)| p * (i as f64 - mode as f64).abs()).sum();
        let centre = (count as f64 - 1.0) / 2.0;
        let even: f64 = (0..count).map(|i| (i as f64 - centre).abs()).sum::<f64>() / count as f64;
        close(answer["confidence"].as_f64().unwrap(), (1.0 - distance / even).max(0.0), 0.002);
    }
}

#[test]
fn r06_one_option_and_one_level() {
    let server = Server::new();
    assert_eq!(answer(&server, choice(&["only"]))["confidence"], json!(1.0));
    let response = server.post(one(score(&["today"])).to_string());
    let exact = r#""q":{"type":"score","score":0.0,"legend":{"0":"today"},"probabilities":{"0":1.0},"confidence":1.0}"#;
    assert!(response.text().contains(exact), "{}", response.text());
}

#[test]
fn r07_usage() {
    let body = one(noul());
    let usage = Server::new().answer(&body)["usage"].clone();
    assert_eq!(keys(&usage), ["input_tokens", "output_tokens"]);
    assert!(usage["input_tokens"].is_u64() && usage["output_tokens"].is_u64());
    let server = ServerOptions { cached_token_details: true, ..ServerOptions::default() };
    let server = Server::with(Setup { server, ..Setup::default() });
    let detailed = server.answer(&body)["usage"].clone();
    assert_eq!(keys(&detailed), ["input_tokens", "output_tokens", "input_tokens_details"]);
    assert_eq!(detailed["input_tokens_details"], json!({ "cached_tokens": 0 }));
}

#[test]
fn r08_model_is_echoed() {
    let server = Server::new();
    for model in ["jev-latest", "kev-latest", "m", "", "모델"] {
        let mut body = one(noul());
        body["model"] = json!(model);
        assert_eq!(server.answer(&body)["model"], json!(model));
    }
    let mut body = one(noul());
    body.as_object_mut().unwrap().remove("model");
    assert_eq!(server.answer(&body)["model"], json!("kev-latest"));
}

#[test]
fn r09_ids_come_back_and_change_nothing() {
    let server = Server::new();
    let expected = answer(&server, choice(&["a", "b", "c"]));
    // The last two look alike and are different bytes.
    for id in
        ["with space", "q.2", "ticket-1", "질문", "🎯", "zz-renamed.1", "\"\\\n", "\u{e9}", "e\u{301}", ""]
    {
        let body = json!({ "state": "I was charged twice.", "questions": { id: choice(&["a", "b", "c"]) } });
        assert_eq!(server.answer(&body)["answers"], json!({ id: expected }), "{id:?}");
    }
}

#[test]
fn r10_company_and_order_change_nothing() {
    let server = Server::new();
    let questions = [("a", noul()), ("b", choice(&["x", "y"])), ("c", score(&["lo", "hi"]))];
    let ask = |list: &[(&str, Value)]| {
        let map: serde_json::Map<String, Value> =
            list.iter().map(|(id, question)| ((*id).to_owned(), question.clone())).collect();
        server.answer(&json!({ "state": "s", "questions": map }))["answers"].clone()
    };
    let all = ask(&questions);
    let reversed: Vec<(&str, Value)> = questions.iter().rev().cloned().collect();
    let backwards = ask(&reversed);
    assert_eq!(keys(&all), ["a", "b", "c"]);
    assert_eq!(keys(&backwards), ["c", "b", "a"]);
    for (id, question) in &questions {
        assert_eq!(all[id], backwards[id]);
        assert_eq!(ask(&[("renamed", question.clone())])["renamed"], all[id]);
    }
}

#[test]
fn r11_noul_criteria() {
    let server = Server::new();
    for criteria in [
        Value::Null,
        json!({}),
        json!({ "true": "asks for a refund", "false": "does not" }),
        json!({ "true": "asks for a refund" }),
        json!({ "false": "does not" }),
        json!({ "true": null, "false": null }),
        json!({ "true": { "a": 1 }, "false": ["x"], "other": 1 }),
    ] {
        for instructions in [json!("Refund?"), Value::Null] {
            let question = json!({ "type": "noul", "instructions": instructions, "criteria": criteria });
            answer(&server, question);
        }
        answer(&server, json!({ "type": "noul", "criteria": criteria }));
    }
    answer(&server, json!({ "type": "noul" }));
}

#[test]
fn r12_options_without_descriptions() {
    let server = Server::new();
    answer(&server, json!({ "type": "choice", "criteria": { "a": null, "b": null, "c": null } }));
    // No description and an empty one are the same.
    let with = |description: Value| {
        answer(&server, json!({ "type": "choice", "criteria": { "a": description, "b": "x" } }))
    };
    assert_eq!(with(Value::Null), with(json!("")));
}

#[test]
fn r13_many_options() {
    let server = Server::new();
    for count in [1, 2, 26, 50, 64, 128, 255] {
        let options = numbered("option ", count);
        let answer = answer(&server, choice(&options));
        assert_eq!(keys(&answer["probabilities"]), options);
        close(numbers(&answer["probabilities"]).iter().sum(), 1.0, 0.02);
    }
}

#[test]
fn r14_too_many_options() {
    let violations = Server::new().post(one(choice(&numbered("o", 256))).to_string()).violations();
    assert_eq!(violations, [("too_long".to_owned(), "body.questions.q.choice.criteria".to_owned())]);
}

#[test]
fn r15_levels() {
    let server = Server::new();
    for count in [1, 2, 3, 5, 10, 11, 255] {
        let levels = numbered("level ", count);
        let answer = answer(&server, score(&levels));
        let expected = numbered("", count);
        assert_eq!(keys(&answer["legend"]), expected);
        assert_eq!(keys(&answer["probabilities"]), expected);
    }
    let violations = server.post(one(score(&numbered("l", 256))).to_string()).violations();
    assert_eq!(violations[0].0, "too_long");
}

/// Rows 16, 17, 24 and 25: what is refused, as what, where.
#[test]
fn r16_r17_r24_r25_violations() {
    let server = Server::new();
    let question = |question: Value| one(question);
    let cases = [
        (
            question(json!({ "type": "score", "criteria": [] })),
            "too_short",
            "body.questions.q.score.criteria",
        ),
        (question(json!({ "type": "bogus" })), "union_tag_invalid", "body.questions.q"),
        (question(json!({ "type": "boolean" })), "union_tag_invalid", "body.questions.q"),
        (question(json!({ "type": "Noul" })), "union_tag_invalid", "body.questions.q"),
        (json!({ "state": "s", "questions": {} }), "too_short", "body.questions"),
        (json!({ "state": "s", "questions": [] }), "dict_type", "body.questions"),
        (
            question(json!({ "type": "choice", "criteria": {} })),
            "too_short",
            "body.questions.q.choice.criteria",
        ),
        (
            question(json!({ "type": "choice", "criteria": ["a"] })),
            "dict_type",
            "body.questions.q.choice.criteria",
        ),
        (question(json!({ "type": "choice" })), "missing", "body.questions.q.choice.criteria"),
        // 17
        (
            question(json!({ "type": "score", "criteria": { "lo": null } })),
            "list_type",
            "body.questions.q.score.criteria",
        ),
        // 24
        (json!({ "questions": { "q": noul() } }), "missing", "body.state"),
        (json!({ "state": "s" }), "missing", "body.questions"),
        (question(json!({ "instructions": "?" })), "union_tag_not_found", "body.questions.q"),
        // 25
        (json!({ "model": 3, "state": "s", "questions": { "q": noul() } }), "string_type", "body.model"),
        (json!({ "model": null, "state": "s", "questions": { "q": noul() } }), "string_type", "body.model"),
    ];
    for (body, kind, place) in cases {
        let violations = server.post(body.to_string()).violations();
        assert_eq!(violations, [(kind.to_owned(), place.to_owned())], "{body}");
    }
    assert!(server.model.batches().is_empty(), "a refused request reached the model");
}

#[test]
fn r18_null_level() {
    let answer = answer(&Server::new(), json!({ "type": "score", "criteria": ["lo", null, "hi"] }));
    assert_eq!(answer["legend"], json!({ "0": "lo", "1": "", "2": "hi" }));
}

#[test]
fn r19_structured_text() {
    let server = Server::new();
    for state in [json!({ "a": { "b": [1, 2.5, true, null] } }), json!(["x", { "y": "z" }])] {
        let text = json!({ "rule": ["one", { "two": 3 }] });
        let body = json!({ "state": state, "questions": {
            "n": { "type": "noul", "instructions": text, "criteria": { "true": text, "false": ["x"] } },
            "c": { "type": "choice", "instructions": [text], "criteria": { "a": text, "b": ["x"], "c": null } },
            "s": { "type": "score", "instructions": text, "criteria": [text, ["x"], "plain"] },
        } });
        let legend = server.answer(&body)["answers"]["s"]["legend"].clone();
        assert!(legend.as_object().unwrap().values().all(Value::is_string), "{legend}");
        assert_eq!(legend["2"], json!("plain"));
    }
}

#[test]
fn r20_empty_and_odd_states() {
    let server = Server::new();
    for state in [json!(""), json!({}), json!([]), Value::Null, json!(0), json!(1.5), json!(true)] {
        server.answer(&json!({ "state": state, "questions": { "q": noul() } }));
    }
}

#[test]
fn r21_explicit_nulls_are_absent() {
    let server = Server::new();
    let explicit = answer(&server, json!({ "type": "noul", "instructions": null, "criteria": null }));
    assert_eq!(explicit, answer(&server, json!({ "type": "noul" })));
}

#[test]
fn r22_unknown_fields_are_ignored() {
    let server = Server::new();
    let mut body = one(noul());
    let plain = server.answer(&body);
    body["x_trace_id"] = json!("t");
    body["seed"] = json!(7);
    body["questions"]["q"]["x_nonce"] = json!({ "deep": [1] });
    assert_eq!(server.answer(&body), plain);
}

#[test]
fn r23_not_a_request() {
    let server = Server::new();
    let cases = [
        ("{\"state\":", "json_invalid", "body.9"),
        ("", "missing", "body"),
        ("[1]", "model_attributes_type", "body"),
        ("null", "model_attributes_type", "body"),
        ("\"text\"", "model_attributes_type", "body"),
        ("nonsense", "json_invalid", "body.0"),
        ("{}x", "json_invalid", "body.2"),
    ];
    for (body, kind, place) in cases {
        assert_eq!(server.post(body).violations(), [(kind.to_owned(), place.to_owned())], "{body}");
    }
    // A Content-Type that is not JSON is no object either, whatever the body says.
    for content_type in [None, Some("text/plain"), Some("application/x-www-form-urlencoded")] {
        let headers: Vec<(&str, &str)> =
            content_type.map(|value| ("content-type", value)).into_iter().collect();
        let response = server.request("POST", "/v1/systemone", &headers, one(noul()).to_string().as_bytes());
        assert_eq!(response.violations()[0], ("model_attributes_type".to_owned(), "body".to_owned()));
    }
    for content_type in ["application/json; charset=utf-8", "application/vnd.x+json", "Application/JSON"] {
        let headers = [("content-type", content_type)];
        let response = server.request("POST", "/v1/systemone", &headers, one(noul()).to_string().as_bytes());
        assert_eq!(response.status, 200);
    }
}

#[test]
fn r26_unknown_model_is_answered() {
    let mut body = one(noul());
    body["model"] = json!("jevcompat-no-such-model");
    assert_eq!(Server::new().answer(&body)["model"], json!("jevcompat-no-such-model"));
}

#[test]
fn r26_unknown_model_is_refused_where_names_are_strict() {
    let options = ServerOptions { strict_models: true, ..ServerOptions::default() };
    let server = Server::with(Setup { server: options, ..Setup::default() });
    let mut body = one(noul());
    for served in ["kev-latest", "jev-latest"] {
        body["model"] = json!(served);
        assert_eq!(server.answer(&body)["model"], json!(served));
    }
    body["model"] = json!("jevcompat-no-such-model");
    let refused = server.post(body.to_string());
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["detail"]["error_type"], json!("api_usage_error"));
    assert!(refused.json()["detail"]["message"].is_string());
}

#[test]
fn r27_paths_and_methods() {
    let server = Server::new();
    let cases = [
        ("GET", "/v1/systemone", 405, Some("POST"), r#"{"detail":"Method Not Allowed"}"#),
        ("PUT", "/v1/systemone/permute", 405, Some("POST"), r#"{"detail":"Method Not Allowed"}"#),
        ("DELETE", "/v1/systemone/separate", 405, Some("POST"), r#"{"detail":"Method Not Allowed"}"#),
        ("POST", "/v1/models", 405, Some("GET,HEAD"), r#"{"detail":"Method Not Allowed"}"#),
        ("POST", "/v1/nothing", 404, None, r#"{"detail":"Not Found"}"#),
        ("POST", "/v1/systemone/", 404, None, r#"{"detail":"Not Found"}"#),
        ("GET", "/", 404, None, r#"{"detail":"Not Found"}"#),
        ("HEAD", "/v1/systemone", 405, Some("POST"), ""),
        ("HEAD", "/health", 200, None, ""),
        ("HEAD", "/v1/models", 200, None, ""),
    ];
    for (method, path, status, allow, body) in cases {
        let response = server.request(method, path, &[TYPE], b"");
        assert_eq!((response.status, response.text().as_str()), (status, body), "{method} {path}");
        assert_eq!(response.header("allow"), allow, "{method} {path}");
        assert_eq!(response.header("content-type"), Some("application/json"));
    }
    // A query does not change the route.
    let body = one(noul()).to_string();
    assert_eq!(server.post_to("/v1/systemone?x=1", body).status, 200);
}

#[test]
fn r28_without_a_key_any_authorization_will_do() {
    let server = Server::new();
    for value in ["Bearer local", "Bearer", "Basic eA==", "", "\u{e9}\u{e9}", "Bearer a b c"] {
        let headers = [TYPE, ("authorization", value)];
        let response = server.request("POST", "/v1/systemone", &headers, one(noul()).to_string().as_bytes());
        assert_eq!(response.status, 200, "{value:?}");
    }
}

/// Rows 29 and 43.
#[test]
fn r29_r43_with_a_key() {
    let server = keyed();
    let body = one(noul()).to_string();
    let cases = [
        (None, 401),
        (Some("Bearer wrong"), 401),
        (Some("sesame"), 401),
        (Some("Basic sesame"), 401),
        (Some("Bearer sesame"), 200),
        (Some("bearer sesame"), 200),
        (Some("BEARER   sesame "), 200),
    ];
    for (value, status) in cases {
        let authorization = value.map(|value| ("authorization", value));
        for (method, path, body) in [("POST", "/v1/systemone", body.as_bytes()), ("GET", "/v1/models", b"")] {
            let headers: Vec<(&str, &str)> = std::iter::once(TYPE).chain(authorization).collect();
            let response = server.request(method, path, &headers, body);
            assert_eq!(response.status, status, "{value:?} {path}");
            if status == 401 {
                let detail = &response.json()["detail"];
                assert_eq!(detail["error_type"], json!("authentication_error"));
                assert!(detail["message"].is_string());
                assert_eq!(response.header("www-authenticate"), Some("Bearer"));
            }
        }
    }
    // Unknown paths tell nothing; what needs no key still does not.
    assert_eq!(server.get("/v1/nothing").status, 401);
    for path in ["/health", "/openapi.json"] {
        assert_eq!(server.get(path).status, 200);
    }
    assert_eq!(server.get("/nothing").status, 404);
}

/// Method, path, headers, body and the status expected.
type MarkedCase<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a [u8], u16);

/// Rows 30 and 31.
#[test]
fn r30_r31_every_response_is_marked() {
    let server = keyed();
    let key = ("authorization", "Bearer sesame");
    let large = vec![b' '; ServerOptions::default().max_body_bytes + 1];
    let good = one(noul()).to_string();
    let cases: [MarkedCase<'_>; 8] = [
        ("POST", "/v1/systemone", &[TYPE, key], good.as_bytes(), 200),
        ("GET", "/health", &[], b"", 200),
        ("POST", "/v1/systemone", &[TYPE], good.as_bytes(), 401),
        ("GET", "/nothing", &[], b"", 404),
        ("GET", "/v1/systemone", &[key], b"", 405),
        ("POST", "/v1/systemone", &[TYPE, key], &large, 413),
        ("POST", "/v1/systemone", &[("content-type", "multipart/form-data"), key], b"x", 415),
        ("POST", "/v1/systemone", &[TYPE, key], b"{", 422),
    ];
    for (method, path, headers, body, status) in cases {
        let plain = server.request(method, path, headers, body);
        assert_eq!(plain.status, status, "{method} {path}");
        let id = plain.header("x-typesafe-request-id").unwrap();
        assert!(id.len() == 36 && id.starts_with("req_"), "{id}");
        let timing = plain.header("server-timing").unwrap();
        let first = timing.split(", ").next().unwrap();
        let (whole, decimals) = first.strip_prefix("app;dur=").unwrap().split_once('.').unwrap();
        assert!(whole.parse::<u64>().is_ok() && decimals.len() == 1, "{timing}");
        let stages: Vec<&str> =
            timing.split(", ").skip(1).map(|part| part.split(';').next().unwrap()).collect();
        let expected: &[&str] = if path == "/v1/systemone" && status == 200 {
            &["queue", "prepare", "model", "finish"]
        } else {
            &[]
        };
        assert_eq!(stages, expected);
        let named: Vec<(&str, &str)> =
            headers.iter().copied().chain([("x-typesafe-request-id", "my-id_1")]).collect();
        let echoed = server.request(method, path, &named, body);
        assert_eq!((echoed.status, echoed.header("x-typesafe-request-id")), (status, Some("my-id_1")));
    }
    let odd = server.request("GET", "/health", &[("x-typesafe-request-id", "a b\u{e9}")], b"");
    assert!(odd.header("x-typesafe-request-id").unwrap().starts_with("req_"));
}

#[test]
fn r32_models() {
    let server = Server::new();
    let response = server.get("/v1/models");
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    let json = response.json();
    let cards = json["models"].as_array().unwrap();
    for card in cards {
        for field in ["name", "description", "release_date"] {
            assert!(card[field].as_str().is_some_and(|text| !text.is_empty()), "{card}");
        }
    }
    for name in ["kev-latest", "jev-latest"] {
        assert!(cards.iter().any(|card| card["name"] == name));
    }
    // A body where none belongs is ignored.
    let mut client = server.connect();
    for _ in 0..2 {
        client.send_head("GET", "/v1/models", &[TYPE, ("content-length", "2")]);
        client.send(b"{}");
        assert_eq!(client.response(false).status, 200);
    }
}

#[test]
fn r33_health() {
    for server in [Server::new(), keyed()] {
        let response = server.get("/health");
        assert_eq!((response.status, response.text().as_str()), (200, r#"{"status":"ok"}"#));
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn r34_compressed_bodies() {
    let server = Server::new();
    let mut body = one(noul());
    body["state"] = json!("I was charged twice. ".repeat(200));
    let plain = server.answer(&body);
    let text = body.to_string();
    let zstd = zstd::bulk::compress(text.as_bytes(), 3).unwrap();
    let bomb = zstd::bulk::compress(&vec![b' '; 64 << 20], 19).unwrap();
    let streamed = zstd::stream::encode_all(&vec![b' '; 64 << 20][..], 3).unwrap();
    let packed = gzip(text.as_bytes());
    let send = |encoding: &str, body: &[u8]| {
        server.request("POST", "/v1/systemone", &[TYPE, ("content-encoding", encoding)], body)
    };
    for (encoding, body) in [("zstd", &zstd[..]), ("gzip", &packed), ("identity", text.as_bytes())] {
        let response = send(encoding, body);
        assert_eq!((response.status, response.json()), (200, plain.clone()), "{encoding}");
    }
    let cases: [(&str, &[u8], u16); 7] = [
        ("zstd", b"this is not zstd", 400),
        ("zstd", &zstd[..zstd.len() / 2], 400),
        ("gzip", &packed[..packed.len() / 2], 400),
        ("gzip", text.as_bytes(), 400),
        ("zstd", &bomb, 413),
        ("zstd", &streamed, 413),
        ("gzip", &gzip(&vec![b' '; 64 << 20]), 413),
    ];
    for (encoding, body, status) in cases {
        assert!(body.len() < 100_000);
        let response = send(encoding, body);
        assert_eq!(response.status, status, "{encoding}: {}", response.text());
        assert!(response.json()["detail"]["error_type"].is_string());
    }
    assert_eq!(send("zstd", b"").violations()[0].0, "missing");
}

#[test]
fn r35_what_is_not_supported() {
    let server = Server::new();
    let body = one(noul()).to_string();
    for encoding in ["br", "deflate", "gzip, zstd", "x"] {
        let headers = [TYPE, ("content-encoding", encoding)];
        let response = server.request("POST", "/v1/systemone", &headers, body.as_bytes());
        assert_eq!(response.status, 415, "{encoding}");
        assert_eq!(response.json()["detail"]["error_type"], json!("unsupported_encoding"));
    }
    let multipart = [("content-type", "multipart/form-data; boundary=x")];
    let response = server.request("POST", "/v1/systemone", &multipart, b"--x\r\n\r\n{}\r\n--x--\r\n");
    assert_eq!(response.status, 415);
    assert_eq!(response.json()["detail"]["error_type"], json!("unsupported_media_type"));
    let mut assets = one(noul());
    assets["assets"] = json!({ "ref": { "type": "image", "format": "png", "data_base64": "" } });
    assert_eq!(
        server.post(assets.to_string()).violations(),
        [("unsupported".to_owned(), "body.assets".to_owned())]
    );
}

#[test]
fn r36_bodies_over_the_limit() {
    let server = keyed();
    let limit = ServerOptions::default().max_body_bytes;
    assert!(limit >= 8 << 20);
    let key = ("authorization", "Bearer sesame");
    // Exactly the limit is read.
    let mut fits = one(noul()).to_string();
    fits.push_str(&" ".repeat(limit - fits.len()));
    assert_eq!(server.request("POST", "/v1/systemone", &[TYPE, key], fits.as_bytes()).status, 200);
    // Several times the limit, sent whole before reading, as many clients do: an answer, not a reset.
    let large = vec![b' '; 3 * limit];
    let response = server.request("POST", "/v1/systemone", &[TYPE, key], &large);
    assert_eq!(response.status, 413);
    assert_eq!(response.json()["detail"]["error_type"], json!("request_too_large"));
    // The same without a length.
    let mut client = server.connect();
    client.send_head("POST", "/v1/systemone", &[TYPE, key, ("transfer-encoding", "chunked")]);
    for _ in 0..3 {
        client.send(format!("{limit:x}\r\n").as_bytes());
        client.send(&large[..limit]);
        client.send(b"\r\n");
    }
    client.send(b"0\r\n\r\n");
    assert_eq!(client.response(false).status, 413);
    // And the connection can still be used.
    let next = client.request("GET", "/health", &[], b"");
    assert_eq!(next.status, 200);
    // The key comes first.
    assert_eq!(server.request("POST", "/v1/systemone", &[TYPE], &large).status, 401);
}

#[test]
fn r37_overload() {
    let scheduler = scheduler::SchedulerOptions { queue_requests: 1, ..Default::default() };
    let server = Server::with(Setup { scheduler, ..Setup::default() });
    server.model.hold();
    let mut first = server.connect();
    let body = one(noul()).to_string();
    let length = body.len().to_string();
    first.send_head("POST", "/v1/systemone", &[TYPE, ("content-length", &length)]);
    first.send(body.as_bytes());
    server.model.wait_started(1);
    let refused = server.post(&body);
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.header("retry-after-ms"), Some("1000"));
    assert_eq!(refused.json()["detail"]["error_type"], json!("overloaded"));
    // Before the body is sent: only the headers of a large one.
    let mut early = server.connect();
    early.send_head("POST", "/v1/systemone", &[TYPE, ("content-length", "1000000")]);
    assert_eq!(early.response(false).status, 503);
    server.model.release();
    assert_eq!(first.response(false).status, 200);
    assert_eq!(server.post(&body).status, 200);
}

#[test]
fn r38_duplicate_keys() {
    let server = Server::new();
    let twice =
        r#"{"state":"s","questions":{"q":{"type":"choice","criteria":{"a":"old","b":"x","a":"new"}}}}"#;
    let once = r#"{"state":"s","questions":{"q":{"type":"choice","criteria":{"a":"new","b":"x"}}}}"#;
    assert_eq!(server.post(twice).text(), server.post(once).text());
    // A repeated question keeps its first place and is the last one given.
    let body = r#"{"state":"s","questions":{"x":{"type":"score","criteria":["l"]},"y":{"type":"noul"},"x":{"type":"noul"}}}"#;
    let answers = server.post(body).json()["answers"].clone();
    assert_eq!(keys(&answers), ["x", "y"]);
    assert_eq!(keys(&answers["x"]), ["type", "noul"]);
}

#[test]
fn r39_hostile_json() {
    let server = Server::new();
    let question = r#""questions":{"q":{"type":"noul"}}"#;
    let nested =
        |depth: usize| format!("{{\"state\":{}1{},{question}}}", "[".repeat(depth), "]".repeat(depth));
    let cases: Vec<(Vec<u8>, &[u16])> = vec![
        (b"{\"state\":\"\xff\",\"questions\":{\"q\":{\"type\":\"noul\"}}}".to_vec(), &[400]),
        (format!("{{\"state\":\"\\ud800\",{question}}}").into_bytes(), &[422]),
        (r#"{"state":"s","questions":{"q":{"type":"choice","criteria":{"\udfff":null}}}}"#.into(), &[422]),
        (format!("{{\"state\":\"\\u0000\",{question}}}").into_bytes(), &[200]),
        (format!("{{\"state\":NaN,{question}}}").into_bytes(), &[200, 422]),
        (format!("{{\"state\":[Infinity,-Infinity,1e400],{question}}}").into_bytes(), &[200, 422]),
        (r#"{"model":NaN,"state":1,"questions":{"q":{"type":"noul"}}}"#.into(), &[422]),
        (nested(200).into_bytes(), &[200]),
        (nested(2000).into_bytes(), &[400]),
        ("[".repeat(5_000_000).into_bytes(), &[400, 422]),
        ("{\"a\":".repeat(1_000_000).into_bytes(), &[400, 422]),
        (format!("{{\"state\":{},{question}}}", "9".repeat(4300)).into_bytes(), &[200]),
        (format!("{{\"state\":{},{question}}}", "9".repeat(4301)).into_bytes(), &[400]),
        (format!("\u{feff}{{\"state\":\"s\",{question}}}").into_bytes(), &[200]),
        (
            format!("{{\"state\":\"s\",{question}}}").encode_utf16().flat_map(u16::to_le_bytes).collect(),
            &[200],
        ),
    ];
    for (body, allowed) in cases {
        let response = server.post(&body);
        let start = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        assert!(allowed.contains(&response.status), "{start}: {} {}", response.status, response.text());
        // Whatever is echoed is strict JSON.
        assert!(response.json().is_object());
    }
    let numbers = server.post(r#"{"state":"s","questions":{"q":NaN}}"#);
    assert_eq!(numbers.violations()[0].0, "model_attributes_type");
    let invalid = server.post(b"\"\xff\"");
    assert!(invalid.json()["detail"].as_str().unwrap().starts_with("There was an error parsing the body"));
}

#[test]
fn r40_many_connections_are_kept_and_reused() {
    let server = Server::new();
    let mut clients: Vec<_> = (0..120).map(|_| server.connect()).collect();
    for round in 0..3 {
        for client in &mut clients {
            assert_eq!(client.post(&one(noul())).status, 200, "round {round}");
        }
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    // Clients reuse connections that were idle for 30 s; one minute is the least to be on the safe side.
    let defaults = ServerOptions::default();
    assert!(defaults.idle_timeout >= std::time::Duration::from_secs(60));
    assert!(defaults.max_connections >= 1000);
}

#[test]
fn r41_expect_continue() {
    let server = keyed();
    let mut body = one(noul()).to_string();
    body.push_str(&" ".repeat((2 << 20) - body.len()));
    let length = body.len().to_string();
    let expect = [TYPE, ("content-length", &length), ("expect", "100-continue")];
    let key = ("authorization", "Bearer sesame");
    let mut client = server.connect();
    client.send_head("POST", "/v1/systemone", &[&expect[..], &[key]].concat());
    assert_eq!(client.response(false).status, 100);
    client.send(body.as_bytes());
    assert_eq!(client.response(false).status, 200);
    // Without the key the body is not asked for.
    let mut client = server.connect();
    client.send_head("POST", "/v1/systemone", &expect);
    assert_eq!(client.response(false).status, 401);
}

#[test]
fn r42_cross_origin() {
    let origin = ("origin", "https://app.example");
    let preflight = [
        origin,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type,x-own"),
    ];
    let start = |keys: Vec<ApiKey>| {
        let server = ServerOptions { api_keys: keys.into(), cors: Cors::Any, ..ServerOptions::default() };
        Server::with(Setup { server, ..Setup::default() })
    };
    for server in [start(Vec::new()), start(vec![ApiKey::new("sesame")])] {
        for path in ["/v1/systemone", "/v1/models"] {
            let response = server.request("OPTIONS", path, &preflight, b"");
            assert!([200, 204].contains(&response.status), "{}", response.status);
            assert_eq!(response.header("access-control-allow-origin"), Some("*"));
            assert!(response.header("access-control-allow-methods").unwrap().contains("POST"));
            let allowed = response.header("access-control-allow-headers").unwrap();
            assert_eq!(allowed, "authorization,content-type,x-own");
            assert_eq!(response.header("access-control-max-age"), Some("600"));
        }
        // Answers and errors alike.
        for (method, path) in
            [("POST", "/v1/systemone"), ("GET", "/v1/models"), ("GET", "/nothing"), ("GET", "/health")]
        {
            let response = server.request(method, path, &[origin, TYPE], one(noul()).to_string().as_bytes());
            assert_eq!(response.header("access-control-allow-origin"), Some("*"), "{path}");
            let exposed = response.header("access-control-expose-headers").unwrap();
            assert!(exposed.contains("x-typesafe-request-id") && exposed.contains("server-timing"));
        }
    }
}

#[test]
fn r42_cross_origin_can_be_limited_or_off() {
    let start = |cors: Cors| {
        let server = ServerOptions { cors, ..ServerOptions::default() };
        Server::with(Setup { server, ..Setup::default() })
    };
    let limited = start(Cors::Origins(vec!["https://app.example".parse().unwrap()]));
    let allowed = |server: &Server, origin: &str| {
        let response = server.request("GET", "/health", &[("origin", origin)], b"");
        response.header("access-control-allow-origin").map(str::to_owned)
    };
    assert_eq!(allowed(&limited, "https://app.example").as_deref(), Some("https://app.example"));
    assert_eq!(allowed(&limited, "https://evil.example"), None);
    let off = start(Cors::Off);
    assert_eq!(allowed(&off, "https://app.example"), None);
    let response = off.request("OPTIONS", "/v1/systemone", &[("origin", "https://app.example")], b"");
    assert_eq!((response.status, response.header("allow")), (405, Some("POST")));
}
