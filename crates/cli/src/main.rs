//! The `omni-kev` command: arguments in, exit codes out. Each command is a module of its own.
//!
//! Exit codes: 0 done, 1 a check said no, 2 refused or bad input, 3 internal error, 70 the served model failed, 130 a second
//! stop signal.

mod accept;
mod bench;
mod capture;
mod corpus;
mod decide;
mod demo;
mod engine;
mod export;
mod hangup;
mod http_bench;
mod keys;
#[cfg(feature = "otlp")]
mod otlp;
mod progress;
mod qualification;
mod serve;
mod synth;
mod tokens;
mod trace;
mod verify;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use server::ServeError;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

/// A native worker for Kev decision models.
#[derive(Parser)]
#[command(name = "omni-kev", version)]
struct Cli {
    /// How much is written to standard error; info has a line for every request
    #[arg(long, env = "OMNI_KEV_LOG_LEVEL", value_enum, default_value = "warn", global = true)]
    log_level: LogLevel,
    /// As text or as JSON lines
    #[arg(long, env = "OMNI_KEV_LOG_FORMAT", value_enum, default_value = "text", global = true)]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make, export, verify and serve a small random checkpoint, and show three requests
    Demo(demo::Arguments),
    /// Write a checkpoint of random weights
    Synth(synth::Arguments),
    /// Merge a Kev checkpoint into a hash-pinned export
    Export(export::Arguments),
    /// Check an export against its manifest: every byte, every tensor, the tokenizer
    Verify(verify::Arguments),
    /// Print what the model reads of a request, as JSON
    Tokens(tokens::Arguments),
    /// Answer one request and print the response body
    Decide(decide::Arguments),
    /// Serve an export over HTTP on the CPU
    Serve(serve::Arguments),
    /// Record unrounded outputs for a corpus of requests
    Capture(capture::Arguments),
    /// Write requests for captures of synthetic checkpoints
    Corpus(corpus::Arguments),
    /// Measure model times of fixed workloads
    Bench(bench::Arguments),
    /// Judge a capture against a reference's, gate by gate
    Accept(accept::Arguments),
    /// Run the acceptance corpus on this machine and record the verdict for its configuration
    Qualify(qualification::Arguments),
    /// Compare profile service with a trace of the reference, layer by layer
    Trace(trace::Arguments),
}

/// How much is logged.
#[derive(Clone, Copy, clap::ValueEnum)]
enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

/// In which form.
#[derive(Clone, Copy, clap::ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// What events and spans go through.
type Sink = Box<dyn Layer<Registry> + Send + Sync>;

/// Sends events to standard error, which never hold text of a caller, and whatever else wants them where it wants.
fn log(level: LogLevel, format: LogFormat, more: Option<Sink>) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let text = match format {
        LogFormat::Text => text.with_filter(level).boxed(),
        LogFormat::Json => text.json().with_filter(level).boxed(),
    };
    let sinks: Vec<Sink> = more.into_iter().chain([text]).collect();
    tracing_subscriber::registry().with(sinks).init();
}

/// A check that ran and said no.
#[derive(Debug)]
struct Denied(String);

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Denied {}

/// An error that is not the caller's to fix.
#[derive(Debug)]
struct Internal(String);

impl std::fmt::Display for Internal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "internal error: {}", self.0)
    }
}

impl std::error::Error for Internal {}

/// An error with its causes, each once: errors of this program quote the system's reason themselves.
fn described(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match report_and_run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("omni-kev: {}", described(&error));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Runs with the log, and with traces where they are wanted, which get their last spans however the command ends.
#[cfg(feature = "otlp")]
fn report_and_run(cli: &Cli) -> anyhow::Result<()> {
    let endpoint = match &cli.command {
        Command::Serve(arguments) => arguments.otlp_endpoint.as_ref(),
        _ => None,
    };
    let traces = endpoint.map(otlp::Traces::start).transpose()?;
    log(cli.log_level, cli.log_format, traces.as_ref().map(otlp::Traces::layer));
    let result = run(&cli.command);
    if let Some(traces) = traces {
        traces.flush();
    }
    result
}

/// Runs with the log.
#[cfg(not(feature = "otlp"))]
fn report_and_run(cli: &Cli) -> anyhow::Result<()> {
    log(cli.log_level, cli.log_format, None);
    run(&cli.command)
}

fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Demo(arguments) => demo::run(arguments),
        Command::Synth(arguments) => synth::run(arguments),
        Command::Export(arguments) => export::run(arguments),
        Command::Verify(arguments) => verify::run(arguments),
        Command::Tokens(arguments) => tokens::run(arguments),
        Command::Decide(arguments) => decide::run(arguments),
        Command::Serve(arguments) => serve::run(arguments),
        Command::Capture(arguments) => capture::run(arguments),
        Command::Corpus(arguments) => corpus::run(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::Accept(arguments) => accept::run(arguments),
        Command::Qualify(arguments) => qualification::run(arguments),
        Command::Trace(arguments) => trace::run(arguments),
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref() {
        // What sysexits calls an internal software error; supervisors restart on it.
        Some(ServeError::Retired { .. }) => 70,
        _ if error.is::<Internal>() => 3,
        _ if error.is::<Denied>() => 1,
        _ => 2,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A failure here is a failed test.
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn a_reason_is_said_once() {
        let cause = std::io::Error::other("gone");
        let path = std::path::PathBuf::from("x");
        let error = artifact::ArtifactError::Io { path, action: "read", source: cause };
        assert_eq!(
            described(&anyhow::Error::from(error).context("INVALID")),
            "INVALID: x: cannot read: gone"
        );
        assert_eq!(described(&anyhow::anyhow!("a").context("b")), "b: a");
    }

    #[test]
    fn errors_have_their_exit_codes() {
        let retired = ServeError::Retired { reason: "device".into() };
        let cases = [
            (anyhow::Error::from(retired).context("the server failed"), 70),
            (anyhow::Error::from(ServeError::Connections { left: 1 }).context("the server failed"), 2),
            (Internal("x".to_owned()).into(), 3),
            (Denied("x".to_owned()).into(), 1),
            (anyhow::anyhow!("x"), 2),
        ];
        for (error, code) in cases {
            assert_eq!(exit_code(&error), code, "{error:#}");
        }
    }

    #[test]
    fn every_option_has_an_environment_variable_and_help() {
        let mut options = 0;
        for command in Cli::command().get_subcommands() {
            for option in command.get_arguments().filter(|option| option.get_long().is_some()) {
                let name = format!("{} --{}", command.get_name(), option.get_long().unwrap_or(""));
                let variable = option.get_env().and_then(|name| name.to_str()).unwrap_or("");
                assert!(variable.starts_with("OMNI_KEV_"), "{name}: environment variable {variable:?}");
                assert!(option.get_help().is_some(), "{name}: no help");
                options += 1;
            }
        }
        assert!(options > 50, "{options}");
    }

    const OPERATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md");
    const BEGIN: &str = "<!-- options of serve: written by UPDATE_DOCS=1 cargo test -p omni-kev -->\n";
    const END: &str = "<!-- end of options -->\n";

    /// A row for each option of `serve`.
    fn options() -> String {
        let mut table = "| option | default | meaning |\n|---|---|---|\n".to_owned();
        let mut cli = Cli::command();
        cli.build();
        let serve = cli.find_subcommand("serve").unwrap();
        let mut rows: Vec<String> = serve
            .get_arguments()
            // What a feature adds has a section of its own.
            .filter(|option| option.get_env().is_some() && option.get_long() != Some("otlp-endpoint"))
            .map(|option| {
                let name = option.get_long().unwrap_or_default();
                let defaults: Vec<&str> =
                    option.get_default_values().iter().filter_map(|value| value.to_str()).collect();
                let default = match (option.get_action().takes_values(), &defaults[..]) {
                    (true, [value, ..]) => format!("`{value}`"),
                    (true, []) => String::new(),
                    (false, _) => "off".to_owned(),
                };
                let help = option.get_help().map(ToString::to_string).unwrap_or_default();
                format!("| `--{name}` | {default} | {help} |\n")
            })
            .collect();
        rows.sort();
        table.extend(rows);
        table
    }

    #[test]
    fn the_operations_page_has_every_option_of_serve() {
        let page = std::fs::read_to_string(OPERATIONS).unwrap();
        let (before, rest) = page.split_once(BEGIN).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        let expected = format!("{before}{BEGIN}{}{END}{after}", options());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(OPERATIONS, &expected).unwrap();
        } else {
            assert!(page == expected, "docs/operations.md: run UPDATE_DOCS=1 cargo test -p omni-kev");
        }
    }
}
