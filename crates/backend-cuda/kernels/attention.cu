// Attention, the general path: FP32 products, any element types, head_dim up to HEAD.
//
// A block makes a tile for two query heads of one key head: 32 rows of (head, query), 256 threads.

#include "attention.cuh"

constexpr int SIMT_THREADS = 256;
constexpr int SIMT_ROWS = 32;

template <int HEAD> struct SimtShared {
    float query[SIMT_ROWS][HEAD];
    float key[BLOCK_KEYS][HEAD + 4];  // keys, then the values of the same block
    float score[BLOCK_KEYS][SIMT_ROWS + 4];
    float maximum[SIMT_ROWS];
    float total[SIMT_ROWS];
    float correction[SIMT_ROWS];
    int rows[BLOCK_KEYS];
};

template <typename Q, typename P, typename K, typename O, int HEAD>
__device__ __forceinline__ void attention_simt(const Q* query, const P* projected, const K* keys, const K* values, O* out,
                                               const Tile* tiles, const Segment* segments, const KeyRange* all_ranges,
                                               AttentionShape shape, float scale) {
    constexpr int COLUMN_GROUPS = HEAD / 4;
    constexpr int ROW_GROUPS = SIMT_THREADS / COLUMN_GROUPS;
    constexpr int ROWS = SIMT_ROWS / ROW_GROUPS;
    extern __shared__ __align__(16) unsigned char raw[];
    SimtShared<HEAD>& shared = *reinterpret_cast<SimtShared<HEAD>*>(raw);

    const Tile tile = tiles[blockIdx.x];
    if (tile.x < 0) return;  // padding of a shape class
    const Segment segment = segments[tile.x];
    const KeyRange* ranges = all_ranges + segment.first_range;
    const int group = shape.heads / shape.kv_heads;
    const int pairs = (group + 1) / 2;
    const int kv_head = blockIdx.y / pairs;
    const int first_head = (blockIdx.y % pairs) * 2;  // inside the group
    const int dim = shape.head_dim;
    const int queries = min(TILE_QUERIES, segment.len - tile.y);
    const int first_position = segment.position + tile.y;
    const int last_position = first_position + queries - 1;
    const int warp = threadIdx.x >> 5;
    const int lane = threadIdx.x & 31;

    for (int item = threadIdx.x; item < SIMT_ROWS * HEAD; item += SIMT_THREADS) {
        const int row = item / HEAD;
        const int d = item % HEAD;
        const int head = first_head + row / TILE_QUERIES;
        const int q = row % TILE_QUERIES;
        const bool valid = head < group && q < queries && d < dim;
        const size_t source = ((size_t)(segment.start + tile.y + q) * shape.heads + kv_head * group + head) * dim + d;
        shared.query[row][d] = valid ? widen(query[source]) : 0.f;
    }
    if (threadIdx.x < SIMT_ROWS) {
        shared.maximum[threadIdx.x] = -INFINITY;
        shared.total[threadIdx.x] = 0.f;
    }
    const int column = (threadIdx.x % COLUMN_GROUPS) * 4;
    const int first_row = threadIdx.x / COLUMN_GROUPS * ROWS;
    float4 sum[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    const int tx = threadIdx.x & 15;
    const int ty = threadIdx.x >> 4;

    auto load = [&](const K* arena) {
        for (int item = threadIdx.x; item < BLOCK_KEYS * HEAD; item += SIMT_THREADS) {
            const int key = item / HEAD;
            const int d = item % HEAD;
            const int row = shared.rows[key];
            const bool valid = row >= 0 && d < dim;
            shared.key[key][d] = valid ? widen(arena[((size_t)row * shape.kv_heads + kv_head) * dim + d]) : 0.f;
        }
    };

    for (int block = 0; block <= last_position; block += BLOCK_KEYS) {
        if (threadIdx.x < BLOCK_KEYS) {
            const int position = block + threadIdx.x;
            shared.rows[threadIdx.x] = position <= last_position ? key_row(ranges, segment.ranges, position) : -1;
        }
        __syncthreads();
        load(keys);
        __syncthreads();
        float score[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
        for (int d = 0; d < HEAD; d += 4) {
            float4 a[2], b[2];
            a[0] = load4(&shared.query[2 * ty][d]);
            a[1] = load4(&shared.query[2 * ty + 1][d]);
            b[0] = load4(&shared.key[tx][d]);
            b[1] = load4(&shared.key[tx + 16][d]);
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    score[i][j] = fmaf(a[i].x, b[j].x, score[i][j]);
                    score[i][j] = fmaf(a[i].y, b[j].y, score[i][j]);
                    score[i][j] = fmaf(a[i].z, b[j].z, score[i][j]);
                    score[i][j] = fmaf(a[i].w, b[j].w, score[i][j]);
                }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int row = 2 * ty + i;
                const int key = tx + 16 * j;
                const bool visible = block + key <= first_position + row % TILE_QUERIES;
                shared.score[key][row] = visible ? score[i][j] * scale : -INFINITY;
            }
        __syncthreads();
        load(values);
        for (int row = warp * 4; row < warp * 4 + 4; row++) {
            const float s = shared.score[lane][row];
            const float before = shared.maximum[row];
            const float maximum = fmaxf(before, warp_max(s));
            const float p = expf(s - maximum);
            const float total = warp_sum(p);
            shared.score[lane][row] = p;
            __syncwarp();
            if (lane == 0) {
                const float correction = expf(before - maximum);
                shared.maximum[row] = maximum;
                shared.total[row] = shared.total[row] * correction + total;
                shared.correction[row] = correction;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float correction = shared.correction[first_row + i];
            sum[i] = make_float4(sum[i].x * correction, sum[i].y * correction, sum[i].z * correction,
                                 sum[i].w * correction);
        }
        for (int key = 0; key < BLOCK_KEYS; key++) {
            const float4 v = load4(&shared.key[key][column]);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float p = shared.score[key][first_row + i];
                sum[i].x = fmaf(p, v.x, sum[i].x);
                sum[i].y = fmaf(p, v.y, sum[i].y);
                sum[i].z = fmaf(p, v.z, sum[i].z);
                sum[i].w = fmaf(p, v.w, sum[i].w);
            }
        }
        __syncthreads();
    }

    const int stride = 2 * (shape.heads + shape.kv_heads) * dim;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = first_row + i;
        const int group_head = first_head + row / TILE_QUERIES;
        const int q = row % TILE_QUERIES;
        if (group_head >= group || q >= queries) continue;
        const int head = kv_head * group + group_head;
        const size_t token = segment.start + tile.y + q;
        const P* gate = projected + token * stride + (2 * head + 1) * dim;
        O* target = out + (token * shape.heads + head) * dim;
        const float total = shared.total[row];
        const float* lanes = &sum[i].x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int d = column + j;
            if (d < dim) target[d] = narrow<O>(lanes[j] / total * sigmoid_of<P>(widen(gate[d])));
        }
    }
}

#define ATTENTION_SIMT(suffix, Q, P, K, O, HEAD)                                                                \
    extern "C" __global__ void __launch_bounds__(SIMT_THREADS)                                                  \
        attention_##suffix##_##HEAD(const Q* query, const P* projected, const K* keys, const K* values, O* out, \
                                    const Tile* tiles, const Segment* segments, const KeyRange* ranges,         \
                                    AttentionShape shape, float scale) {                                        \
        attention_simt<Q, P, K, O, HEAD>(query, projected, keys, values, out, tiles, segments, ranges, shape,   \
                                         scale);                                                                \
    }
#define ATTENTION_SIZES(suffix, Q, P, K, O)                                                                     \
    ATTENTION_SIMT(suffix, Q, P, K, O, 64)                                                                      \
    ATTENTION_SIMT(suffix, Q, P, K, O, 128)                                                                     \
    ATTENTION_SIMT(suffix, Q, P, K, O, 256)
ATTENTION_SIZES(ffff, float, float, float, float)
ATTENTION_SIZES(ffhh, float, float, bf16, bf16)
ATTENTION_SIZES(hhhh, bf16, bf16, bf16, bf16)
