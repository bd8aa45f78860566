//! Owns how pieces of trees become one packed pass: rows, levels and readouts. Allocates nothing: slots and key rows come
//! from the caller.

use backend::{KeyRange, Pass, Readout, Segment};
use decision::Branch;

/// Which question of which tree a readout belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Index of the tree.
    pub tree: usize,
    /// Index of the branch in its tree.
    pub branch: usize,
}

/// A run of tokens to add to a pass.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Tokens before it in its sequence.
    pub position: usize,
    /// Slot it starts from.
    pub initial: Option<usize>,
    /// Slot that takes its final state.
    pub last: Option<usize>,
    /// Whether `initial` is written by a piece of the same pass.
    pub after_state: bool,
    /// Key rows of all tokens before it and of its own, the last range its own.
    pub keys: Vec<KeyRange>,
    /// The question it is, if it is one.
    pub question: Option<(Owner, &'a Branch)>,
}

/// A pass in the making.
#[derive(Debug, Default)]
pub struct PassBuilder<'a> {
    levels: [Vec<Piece<'a>>; 2],
    rows: usize,
}

impl<'a> PassBuilder<'a> {
    /// Rows so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Pieces so far.
    pub fn pieces(&self) -> usize {
        self.levels.iter().map(Vec::len).sum()
    }

    /// Adds a piece.
    pub fn add(&mut self, piece: Piece<'a>) {
        self.rows += piece.tokens.len();
        self.levels[usize::from(piece.after_state)].push(piece);
    }

    /// The finished pass, and whose each readout is.
    pub fn build(self) -> (Pass, Vec<Owner>) {
        let mut pass = Pass::default();
        let mut owners = Vec::new();
        for (level, pieces) in self.levels.into_iter().enumerate() {
            for piece in pieces {
                let start = pass.tokens.len();
                pass.tokens.extend_from_slice(piece.tokens);
                if let Some((owner, branch)) = piece.question {
                    owners.push(owner);
                    pass.readouts.push(Readout {
                        decide: start + branch.decide,
                        options: branch.option_ends.iter().map(|end| start + end).collect(),
                    });
                }
                pass.segments.push(Segment {
                    rows: start..pass.tokens.len(),
                    position: piece.position,
                    initial: piece.initial,
                    last: piece.last,
                    level,
                    keys: piece.keys,
                });
            }
        }
        (pass, owners)
    }
}
