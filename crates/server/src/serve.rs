//! Owns connections: accepting them, how many, how long they may be silent, and how they end.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use scheduler::{DrainTimeout, Refusal};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use crate::body::{LingerLimits, Lingering};
use crate::error::ApiError;
use crate::observe;
use crate::routes;
use crate::service::{App, ServerOptions, Service};
use crate::socket::{Activity, Patient, Working};
use crate::tls::Tls;

/// Longest request line and headers.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Connections over the limit that are told so at once; more are closed without a word.
const MAX_REFUSALS: usize = 64;
/// How long an unread body is read on, so that its sender sees the answer.
const LINGER: Duration = Duration::from_secs(5);
/// How long a connection over the limit may take to be told so, with its TLS handshake.
const REFUSAL: Duration = Duration::from_secs(1);
/// How often a server that ends with its model looks whether it lives.
const LOOK: Duration = Duration::from_millis(100);
/// How long to wait when the system has no socket left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why a server ended other than by finishing everything after its signal.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A fixed body could not be made.
    #[error("cannot write the model list or the description: {0}")]
    Json(#[from] serde_json::Error),
    /// Connections were still busy when the time to drain was over.
    #[error("{left} connections were still busy when the time to finish them was over")]
    Connections {
        /// Connections cut off.
        left: usize,
    },
    /// Requests were still inside when the time to drain was over.
    #[error(transparent)]
    Requests(#[from] DrainTimeout),
    /// The model failed, and the server was to end with it.
    #[error("the model is retired: {reason}")]
    Retired {
        /// What failed.
        reason: Arc<str>,
    },
}

/// Serves until `shutdown` completes, then finishes what is in work: no new connection, no new request on an old one, and
/// every request in work gets its answer. Ends the scheduler. With [`ServerOptions::exit_on_failure`] a retired model ends
/// it likewise, without the delay for balancers: whoever comes in that time could only be refused.
///
/// # Errors
/// [`ServeError`] when something could not be finished in time, or the model was retired.
pub async fn serve(
    listener: TcpListener,
    service: Service,
    options: ServerOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let app = App::new(service, options)?;
    let router = routes::router(&app);
    let (stop, stopping) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut refusals = JoinSet::new();
    let leaving = Arc::clone(&app);
    let shutdown = async move {
        shutdown.await;
        leaving.leaving.begin();
        tokio::time::sleep(leaving.options.drain_delay).await;
    };
    let failure = failure(Arc::clone(&app));
    tokio::pin!(shutdown, failure);
    let mut failed = None;
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            reason = &mut failure => {
                failed = Some(reason);
                break;
            }
            Some(_) = connections.join_next() => continue,
            Some(_) = refusals.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) if connections.len() < app.options.max_connections => {
                connections.spawn(welcome(stream, Arc::clone(&app), router.clone(), stopping.clone()));
            }
            Ok((stream, _)) if refusals.len() < MAX_REFUSALS => {
                app.metrics.refused(ApiError::Connections.code());
                refusals.spawn(turn_away(stream, app.options.tls.clone()));
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    drop(stopping);
    // Nobody listening means that no connection is left.
    let _ = stop.send(());
    let drained = drain(app, connections).await;
    match failed {
        // Says more than what could not be finished because of it.
        Some(reason) => Err(ServeError::Retired { reason }),
        None => drained,
    }
}

/// Completes when the model is retired and the server is to end with it. Asked again and again: the scheduler tells nobody,
/// and the batch that failed may have had no caller left whose answer could tell.
async fn failure(app: Arc<App>) -> Arc<str> {
    if !app.options.exit_on_failure {
        return std::future::pending().await;
    }
    loop {
        if let Some(Refusal::Retired { reason }) = app.service.scheduler.closed() {
            return reason;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Waits for connections, then for the scheduler, within one time limit.
async fn drain(app: Arc<App>, mut connections: JoinSet<()>) -> Result<(), ServeError> {
    let end = Instant::now() + app.options.drain_timeout;
    let finished = timeout_at(end, async { while connections.join_next().await.is_some() {} }).await;
    let left = connections.len();
    // Cuts off whoever is left; their requests leave the scheduler.
    connections.shutdown().await;
    let rest = end.saturating_duration_since(Instant::now());
    let drained = tokio::task::spawn_blocking(move || app.service.scheduler.drain(rest)).await;
    if finished.is_err() {
        return Err(ServeError::Connections { left });
    }
    // Draining does not panic; if it did, nothing is left to finish.
    drained.unwrap_or(Ok(()))?;
    Ok(())
}

/// A connection within the limit: its handshake if there is one, then its requests.
async fn welcome(stream: TcpStream, app: Arc<App>, router: Router, mut stopping: watch::Receiver<()>) {
    // Answers are one write each: waiting to fill a packet only delays them.
    let _ = stream.set_nodelay(true);
    let Some(tls) = app.options.tls.clone() else {
        return connection(stream, app, router, stopping).await;
    };
    let secured = tokio::select! {
        secured = timeout(app.options.handshake_timeout, tls.handshake(stream)) => secured,
        // No request has begun.
        _ = stopping.changed() => return,
    };
    match secured {
        Ok(Ok(stream)) => connection(stream, app, router, stopping).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

/// The requests of a connection.
async fn connection<S>(stream: S, app: Arc<App>, router: Router, mut stopping: watch::Receiver<()>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (served, options) = (Arc::clone(&app), &app.options);
    let activity = Arc::new(Activity::default());
    let stream = Patient::new(stream, Arc::clone(&activity), options.head_timeout, options.write_timeout);
    let linger = LingerLimits { bytes: options.max_body_bytes.saturating_mul(8), time: LINGER };
    let service = service_fn(move |request: Request<Incoming>| {
        let working = Working::begin(&activity);
        let (parts, incoming) = request.into_parts();
        let body = Body::new(Lingering::new(incoming, &parts.headers, linger, working.clone()));
        let answer = observe::respond(Arc::clone(&served), router.clone(), Request::from_parts(parts, body));
        async move {
            let answer = answer.await;
            drop(working);
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // Counts from the end of the last request, so it is what bounds silence between requests.
        .header_read_timeout(options.idle_timeout)
        .max_header_size(MAX_HEAD_BYTES)
        .max_buf_size(2 * MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // Clients leave, stall and send nonsense: nothing an operator must act on.
        tracing::debug!(%error, "a connection ended early");
    }
}

/// A connection over the limit. Whoever does not even read what it is told is closed all the same.
async fn turn_away(stream: TcpStream, tls: Option<Tls>) {
    let told = async {
        match tls {
            None => refuse(stream).await,
            Some(tls) => refuse(tls.handshake(stream).await?).await,
        }
    };
    let _ = timeout(REFUSAL, told).await;
}

/// Tells a client to come back, without reading its request.
async fn refuse(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
    let body = ApiError::Connections.body();
    let id = observe::new_id();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         retry-after: 1\r\nretry-after-ms: 1000\r\nx-typesafe-request-id: {}\r\nconnection: close\r\n\r\n",
        body.len(),
        id.to_str().unwrap_or_default(),
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await?;
    // Closing with unread bytes would reset the connection before the answer is seen.
    let mut unread = [0; 4096];
    for _ in 0..64 {
        if stream.read(&mut unread).await? == 0 {
            break;
        }
    }
    Ok(())
}
