//! Owns counting: every request sent is answered, refused, failed, cancelled or lost, and nothing else.

use std::collections::BTreeMap;
use std::time::Duration;

use super::http::{Event, Outcome};

/// What became of many requests.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Latencies of answers, in milliseconds.
    pub(crate) answered: Vec<f64>,
    /// Latencies of refusals, in milliseconds.
    pub(crate) refused: Vec<f64>,
    /// Other ends, by name.
    pub(crate) failed: BTreeMap<String, usize>,
    pub(crate) cancelled: usize,
    /// Neither an answer nor an error.
    pub(crate) lost: usize,
}

impl Tally {
    pub(crate) fn of<'a>(events: impl IntoIterator<Item = &'a Event>) -> Self {
        let mut tally = Self::default();
        for event in events {
            tally.add(event);
        }
        tally
    }

    fn add(&mut self, event: &Event) {
        let ms = 1e3 * event.took.as_secs_f64();
        let failed = match &event.outcome {
            Outcome::Answered => return self.answered.push(ms),
            Outcome::Refused => return self.refused.push(ms),
            Outcome::Cancelled => return self.cancelled += 1,
            Outcome::Closed | Outcome::Silent => return self.lost += 1,
            Outcome::Status(status) => status.to_string(),
            Outcome::Unreachable(error) => format!("no connection: {error}"),
            Outcome::Cut => "cut answer".to_owned(),
        };
        *self.failed.entry(failed).or_default() += 1;
    }

    pub(crate) fn failures(&self) -> usize {
        self.failed.values().sum()
    }

    pub(crate) fn sent(&self) -> usize {
        self.answered.len() + self.refused.len() + self.failures() + self.cancelled + self.lost
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} sent: {} answered, {} refused, {} failed, {} cancelled, {} lost",
            self.sent(),
            self.answered.len(),
            self.refused.len(),
            self.failures(),
            self.cancelled,
            self.lost
        )?;
        for (name, count) in &self.failed {
            write!(f, " ({count} × {name})")?;
        }
        Ok(())
    }
}

/// The value below which this share of values lies (1 is the largest); 0 of none.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(index.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Median, 99th percentile and maximum of latencies.
pub(crate) fn latencies(values: &[f64]) -> String {
    let [p50, p99, max] = [0.5, 0.99, 1.0].map(|share| quantile(values, share));
    format!("p50 {p50:.1} p99 {p99:.1} max {max:.1} ms")
}

/// A rule with the reason to print when it is broken.
pub(crate) fn rule(kept: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if kept { Ok(()) } else { Err(otherwise()) }
}

/// A duration in milliseconds.
pub(crate) fn ms(duration: Duration) -> f64 {
    1e3 * duration.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn every_outcome_is_counted_once() {
        let outcomes = [
            Outcome::Answered,
            Outcome::Refused,
            Outcome::Status(500),
            Outcome::Unreachable("refused".to_owned()),
            Outcome::Cut,
            Outcome::Cancelled,
            Outcome::Closed,
            Outcome::Silent,
        ];
        let event = |outcome: &Outcome| Event {
            sent: Instant::now(),
            took: Duration::from_millis(2),
            outcome: outcome.clone(),
        };
        let events: Vec<Event> = outcomes.iter().map(event).collect();
        let tally = Tally::of(&events);
        assert_eq!(tally.sent(), outcomes.len());
        assert_eq!((tally.failures(), tally.lost, tally.cancelled), (3, 2, 1));
        assert_eq!((tally.answered, tally.refused), (vec![2.0], vec![2.0]));
    }

    #[test]
    fn quantiles_are_values_that_were_there() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| quantile(&values, share)), [50.0, 99.0, 100.0]);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
