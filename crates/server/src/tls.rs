//! Owns TLS: the certificate and its key, as files that can be read again, and the handshake. Knows no HTTP beyond the
//! name of the one protocol that is offered.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Longest file read: chains are a few KiB, and a wrong path may name anything.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why a certificate and its key cannot be used. Names the file, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{}: expected {expected}, found {found}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What should be there.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// The key is another certificate's.
    #[error(
        "{}: expected the private key of the first certificate in {}, found another key",
        key.display(),
        certificate.display()
    )]
    Mismatch {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
    },
}

/// A certificate chain and its private key. Clones share what [`Tls::reload`] puts in force.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
}

struct Shared {
    certificate: PathBuf,
    key: PathBuf,
    /// In force for handshakes that begin now.
    current: RwLock<Arc<ServerConfig>>,
}

impl Tls {
    /// Reads PEM files: the chain, the server's own certificate first, and that one's key, not encrypted.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn open(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let current = RwLock::new(load(certificate, key)?);
        let shared = Shared { certificate: certificate.to_owned(), key: key.to_owned(), current };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Reads both files again. Handshakes that begin later use them; connections that stand are left alone. Blocking.
    ///
    /// # Errors
    /// [`TlsError`]: what was in force stays in force.
    pub fn reload(&self) -> Result<(), TlsError> {
        let config = load(&self.shared.certificate, &self.shared.key)?;
        *self.shared.current.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    pub(crate) async fn handshake(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let current = Arc::clone(&self.shared.current.read().unwrap_or_else(PoisonError::into_inner));
        TlsAcceptor::from(current).accept(stream).await
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.shared.certificate).finish_non_exhaustive()
    }
}

fn load(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = chain(certificate)?;
    let private = private_key(key)?;
    let wrong =
        |path: &Path, expected, found: String| TlsError::Content { path: path.to_owned(), expected, found };
    let key_file =
        |error: rustls::Error| wrong(key, "an RSA, ECDSA (P-256, P-384) or Ed25519 key", error.to_string());
    let provider = Arc::new(ring::default_provider());
    // Looked at by itself first: afterwards an unusable key and an unusable certificate are the same error.
    provider.key_provider.load_private_key(private.clone_key()).map_err(key_file)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(key_file)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                TlsError::Mismatch { certificate: certificate.to_owned(), key: key.to_owned() }
            }
            other => wrong(certificate, "X.509 certificates", other.to_string()),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    const EXPECTED: &str = "PEM blocks CERTIFICATE";
    let pem = read(path)?;
    let wrong = |found| TlsError::Content { path: path.to_owned(), expected: EXPECTED, found };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong(format!("broken PEM: {error}")))?;
    if chain.is_empty() { Err(wrong(blocks(&pem))) } else { Ok(chain) }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    const EXPECTED: &str = "one PEM block PRIVATE KEY, RSA PRIVATE KEY or EC PRIVATE KEY";
    let pem = read(path)?;
    let wrong = |found| TlsError::Content { path: path.to_owned(), expected: EXPECTED, found };
    let mut keys = PrivateKeyDer::pem_slice_iter(&pem);
    match (keys.next(), keys.next()) {
        (Some(Ok(key)), None) => Ok(key),
        (Some(Err(error)), _) => Err(wrong(format!("broken PEM: {error}"))),
        _ => Err(wrong(blocks(&pem))),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    use io::Read;
    let failed = |source| TlsError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(TlsError::Content {
            path: path.to_owned(),
            expected: "a PEM file of at most 1 MiB",
            found: "a longer one".to_owned(),
        });
    }
    Ok(bytes)
}

/// The names of a file's PEM blocks, for an error. Nothing of what they hold.
fn blocks(pem: &[u8]) -> String {
    let text = String::from_utf8_lossy(pem);
    let names: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("-----BEGIN ")?.strip_suffix("-----"))
        .filter(|name| name.len() <= 32)
        .take(8)
        .collect();
    if names.is_empty() { "no PEM block".to_owned() } else { names.join(", ") }
}
