//! Owns the mixers' tensor-core paths, each a few launches: the delta rule in chunks, attention over spans of keys.
//! Knows neither how their operations check arguments nor when these paths are taken.

use backend::{Attention, DeltaNet, Result};

use crate::device::{Arguments, Buffer};
use crate::engine::{CudaOps, Profile, letter};
use crate::layout::{Layout, SPAN_KEYS, TILE_QUERIES, WAVE_PARTIALS};

/// Bytes of `Prepared`, `PrepareShared`, `ScanShared` and `ShortShared` in `delta_*.cu*`.
const PREPARED: usize = 4 * (2 * 64 * 64 + 4 * 64);
const PREPARE_SHARED: usize = 4 * (2 * 64 * 132 + 2 * 64 * 68 + 32 * 36 + 4 * 64);
const SCAN_SHARED: usize = 4 * (3 * 64 * 132 + 2 * 64 * 68 + 32 * 132 + 3 * 32 * 68 + 2 * 4 * 64);
const SHORT_SHARED: usize = 4 * (2 * 64 * 132 + 2 * 64 * 68 + 4 * 64);

/// Bytes of `MmaShared` in `attention_mma.cu`: queries of four heads, two blocks of 32 keys and of 32 values, the weights.
pub(crate) fn attention_shared(head_dim: usize) -> usize {
    2 * (4 * 16 + 2 * 32 + 2 * 32) * head_dim + 2 * 4 * 16 * 40 + 4 * 4 * 2 * 16
}

impl CudaOps {
    /// Whether the delta rule of a shape runs in chunks on tensor cores.
    pub(crate) fn chunked(&self, shape: &DeltaNet) -> bool {
        self.profile == Profile::Fast
            && (shape.key_dim, shape.value_dim % 32) == (128, 0)
            && self.device.shared_memory() >= SCAN_SHARED
    }

    /// The delta rule in chunks on tensor cores; the arguments are those of [`Ops::delta_rule`], checked.
    pub(crate) fn delta_chunks(
        &self,
        qkv: &Buffer,
        gates: &Buffer,
        shape: &DeltaNet,
        layout: &Layout,
        states: &Buffer,
        out: &Buffer,
    ) -> Result<()> {
        let host = &layout.host;
        let prepared =
            self.device.borrow("chunks of the delta rule", host.chunks * shape.value_heads * PREPARED)?;
        // Value heads of one key head share their products; with few chunks, blocks are worth more.
        let heads =
            if host.chunks * shape.key_heads >= 256 { shape.value_heads / shape.key_heads } else { 1 };
        let arguments = Arguments::default()
            .buffer(qkv)
            .buffer(gates)
            .pointer(prepared.pointer())
            .pointer(layout.chunks())
            .pointer(layout.segments(0))
            .int(shape.key_heads)
            .int(shape.value_heads)
            .int(shape.value_dim)
            .int(heads);
        let blocks = (host.chunks, shape.value_heads / heads, 1);
        self.launch_with("delta_prepare", blocks, 256, PREPARE_SHARED, arguments)?;
        for level in &host.levels {
            let arguments = || {
                Arguments::default()
                    .buffer(qkv)
                    .pointer(prepared.pointer())
                    .buffer(states)
                    .buffer(out)
                    .pointer(layout.segments(level.first))
                    .ints([shape.key_heads, shape.value_heads, shape.value_dim, 0])
            };
            let blocks = (shape.value_dim / 32, shape.value_heads, level.count);
            let kinds =
                [(level.long, "delta_scan_", SCAN_SHARED), (level.short, "delta_scan_short_", SHORT_SHARED)];
            for (any, name, shared) in kinds {
                if any {
                    let name = format!("{name}{}", letter(out.dtype));
                    self.launch_with(&name, blocks, 512, shared, arguments())?;
                }
            }
        }
        Ok(())
    }

    /// Attention on tensor cores; the arguments are those of [`Ops::attention`], checked.
    #[allow(clippy::too_many_arguments)] // Those of the operation.
    pub(crate) fn attention_spans(
        &self,
        query: &Buffer,
        projected: &Buffer,
        keys: &Buffer,
        values: &Buffer,
        shape: &Attention,
        layout: &Layout,
        out: &Buffer,
    ) -> Result<()> {
        // One size whatever the pass, so that no later pass needs more; a tile may see more spans than a wave has.
        let partials = layout.host.waves.iter().map(|wave| wave.joints).max().unwrap_or(0).min(1)
            * WAVE_PARTIALS.max(layout.host.key_rows.div_ceil(SPAN_KEYS));
        let rows = partials * shape.heads * TILE_QUERIES;
        let sums = self.device.borrow("partial sums of attention", rows * shape.head_dim * 4)?;
        let extremes = self.device.borrow("partial extremes of attention", rows * 8)?;
        let types = format!("{}{}h_{}", letter(query.dtype), letter(projected.dtype), shape.head_dim);
        let dims = [shape.heads, shape.kv_heads, shape.head_dim, shape.rotary_dim];
        let parts = (shape.heads / shape.kv_heads).div_ceil(4);
        let shared = attention_shared(shape.head_dim);
        for wave in &layout.host.waves {
            let arguments = Arguments::default()
                .buffer(query)
                .buffer(projected)
                .buffer(keys)
                .buffer(values)
                .buffer(out)
                .pointer(sums.pointer())
                .pointer(extremes.pointer())
                .pointer(layout.work(wave.first_work))
                .pointer(layout.segments(0))
                .pointer(layout.ranges())
                .ints(dims)
                .float(1.0 / (shape.head_dim as f32).sqrt());
            let blocks = (wave.work, shape.kv_heads * parts, 1);
            self.launch_with(&format!("attention_mma_{types}"), blocks, 256, shared, arguments)?;
            let arguments = Arguments::default()
                .buffer(projected)
                .buffer(out)
                .pointer(sums.pointer())
                .pointer(extremes.pointer())
                .pointer(layout.joints(wave.first_joint))
                .pointer(layout.segments(0))
                .ints(dims);
            let blocks = (wave.joints, shape.heads, 1);
            self.launch(&format!("attention_merge_{types}"), blocks, shape.head_dim as u32, arguments)?;
        }
        Ok(())
    }
}
