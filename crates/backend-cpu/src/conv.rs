//! Owns the causal depthwise convolution of the DeltaNet mixer, its activation, and its tails.

use backend::{DeltaNet, Segment};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::layout::CpuLayout;
use crate::math::silu;

/// Channels worked on at a time: their sums stay in the first-level cache while the taps go by.
const CHANNELS: usize = 1024;

/// Convolution and silu of all rows; tails of `kernel - 1` inputs, oldest first.
pub(crate) fn conv_silu(
    projected: &[f32],
    weight: &[f32],
    shape: &DeltaNet,
    layout: &CpuLayout,
    tails: &mut [f32],
    out: &mut [f32],
) {
    let (channels, kernel) = (shape.conv_dim(), shape.kernel);
    // Tap-major, so that a tap's weights lie next to each other as the channels do.
    let taps: Vec<f32> =
        (0..kernel).flat_map(|j| (0..channels).map(move |c| weight[c * kernel + j])).collect();
    for level in layout.levels() {
        let before: &[f32] = tails;
        let span = CpuLayout::level_rows(level);
        let rows = out[span.start * channels..span.end * channels].par_chunks_mut(channels);
        rows.enumerate().for_each(|(index, out)| {
            let row = span.start + index;
            let at = level.partition_point(|segment| segment.rows.end <= row);
            let history = History { projected, tails: before, shape, segment: &level[at] };
            Arch::new().dispatch(Convolve { history, row, taps: &taps, out });
        });
        for segment in level {
            keep_tail(projected, shape, segment, tails);
        }
    }
}

/// The inputs of a segment: those before it come from the tail it starts from.
struct History<'a> {
    projected: &'a [f32],
    tails: &'a [f32],
    shape: &'a DeltaNet,
    segment: &'a Segment,
}

impl History<'_> {
    /// The inputs `back` rows before `row`; none where the sequence has not begun.
    #[inline(always)]
    fn row(&self, row: usize, back: usize) -> Option<&[f32]> {
        let (channels, width) = (self.shape.conv_dim(), self.shape.projected_width());
        let offset = row - self.segment.rows.start;
        if offset >= back {
            return Some(&self.projected[(row - back) * width..][..channels]);
        }
        let history = self.shape.kernel - 1;
        let place = self.segment.initial? * history + history - (back - offset);
        Some(&self.tails[place * channels..][..channels])
    }
}

/// One row of outputs.
struct Convolve<'a> {
    history: History<'a>,
    row: usize,
    taps: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { history, row, taps, out } = self;
        let (channels, kernel) = (history.shape.conv_dim(), history.shape.kernel);
        for (block, out) in out.chunks_mut(CHANNELS).enumerate() {
            let first = block * CHANNELS;
            out.fill(0.0);
            for j in 0..kernel {
                let Some(x) = history.row(row, kernel - 1 - j) else { continue };
                let taps = &taps[j * channels + first..];
                for ((out, tap), x) in out.iter_mut().zip(taps).zip(&x[first..]) {
                    *out = tap.mul_add(*x, *out);
                }
            }
            out.iter_mut().for_each(|value| *value = silu(*value));
        }
    }
}

/// Writes the newest `kernel - 1` inputs of a segment to the slot that takes them.
fn keep_tail(projected: &[f32], shape: &DeltaNet, segment: &Segment, tails: &mut [f32]) {
    let Some(slot) = segment.last else { return };
    let (channels, width, history) = (shape.conv_dim(), shape.projected_width(), shape.kernel - 1);
    let size = history * channels;
    // Inputs of the tail before that are still among the newest.
    let kept = history.saturating_sub(segment.rows.len());
    match segment.initial {
        Some(initial) => {
            let oldest = initial * size + (history - kept) * channels;
            tails.copy_within(oldest..oldest + kept * channels, slot * size);
        }
        None => tails[slot * size..][..kept * channels].fill(0.0),
    }
    for place in kept..history {
        let row = segment.rows.end + place - history;
        tails[slot * size + place * channels..][..channels]
            .copy_from_slice(&projected[row * width..][..channels]);
    }
}
