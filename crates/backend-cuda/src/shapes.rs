//! Owns the shapes that passes are padded to, so that one recorded graph serves every pass of a shape. Knows no table.

use backend::Pass;

use crate::layout::{CHUNK, SPAN_KEYS, TILE_QUERIES};

/// Rows of shapes. Products run on all of them, so steps are fine where reading weights is what takes the time.
const ROWS: [usize; 12] = [32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 512];
/// Questions of a shape.
const QUESTIONS: usize = 8;
/// Gathered rows of a shape.
const READOUT_ROWS: usize = 8 * QUESTIONS;
/// Key ranges of a shape's segments, all together.
const RANGES: usize = 4 * (QUESTIONS + 1);
/// Spans of keys that queries may see.
const SPANS: [usize; 2] = [1, 8];

/// What is fixed in a recorded pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    /// Whether a new text comes first, whose state the questions continue; else all continue kept states.
    pub(crate) fresh: bool,
    /// Spans of keys that every query may see.
    pub(crate) spans: usize,
}

impl Shape {
    /// All shapes.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for rows in ROWS {
            for fresh in [false, true] {
                all.extend(SPANS.map(|spans| Self { rows, fresh, spans }));
            }
        }
        all
    }

    /// The smallest shape that holds a pass, if one does.
    pub(crate) fn of(pass: &Pass) -> Option<Self> {
        let first = pass.segments.first()?;
        let fresh = first.last.is_some();
        let (questions, level) = if fresh { (&pass.segments[1..], 1) } else { (&pass.segments[..], 0) };
        let regular = questions.len() <= QUESTIONS
            && !pass.readouts.is_empty()
            && questions.iter().all(|segment| segment.level == level && segment.last.is_none());
        let ranges: usize = pass.segments.iter().map(|segment| segment.keys.len()).sum();
        let gathered: usize = pass.readouts.iter().map(|readout| 1 + readout.options.len()).sum();
        if !regular || ranges > RANGES || gathered > READOUT_ROWS {
            return None;
        }
        let rows = ROWS.into_iter().find(|rows| pass.rows() <= *rows)?;
        let end = pass.segments.iter().map(|segment| segment.position + segment.rows.len()).max()?;
        let spans = SPANS.into_iter().find(|spans| end.div_ceil(SPAN_KEYS) <= *spans)?;
        Some(Self { rows, fresh, spans })
    }

    /// Segments that launches look at: the new text, if there is one, and the questions.
    pub(crate) fn launched(self) -> usize {
        usize::from(self.fresh) + QUESTIONS
    }

    /// Segments of the first level.
    pub(crate) fn first_level(self) -> usize {
        if self.fresh { 1 } else { QUESTIONS }
    }

    /// The launched segments and one that padding rows belong to.
    pub(crate) fn segments(self) -> usize {
        self.launched() + 1
    }

    pub(crate) fn ranges(self) -> usize {
        RANGES
    }

    pub(crate) fn tiles(self) -> usize {
        self.rows / TILE_QUERIES + self.launched()
    }

    pub(crate) fn chunks(self) -> usize {
        self.rows / CHUNK + self.launched()
    }

    pub(crate) fn work(self) -> usize {
        self.tiles() * self.spans
    }

    pub(crate) fn joints(self) -> usize {
        if self.spans > 1 { self.tiles() } else { 0 }
    }

    pub(crate) fn readout_rows(self) -> usize {
        READOUT_ROWS
    }
}

#[cfg(test)]
mod tests {
    use backend::{KeyRange, Readout, Segment};

    use super::*;
    use crate::layout::WAVE_PARTIALS;

    fn pass(text: usize, position: usize, questions: &[usize]) -> Pass {
        let mut segments = Vec::new();
        let mut readouts = Vec::new();
        let mut row = 0;
        let mut add = |len: usize, position: usize, last: Option<usize>, level: usize| {
            segments.push(Segment {
                rows: row..row + len,
                position,
                initial: (position > 0).then_some(0),
                last,
                level,
                keys: vec![KeyRange { row: 0, len: position }, KeyRange { row: 900, len }],
            });
            row += len;
            row
        };
        if text > 0 {
            add(text, 0, Some(0), 0);
        }
        for len in questions {
            let end = add(*len, position + text, None, usize::from(text > 0));
            readouts.push(Readout { decide: end - 1, options: vec![end - 4, end - 2] });
        }
        Pass { tokens: vec![0; row], segments, readouts }
    }

    #[test]
    fn ordinary_passes_have_the_smallest_shape_that_holds_them() {
        let shape = |rows, fresh, spans| Some(Shape { rows, fresh, spans });
        assert_eq!(Shape::of(&pass(45, 0, &[38, 52, 30, 44, 36, 48])), shape(320, true, 1));
        assert_eq!(Shape::of(&pass(0, 45, &[38, 52, 30, 44, 36, 48])), shape(256, false, 1));
        assert_eq!(Shape::of(&pass(0, 2200, &[40; 5])), shape(224, false, 8));
        assert_eq!(Shape::of(&pass(0, 5, &[6])), shape(32, false, 1));
        for shape in Shape::all() {
            assert!(shape.work() <= WAVE_PARTIALS, "{shape:?}: its partial sums are one wave");
        }
    }

    #[test]
    fn what_no_shape_holds_has_none() {
        assert_eq!(Shape::of(&pass(2200, 0, &[40; 5])), None);
        assert_eq!(Shape::of(&pass(0, 45, &[10; 9])), None);
        assert_eq!(Shape::of(&pass(0, 5000, &[10])), None);
        let mut only_text = pass(45, 0, &[10]);
        only_text.readouts.clear();
        assert_eq!(Shape::of(&only_text), None);
        let mut many = pass(0, 45, &[100]);
        many.readouts[0].options = (0..64).collect();
        assert_eq!(Shape::of(&many), None);
    }
}
