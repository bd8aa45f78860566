//! Owns qualification records: the verdict of an acceptance run on one configuration, kept beside the export and looked up at
//! start. A result never counts for another configuration.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{Distribution, Invalid, Report, Status};

/// Everything that bits may depend on: a record counts for exactly one of these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Configuration {
    /// SHA-256 of the export's manifest.
    pub manifest_sha256: String,
    /// Arithmetic, and the form of its passes where it has several.
    pub profile: String,
    /// SHA-256 of the executable.
    pub build_sha256: String,
    /// Device, driver, and versions of numeric libraries and kernels, by name.
    pub device: BTreeMap<String, String>,
}

impl Configuration {
    /// Names this configuration in file names: the first 16 digits of its SHA-256.
    pub fn key(&self) -> String {
        // A struct of strings always serialises.
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        hex::encode(Sha256::digest(bytes))[..16].to_owned()
    }
}

/// The outcome of an acceptance run on one configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Qualification {
    /// Version of the format: 1.
    pub omni_kev_qualification: u32,
    /// What was qualified.
    pub configuration: Configuration,
    /// Whether every gate passed.
    pub passed: bool,
    /// Gates that failed, with their details.
    pub failed_gates: Vec<String>,
    /// Questions compared.
    pub questions: usize,
    /// Largest probability error.
    pub largest_error: f64,
    /// Decisions that differ, near or far.
    pub flips: usize,
    /// SHA-256 of the corpus.
    pub corpus_sha256: String,
    /// SHA-256 of the reference capture's text.
    pub reference_sha256: String,
    /// SHA-256 of the native capture's text.
    pub native_sha256: String,
    /// When, in seconds since 1970.
    pub unix_time: u64,
    /// SHA-256 of all other fields, in this order, as compact JSON.
    #[serde(default)]
    pub seal: String,
}

/// What a worker knows of its own configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// A record says that every gate passed.
    Qualified(Box<Qualification>),
    /// A record says that a gate failed.
    Failed(Box<Qualification>),
    /// There is no record.
    Unqualified,
}

impl Standing {
    /// One word for logs, model lists and metrics.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Qualified(_) => "qualified",
            Self::Failed(_) => "failed",
            Self::Unqualified => "unqualified",
        }
    }
}

impl Qualification {
    /// The record of a judged run.
    pub fn new(
        configuration: Configuration,
        report: &Report,
        [corpus_sha256, reference_sha256, native_sha256]: [String; 3],
        unix_time: u64,
    ) -> Self {
        let failed = report.gates.iter().filter(|gate| gate.status == Status::Failed);
        let Distribution { questions, max, .. } = report.errors;
        let mut record = Self {
            omni_kev_qualification: 1,
            configuration,
            passed: report.passed,
            failed_gates: failed.map(|gate| format!("{}: {}", gate.name, gate.detail)).collect(),
            questions,
            largest_error: max,
            flips: report.flips.len(),
            corpus_sha256,
            reference_sha256,
            native_sha256,
            unix_time,
            seal: String::new(),
        };
        record.seal = record.expected_seal();
        record
    }

    fn expected_seal(&self) -> String {
        let bare = Self { seal: String::new(), ..self.clone() };
        hex::encode(Sha256::digest(serde_json::to_vec(&bare).unwrap_or_default()))
    }

    /// Where the record of a configuration lies in a folder.
    pub fn path(folder: &Path, configuration: &Configuration) -> PathBuf {
        folder.join(format!("{}.json", configuration.key()))
    }

    /// Writes the record to its place, replacing an earlier one, and returns where it is.
    ///
    /// # Errors
    /// [`Invalid::Io`]; the earlier record is still whole then.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, Invalid> {
        let path = Self::path(folder, &self.configuration);
        let fail = |source| Invalid::Write { file: path.display().to_string(), source };
        std::fs::create_dir_all(folder).map_err(fail)?;
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        let mut file = tempfile::NamedTempFile::new_in(folder).map_err(fail)?;
        file.write_all(text.as_bytes()).map_err(fail)?;
        file.as_file().sync_all().map_err(fail)?;
        file.persist(&path).map_err(|error| fail(error.error))?;
        Ok(path)
    }

    /// What a folder knows of a configuration.
    ///
    /// # Errors
    /// [`Invalid`] for a record that is there but cannot be trusted: unreadable, of another format, changed after it was written,
    /// or of another configuration.
    pub fn find(folder: &Path, configuration: &Configuration) -> Result<Standing, Invalid> {
        let path = Self::path(folder, configuration);
        let file = path.display().to_string();
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Standing::Unqualified),
            Err(source) => return Err(Invalid::Io { file, source }),
        };
        let wrong = |reason: String| Invalid::Format { file: file.clone(), line: 1, reason };
        let value: Value = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        let record: Self = serde_json::from_value(value).map_err(|error| wrong(error.to_string()))?;
        if record.omni_kev_qualification != 1 {
            let found = record.omni_kev_qualification;
            return Err(wrong(format!("omni_kev_qualification: expected 1, found {found}")));
        }
        let expected = record.expected_seal();
        if record.seal != expected {
            return Err(wrong(format!(
                "seal: the content has {expected}, the record says {}: it was changed after it was written; delete it and run \
                 omni-kev qualify again",
                record.seal
            )));
        }
        if record.configuration != *configuration {
            return Err(wrong("the record is of another configuration than its name says".to_owned()));
        }
        let record = Box::new(record);
        Ok(if record.passed { Standing::Qualified(record) } else { Standing::Failed(record) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration() -> Configuration {
        Configuration {
            manifest_sha256: "m".repeat(64),
            profile: "service, bucketed".to_owned(),
            build_sha256: "b".repeat(64),
            device: [("device".to_owned(), "GPU".to_owned()), ("driver".to_owned(), "1.2".to_owned())].into(),
        }
    }

    fn record(passed: bool) -> Qualification {
        let gates = vec![crate::Gate {
            name: "probability",
            status: if passed { Status::Passed } else { Status::Failed },
            detail: "largest error".to_owned(),
        }];
        let errors =
            Distribution { questions: 3, p50: 0.0, p90: 0.0, p99: 0.0, max: 0.1, over_gate: 0, flips: 0 };
        let report = Report { passed, gates, flips: Vec::new(), errors, against_exact: None };
        let hashes = ["c", "r", "n"].map(|letter| letter.repeat(64));
        Qualification::new(configuration(), &report, hashes, 7)
    }

    #[test]
    fn a_record_counts_for_its_configuration_alone() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Qualification::find(folder.path(), &configuration()).unwrap(), Standing::Unqualified);
        record(true).write(folder.path()).unwrap();
        let found = Qualification::find(folder.path(), &configuration()).unwrap();
        assert_eq!(found, Standing::Qualified(Box::new(record(true))));
        let change: [fn(&mut Configuration); 5] = [
            |c| c.manifest_sha256.push('x'),
            |c| c.profile = "service, eager".to_owned(),
            |c| c.build_sha256.push('x'),
            |c| _ = c.device.insert("driver".to_owned(), "1.3".to_owned()),
            |c| _ = c.device.insert("cublas".to_owned(), "1".to_owned()),
        ];
        for change in change {
            let mut other = configuration();
            change(&mut other);
            assert_eq!(
                Qualification::find(folder.path(), &other).unwrap(),
                Standing::Unqualified,
                "{other:?}"
            );
        }
        // A later run replaces it.
        record(false).write(folder.path()).unwrap();
        let found = Qualification::find(folder.path(), &configuration()).unwrap();
        assert_eq!(found.word(), "failed");
        let Standing::Failed(found) = found else { panic!("{found:?}") };
        assert_eq!(found.failed_gates, ["probability: largest error"]);
    }

    #[test]
    fn a_record_that_was_changed_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = record(false).write(folder.path()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let changes = [
            text.replace("\"passed\": false", "\"passed\": true"),
            text.replace("\"flips\": 0", "\"flips\": 1"),
            text.replace("\"omni_kev_qualification\": 1", "\"omni_kev_qualification\": 2"),
            text.replace("\"seal\": \"", "\"seal\": \"0"),
            text.replace("\"unix_time\": 7,", ""),
            text[..text.len() / 2].to_owned(),
            String::new(),
        ];
        for changed in changes {
            assert_ne!(changed, text);
            std::fs::write(&path, &changed).unwrap();
            assert!(Qualification::find(folder.path(), &configuration()).is_err(), "{changed}");
        }
        // Another configuration's record under this one's name.
        let mut other = configuration();
        other.profile = "fast".to_owned();
        let mut moved = record(true);
        moved.configuration = other;
        moved.seal = moved.expected_seal();
        std::fs::write(&path, serde_json::to_string(&moved).unwrap()).unwrap();
        assert!(Qualification::find(folder.path(), &configuration()).is_err());
    }
}
