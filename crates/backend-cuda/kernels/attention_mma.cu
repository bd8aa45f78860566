// Attention on tensor cores: BF16 products with FP32 sums, head_dim exactly HEAD.
//
// A block makes a tile for up to four query heads of one key head over one span of keys, two warps a head: both make
// scores of half of a block's keys and, having exchanged maxima and weights, sums of half of the columns. Spans are
// SPAN_KEYS absolute positions; tiles that see several leave partial sums, which `attention_merge` joins in order, so
// the bits stay those of the position. Keys and values are copied asynchronously, two blocks deep, 16-byte pieces
// exchanged by (row & 7) so that neither copies nor fragment loads meet in a bank. The weights of a softmax are
// rounded to BF16 before they multiply values AND before they are summed, so they still add up to one.

#include "attention.cuh"

constexpr int MMA_HEADS = 4;
constexpr int MMA_THREADS = MMA_HEADS * 64;
constexpr int SPAN_KEYS = 512;
constexpr int WEIGHT_PITCH = BLOCK_KEYS + 8;

// A tile over one span: segment, first query inside it, span, and where its partial sums go (-1: it is the only span).
struct Work {
    int segment;
    int first;
    int span;
    int partial;
};

template <int HEAD> struct MmaShared {
    bf16 query[MMA_HEADS][TILE_QUERIES][HEAD];
    bf16 key[2][BLOCK_KEYS][HEAD];
    bf16 value[2][BLOCK_KEYS][HEAD];
    bf16 weight[MMA_HEADS][TILE_QUERIES][WEIGHT_PITCH];
    float exchange[MMA_HEADS][2][TILE_QUERIES];
};

// Byte offset of 16-byte piece `piece` of row `row` in a tile of HEAD columns.
template <int HEAD> __device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
    return row * HEAD * 2 + ((piece ^ (row & 7)) << 4);
}

// Copies a tile of queries to shared memory as BF16, by 64 threads; rows from `queries` on become zeros.
template <int HEAD>
__device__ __forceinline__ void load_queries(const bf16* source, int stride, int queries, int thread, uint32_t target) {
#pragma unroll
    for (int i = 0; i < TILE_QUERIES * HEAD / 8 / 64; i++) {
        const int q = (i * 64 + thread) / (HEAD / 8);
        const int piece = (i * 64 + thread) % (HEAD / 8);
        copy16(target + piece_offset<HEAD>(q, piece), source + (size_t)q * stride + piece * 8, q < queries);
    }
}
template <int HEAD>
__device__ __forceinline__ void load_queries(const float* source, int stride, int queries, int thread, uint32_t target) {
#pragma unroll 4
    for (int i = 0; i < TILE_QUERIES * HEAD / 4 / 64; i++) {
        const int q = (i * 64 + thread) / (HEAD / 4);
        const int d = (i * 64 + thread) % (HEAD / 4) * 4;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (q < queries) v = load4(source + (size_t)q * stride + d);
        const uint32_t address = target + piece_offset<HEAD>(q, d / 8) + (d & 4) * 2;
        store4(reinterpret_cast<bf16*>(__cvta_shared_to_generic(address)), v);
    }
}

// Waits for the two warps of a head.
__device__ __forceinline__ void pair_barrier(int head) { asm volatile("bar.sync %0, 64;" ::"r"(head + 1) : "memory"); }

// sums [partials, heads, 16, HEAD]; extremes [partials, heads, 16] of (maximum in powers of two, total).
// Grid: (work, kv_heads * ceil(heads of a key head / 4)).
template <typename Q, typename P, typename O, int HEAD>
__device__ __forceinline__ void attention_mma(const Q* query, const P* projected, const bf16* keys, const bf16* values,
                                              O* out, float* sums, float2* extremes, const Work* work,
                                              const Segment* segments, const KeyRange* all_ranges, AttentionShape shape,
                                              float scale) {
    constexpr int PIECES = HEAD / 8;
    constexpr int COLUMNS = HEAD / 2;
    extern __shared__ __align__(16) unsigned char raw[];
    MmaShared<HEAD>& shared = *reinterpret_cast<MmaShared<HEAD>*>(raw);

    const Work item = work[blockIdx.x];
    if (item.segment < 0) return;  // padding of a shape class
    const Segment segment = segments[item.segment];
    const KeyRange* ranges = all_ranges + segment.first_range;
    const int group = shape.heads / shape.kv_heads;
    const int parts = (group + MMA_HEADS - 1) / MMA_HEADS;
    const int kv_head = blockIdx.y / parts;
    const int warp = threadIdx.x >> 5;
    const int lane = threadIdx.x & 31;
    const int local = warp >> 1;
    const int side = warp & 1;
    const int group_head = (blockIdx.y % parts) * MMA_HEADS + local;
    const int head = kv_head * group + min(group_head, group - 1);
    const int queries = min(TILE_QUERIES, segment.len - item.first);
    const int first_position = segment.position + item.first;
    const int last_position = first_position + queries - 1;
    const int first_key = item.span * SPAN_KEYS;
    const int last_key = min(last_position, first_key + SPAN_KEYS - 1);
    const size_t first_token = segment.start + item.first;

    // A warp copies four keys of a block.
    auto fetch = [&](int block, int buffer) {
        constexpr int KEYS = BLOCK_KEYS / (MMA_THREADS / 32);
        const int position = block + warp * KEYS + lane;
        const int row = lane < KEYS && position <= last_position ? key_row(ranges, segment.ranges, position) : -1;
#pragma unroll
        for (int i = 0; i < (KEYS * PIECES + 31) / 32; i++) {
            const int index = i * 32 + lane;
            const int key = index / PIECES;
            const int piece = index % PIECES;
            const int arena_row = __shfl_sync(0xffffffffu, row, key & 31);
            if (KEYS * PIECES % 32 != 0 && index >= KEYS * PIECES) continue;
            const bool valid = arena_row >= 0;
            const size_t source = ((size_t)(valid ? arena_row : 0) * shape.kv_heads + kv_head) * HEAD + piece * 8;
            const uint32_t offset = piece_offset<HEAD>(warp * KEYS + key, piece);
            copy16(shared_address(shared.key[buffer]) + offset, keys + source, valid);
            copy16(shared_address(shared.value[buffer]) + offset, values + source, valid);
        }
        commit_copies();
    };
    const uint32_t query_base = shared_address(shared.query[local]);
    load_queries<HEAD>(query + (first_token * shape.heads + head) * HEAD, shape.heads * HEAD, queries, side * 32 + lane,
                       query_base);
    fetch(first_key, 0);

    float sum[COLUMNS / 8][4];
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] = 0.f;
    float maximum[2] = {-INFINITY, -INFINITY};
    float total[2] = {0.f, 0.f};               // of this warp's keys
    const float scale2 = scale * 1.4426950408889634f;  // exponentials are powers of two

    int buffer = 0;
    for (int block = first_key; block <= last_key; block += BLOCK_KEYS, buffer ^= 1) {
        if (block + BLOCK_KEYS <= last_key) {
            fetch(block + BLOCK_KEYS, buffer ^ 1);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();
        const uint32_t key_base = shared_address(shared.key[buffer]);
        const uint32_t value_base = shared_address(shared.value[buffer]);

        // Scores of 16 queries and 16 keys; even and odd steps apart, for twice as many products in flight.
        float halves[2][2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) halves[i][n][j] = 0.f;
        // The next step's fragments are loaded before this step's are multiplied.
        uint32_t a[2][4], b[2][4];
        auto load_scores = [&](int step) {
            const int key = side * 16 + (lane & 7) + ((lane >> 4) << 3);
            load_matrices(a[step & 1], query_base + piece_offset<HEAD>(lane & 15, step * 2 + (lane >> 4)));
            load_matrices(b[step & 1], key_base + piece_offset<HEAD>(key, step * 2 + ((lane >> 3) & 1)));
        };
        load_scores(0);
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            if (step + 1 < HEAD / 16) load_scores(step + 1);
            const int x = step & 1;
            multiply(halves[x][0], a[x], b[x][0], b[x][1]);
            multiply(halves[x][1], a[x], b[x][2], b[x][3]);
        }
        float score[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int position = first_position + (lane >> 2) + half * 8;
            float highest = -INFINITY;
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int key = block + side * 16 + n * 8 + (lane & 3) * 2 + j;
                    const float s = (halves[0][n][half * 2 + j] + halves[1][n][half * 2 + j]) * scale2;
                    score[n][half * 2 + j] = key <= position ? s : -INFINITY;
                    highest = fmaxf(highest, score[n][half * 2 + j]);
                }
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            if ((lane & 3) == 0) shared.exchange[local][side][(lane >> 2) + half * 8] = highest;
        }
        pair_barrier(local);
        float correction[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int q = (lane >> 2) + half * 8;
            const float highest =
                fmaxf(maximum[half], fmaxf(shared.exchange[local][0][q], shared.exchange[local][1][q]));
            const float base = highest == -INFINITY ? 0.f : highest;  // nothing visible so far
            correction[half] = power_of_two(maximum[half] - base);
            maximum[half] = highest;
            float added = 0.f;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(power_of_two(score[n][half * 2] - base),
                                                                  power_of_two(score[n][half * 2 + 1] - base));
                const float2 weights = __bfloat1622float2(pair);
                added += weights.x + weights.y;
                *reinterpret_cast<__nv_bfloat162*>(&shared.weight[local][q][side * 16 + n * 8 + (lane & 3) * 2]) = pair;
            }
            total[half] = total[half] * correction[half] + added;
        }
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            sum[i][0] *= correction[0];
            sum[i][1] *= correction[0];
            sum[i][2] *= correction[1];
            sum[i][3] *= correction[1];
        }
        pair_barrier(local);
        constexpr int WIDE = COLUMNS / 16;  // pairs of column tiles
        constexpr int STEPS = BLOCK_KEYS / 16;
        uint32_t w[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            load_matrices(w[step], shared_address(&shared.weight[local][lane & 15][step * 16 + (lane >> 4) * 8]));
        }
        auto load_values = [&](int index) {
            const int step = index / WIDE;
            const int piece = side * (COLUMNS / 8) + index % WIDE * 2 + (lane >> 4);
            load_matrices_transposed(b[index & 1], value_base + piece_offset<HEAD>(step * 16 + (lane & 15), piece));
        };
        load_values(0);
#pragma unroll
        for (int index = 0; index < STEPS * WIDE; index++) {
            if (index + 1 < STEPS * WIDE) load_values(index + 1);
            const int n = index % WIDE;
            multiply(sum[2 * n], w[index / WIDE], b[index & 1][0], b[index & 1][1]);
            multiply(sum[2 * n + 1], w[index / WIDE], b[index & 1][2], b[index & 1][3]);
        }
        __syncthreads();
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        float t = total[half];
        t += __shfl_xor_sync(0xffffffffu, t, 1);
        t += __shfl_xor_sync(0xffffffffu, t, 2);
        if ((lane & 3) == 0) shared.exchange[local][side][(lane >> 2) + half * 8] = t;
    }
    pair_barrier(local);
    if (group_head >= group) return;
    const int stride = 2 * (shape.heads + shape.kv_heads) * HEAD;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int q = (lane >> 2) + half * 8;
        if (q >= queries) continue;
        const float t = shared.exchange[local][0][q] + shared.exchange[local][1][q];
        if (item.partial >= 0) {
            const size_t row = ((size_t)item.partial * shape.heads + head) * TILE_QUERIES + q;
            if (side == 0 && (lane & 3) == 0) extremes[row] = make_float2(maximum[half], t);
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                const int d = side * COLUMNS + i * 8 + (lane & 3) * 2;
                *reinterpret_cast<float2*>(sums + row * HEAD + d) =
                    make_float2(sum[i][half * 2], sum[i][half * 2 + 1]);
            }
            continue;
        }
        const size_t token = first_token + q;
        const P* gate = projected + token * stride + (2 * head + 1) * HEAD;
        O* target = out + (token * shape.heads + head) * HEAD;
        const float inverse = 1.f / t;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            const int d = side * COLUMNS + i * 8 + (lane & 3) * 2;
            store2(target + d, sum[i][half * 2] * inverse * sigmoid_of<P>(widen(gate[d])),
                   sum[i][half * 2 + 1] * inverse * sigmoid_of<P>(widen(gate[d + 1])));
        }
    }
}

// A tile whose spans are to be joined: segment, first query, its first partial and their number.
struct Joint {
    int segment;
    int first;
    int partial;
    int spans;
};

// Grid: (joints, heads); a thread owns a column.
template <typename P, typename O, int HEAD>
__device__ __forceinline__ void attention_merge(const P* projected, O* out, const float* sums, const float2* extremes,
                                                const Joint* joints, const Segment* segments, AttentionShape shape) {
    const Joint joint = joints[blockIdx.x];
    if (joint.segment < 0) return;  // padding of a shape class
    const Segment segment = segments[joint.segment];
    const int head = blockIdx.y;
    const int d = threadIdx.x;
    const int stride = 2 * (shape.heads + shape.kv_heads) * HEAD;
    const size_t step = (size_t)shape.heads * TILE_QUERIES;
    for (int q = 0; q < min(TILE_QUERIES, segment.len - joint.first); q++) {
        const size_t row = ((size_t)joint.partial * shape.heads + head) * TILE_QUERIES + q;
        float maximum = -INFINITY;
        for (int span = 0; span < joint.spans; span++) maximum = fmaxf(maximum, extremes[row + span * step].x);
        float sum = 0.f;
        float total = 0.f;
        for (int span = 0; span < joint.spans; span++) {
            const float2 extreme = extremes[row + span * step];
            const float factor = power_of_two(extreme.x - maximum);
            sum = fmaf(factor, sums[(row + span * step) * HEAD + d], sum);
            total = fmaf(factor, extreme.y, total);
        }
        const size_t token = segment.start + joint.first + q;
        const float gate = widen(projected[token * stride + (2 * head + 1) * HEAD + d]);
        out[(token * shape.heads + head) * HEAD + d] = narrow<O>(sum * (1.f / total) * sigmoid_of<P>(gate));
    }
}

#define ATTENTION_MMA(suffix, Q, P, O, HEAD)                                                                    \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS, 2)                                                \
        attention_mma_##suffix##_##HEAD(const Q* query, const P* projected, const bf16* keys,                   \
                                        const bf16* values, O* out, float* sums, float2* extremes,              \
                                        const Work* work, const Segment* segments, const KeyRange* ranges,      \
                                        AttentionShape shape, float scale) {                                    \
        attention_mma<Q, P, O, HEAD>(query, projected, keys, values, out, sums, extremes, work, segments,       \
                                     ranges, shape, scale);                                                     \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(HEAD)                                                          \
        attention_merge_##suffix##_##HEAD(const P* projected, O* out, const float* sums,                        \
                                          const float2* extremes, const Joint* joints, const Segment* segments, \
                                          AttentionShape shape) {                                               \
        attention_merge<P, O, HEAD>(projected, out, sums, extremes, joints, segments, shape);                   \
    }
#define ATTENTION_MMA_SIZES(suffix, Q, P, O)                                                                    \
    ATTENTION_MMA(suffix, Q, P, O, 64)                                                                          \
    ATTENTION_MMA(suffix, Q, P, O, 128)                                                                         \
    ATTENTION_MMA(suffix, Q, P, O, 256)
ATTENTION_MMA_SIZES(ffh, float, float, bf16)
ATTENTION_MMA_SIZES(hhh, bf16, bf16, bf16)
