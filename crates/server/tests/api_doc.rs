//! docs/api.md is generated from the OpenAPI description: this test fails when they differ. `UPDATE_DOCS=1` writes it.
#![allow(clippy::unwrap_used, clippy::panic)] // A failure here is a failed test.

mod support;

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;
use support::Server;

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or("")
}

/// The name of a schema, its alternatives, or its type.
fn type_name(schema: &Value) -> String {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let name = reference.rsplit('/').next().unwrap_or(reference);
        return format!("[{name}](#{})", name.to_lowercase());
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        if let Some(options) = schema.get(key).and_then(Value::as_array) {
            return options.iter().map(type_name).collect::<Vec<_>>().join(" or ");
        }
    }
    if let Some(items) = schema.get("items") {
        return format!("array of {}", type_name(items));
    }
    if let Some(values) = schema.get("additionalProperties").filter(|values| values.is_object()) {
        return format!("object of {}", type_name(values));
    }
    match schema.get("type") {
        Some(Value::String(name)) => name.clone(),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
        _ => "any".to_owned(),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn rendered(api: &Value) -> String {
    let mut out = String::from(
        "# API\n\nGenerated from `/openapi.json` by `crates/server/tests/api_doc.rs`; do not edit. What requests mean is in the\n\
         protocol; limits and their options are in `omni-kev serve --help`.\n",
    );
    for (path, methods) in api["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            write!(out, "\n## {} {path}\n\n", method.to_uppercase()).unwrap();
            for key in ["summary", "description"] {
                if !text(operation, key).is_empty() {
                    write!(out, "{}\n\n", text(operation, key)).unwrap();
                }
            }
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let (name, place) = (text(parameter, "name"), text(parameter, "in"));
                let kind = type_name(&parameter["schema"]);
                write!(out, "Optional {place} `{name}`, {kind}: {}\n\n", text(parameter, "description"))
                    .unwrap();
            }
            if let Some(body) = operation.pointer("/requestBody/content/application~1json/schema") {
                write!(out, "Body: {}\n\n", type_name(body)).unwrap();
            }
            out.push_str("| status | meaning |\n|---|---|\n");
            for (status, response) in operation["responses"].as_object().unwrap() {
                writeln!(out, "| {status} | {} |", cell(text(response, "description"))).unwrap();
            }
        }
    }
    out.push_str("\n## Types\n");
    for (name, schema) in api.pointer("/components/schemas").and_then(Value::as_object).unwrap() {
        write!(out, "\n### {name}\n\n").unwrap();
        if !text(schema, "description").is_empty() {
            write!(out, "{}\n\n", text(schema, "description")).unwrap();
        }
        let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
            writeln!(out, "{}", type_name(schema)).unwrap();
            continue;
        };
        let required = schema.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
        out.push_str("| field | type | |\n|---|---|---|\n");
        for (field, property) in properties {
            let needed = if required.iter().any(|name| name == field) { "" } else { "optional. " };
            writeln!(
                out,
                "| `{field}` | {} | {needed}{} |",
                cell(&type_name(property)),
                cell(text(property, "description"))
            )
            .unwrap();
        }
    }
    out
}

#[test]
fn the_page_is_that_of_the_description() {
    let api = Server::new().get("/openapi.json").json();
    let page = rendered(&api);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "docs/api.md is stale: run this test with UPDATE_DOCS=1");
}
