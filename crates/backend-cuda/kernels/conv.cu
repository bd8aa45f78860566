// Causal depthwise convolution with silu over the tree, the tails it leaves behind, and the delta-rule gates.
#include "common.cuh"

constexpr int MAX_KERNEL = 8;
// Inputs before a segment, newest last, as `layout.rs` resolves them for every segment.
constexpr int HISTORY = MAX_KERNEL - 1;

// Input `back` rows before the segment's first (0 = the newest): a row of the pass, a kept tail, or nothing.
// An entry is a row, -1 for zero, or -2 - (slot * 8 + back in that tail).
template <typename X>
__device__ __forceinline__ const X* before(const X* projected, const X* tails, const int* history, int back, int kernel,
                                           int stride, int width) {
    const int entry = history[HISTORY - 1 - back];
    if (entry >= 0) return projected + (size_t)entry * stride;
    if (entry == -1) return nullptr;
    const int slot = (-2 - entry) >> 3;
    const int kept = (-2 - entry) & 7;
    return tails + ((size_t)slot * (kernel - 1) + (kernel - 2 - kept)) * width;
}

// projected [rows, stride], its first `width` columns convolved; weight [width, kernel];
// tails [slots, kernel - 1, width]; out [rows, width]. Grid: (rows, columns of 4). Any kernel and width.
template <typename X, typename O>
__device__ __forceinline__ void conv_silu(const X* projected, const float* weight, const X* tails, O* out,
                                          const Segment* segments, const int* segment_of, const int* histories, int kernel,
                                          int width, int stride) {
    const int row = blockIdx.x;
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (first >= width) return;
    const int index = segment_of[row];
    const int local = row - segments[index].start;
    const int* history = histories + index * HISTORY;
    for (int column = first; column < min(first + 4, width); column++) {
        float sum = 0.f;
        for (int tap = 0; tap < kernel; tap++) {
            const int offset = local - (kernel - 1) + tap;
            const X* input = offset >= 0 ? projected + (size_t)(row - local + offset) * stride
                                         : before(projected, tails, history, -1 - offset, kernel, stride, width);
            if (input != nullptr) sum = fmaf(weight[column * kernel + tap], widen(input[column]), sum);
        }
        out[(size_t)row * width + column] = narrow<O>(silu_of<X>(sum));
    }
}

// The same for kernels of 4 taps and widths of whole fours, rung 2: a thread makes CONV_RUN rows of four columns, so
// that all its loads are in flight at once, most inputs are read once or twice instead of four times, and the weights
// stay in registers. `locals` holds each row's place in its segment, padded to whole runs.
// Grid: (runs, columns of 4). Taps are summed in the same order, so the bits are those of rung 1, unless `round` makes
// them TF32 for the tensor cores of the delta rule, which would otherwise cut them off.
constexpr int CONV_RUN = 4;

template <typename X, typename O>
__device__ __forceinline__ void conv_silu_4(const X* projected, const float* weight, const X* tails, O* out,
                                            const int* locals, const int* segment_of, const int* histories, int rows, int width,
                                            int stride, int round) {
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (column >= width) return;
    const int first = blockIdx.x * CONV_RUN;
    const int4 places = *reinterpret_cast<const int4*>(locals + first);
    const int place[CONV_RUN] = {places.x, places.y, places.z, places.w};
    const X* source = projected + (size_t)first * stride + column;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    // Rows first - 3 .. first + 3. Those before the first are right unless the segment starts later.
    float4 inputs[CONV_RUN + 3];
#pragma unroll
    for (int i = 0; i < CONV_RUN + 3; i++) {
        const int row = first + i - 3;
        const bool ours = i >= 3 ? row < rows : place[0] >= 3 - i;
        inputs[i] = ours ? load4(source + (ptrdiff_t)(i - 3) * stride) : none;
    }
    float4 taps[4];  // the four taps of each column
#pragma unroll
    for (int i = 0; i < 4; i++) taps[i] = load4(weight + (column + i) * 4);
#pragma unroll
    for (int r = 0; r < CONV_RUN; r++) {
        const int row = first + r;
        if (row >= rows) break;
        float4 u[4] = {inputs[r], inputs[r + 1], inputs[r + 2], inputs[r + 3]};
        if (place[r] < 3) {
            const int* history = histories + segment_of[row] * HISTORY;
#pragma unroll
            for (int back = 1; back <= 3; back++) {
                if (place[r] >= back) continue;
                const X* input = before(projected, tails, history, back - place[r] - 1, 4, stride, width);
                u[3 - back] = input == nullptr ? none : load4(input + column);
            }
        }
        float4 sum;
        sum.x = fmaf(taps[0].w, u[3].x, fmaf(taps[0].z, u[2].x, fmaf(taps[0].y, u[1].x, taps[0].x * u[0].x)));
        sum.y = fmaf(taps[1].w, u[3].y, fmaf(taps[1].z, u[2].y, fmaf(taps[1].y, u[1].y, taps[1].x * u[0].y)));
        sum.z = fmaf(taps[2].w, u[3].z, fmaf(taps[2].z, u[2].z, fmaf(taps[2].y, u[1].z, taps[2].x * u[0].z)));
        sum.w = fmaf(taps[3].w, u[3].w, fmaf(taps[3].z, u[2].w, fmaf(taps[3].y, u[1].w, taps[3].x * u[0].w)));
        sum = make_float4(silu_of<X>(sum.x), silu_of<X>(sum.y), silu_of<X>(sum.z), silu_of<X>(sum.w));
        if (round) sum = make_float4(rounded_tf32(sum.x), rounded_tf32(sum.y), rounded_tf32(sum.z), rounded_tf32(sum.w));
        store4(out + (size_t)row * width + column, sum);
    }
}

// The newest `kernel - 1` inputs of every segment that keeps its state, to tails[last]. A thread owns a channel and
// reads all before it writes, so a slot may be updated in place. Grid: (columns, segments).
template <typename X>
__device__ __forceinline__ void conv_tails(const X* projected, X* tails, const Segment* segments, const int* histories,
                                           int kernel, int width, int stride) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const Segment segment = segments[blockIdx.y];
    if (segment.last < 0 || column >= width) return;
    const int* history = histories + blockIdx.y * HISTORY;
    X kept[HISTORY];
#pragma unroll
    for (int i = 0; i < HISTORY; i++) {
        if (i >= kernel - 1) break;
        const int offset = segment.len - (kernel - 1) + i;
        const X* input = offset >= 0 ? projected + (size_t)(segment.start + offset) * stride
                                     : before<X>(projected, tails, history, -1 - offset, kernel, stride, width);
        kept[i] = input == nullptr ? narrow<X>(0.f) : input[column];
    }
#pragma unroll
    for (int i = 0; i < HISTORY; i++) {
        if (i >= kernel - 1) break;
        tails[((size_t)segment.last * (kernel - 1) + i) * width + column] = kept[i];
    }
}

// gates [rows, beta: heads | decay: heads] from columns b: `column`, a: `column + heads` of projected [rows, stride].
template <typename X>
__device__ __forceinline__ void delta_gates(const X* projected, const float* a_log, const float* dt_bias, float* gates,
                                            int rows, int heads, int stride, int column) {
    const int item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= rows * heads) return;
    const int row = item / heads;
    const int head = item % heads;
    const X* b = projected + (size_t)row * stride + column;
    gates[(size_t)row * 2 * heads + head] = sigmoid(widen(b[head]));
    gates[(size_t)row * 2 * heads + heads + head] = -expf(a_log[head]) * softplus(widen(b[heads + head]) + dt_bias[head]);
}

#define CONV(suffix, X, O)                                                                                      \
    extern "C" __global__ void conv_silu_##suffix(const X* projected, const float* weight, const X* tails,      \
                                                  O* out, const Segment* segments, const int* segment_of,       \
                                                  const int* histories, int kernel, int width, int stride) {    \
        conv_silu<X, O>(projected, weight, tails, out, segments, segment_of, histories, kernel, width, stride); \
    }
CONV(ff, float, float)
CONV(fh, float, bf16)
CONV(hf, bf16, float)
CONV(hh, bf16, bf16)

#define CONV_4(suffix, X, O)                                                                                    \
    extern "C" __global__ void conv_silu_4_##suffix(const X* projected, const float* weight, const X* tails,    \
                                                    O* out, const int* locals, const int* segment_of,           \
                                                    const int* histories, int rows, int width, int stride,      \
                                                    int round) {                                                \
        conv_silu_4<X, O>(projected, weight, tails, out, locals, segment_of, histories, rows, width, stride,    \
                          round);                                                                               \
    }
CONV_4(ff, float, float)
CONV_4(fh, float, bf16)
CONV_4(hf, bf16, float)
CONV_4(hh, bf16, bf16)

#define CONV_TAILS(suffix, X)                                                                                   \
    extern "C" __global__ void conv_tails_##suffix(const X* projected, X* tails, const Segment* segments,       \
                                                   const int* histories, int kernel, int width, int stride) {   \
        conv_tails<X>(projected, tails, segments, histories, kernel, width, stride);                            \
    }                                                                                                           \
    extern "C" __global__ void delta_gates_##suffix(const X* projected, const float* a_log, const float* dt_bias, \
                                                    float* gates, int rows, int heads, int stride, int column) { \
        delta_gates<X>(projected, a_log, dt_bias, gates, rows, heads, stride, column);                          \
    }
CONV_TAILS(f, float)
CONV_TAILS(h, bf16)
