// Profile `service`: the operations between products with the rounding points, the reduction orders and the masks of the
// official BF16 service, which runs them as separate operations of torch on a padded batch [batch, length].
//
// Where torch runs several operations one after another, every intermediate result is rounded as torch stores it; sums and
// products are written as intrinsics because a contraction into a fused multiply-add would skip such a rounding. Products of
// two BF16 values are exact in FP32, so sums of them may be fused.
#include "common.cuh"

namespace service {

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float rounded(float x) { return widen(narrow<bf16>(x)); }
__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, add(1.f, expf(-x))); }
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, add(1.f, expf(-x))); }

// Sum of squares of a row in the order of torch's reduction over a contiguous last dimension of at least 128: lane l takes
// the fours l, l + 32, ... into four sums, which are joined in order, then lanes are joined in halves. Every lane gets it.
template <typename T> __device__ __forceinline__ float squares(const T* row, int width, int lane) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    for (int i = lane * 4; i < width; i += 128) {
        const float4 v = load4(row + i);
        sum[0] = add(sum[0], mul(v.x, v.x));
        sum[1] = add(sum[1], mul(v.y, v.y));
        sum[2] = add(sum[2], mul(v.z, v.z));
        sum[3] = add(sum[3], mul(v.w, v.w));
    }
    float total = add(add(add(sum[0], sum[1]), sum[2]), sum[3]);
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        total = add(total, __shfl_down_sync(0xffffffffu, total, offset));
    }
    return __shfl_sync(0xffffffffu, total, 0);
}

__device__ __forceinline__ float4 scaled(float4 v, float factor) {
    return make_float4(mul(v.x, factor), mul(v.y, factor), mul(v.z, factor), mul(v.w, factor));
}

// r(x / sqrt(mean(x^2) + eps) * (1 + w)) of four elements.
__device__ __forceinline__ float4 zero_centred(float4 x, float inverse, float4 w) {
    const float4 n = scaled(x, inverse);
    return make_float4(mul(n.x, add(1.f, w.x)), mul(n.y, add(1.f, w.y)), mul(n.z, add(1.f, w.z)),
                       mul(n.w, add(1.f, w.w)));
}

}  // namespace service

// residual <- r(residual + delta) where there is a delta; out = r(rms_norm(residual)), zero where the row is padding and
// `first` (real tokens of a batch row start there) is given. One warp a row; width a multiple of four, at least 128.
// residual, delta, out [rows, width]; first [rows / length].
extern "C" __global__ void service_add_rms_norm(bf16* residual, const bf16* delta, const bf16* weight, bf16* out,
                                                const int* first, float eps, int rows, int width, int length) {
    const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    const int lane = threadIdx.x & 31;
    bf16* x = residual + (size_t)row * width;
    if (delta != nullptr) {
        const bf16* d = delta + (size_t)row * width;
        for (int i = lane * 4; i < width; i += 128) {
            const float4 a = load4(x + i), b = load4(d + i);
            store4(x + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
        }
    }
    // A lane reads what it wrote itself.
    const float mean = service::mul(service::squares(x, width, lane), __fdiv_rn(1.f, (float)width));
    const float inverse = rsqrtf(service::add(mean, eps));
    const bool padding = first != nullptr && row % length < first[row / length];
    for (int i = lane * 4; i < width; i += 128) {
        const float4 y = service::zero_centred(load4(x + i), inverse, load4(weight + i));
        store4(out + (size_t)row * width + i, padding ? make_float4(0.f, 0.f, 0.f, 0.f) : y);
    }
}

// out = r(silu(r(sum_j w_j u_{t - 3 + j}))) over all channels, four taps; what lies before a batch row comes from its history
// (three rows, oldest first) or is zero. u, out [batch, length, channels]; weight [channels, 4]; history [batch, 3, channels].
// Grid: (length, channels / 256, batch).
extern "C" __global__ void service_conv(const bf16* u, const bf16* weight, const bf16* history, bf16* out, int length,
                                        int channels) {
    const int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const int t = blockIdx.x, b = blockIdx.z;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int at = t - 3 + j;
        float value = 0.f;
        if (at >= 0) value = widen(u[((size_t)b * length + at) * channels + c]);
        else if (history != nullptr) value = widen(history[((size_t)b * 3 + at + 3) * channels + c]);
        sum = fmaf(widen(weight[c * 4 + j]), value, sum);
    }
    out[((size_t)b * length + t) * channels + c] = narrow<bf16>(service::silu(service::rounded(sum)));
}

// beta = r(sigmoid(b)); decay = -exp(a_log) softplus(a + dt_bias), FP32; all [rows, heads] but a_log, dt_bias [heads].
extern "C" __global__ void service_gates(const bf16* b, const bf16* a, const bf16* a_log, const bf16* dt_bias, float* beta,
                                         float* decay, int count, int heads) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int h = i % heads;
    beta[i] = service::rounded(service::sigmoid(widen(b[i])));
    const float x = service::add(widen(a[i]), widen(dt_bias[h]));
    const float soft = x > 20.f ? x : log1pf(expf(x));
    decay[i] = service::mul(-expf(widen(a_log[h])), soft);
}

// What the chunks of the delta rule are made of, per value head, FP32, zero behind the end: normed queries (times 1/sqrt(128))
// and keys, beta k, and beta v transposed inside its chunk, as the triangular solver wants it.
// mixed [batch, length, q | k | v]; q, k, kb [batch, heads, padded, 128]; vb [batch, heads, chunks, 128, 64]. Head dimensions
// 128. One warp a token and key head. Grid: (padded / warps, key heads, batch).
extern "C" __global__ void service_delta_prepare(const bf16* mixed, const float* beta, float* q, float* k, float* kb,
                                                 float* vb, int length, int padded, int key_heads, int heads) {
    const int t = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (t >= padded) return;
    const int lane = threadIdx.x & 31, head = blockIdx.y, b = blockIdx.z, c = lane * 4;
    const int width = (2 * key_heads + heads) * 128;
    const bool real = t < length;
    const bf16* row = mixed + ((size_t)b * length + (real ? t : 0)) * width;
    const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
    float4 qn = zero, kn = zero;
    if (real) {
        const bf16 *qh = row + head * 128, *kh = row + (key_heads + head) * 128;
        qn = service::scaled(load4(qh + c), rsqrtf(service::add(service::squares(qh, 128, lane), 1e-6f)));
        qn = service::scaled(qn, 0.08838834764831845f);
        kn = service::scaled(load4(kh + c), rsqrtf(service::add(service::squares(kh, 128, lane), 1e-6f)));
    }
    const int shared_by = heads / key_heads;
    for (int j = 0; j < shared_by; j++) {
        const int h = head * shared_by + j;
        const float weight = real ? beta[((size_t)b * length + t) * heads + h] : 0.f;
        const size_t at = (((size_t)b * heads + h) * padded + t) * 128 + c;
        store4(q + at, qn);
        store4(k + at, kn);
        store4(kb + at, service::scaled(kn, weight));
        const float4 v = real ? service::scaled(load4(row + (2 * key_heads + h) * 128 + c), weight) : zero;
        float* column = vb + ((((size_t)b * heads + h) * (padded / 64) + t / 64) * 128 + c) * 64 + (t & 63);
        column[0] = v.x;
        column[64] = v.y;
        column[128] = v.z;
        column[192] = v.w;
    }
}

// Inclusive sums of the decay inside each chunk of 64, in the order of torch's scan of rows of 64: Sklansky's over twice
// `threads` elements at a time (64 or 32), the total before them added to their first.
// decay [batch, length, heads]; sums [batch, heads, padded]. One warp a chunk and head. Grid: (chunks, heads, batch).
extern "C" __global__ void service_delta_sums(const float* decay, float* sums, int length, int padded, int heads,
                                              int threads) {
    __shared__ float values[64];
    const int lane = threadIdx.x, chunk = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    float before = 0.f;
    for (int start = 0; start < 64; start += 2 * threads) {
        for (int i = lane; i < 2 * threads; i += 32) {
            const int t = chunk * 64 + start + i;
            values[i] = t < length ? decay[((size_t)b * length + t) * heads + h] : 0.f;
        }
        __syncwarp();
        if (lane == 0) values[0] = service::add(values[0], before);
        __syncwarp();
        for (int s = 1; s <= threads; s <<= 1) {
            float sum = 0.f;
            const int target = (lane / s) * (2 * s) + s + lane % s;
            if (lane < threads) sum = service::add(values[target], values[(lane / s) * (2 * s) + s - 1]);
            __syncwarp();
            if (lane < threads) values[target] = sum;
            __syncwarp();
        }
        for (int i = lane; i < 2 * threads; i += 32) {
            sums[((size_t)b * heads + h) * padded + chunk * 64 + start + i] = values[i];
        }
        before = values[2 * threads - 1];
        __syncwarp();
    }
}

// Multiplies the two matrices of every chunk with exp(G_i - G_j), zero above the diagonal; scales q by exp(G), k by
// exp(G_last - G); writes exp(G) beta k transposed inside its chunk.
// sums [chunks, 64]; solve, within [chunks, 64, 64]; q, k, kb [chunks, 64, 128]; kbd [chunks, 128, 64]. A block a chunk.
extern "C" __global__ void service_delta_decay(const float* sums, float* solve, float* within, float* q, float* k,
                                               const float* kb, float* kbd) {
    __shared__ float g[64], grown[64], left[64];
    const size_t chunk = blockIdx.x;
    if (threadIdx.x < 64) {
        g[threadIdx.x] = sums[chunk * 64 + threadIdx.x];
        grown[threadIdx.x] = expf(g[threadIdx.x]);
        left[threadIdx.x] = expf(sums[chunk * 64 + 63] - g[threadIdx.x]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
        const int row = i >> 6, column = i & 63;
        const float decay = column <= row ? expf(g[row] - g[column]) : 0.f;
        solve[chunk * 4096 + i] = service::mul(solve[chunk * 4096 + i], decay);
        within[chunk * 4096 + i] = service::mul(within[chunk * 4096 + i], decay);
    }
    for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) {
        const int row = i >> 7, column = i & 127;
        const size_t at = chunk * 8192 + i;
        kbd[chunk * 8192 + column * 64 + row] = service::mul(kb[at], grown[row]);
        q[at] = service::mul(q[at], grown[row]);
        k[at] = service::mul(k[at], left[row]);
    }
}

// fresh = u - predicted for one chunk of every batch row and head; u [.., chunks, 128, 64] transposed, predicted, fresh
// [heads of the batch, 64, 128]. A block a head.
extern "C" __global__ void service_delta_fresh(const float* u, const float* predicted, float* fresh, int chunk, int chunks) {
    const size_t head = blockIdx.x;
    for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) {
        const int row = i >> 7, column = i & 127;
        const float value = u[((head * chunks + chunk) * 128 + column) * 64 + row];
        fresh[head * 8192 + i] = value - predicted[head * 8192 + i];
    }
}

// out = r(across + inside) at the chunk's tokens; state <- state exp(G_last) + update. across, inside [heads of the batch, 64,
// 128]; state, update [heads of the batch, 128, 128]; sums [.., padded]; out [batch, length, heads, 128]. A block a head.
extern "C" __global__ void service_delta_step(const float* across, const float* inside, const float* update,
                                              const float* sums, float* state, bf16* out, int chunk, int padded, int length,
                                              int heads) {
    const size_t head = blockIdx.x;
    const int b = blockIdx.x / heads, h = blockIdx.x % heads;
    for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) {
        const int t = chunk * 64 + (i >> 7);
        if (t < length) {
            const float value = service::add(across[head * 8192 + i], inside[head * 8192 + i]);
            out[(((size_t)b * length + t) * heads + h) * 128 + (i & 127)] = narrow<bf16>(value);
        }
    }
    const float decay = expf(sums[head * padded + chunk * 64 + 63]);
    for (int i = threadIdx.x; i < 128 * 128; i += blockDim.x) {
        state[head * 16384 + i] = service::add(service::mul(state[head * 16384 + i], decay), update[head * 16384 + i]);
    }
}

// o <- r(r(w r(o / sqrt(mean(o^2) + eps))) silu(z)) per head of 128. o, z [count, 128]. One warp a head of a row.
extern "C" __global__ void service_gated_norm(bf16* o, const bf16* z, const bf16* weight, float eps, int count) {
    const int item = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (item >= count) return;
    const int lane = threadIdx.x & 31;
    bf16* x = o + (size_t)item * 128;
    const float inverse = rsqrtf(service::add(service::mul(service::squares(x, 128, lane), 1.f / 128.f), eps));
    const float4 n = service::scaled(load4(x + lane * 4), inverse);
    const float4 w = load4(weight + lane * 4), g = load4(z + (size_t)item * 128 + lane * 4);
    float4 y;
    y.x = service::mul(service::rounded(w.x * service::rounded(n.x)), service::silu(g.x));
    y.y = service::mul(service::rounded(w.y * service::rounded(n.y)), service::silu(g.y));
    y.z = service::mul(service::rounded(w.z * service::rounded(n.z)), service::silu(g.z));
    y.w = service::mul(service::rounded(w.w * service::rounded(n.w)), service::silu(g.w));
    store4(x + lane * 4, y);
}

// Normed and rotated heads: `source` holds a head every `stride` elements, `row_stride` elements a token; the head at [b, h, t]
// goes to out [batch, heads, capacity, dim] at place offset + t. `weight` null: copied as it is (values). Rotation of the
// first `rotary` dimensions by angles position * frequency, cosine, sine and both products rounded. positions [batch, length].
// One warp a token and head; dim a multiple of 128, at most 256. Grid: (length / warps, heads, batch).
extern "C" __global__ void service_heads(const bf16* source, const bf16* weight, const float* frequencies,
                                         const int* positions, bf16* out, float eps, int row_stride, int stride, int length,
                                         int dim, int rotary, int capacity, int offset) {
    __shared__ float rows[8][256];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int t = blockIdx.x * (blockDim.x >> 5) + warp, h = blockIdx.y, b = blockIdx.z;
    if (t >= length) return;
    const bf16* x = source + ((size_t)b * length + t) * row_stride + (size_t)h * stride;
    bf16* y = out + (((size_t)b * gridDim.y + h) * capacity + offset + t) * dim;
    if (weight == nullptr) {
        for (int i = lane * 4; i < dim; i += 128) store4(y + i, load4(x + i));
        return;
    }
    const float mean = service::mul(service::squares(x, dim, lane), __fdiv_rn(1.f, (float)dim));
    const float inverse = rsqrtf(service::add(mean, eps));
    float* row = rows[warp];
    for (int i = lane * 4; i < dim; i += 128) {
        const float4 n = service::zero_centred(load4(x + i), inverse, load4(weight + i));
        row[i] = service::rounded(n.x);
        row[i + 1] = service::rounded(n.y);
        row[i + 2] = service::rounded(n.z);
        row[i + 3] = service::rounded(n.w);
    }
    __syncwarp();
    const int half = rotary / 2;
    for (int i = lane; i < dim; i += 32) {
        float value = row[i];
        if (i < rotary) {
            const int j = i < half ? i : i - half;
            const float angle = service::mul(frequencies[j], (float)positions[b * length + t]);
            const float c = service::rounded(cosf(angle)), s = service::rounded(sinf(angle));
            const float other = i < half ? -row[i + half] : row[i - half];
            value = service::rounded(value * c) + service::rounded(other * s);
        }
        y[i] = narrow<bf16>(value);
    }
}

// out = r(out r(sigmoid(gate))); the gate of head h is behind its query in `projected` [rows, heads * 2 dim].
extern "C" __global__ void service_output_gate(bf16* out, const bf16* projected, int heads, int dim) {
    const int width = heads * dim;
    const size_t row = blockIdx.x;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float gate = widen(projected[row * 2 * width + (i / dim) * 2 * dim + dim + i % dim]);
        out[row * width + i] = narrow<bf16>(widen(out[row * width + i]) * service::rounded(service::sigmoid(gate)));
    }
}

// out = r(r(silu(gate)) up), `count` elements, a multiple of four.
extern "C" __global__ void service_swiglu(const bf16* gate, const bf16* up, bf16* out, int count) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= count) return;
    const float4 g = load4(gate + i), u = load4(up + i);
    store4(out + i, make_float4(service::rounded(service::silu(g.x)) * u.x, service::rounded(service::silu(g.y)) * u.y,
                                service::rounded(service::silu(g.z)) * u.z, service::rounded(service::silu(g.w)) * u.w));
}

// out[p] = base + p * step: the pointer arrays of batched solvers.
extern "C" __global__ void service_pointers(unsigned long long base, unsigned long long* out, int step, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = base + (unsigned long long)i * step;
}

// Copies `rows` runs of `width` elements of two bytes each, both sides with strides of their own; a multiple of four.
extern "C" __global__ void service_copy(const bf16* source, bf16* target, int width, int source_stride, int target_stride) {
    const size_t row = blockIdx.x;
    for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
        const uint2 raw = *reinterpret_cast<const uint2*>(source + row * source_stride + i);
        *reinterpret_cast<uint2*>(target + row * target_stride + i) = raw;
    }
}

// out = r(weight + scale * delta), product and sum rounded to FP32; all of `count` elements.
template <typename W>
__device__ __forceinline__ void service_merged(const W* weight, const float* delta, bf16* out, float scale, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = narrow<bf16>(service::add(widen(weight[i]), service::mul(delta[i], scale)));
}
extern "C" __global__ void service_merge_f(const float* weight, const float* delta, bf16* out, float scale, int count) {
    service_merged<float>(weight, delta, out, scale, count);
}
extern "C" __global__ void service_merge_h(const bf16* weight, const float* delta, bf16* out, float scale, int count) {
    service_merged<bf16>(weight, delta, out, scale, count);
}
