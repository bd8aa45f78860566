//! Owns the list of operations. Every backend implements all of them; the CPU body is the oracle of the others.
//!
//! Conventions: matrices are row-major, a row is a token of the packed batch, `rows` is the number of valid rows of
//! an activation (buffers may be larger). Arithmetic is FP32 and unrounded unless a contract says otherwise; a
//! backend with a lower-precision profile rounds only when it stores to a buffer of a lower [`Role`] dtype.
//! A row's result never depends on which other rows share the pass, bit for bit.

use crate::{HostTensor, Pass, PassError, Projection};

/// Why a backend could not do something.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// An argument breaks an operation's contract: a defect of the caller inside this program.
    #[error("{operation}: {reason}")]
    Contract {
        /// The operation.
        operation: &'static str,
        /// What was expected and what was found.
        reason: String,
    },
    /// The plan of a pass breaks its own rules.
    #[error(transparent)]
    Pass(#[from] PassError),
    /// Memory that start-up planned could not be had.
    #[error("cannot allocate {bytes} bytes for {what}: {reason}")]
    Memory {
        /// What it was for.
        what: String,
        /// Size asked for.
        bytes: usize,
        /// The system's reason.
        reason: String,
    },
    /// The device failed; nothing computed since can be trusted.
    #[error("device failure: {0}")]
    Device(String),
}

/// Result of a backend call.
pub type Result<T> = std::result::Result<T, BackendError>;

/// What a buffer is for; the backend's numerics profile decides the dtype from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The residual stream.
    Residual,
    /// What a projection reads: normed rows, mixer outputs, the gated product of the MLP. The only role whose
    /// rounding tensor cores force.
    Operand,
    /// Any other value between two operations of a layer.
    Activation,
    /// Convolved q, k and v; FP32 in every profile, since the states made of them live long.
    Convolved,
    /// Delta-rule gates; FP32 in every profile, since a decay's error grows with the length of the text.
    Gates,
    /// Convolution tails.
    ConvTail,
    /// Delta-rule states; FP32 in every profile.
    Recurrent,
    /// Keys and values.
    KeyValue,
    /// Pointer head and what it reads; FP32 in every profile.
    Head,
}

/// Shape of a gated DeltaNet mixer. `conv_dim = 2 * key_heads * key_dim + value_heads * value_dim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNet {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`; value head h uses key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Dimension of a key head.
    pub key_dim: usize,
    /// Dimension of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub kernel: usize,
}

impl DeltaNet {
    /// Width of the convolved part: q, k and v of all heads.
    pub fn conv_dim(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Width of all value heads.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Width of the fused input projection: `q | k | v | z | b | a`.
    pub fn projected_width(&self) -> usize {
        self.conv_dim() + self.value_width() + 2 * self.value_heads
    }
}

/// Shape of a full-attention mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head h uses `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Dimension of a head.
    pub head_dim: usize,
    /// Leading dimensions of a head that are rotated; even.
    pub rotary_dim: usize,
}

impl Attention {
    /// Width of the fused input projection: per query head `query | gate`, then keys, then values.
    pub fn projected_width(&self) -> usize {
        2 * (self.heads + self.kv_heads) * self.head_dim
    }
}

/// Rows that operations over a layout run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Rows of the packed batch.
    pub rows: usize,
    /// Gathered rows: per readout its `decide` row and its options.
    pub readout_rows: usize,
}

/// The operations of the backbone and the pointer head.
///
/// Formulas are those of the Qwen3.5 text backbone (docs/architecture.md, "The forward pass"); `silu(x) = x / (1 + e^-x)`,
/// `softplus(x) = ln(1 + e^x)`, and `x` itself for `x > 20`.
pub trait Ops: Send + Sync + 'static {
    /// Device memory with a dtype.
    type Buffer: Send + Sync;
    /// A projection `[out, in]` prepared for [`Ops::linear`], or an embedding table.
    type Weight: Send + Sync;
    /// A [`Pass`] prepared for the device.
    type Layout: Send + Sync;

    /// One line for logs: backend, device, profile.
    fn describe(&self) -> String;

    /// Chooses and prepares everything that depends on measurement or capture for passes of up to `rows` rows, so that
    /// no later call does. Called once, after all weights were made and before the first request.
    fn warm_up(&self, rows: usize) -> Result<()> {
        let _ = rows;
        Ok(())
    }

    /// Bytes of one element of a role's buffers.
    fn element_bytes(&self, role: Role) -> usize;

    /// A zeroed buffer of `elements`, dtype by `role`.
    fn zeros(&self, role: Role, elements: usize) -> Result<Self::Buffer>;

    /// A small parameter as an FP32 buffer; BF16 input is widened exactly.
    fn parameter(&self, tensor: &HostTensor) -> Result<Self::Buffer>;

    /// A weight made of parts `[out_i, in]` stacked along `out`, each with its unmerged adapter if it has one. The
    /// parts stay in the dtype they are stored in where the backend can use them so; on the CPU they keep borrowing the
    /// mapped file.
    fn weight(&self, parts: &[Projection]) -> Result<Self::Weight>;

    /// The first `elements` of a buffer as FP32 on the host, after all earlier operations.
    fn read(&self, buffer: &Self::Buffer, elements: usize) -> Result<Vec<f32>>;

    /// Prepares a pass. `inv_freq` has `rotary_dim / 2` entries; rotary angles are `position as f32 * inv_freq[j]`.
    fn layout(&self, pass: &Pass, inv_freq: &[f32]) -> Result<Self::Layout>;

    /// How many rows operations over a layout run on, and how many readout rows: those of the pass, or more where the
    /// backend pads a pass to a shape it has prepared. Padding changes no other row.
    fn extent(&self, layout: &Self::Layout) -> Extent;

    /// How many shapes of passes the backend can prepare: a layout of such a shape is submitted as one piece.
    fn shapes(&self) -> usize {
        0
    }

    /// A layout of nothing but padding, of shape `index` of [`Ops::shapes`].
    fn padding(&self, index: usize, inv_freq: &[f32]) -> Result<Self::Layout> {
        let _ = inv_freq;
        Err(BackendError::Contract { operation: "padding", reason: format!("there is no shape {index}") })
    }

    /// Submits the operations of a pass from [`Ops::embed`] to its last norm, all over `layout` and always over the same
    /// other buffers; they must not wait for the device. A backend may record them for a prepared shape and replay the
    /// record from then on.
    fn submit(&self, layout: &Self::Layout, operations: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let _ = layout;
        operations()
    }

    /// `out[r] = table[tokens[r]]`; `table [vocab, hidden]`, `out [rows, hidden]` residual.
    fn embed(&self, table: &Self::Weight, layout: &Self::Layout, out: &mut Self::Buffer) -> Result<()>;

    /// Zero-centred RMSNorm: `out = x / sqrt(mean(x^2) + eps) * (1 + weight)` over each row of `weight.len()`.
    fn rms_norm(
        &self,
        x: &Self::Buffer,
        weight: &Self::Buffer,
        eps: f32,
        rows: usize,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `residual += delta`, then `out = rms_norm(residual)`.
    fn add_rms_norm(
        &self,
        residual: &mut Self::Buffer,
        delta: &Self::Buffer,
        weight: &Self::Buffer,
        eps: f32,
        rows: usize,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `out = x weight^T`, adapters of the weight's parts included; `x [rows, in]`, `out [rows, out]`. Accumulation order over `in` does not depend on `rows`.
    fn linear(
        &self,
        x: &Self::Buffer,
        weight: &Self::Weight,
        rows: usize,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `out = silu(gate) * up`; `gate_up [rows, gate: inner | up: inner]`, `out [rows, inner]`.
    fn swiglu(&self, gate_up: &Self::Buffer, inner: usize, rows: usize, out: &mut Self::Buffer)
    -> Result<()>;

    /// Causal depthwise convolution and silu over the first `conv_dim` columns of `projected`:
    /// `out[t, c] = silu(sum_j weight[c, j] * u[t - kernel + 1 + j, c])`, taps summed in ascending j.
    /// Inputs before a segment come from `tails[initial]` (zero without one). With `last` set,
    /// the newest `kernel - 1` inputs go to `tails[last]`.
    /// `projected [rows, projected_width]`, `weight [conv_dim, kernel]`, `tails [slots, kernel - 1, conv_dim]` oldest
    /// first, `out [rows, conv_dim]`.
    fn conv_silu(
        &self,
        projected: &Self::Buffer,
        weight: &Self::Buffer,
        shape: &DeltaNet,
        layout: &Self::Layout,
        tails: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// `beta = sigmoid(b)`, `decay = -exp(a_log) * softplus(a + dt_bias)` from the `b` and `a` columns of `projected`;
    /// `gates [rows, beta: value_heads | decay: value_heads]`.
    fn delta_gates(
        &self,
        projected: &Self::Buffer,
        a_log: &Self::Buffer,
        dt_bias: &Self::Buffer,
        shape: &DeltaNet,
        rows: usize,
        gates: &mut Self::Buffer,
    ) -> Result<()>;

    /// The gated delta rule. Per value head, with `q = q / sqrt(sum(q^2) + 1e-6) / sqrt(key_dim)`,
    /// `k = k / sqrt(sum(k^2) + 1e-6)` of its key head, from `S = states[initial]` (zero without one), per token:
    /// `S <- exp(decay) S;  e = beta (v - S^T k);  S <- S + k e^T;  o = S^T q`.
    /// With `last` set, the final S goes to `states[last]`.
    /// `qkv [rows, conv_dim]` (output of [`Ops::conv_silu`]), `states [slots, value_heads, key_dim, value_dim]`,
    /// `out [rows, value_heads * value_dim]`. A segment split in two at any multiple of 64 tokens gives the same bits.
    fn delta_rule(
        &self,
        qkv: &Self::Buffer,
        gates: &Self::Buffer,
        shape: &DeltaNet,
        layout: &Self::Layout,
        states: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Gated RMSNorm per value head: `out = weight * (o / sqrt(mean(o^2) + eps)) * silu(z)`, plain weight `[value_dim]`,
    /// `z` from `projected`. `o`, `out` `[rows, value_heads * value_dim]`; the result replaces `o`.
    fn gated_rms_norm(
        &self,
        o: &mut Self::Buffer,
        projected: &Self::Buffer,
        weight: &Self::Buffer,
        eps: f32,
        shape: &DeltaNet,
        rows: usize,
    ) -> Result<()>;

    /// Zero-centred RMSNorm of queries and keys per head, then rotary embedding of the first `rotary_dim` dimensions
    /// (pairs `(j, j + rotary_dim / 2)`); keys and values of every row go to their rows of the key arena.
    /// `projected [rows, projected_width]`, `query [rows, heads * head_dim]`,
    /// `keys`, `values` `[key_rows, kv_heads * head_dim]`.
    #[allow(clippy::too_many_arguments)] // One fused kernel on a device: its operands are these.
    fn query_key_value(
        &self,
        projected: &Self::Buffer,
        query_norm: &Self::Buffer,
        key_norm: &Self::Buffer,
        eps: f32,
        shape: &Attention,
        layout: &Self::Layout,
        query: &mut Self::Buffer,
        keys: &mut Self::Buffer,
        values: &mut Self::Buffer,
    ) -> Result<()>;

    /// Causal attention of every row over its segment's keys, then the output gate:
    /// `out = sigmoid(gate) * softmax(q k^T / sqrt(head_dim)) v`, gate from `projected`.
    /// `out [rows, heads * head_dim]`. Sums run over absolute key positions, so a split of the keys into ranges or of
    /// the segment into passes changes no bit.
    #[allow(clippy::too_many_arguments)] // One fused kernel on a device: its operands are these.
    fn attention(
        &self,
        query: &Self::Buffer,
        projected: &Self::Buffer,
        keys: &Self::Buffer,
        values: &Self::Buffer,
        shape: &Attention,
        layout: &Self::Layout,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Copies the readout rows: for each readout its `decide` row, then its option rows, in order.
    /// `x [rows, width]`, `out [readout rows, width]`.
    fn gather_readouts(
        &self,
        x: &Self::Buffer,
        width: usize,
        layout: &Self::Layout,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Pointer logits before the temperature, FP32 throughout:
    /// `z_j = (K h_j + b_k) . (Q h_decide + b_q) / sqrt(head_dim)`, over gathered rows `h [readout rows, hidden]`.
    /// `query_weight`, `key_weight` FP32 `[head_dim, hidden]`, biases `[head_dim]`;
    /// returns the logits of all options of all readouts, in order.
    #[allow(clippy::too_many_arguments)] // Two projections with their biases: its operands are these.
    fn pointer_head(
        &self,
        h: &Self::Buffer,
        query_weight: &Self::Weight,
        query_bias: &Self::Buffer,
        key_weight: &Self::Weight,
        key_bias: &Self::Buffer,
        hidden: usize,
        head_dim: usize,
        layout: &Self::Layout,
    ) -> Result<Vec<f32>>;
}
