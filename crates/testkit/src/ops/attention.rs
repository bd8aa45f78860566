//! Owns the checks of full attention over trees: norms, rotary embedding and the key arena; softmax attention.

use backend::{Attention, KeyRange, Ops, Pass, Result, Role, Segment};

use super::compare::{close, same_bits};
use super::input::{normals, wide};
use super::placement::{Placement, Token, Tree, placements};
use super::reference;
use super::{LENGTHS, Outcome, Report, Suite};

/// A norm, then two products and a sum; cosines and sines of the FP32 angle to the last place.
const ROTATED: f64 = 2e-6;
/// Scores err by some 5e-7, so weights do, and a weighted mean by as much of the values' size. But a mean of n values of
/// random sign is `sqrt(n)` smaller than they are, which is what errors are measured against: up to 40 times here.
const SOFTMAX: f64 = 2e-5;

const EPS: f32 = 1e-6;

pub(super) fn run<B: Ops>(suite: &Suite<'_, B>, report: &mut Report) {
    for shape in shapes(suite) {
        for (tree, others) in trees(&shape) {
            let case = format!("state {} branches {:?}, {shape:?}", tree.state, tree.branches);
            report.record_run("query_key_value", &case, query_key_value(suite, &shape, &tree, &others));
            report.record_run("attention", &case, attention(suite, &shape, &tree, &others));
        }
    }
    let far = Attention { heads: 2, kv_heads: 1, head_dim: 256, rotary_dim: 64 };
    report.record_run("query_key_value", "after 65,536 tokens", far_rows(suite, &far));
}

fn shapes<B: Ops>(suite: &Suite<'_, B>) -> Vec<Attention> {
    let mut shapes = vec![
        Attention { heads: 8, kv_heads: 2, head_dim: 256, rotary_dim: 64 },
        Attention { heads: 1, kv_heads: 1, head_dim: 256, rotary_dim: 64 },
    ];
    if suite.odd_shapes {
        shapes.push(Attention { heads: 4, kv_heads: 2, head_dim: 32, rotary_dim: 8 });
        shapes.push(Attention { heads: 6, kv_heads: 1, head_dim: 128, rotary_dim: 32 });
        shapes.push(Attention { heads: 3, kv_heads: 3, head_dim: 40, rotary_dim: 10 });
        shapes.push(Attention { heads: 5, kv_heads: 1, head_dim: 7, rotary_dim: 0 });
    }
    shapes
}

/// Trees whose lengths are the edges, with what shares their pass; the longest only where they cost little.
fn trees(shape: &Attention) -> Vec<(Tree, Vec<Tree>)> {
    let others = vec![Tree::new(7, 65, &[2, 1]), Tree::new(8, 1, &[]), Tree::new(9, 3, &[64])];
    let cost = |len: usize| len * len * shape.heads * shape.head_dim;
    let edges = LENGTHS.into_iter().filter(|len| cost(*len) <= 300_000_000);
    edges
        .map(|len| (Tree::new(0, len, &[3, 1]), Vec::new()))
        .chain([
            (Tree::new(1, 45, &[38, 52, 30]), others.clone()),
            (Tree::new(2, 66, &[1, 2, 3, 4, 5, 63, 64, 65]), Vec::new()),
            (Tree::new(3, 200, &[5, 129]), others),
        ])
        .collect()
}

fn inv_freq(shape: &Attention) -> Vec<f32> {
    (0..shape.rotary_dim / 2).map(|j| 1e7_f32.powf(-2.0 * j as f32 / shape.rotary_dim as f32)).collect()
}

fn inputs(tokens: &[Token], salt: u64, width: usize) -> Vec<f32> {
    tokens.iter().flat_map(|token| normals(token.seed() ^ (salt << 60), width, 1.0)).collect()
}

/// Position of a token in its sequence.
fn position(tree: &Tree, token: Token) -> usize {
    if token.node == 0 { token.index } else { tree.state + token.index }
}

/// Queries, keys and values of a tree's tokens, node by node, however it was run; and whether the arenas' other rows
/// were left alone.
fn projected_rows<B: Ops>(
    suite: &Suite<'_, B>,
    shape: &Attention,
    placement: &Placement,
    tree: &Tree,
    norms: &[Vec<f32>; 2],
) -> Result<([Vec<f32>; 3], bool)> {
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let arena = placement.key_rows * kv_width;
    let mut keys = suite.poisoned(Role::KeyValue, arena)?;
    let mut values = suite.poisoned(Role::KeyValue, arena)?;
    let [query_norm, key_norm] = [suite.parameter(&norms[0])?, suite.parameter(&norms[1])?];
    let tokens = tree.tokens();
    let mut rows = [width, kv_width, kv_width].map(|width| vec![f32::NAN; tokens.len() * width]);
    let put = |rows: &mut Vec<f32>, width: usize, token: &Token, found: &[f32]| {
        if let Some(row) = tokens.iter().position(|other| other == token) {
            rows[row * width..(row + 1) * width].copy_from_slice(found);
        }
    };
    for step in &placement.steps {
        let layout = suite.ops.layout(&step.pass, &inv_freq(shape))?;
        let x = (suite.upload)(Role::Activation, &inputs(&step.tokens, 1, shape.projected_width()))?;
        let mut query = suite.poisoned(Role::Activation, step.tokens.len() * width)?;
        suite.ops.query_key_value(
            &x,
            &query_norm,
            &key_norm,
            EPS,
            shape,
            &layout,
            &mut query,
            &mut keys,
            &mut values,
        )?;
        let query = suite.ops.read(&query, step.tokens.len() * width)?;
        for (token, query) in step.tokens.iter().zip(query.chunks(width)) {
            put(&mut rows[0], width, token, query);
        }
    }
    let (keys, values) = (suite.ops.read(&keys, arena)?, suite.ops.read(&values, arena)?);
    let owners = placement.key_owners();
    for (row, token) in &owners {
        put(&mut rows[1], kv_width, token, &keys[row * kv_width..(row + 1) * kv_width]);
        put(&mut rows[2], kv_width, token, &values[row * kv_width..(row + 1) * kv_width]);
    }
    let untouched =
        (0..placement.key_rows).filter(|row| owners.iter().all(|(owned, _)| owned != row)).all(|row| {
            [&keys, &values]
                .iter()
                .all(|a| a[row * kv_width..(row + 1) * kv_width].iter().all(|x| x.is_nan()))
        });
    Ok((rows, untouched))
}

fn query_key_value<B: Ops>(
    suite: &Suite<'_, B>,
    shape: &Attention,
    tree: &Tree,
    others: &[Tree],
) -> Result<Vec<(String, Outcome)>> {
    let bound = (suite.bound)("query_key_value", ROTATED);
    let norms = [normals(50, shape.head_dim, 0.2), normals(51, shape.head_dim, 0.2)];
    let mut outcomes = Vec::new();
    let mut first: Option<[Vec<f32>; 3]> = None;
    for placement in placements(tree, others) {
        let (rows, untouched) = projected_rows(suite, shape, &placement, tree, &norms)?;
        let kept = if untouched { Ok(0.0) } else { Err("a key row of nobody was written".to_owned()) };
        outcomes.push((format!("{}, other key rows", placement.name), kept));
        match &first {
            Some(first) => {
                for (rows, first) in rows.iter().zip(first) {
                    outcomes.push((placement.name.clone(), same_bits(rows, first)));
                }
            }
            None => {
                let expected =
                    expected_rows(suite, shape, &tree.tokens(), |token| position(tree, token), &norms)?;
                for (rows, expected) in rows.iter().zip(&expected) {
                    outcomes.push(("FP64".to_owned(), close(rows, expected, shape.head_dim, bound)));
                }
                first = Some(rows);
            }
        }
    }
    Ok(outcomes)
}

fn expected_rows<B: Ops>(
    suite: &Suite<'_, B>,
    shape: &Attention,
    tokens: &[Token],
    position: impl Fn(Token) -> usize,
    norms: &[Vec<f32>; 2],
) -> Result<[Vec<f64>; 3]> {
    let width = shape.projected_width();
    let (_, held) = suite.filled(Role::Activation, &inputs(tokens, 1, width))?;
    let norms = [wide(&norms[0]), wide(&norms[1])];
    let mut expected = [Vec::new(), Vec::new(), Vec::new()];
    for (token, x) in tokens.iter().zip(held.chunks(width)) {
        let norms = [&norms[0][..], &norms[1][..]];
        let at = position(*token);
        let rows = reference::query_key_value(&wide(x), norms, f64::from(EPS), shape, at, &inv_freq(shape));
        expected.iter_mut().zip(rows).for_each(|(all, row)| all.extend(row));
    }
    Ok(expected)
}

/// A few rows far into a sequence, where the FP32 angle has few bits after the point.
fn far_rows<B: Ops>(suite: &Suite<'_, B>, shape: &Attention) -> Result<Vec<(String, Outcome)>> {
    const BEFORE: usize = 65_536;
    let tree = Tree::new(0, 5, &[]);
    let tokens = tree.tokens();
    let keys = vec![KeyRange { row: 8, len: BEFORE }, KeyRange { row: 0, len: 5 }];
    let segment = Segment { rows: 0..5, position: BEFORE, initial: Some(0), last: None, level: 0, keys };
    let pass = Pass { tokens: vec![0; 5], segments: vec![segment], readouts: Vec::new() };
    let layout = suite.ops.layout(&pass, &inv_freq(shape))?;
    let norms = [normals(50, shape.head_dim, 0.2), normals(51, shape.head_dim, 0.2)];
    let x = (suite.upload)(Role::Activation, &inputs(&tokens, 1, shape.projected_width()))?;
    let widths = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim];
    let mut query = suite.poisoned(Role::Activation, 5 * widths[0])?;
    let mut keys = suite.ops.zeros(Role::KeyValue, (BEFORE + 8) * widths[1])?;
    let mut values = suite.ops.zeros(Role::KeyValue, (BEFORE + 8) * widths[1])?;
    let [query_norm, key_norm] = [suite.parameter(&norms[0])?, suite.parameter(&norms[1])?];
    suite.ops.query_key_value(
        &x,
        &query_norm,
        &key_norm,
        EPS,
        shape,
        &layout,
        &mut query,
        &mut keys,
        &mut values,
    )?;
    let expected = expected_rows(suite, shape, &tokens, |token| BEFORE + token.index, &norms)?;
    let found = [
        suite.ops.read(&query, 5 * widths[0])?,
        suite.ops.read(&keys, 5 * widths[1])?,
        suite.ops.read(&values, 5 * widths[1])?,
    ];
    let bound = (suite.bound)("query_key_value", ROTATED);
    Ok(found
        .iter()
        .zip(&expected)
        .map(|(found, expected)| ("FP64".to_owned(), close(found, expected, shape.head_dim, bound)))
        .collect())
}

/// Attention of a tree's tokens, node by node, however it was run. The arenas hold every token's key and value from the
/// start, NaN elsewhere, so a key that must not be seen shows.
fn attended<B: Ops>(
    suite: &Suite<'_, B>,
    shape: &Attention,
    placement: &Placement,
    tree: &Tree,
) -> Result<Vec<f32>> {
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut arenas =
        [vec![f32::NAN; placement.key_rows * kv_width], vec![f32::NAN; placement.key_rows * kv_width]];
    for (row, token) in placement.key_owners() {
        for (salt, arena) in (3..).zip(&mut arenas) {
            arena[row * kv_width..(row + 1) * kv_width].copy_from_slice(&inputs(&[token], salt, kv_width));
        }
    }
    let keys = (suite.upload)(Role::KeyValue, &arenas[0])?;
    let values = (suite.upload)(Role::KeyValue, &arenas[1])?;
    let tokens = tree.tokens();
    let mut rows = vec![f32::NAN; tokens.len() * width];
    for step in &placement.steps {
        let count = step.tokens.len();
        let layout = suite.ops.layout(&step.pass, &inv_freq(shape))?;
        let query = (suite.upload)(Role::Activation, &inputs(&step.tokens, 2, width))?;
        let x = (suite.upload)(Role::Activation, &inputs(&step.tokens, 1, shape.projected_width()))?;
        let mut out = suite.poisoned(Role::Operand, count * width)?;
        suite.ops.attention(&query, &x, &keys, &values, shape, &layout, &mut out)?;
        let found = suite.ops.read(&out, count * width)?;
        for (token, found) in step.tokens.iter().zip(found.chunks(width)) {
            if let Some(row) = tokens.iter().position(|other| other == token) {
                rows[row * width..(row + 1) * width].copy_from_slice(found);
            }
        }
    }
    Ok(rows)
}

fn attention<B: Ops>(
    suite: &Suite<'_, B>,
    shape: &Attention,
    tree: &Tree,
    others: &[Tree],
) -> Result<Vec<(String, Outcome)>> {
    let bound = (suite.bound)("attention", SOFTMAX);
    let width = shape.heads * shape.head_dim;
    let mut outcomes = Vec::new();
    let mut first: Option<Vec<f32>> = None;
    for placement in placements(tree, others) {
        let rows = attended(suite, shape, &placement, tree)?;
        match &first {
            Some(first) => outcomes.push((placement.name.clone(), same_bits(&rows, first))),
            None => {
                let expected = expected_attention(suite, shape, tree)?;
                outcomes.push(("FP64".to_owned(), close(&rows, &expected, width, bound)));
                first = Some(rows);
            }
        }
    }
    Ok(outcomes)
}

fn expected_attention<B: Ops>(suite: &Suite<'_, B>, shape: &Attention, tree: &Tree) -> Result<Vec<f64>> {
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let held = |role, tokens: &[Token], salt, width| -> Result<Vec<f64>> {
        Ok(wide(&suite.filled(role, &inputs(tokens, salt, width))?.1))
    };
    let mut expected = Vec::new();
    for node in 0..=tree.branches.len() {
        let own = tree.node(node);
        let before = if node == 0 { 0 } else { tree.state };
        let sequence: Vec<Token> =
            if node == 0 { own.clone() } else { tree.node(0).into_iter().chain(own.clone()).collect() };
        let query = held(Role::Activation, &own, 2, width)?;
        let x = held(Role::Activation, &own, 1, shape.projected_width())?;
        let keys = held(Role::KeyValue, &sequence, 3, kv_width)?;
        let values = held(Role::KeyValue, &sequence, 4, kv_width)?;
        let keys: Vec<&[f64]> = keys.chunks(kv_width).collect();
        let values: Vec<&[f64]> = values.chunks(kv_width).collect();
        for row in 0..own.len() {
            let seen = before + row + 1;
            expected.extend(reference::attention(
                &query[row * width..(row + 1) * width],
                &x[row * shape.projected_width()..(row + 1) * shape.projected_width()],
                &keys[..seen],
                &values[..seen],
                shape,
            ));
        }
    }
    Ok(expected)
}
