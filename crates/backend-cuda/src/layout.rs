//! Owns a pass as the tables that kernels read: one upload, one table of rotary angles. Knows no kernel.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use backend::{BackendError, Pass, Result};

use crate::device::{Device, Memory};
use crate::shapes::Shape;

/// Inputs before a segment that a convolution may need: `HISTORY` in `conv.cu`.
pub(crate) const HISTORY: usize = 7;
/// Consecutive queries of a segment that one block of attention works on: `TILE_QUERIES` in `attention.cuh`.
pub(crate) const TILE_QUERIES: usize = 16;

/// Keys that one block of attention on tensor cores sees: `SPAN_KEYS` in `attention_mma.cu`.
pub(crate) const SPAN_KEYS: usize = 512;
/// Tokens of a chunk of the delta rule: `CHUNK` in `delta_chunks.cuh`.
pub(crate) const CHUNK: usize = 64;

/// Partial sums that attention may leave at once: what a long text needs beyond is done in several launches.
pub(crate) const WAVE_PARTIALS: usize = 1024;

/// Words of a `Segment`, a `KeyRange` and a `Tile` in the kernels' sources.
const SEGMENT_WORDS: usize = 8;
const RANGE_WORDS: usize = 3;

/// A pass prepared for the device.
#[derive(Debug)]
pub struct Layout {
    memory: Arc<LayoutMemory>,
    offsets: Offsets,
    /// Facts of the pass that launches need on the host.
    pub(crate) host: Host,
    /// The shape that the pass is padded to, if it is.
    pub(crate) shape: Option<Shape>,
}

/// Where a layout's tables lie. All passes of a shape use the same memory, one after another in stream order.
#[derive(Debug)]
pub(crate) struct LayoutMemory {
    tables: Mutex<Memory>,
    tables_pointer: u64,
    rotary: Memory,
}

/// What launches need to know on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) rows: usize,
    pub(crate) segments: usize,
    pub(crate) levels: Vec<Level>,
    /// Whether any segment keeps its state.
    pub(crate) keeps: bool,
    pub(crate) tiles: usize,
    /// Attention on tensor cores, launch by launch.
    pub(crate) waves: Vec<Wave>,
    pub(crate) chunks: usize,
    pub(crate) readout_rows: usize,
    pub(crate) options: usize,
    /// One more than the largest slot and key row named.
    pub(crate) slots: usize,
    pub(crate) key_rows: usize,
    pub(crate) rotary_pairs: usize,
    /// One more than the largest token id.
    pub(crate) vocabulary: usize,
}

/// A run of segments that start from states which are complete when the level starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// Whether it has segments of one chunk of the delta rule, and of several.
    pub(crate) short: bool,
    pub(crate) long: bool,
}

/// A launch of attention on tensor cores: tiles times the spans they see, and the tiles with several spans. All waves use
/// the same memory for partial sums, one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wave {
    pub(crate) first_work: usize,
    pub(crate) work: usize,
    pub(crate) first_joint: usize,
    pub(crate) joints: usize,
}

/// Where each table starts, in words.
#[derive(Clone, Copy, Debug, Default)]
struct Offsets {
    tokens: usize,
    positions: usize,
    segment_of: usize,
    locals: usize,
    key_rows: usize,
    segments: usize,
    histories: usize,
    ranges: usize,
    tiles: usize,
    work: usize,
    joints: usize,
    chunks: usize,
    readouts: usize,
    scores: usize,
    inv_freq: usize,
}

/// All tables in one run of words.
#[derive(Debug, Default)]
struct Tables {
    words: Vec<i32>,
    offsets: Offsets,
    host: Host,
}

impl Layout {
    /// Prepares `pass`: builds the tables and copies them to the device; padded to a shape if one is given, in the memory of
    /// the shape's earlier layouts if there is one.
    ///
    /// # Errors
    /// [`BackendError::Pass`] when the pass breaks its rules, [`BackendError::Contract`] when a number does not fit
    /// the device's tables, else device errors.
    pub(crate) fn new(
        device: &Arc<Device>,
        pass: &Pass,
        inv_freq: &[f32],
        shape: Option<Shape>,
        memory: Option<Arc<LayoutMemory>>,
    ) -> Result<Self> {
        let Tables { words, offsets, host } = tables(pass, inv_freq, shape)?;
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let memory = match memory {
            Some(memory) => memory,
            None => {
                let tables = device.borrow("tables of a pass", bytes.len())?;
                let rotary = device.borrow("rotary angles of a pass", 8 * host.rows * host.rotary_pairs)?;
                let tables_pointer = tables.pointer();
                Arc::new(LayoutMemory { tables: Mutex::new(tables), tables_pointer, rotary })
            }
        };
        memory.tables.lock().unwrap_or_else(PoisonError::into_inner).upload(0, bytes)?;
        Ok(Self { memory, offsets, host, shape })
    }

    pub(crate) fn memory(&self) -> Arc<LayoutMemory> {
        Arc::clone(&self.memory)
    }

    fn table(&self, offset: usize) -> u64 {
        self.memory.tables_pointer + 4 * offset as u64
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.table(self.offsets.tokens)
    }

    pub(crate) fn positions(&self) -> u64 {
        self.table(self.offsets.positions)
    }

    pub(crate) fn segment_of(&self) -> u64 {
        self.table(self.offsets.segment_of)
    }

    /// Every row's place in its segment, padded to a multiple of four rows.
    pub(crate) fn locals(&self) -> u64 {
        self.table(self.offsets.locals)
    }

    pub(crate) fn key_rows(&self) -> u64 {
        self.table(self.offsets.key_rows)
    }

    /// The segments from `first` on.
    pub(crate) fn segments(&self, first: usize) -> u64 {
        self.table(self.offsets.segments + first * SEGMENT_WORDS)
    }

    pub(crate) fn histories(&self) -> u64 {
        self.table(self.offsets.histories)
    }

    pub(crate) fn ranges(&self) -> u64 {
        self.table(self.offsets.ranges)
    }

    pub(crate) fn tiles(&self) -> u64 {
        self.table(self.offsets.tiles)
    }

    /// The work of attention from item `first` on.
    pub(crate) fn work(&self, first: usize) -> u64 {
        self.table(self.offsets.work + 4 * first)
    }

    pub(crate) fn joints(&self, first: usize) -> u64 {
        self.table(self.offsets.joints + 4 * first)
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.table(self.offsets.chunks)
    }

    pub(crate) fn readouts(&self) -> u64 {
        self.table(self.offsets.readouts)
    }

    pub(crate) fn scores(&self) -> u64 {
        self.table(self.offsets.scores)
    }

    pub(crate) fn inv_freq(&self) -> u64 {
        self.table(self.offsets.inv_freq)
    }

    /// `[rows, pairs]` of (cos, sin).
    pub(crate) fn rotary(&self) -> u64 {
        self.memory.rotary.pointer()
    }
}

fn tables(pass: &Pass, inv_freq: &[f32], shape: Option<Shape>) -> Result<Tables> {
    // Arena sizes are not known here; every operation compares them with what the pass names.
    pass.validate(usize::MAX / 2, usize::MAX / 2)?;
    let mut tables = Tables::default();
    let mut host = Host {
        rows: pass.rows(),
        segments: pass.segments.len(),
        rotary_pairs: inv_freq.len(),
        ..Host::default()
    };
    let mut positions = Vec::with_capacity(pass.rows());
    let mut segment_of = Vec::with_capacity(pass.rows());
    let mut locals = Vec::with_capacity(pass.rows() + 3);
    let mut key_rows = Vec::with_capacity(pass.rows());
    let mut segments = Vec::with_capacity(pass.segments.len() * SEGMENT_WORDS);
    let mut ranges = Vec::new();
    let mut chunks = Vec::new();
    for (index, segment) in pass.segments.iter().enumerate() {
        let own = segment.keys.last().map_or(0, |range| range.row);
        positions.extend(segment.position..segment.position + segment.rows.len());
        segment_of.extend(std::iter::repeat_n(index, segment.rows.len()));
        locals.extend(0..segment.rows.len());
        key_rows.extend(own..own + segment.rows.len());
        let slot = |slot: Option<usize>| slot.map_or(-1, |slot| slot as i64);
        segments.extend([
            segment.rows.start as i64,
            segment.rows.len() as i64,
            segment.position as i64,
            slot(segment.initial),
            slot(segment.last),
            (ranges.len() / RANGE_WORDS) as i64,
            segment.keys.len() as i64,
            (chunks.len() / 2) as i64,
        ]);
        chunks.extend((0..segment.rows.len()).step_by(CHUNK).flat_map(|first| [index, first]));
        let mut position = 0;
        for range in &segment.keys {
            ranges.extend([position, range.row, range.len]);
            position += range.len;
            host.key_rows = host.key_rows.max(range.row + range.len);
        }
        host.slots =
            segment.initial.iter().chain(&segment.last).fold(host.slots, |most, slot| most.max(slot + 1));
        host.keeps |= segment.last.is_some();
        if host.levels.last().is_none_or(|level| pass.segments[level.first].level != segment.level) {
            host.levels.push(Level { first: index, ..Level::default() });
        }
        if let Some(level) = host.levels.last_mut() {
            level.count += 1;
            level.short |= segment.rows.len() <= CHUNK;
            level.long |= segment.rows.len() > CHUNK;
        }
    }
    host.vocabulary = pass.tokens.iter().max().map_or(0, |token| *token as usize + 1);
    host.chunks = chunks.len() / 2;
    let tiles = tiles(pass);
    host.tiles = tiles.len();
    let Spans { work, joints, waves } = spans(pass, &tiles);
    host.waves = waves;
    let (readouts, scores) = readouts(pass);
    host.readout_rows = readouts.len();
    host.options = scores.len() / 2;
    check_fits(&host)?;

    let mut tokens: Vec<i32> = pass.tokens.iter().map(|token| *token as i32).collect();
    let mut positions = integers(&positions);
    let mut segment_of = integers(&segment_of);
    let mut locals = integers(&locals);
    let mut key_rows = integers(&key_rows);
    let mut segments: Vec<i32> = segments.iter().map(|word| *word as i32).collect();
    let mut histories: Vec<i32> = histories(pass).into_iter().flatten().collect();
    let mut ranges = integers(&ranges);
    let mut tiles: Vec<i32> =
        tiles.iter().flat_map(|(segment, first)| [*segment as i32, *first as i32]).collect();
    let mut work: Vec<i32> = work.into_iter().flatten().collect();
    let mut joints: Vec<i32> = joints.into_iter().flatten().collect();
    let mut chunks = integers(&chunks);
    let mut readouts = integers(&readouts);
    let mut scores = integers(&scores);
    if let Some(shape) = shape {
        tokens.resize(shape.rows, 0);
        positions.resize(shape.rows, 0);
        // Padding rows belong to the last segment, which no launch looks at and which has nothing before it.
        segment_of.resize(shape.rows, shape.segments() as i32 - 1);
        locals.resize(shape.rows, 0);
        key_rows.resize(shape.rows, -1);
        let nothing = [0, 0, 0, -1, -1, 0, 0, 0];
        segments.extend(nothing.repeat(shape.segments() - host.segments));
        histories.resize(shape.segments() * HISTORY, -1);
        ranges.resize(shape.ranges() * RANGE_WORDS, 0);
        tiles.resize(2 * shape.tiles(), -1);
        work.resize(4 * shape.work(), -1);
        joints.resize(4 * shape.joints(), -1);
        chunks.resize(2 * shape.chunks(), -1);
        readouts.resize(shape.readout_rows(), 0);
        scores.resize(2 * shape.readout_rows(), 0);
        host.pad(shape);
    }
    locals.resize(locals.len().next_multiple_of(4), 0);

    let words = &mut tables.words;
    tables.offsets = Offsets {
        tokens: append(words, tokens),
        positions: append(words, positions),
        segment_of: append(words, segment_of),
        locals: append(words, locals),
        key_rows: append(words, key_rows),
        segments: append(words, segments),
        histories: append(words, histories),
        ranges: append(words, ranges),
        tiles: append(words, tiles),
        work: append(words, work),
        joints: append(words, joints),
        chunks: append(words, chunks),
        readouts: append(words, readouts),
        scores: append(words, scores),
        inv_freq: append(words, inv_freq.iter().map(|value| value.to_bits() as i32)),
    };
    tables.host = host;
    Ok(tables)
}

/// Kernels count in 32 bits.
fn check_fits(host: &Host) -> Result<()> {
    let most = i32::MAX as usize / 16;
    for (what, value) in [("rows", host.rows), ("slots", host.slots), ("key rows", host.key_rows)] {
        if value > most {
            let reason = format!("{value} {what}, the device's tables hold at most {most}");
            return Err(BackendError::Contract { operation: "layout", reason });
        }
    }
    Ok(())
}

/// Appends a table at a 16-byte boundary and says where it starts.
fn append(words: &mut Vec<i32>, table: impl IntoIterator<Item = i32>) -> usize {
    words.resize(words.len().next_multiple_of(4), 0);
    let offset = words.len();
    words.extend(table);
    offset
}

fn integers(sizes: &[usize]) -> Vec<i32> {
    sizes.iter().map(|size| *size as i32).collect()
}

impl Host {
    /// What launches of every pass of a shape are made from.
    fn pad(&mut self, shape: Shape) {
        self.rows = shape.rows;
        self.segments = shape.launched();
        let level =
            |first: usize, count: usize| Level { first, count, short: true, long: shape.rows > CHUNK };
        self.levels = vec![level(0, shape.first_level())];
        if shape.fresh {
            self.levels.push(level(1, shape.launched() - 1));
        }
        self.keeps = shape.fresh;
        self.tiles = shape.tiles();
        self.waves = vec![Wave { work: shape.work(), joints: shape.joints(), ..Wave::default() }];
        self.chunks = shape.chunks();
        self.readout_rows = shape.readout_rows();
    }
}

/// Per segment, what the convolution reads before its first row, newest last: a row of the pass, -1 for zero, or
/// `-2 - (slot * 8 + back)` for the entry `back` before the newest of a slot kept by an earlier pass. Slots written by
/// this pass are resolved to rows, so one launch serves all levels.
fn histories(pass: &Pass) -> Vec<[i32; HISTORY]> {
    let mut all: Vec<[i32; HISTORY]> = Vec::with_capacity(pass.segments.len());
    let mut writer: HashMap<usize, usize> = HashMap::new();
    for (index, segment) in pass.segments.iter().enumerate() {
        let newest_first: Vec<i32> = match segment.initial {
            None => vec![-1; HISTORY],
            Some(slot) => match writer.get(&slot) {
                Some(parent) => {
                    let rows = pass.segments[*parent].rows.clone().rev().map(|row| row as i32);
                    rows.chain(all[*parent].iter().rev().copied()).take(HISTORY).collect()
                }
                None => (0..HISTORY as i32).map(|back| -2 - (slot as i32 * 8 + back)).collect(),
            },
        };
        let mut history = [-1; HISTORY];
        for (entry, value) in history.iter_mut().rev().zip(newest_first) {
            *entry = value;
        }
        all.push(history);
        if let Some(slot) = segment.last {
            writer.insert(slot, index);
        }
    }
    all
}

/// (segment, first query) of every tile of attention, those with most keys first so that the last ones are short.
fn tiles(pass: &Pass) -> Vec<(usize, usize)> {
    let mut tiles: Vec<(usize, usize)> = pass
        .segments
        .iter()
        .enumerate()
        .flat_map(|(index, segment)| {
            (0..segment.rows.len()).step_by(TILE_QUERIES).map(move |first| (index, first))
        })
        .collect();
    tiles.sort_by_key(|(index, first)| std::cmp::Reverse(pass.segments[*index].position + first));
    tiles
}

/// (segment, first query, span, partial) for every span of keys that a tile sees, where a tile with one span has partial -1;
/// (segment, first query, first partial, spans) for the others; and where each launch's part of both begins.
#[derive(Default)]
struct Spans {
    work: Vec<[i32; 4]>,
    joints: Vec<[i32; 4]>,
    waves: Vec<Wave>,
}

/// Cuts attention on tensor cores into launches of bounded partial sums; within a launch the longest spans come first.
fn spans(pass: &Pass, tiles: &[(usize, usize)]) -> Spans {
    let mut spans = Spans::default();
    let mut pending: Vec<(usize, [i32; 4])> = Vec::new();
    let mut wave = Wave::default();
    let mut partial = 0;
    for (index, first) in tiles {
        let segment = &pass.segments[*index];
        let end = segment.position + segment.rows.len().min(first + TILE_QUERIES);
        let count = end.div_ceil(SPAN_KEYS);
        if count > 1 && partial > 0 && partial + count > WAVE_PARTIALS {
            spans.finish(&mut wave, &mut pending);
            partial = 0;
        }
        let tile = [*index as i32, *first as i32];
        if count > 1 {
            spans.joints.push([tile[0], tile[1], partial as i32, count as i32]);
        }
        for span in 0..count {
            let keys = SPAN_KEYS.min(end - span * SPAN_KEYS);
            let target = if count > 1 { (partial + span) as i32 } else { -1 };
            pending.push((keys, [tile[0], tile[1], span as i32, target]));
        }
        if count > 1 {
            partial += count;
        }
    }
    spans.finish(&mut wave, &mut pending);
    spans
}

impl Spans {
    fn finish(&mut self, wave: &mut Wave, pending: &mut Vec<(usize, [i32; 4])>) {
        pending.sort_by_key(|(keys, _)| std::cmp::Reverse(*keys));
        self.work.extend(pending.drain(..).map(|(_, item)| item));
        wave.work = self.work.len() - wave.first_work;
        wave.joints = self.joints.len() - wave.first_joint;
        self.waves.push(*wave);
        *wave = Wave { first_work: self.work.len(), first_joint: self.joints.len(), ..Wave::default() };
    }
}

/// Rows to gather, and per option the gathered rows of its question's `decide` and of itself.
fn readouts(pass: &Pass) -> (Vec<usize>, Vec<usize>) {
    let mut rows = Vec::new();
    let mut scores = Vec::new();
    for readout in &pass.readouts {
        let decide = rows.len();
        rows.push(readout.decide);
        for option in &readout.options {
            scores.extend([decide, rows.len()]);
            rows.push(*option);
        }
    }
    (rows, scores)
}

#[cfg(test)]
mod tests {
    use backend::{KeyRange, Readout, Segment};

    use super::*;

    fn segment(
        rows: std::ops::Range<usize>,
        position: usize,
        initial: Option<usize>,
        last: Option<usize>,
        level: usize,
    ) -> Segment {
        let mut keys = Vec::new();
        if position > 0 {
            keys.push(KeyRange { row: 100, len: position });
        }
        keys.push(KeyRange { row: 200 + rows.start, len: rows.len() });
        Segment { rows, position, initial, last, level, keys }
    }

    fn pass(segments: Vec<Segment>) -> Pass {
        let rows = segments.last().map_or(0, |segment| segment.rows.end);
        Pass { tokens: (0..rows as u32).collect(), segments, readouts: Vec::new() }
    }

    #[test]
    fn a_branch_reads_its_states_rows_and_what_came_before_them() {
        let pass = pass(vec![segment(0..2, 9, Some(3), Some(5), 0), segment(2..6, 11, Some(5), None, 1)]);
        let kept = |back: i32| -2 - (3 * 8 + back);
        assert_eq!(histories(&pass)[0], [kept(6), kept(5), kept(4), kept(3), kept(2), kept(1), kept(0)]);
        assert_eq!(histories(&pass)[1], [kept(4), kept(3), kept(2), kept(1), kept(0), 0, 1]);
    }

    #[test]
    fn a_first_segment_has_no_history_and_an_updated_slot_is_read_before_it_is_written() {
        let pass = pass(vec![segment(0..1, 0, None, Some(0), 0), segment(1..2, 4, Some(7), Some(7), 0)]);
        assert_eq!(histories(&pass)[0], [-1; HISTORY]);
        assert_eq!(histories(&pass)[1][HISTORY - 1], -2 - 7 * 8);
    }

    #[test]
    fn tiles_cover_every_query_and_the_longest_come_first() {
        let pass = pass(vec![segment(0..17, 0, None, Some(0), 0), segment(17..18, 17, Some(0), None, 1)]);
        assert_eq!(tiles(&pass), [(1, 0), (0, 16), (0, 0)]);
    }

    #[test]
    fn levels_and_limits_are_counted() {
        let pass = pass(vec![
            segment(0..17, 0, None, Some(4), 0),
            segment(17..18, 17, Some(4), None, 1),
            segment(18..20, 17, Some(4), None, 1),
        ]);
        let host = tables(&pass, &[1.0, 0.5], None).unwrap().host;
        let level = |first, count| Level { first, count, short: true, long: false };
        assert_eq!(host.levels, [level(0, 1), level(1, 2)]);
        assert_eq!((host.slots, host.key_rows, host.tiles, host.vocabulary), (5, 220, 4, 20));
        assert!(host.keeps);
    }

    #[test]
    fn tiles_are_cut_into_spans_of_absolute_positions() {
        let pass = pass(vec![segment(0..20, 500, Some(0), None, 0)]);
        let Spans { work, joints, waves } = spans(&pass, &tiles(&pass));
        assert_eq!(work, [[0, 16, 0, 0], [0, 0, 0, 2], [0, 16, 1, 1], [0, 0, 1, 3]]);
        assert_eq!(joints, [[0, 16, 0, 2], [0, 0, 2, 2]]);
        assert_eq!(waves, [Wave { work: 4, joints: 2, ..Wave::default() }]);
    }

    #[test]
    fn partial_sums_are_bounded_by_waves_that_cover_everything_once() {
        let pass = pass(vec![
            segment(0..40, 60_000, Some(0), None, 0),
            segment(40..80, 0, None, None, 0),
            segment(80..400, 50_000, Some(0), None, 0),
        ]);
        let tiles = tiles(&pass);
        let Spans { work, joints, waves } = spans(&pass, &tiles);
        assert!(waves.len() > 2);
        let (mut works, mut joined) = (0, 0);
        for wave in &waves {
            assert_eq!((wave.first_work, wave.first_joint), (works, joined));
            works += wave.work;
            joined += wave.joints;
            let mut partials: Vec<i32> = work[wave.first_work..works]
                .iter()
                .map(|item| item[3])
                .filter(|target| *target >= 0)
                .collect();
            partials.sort_unstable();
            // Every partial once, from zero on.
            assert!(partials.iter().enumerate().all(|(index, partial)| *partial == index as i32));
            assert!(partials.len() <= WAVE_PARTIALS);
            let own: usize = joints[wave.first_joint..joined].iter().map(|joint| joint[3] as usize).sum();
            assert_eq!(own, partials.len());
        }
        assert_eq!((works, joined), (work.len(), joints.len()));
        assert_eq!(joints.len(), tiles.len() - 3);
    }

    #[test]
    fn options_point_at_the_gathered_rows() {
        let mut pass = pass(vec![segment(0..9, 0, None, None, 0)]);
        pass.readouts =
            vec![Readout { decide: 8, options: vec![2, 4] }, Readout { decide: 7, options: vec![6] }];
        assert_eq!(readouts(&pass), (vec![8, 2, 4, 7, 6], vec![0, 1, 0, 2, 3, 4]));
    }

    #[test]
    fn a_broken_pass_is_refused() {
        let broken = Pass {
            tokens: vec![1, 2],
            segments: vec![segment(0..1, 0, None, None, 0)],
            readouts: Vec::new(),
        };
        assert!(matches!(tables(&broken, &[], None), Err(BackendError::Pass(_))));
    }
}
