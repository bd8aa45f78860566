// Low-rank adapters added to the weights they belong to, once, when a weight is prepared.
#include "common.cuh"

// out [columns, depth] = weight + scale * b a, the sum in FP32 and rounded once; a [rank, depth], b [columns, rank].
// Sums over the rank ascend. Grid: (columns, depth / 256).
template <typename W, typename O>
__device__ __forceinline__ void merge(const W* weight, const float* a, const float* b, O* out, int depth, int rank,
                                      float scale) {
    const int k = blockIdx.y * blockDim.x + threadIdx.x;
    if (k >= depth) return;
    float sum = 0.f;
    for (int r = 0; r < rank; r++) sum = fmaf(b[(size_t)blockIdx.x * rank + r], a[(size_t)r * depth + k], sum);
    const size_t index = (size_t)blockIdx.x * depth + k;
    // Product and sum are rounded separately, as merging tools do.
    out[index] = narrow<O>(__fadd_rn(widen(weight[index]), __fmul_rn(scale, sum)));
}

#define MERGE(suffix, W, O)                                                                                     \
    extern "C" __global__ void merge_##suffix(const W* weight, const float* a, const float* b, O* out,          \
                                              int depth, int rank, float scale) {                               \
        merge<W, O>(weight, a, b, out, depth, rank, scale);                                                     \
    }
MERGE(ff, float, float)
MERGE(hf, bf16, float)
MERGE(hh, bf16, bf16)
