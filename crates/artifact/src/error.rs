//! Owns the one error of this crate: every way a checkpoint or an export can be refused.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ArtifactError>;

/// Why a checkpoint or an export was refused. Every variant names the file or field, what was expected, what was
/// found, and, where the caller can do something, what to do.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The operating system refused an operation on a file.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried: "read", "write", "create".
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is not what its format demands.
    #[error("{file}: {reason}")]
    Format {
        /// The file.
        file: String,
        /// What is wrong, with expected and found.
        reason: String,
    },
    /// A field has a value this program does not accept.
    #[error("{file}: {field}: expected {expected}, found {found}")]
    Field {
        /// The file.
        file: String,
        /// The field or tensor.
        field: String,
        /// What is accepted.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The directory does not hold exactly the files it should.
    #[error("{path}: {reason}; {action}")]
    FileSet {
        /// The file at fault.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        action: String,
    },
    /// A file's bytes are not those of the manifest.
    #[error(
        "{path}: SHA-256 is {found}, the manifest has {expected}: the file was changed after export; export again or restore it"
    )]
    Hash {
        /// The file.
        path: PathBuf,
        /// Digest in the manifest.
        expected: String,
        /// Digest of the bytes on disk.
        found: String,
    },
    /// The place where adapters are merged failed.
    #[error("an adapter cannot be merged: {reason}")]
    Merge {
        /// The device's reason.
        reason: String,
    },
    /// An identity field disagrees with a pinned profile.
    #[error(
        "profile {profile}: {field} is pinned to {expected}, this one has {found}; use the pinned revision or another profile"
    )]
    Pin {
        /// The profile or pins file.
        profile: String,
        /// The field.
        field: String,
        /// The pinned value.
        expected: String,
        /// The value found.
        found: String,
    },
    /// The output is already there.
    #[error("{path} exists; choose another directory or remove it")]
    Exists {
        /// The output directory.
        path: PathBuf,
    },
    /// The tokenizer was refused.
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
}

impl ArtifactError {
    pub(crate) fn io(path: impl Into<PathBuf>, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, action, source }
    }

    pub(crate) fn format(file: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Format { file: file.into(), reason: reason.into() }
    }

    pub(crate) fn field(
        file: &str,
        field: impl Into<String>,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Field {
            file: file.to_owned(),
            field: field.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}
