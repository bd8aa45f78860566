// Random operands and bitwise comparison, for choosing matrix products by measurement.
#include "common.cuh"

// x[i] = a number in (-scale, scale) that depends on seed and i only.
extern "C" __global__ void fill_random(bf16* x, int count, float scale, int seed) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        uint64_t z = (uint64_t)i + ((uint64_t)(uint32_t)seed << 32) + 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        x[i] = narrow<bf16>(((float)(z >> 40) / 8388608.f - 1.f) * scale);
    }
}

// *flag = 1 if any of the first `count` words of a and b differ.
extern "C" __global__ void differs(const uint32_t* a, const uint32_t* b, int count, int* flag) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        if (a[i] != b[i]) *flag = 1;
    }
}
