//! Owns traces: which spans go to an OpenTelemetry collector, how, and what a caller may say of them. A collector that is
//! slow or gone costs spans, never a request.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use opentelemetry::KeyValue;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::SdkTracerProvider;
use server::{SPAN_TARGET, SpanParent};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::{Layer, Registry};
use ureq::http::{HeaderMap, Uri};

/// How long one export may take, with its repetitions.
const EXPORT: Duration = Duration::from_secs(3);
/// How long the end of the process waits for the last spans.
const FLUSH: Duration = Duration::from_secs(5);
/// Longest answer of a collector that is read.
const MAX_ANSWER_BYTES: u64 = 64 << 10;
/// Where a collector takes traces.
const TRACES: &str = "/v1/traces";

/// Where spans go: a collector's address with the path for traces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint(String);

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| format!("expected http://host[:port][/path], found {what}");
        let uri: Uri = text.parse().map_err(|error| wrong(&format!("no URL: {error}")))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(scheme) => return Err(wrong(&format!("the scheme {scheme}"))),
            None => return Err(wrong("no scheme")),
        }
        let authority = uri.authority().ok_or_else(|| wrong("no host"))?;
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(wrong("no host, or a user before it"));
        }
        // `Uri` takes any digits for a port and answers none when it is no number.
        if authority.as_str().len() > authority.host().len()
            && authority.port_u16().is_none_or(|port| port == 0)
        {
            return Err(wrong("a port that is none"));
        }
        // A fragment would be dropped without a word.
        if uri.query().is_some() || text.contains('#') {
            return Err(wrong("a query or a fragment"));
        }
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix(TRACES).unwrap_or(path);
        Ok(Self(format!("http://{authority}{path}{TRACES}")))
    }
}

/// The spans of this process on their way to a collector.
pub(crate) struct Traces(SdkTracerProvider);

impl Traces {
    /// Starts the thread that sends them.
    pub(crate) fn start(endpoint: &Endpoint) -> Result<Self> {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Collector::new())
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&endpoint.0)
            .with_timeout(EXPORT)
            .build()
            .context("--otlp-endpoint")?;
        let resource = Resource::builder_empty()
            .with_attribute(KeyValue::new("service.name", "omni-kev"))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            // After ours, so that a deployment's own names win.
            .with_detector(Box::new(EnvResourceDetector::new()))
            .build();
        Ok(Self(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build()))
    }

    /// What turns the spans of requests, and nothing else, into those of traces.
    pub(crate) fn layer(&self) -> Box<dyn Layer<Registry> + Send + Sync> {
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer("omni-kev"))
            .with_location(false)
            .with_target(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_target(SPAN_TARGET, LevelFilter::TRACE))
            .boxed()
    }

    /// Sends what is left, for a bounded time.
    pub(crate) fn flush(self) {
        if let Err(error) = self.0.shutdown_with_timeout(FLUSH) {
            tracing::warn!(%error, "the last spans could not all be sent");
        }
    }
}

/// Makes a caller's span the parent of a request's.
pub(crate) fn span_parent() -> SpanParent {
    let propagator = TraceContextPropagator::new();
    SpanParent::new(move |headers, span| {
        let Some(header) = traceparent(headers) else { return };
        // Without the layer there is no span that could have a parent.
        let _ = span.set_parent(propagator.extract(&Traceparent(header)));
    })
}

/// The one `traceparent` of a request, if it has the form that W3C gives it. The propagator judges the rest.
fn traceparent(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all("traceparent").iter();
    let value = values.next()?.to_str().ok()?;
    let form = value.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-'));
    // Later versions may say more after a dash.
    let length = value.len() == 55 || (value.len() > 55 && !value.starts_with("00"));
    (values.next().is_none() && form && length).then_some(value)
}

/// Shows the propagator the parent only: `tracestate` is the caller's text, and this worker calls nobody who would need it.
struct Traceparent<'a>(&'a str);

impl Extractor for Traceparent<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == "traceparent").then_some(self.0)
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent"]
    }
}

/// The HTTP client of the exporter's thread, which may block.
#[derive(Debug)]
struct Collector {
    agent: ureq::Agent,
    /// Whether the last batch was taken: only changes are logged.
    reached: AtomicBool,
}

impl Collector {
    fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // The collector is beside the worker; proxies of the environment are for what is far.
            .proxy(None)
            .timeout_global(Some(EXPORT))
            .build();
        Self { agent: ureq::Agent::new_with_config(config), reached: AtomicBool::new(true) }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ureq::Error> {
        let (parts, body) = request.into_parts();
        let response = self.agent.run(Request::from_parts(parts, &body[..]))?;
        let (parts, mut body) = response.into_parts();
        let bytes = body.with_config().limit(MAX_ANSWER_BYTES).read_to_vec()?;
        Ok(Response::from_parts(parts, bytes.into()))
    }

    fn report(&self, sent: &Result<Response<Bytes>, ureq::Error>) {
        let taken = sent.as_ref().is_ok_and(|response| response.status().is_success());
        if self.reached.swap(taken, Ordering::Relaxed) == taken {
            return;
        }
        match sent {
            Ok(_) if taken => tracing::info!("the collector takes spans again"),
            Ok(response) => {
                tracing::warn!(status = response.status().as_u16(), "the collector does not take spans");
            }
            Err(error) => tracing::warn!(%error, "the collector cannot be reached; spans are lost"),
        }
    }
}

#[async_trait::async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = self.send(request);
        self.report(&sent);
        Ok(sent?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_plain_http_and_end_where_traces_are_taken() {
        for (text, url) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://collector/", "http://collector/v1/traces"),
            ("http://[::1]:4318/otlp/", "http://[::1]:4318/otlp/v1/traces"),
            ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ] {
            assert_eq!(text.parse(), Ok(Endpoint(url.to_owned())), "{text}");
        }
        for bad in [
            "",
            "collector:4318",
            "/v1/traces",
            "https://collector:4318",
            "grpc://collector:4317",
            "http://",
            "http://:4318",
            "http://user:word@collector",
            "http://collector:0",
            "http://collector:99999",
            "http://collector:",
            "http://collector?x=1",
            "http://collector/#x",
            "http://col lector",
        ] {
            let refused = bad.parse::<Endpoint>();
            assert!(refused.as_ref().is_err_and(|error| error.contains("http://host")), "{bad}: {refused:?}");
        }
    }

    #[test]
    fn one_parent_of_the_right_form_is_taken() {
        use opentelemetry::trace::TraceContextExt;
        let parent = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append("traceparent", value.parse().unwrap());
            }
            headers.insert("tracestate", "vendor=text".parse().unwrap());
            let extract = |header| TraceContextPropagator::new().extract(&Traceparent(header));
            let context = traceparent(&headers).map(extract)?;
            let span = context.span().span_context().clone();
            assert!(span.trace_state().header().is_empty());
            span.is_valid().then(|| span.trace_id().to_string())
        };
        let (id, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let good = format!("00-{id}-{span}-01");
        assert_eq!(parent(&[&good]).as_deref(), Some(id));
        assert_eq!(parent(&[&format!("01-{id}-{span}-01-later")]), None);
        assert_eq!(parent(&[&format!("01-{id}-{span}-01-0a")]).as_deref(), Some(id));
        assert_eq!(parent(&[&good, &good]), None);
        for bad in [
            String::new(),
            good.replace("0af", "0AF"),
            format!("{good}-"),
            format!("{good}-0a"),
            format!("ff-{id}-{span}-01"),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{id}-{}-01", "0".repeat(16)),
            format!("00-{id}-{span}-+1"),
            format!("00-{id}-{span}-1"),
        ] {
            assert_eq!(parent(&[&bad]), None, "{bad}");
        }
    }
}
