//! Owns small trees of token segments and the ways to run them: at once, states first, or in pieces.

use std::ops::Range;

use backend::{KeyRange, Pass, Segment};

/// A node is a run of tokens that continues its parent. Nodes are in order of depth.
pub(crate) struct Tree {
    pub(crate) nodes: Vec<Node>,
}

pub(crate) struct Node {
    pub(crate) len: usize,
    pub(crate) parent: Option<usize>,
}

/// A pass, and the tree's row that each of its rows is.
pub(crate) struct Step {
    pub(crate) pass: Pass,
    pub(crate) rows: Vec<usize>,
}

/// Unused key rows between nodes, so that wrong arithmetic meets garbage.
const GAP: usize = 3;

impl Tree {
    /// Roots of lengths `states`, and under each the branches of its list.
    pub(crate) fn new(states: &[(usize, &[usize])]) -> Self {
        let mut nodes: Vec<Node> = states.iter().map(|(len, _)| Node { len: *len, parent: None }).collect();
        for (root, (_, branches)) in states.iter().enumerate() {
            nodes.extend(branches.iter().map(|len| Node { len: *len, parent: Some(root) }));
        }
        Self { nodes }
    }

    pub(crate) fn rows(&self) -> usize {
        self.nodes.iter().map(|node| node.len).sum()
    }

    pub(crate) fn slots(&self) -> usize {
        self.nodes.len() + 1
    }

    pub(crate) fn key_rows(&self) -> usize {
        self.rows() + GAP * (self.nodes.len() + 1)
    }

    /// First row of a node.
    pub(crate) fn start(&self, node: usize) -> usize {
        self.nodes[..node].iter().map(|node| node.len).sum()
    }

    /// Rows of the whole sequence that ends with a node.
    pub(crate) fn sequence(&self, node: usize) -> Vec<usize> {
        let mut rows = self.nodes[node].parent.map_or_else(Vec::new, |parent| self.sequence(parent));
        rows.extend(self.start(node)..self.start(node) + self.nodes[node].len);
        rows
    }

    fn depth(&self, node: usize) -> usize {
        self.nodes[node].parent.map_or(0, |parent| self.depth(parent) + self.nodes[parent].len)
    }

    fn key_row(&self, node: usize) -> usize {
        self.start(node) + GAP * (node + 1)
    }

    fn has_children(&self, node: usize) -> bool {
        self.nodes.iter().any(|other| other.parent == Some(node))
    }

    fn prefix_keys(&self, node: Option<usize>, keys: &mut Vec<KeyRange>) {
        if let Some(node) = node {
            self.prefix_keys(self.nodes[node].parent, keys);
            keys.push(KeyRange { row: self.key_row(node), len: self.nodes[node].len });
        }
    }

    /// One pass over pieces of nodes, which are in order of level.
    fn step(&self, pieces: &[(usize, Range<usize>)]) -> Step {
        let mut step = Step { pass: Pass::default(), rows: Vec::new() };
        let mut levels: Vec<(usize, usize)> = Vec::new();
        for (node, piece) in pieces {
            let initial = if piece.start > 0 { Some(*node) } else { self.nodes[*node].parent };
            let written = |slot: usize| {
                levels.iter().rev().find(|(other, _)| *other == slot).map(|(_, level)| level + 1)
            };
            let level = initial.and_then(written).unwrap_or(0);
            let keeps = piece.end < self.nodes[*node].len || self.has_children(*node);
            if keeps {
                levels.push((*node, level));
            }
            let mut keys = Vec::new();
            self.prefix_keys(self.nodes[*node].parent, &mut keys);
            if piece.start > 0 {
                keys.push(KeyRange { row: self.key_row(*node), len: piece.start });
            }
            keys.push(KeyRange { row: self.key_row(*node) + piece.start, len: piece.len() });
            let first = step.rows.len();
            step.rows.extend(piece.clone().map(|row| self.start(*node) + row));
            step.pass.segments.push(Segment {
                rows: first..step.rows.len(),
                position: self.depth(*node) + piece.start,
                initial,
                last: keeps.then_some(*node),
                level,
                keys,
            });
        }
        step.pass.tokens = step.rows.iter().map(|row| *row as u32).collect();
        assert_eq!(step.pass.validate(self.slots(), self.key_rows()), Ok(()));
        step
    }

    fn whole(&self, node: usize) -> (usize, Range<usize>) {
        (node, 0..self.nodes[node].len)
    }

    /// Ways to run the tree that must give the same bits. The first is everything at once.
    pub(crate) fn ways(&self) -> Vec<(&'static str, Vec<Step>)> {
        let mut ways: Vec<(&'static str, Vec<Step>)> =
            ["at once", "states first"].into_iter().zip(self.ways_without_pieces()).collect();
        let nodes = 0..self.nodes.len();
        let alone = nodes.clone().map(|node| self.step(&[self.whole(node)])).collect();
        let mut pieces = Vec::new();
        for node in nodes {
            let len = self.nodes[node].len;
            for first in (0..len).step_by(64) {
                pieces.push(self.step(&[(node, first..len.min(first + 64))]));
            }
        }
        ways.extend([("alone", alone), ("in pieces of 64", pieces)]);
        ways
    }

    /// Everything at once, and the roots before the branches.
    pub(crate) fn ways_without_pieces(&self) -> Vec<Vec<Step>> {
        let nodes = 0..self.nodes.len();
        let at_once = self.step(&nodes.clone().map(|node| self.whole(node)).collect::<Vec<_>>());
        let (roots, branches): (Vec<usize>, Vec<usize>) =
            nodes.partition(|node| self.nodes[*node].parent.is_none());
        let together =
            |nodes: &[usize]| self.step(&nodes.iter().map(|node| self.whole(*node)).collect::<Vec<_>>());
        let mut cached = vec![together(&roots)];
        if !branches.is_empty() {
            cached.push(together(&branches));
        }
        vec![vec![at_once], cached]
    }
}
