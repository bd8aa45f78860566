// Embedding lookup and row gathers: pure copies, rounded at most once by the output's type.
#include "common.cuh"

template <typename X, typename O>
__device__ __forceinline__ void copy_row(const X* source, O* target, int width) {
    if ((width & 3) == 0) {
        for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) store4(target + i, load4(source + i));
    } else {
        for (int i = threadIdx.x; i < width; i += blockDim.x) target[i] = narrow<O>(widen(source[i]));
    }
}

// out[r] = source[rows[r]]; source [any, width], out [gridDim.x, width].
template <typename X, typename O>
__device__ __forceinline__ void gather(const X* source, const int* rows, O* out, int width) {
    copy_row(source + (size_t)rows[blockIdx.x] * width, out + (size_t)blockIdx.x * width, width);
}

#define GATHER(suffix, X, O)                                                                                    \
    extern "C" __global__ void gather_##suffix(const X* source, const int* rows, O* out, int width) {           \
        gather<X, O>(source, rows, out, width);                                                                 \
    }
GATHER(ff, float, float)
GATHER(fh, float, bf16)
GATHER(hf, bf16, float)
GATHER(hh, bf16, bf16)
