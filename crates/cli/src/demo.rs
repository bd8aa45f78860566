//! Owns `omni-kev demo`: everything at once, with nothing but the binary. A small random checkpoint is made, exported,
//! verified and served, and three requests show what the protocol looks like.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use artifact::synth::{Preset, synthesize};
use artifact::{ExportOptions, Silent, export};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::Internal;
use crate::worker::{Worker, WorkerArguments, stop_signal};

/// Arguments of `demo`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Address to listen on
    #[arg(long, env = "OMNI_KEV_HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, env = "OMNI_KEV_PORT", default_value_t = 8009)]
    port: u16,
    /// Stop after the three requests instead of serving on
    #[arg(long, env = "OMNI_KEV_ONCE")]
    once: bool,
    /// The API key in the three requests, where --api-key-file asks for one
    #[arg(long, env = "OMNI_KEV_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    #[command(flatten)]
    worker: WorkerArguments,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let folder =
        tempfile::Builder::new().prefix("omni-kev-demo-").tempdir().context("cannot make a directory")?;
    let export = exported(folder.path())?;
    let worker = Worker::start(&export, &arguments.worker.clone().demonstration())?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    let (listening, address) = oneshot::channel();
    let served = runtime.block_on(async {
        let key = arguments.api_key.clone();
        let once = arguments.once;
        // The requests come from a thread of their own over the same socket that any client uses.
        let (end, ended) = oneshot::channel();
        let client = async move {
            let Ok(address) = address.await else { return Ok(()) };
            let shown = tokio::task::spawn_blocking(move || show(address, key.as_deref())).await;
            let shown = shown.map_err(anyhow::Error::from).and_then(|shown| shown);
            if once || shown.is_err() {
                let _ = end.send(());
            } else {
                // Dropped without a word, `end` stops nothing.
                println!("serving on: stop with Ctrl-C");
            }
            shown
        };
        let signalled = stop_signal()?;
        let stop = async {
            tokio::select! {
                () = signalled => {}
                Ok(()) = ended => {}
            }
        };
        let listening = |address| {
            let _ = listening.send(address);
        };
        let (served, shown) = tokio::join!(
            worker.ending_with_terminal().listen(&arguments.host, arguments.port, listening, stop),
            client
        );
        served.and(shown)
    });
    drop(folder);
    served
}

/// A synthetic checkpoint, exported; the worker verifies it like any other.
fn exported(folder: &Path) -> Result<std::path::PathBuf> {
    let started = Instant::now();
    let checkpoint = folder.join("checkpoint");
    let made = synthesize(&Preset::Tiny.recipe(), 0, &checkpoint, &Silent)?;
    let options = ExportOptions {
        adapter: checkpoint.join("adapter"),
        base: checkpoint.join("base"),
        out: folder.join("export"),
        pins: None,
        exact_companion: true,
        commit: option_env!("OMNI_KEV_COMMIT").map(str::to_owned),
    };
    let summary = export(&options, &Silent)?;
    eprintln!(
        "made a random checkpoint of {:.1} MB and exported it: {} modules merged, {} files hashed, {:.1} s",
        made.bytes as f64 / 1e6,
        summary.manifest.lora.modules,
        summary.manifest.files.len() + 2,
        started.elapsed().as_secs_f64()
    );
    Ok(options.out)
}

/// Sends the three requests and prints them with their answers.
fn show(address: SocketAddr, key: Option<&str>) -> Result<()> {
    // A server on every address is reached on this machine's own.
    let host = if address.ip().is_unspecified() { "127.0.0.1".to_owned() } else { address.ip().to_string() };
    let host = if address.is_ipv6() && !address.ip().is_unspecified() { format!("[{host}]") } else { host };
    let url = format!("http://{host}:{}/v1/systemone", address.port());
    let mut last = (Value::Null, Value::Null);
    let steps = [
        ("1. A ticket, three kinds of question", ticket()),
        ("2. A document, five questions", document()),
        ("3. The same document again: now its state comes from the cache", document()),
    ];
    for (title, request) in steps {
        println!("\n{title}\n\nPOST {url}");
        if request == last.0 {
            println!("(the same body)");
        } else {
            println!("{request:#}");
        }
        let (answer, timing) = post(&url, key, &request)?;
        if request != last.0 {
            println!("\n{answer:#}");
        } else if answer["answers"] == last.1["answers"] {
            println!("\n(the same answers, bit for bit)");
        } else {
            return Err(Internal("the cached document was answered otherwise".to_owned()).into());
        }
        println!("\n{timing}");
        last = (request, answer);
    }
    println!("\nThese weights are random: the answers show the protocol and mean nothing.");
    Ok(())
}

fn post(url: &str, key: Option<&str>, request: &Value) -> Result<(Value, String)> {
    let fail = |reason: String| Internal(format!("POST {url}: {reason}"));
    let config = ureq::Agent::config_builder().http_status_as_error(false).build();
    let mut call = ureq::Agent::new_with_config(config).post(url).content_type("application/json");
    if let Some(key) = key {
        call = call.header("authorization", format!("Bearer {key}"));
    }
    let mut response = call.send(request.to_string()).map_err(|error| fail(error.to_string()))?;
    let text = response.body_mut().read_to_string().map_err(|error| fail(error.to_string()))?;
    if response.status() == 401 {
        anyhow::bail!("--api-key-file asks for a key: give the demo's own requests one with --api-key");
    }
    if response.status() != 200 {
        return Err(fail(format!("{}: {text}", response.status())).into());
    }
    let timing = response.headers().get("server-timing").and_then(|value| value.to_str().ok()).unwrap_or("");
    let answer = serde_json::from_str(&text).map_err(|error| fail(error.to_string()))?;
    Ok((answer, format!("server-timing: {timing}")))
}

fn ticket() -> Value {
    json!({
        "state": {
            "ticket": "I was charged twice for order 4411. Please refund one of the payments.",
            "customer": { "since": 2019, "orders": 12 },
        },
        "questions": {
            "team": {
                "type": "choice",
                "instructions": "Which team should answer?",
                "criteria": {
                    "billing": "payments, invoices and refunds",
                    "shipping": "late, lost or damaged packages",
                    "account": "login and password",
                },
            },
            "refund": {
                "type": "noul",
                "instructions": "Does the customer want money back?",
                "criteria": { "true": "asks for a refund", "false": "does not" },
            },
            "urgency": {
                "type": "score",
                "instructions": "How urgent is it?",
                "criteria": ["can wait", "this week", "today", "now"],
            },
        },
    })
}

fn document() -> Value {
    let clause = "The agreement is renewed for twelve months unless one of the parties gives notice in writing at \
                  least sixty days before the end of the term. ";
    json!({
        "state": {
            "title": "Supply agreement",
            "text": format!("{}Either party may end it at once when the other is late with a payment by more than \
                             thirty days.", clause.repeat(4)),
            "signed": "2024-03-01",
        },
        "questions": {
            "renews": { "type": "noul", "instructions": "Is it renewed without anybody doing anything?" },
            "kind": {
                "type": "choice",
                "instructions": "What is it?",
                "criteria": { "contract": null, "invoice": null, "letter": null, "other": null },
            },
            "notice": {
                "type": "choice",
                "instructions": "How long before the end must notice be given?",
                "criteria": { "30 days": null, "60 days": null, "90 days": null },
            },
            "risk": {
                "type": "score",
                "instructions": "How much could the buyer lose?",
                "criteria": ["nothing", "a little", "much"],
            },
            "late": { "type": "noul", "instructions": "May it be ended for late payment?" },
        },
    })
}
