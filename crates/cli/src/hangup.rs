//! Owns SIGHUP: keys and certificates are read again, and what cannot be read changes nothing.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use server::{ApiKeys, Tls};
use tokio::signal::unix::{SignalKind, signal};

use crate::keys;

/// What is read again.
#[derive(Default)]
pub(crate) struct Files {
    /// The file of the keys, and where they are in force.
    pub(crate) keys: Option<(PathBuf, ApiKeys)>,
    pub(crate) tls: Option<Tls>,
}

impl Files {
    /// From the return of this on, SIGHUP reads the files again, and without any does nothing.
    pub(crate) fn reread_on_hangup(self) -> Result<()> {
        let mut hangup = signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?;
        let files = Arc::new(self);
        tokio::spawn(async move {
            while hangup.recv().await.is_some() {
                let files = Arc::clone(&files);
                // One after the other; a panic would be a defect that must not end the rereading.
                let _ = tokio::task::spawn_blocking(move || files.reread()).await;
            }
        });
        Ok(())
    }

    /// Each by itself: broken keys do not keep a new certificate out.
    fn reread(&self) {
        if self.keys.is_none() && self.tls.is_none() {
            tracing::info!("SIGHUP: there is neither a key file nor a certificate to read again");
        }
        if let Some((path, keys)) = &self.keys {
            let replaced = keys::read(path).map(|read| {
                let count = read.len();
                keys.replace(read).then_some(count)
            });
            match replaced {
                Ok(Some(count)) => tracing::info!(count, "the API keys were read again"),
                // The file has keys, and so has a server with a file.
                Ok(None) => tracing::error!("the API keys stay as they are"),
                Err(error) => tracing::error!("the API keys stay as they are: {error:#}"),
            }
        }
        if let Some(tls) = &self.tls {
            match tls.reload() {
                Ok(()) => tracing::info!("the certificate was read again"),
                Err(error) => tracing::error!("the certificate stays as it is: {error}"),
            }
        }
    }
}
