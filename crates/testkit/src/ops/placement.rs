//! Owns trees of tokens and the ways to run them: in one pass, state first and branches later, a state in pieces,
//! among other trees. The same token has the same input in every way, so it must have the same output, bit for bit.

use backend::{KeyRange, Pass, Segment};

/// A token of a tree: its node (0 is the state, 1 and up the branches) and its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) tree: usize,
    pub(super) node: usize,
    pub(super) index: usize,
}

impl Token {
    /// A seed of its own.
    pub(super) fn seed(self) -> u64 {
        ((self.tree as u64 + 1) << 48) ^ ((self.node as u64) << 32) ^ self.index as u64
    }
}

/// Lengths of a state and of the branches that continue it; the state is never empty.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) id: usize,
    pub(super) state: usize,
    pub(super) branches: Vec<usize>,
}

impl Tree {
    pub(super) fn new(id: usize, state: usize, branches: &[usize]) -> Self {
        Self { id, state, branches: branches.to_vec() }
    }

    /// Tokens of node 0, 1, …
    pub(super) fn node(&self, node: usize) -> Vec<Token> {
        let len = if node == 0 { self.state } else { self.branches[node - 1] };
        (0..len).map(|index| Token { tree: self.id, node, index }).collect()
    }

    /// All its tokens, node by node.
    pub(super) fn tokens(&self) -> Vec<Token> {
        (0..=self.branches.len()).flat_map(|node| self.node(node)).collect()
    }

    /// The sequences that the tree stands for: the state alone if it has no branch, else it with each branch.
    pub(super) fn sequences(&self) -> Vec<Vec<Token>> {
        let with = |node| self.node(0).into_iter().chain(self.node(node)).collect();
        if self.branches.is_empty() {
            vec![self.node(0)]
        } else {
            (1..=self.branches.len()).map(with).collect()
        }
    }
}

/// One pass of a placement.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) pass: Pass,
    /// The token of every row.
    pub(super) tokens: Vec<Token>,
}

/// One way to run some trees.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    pub(super) name: String,
    pub(super) steps: Vec<Step>,
    pub(super) slots: usize,
    pub(super) key_rows: usize,
    /// Slot of every tree's final state, in the order of the trees.
    pub(super) states: Vec<(usize, usize)>,
}

impl Placement {
    /// Every token that owns a key row, with the row.
    pub(super) fn key_owners(&self) -> Vec<(usize, Token)> {
        let mut owners = Vec::new();
        for step in &self.steps {
            for segment in &step.pass.segments {
                let own = segment.keys.last().map_or(0, |range| range.row);
                owners.extend(
                    segment.rows.clone().map(|row| (own + row - segment.rows.start, step.tokens[row])),
                );
            }
        }
        owners
    }
}

/// All ways to run a tree that must give the same bits. `others` share the last one's passes.
pub(super) fn placements(tree: &Tree, others: &[Tree]) -> Vec<Placement> {
    let mut ways = vec![Builder::new("one pass").together(std::slice::from_ref(tree))];
    if !tree.branches.is_empty() {
        ways.push(Builder::new("branches of a cached state").cached(tree));
        ways.push(Builder::new("branches one by one, last first").one_by_one(tree));
    }
    for cut in [64, 128] {
        if tree.state > cut {
            ways.push(Builder::new(&format!("state in pieces of {cut}")).pieces(tree, cut));
        }
    }
    if !others.is_empty() {
        let mut all = others.to_vec();
        all.insert(others.len() / 2, tree.clone());
        ways.push(Builder::new("among other trees").together(&all));
    }
    ways
}

struct Builder {
    name: String,
    steps: Vec<Step>,
    states: Vec<(usize, usize)>,
    slots: usize,
    key_rows: usize,
}

impl Builder {
    fn new(name: &str) -> Self {
        // Slot 0 and the first key rows belong to nobody, so that a wrong index shows.
        Self { name: name.to_owned(), steps: Vec::new(), states: Vec::new(), slots: 1, key_rows: 3 }
    }

    fn slot(&mut self) -> usize {
        self.slots += 1;
        self.slots - 1
    }

    /// Rows of their own with a gap before the next, so that a sequence's keys never happen to be one range.
    fn keys(&mut self, len: usize) -> KeyRange {
        let row = self.key_rows;
        self.key_rows += len + 2;
        KeyRange { row, len }
    }

    fn step(&mut self) -> &mut Step {
        self.steps.push(Step { pass: Pass::default(), tokens: Vec::new() });
        let last = self.steps.len() - 1;
        &mut self.steps[last]
    }

    fn add(
        &mut self,
        tokens: &[Token],
        before: &[KeyRange],
        initial: Option<usize>,
        last: Option<usize>,
        level: usize,
    ) -> KeyRange {
        let own = self.keys(tokens.len());
        if let Some(step) = self.steps.last_mut() {
            let start = step.tokens.len();
            step.tokens.extend_from_slice(tokens);
            step.pass.tokens.resize(step.tokens.len(), 0);
            step.pass.segments.push(Segment {
                rows: start..step.tokens.len(),
                position: before.iter().map(|range| range.len).sum(),
                initial,
                last,
                level,
                keys: before.iter().copied().chain([own]).collect(),
            });
        }
        own
    }

    fn done(self) -> Placement {
        let Self { name, steps, states, slots, key_rows } = self;
        Placement { name, steps, states, slots, key_rows: key_rows + 1 }
    }

    /// Every state, then every branch, in one pass.
    fn together(mut self, trees: &[Tree]) -> Placement {
        self.step();
        let mut kept = Vec::new();
        for tree in trees {
            let slot = self.slot();
            kept.push((slot, self.add(&tree.node(0), &[], None, Some(slot), 0)));
            self.states.push((tree.id, slot));
        }
        for (tree, (slot, keys)) in trees.iter().zip(kept) {
            for node in 1..=tree.branches.len() {
                self.add(&tree.node(node), &[keys], Some(slot), None, 1);
            }
        }
        self.done()
    }

    /// The state in one pass, its branches in the next.
    fn cached(mut self, tree: &Tree) -> Placement {
        let slot = self.slot();
        self.step();
        let keys = self.add(&tree.node(0), &[], None, Some(slot), 0);
        self.step();
        for node in 1..=tree.branches.len() {
            self.add(&tree.node(node), &[keys], Some(slot), None, 0);
        }
        self.states.push((tree.id, slot));
        self.done()
    }

    /// The state in one pass, then every branch in a pass of its own, the last one first.
    fn one_by_one(mut self, tree: &Tree) -> Placement {
        let slot = self.slot();
        self.step();
        let keys = self.add(&tree.node(0), &[], None, Some(slot), 0);
        for node in (1..=tree.branches.len()).rev() {
            self.step();
            let last = self.slot();
            self.add(&tree.node(node), &[keys], Some(slot), Some(last), 0);
        }
        self.states.push((tree.id, slot));
        self.done()
    }

    /// The state in pieces of `cut` tokens, a pass each, updated in place; the last one with the branches.
    fn pieces(mut self, tree: &Tree, cut: usize) -> Placement {
        let slot = self.slot();
        let tokens = tree.node(0);
        let mut keys: Vec<KeyRange> = Vec::new();
        for (index, piece) in tokens.chunks(cut).enumerate() {
            self.step();
            let initial = (index > 0).then_some(slot);
            keys.push(self.add(piece, &keys.clone(), initial, Some(slot), 0));
        }
        for node in 1..=tree.branches.len() {
            self.add(&tree.node(node), &keys.clone(), Some(slot), None, 1);
        }
        self.states.push((tree.id, slot));
        self.done()
    }
}
