// Element types, 4-wide loads and stores, and reductions that all families share.
//
// Conventions: matrices are row-major; `f` in a kernel's name stands for float, `h` for bfloat16, in the order of its
// buffers; arithmetic is FP32 and a value is rounded once, when it is stored. Every reduction has one order that
// depends on the width of a row and on nothing else, so that a row's bits never depend on its neighbours.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }

// Four consecutive elements; the address is a multiple of four elements.
__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float4 load4(const bf16* p) {
    const uint2 raw = *reinterpret_cast<const uint2*>(p);
    const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.x));
    const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.y));
    return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }
__device__ __forceinline__ void store4(bf16* p, float4 v) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(v.z, v.w);
    uint2 raw;
    raw.x = *reinterpret_cast<const uint32_t*>(&low);
    raw.y = *reinterpret_cast<const uint32_t*>(&high);
    *reinterpret_cast<uint2*>(p) = raw;
}

// Two consecutive elements; the address is a multiple of two elements.
__device__ __forceinline__ void store2(float* p, float x, float y) { *reinterpret_cast<float2*>(p) = make_float2(x, y); }
__device__ __forceinline__ void store2(bf16* p, float x, float y) {
    *reinterpret_cast<__nv_bfloat162*>(p) = __floats2bfloat162_rn(x, y);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Sum over a block of THREADS threads; every thread gets it.
template <int THREADS> __device__ __forceinline__ float block_sum(float x) {
    __shared__ float partial[THREADS / 32];
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = x;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total += partial[i];
    return total;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

// 2^x by the hardware; what is below the smallest normal number becomes zero.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Sigmoid and silu of values that come from a buffer of T: for BF16 with the hardware's exponential and division, whose error
// of a few units in the 22nd bit is far below that of the operand.
template <typename T> __device__ __forceinline__ float sigmoid_of(float x);
template <> __device__ __forceinline__ float sigmoid_of<float>(float x) { return sigmoid(x); }
template <> __device__ __forceinline__ float sigmoid_of<bf16>(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
template <typename T> __device__ __forceinline__ float silu_of(float x);
template <> __device__ __forceinline__ float silu_of<float>(float x) { return silu(x); }
template <> __device__ __forceinline__ float silu_of<bf16>(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// ---- Tensor cores and asynchronous copies ---------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copies 16 bytes to shared memory, or writes zeros there.
__device__ __forceinline__ void copy16(uint32_t target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

// Four 8 x 8 matrices of 16-bit elements; of 32-bit elements they are 8 x 4.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// d [16, 8] += a [16, 16] b [16, 8], BF16 operands.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d [16, 8] += a [16, 8] b [8, 8], TF32 operands (11 significant bits, already rounded).
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds to nearest, so that products of many terms have no bias.
__device__ __forceinline__ uint32_t tf32(float x) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float rounded_tf32(float x) { return __uint_as_float(tf32(x)); }

// One segment of a pass, as `layout.rs` writes it. Slots are -1 where there is none.
struct Segment {
    int start;        // first row of the packed batch
    int len;          // rows
    int position;     // position of the first row in its sequence
    int initial;      // slot whose state it starts from
    int last;         // slot that takes its final state
    int first_range;  // its key ranges in the table of ranges
    int ranges;
    int first_chunk;  // its chunks of 64 rows in the table of chunks
};

// A run of key rows: positions `position..` of the segment's sequence lie in arena rows `row..`.
struct KeyRange {
    int position;
    int row;
    int len;
};

// Shape of a full-attention mixer; projected rows are heads * (query | gate), keys, values.
struct AttentionShape {
    int heads;
    int kv_heads;
    int head_dim;
    int rotary_dim;
};
