//! Owns the checks of the DeltaNet mixer over trees: convolution and delta rule, their outputs and their kept states.

use backend::{DeltaNet, Ops, Result, Role};

use super::compare::{close, same_bits};
use super::input::{Random, normals, wide};
use super::placement::{Placement, Token, Tree, placements};
use super::reference;
use super::rows::delta_nets;
use super::{LENGTHS, Outcome, Report, Suite};

/// Four products, an exponential, a quotient.
const CONVOLUTION: f64 = 2e-6;
/// The sums of a token: two norms and two products with the state, over up to 128 dimensions.
const RULE: f64 = 2e-6;
/// What a token's four roundings of the state add, half a unit of FP32 each. The rule multiplies an error by at most 1 a
/// token, since q, k and beta are at most 1, so errors add up like a random walk: with the root of their number. An output
/// is a product with the whole state, so its error goes with the outputs of all tokens, not with its own size.
const RULE_STEP: f64 = 1.2e-7;

pub(super) fn run<B: Ops>(suite: &Suite<'_, B>, report: &mut Report) {
    for shape in delta_nets(suite) {
        for (tree, others) in trees(&shape) {
            let case = format!("state {} branches {:?}, {shape:?}", tree.state, tree.branches);
            report.record_run("conv_silu", &case, over(suite, &Convolution { shape }, &tree, &others));
            report.record_run("delta_rule", &case, over(suite, &Rule { shape }, &tree, &others));
        }
    }
}

/// Trees whose lengths are the edges, with what shares their pass; the longest only where they cost little.
fn trees(shape: &DeltaNet) -> Vec<(Tree, Vec<Tree>)> {
    let others = vec![Tree::new(7, 65, &[2, 1]), Tree::new(8, 1, &[]), Tree::new(9, 3, &[64])];
    let longest = 40_000_000 / (shape.value_heads * shape.key_dim * shape.value_dim).max(1);
    let edges = LENGTHS.into_iter().filter(|len| *len <= longest);
    edges
        .map(|len| (Tree::new(0, len, &[3, 1]), Vec::new()))
        .chain([
            (Tree::new(1, 45, &[38, 52, 30]), others.clone()),
            (Tree::new(2, 66, &[1, 2, 3, 4, 5, 63, 64, 65]), Vec::new()),
            (Tree::new(3, 200, &[5, 129]), others),
        ])
        .collect()
}

/// An operation over a tree: rows in, rows out, a state per slot.
trait Mixer<B: Ops> {
    /// Widths of an output row and of a slot's state.
    fn widths(&self) -> (usize, usize);
    /// Role of the arena.
    fn arena(&self) -> Role;
    /// The operation's name and its FP32 bound after so many tokens.
    fn bound(&self, tokens: usize) -> (&'static str, f64);
    /// Whether an error goes with its own row's size, or with that of all rows.
    fn own_row(&self) -> bool;
    /// Runs a step; the rows' inputs follow from their tokens.
    fn step(
        &self,
        suite: &Suite<'_, B>,
        layout: &B::Layout,
        tokens: &[Token],
        arena: &mut B::Buffer,
    ) -> Result<Vec<f32>>;
    /// Outputs of a sequence, and the state after its first `keep` tokens.
    fn expected(&self, suite: &Suite<'_, B>, sequence: &[Token], keep: usize)
    -> Result<(Vec<f64>, Vec<f64>)>;
}

fn over<B: Ops>(
    suite: &Suite<'_, B>,
    mixer: &impl Mixer<B>,
    tree: &Tree,
    others: &[Tree],
) -> Result<Vec<(String, Outcome)>> {
    let (width, _) = mixer.widths();
    let mut outcomes = Vec::new();
    let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
    for placement in placements(tree, others) {
        let (rows, state) = placed(suite, mixer, &placement, tree)?;
        match &first {
            Some((first_rows, first_state)) => {
                outcomes.push((placement.name.clone(), same_bits(&rows, first_rows)));
                outcomes.push((format!("{}, state", placement.name), same_bits(&state, first_state)));
            }
            None => {
                let tokens = tree.tokens();
                for sequence in tree.sequences() {
                    let (expected, expected_state) = mixer.expected(suite, &sequence, tree.state)?;
                    let (operation, bound) = mixer.bound(sequence.len());
                    let bound = (suite.bound)(operation, bound);
                    let found: Vec<f32> = sequence
                        .iter()
                        .filter_map(|token| tokens.iter().position(|other| other == token))
                        .flat_map(|row| &rows[row * width..(row + 1) * width])
                        .copied()
                        .collect();
                    let scale = if mixer.own_row() { width } else { found.len() };
                    outcomes.push(("FP64".to_owned(), close(&found, &expected, scale, bound)));
                    let whole = expected_state.len();
                    outcomes.push(("state, FP64".to_owned(), close(&state, &expected_state, whole, bound)));
                }
                first = Some((rows, state));
            }
        }
    }
    Ok(outcomes)
}

/// Outputs of a tree's tokens, node by node, and its final state, however it was run.
fn placed<B: Ops>(
    suite: &Suite<'_, B>,
    mixer: &impl Mixer<B>,
    placement: &Placement,
    tree: &Tree,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let (width, state_width) = mixer.widths();
    let mut arena = suite.poisoned(mixer.arena(), placement.slots * state_width)?;
    let tokens = tree.tokens();
    let mut rows = vec![f32::NAN; tokens.len() * width];
    for step in &placement.steps {
        let layout = suite.ops.layout(&step.pass, &[])?;
        let found = mixer.step(suite, &layout, &step.tokens, &mut arena)?;
        for (token, found) in step.tokens.iter().zip(found.chunks(width)) {
            if let Some(row) = tokens.iter().position(|other| other == token) {
                rows[row * width..(row + 1) * width].copy_from_slice(found);
            }
        }
    }
    let arena = suite.ops.read(&arena, placement.slots * state_width)?;
    let slot = placement.states.iter().find(|(id, _)| *id == tree.id).map_or(0, |(_, slot)| *slot);
    Ok((rows, arena[slot * state_width..(slot + 1) * state_width].to_vec()))
}

fn inputs(tokens: &[Token], salt: u64, width: usize) -> Vec<f32> {
    tokens.iter().flat_map(|token| normals(token.seed() ^ (salt << 60), width, 1.0)).collect()
}

struct Convolution {
    shape: DeltaNet,
}

impl Convolution {
    fn weight(&self) -> Vec<f32> {
        normals(40, self.shape.conv_dim() * self.shape.kernel, 0.5)
    }
}

impl<B: Ops> Mixer<B> for Convolution {
    fn widths(&self) -> (usize, usize) {
        (self.shape.conv_dim(), (self.shape.kernel - 1) * self.shape.conv_dim())
    }

    fn arena(&self) -> Role {
        Role::ConvTail
    }

    fn bound(&self, _tokens: usize) -> (&'static str, f64) {
        ("conv_silu", CONVOLUTION)
    }

    fn own_row(&self) -> bool {
        true
    }

    fn step(
        &self,
        suite: &Suite<'_, B>,
        layout: &B::Layout,
        tokens: &[Token],
        arena: &mut B::Buffer,
    ) -> Result<Vec<f32>> {
        let x = (suite.upload)(Role::Activation, &inputs(tokens, 1, self.shape.projected_width()))?;
        let count = tokens.len() * self.shape.conv_dim();
        let mut out = suite.poisoned(Role::Convolved, count)?;
        suite.ops.conv_silu(&x, &suite.parameter(&self.weight())?, &self.shape, layout, arena, &mut out)?;
        suite.ops.read(&out, count)
    }

    fn expected(
        &self,
        suite: &Suite<'_, B>,
        sequence: &[Token],
        keep: usize,
    ) -> Result<(Vec<f64>, Vec<f64>)> {
        let width = self.shape.projected_width();
        let (_, held) = suite.filled(Role::Activation, &inputs(sequence, 1, width))?;
        let (held, channels) = (wide(&held), self.shape.conv_dim());
        let history = self.shape.kernel - 1;
        // Inputs before the sequence are zero.
        let tail = (0..history)
            .flat_map(|i| {
                (0..channels).map(move |c| (keep + i).checked_sub(history).map(|row| row * width + c))
            })
            .map(|at| at.map_or(0.0, |at| held[at]))
            .collect();
        Ok((reference::conv_silu(&held, &wide(&self.weight()), &self.shape), tail))
    }
}

struct Rule {
    shape: DeltaNet,
}

impl Rule {
    /// Per token beta, then decay, of every head: decays from almost none to forgetting everything.
    fn gates(&self, tokens: &[Token]) -> Vec<f32> {
        let heads = self.shape.value_heads;
        let of = |token: &Token| {
            let mut random = Random::new(token.seed() ^ (5 << 60));
            let beta: Vec<f32> = (0..heads).map(|_| random.uniform()).collect();
            let decay = (0..heads).map(|_| -(random.uniform() * 2.0).powi(6));
            beta.into_iter().chain(decay).collect::<Vec<f32>>()
        };
        tokens.iter().flat_map(of).collect()
    }
}

impl<B: Ops> Mixer<B> for Rule {
    fn widths(&self) -> (usize, usize) {
        let shape = &self.shape;
        (shape.value_width(), shape.value_heads * shape.key_dim * shape.value_dim)
    }

    fn arena(&self) -> Role {
        Role::Recurrent
    }

    fn bound(&self, tokens: usize) -> (&'static str, f64) {
        ("delta_rule", RULE + RULE_STEP * (tokens as f64).sqrt())
    }

    fn own_row(&self) -> bool {
        false
    }

    fn step(
        &self,
        suite: &Suite<'_, B>,
        layout: &B::Layout,
        tokens: &[Token],
        arena: &mut B::Buffer,
    ) -> Result<Vec<f32>> {
        let qkv = (suite.upload)(Role::Convolved, &inputs(tokens, 2, self.shape.conv_dim()))?;
        let gates = (suite.upload)(Role::Gates, &self.gates(tokens))?;
        let count = tokens.len() * self.shape.value_width();
        let mut out = suite.poisoned(Role::Operand, count)?;
        suite.ops.delta_rule(&qkv, &gates, &self.shape, layout, arena, &mut out)?;
        suite.ops.read(&out, count)
    }

    fn expected(
        &self,
        suite: &Suite<'_, B>,
        sequence: &[Token],
        keep: usize,
    ) -> Result<(Vec<f64>, Vec<f64>)> {
        let (_, qkv) = suite.filled(Role::Convolved, &inputs(sequence, 2, self.shape.conv_dim()))?;
        let (_, gates) = suite.filled(Role::Gates, &self.gates(sequence))?;
        let (out, kept) = reference::delta_rule(&wide(&qkv), &wide(&gates), &self.shape, &[keep]);
        Ok((out, kept.into_iter().flatten().collect()))
    }
}
