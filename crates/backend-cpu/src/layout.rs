//! Owns a pass prepared for this backend: validated, with rotary tables, key rows and levels worked out once.

use std::ops::Range;

use backend::{Pass, Result, Segment};

/// A pass with what every layer needs of it.
#[derive(Debug)]
pub struct CpuLayout {
    pub(crate) pass: Pass,
    /// Per row: cosines, then sines, `rotary_dim / 2` each.
    pub(crate) rotary: Vec<f32>,
    /// Dimensions that the tables rotate.
    pub(crate) rotary_dim: usize,
    /// Per row: its row in the key arena.
    pub(crate) own_keys: Vec<usize>,
    /// Slots and key rows that the arenas must have.
    pub(crate) slots: usize,
    pub(crate) key_rows: usize,
}

impl CpuLayout {
    pub(crate) fn new(pass: &Pass, inv_freq: &[f32]) -> Result<Self> {
        // Arenas are checked by the operations that are handed them.
        pass.validate(usize::MAX, usize::MAX)?;
        let half = inv_freq.len();
        let mut rotary = Vec::with_capacity(pass.rows() * 2 * half);
        let mut own_keys = Vec::with_capacity(pass.rows());
        for segment in &pass.segments {
            let own = segment.keys.last().map_or(0, |range| range.row);
            for offset in 0..segment.rows.len() {
                let position = (segment.position + offset) as f32;
                rotary.extend(inv_freq.iter().map(|frequency| (position * frequency).cos()));
                rotary.extend(inv_freq.iter().map(|frequency| (position * frequency).sin()));
                own_keys.push(own.saturating_add(offset));
            }
        }
        let slots = pass.segments.iter().flat_map(|segment| segment.initial.into_iter().chain(segment.last));
        let ranges = pass.segments.iter().flat_map(|segment| &segment.keys);
        Ok(Self {
            slots: slots.max().map_or(0, |slot| slot.saturating_add(1)),
            key_rows: ranges.map(|range| range.row.saturating_add(range.len)).max().unwrap_or(0),
            pass: pass.clone(),
            rotary,
            rotary_dim: 2 * half,
            own_keys,
        })
    }

    /// Rows of the packed batch.
    pub(crate) fn rows(&self) -> usize {
        self.pass.rows()
    }

    /// Cosines and sines of a row.
    pub(crate) fn table(&self, row: usize) -> (&[f32], &[f32]) {
        self.rotary[row * self.rotary_dim..(row + 1) * self.rotary_dim].split_at(self.rotary_dim / 2)
    }

    /// The segments level by level: no segment of a level reads a slot that another one of it writes.
    pub(crate) fn levels(&self) -> impl Iterator<Item = &[Segment]> {
        self.pass.segments.chunk_by(|a, b| a.level == b.level)
    }

    /// The rows of the segments of a level.
    pub(crate) fn level_rows(level: &[Segment]) -> Range<usize> {
        level.first().map_or(0, |segment| segment.rows.start)
            ..level.last().map_or(0, |segment| segment.rows.end)
    }

    /// Rows that the pointer head reads, readout by readout: `decide`, then the options.
    pub(crate) fn readout_rows(&self) -> impl Iterator<Item = usize> + '_ {
        let readouts = self.pass.readouts.iter();
        readouts.flat_map(|readout| std::iter::once(readout.decide).chain(readout.options.iter().copied()))
    }
}
