//! Owns the frozen plan of an acceptance run: what was fixed before the native run, so that nothing can be fitted to its
//! result.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::capture::Capture;
use crate::gates::{GATES, Gates};
use crate::judge::near;
use crate::{Entry, Invalid};

/// Gates, corpus, export and reference of a run, and the near-boundary questions that the reference alone selects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Version of the format: 1.
    pub omni_kev_plan: u32,
    /// The gates.
    pub gates: Gates,
    /// SHA-256 of the corpus.
    pub corpus_sha256: String,
    /// SHA-256 of the export's manifest.
    pub manifest_sha256: String,
    /// SHA-256 of the reference capture's text.
    pub reference_sha256: String,
    /// Case and question id of everything near a boundary.
    pub near: Vec<(String, String)>,
}

impl Plan {
    /// Freezes the plan for a reference capture.
    pub fn freeze(reference: &Capture) -> Self {
        let near = reference
            .entries
            .iter()
            .filter_map(|entry| match entry {
                Entry::Question(question) if near(question) => {
                    Some((question.name.clone(), question.id.clone()))
                }
                _ => None,
            })
            .collect();
        Self {
            omni_kev_plan: 1,
            gates: GATES,
            corpus_sha256: reference.header.corpus_sha256.clone(),
            manifest_sha256: reference.header.manifest_sha256.clone(),
            reference_sha256: reference.sha256.clone(),
            near,
        }
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// [`Invalid`] naming the file.
    pub fn read(path: &Path) -> Result<Self, Invalid> {
        let file = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|source| Invalid::Io { file: file.clone(), source })?;
        serde_json::from_slice(&bytes).map_err(|error| Invalid::Format {
            file,
            line: error.line(),
            reason: format!("is no plan: {error}"),
        })
    }

    /// Whether a reference is the one that was frozen, under these gates.
    ///
    /// # Errors
    /// [`Invalid::Mismatch`] naming the first thing that was changed.
    pub fn check(&self, reference: &Capture) -> Result<(), Invalid> {
        let frozen = Self::freeze(reference);
        let pairs = [
            ("format of the plan", self.omni_kev_plan.to_string(), frozen.omni_kev_plan.to_string()),
            ("gates", format!("{:?}", self.gates), format!("{:?}", frozen.gates)),
            ("corpus", self.corpus_sha256.clone(), frozen.corpus_sha256),
            ("export", self.manifest_sha256.clone(), frozen.manifest_sha256),
            ("reference capture", self.reference_sha256.clone(), frozen.reference_sha256),
            ("near-boundary questions", format!("{:?}", self.near), format!("{:?}", frozen.near)),
        ];
        for (what, first, second) in pairs {
            if first != second {
                let what = format!("{what}: the plan's and this run's differ");
                return Err(Invalid::Mismatch { what, first, second });
            }
        }
        Ok(())
    }
}
