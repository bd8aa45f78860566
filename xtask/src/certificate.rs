//! Owns certificates for checks on this machine: signed by themselves, trusted by name of file.

use std::path::{Path, PathBuf};

/// A certificate for 127.0.0.1 and localhost, in files.
pub(crate) struct Certificate {
    /// The certificate, which clients must trust.
    pub(crate) certificate: PathBuf,
    /// Its key.
    pub(crate) key: PathBuf,
    /// Both, one after the other.
    pub(crate) both: PathBuf,
}

/// Makes a certificate in a folder.
///
/// # Errors
/// What could not be made or written.
pub(crate) fn make(folder: &Path) -> Result<Certificate, String> {
    let names = ["127.0.0.1", "localhost"].map(str::to_owned);
    let made =
        rcgen::generate_simple_self_signed(names).map_err(|error| format!("a certificate: {error}"))?;
    let (certificate, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok::<_, String>(path)
    };
    Ok(Certificate {
        certificate: write("certificate.pem", &certificate)?,
        key: write("key.pem", &key)?,
        both: write("both.pem", &(certificate.clone() + &key))?,
    })
}
