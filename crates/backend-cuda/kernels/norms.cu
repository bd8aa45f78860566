// RMS norms. Zero-centred, with or without a residual add: one block a row. Gated, per value head: one warp a head.
#include "common.cuh"

constexpr int NORM_THREADS = 256;
constexpr int NORM_HELD = 5;  // fours of a row that a thread holds: rows of up to 5120

// x [rows, width] (with ADD, x += delta first); out = x / sqrt(mean(x^2) + eps) * (1 + weight).
template <typename X, typename D, typename O, bool ADD>
__device__ __forceinline__ void rms_norm(X* x, const D* delta, const float* weight, O* out, int width, float eps) {
    const size_t base = (size_t)blockIdx.x * width;
    x += base;
    if (ADD) delta += base;
    out += base;
    float squares = 0.f;
    if ((width & 3) == 0 && width <= NORM_HELD * NORM_THREADS * 4) {
        // The row stays in registers between its two uses.
        float4 held[NORM_HELD];
#pragma unroll
        for (int i = 0; i < NORM_HELD; i++) {
            const int column = (threadIdx.x + i * NORM_THREADS) * 4;
            if (column >= width) break;
            held[i] = load4(x + column);
            if (ADD) {
                const float4 d = load4(delta + column);
                held[i] = make_float4(held[i].x + d.x, held[i].y + d.y, held[i].z + d.z, held[i].w + d.w);
                store4(x + column, held[i]);
            }
            const float4 v = held[i];
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        const float scale = 1.f / sqrtf(block_sum<NORM_THREADS>(squares) / width + eps);
#pragma unroll
        for (int i = 0; i < NORM_HELD; i++) {
            const int column = (threadIdx.x + i * NORM_THREADS) * 4;
            if (column >= width) break;
            const float4 v = held[i];
            const float4 w = load4(weight + column);
            store4(out + column, make_float4(v.x * scale * (1.f + w.x), v.y * scale * (1.f + w.y),
                                             v.z * scale * (1.f + w.z), v.w * scale * (1.f + w.w)));
        }
        return;
    }
    const bool wide = (width & 3) == 0;
    if (wide) {
        for (int i = threadIdx.x * 4; i < width; i += NORM_THREADS * 4) {
            float4 v = load4(x + i);
            if (ADD) {
                const float4 d = load4(delta + i);
                v = make_float4(v.x + d.x, v.y + d.y, v.z + d.z, v.w + d.w);
                store4(x + i, v);
            }
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    } else {
        for (int i = threadIdx.x; i < width; i += NORM_THREADS) {
            float v = widen(x[i]);
            if (ADD) {
                v += widen(delta[i]);
                x[i] = narrow<X>(v);
            }
            squares += v * v;
        }
    }
    const float scale = 1.f / sqrtf(block_sum<NORM_THREADS>(squares) / width + eps);
    if (wide) {
        for (int i = threadIdx.x * 4; i < width; i += NORM_THREADS * 4) {
            const float4 v = load4(x + i);
            const float4 w = load4(weight + i);
            store4(out + i, make_float4(v.x * scale * (1.f + w.x), v.y * scale * (1.f + w.y),
                                        v.z * scale * (1.f + w.z), v.w * scale * (1.f + w.w)));
        }
    } else {
        for (int i = threadIdx.x; i < width; i += NORM_THREADS) {
            out[i] = narrow<O>(widen(x[i]) * scale * (1.f + weight[i]));
        }
    }
}

#define RMS_NORM(suffix, X, O)                                                                                  \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS)                                                  \
        rms_norm_##suffix(X* x, const float* weight, O* out, int width, float eps) {                            \
        rms_norm<X, float, O, false>(x, nullptr, weight, out, width, eps);                                      \
    }
RMS_NORM(ff, float, float)
RMS_NORM(fh, float, bf16)
RMS_NORM(hf, bf16, float)
RMS_NORM(hh, bf16, bf16)

#define ADD_RMS_NORM(suffix, D, O)                                                                              \
    extern "C" __global__ void __launch_bounds__(NORM_THREADS)                                                  \
        add_rms_norm_##suffix(float* x, const D* delta, const float* weight, O* out, int width, float eps) {    \
        rms_norm<float, D, O, true>(x, delta, weight, out, width, eps);                                         \
    }
ADD_RMS_NORM(ff, float, float)
ADD_RMS_NORM(fh, float, bf16)
ADD_RMS_NORM(hf, bf16, float)
ADD_RMS_NORM(hh, bf16, bf16)

// o [rows * heads, dim] in place: weight * (o / sqrt(mean(o^2) + eps)) * silu(z), plain weight.
// z is column `column + head * dim` of projected [rows, stride]. Grid: ceil(rows * heads / warps of a block).
template <typename P, typename O>
__device__ __forceinline__ void gated_norm(O* o, const P* projected, const float* weight, int items, int heads, int dim,
                                           int stride, int column, float eps) {
    const int item = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (item >= items) return;
    const int lane = threadIdx.x & 31;
    o += (size_t)item * dim;
    const P* z = projected + (size_t)(item / heads) * stride + column + (item % heads) * dim;
    float squares = 0.f;
    if (dim == 128 && (stride & 3) == 0 && (column & 3) == 0) {
        const float4 v = load4(o + lane * 4);
        const float4 gate = load4(z + lane * 4);
        const float4 w = load4(weight + lane * 4);
        squares = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        const float scale = 1.f / sqrtf(warp_sum(squares) / dim + eps);
        store4(o + lane * 4, make_float4(w.x * (v.x * scale) * silu_of<P>(gate.x), w.y * (v.y * scale) * silu_of<P>(gate.y),
                                         w.z * (v.z * scale) * silu_of<P>(gate.z), w.w * (v.w * scale) * silu_of<P>(gate.w)));
        return;
    }
    for (int i = lane; i < dim; i += 32) squares += widen(o[i]) * widen(o[i]);
    const float scale = 1.f / sqrtf(warp_sum(squares) / dim + eps);
    for (int i = lane; i < dim; i += 32) o[i] = narrow<O>(weight[i] * (widen(o[i]) * scale) * silu_of<P>(widen(z[i])));
}

#define GATED_NORM(suffix, P, O)                                                                                \
    extern "C" __global__ void gated_norm_##suffix(O* o, const P* projected, const float* weight, int items,    \
                                                   int heads, int dim, int stride, int column, float eps) {     \
        gated_norm<P, O>(o, projected, weight, items, heads, dim, stride, column, eps);                         \
    }
GATED_NORM(ff, float, float)
GATED_NORM(fh, float, bf16)
GATED_NORM(hf, bf16, float)
GATED_NORM(hh, bf16, bf16)
