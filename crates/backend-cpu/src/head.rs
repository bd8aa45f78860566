//! Owns the pointer head: two projections with biases, and the scaled product of a question with its options.

use pulp::Arch;

use crate::layout::CpuLayout;
use crate::linear::linear;
use crate::math::dot;
use crate::memory::CpuWeight;

/// One of the head's two projections.
pub(crate) struct Projected<'a> {
    pub(crate) weight: &'a CpuWeight,
    pub(crate) bias: &'a [f32],
}

impl Projected<'_> {
    fn rows(&self, h: &[f32], rows: usize, turned: &mut Vec<f32>) -> Vec<f32> {
        let mut out = vec![0.0; rows * self.weight.output];
        linear(h, self.weight, &mut out, turned);
        for row in out.chunks_exact_mut(self.weight.output) {
            row.iter_mut().zip(self.bias).for_each(|(value, bias)| *value += bias);
        }
        out
    }
}

/// Logits of all options of all readouts, over gathered rows `h`.
pub(crate) fn logits(
    h: &[f32],
    query: &Projected<'_>,
    key: &Projected<'_>,
    layout: &CpuLayout,
    turned: &mut Vec<f32>,
) -> Vec<f32> {
    let dim = query.weight.output;
    let rows = layout.readout_rows().count();
    let queries = query.rows(h, rows, turned);
    let keys = key.rows(h, rows, turned);
    let scale = 1.0 / (dim as f32).sqrt();
    let mut logits = Vec::with_capacity(rows);
    let mut row = 0;
    for readout in &layout.pass.readouts {
        let query = &queries[row * dim..(row + 1) * dim];
        for key in keys[(row + 1) * dim..].chunks_exact(dim).take(readout.options.len()) {
            logits.push(Arch::new().dispatch(|| dot(key, query)) * scale);
        }
        row += 1 + readout.options.len();
    }
    logits
}
