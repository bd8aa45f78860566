// The pointer head, FP32: two projections of the readout rows with a bias, and the scores.
#include "common.cuh"

constexpr int PROJECTED_ROWS = 4;

// out[r, d] = x[r] . weight[d] + bias[d] for queries (blockIdx.z = 0) and keys (1), which follow each other in out
// [2, rows, dim]; x [rows, hidden], weights [dim, hidden]. A warp makes four rows of one column, lanes in strides of
// four terms. Grid: (dim / warps, rows / 4, 2).
template <typename W>
__device__ __forceinline__ void pointer_project(const float* x, const W* query_weight, const W* key_weight,
                                                const float* query_bias, const float* key_bias, float* out, int rows,
                                                int hidden, int dim) {
    const int d = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (d >= dim) return;
    const int lane = threadIdx.x & 31;
    const int first = blockIdx.y * PROJECTED_ROWS;
    const int count = min(PROJECTED_ROWS, rows - first);
    const W* weight = (blockIdx.z == 0 ? query_weight : key_weight) + (size_t)d * hidden;
    x += (size_t)first * hidden;
    float sum[PROJECTED_ROWS] = {0.f, 0.f, 0.f, 0.f};
    if ((hidden & 3) == 0) {
#pragma unroll 4
        for (int i = lane * 4; i < hidden; i += 128) {
            const float4 w = load4(weight + i);
#pragma unroll
            for (int r = 0; r < PROJECTED_ROWS; r++) {
                const float4 v = load4(x + (size_t)min(r, count - 1) * hidden + i);
                sum[r] = fmaf(w.x, v.x, fmaf(w.y, v.y, fmaf(w.z, v.z, fmaf(w.w, v.w, sum[r]))));
            }
        }
    } else {
        for (int i = lane; i < hidden; i += 32) {
            const float w = widen(weight[i]);
#pragma unroll
            for (int r = 0; r < PROJECTED_ROWS; r++) {
                sum[r] = fmaf(w, x[(size_t)min(r, count - 1) * hidden + i], sum[r]);
            }
        }
    }
    const float bias = (blockIdx.z == 0 ? query_bias : key_bias)[d];
#pragma unroll
    for (int r = 0; r < PROJECTED_ROWS; r++) {
        const float total = warp_sum(sum[r]);
        if (lane == 0 && r < count) out[((size_t)blockIdx.z * rows + first + r) * dim + d] = total + bias;
    }
}

#define POINTER_PROJECT(suffix, W)                                                                              \
    extern "C" __global__ void pointer_project_##suffix(const float* x, const W* query_weight,                  \
                                                        const W* key_weight, const float* query_bias,           \
                                                        const float* key_bias, float* out, int rows,            \
                                                        int hidden, int dim) {                                  \
        pointer_project<W>(x, query_weight, key_weight, query_bias, key_bias, out, rows, hidden, dim);          \
    }
POINTER_PROJECT(f, float)
POINTER_PROJECT(h, bf16)

// logits[j] = query[rows[j].x] . key[rows[j].y] * scale; query, key [readout rows, dim]. One warp a logit.
extern "C" __global__ void pointer_scores(const float* query, const float* key, const int2* rows, float* logits, int count,
                                          int dim, float scale) {
    const int item = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (item >= count) return;
    const int lane = threadIdx.x & 31;
    const float* q = query + (size_t)rows[item].x * dim;
    const float* k = key + (size_t)rows[item].y * dim;
    float sum = 0.f;
    for (int i = lane; i < dim; i += 32) sum = fmaf(q[i], k[i], sum);
    sum = warp_sum(sum);
    if (lane == 0) logits[item] = sum * scale;
}
