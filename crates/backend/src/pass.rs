//! Owns the plan of one forward pass: which tokens, in which segments, continuing what, read out where.
//!
//! A pass is a packed batch of `rows` tokens without padding, cut into segments. A segment is a run of consecutive
//! tokens of one sequence. It may start a sequence, continue a state kept by an earlier pass, or continue a segment
//! of the same pass: that is how branches share their state. Two arenas that outlive the pass hold what is shared:
//!
//! * the *slot* arena of recurrent states: per DeltaNet layer and slot, the last convolution inputs
//!   `[kernel - 1, conv_dim]` and the delta-rule state `[value_heads, key_dim, value_dim]`;
//! * the *key* arena: per attention layer and row, one key and one value `[kv_heads, head_dim]`.
//!
//! Whoever makes the pass allocates slots and key rows; the backend only follows.

use std::ops::Range;

/// A run of consecutive key rows in the key arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// First row in the arena.
    pub row: usize,
    /// Number of rows.
    pub len: usize,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The segment's rows in the packed batch; never empty.
    pub rows: Range<usize>,
    /// Position in its sequence of the first token; equals the number of tokens before it.
    pub position: usize,
    /// Slot whose state the segment starts from; `None` starts from zero (then `position` is 0).
    pub initial: Option<usize>,
    /// Slot that takes the state after the last token. May equal `initial` (updated in place) if no other segment of
    /// the pass reads that slot.
    pub last: Option<usize>,
    /// 0 unless `initial` is written by a segment of this pass; then that segment's level + 1. Segments are
    /// ordered by level, so all slots written at a lower level are complete before a level starts.
    pub level: usize,
    /// Key rows of positions `0..position + rows.len()` in order; the trailing `rows.len()` rows are the segment's
    /// own, written by this pass, and always form one range of their own (the last).
    pub keys: Vec<KeyRange>,
}

/// Rows of the packed batch that the pointer head reads for one question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readout {
    /// Row of the `decide` token.
    pub decide: usize,
    /// Row of each option's end token, in option order.
    pub options: Vec<usize>,
}

/// One forward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Token id of every row.
    pub tokens: Vec<u32>,
    /// Segments covering `0..tokens.len()` without gaps, in row order and in level order.
    pub segments: Vec<Segment>,
    /// Questions to read out, in order; may be empty for a pass that only fills a state.
    pub readouts: Vec<Readout>,
}

/// Why a pass cannot be run. Passes are made by our own planner, so this is a defect, never a caller's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pass plan is inconsistent: {0}")]
pub struct PassError(pub String);

impl Pass {
    /// Rows of the packed batch.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Checks every rule stated on the fields, and that slots and key rows lie inside arenas of the given sizes.
    ///
    /// # Errors
    /// [`PassError`] naming the first rule broken.
    pub fn validate(&self, slots: usize, key_rows: usize) -> Result<(), PassError> {
        let fail = |text: String| Err(PassError(text));
        let mut row = 0;
        let mut level = 0;
        for (index, segment) in self.segments.iter().enumerate() {
            if segment.rows.start != row || segment.rows.is_empty() {
                return fail(format!(
                    "segment {index} has rows {:?}, expected a start of {row}",
                    segment.rows
                ));
            }
            row = segment.rows.end;
            if segment.level < level {
                return fail(format!("segment {index} of level {} follows level {level}", segment.level));
            }
            level = segment.level;
            if segment.initial.is_none() && segment.position != 0 {
                return fail(format!(
                    "segment {index} starts at position {} from no state",
                    segment.position
                ));
            }
            for slot in segment.initial.iter().chain(&segment.last) {
                if *slot >= slots {
                    return fail(format!("segment {index} names slot {slot} of {slots}"));
                }
            }
            let keys: usize = segment.keys.iter().map(|range| range.len).sum();
            if keys != segment.position + segment.rows.len() {
                return fail(format!("segment {index} has {keys} keys for {:?}", segment.rows));
            }
            if segment.keys.last().map(|range| range.len) != Some(segment.rows.len()) {
                return fail(format!("segment {index}: its own keys are not one range"));
            }
            if segment.keys.iter().any(|range| range.row.saturating_add(range.len) > key_rows) {
                return fail(format!("segment {index} names key rows past {key_rows}"));
            }
        }
        if row != self.rows() {
            return fail(format!("segments cover {row} of {} rows", self.rows()));
        }
        let rows = self.rows();
        for readout in &self.readouts {
            if readout.decide >= rows || readout.options.iter().any(|option| *option >= rows) {
                return fail(format!("a readout names a row past {rows}"));
            }
        }
        Ok(())
    }
}
