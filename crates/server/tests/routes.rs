//! The routes beside `/v1/systemone`, the switches, and the description: what is served is what is described.

#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests.

mod support;

use serde_json::{Value, json};
use server::{ApiKey, ServerOptions};
use support::{Server, Setup, choice, noul, numbered, one, score};

fn mixed() -> Value {
    json!({ "model": "m", "state": "I was charged twice.", "questions": {
        "n": noul(), "c": choice(&["a", "b", "c"]), "s": score(&["lo", "mid", "hi"]) } })
}

#[test]
fn separate_answers_each_question_alone_with_the_same_result() {
    let server = Server::new();
    let together = server.answer(&mixed());
    let response = server.post_to("/v1/systemone/separate", mixed().to_string());
    assert_eq!(response.status, 200, "{}", response.text());
    let separate = response.json();
    assert_eq!(separate["answers"], together["answers"]);
    assert_eq!(separate["model"], together["model"]);
    let batches = server.model.batches();
    assert_eq!(batches.len(), 4);
    assert!(batches[1..].iter().all(|batch| batch.len() == 1 && batch[0].branches.len() == 1));
    // Usage sums: the state is read by every question, and every answer is an object of its own.
    let state = batches[0][0].state.len() as u64;
    let count = |json: &Value, field: &str| json["usage"][field].as_u64().unwrap();
    assert_eq!(count(&separate, "input_tokens"), count(&together, "input_tokens") + 2 * state);
    let alone: u64 = ["n", "c", "s"]
        .iter()
        .map(|id| {
            let mut body = mixed();
            body["questions"] = json!({ *id: body["questions"][id] });
            count(&server.answer(&body), "output_tokens")
        })
        .sum();
    assert_eq!(count(&separate, "output_tokens"), alone);
    assert_eq!(server.post_to("/v1/systemone/separate", "{}").violations().len(), 2);
}

#[test]
fn permute_runs_one_choice_under_several_orders() {
    let server = Server::new();
    let body = json!({ "request": mixed(), "question": "c" });
    let response = server.post_to("/v1/systemone/permute", body.to_string());
    assert_eq!(response.status, 200, "{}", response.text());
    let json = response.json();
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["runs", "argmax_stable", "spread"]);
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 6);
    assert_eq!(runs[0]["order"], json!(["a", "b", "c"]));
    assert_eq!(runs[0]["probabilities"], server.answer(&mixed())["answers"]["c"]["probabilities"]);
    for run in runs {
        let order: Vec<&str> = run["order"].as_array().unwrap().iter().map(|n| n.as_str().unwrap()).collect();
        let names: Vec<&String> = run["probabilities"].as_object().unwrap().keys().collect();
        assert_eq!(names, order);
        // Asked in this order by itself, the question has the same answer.
        let mut alone = one(choice(&order));
        alone["questions"]["q"]["instructions"] = mixed()["questions"]["c"]["instructions"].clone();
        let answer = server.answer(&alone)["answers"]["q"].clone();
        assert_eq!((&answer["probabilities"], &answer["choice"]), (&run["probabilities"], &run["choice"]));
        assert!(run["latency_ms"].is_f64());
    }
    let p = |run: &Value, name: &str| run["probabilities"][name].as_f64().unwrap();
    let spread = ["a", "b", "c"]
        .iter()
        .map(|name| {
            let all: Vec<f64> = runs.iter().map(|run| p(run, name)).collect();
            all.iter().copied().fold(0.0, f64::max) - all.iter().copied().fold(1.0, f64::min)
        })
        .fold(0.0, f64::max);
    assert!((json["spread"].as_f64().unwrap() - spread).abs() < 2e-4);
    let stable = runs.iter().all(|run| run["choice"] == runs[0]["choice"]);
    assert_eq!(json["argmax_stable"], json!(stable));
    // The same seed, the same orders; another seed, others.
    let orders = |seed: i64| {
        let options = numbered("o", 12);
        let body = json!({ "request": one(choice(&options)), "question": "q", "n_perm": 3, "seed": seed });
        let json = server.post_to("/v1/systemone/permute", body.to_string()).json();
        json["runs"].as_array().unwrap().iter().map(|run| run["order"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(orders(1), orders(1));
    assert_ne!(orders(1), orders(2));
    let wrong = json!({ "request": mixed(), "question": "n" });
    let refused = server.post_to("/v1/systemone/permute", wrong.to_string());
    assert_eq!(refused.status, 422);
    assert!(refused.json()["detail"].is_string());
}

#[test]
fn latency_is_there_when_switched_on() {
    let server = ServerOptions { kev_latency_ms: true, ..ServerOptions::default() };
    let server = Server::with(Setup { server, ..Setup::default() });
    let answer = server.answer(&mixed());
    let keys: Vec<&String> = answer.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["model", "answers", "usage", "latency_ms"]);
    assert!(answer["latency_ms"].is_f64());
}

/// A checker of the part of JSON Schema that the description uses.
struct Schemas(Value);

impl Schemas {
    fn check(&self, value: &Value, schema: &Value, at: &str) -> Result<(), String> {
        if let Some(reference) = schema["$ref"].as_str() {
            let schema = self.0.pointer(reference.trim_start_matches('#'));
            return self.check(value, schema.unwrap_or_else(|| panic!("{reference} is missing")), at);
        }
        if let Some(all) = schema["allOf"].as_array() {
            all.iter().try_for_each(|schema| self.check(value, schema, at))?;
        }
        if let Some(forms) = schema["oneOf"].as_array() {
            let tries: Vec<_> = forms.iter().map(|schema| self.check(value, schema, at)).collect();
            if tries.iter().filter(|result| result.is_ok()).count() != 1 {
                return Err(format!("{at}: not exactly one form: {tries:?}"));
            }
        }
        self.check_type(value, schema, at)?;
        if let Some(allowed) = schema["enum"].as_array()
            && !allowed.contains(value)
        {
            return Err(format!("{at}: {value} is none of {allowed:?}"));
        }
        let number = value.as_f64();
        if number < schema["minimum"].as_f64().filter(|_| number.is_some())
            || (schema["maximum"].is_number() && number > schema["maximum"].as_f64())
        {
            return Err(format!("{at}: {value} is out of range"));
        }
        for (index, item) in value.as_array().into_iter().flatten().enumerate() {
            if schema["items"].is_object() {
                self.check(item, &schema["items"], &format!("{at}[{index}]"))?;
            }
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        for key in schema["required"].as_array().into_iter().flatten() {
            if !object.contains_key(key.as_str().unwrap()) {
                return Err(format!("{at}: {key} is missing"));
            }
        }
        for (key, item) in object {
            let at = format!("{at}.{key}");
            match (&schema["properties"][key], &schema["additionalProperties"]) {
                (Value::Null, Value::Null) if schema["properties"].is_object() => {
                    return Err(format!("{at}: is not described"));
                }
                (Value::Null, additional @ Value::Object(_)) => self.check(item, additional, &at)?,
                (Value::Null, _) => {}
                (property, _) => self.check(item, property, &at)?,
            }
        }
        Ok(())
    }

    fn check_type(&self, value: &Value, schema: &Value, at: &str) -> Result<(), String> {
        let names: Vec<&str> = match &schema["type"] {
            Value::String(name) => vec![name],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ => return Ok(()),
        };
        let fits = |name: &&str| match *name {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("unknown type {other}"),
        };
        if names.iter().any(fits) { Ok(()) } else { Err(format!("{at}: {value} is not {names:?}")) }
    }
}

/// Method, path, headers, body and the status expected.
type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], String, u16);

#[test]
fn what_is_served_is_what_is_described() {
    let server = ServerOptions {
        api_keys: vec![ApiKey::new("sesame")].into(),
        kev_latency_ms: true,
        cached_token_details: true,
        ..ServerOptions::default()
    };
    let processor = processor::ProcessorOptions { truncate_states: true, ..Default::default() };
    let server = Server::with(Setup { server, processor, ..Setup::default() });
    let schemas = Schemas(server.get("/openapi.json").json());
    assert!(schemas.0["openapi"].as_str().unwrap().starts_with("3.1"));
    let key = ("authorization", "Bearer sesame");
    let json = ("content-type", "application/json");
    let permute = json!({ "request": mixed(), "question": "c", "n_perm": 2, "seed": 1 });
    let not_a_choice = json!({ "request": mixed(), "question": "n" });
    let text = |value: &Value| value.to_string();
    let cases: [Case<'_>; 12] = [
        ("get", "/health", &[], String::new(), 200),
        ("get", "/openapi.json", &[], String::new(), 200),
        ("get", "/v1/models", &[key], String::new(), 200),
        ("get", "/v1/models", &[], String::new(), 401),
        ("post", "/v1/systemone", &[key, json], text(&mixed()), 200),
        ("post", "/v1/systemone/separate", &[key, json], text(&mixed()), 200),
        ("post", "/v1/systemone/permute", &[key, json], text(&permute), 200),
        ("post", "/v1/systemone/permute", &[key, json], text(&not_a_choice), 422),
        ("post", "/v1/systemone", &[key, json], "{".to_owned(), 422),
        ("post", "/v1/systemone", &[key, json], "{}".to_owned(), 422),
        ("post", "/v1/systemone", &[key, json], "[".repeat(2000), 400),
        ("post", "/v1/systemone", &[key, ("content-type", "multipart/mixed")], "x".to_owned(), 415),
    ];
    for (method, path, headers, body, status) in cases {
        let response = server.request(&method.to_uppercase(), path, headers, body.as_bytes());
        assert_eq!(response.status, status, "{method} {path}: {}", response.text());
        let described = &schemas.0["paths"][path][method]["responses"][status.to_string()];
        assert!(described.is_object(), "{method} {path} {status} is not described");
        let schema = &described["content"]["application/json"]["schema"];
        schemas.check(&response.json(), schema, path).unwrap();
        for header in described["headers"].as_object().into_iter().flat_map(serde_json::Map::keys) {
            assert!(response.header(header).is_some(), "{path}: {header}");
        }
    }
    // Requests too.
    let request = |path: &str| {
        schemas.0["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].clone()
    };
    schemas.check(&mixed(), &request("/v1/systemone"), "request").unwrap();
    schemas.check(&permute, &request("/v1/systemone/permute"), "request").unwrap();
    assert!(schemas.check(&json!({ "state": 1 }), &request("/v1/systemone"), "request").is_err());
}

#[test]
fn without_a_key_none_is_described() {
    let document = Server::new().get("/openapi.json").text();
    assert!(!document.contains("401") && !document.contains("securitySchemes"));
    assert!(document.contains("\"500\"") && document.contains("\"503\""));
}
