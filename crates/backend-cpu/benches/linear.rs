//! Prints how near matrix products over BF16 weights come to the FP32 rate of the `gemm` crate alone on the same shapes
//! (FP32 weights, same threads, same run), at the projections of the Kev-0.8B geometry.
//!
//! `cargo bench -p backend-cpu --bench linear [-- THREADS]`. Median of interleaved runs; every shape has several weights in
//! turn, so that none stays in a cache as none does in a forward pass.
#![allow(clippy::unwrap_used)] // A benchmark that cannot run says where.

use std::time::{Duration, Instant};

use backend::{DType, HostTensor, Ops, Role};
use backend_cpu::CpuOps;

/// Name, output rows, inner dimension, how many a model of 24 layers has.
const SHAPES: [(&str, usize, usize, usize); 5] = [
    ("linear in", 8224, 1024, 18),
    ("attention in", 5120, 1024, 6),
    ("mixer out", 1024, 2048, 24),
    ("gate_up", 7168, 1024, 24),
    ("down", 1024, 3584, 24),
];
const ROWS: [usize; 4] = [16, 64, 293, 512];
/// Weights of a shape in turn.
const COPIES: usize = 3;
const REPEATS: usize = 9;

fn noise(count: usize) -> Vec<f32> {
    let mut seed = count as u64;
    (0..count)
        .map(|_| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn tensor(dtype: DType, shape: &[usize], values: &[f32]) -> HostTensor {
    let data: Vec<u8> = match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_bits().to_le_bytes()).collect(),
    };
    HostTensor { dtype, shape: shape.to_vec(), data: data.into() }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

/// `out [rows, output] = x [rows, input] w [output, input]^T` by the `gemm` crate on its own threads.
#[allow(unsafe_code)] // The crate's interface; a benchmark only.
fn crate_alone(x: &[f32], w: &[f32], out: &mut [f32], rows: usize, output: usize, input: usize) {
    assert!(x.len() >= rows * input && w.len() >= output * input && out.len() >= rows * output);
    // SAFETY: the strides below address exactly the matrices whose sizes were just checked.
    unsafe {
        gemm::gemm(
            rows,
            output,
            input,
            out.as_mut_ptr(),
            1,
            output as isize,
            false,
            x.as_ptr(),
            1,
            input as isize,
            w.as_ptr(),
            input as isize,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}

fn main() {
    let threads: usize = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(0);
    let ops = CpuOps::new(threads).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    println!("{}; FP32 GFLOP/s, median of {REPEATS}", ops.describe());
    println!(
        "{:<14} {:>6} {:>6} {:>5} {:>10} {:>10} {:>7}",
        "shape", "N", "K", "M", "gemm crate", "ours", "ratio"
    );
    let mut totals = ROWS.map(|_| [0.0; 2]);
    for (name, output, input, layers) in SHAPES {
        let wide: Vec<Vec<f32>> = (0..COPIES).map(|copy| noise(output * input + copy)).collect();
        let weights: Vec<_> = wide
            .iter()
            .map(|w| {
                ops.weight(&[tensor(DType::BF16, &[output, input], &w[..output * input]).into()]).unwrap()
            })
            .collect();
        for (rows, total) in ROWS.into_iter().zip(&mut totals) {
            let values = noise(rows * input);
            let x = ops.parameter(&tensor(DType::F32, &[rows, input], &values)).unwrap();
            let mut out = ops.zeros(Role::Activation, rows * output).unwrap();
            let mut crate_out = vec![0.0; rows * output];
            let (mut alone, mut ours) = (Vec::new(), Vec::new());
            for repeat in 0..=REPEATS {
                for copy in 0..COPIES {
                    let start = Instant::now();
                    pool.install(|| crate_alone(&values, &wide[copy], &mut crate_out, rows, output, input));
                    let crate_time = start.elapsed();
                    let start = Instant::now();
                    ops.linear(&x, &weights[copy], rows, &mut out).unwrap();
                    // The first round warms up.
                    if repeat > 0 {
                        alone.push(crate_time);
                        ours.push(start.elapsed());
                    }
                }
            }
            let (alone, ours) = (median(alone), median(ours));
            total[0] += alone * layers as f64;
            total[1] += ours * layers as f64;
            let rate = |time: f64| 2e-9 * (rows * output * input) as f64 / time;
            println!(
                "{name:<14} {output:>6} {input:>6} {rows:>5} {:>10.1} {:>10.1} {:>7.2}",
                rate(alone),
                rate(ours),
                alone / ours
            );
        }
    }
    println!("\nall projections of a pass, ms");
    for (rows, [alone, ours]) in ROWS.into_iter().zip(totals) {
        println!(
            "M {rows:>4}: gemm crate {:>8.1}, ours {:>8.1}, ratio {:.2}",
            1e3 * alone,
            1e3 * ours,
            alone / ours
        );
    }
}
