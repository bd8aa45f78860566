// The gated product of the MLP.
#include "common.cuh"

// gate_up [rows, gate: inner | up: inner]; out [rows, inner] = silu(gate) * up. Grid: (rows, columns).
template <typename X, typename O> __device__ __forceinline__ void swiglu(const X* gate_up, O* out, int inner) {
    const X* gate = gate_up + (size_t)blockIdx.x * 2 * inner;
    out += (size_t)blockIdx.x * inner;
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if ((inner & 3) == 0) {
        if (first < inner) {
            const float4 g = load4(gate + first);
            const float4 u = load4(gate + inner + first);
            store4(out + first,
                   make_float4(silu_of<X>(g.x) * u.x, silu_of<X>(g.y) * u.y, silu_of<X>(g.z) * u.z, silu_of<X>(g.w) * u.w));
        }
    } else {
        for (int i = first; i < min(first + 4, inner); i++) {
            out[i] = narrow<O>(silu_of<X>(widen(gate[i])) * widen(gate[inner + i]));
        }
    }
}

#define SWIGLU(suffix, X, O)                                                                                    \
    extern "C" __global__ void swiglu_##suffix(const X* gate_up, O* out, int inner) {                           \
        swiglu<X, O>(gate_up, out, inner);                                                                      \
    }
SWIGLU(ff, float, float)
SWIGLU(fh, float, bf16)
SWIGLU(hf, bf16, float)
SWIGLU(hh, bf16, bf16)
