// Queries, keys and values of full attention: per-head zero-centred norm, rotary embedding, the key arena.
#include "common.cuh"

constexpr int QKV_WARPS = 8;
constexpr int MAX_HEAD = 256;

// cos and sin of position * inv_freq[j]; table [rows, pairs] of (cos, sin). Grid: ceil(rows * pairs / block).
extern "C" __global__ void rotary_table(const int* positions, const float* inv_freq, float2* table, int rows, int pairs) {
    const int item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= rows * pairs) return;
    const float angle = (float)positions[item / pairs] * inv_freq[item % pairs];
    float s, c;
    sincosf(angle, &s, &c);
    table[item] = make_float2(c, s);
}

// projected [rows, heads * (query | gate), keys, values]; query [rows, heads * head_dim];
// keys, values [key rows, kv_heads * head_dim]. One warp a head of a row. Grid: (rows, heads / QKV_WARPS).
template <typename X, typename O, typename K>
__device__ __forceinline__ void query_key_value(const X* projected, const float* query_norm, const float* key_norm, float eps,
                                                AttentionShape shape, const float2* rotary, const int* key_rows, O* query,
                                                K* keys, K* values) {
    __shared__ float staged[QKV_WARPS][MAX_HEAD];
    const int dim = shape.head_dim;
    const int head = blockIdx.y * QKV_WARPS + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    const int row = blockIdx.x;
    if (head >= shape.heads + 2 * shape.kv_heads) return;
    if (key_rows[row] < 0) return;  // padding of a shape class
    const X* source = projected + (size_t)row * 2 * (shape.heads + shape.kv_heads) * dim;
    const size_t arena = (size_t)key_rows[row] * shape.kv_heads * dim;
    if (head >= shape.heads + shape.kv_heads) {
        const int kv = head - shape.heads - shape.kv_heads;
        const X* v = source + (2 * shape.heads + shape.kv_heads + kv) * dim;
        for (int i = lane; i < dim; i += 32) values[arena + kv * dim + i] = narrow<K>(widen(v[i]));
        return;
    }
    const bool is_query = head < shape.heads;
    const int kv = head - shape.heads;
    const X* x = source + (is_query ? 2 * head * dim : (2 * shape.heads + kv) * dim);
    const float* weight = is_query ? query_norm : key_norm;
    float* normed = staged[threadIdx.x >> 5];
    float squares = 0.f;
    for (int i = lane; i < dim; i += 32) {
        const float v = widen(x[i]);
        normed[i] = v;
        squares = fmaf(v, v, squares);
    }
    const float scale = 1.f / sqrtf(warp_sum(squares) / dim + eps);
    for (int i = lane; i < dim; i += 32) normed[i] = normed[i] * scale * (1.f + weight[i]);
    __syncwarp();
    const int pairs = shape.rotary_dim / 2;
    for (int i = lane; i < dim; i += 32) {
        float y = normed[i];
        if (i < shape.rotary_dim) {
            const bool low = i < pairs;
            const float2 cs = rotary[(size_t)row * pairs + (low ? i : i - pairs)];
            y = low ? y * cs.x - normed[i + pairs] * cs.y : y * cs.x + normed[i - pairs] * cs.y;
        }
        if (is_query) {
            query[((size_t)row * shape.heads + head) * dim + i] = narrow<O>(y);
        } else {
            keys[arena + kv * dim + i] = narrow<K>(y);
        }
    }
}

#define QUERY_KEY_VALUE(suffix, X, O, K)                                                                        \
    extern "C" __global__ void __launch_bounds__(QKV_WARPS * 32)                                                \
        query_key_value_##suffix(const X* projected, const float* query_norm, const float* key_norm, float eps, \
                                 AttentionShape shape, const float2* rotary, const int* key_rows, O* query,     \
                                 K* keys, K* values) {                                                          \
        query_key_value<X, O, K>(projected, query_norm, key_norm, eps, shape, rotary, key_rows, query, keys,    \
                                 values);                                                                       \
    }
QUERY_KEY_VALUE(fff, float, float, float)
QUERY_KEY_VALUE(ffh, float, float, bf16)
QUERY_KEY_VALUE(hff, bf16, float, float)
QUERY_KEY_VALUE(hfh, bf16, float, bf16)
QUERY_KEY_VALUE(fhf, float, bf16, float)
QUERY_KEY_VALUE(fhh, float, bf16, bf16)
QUERY_KEY_VALUE(hhf, bf16, bf16, float)
QUERY_KEY_VALUE(hhh, bf16, bf16, bf16)
