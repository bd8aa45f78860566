//! Owns HTTP: connections, routes, limits, the wire schema, and the one table from error to status and body. Everything a
//! request means is the processor's, everything about waiting is the scheduler's; no other crate knows HTTP.
//!
//! Read a request in this order: [`serve`] accepts a connection, `routes` finds the handler, `decide` is the one path of
//! every request that is answered by the model, `body` and `wire` turn bytes into requests and answers into bytes.

mod auth;
mod body;
mod cors;
mod decide;
mod error;
mod metrics;
mod observe;
mod openapi;
mod permute;
mod pool;
mod ready;
mod routes;
mod serve;
mod service;
mod socket;
mod tls;
mod wire;

pub use auth::{ApiKey, ApiKeys};
pub use cors::{Cors, OriginError};
pub use observe::SPAN_TARGET;
pub use openapi::openapi;
pub use serve::{ServeError, serve};
pub use service::{CacheProbe, CacheSnapshot, ServerOptions, Service, SpanParent};
pub use tls::{Tls, TlsError};
pub use wire::{Answered, ModelCard};
