//! Owns what long work shows of itself on standard error: a bar with bytes, rate and time left on a terminal, elsewhere a line
//! for every tenth of work that takes longer than a moment.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use artifact::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work that ends sooner is not worth a line.
const MOMENT: Duration = Duration::from_secs(2);

/// Shows progress; what is drawn is gone when it is dropped.
pub(crate) struct Shown {
    terminal: bool,
    phase: Mutex<Option<Phase>>,
}

struct Phase {
    bar: ProgressBar,
    name: String,
    total: u64,
    done: u64,
    tenths: u64,
    started: Instant,
}

impl Shown {
    pub(crate) fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), phase: Mutex::new(None) }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Some(phase) = self.phase.get_mut().unwrap_or_else(PoisonError::into_inner) {
            phase.bar.finish_and_clear();
        }
    }
}

impl Progress for Shown {
    fn begin(&self, phase: &str, bytes: u64) {
        let target = if self.terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(bytes), target).with_message(phase.to_owned());
        let template = "{msg} [{bar:32}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        let begun = Phase {
            bar,
            name: phase.to_owned(),
            total: bytes.max(1),
            done: 0,
            tenths: 0,
            started: Instant::now(),
        };
        let before = self.phase.lock().unwrap_or_else(PoisonError::into_inner).replace(begun);
        if let Some(before) = before {
            before.bar.finish_and_clear();
        }
    }

    fn advance(&self, bytes: u64) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(phase) = phase.as_mut() else { return };
        phase.done += bytes;
        phase.bar.set_position(phase.done);
        if !self.terminal
            && let Some(line) = phase.line(phase.started.elapsed())
        {
            eprintln!("{line}");
        }
    }
}

impl Phase {
    /// The line of a tenth that was just completed.
    fn line(&mut self, elapsed: Duration) -> Option<String> {
        let tenths = 10 * self.done / self.total;
        if tenths <= self.tenths {
            return None;
        }
        self.tenths = tenths;
        if elapsed < MOMENT {
            return None;
        }
        let seconds = elapsed.as_secs_f64();
        let rate = self.done as f64 / seconds;
        let left = (self.total.saturating_sub(self.done)) as f64 / rate;
        Some(format!(
            "{}: {} % of {:.2} GB, {:.2} GB/s, {left:.0} s left",
            self.name,
            10 * tenths,
            self.total as f64 / 1e9,
            rate / 1e9
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_every_tenth_of_work_that_takes_longer_than_a_moment() {
        let shown = Shown { terminal: false, phase: Mutex::new(None) };
        shown.begin("export", 1000);
        shown.advance(50);
        let mut phase = shown.phase.lock().unwrap();
        let phase = phase.as_mut().unwrap();
        assert_eq!(phase.line(MOMENT), None);
        phase.done = 250;
        assert_eq!(phase.line(MOMENT).unwrap(), "export: 20 % of 0.00 GB, 0.00 GB/s, 6 s left");
        phase.done = 299;
        assert_eq!(phase.line(MOMENT), None);
        phase.done = 300;
        assert_eq!(phase.line(Duration::ZERO), None);
        phase.done = 1000;
        assert!(phase.line(MOMENT).unwrap().contains("100 %"));
    }
}
