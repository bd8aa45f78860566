//! Owns the gated delta rule as torch runs it: FP32 products by cuBLAS, chunk by chunk, and a triangular solve.

use backend::{DType, Result};

use super::{DELTA_DIM, DeltaHeads, Grid, ServiceOps};
use crate::blas::Batched;
use crate::device::{Arguments, Buffer, Memory};
use crate::engine::{contract, holds};

/// Tokens of a chunk.
const CHUNK: usize = 64;

/// Memory of the delta rule for the largest batch.
pub struct DeltaScratch {
    padded: [Buffer; 5],
    squares: [Buffer; 2],
    sums: Buffer,
    steps: [Buffer; 4],
    update: Buffer,
    pointers: [Memory; 3],
    chunks: usize,
    sequences: usize,
}

impl ServiceOps {
    /// Scratch memory of the delta rule for batches of up to `chunks` chunks and `sequences` rows.
    ///
    /// # Errors
    /// [`backend::BackendError::Memory`].
    pub fn delta_scratch(&self, heads: DeltaHeads, chunks: usize, sequences: usize) -> Result<DeltaScratch> {
        let (count, many) = (chunks * heads.values, sequences * heads.values);
        let wide = |elements| self.buffer("chunks of the delta rule", DType::F32, elements);
        let matrix = || wide(count * CHUNK * DELTA_DIM);
        let step = || wide(many * CHUNK * DELTA_DIM);
        let addresses = || self.device().allocate("addresses of chunks", count * 8);
        Ok(DeltaScratch {
            padded: [matrix()?, matrix()?, matrix()?, matrix()?, matrix()?],
            squares: [wide(count * CHUNK * CHUNK)?, wide(count * CHUNK * CHUNK)?],
            sums: wide(count * CHUNK)?,
            steps: [step()?, step()?, step()?, step()?],
            update: wide(many * DELTA_DIM * DELTA_DIM)?,
            pointers: [addresses()?, addresses()?, addresses()?],
            chunks,
            sequences,
        })
    }

    /// Bytes of [`ServiceOps::delta_scratch`].
    pub fn delta_scratch_bytes(heads: DeltaHeads, chunks: usize, sequences: usize) -> usize {
        let (count, many) = (chunks * heads.values, sequences * heads.values);
        count * (CHUNK * (5 * DELTA_DIM + 2 * CHUNK + 1) * 4 + 24)
            + many * DELTA_DIM * (4 * CHUNK + DELTA_DIM) * 4
    }

    /// The gated delta rule in chunks of 64 from the batch's start, FP32 inside: from `states [batch, heads, 128, 128]`, which it
    /// replaces by the final ones. `mixed [rows, q | k | v]`, `out [rows, value heads, 128]`.
    ///
    /// # Errors
    /// [`backend::BackendError`].
    #[allow(clippy::too_many_arguments)] // Its operands are these.
    pub fn delta_rule(
        &self,
        mixed: &Buffer,
        (beta, decay): (&Buffer, &Buffer),
        heads: DeltaHeads,
        grid: Grid,
        states: &mut Buffer,
        scratch: &mut DeltaScratch,
        out: &mut Buffer,
    ) -> Result<()> {
        let (chunks, many) = (grid.length.div_ceil(CHUNK), grid.batch * heads.values);
        let (padded, count) = (chunks * CHUNK, chunks * many);
        self.check("delta_rule", &[("mixed", mixed, grid.rows() * heads.channels())])?;
        self.check("delta_rule", &[("out", out, grid.rows() * heads.values * DELTA_DIM)])?;
        holds("delta_rule", "beta", beta, grid.rows() * heads.values)?;
        holds("delta_rule", "decay", decay, grid.rows() * heads.values)?;
        holds("delta_rule", "states", states, grid.batch * heads.state())?;
        if chunks * grid.batch > scratch.chunks || grid.batch > scratch.sequences {
            let reason = format!(
                "{} chunks of {} rows, scratch for {} of {}",
                chunks * grid.batch,
                grid.batch,
                scratch.chunks,
                scratch.sequences
            );
            return Err(contract("delta_rule", reason));
        }
        let address = |buffer: &Buffer| buffer.memory.pointer();
        let [q, k, kb, vb, kbd] = &scratch.padded;
        let [solve, within] = &scratch.squares;
        let sums = &scratch.sums;
        let arguments = Arguments::default()
            .buffer(mixed)
            .buffer(beta)
            .buffer(q)
            .buffer(k)
            .buffer(kb)
            .buffer(vb)
            .int(grid.length)
            .int(padded)
            .int(heads.keys)
            .int(heads.values);
        self.cuda.launch(
            "service_delta_prepare",
            (padded.div_ceil(8), heads.keys, grid.batch),
            256,
            arguments,
        )?;
        // torch scans rows of 64 by 32 threads where there are at most 32 of them, else by 16.
        let threads = if count <= 32 { 32 } else { 16 };
        let arguments = Arguments::default()
            .buffer(decay)
            .buffer(sums)
            .int(grid.length)
            .int(padded)
            .int(heads.values)
            .int(threads);
        self.cuda.launch("service_delta_sums", (chunks, heads.values, grid.batch), 32, arguments)?;
        let matrix = CHUNK * DELTA_DIM;
        for (left, target) in [(kb, solve), (q, within)] {
            self.blas.batched(Batched {
                transposed: (true, false),
                m: CHUNK,
                n: CHUNK,
                depth: DELTA_DIM,
                a: (address(k), DELTA_DIM, matrix),
                b: (address(left), DELTA_DIM, matrix),
                c: (address(target), CHUNK, CHUNK * CHUNK),
                count,
            })?;
        }
        let arguments = Arguments::default()
            .buffer(sums)
            .buffer(solve)
            .buffer(within)
            .buffer(q)
            .buffer(k)
            .buffer(kb)
            .buffer(kbd);
        self.cuda.launch("service_delta_decay", (count, 1, 1), 256, arguments)?;
        let sides = [(solve, CHUNK * CHUNK), (vb, matrix), (kbd, matrix)];
        for ((buffer, step), pointers) in sides.into_iter().zip(&scratch.pointers) {
            let arguments = Arguments::default()
                .pointer(address(buffer))
                .pointer(pointers.pointer())
                .int(step * 4)
                .int(count);
            self.cuda.launch("service_pointers", (count.div_ceil(256), 1, 1), 256, arguments)?;
        }
        let [triangles, values, keys] = &scratch.pointers;
        for side in [values, keys] {
            self.blas.solve(triangles.pointer(), side.pointer(), CHUNK, DELTA_DIM, count)?;
        }
        let [predicted, fresh, across, inside] = &scratch.steps;
        let state = (address(states), DELTA_DIM, DELTA_DIM * DELTA_DIM);
        let fresh_side = (address(fresh), DELTA_DIM, matrix);
        for chunk in 0..chunks {
            let at = |buffer: &Buffer, size: usize| address(buffer) + (chunk * size * 4) as u64;
            let product = |b, transposed_b, m, n, depth, a, c: (&Buffer, usize)| {
                self.blas.batched(Batched {
                    transposed: (false, transposed_b),
                    m,
                    n,
                    depth,
                    a,
                    b,
                    c: (address(c.0), DELTA_DIM, c.1),
                    count: many,
                })
            };
            let (rows, width) = (CHUNK, DELTA_DIM);
            let solved = (at(kbd, matrix), CHUNK, chunks * matrix);
            product(solved, true, width, rows, width, state, (predicted, matrix))?;
            let arguments =
                Arguments::default().buffer(vb).buffer(predicted).buffer(fresh).int(chunk).int(chunks);
            self.cuda.launch("service_delta_fresh", (many, 1, 1), 256, arguments)?;
            product(
                (at(q, matrix), width, chunks * matrix),
                false,
                width,
                rows,
                width,
                state,
                (across, matrix),
            )?;
            let inner = (at(within, CHUNK * CHUNK), CHUNK, chunks * CHUNK * CHUNK);
            product(inner, false, width, rows, CHUNK, fresh_side, (inside, matrix))?;
            let keys = (at(k, matrix), width, chunks * matrix);
            product(keys, true, width, width, CHUNK, fresh_side, (&scratch.update, width * width))?;
            let arguments = Arguments::default()
                .buffer(across)
                .buffer(inside)
                .buffer(&scratch.update)
                .buffer(sums)
                .buffer(states)
                .buffer(out)
                .int(chunk)
                .int(padded)
                .int(grid.length)
                .int(heads.values);
            self.cuda.launch("service_delta_step", (many, 1, 1), 256, arguments)?;
        }
        Ok(())
    }
}
