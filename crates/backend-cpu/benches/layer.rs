//! Prints what every operation of a Kev-0.8B layer costs, at a short request (a state of 45 tokens with six questions, 293
//! in all) and a long one (2,200 and five, 2,400), and the share of what is not a matrix product in a whole pass.
//!
//! `cargo bench -p backend-cpu --bench layer [-- THREADS]`. Median of five runs of each operation.
#![allow(clippy::unwrap_used)] // A benchmark that cannot run says where.

use std::time::Instant;

use backend::{
    Attention, DType, DeltaNet, HostTensor, KeyRange, LowRank, Ops, Pass, Projection, Role, Segment,
};
use backend_cpu::CpuOps;

const NET: DeltaNet = DeltaNet { key_heads: 16, value_heads: 16, key_dim: 128, value_dim: 128, kernel: 4 };
const HEADS: Attention = Attention { heads: 8, kv_heads: 2, head_dim: 256, rotary_dim: 64 };
const HIDDEN: usize = 1024;
const INNER: usize = 3584;
const LINEAR_LAYERS: usize = 18;
const FULL_LAYERS: usize = 6;
const REPEATS: usize = 5;

fn noise(count: usize, scale: f32) -> Vec<f32> {
    let mut seed = count as u64;
    (0..count)
        .map(|_| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            scale * ((seed >> 40) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect()
}

fn tensor(dtype: DType, shape: &[usize], scale: f32) -> HostTensor {
    let values = noise(shape.iter().product(), scale);
    let data: Vec<u8> = match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_bits().to_le_bytes()).collect(),
    };
    HostTensor { dtype, shape: shape.to_vec(), data: data.into() }
}

/// As profile `exact` has it: BF16 with an unmerged adapter of rank 16.
fn projection(output: usize, input: usize) -> Projection {
    let scale = 1.0 / (input as f32).sqrt();
    Projection {
        weight: tensor(DType::BF16, &[output, input], scale),
        adapter: Some(LowRank {
            a: tensor(DType::F32, &[16, input], scale),
            b: tensor(DType::F32, &[output, 16], 0.1),
            scale: 2.0,
        }),
    }
}

/// A state and the branches that continue it, in one pass.
fn tree(state: usize, branches: &[usize]) -> Pass {
    let state_keys = KeyRange { row: 0, len: state };
    let mut pass = Pass::default();
    pass.segments.push(Segment {
        rows: 0..state,
        position: 0,
        initial: None,
        last: Some(0),
        level: 0,
        keys: vec![state_keys],
    });
    let mut row = state;
    for len in branches {
        pass.segments.push(Segment {
            rows: row..row + len,
            position: state,
            initial: Some(0),
            last: None,
            level: 1,
            keys: vec![state_keys, KeyRange { row, len: *len }],
        });
        row += len;
    }
    pass.tokens = vec![0; row];
    pass
}

/// Name, layers that have it, whether it is a matrix product, milliseconds.
type Line = (&'static str, usize, bool, f64);

fn time(
    lines: &mut Vec<Line>,
    name: &'static str,
    layers: usize,
    mut run: impl FnMut() -> backend::Result<()>,
) {
    let mut times: Vec<f64> = (0..=REPEATS)
        .map(|_| {
            let start = Instant::now();
            run().unwrap();
            start.elapsed().as_secs_f64()
        })
        .skip(1)
        .collect();
    times.sort_by(f64::total_cmp);
    lines.push((name, layers, name.starts_with("linear"), 1e3 * times[REPEATS / 2]));
}

fn measure(ops: &CpuOps, pass: &Pass) -> backend::Result<Vec<Line>> {
    let rows = pass.rows();
    let layout = ops.layout(pass, &noise(HEADS.rotary_dim / 2, 1.0))?;
    let buffer = |width: usize| ops.parameter(&tensor(DType::F32, &[rows, width], 1.0));
    let parameter = |len: usize| ops.parameter(&tensor(DType::F32, &[len], 0.5));
    let mut lines = Vec::new();
    let both = LINEAR_LAYERS + FULL_LAYERS;

    let mut residual = buffer(HIDDEN)?;
    let mut normed = buffer(HIDDEN)?;
    let norm = parameter(HIDDEN)?;
    let mut delta = buffer(HIDDEN)?;
    // Twice a layer.
    time(&mut lines, "add_rms_norm", 2 * both, || {
        ops.add_rms_norm(&mut residual, &delta, &norm, 1e-6, rows, &mut normed)
    });

    let width = NET.projected_width();
    let weight = ops.weight(&[
        projection(NET.conv_dim(), HIDDEN),
        projection(NET.value_width(), HIDDEN),
        projection(NET.value_heads, HIDDEN),
        projection(NET.value_heads, HIDDEN),
    ])?;
    let mut projected = buffer(width)?;
    time(&mut lines, "linear: DeltaNet in", LINEAR_LAYERS, || {
        ops.linear(&normed, &weight, rows, &mut projected)
    });
    let taps = parameter(NET.conv_dim() * NET.kernel)?;
    let mut tails = ops.zeros(Role::ConvTail, 3 * NET.conv_dim())?;
    let mut convolved = buffer(NET.conv_dim())?;
    time(&mut lines, "conv_silu", LINEAR_LAYERS, || {
        ops.conv_silu(&projected, &taps, &NET, &layout, &mut tails, &mut convolved)
    });
    let (a_log, dt_bias) = (parameter(NET.value_heads)?, parameter(NET.value_heads)?);
    let mut gates = buffer(2 * NET.value_heads)?;
    time(&mut lines, "delta_gates", LINEAR_LAYERS, || {
        ops.delta_gates(&projected, &a_log, &dt_bias, &NET, rows, &mut gates)
    });
    let mut states = ops.zeros(Role::Recurrent, NET.value_heads * NET.key_dim * NET.value_dim)?;
    let mut mixed = buffer(NET.value_width())?;
    time(&mut lines, "delta_rule", LINEAR_LAYERS, || {
        ops.delta_rule(&convolved, &gates, &NET, &layout, &mut states, &mut mixed)
    });
    let gated = parameter(NET.value_dim)?;
    time(&mut lines, "gated_rms_norm", LINEAR_LAYERS, || {
        ops.gated_rms_norm(&mut mixed, &projected, &gated, 1e-6, &NET, rows)
    });

    let (heads_width, kv_width) = (HEADS.heads * HEADS.head_dim, HEADS.kv_heads * HEADS.head_dim);
    let weight = ops.weight(&[
        projection(2 * heads_width, HIDDEN),
        projection(kv_width, HIDDEN),
        projection(kv_width, HIDDEN),
    ])?;
    time(&mut lines, "linear: attention in", FULL_LAYERS, || {
        ops.linear(&normed, &weight, rows, &mut projected)
    });
    let head_norm = parameter(HEADS.head_dim)?;
    let (mut query, mut keys, mut values) = (buffer(heads_width)?, buffer(kv_width)?, buffer(kv_width)?);
    time(&mut lines, "query_key_value", FULL_LAYERS, || {
        ops.query_key_value(
            &projected,
            &head_norm,
            &head_norm,
            1e-6,
            &HEADS,
            &layout,
            &mut query,
            &mut keys,
            &mut values,
        )
    });
    time(&mut lines, "attention", FULL_LAYERS, || {
        ops.attention(&query, &projected, &keys, &values, &HEADS, &layout, &mut mixed)
    });

    let weight = ops.weight(&[projection(HIDDEN, NET.value_width())])?;
    time(&mut lines, "linear: mixer out", both, || ops.linear(&mixed, &weight, rows, &mut delta));
    let weight = ops.weight(&[projection(INNER, HIDDEN), projection(INNER, HIDDEN)])?;
    let mut gate_up = buffer(2 * INNER)?;
    time(&mut lines, "linear: gate, up", both, || ops.linear(&normed, &weight, rows, &mut gate_up));
    let mut inner = buffer(INNER)?;
    time(&mut lines, "swiglu", both, || ops.swiglu(&gate_up, INNER, rows, &mut inner));
    let weight = ops.weight(&[projection(HIDDEN, INNER)])?;
    time(&mut lines, "linear: down", both, || ops.linear(&inner, &weight, rows, &mut delta));
    Ok(lines)
}

fn main() {
    let threads: usize = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(0);
    let ops = CpuOps::new(threads).unwrap();
    println!("{}", ops.describe());
    for (state, branches) in [(45, &[38, 52, 30, 44, 36, 48][..]), (2200, &[40, 40, 40, 40, 40])] {
        let pass = tree(state, branches);
        let lines = measure(&ops, &pass).unwrap();
        let whole: f64 = lines.iter().map(|(_, layers, _, time)| *layers as f64 * time).sum();
        let rest: f64 =
            lines.iter().filter(|line| !line.2).map(|(_, layers, _, time)| *layers as f64 * time).sum();
        println!("\n{} tokens: {:<13} {:>9} {:>7} {:>9}", pass.rows(), "", "ms each", "times", "share");
        for (name, layers, _, time) in &lines {
            let share = 100.0 * *layers as f64 * time / whole;
            println!("  {name:<22} {time:>9.3} {layers:>7} {share:>8.1}%");
        }
        println!("  a pass: {whole:.0} ms, {:.1} % of it outside matrix products", 100.0 * rest / whole);
    }
}
