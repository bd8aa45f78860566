//! Owns the checks: every operation against its oracle at its edges, and bit equality where the contract promises it.

use backend::{
    Attention, BackendError, DType, DeltaNet, HostTensor, KeyRange, LowRank, Ops, Pass, Projection, Readout,
    Result, Role, Segment,
};
use backend_cuda::{Buffer, CudaOps, Profile};
use bytes::Bytes;
use half::bf16;

use crate::Outcome;
use crate::oracle::{self, Random, relative_error, wide};
use crate::tree::{Step, Tree};

type Check = fn(&CudaOps) -> Outcome;

/// Every check, cheapest first.
pub(crate) const ALL: &[(&str, Check)] = &[
    ("refusals", refusals),
    ("embed and gather", embed_and_gather),
    ("rms norms", rms_norms),
    ("swiglu", swiglu),
    ("delta gates", delta_gates),
    ("gated norm", gated_norm),
    ("convolution", convolution),
    ("delta rule", delta_rule),
    ("delta rule, FP32 output", delta_rule_unrounded),
    ("query key value", query_key_value),
    ("attention", attention),
    ("pointer head", pointer_head),
    ("products", products),
    ("products, any number of rows", products_any_rows),
];

/// Largest accepted relative error (2-norm). FP32: rounding of sums of up to 10,000 terms stays under 1e-6 times a
/// small factor. BF16 storage rounds each element by up to 2^-9, at most twice in a row before it is compared.
fn bound(ops: &CudaOps) -> f64 {
    match ops.profile() {
        Profile::Exact => 3e-6,
        Profile::Fast => 6e-3,
    }
}

fn fail(error: BackendError) -> String {
    error.to_string()
}

/// The worst of a check's errors, each held against a bound.
struct Errors {
    worst: f64,
    bound: f64,
}

impl Errors {
    fn new(bound: f64) -> Self {
        Self { worst: 0.0, bound }
    }

    fn add(&mut self, what: &str, found: &[f32], expected: &[f64]) -> std::result::Result<(), String> {
        let error = relative_error(found, expected);
        if error.is_nan() || error > self.bound {
            return Err(format!("{what}: relative error {error:.2e}, bound {:.0e}", self.bound));
        }
        self.worst = self.worst.max(error);
        Ok(())
    }

    fn done(self) -> Outcome {
        Ok(format!("relative error <= {:.1e}", self.worst))
    }
}

fn same_bits(what: &str, a: &[f32], b: &[f32]) -> std::result::Result<(), String> {
    let different = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    if different == 0 && a.len() == b.len() {
        return Ok(());
    }
    Err(format!("{what}: {different} of {} values have other bits", a.len()))
}

/// A buffer that holds NaN, so that what was not written shows.
fn poisoned(ops: &CudaOps, role: Role, elements: usize) -> Result<Buffer> {
    ops.values(role, &vec![f32::NAN; elements])
}

/// The values as the device holds them.
fn held(ops: &CudaOps, role: Role, values: &[f32]) -> Result<(Buffer, Vec<f32>)> {
    let buffer = ops.values(role, values)?;
    let values = ops.read(&buffer, values.len())?;
    Ok((buffer, values))
}

fn tensor(dtype: DType, shape: &[usize], values: &[f32]) -> HostTensor {
    let data: Vec<u8> = match dtype {
        DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    };
    HostTensor { dtype, shape: shape.to_vec(), data: Bytes::from(data) }
}

/// The values a tensor of this dtype holds.
fn stored(dtype: DType, values: &[f32]) -> Vec<f32> {
    match dtype {
        DType::F32 => values.to_vec(),
        DType::BF16 => values.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
    }
}

fn projection(dtype: DType, shape: &[usize], values: &[f32]) -> Projection {
    tensor(dtype, shape, values).into()
}

fn parameter(ops: &CudaOps, values: &[f32]) -> Result<Buffer> {
    ops.parameter(&tensor(DType::F32, &[values.len()], values))
}

fn simple_pass(rows: usize, tokens: &[u32]) -> Pass {
    let keys = vec![KeyRange { row: 0, len: rows }];
    let segment = Segment { rows: 0..rows, position: 0, initial: None, last: None, level: 0, keys };
    Pass { tokens: tokens.to_vec(), segments: vec![segment], readouts: Vec::new() }
}

fn refusals(ops: &CudaOps) -> Outcome {
    let run = || -> Result<Vec<bool>> {
        let small = ops.zeros(Role::Residual, 10)?;
        let mut out = ops.zeros(Role::Residual, 100)?;
        let weight = parameter(ops, &[0.0; 10])?;
        let table = ops.weight(&[projection(DType::BF16, &[4, 10], &[0.0; 40])])?;
        let layout = ops.layout(&simple_pass(2, &[1, 4]), &[])?;
        let shape = Attention { heads: 2, kv_heads: 1, head_dim: 300, rotary_dim: 0 };
        let refused = |result: Result<()>| matches!(result, Err(BackendError::Contract { .. }));
        let uneven = [9, 10].map(|depth| projection(DType::BF16, &[1, depth], &vec![0.0; depth]));
        Ok(vec![
            refused(ops.rms_norm(&small, &weight, 1e-6, 2, &mut out)),
            refused(ops.embed(&table, &layout, &mut out)),
            refused(ops.attention(&small, &small, &small, &small, &shape, &layout, &mut out)),
            refused(ops.weight(&uneven).map(|_| ())),
            fills_up(ops),
            ops.read(&small, 11).is_err(),
        ])
    };
    let refused = run().map_err(fail)?;
    if refused.contains(&false) {
        Err(format!("not all refused: {refused:?}"))
    } else {
        Ok(format!("{} refused", refused.len()))
    }
}

/// Whether a device that has no memory left says so: 64 GiB at a time.
fn fills_up(ops: &CudaOps) -> bool {
    let mut taken = Vec::new();
    loop {
        match ops.zeros(Role::Residual, 1 << 34) {
            Ok(buffer) => taken.push(buffer),
            Err(error) => return matches!(error, BackendError::Memory { .. }),
        }
    }
}

fn embed_and_gather(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(0.0);
    for (width, dtype) in [(2560, DType::BF16), (130, DType::F32), (7, DType::BF16)] {
        let values = Random::new(1).normals(50 * width, 1.0);
        let expected = stored(dtype, &values);
        let tokens = [3, 49, 0, 3, 17];
        let mut pass = simple_pass(5, &tokens);
        pass.readouts =
            vec![Readout { decide: 4, options: vec![1, 0] }, Readout { decide: 2, options: vec![3] }];
        let run = || -> Result<(Vec<f32>, Vec<f32>)> {
            let table = ops.weight(&[projection(dtype, &[50, width], &values)])?;
            let layout = ops.layout(&pass, &[])?;
            let mut out = poisoned(ops, Role::Residual, 5 * width)?;
            ops.embed(&table, &layout, &mut out)?;
            let mut gathered = poisoned(ops, Role::Head, 5 * width)?;
            ops.gather_readouts(&out, width, &layout, &mut gathered)?;
            Ok((ops.read(&out, 5 * width)?, ops.read(&gathered, 5 * width)?))
        };
        let (embedded, gathered) = run().map_err(fail)?;
        let rows = |rows: &[usize]| {
            rows.iter().flat_map(|row| wide(&expected[row * width..][..width])).collect::<Vec<f64>>()
        };
        errors.add("embed", &embedded, &rows(&[3, 49, 0, 3, 17]))?;
        errors.add("gather", &gathered, &rows(&[17, 49, 3, 0, 3]))?;
    }
    errors.done()
}

fn rms_norms(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(bound(ops));
    for (rows, width) in [(1, 2560), (65, 128), (3, 5120), (5, 130), (2, 7)] {
        let mut random = Random::new(width as u64);
        let x = random.normals(rows * width, 2.0);
        let weight = random.normals(width, 0.2);
        let delta = random.normals(rows * width, 0.5);
        let expected = |x: &[f64]| {
            x.chunks(width)
                .flat_map(|row| {
                    let scale = oracle::rms_scale(row, 1e-6);
                    row.iter()
                        .zip(&weight)
                        .map(move |(x, w)| x * scale * (1.0 + f64::from(*w)))
                        .collect::<Vec<f64>>()
                })
                .collect::<Vec<f64>>()
        };
        let run = || -> Result<[Vec<f32>; 4]> {
            let weight = parameter(ops, &weight)?;
            let mut residual = ops.values(Role::Residual, &x)?;
            let (delta, delta_held) = held(ops, Role::Activation, &delta)?;
            let mut plain = poisoned(ops, Role::Operand, rows * width)?;
            ops.rms_norm(&residual, &weight, 1e-6, rows, &mut plain)?;
            let mut added = poisoned(ops, Role::Operand, rows * width)?;
            ops.add_rms_norm(&mut residual, &delta, &weight, 1e-6, rows, &mut added)?;
            let count = rows * width;
            Ok([ops.read(&plain, count)?, ops.read(&added, count)?, ops.read(&residual, count)?, delta_held])
        };
        let [plain, added, residual, delta] = run().map_err(fail)?;
        errors.add("plain", &plain, &expected(&wide(&x)))?;
        let sum: Vec<f64> = x.iter().zip(&delta).map(|(x, d)| f64::from(x + d)).collect();
        errors.add("sum", &residual, &sum)?;
        errors.add("with residual", &added, &expected(&sum))?;
    }
    errors.done()
}

fn swiglu(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(bound(ops));
    for (rows, inner) in [(1, 9216), (65, 256), (3, 37)] {
        let values = Random::new(3).normals(rows * 2 * inner, 3.0);
        let run = || -> Result<(Vec<f32>, Vec<f32>)> {
            let (x, held) = held(ops, Role::Activation, &values)?;
            let mut out = poisoned(ops, Role::Operand, rows * inner)?;
            ops.swiglu(&x, inner, rows, &mut out)?;
            Ok((ops.read(&out, rows * inner)?, held))
        };
        let (found, x) = run().map_err(fail)?;
        let expected: Vec<f64> = (0..rows * inner)
            .map(|i| {
                let (row, column) = (i / inner, i % inner);
                let gate = f64::from(x[row * 2 * inner + column]);
                oracle::silu(gate) * f64::from(x[row * 2 * inner + inner + column])
            })
            .collect();
        errors.add("swiglu", &found, &expected)?;
    }
    errors.done()
}

const LARGE: DeltaNet = DeltaNet { key_heads: 4, value_heads: 8, key_dim: 128, value_dim: 128, kernel: 4 };
const TINY: DeltaNet = DeltaNet { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, kernel: 4 };
const ODD: DeltaNet = DeltaNet { key_heads: 1, value_heads: 3, key_dim: 24, value_dim: 40, kernel: 3 };

fn delta_gates(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(3e-6);
    for shape in [LARGE, TINY, ODD] {
        let (rows, heads, stride) = (67, shape.value_heads, shape.projected_width());
        let mut random = Random::new(4);
        let projected = random.normals(rows * stride, 12.0);
        let a_log = random.normals(heads, 1.0);
        let dt_bias = random.normals(heads, 1.0);
        let run = || -> Result<(Vec<f32>, Vec<f32>)> {
            let (projected, held) = held(ops, Role::Activation, &projected)?;
            let mut gates = poisoned(ops, Role::Gates, rows * 2 * heads)?;
            let (a_log, dt_bias) = (parameter(ops, &a_log)?, parameter(ops, &dt_bias)?);
            ops.delta_gates(&projected, &a_log, &dt_bias, &shape, rows, &mut gates)?;
            Ok((ops.read(&gates, rows * 2 * heads)?, held))
        };
        let (found, projected) = run().map_err(fail)?;
        let mut expected = Vec::new();
        for row in 0..rows {
            let b = &projected[row * stride + shape.conv_dim() + shape.value_width()..][..2 * heads];
            expected.extend(b[..heads].iter().map(|b| oracle::sigmoid(f64::from(*b))));
            expected.extend((0..heads).map(|h| {
                -f64::from(a_log[h]).exp() * oracle::softplus(f64::from(b[heads + h]) + f64::from(dt_bias[h]))
            }));
        }
        errors.add("gates", &found, &expected)?;
    }
    errors.done()
}

fn gated_norm(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(bound(ops));
    for shape in [LARGE, TINY, ODD] {
        let rows = 33;
        let (dim, heads, stride) = (shape.value_dim, shape.value_heads, shape.projected_width());
        let mut random = Random::new(5);
        let o = random.normals(rows * heads * dim, 0.3);
        let projected = random.normals(rows * stride, 2.0);
        let weight: Vec<f32> = random.normals(dim, 0.2).iter().map(|x| 1.0 + x).collect();
        let run = || -> Result<[Vec<f32>; 3]> {
            let (mut o, o_held) = held(ops, Role::Operand, &o)?;
            let (projected, projected_held) = held(ops, Role::Activation, &projected)?;
            ops.gated_rms_norm(&mut o, &projected, &parameter(ops, &weight)?, 1e-6, &shape, rows)?;
            Ok([ops.read(&o, rows * heads * dim)?, o_held, projected_held])
        };
        let [found, o, projected] = run().map_err(fail)?;
        let mut expected = Vec::new();
        for (item, o) in o.chunks(dim).enumerate() {
            let o = wide(o);
            let scale = oracle::rms_scale(&o, 1e-6);
            let z = &projected[item / heads * stride + shape.conv_dim() + item % heads * dim..][..dim];
            expected.extend(
                (0..dim).map(|d| f64::from(weight[d]) * o[d] * scale * oracle::silu(f64::from(z[d]))),
            );
        }
        errors.add("gated norm", &found, &expected)?;
    }
    errors.done()
}

/// Rows of a matrix in the order of a step.
fn picked(values: &[f32], width: usize, step: &Step) -> Vec<f32> {
    step.rows.iter().flat_map(|row| values[row * width..][..width].to_vec()).collect()
}

fn put_back(target: &mut [f32], width: usize, step: &Step, values: &[f32]) {
    for (row, value) in step.rows.iter().zip(values.chunks(width)) {
        target[row * width..][..width].copy_from_slice(value);
    }
}

/// Trees whose lengths are the edges of convolutions, chunks, tiles, key blocks and spans; with the variable `SMALL`
/// only the first two, for runs under a checker.
fn trees() -> Vec<Tree> {
    let small = std::env::var_os("SMALL").is_some();
    let mut trees = vec![
        Tree::new(&[(1, &[1, 2]), (2, &[]), (3, &[4, 5, 1]), (4, &[63])]),
        Tree::new(&[(45, &[38, 52, 30, 44, 36, 48]), (64, &[64, 1]), (65, &[3])]),
        Tree::new(&[(127, &[2]), (128, &[65, 17]), (129, &[16])]),
        Tree::new(&[(300, &[31, 33])]),
        Tree::new(&[(500, &[40, 7])]),
    ];
    trees.truncate(if small { 2 } else { trees.len() });
    trees
}

/// Runs `run` for every way through every tree: the first way's output must meet the oracle, the others its bits.
fn over_trees(
    errors: &mut Errors,
    width: usize,
    run: impl Fn(&Tree, &[Step]) -> Result<Vec<f32>>,
    oracle: impl Fn(&Tree) -> Vec<f64>,
) -> std::result::Result<(), String> {
    for (index, tree) in trees().iter().enumerate() {
        let mut first: Option<Vec<f32>> = None;
        for (way, steps) in tree.ways() {
            let found = run(tree, &steps).map_err(fail)?;
            match &first {
                None => {
                    errors.add(&format!("tree {index} of width {width}, {way}"), &found, &oracle(tree))?;
                    first = Some(found);
                }
                Some(first) => same_bits(&format!("tree {index} of width {width}, {way}"), first, &found)?,
            }
        }
    }
    Ok(())
}

fn convolution(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(bound(ops));
    for shape in [LARGE, TINY, ODD] {
        let (width, stride) = (shape.conv_dim(), shape.projected_width());
        let mut random = Random::new(6);
        let projected = random.normals(700 * stride, 1.0);
        let weight = random.normals(width * shape.kernel, 0.5);
        let projected = stored(ops.profile().dtype(Role::Activation), &projected);
        let run = |tree: &Tree, steps: &[Step]| {
            let weight = parameter(ops, &weight)?;
            let mut tails = poisoned(ops, Role::ConvTail, tree.slots() * (shape.kernel - 1) * width)?;
            let mut all = vec![f32::NAN; tree.rows() * width];
            for step in steps {
                let layout = ops.layout(&step.pass, &[])?;
                let x = ops.values(Role::Activation, &picked(&projected, stride, step))?;
                let mut out = poisoned(ops, Role::Convolved, step.rows.len() * width)?;
                ops.conv_silu(&x, &weight, &shape, &layout, &mut tails, &mut out)?;
                put_back(&mut all, width, step, &ops.read(&out, step.rows.len() * width)?);
            }
            Ok(all)
        };
        over_trees(&mut errors, width, run, |tree| oracle::conv_silu(&projected, &weight, &shape, tree))?;
    }
    errors.done()
}

fn delta_rule(ops: &CudaOps) -> Outcome {
    delta_rule_into(ops, Role::Operand, bound(ops).max(1e-5))
}

/// The output unrounded: what is left is the TF32 of the products, whose operands round by up to 2^-12 each.
fn delta_rule_unrounded(ops: &CudaOps) -> Outcome {
    delta_rule_into(ops, Role::Residual, if ops.profile() == Profile::Fast { 1e-3 } else { 1e-5 })
}

/// Values as the convolution of a profile leaves them: `fast` rounds to the eleven bits that TF32 has.
fn as_convolved(ops: &CudaOps, values: Vec<f32>) -> Vec<f32> {
    match ops.profile() {
        Profile::Exact => values,
        Profile::Fast => values.iter().map(|x| f32::from_bits((x.to_bits() + 0x1000) & !0x1fff)).collect(),
    }
}

fn delta_rule_into(ops: &CudaOps, role: Role, bound: f64) -> Outcome {
    let mut errors = Errors::new(bound);
    for shape in [LARGE, TINY, ODD] {
        let (width, heads, out_width) = (shape.conv_dim(), shape.value_heads, shape.value_width());
        let mut random = Random::new(7);
        let qkv = as_convolved(ops, random.normals(700 * width, 1.0));
        let gates: Vec<f32> = (0..700)
            .flat_map(|_| {
                let beta: Vec<f32> = (0..heads).map(|_| random.uniform()).collect();
                let decay: Vec<f32> = (0..heads).map(|_| -0.2 * random.uniform()).collect();
                [beta, decay].concat()
            })
            .collect();
        let run = |tree: &Tree, steps: &[Step]| {
            let state = heads * shape.key_dim * shape.value_dim;
            let mut states = poisoned(ops, Role::Recurrent, tree.slots() * state)?;
            let mut all = vec![f32::NAN; tree.rows() * out_width];
            for step in steps {
                let layout = ops.layout(&step.pass, &[])?;
                let x = ops.values(Role::Convolved, &picked(&qkv, width, step))?;
                let g = ops.values(Role::Gates, &picked(&gates, 2 * heads, step))?;
                let mut out = poisoned(ops, role, step.rows.len() * out_width)?;
                ops.delta_rule(&x, &g, &shape, &layout, &mut states, &mut out)?;
                put_back(&mut all, out_width, step, &ops.read(&out, step.rows.len() * out_width)?);
            }
            Ok(all)
        };
        over_trees(&mut errors, width, run, |tree| oracle::delta_rule(&qkv, &gates, &shape, tree))?;
    }
    errors.done()
}

const WIDE_HEADS: Attention = Attention { heads: 8, kv_heads: 2, head_dim: 256, rotary_dim: 64 };
const SMALL_HEADS: Attention = Attention { heads: 4, kv_heads: 2, head_dim: 64, rotary_dim: 16 };
const SIX_HEADS: Attention = Attention { heads: 6, kv_heads: 1, head_dim: 128, rotary_dim: 32 };
const ODD_HEADS: Attention = Attention { heads: 3, kv_heads: 1, head_dim: 40, rotary_dim: 10 };

fn inv_freq(shape: &Attention) -> Vec<f32> {
    (0..shape.rotary_dim / 2).map(|j| 1e7_f32.powf(-2.0 * j as f32 / shape.rotary_dim as f32)).collect()
}

fn query_key_value(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(bound(ops));
    for shape in [WIDE_HEADS, SMALL_HEADS, SIX_HEADS, ODD_HEADS] {
        let tree = Tree::new(&[(67, &[5, 1])]);
        let step = &tree.ways()[0].1[0];
        let rows = step.rows.len();
        let mut random = Random::new(8);
        let projected = stored(
            ops.profile().dtype(Role::Activation),
            &random.normals(rows * shape.projected_width(), 1.0),
        );
        let norms = [random.normals(shape.head_dim, 0.2), random.normals(shape.head_dim, 0.2)];
        let kv_width = shape.kv_heads * shape.head_dim;
        let run = || -> Result<[Vec<f32>; 3]> {
            let layout = ops.layout(&step.pass, &inv_freq(&shape))?;
            let x = ops.values(Role::Activation, &projected)?;
            let mut query = poisoned(ops, Role::Activation, rows * shape.heads * shape.head_dim)?;
            let mut keys = poisoned(ops, Role::KeyValue, tree.key_rows() * kv_width)?;
            let mut values = poisoned(ops, Role::KeyValue, tree.key_rows() * kv_width)?;
            let [q, k] = [parameter(ops, &norms[0])?, parameter(ops, &norms[1])?];
            ops.query_key_value(&x, &q, &k, 1e-6, &shape, &layout, &mut query, &mut keys, &mut values)?;
            let arena = tree.key_rows() * kv_width;
            Ok([
                ops.read(&query, rows * shape.heads * shape.head_dim)?,
                ops.read(&keys, arena)?,
                ops.read(&values, arena)?,
            ])
        };
        let [query, keys, values] = run().map_err(fail)?;
        let positions: Vec<usize> =
            step.pass.segments.iter().flat_map(|s| s.position..s.position + s.rows.len()).collect();
        let expected = oracle::query_key_value(
            &projected,
            (&norms[0], &norms[1]),
            1e-6,
            &shape,
            &inv_freq(&shape),
            &positions,
        );
        errors.add("query", &query, &expected.query)?;
        let key_rows: Vec<usize> = step
            .pass
            .segments
            .iter()
            .filter_map(|s| s.keys.last())
            .flat_map(|r| r.row..r.row + r.len)
            .collect();
        let own = |arena: &[f32]| {
            key_rows.iter().flat_map(|row| arena[row * kv_width..][..kv_width].to_vec()).collect::<Vec<f32>>()
        };
        errors.add("keys", &own(&keys), &expected.keys)?;
        errors.add("values", &own(&values), &expected.values)?;
        let untouched = keys.chunks(kv_width).enumerate().filter(|(row, _)| !key_rows.contains(row));
        if untouched.into_iter().any(|(_, row)| row.iter().any(|x| !x.is_nan())) {
            return Err("a key row of nobody was written".to_owned());
        }
    }
    errors.done()
}

fn attention(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(bound(ops));
    for shape in [WIDE_HEADS, SMALL_HEADS, SIX_HEADS, ODD_HEADS] {
        let width = shape.heads * shape.head_dim;
        let kv_width = shape.kv_heads * shape.head_dim;
        let mut random = Random::new(9);
        let profile = ops.profile();
        let projected =
            stored(profile.dtype(Role::Activation), &random.normals(700 * shape.projected_width(), 1.0));
        let queries = stored(profile.dtype(Role::Activation), &random.normals(700 * width, 1.5));
        let keys = stored(profile.dtype(Role::KeyValue), &random.normals(700 * kv_width, 1.0));
        let values = stored(profile.dtype(Role::KeyValue), &random.normals(700 * kv_width, 1.0));
        let run = |tree: &Tree, steps: &[Step]| {
            let mut all = vec![f32::NAN; tree.rows() * width];
            // The arenas as they are once every node has written its keys; what nobody wrote is NaN.
            let mut arenas =
                [vec![f32::NAN; tree.key_rows() * kv_width], vec![f32::NAN; tree.key_rows() * kv_width]];
            for step in steps {
                for segment in &step.pass.segments {
                    let range = segment.keys.last().copied().unwrap_or(KeyRange { row: 0, len: 0 });
                    for i in 0..range.len {
                        let row = step.rows[segment.rows.start + i];
                        for (arena, source) in arenas.iter_mut().zip([&keys, &values]) {
                            arena[(range.row + i) * kv_width..][..kv_width]
                                .copy_from_slice(&source[row * kv_width..][..kv_width]);
                        }
                    }
                }
                let layout = ops.layout(&step.pass, &inv_freq(&shape))?;
                let x = ops.values(Role::Activation, &picked(&projected, shape.projected_width(), step))?;
                let q = ops.values(Role::Activation, &picked(&queries, width, step))?;
                let k = ops.values(Role::KeyValue, &arenas[0])?;
                let v = ops.values(Role::KeyValue, &arenas[1])?;
                let mut out = poisoned(ops, Role::Operand, step.rows.len() * width)?;
                ops.attention(&q, &x, &k, &v, &shape, &layout, &mut out)?;
                put_back(&mut all, width, step, &ops.read(&out, step.rows.len() * width)?);
            }
            Ok(all)
        };
        let oracle = |tree: &Tree| {
            let rotated = oracle::Rotated { query: wide(&queries), keys: wide(&keys), values: wide(&values) };
            oracle::attention(&rotated, &projected, &shape, tree)
        };
        over_trees(&mut errors, width, run, oracle)?;
    }
    errors.done()
}

fn pointer_head(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(3e-6);
    for (hidden, dim) in [(2560, 256), (128, 64), (33, 9)] {
        let mut pass = simple_pass(40, &[0; 40]);
        pass.readouts = vec![
            Readout { decide: 39, options: (0..30).collect() },
            Readout { decide: 3, options: vec![1] },
            Readout { decide: 20, options: vec![5, 6] },
        ];
        let rows = 36;
        let mut random = Random::new(10);
        let h = random.normals(rows * hidden, 1.0);
        let weights = [(); 2].map(|()| random.normals(dim * hidden, 1.8 / (hidden as f32).sqrt()));
        let biases = [(); 2].map(|()| random.normals(dim, 0.3));
        let run = || -> Result<Vec<f32>> {
            let layout = ops.layout(&pass, &[])?;
            let h = ops.values(Role::Head, &h)?;
            let weight = |i: usize| ops.weight(&[projection(DType::F32, &[dim, hidden], &weights[i])]);
            let (q, k) = (weight(0)?, weight(1)?);
            let (qb, kb) = (parameter(ops, &biases[0])?, parameter(ops, &biases[1])?);
            ops.pointer_head(&h, &q, &qb, &k, &kb, hidden, dim, &layout)
        };
        let found = run().map_err(fail)?;
        let project = |row: usize, i: usize| -> Vec<f64> {
            (0..dim)
                .map(|d| {
                    let products = (0..hidden)
                        .map(|c| f64::from(weights[i][d * hidden + c]) * f64::from(h[row * hidden + c]));
                    products.sum::<f64>() + f64::from(biases[i][d])
                })
                .collect()
        };
        let mut expected = Vec::new();
        let mut row = 0;
        for readout in &pass.readouts {
            let q = project(row, 0);
            for option in 1..=readout.options.len() {
                let k = project(row + option, 1);
                expected.push(q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt());
            }
            row += 1 + readout.options.len();
        }
        errors.add("logits", &found, &expected)?;
    }
    errors.done()
}

fn products(ops: &CudaOps) -> Outcome {
    let mut errors = Errors::new(bound(ops));
    let shapes =
        [(1, 96, 64), (65, 200, 128), (130, 56, 40), (7, 13, 37), (200, 136, 2560), (300, 2560, 4096)];
    const RANK: usize = 3;
    for (rows, columns, depth) in shapes {
        for (dtype, adapted) in
            [(DType::BF16, false), (DType::F32, false), (DType::BF16, true), (DType::F32, true)]
        {
            let mut random = Random::new(11);
            let x = random.normals(rows * depth, 1.0);
            let values = random.normals(columns * depth, 1.0 / (depth as f32).sqrt());
            let (first, second) = (columns / 3, columns - columns / 3);
            let split = first * depth;
            let (a, b) = (random.normals(RANK * depth, 0.1), random.normals(second * RANK, 0.1));
            let run = || -> Result<(Vec<f32>, Vec<f32>)> {
                let mut parts = [
                    projection(dtype, &[first, depth], &values[..split]),
                    projection(dtype, &[second, depth], &values[split..]),
                ];
                parts[1].adapter = adapted.then(|| LowRank {
                    a: tensor(DType::F32, &[RANK, depth], &a),
                    b: tensor(DType::F32, &[second, RANK], &b),
                    scale: 0.5,
                });
                let weight = ops.weight(&parts)?;
                let (x, held) = held(ops, Role::Operand, &x)?;
                let mut out = poisoned(ops, Role::Activation, rows * columns)?;
                ops.linear(&x, &weight, rows, &mut out)?;
                Ok((ops.read(&out, rows * columns)?, held))
            };
            let (found, x) = run().map_err(fail)?;
            let mut weight = stored(dtype, &values);
            if adapted {
                for (i, w) in weight[split..].iter_mut().enumerate() {
                    let sum: f32 =
                        (0..RANK).map(|r| b[i / depth * RANK + r] * a[r * depth + i % depth]).sum();
                    *w += 0.5 * sum;
                }
                if ops.profile() == Profile::Fast {
                    weight = stored(dtype, &weight);
                }
            }
            let mut expected = Vec::with_capacity(rows * columns);
            let mut sampled = Vec::with_capacity(rows * columns);
            for row in (0..rows).step_by(rows.div_ceil(20)) {
                for column in 0..columns {
                    let products = (0..depth)
                        .map(|c| f64::from(x[row * depth + c]) * f64::from(weight[column * depth + c]));
                    expected.push(products.sum());
                    sampled.push(found[row * columns + column]);
                }
            }
            errors.add(
                &format!("{rows} x {columns} x {depth} {dtype:?} adapter {adapted}"),
                &sampled,
                &expected,
            )?;
            if found.iter().any(|x| x.is_nan()) {
                return Err(format!("{rows} x {columns} x {depth} {dtype:?}: an element was not written"));
            }
        }
    }
    errors.done()
}

/// Weight shapes of the 4B: columns, depth.
pub(crate) const PROJECTIONS: [(usize, usize); 5] =
    [(12_352, 2560), (10_240, 2560), (2560, 4096), (18_432, 2560), (2560, 9216)];

/// A row's bits do not depend on how many rows there are, where it stands among them, and whether the shape was
/// warmed up.
fn products_any_rows(ops: &CudaOps) -> Outcome {
    const MOST: usize = 2400;
    let mut random = Random::new(12);
    let mut weights = Vec::new();
    for (columns, depth) in PROJECTIONS {
        // Three thirds of one random block: enough variety, little time to make.
        let values = random.normals(columns * depth, 1.0 / (depth as f32).sqrt());
        weights.push(ops.weight(&[projection(DType::BF16, &[columns, depth], &values)]).map_err(fail)?);
    }
    let mut first: Vec<Vec<f32>> = Vec::new();
    for warm in [false, true] {
        if warm {
            ops.warm_up(MOST).map_err(fail)?;
        }
        for (index, (columns, depth)) in PROJECTIONS.into_iter().enumerate() {
            let x = Random::new(13).normals(MOST * depth, 1.0);
            for rows in [1, 7, 64, 65, 293, MOST] {
                // The last rows, so that a row stands at different places.
                let run = || -> Result<Vec<f32>> {
                    let x = ops.values(Role::Operand, &x[(MOST - rows) * depth..])?;
                    let mut out = poisoned(ops, Role::Activation, rows * columns)?;
                    ops.linear(&x, &weights[index], rows, &mut out)?;
                    let all = ops.read(&out, rows * columns)?;
                    let kept = rows.min(64);
                    Ok(all[(rows - kept) * columns..].to_vec())
                };
                let found = run().map_err(fail)?;
                if !warm && rows == 1 {
                    first.push(Vec::new());
                }
                let known = &mut first[index];
                let common = known.len().min(found.len());
                let what = format!("[{columns}, {depth}], {rows} rows, warm {warm}");
                same_bits(&what, &known[known.len() - common..], &found[found.len() - common..])?;
                if found.len() > known.len() {
                    *known = found;
                }
            }
        }
    }
    for line in ops.report() {
        println!("       {line}");
    }
    Ok(format!("{} shapes, 1 to {MOST} rows: same bits", PROJECTIONS.len()))
}
