//! Owns the checks that a broken contract is refused by name: never a panic, never memory out of bounds.

use backend::{Attention, BackendError, DType, DeltaNet, KeyRange, Ops, Readout, Result, Role, Segment};

use super::input::{flat_pass, normals, projection, tensor};
use super::{Outcome, Report, Suite};

pub(super) fn run<B: Ops>(suite: &Suite<'_, B>, report: &mut Report) {
    for (operation, case, refused) in rows(suite).into_iter().chain(weights(suite)).chain(mixers(suite)) {
        report.record(operation, format_args!("refuses {case}"), refused);
    }
}

type Case = (&'static str, &'static str, Outcome);

fn refused<T>(result: Result<T>) -> Outcome {
    match result {
        Err(BackendError::Contract { .. } | BackendError::Pass(_)) => Ok(0.0),
        Err(other) => Err(format!("another error: {other}")),
        Ok(_) => Err("accepted".to_owned()),
    }
}

/// Inputs that every refusal needs; their own failure is a failed check.
fn with<T>(made: Result<T>, case: impl FnOnce(T) -> Result<()>) -> Outcome {
    match made {
        Ok(made) => refused(case(made)),
        Err(error) => Err(format!("inputs: {error}")),
    }
}

fn rows<B: Ops>(suite: &Suite<'_, B>) -> Vec<Case> {
    let ops = suite.ops;
    let buffers = || -> Result<[B::Buffer; 2]> {
        Ok([ops.zeros(Role::Residual, 2 * 64 - 1)?, ops.zeros(Role::Residual, 4 * 64)?])
    };
    let weight = || suite.parameter(&[0.0; 64]);
    let table = || ops.weight(&[projection(DType::BF16, 4, 64, false, 1)]);
    let readouts = |row| {
        let mut pass = flat_pass(&[0, 1]);
        pass.readouts = vec![Readout { decide: row, options: vec![0, 1] }];
        pass
    };
    let far_keys = {
        let mut pass = flat_pass(&[0, 1]);
        pass.segments[0].keys = vec![KeyRange { row: 0, len: 3 }];
        pass
    };
    vec![
        ("read", "more than there is", with(buffers(), |[short, _]| ops.read(&short, 128).map(drop))),
        ("layout", "a readout outside the pass", refused(ops.layout(&readouts(2), &[]).map(drop))),
        ("layout", "keys of another length", refused(ops.layout(&far_keys, &[]).map(drop))),
        (
            "embed",
            "a token outside the vocabulary",
            with(buffers(), |[_, mut out]| {
                ops.embed(&table()?, &ops.layout(&flat_pass(&[0, 4]), &[])?, &mut out)
            }),
        ),
        (
            "embed",
            "a short output",
            with(buffers(), |[mut short, _]| {
                ops.embed(&table()?, &ops.layout(&flat_pass(&[0, 3]), &[])?, &mut short)
            }),
        ),
        (
            "rms_norm",
            "a short input",
            with(buffers(), |[short, mut out]| ops.rms_norm(&short, &weight()?, 1e-6, 2, &mut out)),
        ),
        (
            "rms_norm",
            "a short output",
            with(buffers(), |[mut short, x]| ops.rms_norm(&x, &weight()?, 1e-6, 2, &mut short)),
        ),
        (
            "add_rms_norm",
            "a short delta",
            with(buffers(), |[short, mut out]| {
                let mut residual = ops.zeros(Role::Residual, 128)?;
                ops.add_rms_norm(&mut residual, &short, &weight()?, 1e-6, 2, &mut out)
            }),
        ),
        ("swiglu", "a short input", with(buffers(), |[short, mut out]| ops.swiglu(&short, 32, 2, &mut out))),
        ("swiglu", "a short output", with(buffers(), |[mut short, x]| ops.swiglu(&x, 64, 2, &mut short))),
        (
            "gather_readouts",
            "a short output",
            with(buffers(), |[mut short, x]| {
                ops.gather_readouts(&x, 64, &ops.layout(&readouts(1), &[])?, &mut short)
            }),
        ),
    ]
}

fn weights<B: Ops>(suite: &Suite<'_, B>) -> Vec<Case> {
    let ops = suite.ops;
    let short = |mut tensor: backend::HostTensor| {
        tensor.data.truncate(tensor.data.len() - 1);
        tensor
    };
    let uneven = [64, 65].map(|input| projection(DType::BF16, 2, input, false, 1));
    let cut = short(projection(DType::BF16, 2, 64, false, 1).weight).into();
    let mut adapter = projection(DType::BF16, 2, 64, true, 1);
    if let Some(low_rank) = &mut adapter.adapter {
        low_rank.b = tensor(DType::F32, &[3, 16], &normals(1, 48, 1.0));
    }
    let product = |rows: usize| {
        let weight = ops.weight(&[projection(DType::BF16, 32, 64, false, 1)])?;
        let x = ops.zeros(Role::Operand, 128)?;
        ops.linear(&x, &weight, rows, &mut ops.zeros(Role::Activation, 64)?)
    };
    let head = || -> Result<Vec<f32>> {
        let weight = || ops.weight(&[tensor(DType::F32, &[16, 64], &normals(1, 16 * 64, 1.0)).into()]);
        let bias = suite.parameter(&[0.0; 16])?;
        let mut pass = flat_pass(&[0, 1]);
        pass.readouts = vec![Readout { decide: 0, options: vec![1] }];
        let h = ops.zeros(Role::Head, 2 * 64 - 1)?;
        ops.pointer_head(&h, &weight()?, &bias, &weight()?, &bias, 64, 16, &ops.layout(&pass, &[])?)
    };
    vec![
        ("weight", "no parts", refused(ops.weight(&[]).map(drop))),
        ("weight", "parts of two widths", refused(ops.weight(&uneven).map(drop))),
        ("weight", "too few bytes", refused(ops.weight(&[cut]).map(drop))),
        ("weight", "an adapter of another shape", refused(ops.weight(&[adapter]).map(drop))),
        (
            "parameter",
            "too few bytes",
            refused(ops.parameter(&short(tensor(DType::F32, &[4], &[0.0; 4]))).map(drop)),
        ),
        ("linear", "more rows than the buffers have", refused(product(3))),
        ("pointer_head", "too few rows", refused(head().map(drop))),
    ]
}

fn mixers<B: Ops>(suite: &Suite<'_, B>) -> Vec<Case> {
    let ops = suite.ops;
    let net = DeltaNet { key_heads: 1, value_heads: 1, key_dim: 128, value_dim: 128, kernel: 4 };
    let shape = Attention { heads: 2, kv_heads: 1, head_dim: 256, rotary_dim: 64 };
    let inv_freq = vec![1.0; 32];
    let pass = {
        let mut pass = flat_pass(&[0, 0]);
        pass.segments = vec![Segment { last: Some(2), ..pass.segments[0].clone() }];
        pass
    };
    let zeros = |role, elements: usize| ops.zeros(role, elements);
    let conv = || {
        let x = zeros(Role::Activation, 2 * net.projected_width())?;
        let weight = suite.parameter(&vec![0.0; net.conv_dim() * 4])?;
        let mut tails = zeros(Role::ConvTail, 2 * 3 * net.conv_dim())?;
        let mut out = zeros(Role::Convolved, 2 * net.conv_dim())?;
        ops.conv_silu(&x, &weight, &net, &ops.layout(&pass, &[])?, &mut tails, &mut out)
    };
    let rule = |slots: usize, gates: usize| {
        let qkv = zeros(Role::Convolved, 2 * net.conv_dim())?;
        let gates = zeros(Role::Gates, gates)?;
        let mut states = zeros(Role::Recurrent, slots * 128 * 128)?;
        let mut out = zeros(Role::Operand, 2 * 128)?;
        ops.delta_rule(&qkv, &gates, &net, &ops.layout(&pass, &[])?, &mut states, &mut out)
    };
    let gates = || {
        let x = zeros(Role::Activation, 2 * net.projected_width())?;
        let bias = suite.parameter(&[0.0])?;
        ops.delta_gates(&x, &bias, &bias, &net, 2, &mut zeros(Role::Gates, 3)?)
    };
    let gated = || {
        let x = zeros(Role::Activation, 2 * net.projected_width())?;
        let mut o = zeros(Role::Operand, 2 * 128)?;
        ops.gated_rms_norm(&mut o, &x, &suite.parameter(&[0.0; 127])?, 1e-6, &net, 2)
    };
    let project = |rows: usize, frequencies: &[f32]| {
        let x = zeros(Role::Activation, 2 * shape.projected_width())?;
        let norm = suite.parameter(&[0.0; 256])?;
        let mut query = zeros(Role::Activation, 2 * 512)?;
        let [mut keys, mut values] = [zeros(Role::KeyValue, rows * 256)?, zeros(Role::KeyValue, rows * 256)?];
        let layout = ops.layout(&pass, frequencies)?;
        ops.query_key_value(&x, &norm, &norm, 1e-6, &shape, &layout, &mut query, &mut keys, &mut values)
    };
    let attend = || {
        let x = zeros(Role::Activation, 2 * shape.projected_width())?;
        let query = zeros(Role::Activation, 2 * 512)?;
        let keys = zeros(Role::KeyValue, 256)?;
        let layout = ops.layout(&pass, &inv_freq)?;
        ops.attention(&query, &x, &keys, &keys, &shape, &layout, &mut zeros(Role::Operand, 2 * 512)?)
    };
    vec![
        ("conv_silu", "a slot outside the arena", refused(conv())),
        ("delta_gates", "a short output", refused(gates())),
        ("delta_rule", "a slot outside the arena", refused(rule(2, 4))),
        ("delta_rule", "short gates", refused(rule(3, 3))),
        ("gated_rms_norm", "a weight of another length", refused(gated())),
        ("query_key_value", "a key row outside the arena", refused(project(1, &inv_freq))),
        ("query_key_value", "rotary tables of another width", refused(project(2, &inv_freq[..31]))),
        ("attention", "a key row outside the arena", refused(attend())),
    ]
}
