//! Owns timing and rounding on random weights of the 4B's shape: every operation, the whole layer loop, and how far
//! profile `fast` is from `exact`.
//!
//! Operations are recorded and replayed, so that launch gaps are those of a recorded pass. Weights rotate through
//! several copies and come from memory; activations stay in the cache as they do in a forward pass.

use std::time::Instant;

use backend::{Attention, DType, DeltaNet, HostTensor, Ops, Pass, Readout, Result, Role};
use backend_cuda::{Buffer, CudaOps, Layout, Profile, Weight};
use bytes::Bytes;
use half::bf16;

use crate::oracle::Random;
use crate::tree::Tree;

const HIDDEN: usize = 2560;
const INNER: usize = 9216;
const DELTA: DeltaNet = DeltaNet { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, kernel: 4 };
const FULL: Attention = Attention { heads: 16, kv_heads: 4, head_dim: 256, rotary_dim: 64 };
const EPS: f32 = 1e-6;
/// Dimension of the pointer head.
const HEAD: usize = 256;
const LAYERS: usize = 32;
const VOCABULARY: usize = 1000;
/// Of the published pointer head.
const TEMPERATURE: f64 = 2.406_050_072_164_233;

/// A workload: text length, branch lengths, whether the text was seen before, how many such trees.
struct Load {
    name: &'static str,
    state: usize,
    branches: &'static [usize],
    cached: bool,
    trees: usize,
}

const LOADS: &[Load] = &[
    Load { name: "L1", state: 45, branches: &[38, 52, 30, 44, 36, 48], cached: false, trees: 1 },
    Load { name: "L2", state: 45, branches: &[38, 52, 30, 44, 36, 48], cached: true, trees: 1 },
    Load { name: "L3", state: 2200, branches: &[40; 5], cached: false, trees: 1 },
    Load { name: "L4", state: 2200, branches: &[40; 5], cached: true, trees: 1 },
    Load { name: "T8", state: 45, branches: &[38, 52, 30, 44, 36, 48], cached: false, trees: 8 },
    Load { name: "T64", state: 45, branches: &[38, 52, 30, 44, 36, 48], cached: false, trees: 64 },
];

impl Load {
    fn tree(&self) -> Tree {
        Tree::new(&vec![(self.state, self.branches); self.trees])
    }

    fn pass(&self, tree: &Tree, seed: u64) -> Pass {
        let mut ways = tree.ways_without_pieces();
        let steps = if self.cached { ways.remove(1) } else { ways.remove(0) };
        let mut pass = steps.into_iter().next_back().map_or_else(Pass::default, |step| step.pass);
        let states = if self.cached { 0 } else { self.trees };
        for segment in &pass.segments[states..] {
            let end = segment.rows.end;
            pass.readouts.push(Readout { decide: end - 1, options: vec![end - 9, end - 5] });
        }
        let mut random = Random::new(seed);
        for token in &mut pass.tokens {
            *token = (random.uniform() * VOCABULARY as f32) as u32;
        }
        pass
    }
}

enum Mixer {
    Delta { project: Weight, conv: Buffer, a_log: Buffer, dt_bias: Buffer, norm: Buffer, out: Weight },
    Full { project: Weight, query_norm: Buffer, key_norm: Buffer, out: Weight },
}

struct Layer {
    before: Buffer,
    mixer: Mixer,
    after: Buffer,
    gate_up: Weight,
    down: Weight,
}

struct Head {
    norm: Buffer,
    query: Weight,
    query_bias: Buffer,
    key: Weight,
    key_bias: Buffer,
}

/// Random BF16 numbers of one standard deviation, that weights are cut from at different places.
struct Block(Bytes);

impl Block {
    fn new(seed: u64, deviation: f32) -> Self {
        let mut random = Random::new(seed);
        let values = (0..50_000_000).flat_map(|_| bf16::from_f32(random.normal() * deviation).to_le_bytes());
        Self(Bytes::from(values.collect::<Vec<u8>>()))
    }

    fn tensor(&self, shape: &[usize], salt: usize) -> HostTensor {
        let bytes = 2 * shape.iter().product::<usize>();
        let offset = salt * 40_004 % (self.0.len() - bytes);
        HostTensor { dtype: DType::BF16, shape: shape.to_vec(), data: self.0.slice(offset..offset + bytes) }
    }
}

/// Numbers of the recipe that synthetic checkpoints follow: projections N / sqrt(inputs), those back into the residual
/// stream a tenth of that, and the like.
struct Recipe {
    hidden: Block,
    out: Block,
    down: Block,
}

impl Recipe {
    fn new() -> Self {
        let deviation = |inputs: usize, scale: f32| scale / (inputs as f32).sqrt();
        Self {
            hidden: Block::new(1, deviation(HIDDEN, 1.0)),
            out: Block::new(2, deviation(DELTA.value_width(), 0.1)),
            down: Block::new(3, deviation(INNER, 0.1)),
        }
    }
}

fn vector(ops: &CudaOps, values: Vec<f32>) -> Result<Buffer> {
    let data: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    ops.parameter(&HostTensor { dtype: DType::BF16, shape: vec![values.len()], data: Bytes::from(data) })
}

fn layer(ops: &CudaOps, recipe: &Recipe, index: usize) -> Result<Layer> {
    let weight = |block: &Block, shape: [usize; 2], salt: usize| {
        ops.weight(&[block.tensor(&shape, index * 97 + salt * 13).into()])
    };
    let mut random = Random::new(100 + index as u64);
    let mut normals = |len: usize, scale: f32, mean: f32| -> Result<Buffer> {
        vector(ops, random.normals(len, scale).into_iter().map(|x| x + mean).collect())
    };
    let mixer = if index % 4 == 3 {
        Mixer::Full {
            project: weight(&recipe.hidden, [FULL.projected_width(), HIDDEN], 1)?,
            query_norm: normals(FULL.head_dim, 0.2, 0.0)?,
            key_norm: normals(FULL.head_dim, 0.2, 0.0)?,
            out: weight(&recipe.out, [HIDDEN, FULL.heads * FULL.head_dim], 4)?,
        }
    } else {
        let mut uniform = Random::new(index as u64);
        let a_log = (0..DELTA.value_heads).map(|_| (0.02 + 0.5 * uniform.uniform()).ln()).collect();
        Mixer::Delta {
            project: weight(&recipe.hidden, [DELTA.projected_width(), HIDDEN], 1)?,
            conv: normals(DELTA.conv_dim() * DELTA.kernel, 0.5, 0.0)?,
            a_log: vector(ops, a_log)?,
            dt_bias: normals(DELTA.value_heads, 1.0, -1.0)?,
            norm: normals(DELTA.value_dim, 0.2, 1.0)?,
            out: weight(&recipe.out, [HIDDEN, DELTA.value_width()], 6)?,
        }
    };
    Ok(Layer {
        before: normals(HIDDEN, 0.2, 0.0)?,
        mixer,
        after: normals(HIDDEN, 0.2, 0.0)?,
        gate_up: weight(&recipe.hidden, [2 * INNER, HIDDEN], 9)?,
        down: weight(&recipe.down, [HIDDEN, INNER], 10)?,
    })
}

/// Everything a pass reads and writes.
struct Workspace {
    residual: Buffer,
    normed: Buffer,
    projected: Buffer,
    qkv: Buffer,
    gates: Buffer,
    mixed: Buffer,
    query: Buffer,
    delta: Buffer,
    gate_up: Buffer,
    inner: Buffer,
    gathered: Buffer,
    head: Buffer,
    tails: Buffer,
    states: Buffer,
    keys: Buffer,
    values: Buffer,
}

impl Workspace {
    fn new(ops: &CudaOps, tree: &Tree) -> Result<Self> {
        let rows = tree.rows();
        let slots = tree.slots();
        let arena = tree.key_rows() * FULL.kv_heads * FULL.head_dim;
        let state = DELTA.value_heads * DELTA.key_dim * DELTA.value_dim;
        Ok(Self {
            residual: ops.zeros(Role::Residual, rows * HIDDEN)?,
            normed: ops.zeros(Role::Operand, rows * HIDDEN)?,
            projected: ops.zeros(Role::Activation, rows * DELTA.projected_width())?,
            qkv: ops.zeros(Role::Convolved, rows * DELTA.conv_dim())?,
            gates: ops.zeros(Role::Gates, rows * 2 * DELTA.value_heads)?,
            mixed: ops.zeros(Role::Operand, rows * DELTA.value_width())?,
            query: ops.zeros(Role::Activation, rows * FULL.heads * FULL.head_dim)?,
            delta: ops.zeros(Role::Activation, rows * HIDDEN)?,
            gate_up: ops.zeros(Role::Activation, rows * 2 * INNER)?,
            inner: ops.zeros(Role::Operand, rows * INNER)?,
            gathered: ops.zeros(Role::Residual, rows * HIDDEN)?,
            head: ops.zeros(Role::Head, rows * HIDDEN)?,
            tails: ops.zeros(Role::ConvTail, slots * (DELTA.kernel - 1) * DELTA.conv_dim())?,
            states: ops.zeros(Role::Recurrent, slots * state)?,
            keys: ops.zeros(Role::KeyValue, arena)?,
            values: ops.zeros(Role::KeyValue, arena)?,
        })
    }
}

struct Bench<'a> {
    ops: &'a CudaOps,
    table: Weight,
    layers: Vec<Layer>,
    head: Head,
}

impl<'a> Bench<'a> {
    fn new(ops: &'a CudaOps, recipe: &Recipe) -> Result<Self> {
        let layers = (0..LAYERS).map(|index| layer(ops, recipe, index)).collect::<Result<Vec<Layer>>>()?;
        let mut random = Random::new(7);
        let mut matrix = |rows: usize, deviation: f32| {
            let values = random.normals(rows * HIDDEN, deviation);
            let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let tensor = HostTensor { dtype: DType::F32, shape: vec![rows, HIDDEN], data: Bytes::from(data) };
            ops.weight(&[tensor.into()])
        };
        let table = matrix(VOCABULARY, 1.0)?;
        let head_deviation = 1.8 / (HIDDEN as f32).sqrt();
        let (query, key) = (matrix(HEAD, head_deviation)?, matrix(HEAD, head_deviation)?);
        let head = Head {
            norm: vector(ops, random.normals(HIDDEN, 0.2))?,
            query,
            query_bias: vector(ops, random.normals(HEAD, 0.3))?,
            key,
            key_bias: vector(ops, random.normals(HEAD, 0.3))?,
        };
        Ok(Self { ops, table, layers, head })
    }

    /// Logits of every question of a pass.
    fn answer(&self, pass: &Pass, w: &mut Workspace) -> Result<Vec<f32>> {
        let layout = self.ops.layout(pass, &inv_freq())?;
        let readouts = pass.readouts.iter().map(|readout| 1 + readout.options.len()).sum();
        self.body(&layout, pass.rows(), readouts, w)?;
        self.logits(&layout, w)
    }

    fn mixer(&self, mixer: &Mixer, layout: &Layout, rows: usize, w: &mut Workspace) -> Result<()> {
        let ops = self.ops;
        match mixer {
            Mixer::Delta { project, conv, a_log, dt_bias, norm, .. } => {
                ops.linear(&w.normed, project, rows, &mut w.projected)?;
                ops.conv_silu(&w.projected, conv, &DELTA, layout, &mut w.tails, &mut w.qkv)?;
                ops.delta_gates(&w.projected, a_log, dt_bias, &DELTA, rows, &mut w.gates)?;
                ops.delta_rule(&w.qkv, &w.gates, &DELTA, layout, &mut w.states, &mut w.mixed)?;
                ops.gated_rms_norm(&mut w.mixed, &w.projected, norm, EPS, &DELTA, rows)
            }
            Mixer::Full { project, query_norm, key_norm, .. } => {
                ops.linear(&w.normed, project, rows, &mut w.projected)?;
                ops.query_key_value(
                    &w.projected,
                    query_norm,
                    key_norm,
                    EPS,
                    &FULL,
                    layout,
                    &mut w.query,
                    &mut w.keys,
                    &mut w.values,
                )?;
                ops.attention(&w.query, &w.projected, &w.keys, &w.values, &FULL, layout, &mut w.mixed)
            }
        }
    }

    /// The layer loop, up to the final norm of the readout rows.
    fn body(&self, layout: &Layout, rows: usize, readouts: usize, w: &mut Workspace) -> Result<()> {
        let ops = self.ops;
        ops.embed(&self.table, layout, &mut w.residual)?;
        ops.rms_norm(&w.residual, &self.layers[0].before, EPS, rows, &mut w.normed)?;
        for index in 0..LAYERS {
            let layer = &self.layers[index % self.layers.len()];
            self.mixer(&layer.mixer, layout, rows, w)?;
            let out = match &layer.mixer {
                Mixer::Delta { out, .. } | Mixer::Full { out, .. } => out,
            };
            let last = index + 1 == LAYERS;
            let rows = if last { readouts } else { rows };
            if last {
                ops.gather_readouts(&w.mixed, DELTA.value_width(), layout, &mut w.inner)?;
                ops.gather_readouts(&w.residual, HIDDEN, layout, &mut w.gathered)?;
            }
            let residual = if last { &mut w.gathered } else { &mut w.residual };
            ops.linear(if last { &w.inner } else { &w.mixed }, out, rows, &mut w.delta)?;
            ops.add_rms_norm(residual, &w.delta, &layer.after, EPS, rows, &mut w.normed)?;
            ops.linear(&w.normed, &layer.gate_up, rows, &mut w.gate_up)?;
            ops.swiglu(&w.gate_up, INNER, rows, &mut w.inner)?;
            ops.linear(&w.inner, &layer.down, rows, &mut w.delta)?;
            if last {
                ops.add_rms_norm(residual, &w.delta, &self.head.norm, EPS, rows, &mut w.head)?;
            } else {
                let next = &self.layers[(index + 1) % self.layers.len()];
                ops.add_rms_norm(residual, &w.delta, &next.before, EPS, rows, &mut w.normed)?;
            }
        }
        Ok(())
    }

    fn logits(&self, layout: &Layout, w: &Workspace) -> Result<Vec<f32>> {
        let head = &self.head;
        self.ops.pointer_head(
            &w.head,
            &head.query,
            &head.query_bias,
            &head.key,
            &head.key_bias,
            HIDDEN,
            HEAD,
            layout,
        )
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Milliseconds of `submit`, recorded `repeats` times and replayed.
fn replayed(ops: &CudaOps, repeats: usize, mut submit: impl FnMut(usize) -> Result<()>) -> Result<f64> {
    submit(0)?;
    ops.device().synchronize()?;
    let recording = ops.record(|| (0..repeats).try_for_each(&mut submit))?;
    recording.replay()?;
    ops.device().synchronize()?;
    let mut times = Vec::new();
    for _ in 0..7 {
        let start = Instant::now();
        recording.replay()?;
        ops.device().synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e3 / repeats as f64);
    }
    Ok(median(times))
}

fn inv_freq() -> Vec<f32> {
    (0..32).map(|j| 1e7_f32.powf(-2.0 * j as f32 / 64.0)).collect()
}

fn whole_passes(bench: &Bench<'_>, loads: &[&Load]) -> Result<()> {
    println!("load    rows   recorded ms   launched ms (with tables, head and answer on the host)");
    for load in loads {
        let tree = load.tree();
        let pass = load.pass(&tree, 1);
        let rows = pass.rows();
        let mut w = Workspace::new(bench.ops, &tree)?;
        let readouts = pass.readouts.iter().map(|readout| 1 + readout.options.len()).sum();
        let layout = bench.ops.layout(&pass, &inv_freq())?;
        let recorded = replayed(bench.ops, 1, |_| bench.body(&layout, rows, readouts, &mut w))?;
        let mut times = Vec::new();
        for _ in 0..12 {
            let start = Instant::now();
            let logits = bench.answer(&pass, &mut w)?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            if logits.iter().any(|logit| !logit.is_finite()) {
                println!("       {}: a logit is not finite", load.name);
            }
        }
        println!("{:<6} {rows:>5} {recorded:>13.3} {:>13.3}", load.name, median(times));
    }
    Ok(())
}

/// One line: time, and bytes or operations a second.
fn line(name: &str, milliseconds: f64, bytes: f64, operations: f64) {
    println!(
        "  {name:<22} {:>9.1} us {:>7.2} TB/s {:>8.2} TFLOP/s",
        milliseconds * 1e3,
        bytes / milliseconds / 1e9,
        operations / milliseconds / 1e9
    );
}

fn operations(bench: &Bench<'_>, load: &Load) -> Result<()> {
    let ops = bench.ops;
    let tree = load.tree();
    let pass = load.pass(&tree, 1);
    let rows = pass.rows();
    let m = rows as f64;
    let mut w = Workspace::new(ops, &tree)?;
    let layout = ops.layout(&pass, &inv_freq())?;
    bench.body(&layout, rows, 0, &mut w)?;
    ops.device().synchronize()?;
    println!("{} ({rows} rows), per operation:", load.name);
    let size = |role| ops.profile().dtype(role).size() as f64;
    let (residual, operand, activation) = (size(Role::Residual), size(Role::Operand), size(Role::Activation));
    let delta: Vec<&Layer> = bench.layers.iter().filter(|l| matches!(l.mixer, Mixer::Delta { .. })).collect();
    let full: Vec<&Layer> = bench.layers.iter().filter(|l| matches!(l.mixer, Mixer::Full { .. })).collect();
    let hidden = HIDDEN as f64 * m;

    let Mixer::Delta { conv, a_log, dt_bias, norm, .. } = &delta[0].mixer else { return Ok(()) };
    let Mixer::Full { query_norm, key_norm, .. } = &full[0].mixer else { return Ok(()) };
    let product = |name: &str, columns: usize, depth: usize, time: f64| {
        let bytes =
            2.0 * columns as f64 * depth as f64 + m * (depth as f64 * operand + columns as f64 * activation);
        line(name, time, bytes, 2.0 * m * columns as f64 * depth as f64);
    };
    let time = replayed(ops, 12, |i| {
        let Mixer::Delta { project, .. } = &delta[i % delta.len()].mixer else { return Ok(()) };
        ops.linear(&w.normed, project, rows, &mut w.projected)
    })?;
    product("delta projection", DELTA.projected_width(), HIDDEN, time);
    let time = replayed(ops, 12, |i| {
        let Mixer::Delta { out, .. } = &delta[i % delta.len()].mixer else { return Ok(()) };
        ops.linear(&w.mixed, out, rows, &mut w.delta)
    })?;
    product("out projection", HIDDEN, DELTA.value_width(), time);
    let time = replayed(ops, 12, |i| {
        let layer = &bench.layers[i % bench.layers.len()];
        ops.linear(&w.normed, &layer.gate_up, rows, &mut w.gate_up)
    })?;
    product("gate and up", 2 * INNER, HIDDEN, time);
    let time = replayed(ops, 12, |i| {
        let layer = &bench.layers[i % bench.layers.len()];
        ops.linear(&w.inner, &layer.down, rows, &mut w.delta)
    })?;
    product("down", HIDDEN, INNER, time);
    let time = replayed(ops, 20, |_| {
        ops.add_rms_norm(&mut w.residual, &w.delta, &bench.head.norm, EPS, rows, &mut w.normed)
    })?;
    line("add and norm", time, hidden * (2.0 * residual + activation + operand), 0.0);
    let time = replayed(ops, 20, |_| ops.swiglu(&w.gate_up, INNER, rows, &mut w.inner))?;
    line("swiglu", time, m * INNER as f64 * (2.0 * activation + operand), 0.0);
    let time =
        replayed(ops, 20, |_| ops.conv_silu(&w.projected, conv, &DELTA, &layout, &mut w.tails, &mut w.qkv))?;
    line("convolution", time, m * DELTA.conv_dim() as f64 * (activation + 4.0), 0.0);
    let time =
        replayed(ops, 20, |_| ops.delta_gates(&w.projected, a_log, dt_bias, &DELTA, rows, &mut w.gates))?;
    line("delta gates", time, m * 2.0 * DELTA.value_heads as f64 * (activation + 4.0), 0.0);
    let time = replayed(ops, 10, |_| {
        ops.delta_rule(&w.qkv, &w.gates, &DELTA, &layout, &mut w.states, &mut w.mixed)
    })?;
    let state = (DELTA.value_heads * DELTA.key_dim * DELTA.value_dim) as f64;
    let moves = pass.segments.iter().map(|s| s.initial.iter().chain(&s.last).count()).sum::<usize>() as f64;
    let bytes =
        m * (DELTA.conv_dim() as f64 * 4.0 + DELTA.value_width() as f64 * operand) + moves * state * 4.0;
    line("delta rule", time, bytes, 8.0 * state * m);
    let time =
        replayed(ops, 20, |_| ops.gated_rms_norm(&mut w.mixed, &w.projected, norm, EPS, &DELTA, rows))?;
    line("gated norm", time, m * DELTA.value_width() as f64 * (2.0 * operand + activation), 0.0);
    let time = replayed(ops, 20, |_| {
        let (query, keys, values) = (&mut w.query, &mut w.keys, &mut w.values);
        ops.query_key_value(&w.projected, query_norm, key_norm, EPS, &FULL, &layout, query, keys, values)
    })?;
    line("query key value", time, m * 6144.0 * 2.0 * activation, 0.0);
    let time = replayed(ops, 10, |_| {
        ops.attention(&w.query, &w.projected, &w.keys, &w.values, &FULL, &layout, &mut w.mixed)
    })?;
    let visible: f64 =
        pass.segments.iter().flat_map(|s| (0..s.rows.len()).map(|i| (s.position + i + 1) as f64)).sum();
    line("attention", time, m * 4096.0 * (2.0 * activation + operand), visible * 4.0 * 4096.0);
    Ok(())
}

/// Probabilities of `fast` beside those of `exact`, and of `fast` in company beside `fast` alone.
fn errors(benches: &[Bench<'_>]) -> Result<()> {
    const TEXTS: u64 = 40;
    let mut differences = Vec::new();
    let mut flips = 0;
    let mut first = Vec::new();
    for seed in 0..TEXTS {
        let tree = LOADS[0].tree();
        let pass = LOADS[0].pass(&tree, seed + 1);
        let mut answers = Vec::new();
        for bench in benches {
            let mut w = Workspace::new(bench.ops, &tree)?;
            answers.push(bench.answer(&pass, &mut w)?);
        }
        let probability = |pair: &[f32]| 1.0 / (1.0 + (f64::from(pair[1] - pair[0]) / TEMPERATURE).exp());
        for (exact, fast) in answers[0].chunks(2).zip(answers[1].chunks(2)) {
            let (exact, fast) = (probability(exact), probability(fast));
            differences.push((exact - fast).abs());
            flips += usize::from((exact > 0.5) != (fast > 0.5));
        }
        if seed == 0 {
            first.clone_from(&answers[1]);
        }
    }
    differences.sort_by(f64::total_cmp);
    let at = |share: f64| differences[((differences.len() - 1) as f64 * share) as usize];
    println!(
        "fast beside exact, {} questions: p50 {:.5}, p99 {:.5}, largest {:.5}, {flips} flips",
        differences.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    println!("logits of the first text: {first:?}");
    // The first text again, now the last of eight.
    let load = &LOADS[4];
    let tree = load.tree();
    let mut pass = load.pass(&tree, 2);
    let alone = LOADS[0].pass(&LOADS[0].tree(), 1);
    let own = pass.segments.len() - 6;
    let state = load.trees - 1;
    for (index, segment) in alone.segments.iter().enumerate() {
        let target = &pass.segments[if index == 0 { state } else { own + index - 1 }].rows;
        let tokens = alone.tokens[segment.rows.clone()].to_vec();
        pass.tokens[target.clone()].copy_from_slice(&tokens);
    }
    let bench = &benches[1];
    let mut w = Workspace::new(bench.ops, &tree)?;
    let together = bench.answer(&pass, &mut w)?;
    let same =
        first.iter().zip(&together[together.len() - first.len()..]).all(|(a, b)| a.to_bits() == b.to_bits());
    println!("alone and as one of {} texts: {}", load.trees, if same { "same bits" } else { "OTHER BITS" });
    Ok(())
}

pub(crate) fn run(devices: &[CudaOps], words: &[String]) -> std::result::Result<(), String> {
    let recipe = Recipe::new();
    let benches: Result<Vec<Bench<'_>>> = devices.iter().map(|ops| Bench::new(ops, &recipe)).collect();
    let benches = benches.map_err(|error| error.to_string())?;
    let all = words.len() == 1;
    let wanted = |what: &str| all || words.iter().any(|word| word == what);
    let run = || -> Result<()> {
        for bench in &benches {
            if wanted(&format!("{:?}", bench.ops.profile())) {
                one(bench, words)?;
            }
        }
        if wanted("errors") { errors(&benches) } else { Ok(()) }
    };
    run().map_err(|error| error.to_string())
}

/// Times one profile; words that name loads select them.
fn one(bench: &Bench<'_>, words: &[String]) -> Result<()> {
    let ops = bench.ops;
    println!("== {}", ops.describe());
    let start = Instant::now();
    ops.warm_up(8192)?;
    println!("warm-up for 8192 rows: {:.2} s", start.elapsed().as_secs_f32());
    for line in ops.report() {
        println!("  {line}");
    }
    let fast = ops.profile() == Profile::Fast;
    let any = LOADS.iter().any(|load| words.iter().any(|word| word == load.name));
    let chosen =
        |load: &&Load| if any { words.iter().any(|word| word == load.name) } else { fast || load.trees == 1 };
    let loads: Vec<&Load> = LOADS.iter().filter(chosen).collect();
    whole_passes(bench, &loads)?;
    for load in loads {
        if ["L1", "L3", "L4", "T64"].contains(&load.name) {
            operations(bench, load)?;
        }
    }
    Ok(())
}
