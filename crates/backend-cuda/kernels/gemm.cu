// FP32 matrix products with one summation order: every output element is one chain of fused multiply-adds over k in
// ascending order, whatever the tile, so a row's bits depend on nothing but the row and the weight.
//
// The product of profile `exact`, and the general path where tensor cores do not apply (odd widths, FP32 weights).
#include "common.cuh"

constexpr int GEMM_THREADS = 256;
constexpr int GEMM_K = 16;

template <typename T> __device__ __forceinline__ float4 load_k(const T* row, int k, int depth, bool valid) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (!valid) return v;
    if ((depth & 3) == 0) {
        if (k < depth) v = load4(row + k);
        return v;
    }
    if (k + 0 < depth) v.x = widen(row[k + 0]);
    if (k + 1 < depth) v.y = widen(row[k + 1]);
    if (k + 2 < depth) v.z = widen(row[k + 2]);
    if (k + 3 < depth) v.w = widen(row[k + 3]);
    return v;
}

// out [rows, columns] = x [rows, depth] weight[columns, depth]^T. A block makes a TILE x TILE part,
// a thread (TILE / 16)^2 of it, in quadrants of 4 x 4. Grid: (columns / TILE, rows / TILE).
template <typename X, typename W, typename O, int TILE>
__device__ __forceinline__ void gemm(const X* __restrict__ x, const W* __restrict__ weight, O* __restrict__ out,
                                     int rows, int columns, int depth) {
    constexpr int QUADS = TILE / 64;
    constexpr int PITCH = TILE + 4;
    constexpr int LOADS = TILE * GEMM_K / 4 / GEMM_THREADS;
    __shared__ __align__(16) float x_tile[2][GEMM_K][PITCH];
    __shared__ __align__(16) float w_tile[2][GEMM_K][PITCH];
    const int row0 = blockIdx.y * TILE;
    const int column0 = blockIdx.x * TILE;
    const int tx = threadIdx.x & 15;
    const int ty = threadIdx.x >> 4;
    float4 x_next[LOADS], w_next[LOADS];
    auto fetch = [&](int k0) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int item = threadIdx.x + i * GEMM_THREADS;
            const int line = item >> 2;
            const int k = k0 + (item & 3) * 4;
            x_next[i] = load_k(x + (size_t)(row0 + line) * depth, k, depth, row0 + line < rows);
            w_next[i] = load_k(weight + (size_t)(column0 + line) * depth, k, depth, column0 + line < columns);
        }
    };
    auto stage = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int item = threadIdx.x + i * GEMM_THREADS;
            const int line = item >> 2;
            const int k = (item & 3) * 4;
            x_tile[buffer][k + 0][line] = x_next[i].x;
            x_tile[buffer][k + 1][line] = x_next[i].y;
            x_tile[buffer][k + 2][line] = x_next[i].z;
            x_tile[buffer][k + 3][line] = x_next[i].w;
            w_tile[buffer][k + 0][line] = w_next[i].x;
            w_tile[buffer][k + 1][line] = w_next[i].y;
            w_tile[buffer][k + 2][line] = w_next[i].z;
            w_tile[buffer][k + 3][line] = w_next[i].w;
        }
    };
    float sum[QUADS * 4][QUADS * 4];
#pragma unroll
    for (int i = 0; i < QUADS * 4; i++)
#pragma unroll
        for (int j = 0; j < QUADS * 4; j++) sum[i][j] = 0.f;
    fetch(0);
    stage(0);
    __syncthreads();
    for (int k0 = 0, buffer = 0; k0 < depth; k0 += GEMM_K, buffer ^= 1) {
        const bool more = k0 + GEMM_K < depth;
        if (more) fetch(k0 + GEMM_K);
        // Past the end of k both tiles hold zeros, and fma(0, 0, s) is s.
#pragma unroll
        for (int k = 0; k < GEMM_K; k++) {
            float a[QUADS * 4], b[QUADS * 4];
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                *reinterpret_cast<float4*>(a + 4 * i) = *reinterpret_cast<const float4*>(&x_tile[buffer][k][i * 64 + ty * 4]);
                *reinterpret_cast<float4*>(b + 4 * i) = *reinterpret_cast<const float4*>(&w_tile[buffer][k][i * 64 + tx * 4]);
            }
#pragma unroll
            for (int i = 0; i < QUADS * 4; i++)
#pragma unroll
                for (int j = 0; j < QUADS * 4; j++) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
        }
        if (more) stage(buffer ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < QUADS * 4; i++) {
        const int row = row0 + (i >> 2) * 64 + ty * 4 + (i & 3);
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < QUADS * 4; j++) {
            const int column = column0 + (j >> 2) * 64 + tx * 4 + (j & 3);
            if (column >= columns) continue;
            out[(size_t)row * columns + column] = narrow<O>(sum[i][j]);
        }
    }
}

#define GEMM(suffix, X, W, O, TILE)                                                                             \
    extern "C" __global__ void __launch_bounds__(GEMM_THREADS)                                                  \
        gemm_##suffix##_##TILE(const X* x, const W* weight, O* out, int rows, int columns, int depth) {         \
        gemm<X, W, O, TILE>(x, weight, out, rows, columns, depth);                                              \
    }
#define GEMM_TILES(suffix, X, W, O) GEMM(suffix, X, W, O, 64) GEMM(suffix, X, W, O, 128)
GEMM_TILES(fff, float, float, float)
GEMM_TILES(fhf, float, bf16, float)
GEMM_TILES(hff, bf16, float, float)
GEMM_TILES(hhf, bf16, bf16, float)
GEMM_TILES(ffh, float, float, bf16)
GEMM_TILES(fhh, float, bf16, bf16)
GEMM_TILES(hfh, bf16, float, bf16)
GEMM_TILES(hhh, bf16, bf16, bf16)
