//! Owns choosing cuBLASLt's algorithms by measurement, and the proof that all of them give a row the same bits. Knows
//! nothing of the layers that project.
#![allow(unsafe_code)] // Calls into cuBLASLt and the CUDA driver.

use std::sync::PoisonError;

use backend::Result;
use cudarc::cublaslt::sys;
use cudarc::driver::result::event;
use cudarc::driver::sys::CUevent_flags;

use crate::device::{Arguments, Memory, failure};
use crate::gemm::{Gemm, Operands, Plan, Problem, Shape, class_of, classes, no_algorithm};

/// Suggestions of the library that are tried beyond so many rows, and how many winners of larger classes besides.
const FEW: usize = 4;
const MANY_BELOW: usize = 512;
const NEIGHBOURS: usize = 3;
/// Weights rotated through while timing, so that they come from memory as in a forward pass.
const ROTATED_BYTES: usize = 192 << 20;

impl Gemm {
    /// Measures the algorithms of every registered shape for every class up to that of `rows` rows, and keeps the
    /// fastest of those whose bits equal the reference's.
    ///
    /// # Errors
    /// [`BackendError::Memory`] when the operands do not fit, [`BackendError::Device`] when nothing serves a shape.
    pub(crate) fn warm_up(&self, rows: usize, wide_output: bool) -> Result<()> {
        let shapes: Vec<_> =
            self.shapes.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        for (columns, depth) in shapes {
            self.tune(Shape { columns, depth, wide_output }, class_of(rows))?;
        }
        Ok(())
    }

    fn tune(&self, shape: Shape, largest: usize) -> Result<()> {
        let bench = Bench::new(self, shape, largest)?;
        let mut winners: Vec<sys::cublasLtMatmulAlgo_t> = Vec::new();
        let mut reference = false;
        for class in classes().into_iter().rev().filter(|class| *class <= largest) {
            let problem = Problem::new(shape, class)?;
            let mut candidates: Vec<_> =
                self.candidates(&problem)?.into_iter().map(|found| found.algo).collect();
            candidates.truncate(if class <= MANY_BELOW { candidates.len() } else { FEW });
            // What was best with a few more rows is often good here, and the library does not always name it.
            for winner in winners.iter().rev().take(NEIGHBOURS) {
                if !candidates.contains(winner) && self.accepts(&problem, winner) {
                    candidates.push(*winner);
                }
            }
            let tried = candidates.len();
            let mut different = 0;
            let mut best: Option<(f32, sys::cublasLtMatmulAlgo_t)> = None;
            for algorithm in candidates {
                if !bench.agrees(&problem, class, &algorithm, &mut reference)? {
                    different += 1;
                    continue;
                }
                let time = bench.time(&problem, &algorithm)?;
                if best.is_none_or(|(other, _)| time < other) {
                    best = Some((time, algorithm));
                }
            }
            let (time, algorithm) = best.ok_or_else(|| no_algorithm(shape, class))?;
            if !winners.contains(&algorithm) {
                winners.push(algorithm);
            }
            self.keep(shape, class, Plan { algorithm, microseconds: Some(time), tried, different });
        }
        Ok(())
    }
}

/// Random operands of one shape, large enough for its largest class.
struct Bench<'a> {
    gemm: &'a Gemm,
    shape: Shape,
    weights: Memory,
    copies: usize,
    x: Memory,
    out: Memory,
    reference: Memory,
}

impl<'a> Bench<'a> {
    fn new(gemm: &'a Gemm, shape: Shape, rows: usize) -> Result<Self> {
        let device = &gemm.device;
        let weight_bytes = 2 * shape.columns * shape.depth;
        let copies = ROTATED_BYTES.div_ceil(weight_bytes).clamp(1, 64);
        let out_bytes = rows * shape.columns * if shape.wide_output { 4 } else { 2 };
        let what = "choosing matrix products";
        let bench = Self {
            gemm,
            shape,
            weights: device.allocate(what, copies * weight_bytes)?,
            copies,
            x: device.allocate(what, 2 * rows * shape.depth)?,
            out: device.allocate(what, out_bytes)?,
            reference: device.allocate(what, out_bytes)?,
        };
        bench.fill(&bench.x, rows * shape.depth, 1.0, 1)?;
        for copy in 0..copies {
            let elements = shape.columns * shape.depth;
            let target = bench.weights.pointer() + (copy * weight_bytes) as u64;
            bench.fill_at(target, elements, 0.05, 2)?;
        }
        Ok(bench)
    }

    fn fill(&self, memory: &Memory, elements: usize, scale: f32, seed: usize) -> Result<()> {
        self.fill_at(memory.pointer(), elements, scale, seed)
    }

    fn fill_at(&self, target: u64, elements: usize, scale: f32, seed: usize) -> Result<()> {
        let arguments = Arguments::default().pointer(target).int(elements).float(scale).int(seed);
        // SAFETY: the parameters of `fill_random`; `target` has `elements` elements.
        unsafe { self.gemm.device.launch("fill_random", (1024, 1, 1), 256, 0, arguments) }
    }

    fn operands(&self, copy: usize, out: &Memory) -> Operands {
        let offset = (copy % self.copies) * 2 * self.shape.columns * self.shape.depth;
        Operands { weight: self.weights.pointer() + offset as u64, x: self.x.pointer(), out: out.pointer() }
    }

    /// Whether an algorithm gives the reference's bits for the first `rows` rows; the first one asked becomes the
    /// reference, so the largest class must come first.
    fn agrees(
        &self,
        problem: &Problem,
        rows: usize,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        reference: &mut bool,
    ) -> Result<bool> {
        let out = if *reference { &self.out } else { &self.reference };
        // SAFETY: `Bench::new` made the operands for at least this many rows.
        unsafe { self.gemm.run(problem, self.operands(0, out), algorithm) }?;
        if !*reference {
            *reference = true;
            return Ok(true);
        }
        let words = rows * self.shape.columns * if self.shape.wide_output { 4 } else { 2 } / 4;
        let mut flag = self.gemm.device.borrow("a flag", 16)?;
        flag.clear()?;
        let arguments = Arguments::default()
            .pointer(self.out.pointer())
            .pointer(self.reference.pointer())
            .int(words)
            .pointer(flag.pointer());
        // SAFETY: the parameters of `differs`; both outputs have `words` words.
        unsafe { self.gemm.device.launch("differs", (1024, 1, 1), 256, 0, arguments) }?;
        Ok(flag.download(4)? == [0; 4])
    }

    /// Mean time of a few runs over rotating weights, in microseconds.
    fn time(&self, problem: &Problem, algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<f32> {
        const RUNS: usize = 4;
        let stream = self.gemm.device.stream.cu_stream();
        let event = || {
            event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(|error| failure("cuEventCreate", error))
        };
        let (start, end) = (event()?, event()?);
        // SAFETY: live events, and operands as in `agrees`; the events are destroyed after the stream reached them.
        unsafe {
            self.gemm.run(problem, self.operands(1, &self.out), algorithm)?;
            event::record(start, stream).map_err(|error| failure("cuEventRecord", error))?;
            for copy in 0..RUNS {
                self.gemm.run(problem, self.operands(copy + 2, &self.out), algorithm)?;
            }
            event::record(end, stream).map_err(|error| failure("cuEventRecord", error))?;
            self.gemm.device.synchronize()?;
            let elapsed = event::elapsed(start, end).map_err(|error| failure("cuEventElapsedTime", error))?;
            let _ = event::destroy(start);
            let _ = event::destroy(end);
            Ok(elapsed * 1000.0 / RUNS as f32)
        }
    }
}
