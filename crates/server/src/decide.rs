//! Owns the one path of every request that the model answers: read → admit → prepare → submit → finish. The whole request
//! is validated and tokenised before anything is queued, and it is answered whole or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::Response;
use decision::{Tree, Usage};
use processor::{Finished, Prepared, ResponseContext};
use scheduler::Permit;

use crate::body::{self, Encoding};
use crate::error::ApiError;
use crate::observe::{Arrival, RequestSpan, Stages};
use crate::permute;
use crate::service::{App, ServerOptions};
use crate::wire::{self, Answered};

/// Which question is put to the model, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// All questions over one state.
    Systemone,
    /// Each question with a state of its own.
    Separate,
    /// One choice under several orders.
    Permute,
}

/// Answers a request.
pub(crate) async fn answer(
    app: Arc<App>,
    endpoint: Endpoint,
    mut request: Request,
) -> Result<Response, ApiError> {
    let span = request.extensions_mut().remove::<RequestSpan>();
    let arrival = request.extensions().get::<Arrival>().map_or_else(Instant::now, |arrival| arrival.0);
    let patience = patience(request.headers(), &app.options)?;
    let deadline = deadline(arrival, patience);
    let encoding = body::inspect(request.headers())?;
    // A full or stopping worker says so before it reads anything.
    app.service.scheduler.check()?;
    let answer = decide(&app, endpoint, encoding, request.into_body(), deadline, span);
    tokio::time::timeout_at(deadline.into(), answer).await.map_err(|_| ApiError::Deadline)?
}

/// The header by which a request shortens or lengthens its own deadline.
pub(crate) const REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout-ms");

/// How long a request may take: what it asks for up to what this deployment allows, or what this deployment gives.
fn patience(headers: &HeaderMap, options: &ServerOptions) -> Result<Duration, ApiError> {
    let mut values = headers.get_all(REQUEST_TIMEOUT).iter();
    let Some(value) = values.next() else { return Ok(options.deadline) };
    let digits = value.as_bytes();
    let number = values.next().is_none() && !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    if !number || digits.iter().all(|digit| *digit == b'0') {
        return Err(ApiError::RequestTimeout);
    }
    // A number that no integer holds is over every limit.
    let asked = value.to_str().ok().and_then(|digits| digits.parse().ok()).unwrap_or(u64::MAX);
    Ok(Duration::from_millis(asked).min(options.max_deadline))
}

fn deadline(arrival: Instant, patience: Duration) -> Instant {
    // Patience beyond what the clock can say is a day.
    arrival.checked_add(patience).unwrap_or(arrival + Duration::from_secs(86_400))
}

async fn decide(
    app: &Arc<App>,
    endpoint: Endpoint,
    encoding: Encoding,
    body: Body,
    deadline: Instant,
    span: Option<RequestSpan>,
) -> Result<Response, ApiError> {
    let limit = app.options.max_body_bytes;
    let held = body::read(body, limit, &app.body_memory, deadline).await?;
    let permit = app.service.scheduler.admit()?;
    let started = Instant::now();
    let shared = Arc::clone(app);
    let prepared = app.pool.run(move || {
        let work = prepare(&shared, endpoint, encoding, held.bytes, limit);
        (permit, work)
    });
    // A panic takes the permit and the body with it.
    let (permit, work) = prepared.await.map_err(|_| ApiError::Internal)?;
    let Work { trees, context, questions, input_tokens } = work?;
    if let Some(span) = span {
        span.prepared(questions, input_tokens);
    }
    let prepare = started.elapsed();
    let computed = compute(permit, trees, deadline).await?;
    let started = Instant::now();
    let shared = Arc::clone(app);
    let Computed { queue, model, .. } = computed;
    let finished = app.pool.run(move || {
        let text = finish(&shared, endpoint, &context, input_tokens, &computed);
        drop(computed);
        text
    });
    let text = finished.await.map_err(|_| ApiError::Internal)??;
    let mut response = wire::json(StatusCode::OK, text);
    response.extensions_mut().insert(Stages { queue, prepare, model, finish: started.elapsed() });
    Ok(response)
}

/// A request as the model will read it.
struct Work {
    trees: Vec<Tree>,
    context: ResponseContext,
    questions: usize,
    /// Tokens of all trees: what `usage` says.
    input_tokens: usize,
}

fn prepare(
    app: &App,
    endpoint: Endpoint,
    encoding: Encoding,
    bytes: Vec<u8>,
    limit: usize,
) -> Result<Work, ApiError> {
    let bytes = match encoding {
        Encoding::Identity => bytes,
        compressed => body::decode(&bytes, compressed, limit)?,
    };
    let request = match endpoint {
        Endpoint::Systemone | Endpoint::Separate => processor::parse_request(&bytes)?,
        Endpoint::Permute => permute::parse(&bytes)?,
    };
    drop(bytes);
    if app.options.strict_models && !app.service.models.iter().any(|card| card.name == request.model) {
        return Err(ApiError::UnknownModel);
    }
    let Prepared { tree, context, .. } = app.service.processor.prepare(&request)?;
    let questions = request.questions.len();
    let trees = match endpoint {
        Endpoint::Systemone | Endpoint::Permute => vec![tree],
        Endpoint::Separate => alone(tree),
    };
    let input_tokens = trees.iter().map(Tree::input_tokens).sum();
    Ok(Work { trees, context, questions, input_tokens })
}

/// One tree per question.
fn alone(tree: Tree) -> Vec<Tree> {
    let Tree { state, branches } = tree;
    branches.into_iter().map(|branch| Tree { state: Arc::clone(&state), branches: vec![branch] }).collect()
}

/// What came back for all trees of a request.
struct Computed {
    logits: Vec<Vec<f32>>,
    cached_tokens: usize,
    queue: Duration,
    model: Duration,
    /// Kept until the answer is made.
    _permit: Permit,
}

/// Runs the trees one after the other under one permit.
async fn compute(mut permit: Permit, trees: Vec<Tree>, deadline: Instant) -> Result<Computed, ApiError> {
    // All or nothing: the largest must fit before the first runs.
    permit.reserve(trees.iter().map(Tree::input_tokens).max().unwrap_or(0))?;
    let mut all = Computed {
        logits: Vec::with_capacity(trees.len()),
        cached_tokens: 0,
        queue: Duration::ZERO,
        model: Duration::ZERO,
        _permit: permit,
    };
    for tree in trees {
        let Computed { mut logits, cached_tokens, queue, model, _permit: permit } = all;
        let outcome = permit.submit(tree, deadline).await?;
        logits.extend(outcome.logits);
        all = Computed {
            logits,
            cached_tokens: cached_tokens + outcome.cached_tokens,
            queue: queue + outcome.timings.queue,
            model: model + outcome.timings.model,
            _permit: outcome.permit,
        };
    }
    Ok(all)
}

fn finish(
    app: &App,
    endpoint: Endpoint,
    context: &ResponseContext,
    input_tokens: usize,
    computed: &Computed,
) -> Result<String, ApiError> {
    let processor = &app.service.processor;
    let Finished { answers, usage, probabilities } =
        processor.finish(context, &computed.logits).map_err(defect)?;
    let output_tokens = match endpoint {
        Endpoint::Permute => return Ok(permute::text(&answers, &probabilities, computed.model)),
        Endpoint::Systemone => usage.output_tokens,
        // Each question's answers on their own.
        Endpoint::Separate => answers
            .iter()
            .map(|answer| processor.output_tokens(&vec![answer.clone()]))
            .sum::<Result<usize, _>>()
            .map_err(defect)?,
    };
    let ServerOptions { kev_latency_ms, cached_token_details, .. } = app.options;
    let answered = Answered {
        model: &context.model,
        answers: &answers,
        usage: Usage { input_tokens, output_tokens },
        cached_tokens: cached_token_details.then_some(computed.cached_tokens),
        state_tokens: processor.options().truncate_states.then_some(context.state_tokens),
        latency: kev_latency_ms.then_some(computed.model),
    };
    Ok(answered.text())
}

fn defect(error: processor::FinishError) -> ApiError {
    tracing::error!(%error, "an answer could not be made");
    ApiError::Internal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_its_patience_up_to_the_limit() {
        let options = ServerOptions {
            deadline: Duration::from_millis(100),
            max_deadline: Duration::from_millis(5_000),
            ..ServerOptions::default()
        };
        let asked = |values: &[&[u8]]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(REQUEST_TIMEOUT, axum::http::HeaderValue::from_bytes(value).unwrap());
            }
            patience(&headers, &options).map(|patience| patience.as_millis())
        };
        assert_eq!(asked(&[]), Ok(100));
        for (value, ms) in [
            ("1", 1),
            ("0250", 250),
            ("5000", 5_000),
            ("5001", 5_000),
            ("18446744073709551615", 5_000),
            ("99999999999999999999999999", 5_000),
        ] {
            assert_eq!(asked(&[value.as_bytes()]), Ok(ms), "{value}");
        }
        for bad in ["", "0", "000", "-1", "+1", "1.5", "1e3", "10ms", "1 000", "1,2", "0x10", "\u{662}"] {
            assert_eq!(asked(&[bad.as_bytes()]), Err(ApiError::RequestTimeout), "{bad:?}");
        }
        assert_eq!(asked(&[b"10", b"10"]), Err(ApiError::RequestTimeout));
    }
}
