//! Owns the conformance suite of `backend::Ops`: shared cases, independent FP64 references, bounds with their reasons,
//! and checks that bits depend on nothing they must not depend on. Knows no backend: every one runs the same suite.
//!
//! A backend whose buffers are all FP32 runs [`check`]. One that rounds gives the suite a way to fill a buffer of any
//! role, and its own bounds:
//!
//! ```text
//! Suite::new(&ops)
//!     .uploading(|role, values| ops.values(role, values))
//!     .bounded(|_operation, exact| exact.max(4e-3))
//!     .released_shapes_only()
//!     .run()
//!     .assert_passed();
//! ```
//!
//! References read their inputs back from the backend, so rounding on upload is never counted as an error.

mod attention;
mod compare;
mod delta;
mod input;
mod placement;
mod projection;
mod reference;
mod refusals;
mod rows;

use std::fmt;

use backend::{DType, Ops, Result, Role};

/// Lengths at which tiles, chunks, warps and vectors begin and end.
pub const LENGTHS: [usize; 13] = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 1000, 2048];

type Upload<'a, B> = dyn Fn(Role, &[f32]) -> Result<<B as Ops>::Buffer> + 'a;
type Bound<'a> = dyn Fn(&str, f64) -> f64 + 'a;

/// The suite, ready to run on one backend.
pub struct Suite<'a, B: Ops> {
    ops: &'a B,
    upload: Box<Upload<'a, B>>,
    bound: Box<Bound<'a>>,
    odd_shapes: bool,
}

/// Runs the suite on a backend whose buffers are FP32 in every role.
pub fn run_all<B: Ops>(ops: &B) -> Report {
    Suite::new(ops).run()
}

/// Runs the suite on a backend whose buffers are FP32 in every role.
///
/// # Panics
/// When a check fails, with every failure.
pub fn check<B: Ops>(ops: &B) {
    run_all(ops).assert_passed();
}

impl<'a, B: Ops> Suite<'a, B> {
    /// The suite with FP32 buffers and FP32 bounds.
    pub fn new(ops: &'a B) -> Self {
        Self {
            ops,
            upload: Box::new(|_, values| ops.parameter(&input::tensor(DType::F32, &[values.len()], values))),
            bound: Box::new(|_, exact| exact),
            odd_shapes: true,
        }
    }

    /// How a buffer of a role is filled; the values may be rounded on the way.
    #[must_use]
    pub fn uploading(mut self, upload: impl Fn(Role, &[f32]) -> Result<B::Buffer> + 'a) -> Self {
        self.upload = Box::new(upload);
        self
    }

    /// The bound of an operation (named as in the trait), given the bound of FP32 arithmetic. An error is measured
    /// against the expected value plus the root mean square of its row.
    #[must_use]
    pub fn bounded(mut self, bound: impl Fn(&str, f64) -> f64 + 'a) -> Self {
        self.bound = Box::new(bound);
        self
    }

    /// Leaves out shapes that no released model has: odd widths, tiny heads.
    #[must_use]
    pub fn released_shapes_only(mut self) -> Self {
        self.odd_shapes = false;
        self
    }

    /// Runs every check.
    pub fn run(&self) -> Report {
        let mut report = Report::default();
        rows::run(self, &mut report);
        projection::run(self, &mut report);
        delta::run(self, &mut report);
        attention::run(self, &mut report);
        refusals::run(self, &mut report);
        report
    }

    /// A filled buffer, and the values it holds.
    fn filled(&self, role: Role, values: &[f32]) -> Result<(B::Buffer, Vec<f32>)> {
        let buffer = (self.upload)(role, values)?;
        let held = self.ops.read(&buffer, values.len())?;
        Ok((buffer, held))
    }

    /// A buffer of NaN, so that what an operation does not write shows.
    fn poisoned(&self, role: Role, elements: usize) -> Result<B::Buffer> {
        (self.upload)(role, &vec![f32::NAN; elements])
    }

    fn parameter(&self, values: &[f32]) -> Result<B::Buffer> {
        self.ops.parameter(&input::tensor(DType::F32, &[values.len()], values))
    }
}

/// What one check found: the worst error as a share of its bound (0 for a comparison of bits), or why it failed.
pub type Outcome = std::result::Result<f64, String>;

/// One check of one operation.
#[derive(Clone, Debug)]
pub struct Check {
    /// The operation, named as in the trait.
    pub operation: &'static str,
    /// Shape, length, and what was compared.
    pub case: String,
    /// What was found.
    pub outcome: Outcome,
}

/// All checks of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// In the order in which they ran.
    pub checks: Vec<Check>,
}

impl Report {
    fn record(&mut self, operation: &'static str, case: impl fmt::Display, outcome: Outcome) {
        self.checks.push(Check { operation, case: case.to_string(), outcome });
    }

    /// Records the checks of one run of an operation; an error of the run itself is one failed check.
    fn record_run(&mut self, operation: &'static str, case: &str, run: Result<Vec<(String, Outcome)>>) {
        match run {
            Ok(outcomes) => {
                for (what, outcome) in outcomes {
                    self.record(operation, format_args!("{case}: {what}"), outcome);
                }
            }
            Err(error) => self.record(operation, case, Err(error.to_string())),
        }
    }

    /// The failed checks.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.outcome.is_err())
    }

    /// # Panics
    /// When a check failed or none ran, with every failure.
    #[allow(clippy::panic)] // Test support: a failure here is a failed test.
    pub fn assert_passed(&self) {
        let failures: Vec<String> = self
            .failures()
            .map(|check| format!("{} ({}): {:?}", check.operation, check.case, check.outcome))
            .collect();
        if !failures.is_empty() || self.checks.is_empty() {
            panic!("{} of {} checks failed:\n{}", failures.len(), self.checks.len(), failures.join("\n"));
        }
    }
}

/// A table: per operation the number of checks, of failures, and the worst error as a share of its bound.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<18} {:>7} {:>7} {:>12}", "operation", "checks", "failed", "worst/bound")?;
        let mut seen: Vec<&str> = Vec::new();
        for check in &self.checks {
            if seen.contains(&check.operation) {
                continue;
            }
            seen.push(check.operation);
            let of = || self.checks.iter().filter(|other| other.operation == check.operation);
            let failed = of().filter(|check| check.outcome.is_err()).count();
            let worst =
                of().filter_map(|check| check.outcome.as_ref().ok()).fold(0.0, |a, b| f64::max(a, *b));
            writeln!(f, "{:<18} {:>7} {failed:>7} {worst:>12.3}", check.operation, of().count())?;
        }
        self.failures().try_for_each(|check| {
            writeln!(f, "FAILED {} ({}): {:?}", check.operation, check.case, check.outcome)
        })
    }
}
