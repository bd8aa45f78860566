//! Owns softmax attention over a segment's keys, whatever ranges they lie in, and its output gate.
//!
//! A row's keys are taken in blocks of [`KEYS`] absolute positions with a running maximum. A lane of a vector is one query
//! (a row and a head), so its sums are its own; a key it must not see has weight 0 and a block without news a factor of 1,
//! which change no bit. So neither the ranges of the keys, nor the rows that share a block, nor a split into passes matter.

use std::cell::RefCell;

use backend::{Attention, KeyRange, Segment};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::kernel::{INNER, NARROW, lane_tiles, scores, tile_lanes, weighted_sums};
use crate::layout::CpuLayout;
use crate::math::{exp, sigmoid};
use crate::tiles::{Tile, grid};

/// Keys of a block.
const KEYS: usize = 64;
/// Queries of a job: they share the gathered keys and values of a block.
const QUERIES: usize = 128;

/// Operands that are only read.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) query: &'a [f32],
    pub(crate) projected: &'a [f32],
    pub(crate) keys: &'a [f32],
    pub(crate) values: &'a [f32],
    pub(crate) shape: &'a Attention,
}

/// Causal attention of every row, gated.
pub(crate) fn attention(operands: &Operands<'_>, layout: &CpuLayout, out: &mut [f32]) {
    let shape = operands.shape;
    let group = shape.heads / shape.kv_heads;
    let rows = (QUERIES / group).max(1);
    let blocks: Vec<(&Segment, usize, usize)> = layout
        .pass
        .segments
        .iter()
        .flat_map(|segment| {
            let len = segment.rows.len();
            (0..len).step_by(rows).map(move |first| (segment, first, rows.min(len - first)))
        })
        .collect();
    let heights: Vec<usize> = blocks.iter().map(|(_, _, count)| *count).collect();
    let tiles =
        grid(out, shape.heads * shape.head_dim, heights, vec![group * shape.head_dim; shape.kv_heads]);
    // The last rows of a segment see the most keys: they go first, so that no long job is left for the end.
    tiles.into_par_iter().enumerate().rev().with_max_len(1).for_each(|(job, out)| {
        let (segment, first, _) = blocks[job / shape.kv_heads];
        let job = Job { operands: *operands, segment, first, kv_head: job % shape.kv_heads };
        SCRATCH.with_borrow_mut(|scratch| Arch::new().dispatch(Attend { job, out, scratch }));
    });
}

thread_local! {
    /// Memory of a job: 392 KiB for heads of 256, made once a thread.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    /// Queries, tile by tile `[head_dim, lanes]`.
    query: Vec<f32>,
    /// Unnormalised outputs, tile by tile `[head_dim, lanes]`, `head_dim` padded to [`NARROW`].
    out: Vec<f32>,
    /// Largest score so far and sum of weights, per lane.
    top: Vec<f32>,
    total: Vec<f32>,
    /// A block's keys: per [`INNER`] dimensions `[KEYS, INNER]`.
    keys: Vec<[f32; INNER]>,
    /// A block's values: per [`NARROW`] dimensions `[KEYS, NARROW]`.
    values: Vec<[f32; NARROW]>,
    /// Scores, then weights of a tile `[KEYS, lanes]`.
    scores: Vec<f32>,
}

/// Some rows of a segment and the heads that share one key head.
#[derive(Clone, Copy)]
struct Job<'a> {
    operands: Operands<'a>,
    segment: &'a Segment,
    /// First row, counted from the segment's.
    first: usize,
    kv_head: usize,
}

struct Attend<'a> {
    job: Job<'a>,
    out: Tile<'a>,
    scratch: &'a mut Scratch,
}

impl WithSimd for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { job, mut out, scratch } = self;
        let dim = job.operands.shape.head_dim;
        let queries = out.rows() * job.group();
        let lanes = queries.next_multiple_of(S::F32_LANES);
        let padded_dim = dim.next_multiple_of(NARROW);
        resize(&mut scratch.query, lanes * dim, 0.0);
        resize(&mut scratch.out, lanes * padded_dim, 0.0);
        resize(&mut scratch.top, lanes, f32::NEG_INFINITY);
        resize(&mut scratch.total, lanes, 0.0);
        resize(&mut scratch.scores, KEYS * tile_lanes::<S>(), 0.0);
        job.turn_queries::<S>(queries, &mut scratch.query);
        let start = job.segment.position + job.first;
        let visible = start + out.rows();
        for base in (0..visible).step_by(KEYS) {
            let count = KEYS.min(visible - base);
            job.gather(base, count, &mut scratch.keys, &mut scratch.values);
            for (first, lanes) in lane_tiles(queries, S::F32_LANES) {
                let block = Block { first, lanes, base, count };
                block.attend(simd, &job, scratch);
            }
        }
        for (first, lanes) in lane_tiles(queries, S::F32_LANES) {
            let sums = &scratch.out[first * padded_dim..][..lanes * padded_dim];
            for lane in 0..lanes.min(queries - first) {
                let inverse = 1.0 / scratch.total[first + lane];
                job.write(first + lane, inverse, sums.iter().skip(lane).step_by(lanes), &mut out);
            }
        }
    }
}

fn resize(values: &mut Vec<f32>, len: usize, value: f32) {
    values.clear();
    values.resize(len, value);
}

impl Job<'_> {
    /// Query heads of the key head.
    fn group(&self) -> usize {
        self.operands.shape.heads / self.operands.shape.kv_heads
    }

    /// Row of the pass and head of a query.
    fn place(&self, query: usize) -> (usize, usize) {
        let group = self.group();
        (self.segment.rows.start + self.first + query / group, self.kv_head * group + query % group)
    }

    #[inline(always)]
    fn turn_queries<S: Simd>(&self, queries: usize, turned: &mut [f32]) {
        let (heads, dim) = (self.operands.shape.heads, self.operands.shape.head_dim);
        for (first, lanes) in lane_tiles(queries, S::F32_LANES) {
            let tile = &mut turned[first * dim..][..lanes * dim];
            for lane in 0..lanes.min(queries - first) {
                let (row, head) = self.place(first + lane);
                let query = &self.operands.query[(row * heads + head) * dim..][..dim];
                tile.iter_mut().skip(lane).step_by(lanes).zip(query).for_each(|(t, q)| *t = *q);
            }
        }
    }

    /// Copies `count` keys and values of positions from `base` on; the keys are padded with zeros to [`NARROW`].
    #[inline(always)]
    fn gather(
        &self,
        base: usize,
        count: usize,
        keys: &mut Vec<[f32; INNER]>,
        values: &mut Vec<[f32; NARROW]>,
    ) {
        let (dim, kv_heads) = (self.operands.shape.head_dim, self.operands.shape.kv_heads);
        keys.resize(dim.div_ceil(INNER) * KEYS, [0.0; INNER]);
        values.resize(dim.div_ceil(NARROW) * KEYS, [0.0; NARROW]);
        for (k, row) in key_rows(&self.segment.keys, base).take(count).enumerate() {
            let start = (row * kv_heads + self.kv_head) * dim;
            let key = self.operands.keys[start..start + dim].chunks(INNER);
            for (place, key) in keys.iter_mut().skip(k).step_by(KEYS).zip(key) {
                place[..key.len()].copy_from_slice(key);
            }
            let (value, rest) = self.operands.values[start..start + dim].as_chunks::<NARROW>();
            let mut places = values.iter_mut().skip(k).step_by(KEYS);
            value.iter().zip(&mut places).for_each(|(value, place)| *place = *value);
            if let (Some(place), false) = (places.next(), rest.is_empty()) {
                place[..rest.len()].copy_from_slice(rest);
            }
        }
        for block in keys.chunks_exact_mut(KEYS) {
            block[count..count.next_multiple_of(NARROW)].fill([0.0; INNER]);
        }
    }

    /// Writes a query's output, gated.
    #[inline(always)]
    fn write<'s>(&self, query: usize, inverse: f32, sums: impl Iterator<Item = &'s f32>, out: &mut Tile<'_>) {
        let shape = self.operands.shape;
        let (dim, group) = (shape.head_dim, self.group());
        let (row, head) = self.place(query);
        let gate = &self.operands.projected[row * shape.projected_width() + (2 * head + 1) * dim..][..dim];
        let out = &mut out.row(query / group)[query % group * dim..][..dim];
        for ((out, sum), gate) in out.iter_mut().zip(sums).zip(gate) {
            // Adding zero makes one zero of both: which one a sum ends with may depend on keys of weight 0.
            *out = sigmoid(*gate) * (sum * inverse) + 0.0;
        }
    }
}

/// Rows of the key arena of positions from `base` on.
fn key_rows(ranges: &[KeyRange], base: usize) -> impl Iterator<Item = usize> + '_ {
    let mut skipped = 0;
    ranges.iter().flat_map(move |range| {
        let skip = base.saturating_sub(skipped).min(range.len);
        skipped += range.len;
        range.row + skip..range.row + range.len
    })
}

/// A tile of queries against a block of keys.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    lanes: usize,
    base: usize,
    count: usize,
}

impl Block {
    #[inline(always)]
    fn attend<S: Simd>(self, simd: S, job: &Job<'_>, scratch: &mut Scratch) {
        let Self { first, lanes, count, .. } = self;
        let dim = job.operands.shape.head_dim;
        let Scratch { query, out, top, total, keys, values, scores: weights } = scratch;
        let query = &query[first * dim..][..lanes * dim];
        let padded = count.next_multiple_of(NARROW);
        for (from, keys) in (0..dim).step_by(INNER).zip(keys.chunks_exact(KEYS)) {
            let query = &query[from * lanes..dim.min(from + INNER) * lanes];
            scores(simd, lanes, query, &keys[..padded], &mut weights[..padded * lanes], from > 0);
        }
        let weights = &mut weights[..count * lanes];
        let (top, total) = (&mut top[first..][..lanes], &mut total[first..][..lanes]);
        let mut factor = [0.0; MAX_LANES];
        let factor = &mut factor[..lanes];
        self.weigh(job, weights, top, total, factor);
        let padded_dim = dim.next_multiple_of(NARROW);
        let out = out[first * padded_dim..][..lanes * padded_dim].chunks_exact_mut(NARROW * lanes);
        for (out, values) in out.zip(values.chunks_exact(KEYS)) {
            weighted_sums(simd, lanes, weights, &values[..count], factor, out);
        }
    }

    /// Makes weights of scores; `factor` is what earlier sums shrink by.
    #[inline(always)]
    fn weigh(
        self,
        job: &Job<'_>,
        weights: &mut [f32],
        top: &mut [f32],
        total: &mut [f32],
        factor: &mut [f32],
    ) {
        let scale = 1.0 / (job.operands.shape.head_dim as f32).sqrt();
        let group = job.group();
        let start = job.segment.position + job.first;
        factor.copy_from_slice(top);
        // Keys of this block that a lane sees.
        let mut seen = [0u32; MAX_LANES];
        let seen = &mut seen[..self.lanes];
        for (lane, seen) in seen.iter_mut().enumerate() {
            let position = start + (self.first + lane) / group;
            *seen = (position + 1).saturating_sub(self.base).min(KEYS) as u32;
        }
        for (k, line) in (0u32..).zip(weights.chunks_exact_mut(self.lanes)) {
            for ((weight, top), seen) in line.iter_mut().zip(top.iter_mut()).zip(&*seen) {
                let score = *weight * scale;
                *weight = if k < *seen { score } else { f32::NEG_INFINITY };
                *top = if *weight > *top { *weight } else { *top };
            }
        }
        for ((factor, top), total) in factor.iter_mut().zip(&*top).zip(total.iter_mut()) {
            *factor = exp(*factor - *top);
            *total *= *factor;
        }
        for line in weights.chunks_exact_mut(self.lanes) {
            for ((weight, top), total) in line.iter_mut().zip(&*top).zip(total.iter_mut()) {
                *weight = exp(*weight - *top);
                *total += *weight;
            }
        }
    }
}

/// Lanes of a tile on any machine, at most.
const MAX_LANES: usize = 32;
