//! Runs the conformance suite of `backend::Ops` on this backend, and compares the bits of different numbers of threads.

use backend::{Attention, DType, DeltaNet, HostTensor, KeyRange, Ops, Pass, Result, Role, Segment};
use backend_cpu::CpuOps;
use testkit::ops::run_all;

#[test]
fn conforms() {
    let report = run_all(&CpuOps::new(2).unwrap());
    println!("{report}");
    report.assert_passed();
}

fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut seed = seed + 1;
    (0..count)
        .map(|_| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn tensor(shape: &[usize], seed: u64) -> HostTensor {
    let values = noise(shape.iter().product(), seed);
    let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    HostTensor { dtype: DType::F32, shape: shape.to_vec(), data: data.into() }
}

/// A state of 150 tokens with branches of 70, 1 and 33, and a sequence of its own of 90.
fn pass() -> Pass {
    let mut pass = Pass::default();
    let mut row = 0;
    for (len, position, initial, last, level) in [
        (150, 0, None, Some(1), 0),
        (90, 0, None, None, 0),
        (70, 150, Some(1), Some(0), 1),
        (1, 150, Some(1), None, 1),
        (33, 150, Some(1), None, 1),
    ] {
        let own = KeyRange { row, len };
        let keys = if position > 0 { vec![KeyRange { row: 0, len: 150 }, own] } else { vec![own] };
        pass.segments.push(Segment { rows: row..row + len, position, initial, last, level, keys });
        row += len;
    }
    pass.tokens = vec![0; row];
    pass
}

/// Every operation whose work is shared between threads, one after another as in a layer; all that they wrote.
fn everything(ops: &CpuOps) -> Result<Vec<Vec<f32>>> {
    let pass = pass();
    let rows = pass.rows();
    let layout = ops.layout(&pass, &noise(16, 1))?;
    let net = DeltaNet { key_heads: 2, value_heads: 6, key_dim: 48, value_dim: 40, kernel: 4 };
    let heads = Attention { heads: 6, kv_heads: 2, head_dim: 72, rotary_dim: 32 };
    let x = ops.parameter(&tensor(&[rows, 200], 2))?;
    let zeros = |role, elements: usize| ops.zeros(role, elements);
    let mut written = Vec::new();

    let mut normed = zeros(Role::Operand, rows * 200)?;
    ops.rms_norm(&x, &ops.parameter(&tensor(&[200], 3))?, 1e-6, rows, &mut normed)?;
    let width = net.projected_width();
    let weight = ops.weight(&[tensor(&[width - 12, 200], 4).into(), tensor(&[12, 200], 5).into()])?;
    let mut projected = zeros(Role::Activation, rows * width)?;
    ops.linear(&normed, &weight, rows, &mut projected)?;
    written.push(ops.read(&projected, rows * width)?);

    let mut tails = zeros(Role::ConvTail, 2 * 3 * net.conv_dim())?;
    let mut convolved = zeros(Role::Convolved, rows * net.conv_dim())?;
    let taps = ops.parameter(&tensor(&[net.conv_dim() * 4], 6))?;
    ops.conv_silu(&projected, &taps, &net, &layout, &mut tails, &mut convolved)?;
    written.push(ops.read(&tails, 2 * 3 * net.conv_dim())?);
    written.push(ops.read(&convolved, rows * net.conv_dim())?);

    let (a_log, dt_bias) = (ops.parameter(&tensor(&[6], 7))?, ops.parameter(&tensor(&[6], 8))?);
    let mut gates = zeros(Role::Gates, rows * 12)?;
    ops.delta_gates(&projected, &a_log, &dt_bias, &net, rows, &mut gates)?;
    let mut states = zeros(Role::Recurrent, 2 * 6 * 48 * 40)?;
    let mut mixed = zeros(Role::Operand, rows * net.value_width())?;
    ops.delta_rule(&convolved, &gates, &net, &layout, &mut states, &mut mixed)?;
    written.push(ops.read(&states, 2 * 6 * 48 * 40)?);
    ops.gated_rms_norm(&mut mixed, &projected, &ops.parameter(&tensor(&[40], 9))?, 1e-6, &net, rows)?;
    written.push(ops.read(&mixed, rows * net.value_width())?);

    let width = heads.projected_width();
    let projected = ops.parameter(&tensor(&[rows, width], 10))?;
    let norm = ops.parameter(&tensor(&[72], 11))?;
    let mut query = zeros(Role::Activation, rows * 6 * 72)?;
    let mut keys = zeros(Role::KeyValue, rows * 2 * 72)?;
    let mut values = zeros(Role::KeyValue, rows * 2 * 72)?;
    ops.query_key_value(&projected, &norm, &norm, 1e-6, &heads, &layout, &mut query, &mut keys, &mut values)?;
    let mut attended = zeros(Role::Operand, rows * 6 * 72)?;
    ops.attention(&query, &projected, &keys, &values, &heads, &layout, &mut attended)?;
    written.extend([ops.read(&query, rows * 6 * 72)?, ops.read(&keys, rows * 2 * 72)?]);
    written.push(ops.read(&attended, rows * 6 * 72)?);

    let mut residual = ops.parameter(&tensor(&[rows, 200], 12))?;
    let out_proj = ops.weight(&[tensor(&[200, 6 * 72], 13).into()])?;
    let mut delta = zeros(Role::Activation, rows * 200)?;
    ops.linear(&attended, &out_proj, rows, &mut delta)?;
    ops.add_rms_norm(&mut residual, &delta, &ops.parameter(&tensor(&[200], 14))?, 1e-6, rows, &mut normed)?;
    let mut inner = zeros(Role::Operand, rows * 100)?;
    ops.swiglu(&normed, 100, rows, &mut inner)?;
    written.extend([ops.read(&residual, rows * 200)?, ops.read(&inner, rows * 100)?]);
    Ok(written)
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let expected = everything(&CpuOps::new(1).unwrap()).unwrap();
    assert!(expected.iter().flatten().all(|x| x.is_finite()));
    for threads in [2, 5] {
        let found = everything(&CpuOps::new(threads).unwrap()).unwrap();
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found == expected, "result {index} with {threads} threads");
        }
    }
}

#[test]
fn a_large_arena_is_zero_and_free_until_touched() {
    // 256 GiB of address space: more than the machine has, so it must not be written on allocation.
    let ops = CpuOps::new(1).unwrap();
    match ops.zeros(Role::KeyValue, 1 << 36) {
        Ok(buffer) => assert_eq!(ops.read(&buffer, 5).unwrap(), [0.0; 5]),
        // A system that promises no more than it has refuses, which is as good.
        Err(error) => assert!(matches!(error, backend::BackendError::Memory { .. }), "{error}"),
    }
    assert!(ops.zeros(Role::KeyValue, usize::MAX / 2).is_err());
}
