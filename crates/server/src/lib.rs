//! Owns HTTP: routes, headers, bodies, and the one table from errors to status. Knows no device and no tokenizer.

mod body;
mod error;
mod routes;

pub use routes::{ModelCard, ServerOptions, Service, serve};
