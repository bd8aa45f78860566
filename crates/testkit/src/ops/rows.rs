//! Owns the checks of operations that stay within a row: embedding, norms, gates, the MLP's product, gathering.

use backend::{DType, DeltaNet, Ops, Readout, Result, Role};

use super::compare::{close, same_bits};
use super::input::{Random, flat_pass, normals, projection, stored, wide};
use super::reference::{rms, sigmoid, silu, softplus, zero_centred};
use super::{LENGTHS, Outcome, Report, Suite};

/// A sum of 2048 squares in FP32 errs by less than 12 roundings when lanes are added pairwise; the root halves that.
const NORM: f64 = 1e-6;
/// An exponential, a quotient and two products, each within two units in the last place.
const ACTIVATION: f64 = 1e-6;
/// As an activation, but `a + dt_bias` may cancel to its own rounding error before the exponential enlarges it.
const GATES: f64 = 4e-6;

const EPS: f32 = 1e-6;

pub(super) fn run<B: Ops>(suite: &Suite<'_, B>, report: &mut Report) {
    embed(suite, report);
    gather(suite, report);
    let wide_rows = suite.widths().map(|width| (3, width)).chain([(5, 1024), (2, 2560)]);
    let many_rows = LENGTHS.map(|rows| (rows, 64));
    for (rows, width) in wide_rows.chain(many_rows) {
        let case = format!("{rows} rows of {width}");
        report.record_run("rms_norm", &case, norms(suite, rows, width));
        report.record_run("swiglu", &case, swiglu(suite, rows, width));
    }
    for shape in delta_nets(suite) {
        for rows in LENGTHS.into_iter().filter(|rows| rows * shape.projected_width() < 1 << 21) {
            let case = format!("{rows} rows, {shape:?}");
            report.record_run("delta_gates", &case, delta_gates(suite, &shape, rows));
            report.record_run("gated_rms_norm", &case, gated_rms_norm(suite, &shape, rows));
        }
    }
}

/// Shapes of a DeltaNet mixer: heads as released, then odd ones.
pub(super) fn delta_nets<B: Ops>(suite: &Suite<'_, B>) -> Vec<DeltaNet> {
    let mut shapes = vec![
        DeltaNet { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 128, kernel: 4 },
        DeltaNet { key_heads: 1, value_heads: 1, key_dim: 128, value_dim: 128, kernel: 4 },
    ];
    if suite.odd_shapes {
        shapes.push(DeltaNet { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, kernel: 4 });
        shapes.push(DeltaNet { key_heads: 1, value_heads: 3, key_dim: 24, value_dim: 40, kernel: 3 });
        shapes.push(DeltaNet { key_heads: 1, value_heads: 1, key_dim: 5, value_dim: 7, kernel: 2 });
    }
    shapes
}

impl<B: Ops> Suite<'_, B> {
    /// Widths of a row that end anywhere, where the backend takes them.
    fn widths(&self) -> impl Iterator<Item = usize> {
        LENGTHS.into_iter().filter(|_| self.odd_shapes)
    }
}

/// Runs `run` on all `rows` and on the last row alone, which must give the same bits; checks all against `expected`.
fn checked<T>(
    rows: usize,
    width: usize,
    bound: f64,
    run: impl Fn(std::ops::Range<usize>) -> Result<(Vec<f32>, T)>,
    expected: impl Fn(T) -> Vec<f64>,
) -> Result<Vec<(String, Outcome)>> {
    let (found, inputs) = run(0..rows)?;
    let (alone, _) = run(rows - 1..rows)?;
    Ok(vec![
        ("FP64".to_owned(), close(&found, &expected(inputs), width, bound)),
        ("the last row alone".to_owned(), same_bits(&alone, &found[(rows - 1) * width..])),
    ])
}

fn embed<B: Ops>(suite: &Suite<'_, B>, report: &mut Report) {
    for (width, dtype) in
        suite.widths().map(|width| (width, DType::BF16)).chain([(1024, DType::BF16), (64, DType::F32)])
    {
        let run = || {
            let table = projection(dtype, 50, width, false, 1);
            let expected = stored(dtype, &normals(1, 50 * width, 1.0 / (width as f32).sqrt()));
            let tokens: Vec<u32> = (0..65).map(|row| (row * 7 + 49) % 50).collect();
            let layout = suite.ops.layout(&flat_pass(&tokens), &[])?;
            let mut out = suite.poisoned(Role::Residual, tokens.len() * width)?;
            suite.ops.embed(&suite.ops.weight(&[table])?, &layout, &mut out)?;
            let found = suite.ops.read(&out, tokens.len() * width)?;
            let expected: Vec<f64> = tokens
                .iter()
                .flat_map(|token| &expected[*token as usize * width..][..width])
                .copied()
                .collect();
            // Widening is exact.
            let bound = (suite.bound)("embed", 0.0);
            Ok(vec![("exact".to_owned(), close(&found, &expected, width, bound))])
        };
        report.record_run("embed", &format!("width {width}, {dtype:?}"), run());
    }
}

fn gather<B: Ops>(suite: &Suite<'_, B>, report: &mut Report) {
    for width in suite.widths().chain([64, 1024]) {
        let run = || {
            let mut pass = flat_pass(&[0; 70]);
            pass.readouts = vec![
                Readout { decide: 69, options: vec![0, 63, 64] },
                Readout { decide: 5, options: vec![5] },
                Readout { decide: 1, options: (0..65).rev().collect() },
            ];
            let (x, held) = suite.filled(Role::Residual, &normals(2, 70 * width, 1.0))?;
            let rows: Vec<usize> = pass
                .readouts
                .iter()
                .flat_map(|readout| std::iter::once(readout.decide).chain(readout.options.iter().copied()))
                .collect();
            let mut out = suite.poisoned(Role::Residual, rows.len() * width)?;
            suite.ops.gather_readouts(&x, width, &suite.ops.layout(&pass, &[])?, &mut out)?;
            let found = suite.ops.read(&out, rows.len() * width)?;
            let expected: Vec<f32> =
                rows.iter().flat_map(|row| &held[row * width..][..width]).copied().collect();
            Ok(vec![("copied".to_owned(), same_bits(&found, &expected))])
        };
        report.record_run("gather_readouts", &format!("width {width}"), run());
    }
}

fn norms<B: Ops>(suite: &Suite<'_, B>, rows: usize, width: usize) -> Result<Vec<(String, Outcome)>> {
    let bound = (suite.bound)("rms_norm", NORM);
    let count = rows * width;
    let (x, delta) = (normals(3, count, 2.0), normals(4, count, 0.5));
    let weight = normals(5, width, 0.2);
    let parameter = suite.parameter(&weight)?;
    let wide_weight = wide(&weight);
    let expected = |x: Vec<f32>| -> Vec<f64> {
        x.chunks(width).flat_map(|row| zero_centred(&wide(row), &wide_weight, f64::from(EPS))).collect()
    };
    let plain = |range: std::ops::Range<usize>| {
        let (x, held) = suite.filled(Role::Residual, &x[range.start * width..range.end * width])?;
        let mut out = suite.poisoned(Role::Operand, held.len())?;
        suite.ops.rms_norm(&x, &parameter, EPS, range.len(), &mut out)?;
        Ok((suite.ops.read(&out, held.len())?, held))
    };
    let added = |range: std::ops::Range<usize>| {
        let part = range.start * width..range.end * width;
        let mut residual = (suite.upload)(Role::Residual, &x[part.clone()])?;
        let (delta, _) = suite.filled(Role::Activation, &delta[part.clone()])?;
        let mut out = suite.poisoned(Role::Operand, part.len())?;
        suite.ops.add_rms_norm(&mut residual, &delta, &parameter, EPS, range.len(), &mut out)?;
        Ok((suite.ops.read(&out, part.len())?, suite.ops.read(&residual, part.len())?))
    };
    let (before, delta) = (suite.filled(Role::Residual, &x)?.1, suite.filled(Role::Activation, &delta)?.1);
    let sum: Vec<f64> = before.iter().zip(&delta).map(|(x, d)| f64::from(*x) + f64::from(*d)).collect();
    let (_, residual) = added(0..rows)?;
    let mut outcomes = checked(rows, width, bound, plain, expected)?;
    outcomes.extend(
        checked(rows, width, bound, added, expected)?
            .into_iter()
            .map(|(what, outcome)| (format!("residual added, {what}"), outcome)),
    );
    outcomes.push(("residual".to_owned(), close(&residual, &sum, width, bound)));
    Ok(outcomes)
}

fn swiglu<B: Ops>(suite: &Suite<'_, B>, rows: usize, inner: usize) -> Result<Vec<(String, Outcome)>> {
    let x = normals(6, rows * 2 * inner, 3.0);
    let run = |range: std::ops::Range<usize>| {
        let (x, held) = suite.filled(Role::Activation, &x[range.start * 2 * inner..range.end * 2 * inner])?;
        let mut out = suite.poisoned(Role::Operand, range.len() * inner)?;
        suite.ops.swiglu(&x, inner, range.len(), &mut out)?;
        Ok((suite.ops.read(&out, range.len() * inner)?, held))
    };
    let expected = |x: Vec<f32>| {
        let row = |row: &[f32]| -> Vec<f64> {
            let (gate, up) = row.split_at(inner);
            gate.iter().zip(up).map(|(gate, up)| silu(f64::from(*gate)) * f64::from(*up)).collect()
        };
        x.chunks(2 * inner).flat_map(row).collect()
    };
    checked(rows, inner, (suite.bound)("swiglu", ACTIVATION), run, expected)
}

fn delta_gates<B: Ops>(
    suite: &Suite<'_, B>,
    shape: &DeltaNet,
    rows: usize,
) -> Result<Vec<(String, Outcome)>> {
    let (heads, width) = (shape.value_heads, shape.projected_width());
    // Wide enough to reach both sides of softplus' threshold and both tails of the sigmoid.
    let projected = normals(7, rows * width, 12.0);
    let (a_log, dt_bias) = (normals(8, heads, 1.0), normals(9, heads, 1.0));
    let parameters = (suite.parameter(&a_log)?, suite.parameter(&dt_bias)?);
    let run = |range: std::ops::Range<usize>| {
        let (x, held) = suite.filled(Role::Activation, &projected[range.start * width..range.end * width])?;
        let mut out = suite.poisoned(Role::Gates, range.len() * 2 * heads)?;
        suite.ops.delta_gates(&x, &parameters.0, &parameters.1, shape, range.len(), &mut out)?;
        Ok((suite.ops.read(&out, range.len() * 2 * heads)?, held))
    };
    let expected = |x: Vec<f32>| {
        let row = |row: &[f32]| -> Vec<f64> {
            let (b, a) = row[width - 2 * heads..].split_at(heads);
            let decay =
                |h: usize| -f64::from(a_log[h]).exp() * softplus(f64::from(a[h]) + f64::from(dt_bias[h]));
            b.iter().map(|b| sigmoid(f64::from(*b))).chain((0..heads).map(decay)).collect()
        };
        x.chunks(width).flat_map(row).collect()
    };
    checked(rows, 2 * heads, (suite.bound)("delta_gates", GATES), run, expected)
}

fn gated_rms_norm<B: Ops>(
    suite: &Suite<'_, B>,
    shape: &DeltaNet,
    rows: usize,
) -> Result<Vec<(String, Outcome)>> {
    let (width, dim, out_width) = (shape.projected_width(), shape.value_dim, shape.value_width());
    let mut random = Random::new(10);
    // Some heads near zero, where eps decides.
    let o: Vec<f32> = (0..rows * shape.value_heads)
        .flat_map(|_| {
            let scale = if random.uniform() < 0.2 { 1e-3 } else { 0.3 };
            normals(random.next(), dim, scale)
        })
        .collect();
    let z = normals(11, rows * width, 2.0);
    let weight: Vec<f32> = normals(12, dim, 0.2).iter().map(|w| 1.0 + w).collect();
    let parameter = suite.parameter(&weight)?;
    let run = |range: std::ops::Range<usize>| {
        let (mut o, held) =
            suite.filled(Role::Operand, &o[range.start * out_width..range.end * out_width])?;
        let (z, z_held) = suite.filled(Role::Activation, &z[range.start * width..range.end * width])?;
        suite.ops.gated_rms_norm(&mut o, &z, &parameter, EPS, shape, range.len())?;
        Ok((suite.ops.read(&o, held.len())?, (held, z_held)))
    };
    let expected = |(o, z): (Vec<f32>, Vec<f32>)| {
        let head = |(index, o): (usize, &[f32])| -> Vec<f64> {
            let (row, head) = (index / shape.value_heads, index % shape.value_heads);
            let z = &z[row * width + shape.conv_dim() + head * dim..][..dim];
            let normed = rms(&wide(o), f64::from(EPS));
            (0..dim).map(|d| f64::from(weight[d]) * normed[d] * silu(f64::from(z[d]))).collect()
        };
        o.chunks(dim).enumerate().flat_map(head).collect()
    };
    checked(rows, out_width, (suite.bound)("gated_rms_norm", NORM), run, expected)
}
