// The gated delta rule over a tree of segments, one launch a level.
//
// Rung 1, FP32 recurrence. The columns of a head's state S [key_dim, value_dim] never meet, so a block owns 32 of
// them and holds them in registers: four neighbouring lanes share a column, each with a quarter of its rows. With
// `q`, `k` normalised and `g = exp(decay)`, per token
//     e = beta (v - g S^T k);  o = g S^T q + (k . q) e;  S <- g S + k e^T
// which is the recurrence with both products taken before the update, so that one reduction serves both.
#include "common.cuh"

constexpr int DELTA_THREADS = 128;
constexpr int DELTA_WARPS = DELTA_THREADS / 32;
constexpr int DELTA_COLUMNS = 32;
constexpr int DELTA_TOKENS = 8;  // tokens staged at a time

struct DeltaShape {
    int key_heads;
    int value_heads;
    int key_dim;
    int value_dim;
};

// qkv [rows, q: key_heads * key_dim | k: same | v: value_heads * value_dim]; gates [rows, beta | decay];
// states [slots, value_heads, key_dim, value_dim]; out [rows, value_heads * value_dim].
// Grid: (columns / 32, value heads, segments of the level). KEY is key_dim rounded up to 32, 64, 128 or 256.
template <typename X, typename O, int KEY>
__device__ __forceinline__ void delta_rule(const X* __restrict__ qkv, const float* __restrict__ gates, float* states,
                                           O* __restrict__ out, const Segment* segments, DeltaShape shape) {
    constexpr int LANE_KEYS = KEY / 32;          // elements of q and k that a lane stages per token
    constexpr int GROUPS = KEY / 16;             // groups of four rows of S that a lane holds
    constexpr int STAGED = DELTA_TOKENS / DELTA_WARPS;
    __shared__ __align__(16) float q_tile[2][DELTA_TOKENS][KEY];
    __shared__ __align__(16) float k_tile[2][DELTA_TOKENS][KEY];
    __shared__ float v_tile[2][DELTA_TOKENS][DELTA_COLUMNS];
    __shared__ float4 scalars[2][DELTA_TOKENS];  // beta, g, k . q

    const Segment segment = segments[blockIdx.z];
    const int head = blockIdx.y;
    const int key_head = head / (shape.value_heads / shape.key_heads);
    const int warp = threadIdx.x >> 5;
    const int lane = threadIdx.x & 31;
    const int part = lane & 3;
    const int local = warp * 8 + (lane >> 2);
    const int column = blockIdx.x * DELTA_COLUMNS + local;
    const bool owned = column < shape.value_dim;
    const int key_width = shape.key_heads * shape.key_dim;
    const int stride = 2 * key_width + shape.value_heads * shape.value_dim;
    const size_t state_size = (size_t)shape.key_dim * shape.value_dim;

    float4 state[GROUPS];
    if (segment.initial >= 0) {
        const float* s = states + ((size_t)segment.initial * shape.value_heads + head) * state_size + column;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            float* rows = &state[i].x;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = i * 16 + part * 4 + j;
                rows[j] = owned && row < shape.key_dim ? s[(size_t)row * shape.value_dim] : 0.f;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) state[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }

    float q_next[STAGED][LANE_KEYS], k_next[STAGED][LANE_KEYS], v_next[STAGED], beta_next[STAGED], decay_next[STAGED];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < STAGED; i++) {
            const int token = first + warp + i * DELTA_WARPS;
            const bool valid = token < segment.len;
            const size_t row = segment.start + (valid ? token : 0);
            const X* base = qkv + row * stride;
#pragma unroll
            for (int j = 0; j < LANE_KEYS; j++) {
                const int key = lane + j * 32;
                const bool inside = valid && key < shape.key_dim;
                q_next[i][j] = inside ? widen(base[key_head * shape.key_dim + key]) : 0.f;
                k_next[i][j] = inside ? widen(base[key_width + key_head * shape.key_dim + key]) : 0.f;
            }
            const int value = blockIdx.x * DELTA_COLUMNS + lane;
            v_next[i] = valid && value < shape.value_dim
                            ? widen(base[2 * key_width + head * shape.value_dim + value])
                            : 0.f;
            beta_next[i] = gates[row * 2 * shape.value_heads + head];
            decay_next[i] = gates[row * 2 * shape.value_heads + shape.value_heads + head];
        }
    };
    const float query_scale = 1.f / sqrtf((float)shape.key_dim);
    auto stage = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < STAGED; i++) {
            const int token = warp + i * DELTA_WARPS;
            float qq = 0.f, kk = 0.f, kq = 0.f;
#pragma unroll
            for (int j = 0; j < LANE_KEYS; j++) {
                qq = fmaf(q_next[i][j], q_next[i][j], qq);
                kk = fmaf(k_next[i][j], k_next[i][j], kk);
            }
            const float q_scale = 1.f / sqrtf(warp_sum(qq) + 1e-6f) * query_scale;
            const float k_scale = 1.f / sqrtf(warp_sum(kk) + 1e-6f);
#pragma unroll
            for (int j = 0; j < LANE_KEYS; j++) {
                const float q = q_next[i][j] * q_scale;
                const float k = k_next[i][j] * k_scale;
                kq = fmaf(k, q, kq);
                q_tile[buffer][token][lane + j * 32] = q;
                k_tile[buffer][token][lane + j * 32] = k;
            }
            kq = warp_sum(kq);
            v_tile[buffer][token][lane] = v_next[i];
            if (lane == 0) scalars[buffer][token] = make_float4(beta_next[i], expf(decay_next[i]), kq, 0.f);
        }
    };

    fetch(0);
    stage(0);
    __syncthreads();
    O* target = out + (size_t)segment.start * shape.value_heads * shape.value_dim + head * shape.value_dim + column;
    for (int first = 0, buffer = 0; first < segment.len; first += DELTA_TOKENS, buffer ^= 1) {
        const bool more = first + DELTA_TOKENS < segment.len;
        if (more) fetch(first + DELTA_TOKENS);
        const int tokens = min(DELTA_TOKENS, segment.len - first);
        for (int t = 0; t < tokens; t++) {
            const float4 scalar = scalars[buffer][t];
            const float value = v_tile[buffer][t][local];
            const float4* k_row = reinterpret_cast<const float4*>(k_tile[buffer][t]) + part;
            const float4* q_row = reinterpret_cast<const float4*>(q_tile[buffer][t]) + part;
            float4 sk = make_float4(0.f, 0.f, 0.f, 0.f);
            float4 sq = sk;
            float4 keys[GROUPS];
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                const float4 k = k_row[i * 4];
                const float4 q = q_row[i * 4];
                const float4 s = state[i];
                keys[i] = k;
                sk.x = fmaf(s.x, k.x, sk.x);
                sk.y = fmaf(s.y, k.y, sk.y);
                sk.z = fmaf(s.z, k.z, sk.z);
                sk.w = fmaf(s.w, k.w, sk.w);
                sq.x = fmaf(s.x, q.x, sq.x);
                sq.y = fmaf(s.y, q.y, sq.y);
                sq.z = fmaf(s.z, q.z, sq.z);
                sq.w = fmaf(s.w, q.w, sq.w);
            }
            float key_sum = (sk.x + sk.y) + (sk.z + sk.w);
            float query_sum = (sq.x + sq.y) + (sq.z + sq.w);
            key_sum += __shfl_xor_sync(0xffffffffu, key_sum, 1);
            query_sum += __shfl_xor_sync(0xffffffffu, query_sum, 1);
            key_sum += __shfl_xor_sync(0xffffffffu, key_sum, 2);
            query_sum += __shfl_xor_sync(0xffffffffu, query_sum, 2);
            const float g = scalar.y;
            const float e = scalar.x * (value - g * key_sum);
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                state[i].x = fmaf(keys[i].x, e, g * state[i].x);
                state[i].y = fmaf(keys[i].y, e, g * state[i].y);
                state[i].z = fmaf(keys[i].z, e, g * state[i].z);
                state[i].w = fmaf(keys[i].w, e, g * state[i].w);
            }
            if (part == 0 && owned) {
                target[(size_t)(first + t) * shape.value_heads * shape.value_dim] =
                    narrow<O>(fmaf(scalar.z, e, g * query_sum));
            }
        }
        if (more) stage(buffer ^ 1);
        __syncthreads();
    }

    if (segment.last >= 0 && owned) {
        float* s = states + ((size_t)segment.last * shape.value_heads + head) * state_size + column;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const float* rows = &state[i].x;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = i * 16 + part * 4 + j;
                if (row < shape.key_dim) s[(size_t)row * shape.value_dim] = rows[j];
            }
        }
    }
}

#define DELTA_RULE(suffix, X, O, KEY)                                                                           \
    extern "C" __global__ void __launch_bounds__(DELTA_THREADS)                                                 \
        delta_rule_##suffix##_##KEY(const X* qkv, const float* gates, float* states, O* out,                    \
                                    const Segment* segments, DeltaShape shape) {                                \
        delta_rule<X, O, KEY>(qkv, gates, states, out, segments, shape);                                        \
    }
#define DELTA_RULE_SIZES(suffix, X, O)                                                                          \
    DELTA_RULE(suffix, X, O, 32)                                                                                \
    DELTA_RULE(suffix, X, O, 64)                                                                                \
    DELTA_RULE(suffix, X, O, 128)                                                                               \
    DELTA_RULE(suffix, X, O, 256)
DELTA_RULE_SIZES(ff, float, float)
DELTA_RULE_SIZES(fh, float, bf16)
DELTA_RULE_SIZES(hf, bf16, float)
DELTA_RULE_SIZES(hh, bf16, bf16)
