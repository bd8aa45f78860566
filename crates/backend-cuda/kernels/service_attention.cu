// Profile `service`: attention with an additive mask, in the order of the flash kernel that torch runs on sm_90.
#include "common.cuh"

namespace service {

constexpr int TILE = 128;
constexpr float LOG2E = 1.4426950408889634f;
// What the service's mask adds to a hidden key: the lowest BF16 number.
constexpr float HIDDEN = -3.3895313892515355e38f;

// Two BF16 values of neighbouring rows of a matrix, as one register.
__device__ __forceinline__ uint32_t column_pair(const bf16* p, int stride) {
    const uint32_t low = *reinterpret_cast<const uint16_t*>(p), high = *reinterpret_cast<const uint16_t*>(p + stride);
    return low | high << 16;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace service

// Query rows [batch, heads, length, 256] over keys and values [batch, kv_heads, keys, 256]. Key j of a batch row is seen by
// query i if it is at least `hidden[b]` and at most own + i, and a query always sees key own + i. out [batch, length, heads,
// 256]. A warp has 16 queries of one head. Grid: (length / 64, heads, batch), 128 threads.
//
// Weights are powers of two of scores times log2(e), scored in tiles of 128 keys. A thread sums the weights of its columns of a
// tile one after the other and adds that to what the tiles before left, fused with their rescaling; four threads share a row.
extern "C" __global__ void __launch_bounds__(128)
    service_attention(const bf16* query, const bf16* key, const bf16* value, const int* hidden, bf16* out, int length,
                      int keys, int own, int heads, int kv_heads) {
    using namespace service;
    constexpr int DIM = 256;
    const int lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z;
    const int first = blockIdx.x * 64 + (threadIdx.x >> 5) * 16;
    if (first >= length) return;
    const int group = lane >> 2, pair = (lane & 3) * 2;
    const int rows[2] = {first + group, first + group + 8};
    const bf16* q = query + ((size_t)b * heads + h) * length * DIM;
    const size_t kv = ((size_t)b * kv_heads + h / (heads / kv_heads)) * keys * DIM;
    const bf16 *k = key + kv, *v = value + kv;
    const bf16* q0 = q + (size_t)min(rows[0], length - 1) * DIM;
    const bf16* q1 = q + (size_t)min(rows[1], length - 1) * DIM;
    const int from = hidden[b];
    float o[32][4] = {};
    float highest[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};
    for (int start = 0; start < keys; start += TILE) {
        float s[16][4] = {};
        for (int d = 0; d < DIM; d += 16) {
            uint32_t a[4];
            a[0] = *reinterpret_cast<const uint32_t*>(q0 + d + pair);
            a[1] = *reinterpret_cast<const uint32_t*>(q1 + d + pair);
            a[2] = *reinterpret_cast<const uint32_t*>(q0 + d + pair + 8);
            a[3] = *reinterpret_cast<const uint32_t*>(q1 + d + pair + 8);
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const bf16* row = k + (size_t)min(start + n * 8 + group, keys - 1) * DIM + d + pair;
                multiply(s[n], a, *reinterpret_cast<const uint32_t*>(row), *reinterpret_cast<const uint32_t*>(row + 8));
            }
        }
        float top[2] = {highest[0], highest[1]};
#pragma unroll
        for (int n = 0; n < 16; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = start + n * 8 + pair + (i & 1), row = rows[i >> 1];
                const bool seen = (j >= from && j <= own + row) || j == own + row;
                const float x = seen ? s[n][i] * 0.0625f : __fadd_rn(s[n][i] * 0.0625f, HIDDEN);
                s[n][i] = j < keys ? __fmul_rn(x, LOG2E) : -INFINITY;
                top[i >> 1] = fmaxf(top[i >> 1], s[n][i]);
            }
        }
        float shrink[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            // A tile of hidden keys overflows to -inf: it weighs nothing.
            const float base = top[r] == -INFINITY ? 0.f : top[r];
            shrink[r] = power_of_two(__fadd_rn(highest[r], -base));
            highest[r] = top[r];
            top[r] = base;
        }
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = power_of_two(__fadd_rn(s[n][i], -top[i >> 1]));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < 16; n++) sum = __fadd_rn(__fadd_rn(sum, s[n][2 * r]), s[n][2 * r + 1]);
            total[r] = __fmaf_rn(total[r], shrink[r], sum);
        }
        if (start > 0) {
#pragma unroll
            for (int n = 0; n < 32; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n][i] = __fmul_rn(o[n][i], shrink[i >> 1]);
        }
#pragma unroll
        for (int step = 0; step < 8; step++) {
            const uint32_t a[4] = {pack(s[2 * step][0], s[2 * step][1]), pack(s[2 * step][2], s[2 * step][3]),
                                   pack(s[2 * step + 1][0], s[2 * step + 1][1]),
                                   pack(s[2 * step + 1][2], s[2 * step + 1][3])};
            const int j = start + step * 16 + pair;
            if (start + step * 16 >= keys) break;
            // Keys behind the last weigh nothing; the last one stands in for them.
            const bf16* low = v + (size_t)min(j, keys - 1) * DIM + group;
            const bf16* high = v + (size_t)min(j + 8, keys - 1) * DIM + group;
            const int low_step = j + 1 < keys ? DIM : 0, high_step = j + 9 < keys ? DIM : 0;
#pragma unroll
            for (int n = 0; n < 32; n++) {
                multiply(o[n], a, column_pair(low + n * 8, low_step), column_pair(high + n * 8, high_step));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] = __fadd_rn(total[r], __shfl_xor_sync(0xffffffffu, total[r], 1));
        total[r] = __fadd_rn(total[r], __shfl_xor_sync(0xffffffffu, total[r], 2));
        if (rows[r] >= length) continue;
        bf16* y = out + (((size_t)b * length + rows[r]) * heads + h) * DIM + pair;
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(total[r]));
#pragma unroll
        for (int n = 0; n < 32; n++) {
            store2(y + n * 8, __fmul_rn(o[n][2 * r], inverse), __fmul_rn(o[n][2 * r + 1], inverse));
        }
    }
}
