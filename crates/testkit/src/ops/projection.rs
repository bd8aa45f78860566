//! Owns the checks of matrix products: `linear` with parts, dtypes and adapters, and the pointer head.

use backend::{DType, Ops, Projection, Readout, Result, Role};

use super::compare::{close, same_bits};
use super::input::{flat_pass, normals, projection, tensor, wide};
use super::reference::linear;
use super::{LENGTHS, Outcome, Report, Suite};

/// 3584 FP32 products added in any order err by well below `sqrt(3584) * 2^-24` of their sum of squares' root.
const SUM: f64 = 4e-6;

pub(super) fn run<B: Ops>(suite: &Suite<'_, B>, report: &mut Report) {
    let mut shapes: Vec<(&[usize], usize)> = vec![(&[512, 64, 16, 16], 1024), (&[256], 3584)];
    if suite.odd_shapes {
        shapes.extend([
            (&[200usize, 8, 8][..], 128),
            (&[300, 7], 700),
            (&[64], 33),
            (&[1], 1),
            (&[13, 1], 5),
        ]);
    }
    for (outputs, input) in &shapes {
        for (dtype, adapted) in [(DType::BF16, true), (DType::BF16, false), (DType::F32, false)] {
            let case = format!("{outputs:?} x {input}, {dtype:?}, adapter {adapted}");
            let rows = &[1, 2, 3, 7, 64, 65, 293];
            report.record_run("linear", &case, product(suite, outputs, *input, dtype, adapted, rows));
        }
    }
    let narrow = LENGTHS.into_iter().chain([293]).collect::<Vec<usize>>();
    report.record_run("linear", "[64] x 64", product(suite, &[64], 64, DType::BF16, true, &narrow));
    for inner in LENGTHS.into_iter().filter(|_| suite.odd_shapes) {
        report.record_run(
            "linear",
            &format!("[24] x {inner}"),
            product(suite, &[24], inner, DType::BF16, true, &[1, 5, 65]),
        );
        report.record_run(
            "linear",
            &format!("[{inner}] x 24"),
            product(suite, &[inner], 24, DType::BF16, true, &[1, 5, 65]),
        );
    }
    for (hidden, head_dim) in [(1024, 256), (64, 16)].into_iter().filter(|(h, _)| *h > 64 || suite.odd_shapes)
    {
        let case = format!("hidden {hidden}, head {head_dim}");
        report.record_run("pointer_head", &case, pointer_head(suite, hidden, head_dim));
    }
}

/// What a projection multiplies by, in FP64: the stored weight plus its adapter, never rounded.
fn effective(projection: &Projection) -> Vec<f64> {
    let values = |tensor: &backend::HostTensor| -> Vec<f64> {
        match tensor.dtype {
            DType::F32 => {
                tensor.data.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
            }
            DType::BF16 => tensor
                .data
                .as_chunks::<2>()
                .0
                .iter()
                .map(|b| half::bf16::from_le_bytes(*b).to_f64())
                .collect(),
        }
    };
    let mut w = values(&projection.weight);
    if let Some(adapter) = &projection.adapter {
        let (a, b) = (values(&adapter.a), values(&adapter.b));
        let (rank, input) = (adapter.a.shape[0], adapter.a.shape[1]);
        for (row, w) in w.chunks_mut(input).enumerate() {
            for (i, w) in w.iter_mut().enumerate() {
                let sum: f64 = (0..rank).map(|r| b[row * rank + r] * a[r * input + i]).sum();
                *w += f64::from(adapter.scale) * sum;
            }
        }
    }
    w
}

/// The first of the largest count of rows against FP64; every smaller count, from the middle, against its bits.
fn product<B: Ops>(
    suite: &Suite<'_, B>,
    outputs: &[usize],
    input: usize,
    dtype: DType,
    adapted: bool,
    counts: &[usize],
) -> Result<Vec<(String, Outcome)>> {
    let parts: Vec<Projection> = (outputs.iter().zip(100..))
        .map(|(output, seed)| projection(dtype, *output, input, adapted, 3 * seed))
        .collect();
    let weight = suite.ops.weight(&parts)?;
    let width: usize = outputs.iter().sum();
    let most = counts.iter().copied().max().unwrap_or(1);
    let x = normals(20, most * input, 1.0);
    let run = |first: usize, count: usize| -> Result<(Vec<f32>, Vec<f32>)> {
        let (x, held) = suite.filled(Role::Operand, &x[first * input..(first + count) * input])?;
        let mut out = suite.poisoned(Role::Activation, count * width)?;
        suite.ops.linear(&x, &weight, count, &mut out)?;
        Ok((suite.ops.read(&out, count * width)?, held))
    };
    let (all, held) = run(0, most)?;
    // The reference is slow: a row in the middle and both ends stand for the others, whose bits are compared below.
    let w: Vec<f64> = parts.iter().flat_map(effective).collect();
    let bound = (suite.bound)("linear", SUM);
    let mut outcomes = Vec::new();
    for row in [0, most / 2, most - 1] {
        let expected = linear(&wide(&held[row * input..(row + 1) * input]), &w, input);
        let found = &all[row * width..(row + 1) * width];
        outcomes.push((format!("row {row} of {most}, FP64"), close(found, &expected, width, bound)));
    }
    for count in counts {
        for first in [0, (most - count) / 2, most - count] {
            let (some, _) = run(first, *count)?;
            let same = same_bits(&some, &all[first * width..(first + count) * width]);
            outcomes.push((format!("{count} rows from {first} among {most}"), same));
        }
    }
    Ok(outcomes)
}

fn pointer_head<B: Ops>(
    suite: &Suite<'_, B>,
    hidden: usize,
    head_dim: usize,
) -> Result<Vec<(String, Outcome)>> {
    let readouts = vec![
        Readout { decide: 0, options: vec![1, 2] },
        Readout { decide: 3, options: vec![4] },
        Readout { decide: 5, options: (6..71).collect() },
        Readout { decide: 1, options: (0..255).map(|option| option % 80).collect() },
    ];
    let mut pass = flat_pass(&[0; 80]);
    pass.readouts = readouts;
    let rows: usize = pass.readouts.iter().map(|readout| 1 + readout.options.len()).sum();
    let scale = 1.0 / (hidden as f32).sqrt();
    let weights = [30, 31].map(|seed| normals(seed, head_dim * hidden, scale));
    let biases = [32, 33].map(|seed| normals(seed, head_dim, 0.1));
    let [query, key] = [0, 1].map(|i| tensor(DType::F32, &[head_dim, hidden], &weights[i]).into());
    let (query, key) = (suite.ops.weight(&[query])?, suite.ops.weight(&[key])?);
    let (query_bias, key_bias) = (suite.parameter(&biases[0])?, suite.parameter(&biases[1])?);
    let h = normals(34, rows * hidden, 1.0);
    let run = |pass: &backend::Pass, h: &[f32]| -> Result<(Vec<f32>, Vec<f32>)> {
        let (h, held) = suite.filled(Role::Head, h)?;
        let layout = suite.ops.layout(pass, &[])?;
        let found =
            suite.ops.pointer_head(&h, &query, &query_bias, &key, &key_bias, hidden, head_dim, &layout)?;
        Ok((found, held))
    };
    let (found, held) = run(&pass, &h)?;
    let project = |index: usize, row: usize| -> Vec<f64> {
        let h = wide(&held[row * hidden..(row + 1) * hidden]);
        let y = linear(&h, &wide(&weights[index]), hidden);
        y.iter().zip(&biases[index]).map(|(y, b)| y + f64::from(*b)).collect()
    };
    let mut expected = Vec::new();
    let (mut row, mut alone) = (0, Vec::new());
    for readout in &pass.readouts {
        let query = project(0, row);
        for option in 1..=readout.options.len() {
            let z: f64 = project(1, row + option).iter().zip(&query).map(|(k, q)| k * q).sum();
            expected.push(z / (head_dim as f64).sqrt());
        }
        let mut only = flat_pass(&[0; 80]);
        only.readouts = vec![readout.clone()];
        let next = row + 1 + readout.options.len();
        alone.extend(run(&only, &h[row * hidden..next * hidden])?.0);
        row = next;
    }
    // The acceptance gate of the head alone is 1e-5 in a logit near 1.
    let bound = (suite.bound)("pointer_head", 4e-6);
    Ok(vec![
        ("FP64".to_owned(), close(&found, &expected, expected.len(), bound)),
        ("every question alone".to_owned(), same_bits(&alone, &found)),
    ])
}
