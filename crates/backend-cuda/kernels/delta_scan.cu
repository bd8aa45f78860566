// Rung 2 of the delta rule, second half: the state through the chunks of a segment, 32 columns of a head a block.
//
// Sixteen warps. First products (K S and Q S): eight warps take keys, eight take queries, 16 tokens and 16 columns each.
// News: 16 tokens and 8 columns a warp. Outputs: the warps that hold Q S. State: 8 rows of S a warp, in registers.

#include "delta_chunks.cuh"

struct ScanShared {
    float key[2][CHUNK][HEAD_PITCH];
    float query[CHUNK][HEAD_PITCH];
    float inverse[CHUNK][CHUNK_PITCH];
    float scores[CHUNK][CHUNK_PITCH];
    float state[SCAN_COLUMNS][HEAD_PITCH];      // S^T, rounded to TF32
    float remains[SCAN_COLUMNS][CHUNK_PITCH];   // (V - e^G K S)^T, rounded
    float news[SCAN_COLUMNS][CHUNK_PITCH];      // N^T, rounded
    float rested[SCAN_COLUMNS][CHUNK_PITCH];    // (e^(G_last - G) N)^T, rounded
    float scalars[2][4][CHUNK];                 // key_decay, query_decay, key_rest, last
};

// For segments of one chunk: half the memory, so that two blocks share a multiprocessor and one's loads hide behind
// the other's products. What is needed first makes room for what is needed later.
struct ShortShared {
    float key[CHUNK][HEAD_PITCH];
    union {
        float query[CHUNK][HEAD_PITCH];
        struct {
            float remains[SCAN_COLUMNS][CHUNK_PITCH];
            float news[SCAN_COLUMNS][CHUNK_PITCH];
            float rested[SCAN_COLUMNS][CHUNK_PITCH];
        };
    };
    float inverse[CHUNK][CHUNK_PITCH];
    union {
        float state[SCAN_COLUMNS][HEAD_PITCH];
        float scores[CHUNK][CHUNK_PITCH];
    };
    float scalars[4][CHUNK];
};

// A thread's share of copying a tile of COLUMNS floats a row: 16 bytes in every STEP-th row.
template <int COLUMNS, int PITCH> struct TileCopy {
    static constexpr int STEP = SCAN_THREADS / (COLUMNS / 4);
    const float* source;
    uint32_t offset;
    int row;
    int stride;

    __device__ __forceinline__ TileCopy(const float* tile, int stride)
        : row(threadIdx.x / (COLUMNS / 4)), stride(stride) {
        const int column = threadIdx.x % (COLUMNS / 4) * 4;
        source = tile + (size_t)row * stride + column;
        offset = (row * PITCH + column) * 4;
    }

    // Copies a tile of CHUNK rows; those from `valid` on become zeros. Then moves on to the next, `next` floats away.
    __device__ __forceinline__ void run(const float* target, int valid, size_t next) {
        const uint32_t address = shared_address(target) + offset;
#pragma unroll
        for (int i = 0; i < CHUNK / STEP; i++) {
            copy16(address + i * STEP * PITCH * 4, source + (size_t)(i * STEP) * stride, row + i * STEP < valid);
        }
        source += next;
    }
};

// What a thread of the scan knows and holds: places in fragments and tiles, and its part of the state.
struct Scanner {
    int warp, lane, group, quad;
    int row0;       // first of the warp's 16 tokens
    int side;       // first of its 16 columns
    bool on_keys;   // K S, else Q S
    // Offsets of a lane's part of a fragment: as left operand, as right operand of 16 columns and 8 terms, and as
    // right operand of 8 columns and 16 terms.
    uint32_t left_head, left_chunk, right_head, right_chunk, right_long;
    float state[2][4];  // S^T: two tiles of 16 columns by the warp's 8 rows of S
    float sum[2][4];    // K S or Q S, then the output

    __device__ __forceinline__ Scanner() {
        warp = threadIdx.x >> 5;
        lane = threadIdx.x & 31;
        group = lane >> 2;
        quad = lane & 3;
        row0 = (warp & 3) * 16;
        side = ((warp >> 2) & 1) * 16;
        on_keys = warp < 8;
        left_head = (lane & 15) * HEAD_PITCH * 4 + (lane >> 4) * 16;
        left_chunk = (lane & 15) * CHUNK_PITCH * 4 + (lane >> 4) * 16;
        const uint32_t right_row = (lane & 7) + ((lane >> 4) << 3);
        right_head = right_row * HEAD_PITCH * 4 + ((lane >> 3) & 1) * 16;
        right_chunk = right_row * CHUNK_PITCH * 4 + ((lane >> 3) & 1) * 16;
        right_long = (lane & 7) * CHUNK_PITCH * 4 + (lane >> 3) * 16;
    }

    // Place of a state element in a slot's [128, value_dim] matrix, from the block's first column on.
    __device__ __forceinline__ size_t state_index(int m, int i, int value_dim) const {
        return (size_t)(warp * 8 + quad * 2 + (i & 1)) * value_dim + m * 16 + group + (i >> 1) * 8;
    }

    __device__ __forceinline__ void load_state(const float* slot, int value_dim) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[m][i] = slot == nullptr ? 0.f : slot[state_index(m, i, value_dim)];
    }

    __device__ __forceinline__ void store_state(float* slot, int value_dim) const {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) slot[state_index(m, i, value_dim)] = state[m][i];
    }

    __device__ __forceinline__ void show_state(float (&tile)[SCAN_COLUMNS][HEAD_PITCH]) const {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                store2(&tile[m * 16 + group + half * 8][warp * 8 + quad * 2], rounded_tf32(state[m][half * 2]),
                       rounded_tf32(state[m][half * 2 + 1]));
            }
    }

    // Values of the elements that the warp's part of V - e^G K S has.
    __device__ __forceinline__ void load_values(float2 (&v)[2][2], const float* values, int stride, int tokens) const {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int token = row0 + group + half * 8;
                const float* source = values + (size_t)token * stride + side + n * 8 + quad * 2;
                v[n][half] = on_keys && token < tokens ? *reinterpret_cast<const float2*>(source) : make_float2(0.f, 0.f);
            }
    }

    // sum = K S or Q S; even and odd steps apart, for twice as many products in flight.
    __device__ __forceinline__ void first_products(const float* rows, const float* state_tile, bool active) {
        float halves[2][2][4];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) halves[h][n][i] = 0.f;
        if (active) {
            const uint32_t left = shared_address(rows) + row0 * HEAD_PITCH * 4 + left_head;
            const uint32_t right = shared_address(state_tile) + side * HEAD_PITCH * 4 + right_head;
#pragma unroll
            for (int k = 0; k < CHUNK_HEAD / 8; k++) {
                uint32_t a[4], b[4];
                load_matrices(a, left + k * 32);
                load_matrices(b, right + k * 32);
                multiply_tf32(halves[k & 1][0], a, b[0], b[1]);
                multiply_tf32(halves[k & 1][1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[n][i] = halves[0][n][i] + halves[1][n][i];
    }

    // Keys' warps: remains = V - e^G K S. Queries' warps: sum = e^G Q S.
    __device__ __forceinline__ void scale(float (&remains)[SCAN_COLUMNS][CHUNK_PITCH], const float (&scalars)[4][CHUNK],
                                          const float2 (&v)[2][2]) {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = row0 + group + (i >> 1) * 8;
                if (on_keys) {
                    const float value = i & 1 ? v[n][i >> 1].y : v[n][i >> 1].x;
                    remains[side + n * 8 + quad * 2 + (i & 1)][token] =
                        rounded_tf32(value - scalars[0][token] * sum[n][i]);
                } else {
                    sum[n][i] *= scalars[1][token];
                }
            }
    }

    // news = T remains, and the same scaled for the state; T is lower triangular.
    __device__ __forceinline__ void make_news(const float* inverse, const float* remains,
                                              float (&news)[SCAN_COLUMNS][CHUNK_PITCH],
                                              float (&rested)[SCAN_COLUMNS][CHUNK_PITCH],
                                              const float (&scalars)[4][CHUNK], bool active) const {
        float made[4] = {0.f, 0.f, 0.f, 0.f};
        const int column = (warp >> 2) * 8;
        if (active) {
            const uint32_t left = shared_address(inverse) + row0 * CHUNK_PITCH * 4 + left_chunk;
            const uint32_t right = shared_address(remains) + column * CHUNK_PITCH * 4 + right_long;
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) {
                if (k * 16 > row0) break;
                uint32_t a[2][4], b[4];
                load_matrices(a[0], left + k * 64);
                load_matrices(a[1], left + k * 64 + 32);
                load_matrices(b, right + k * 64);
                multiply_tf32(made, a[0], b[0], b[1]);
                multiply_tf32(made, a[1], b[2], b[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = row0 + group + (i >> 1) * 8;
            const int row = column + quad * 2 + (i & 1);
            news[row][token] = rounded_tf32(made[i]);
            rested[row][token] = rounded_tf32(made[i] * scalars[2][token]);
        }
    }

    // sum += P news; then the rows before `tokens` go out. `out` is the block's first column of the chunk's first row.
    template <typename O>
    __device__ __forceinline__ void finish(const float* scores, const float* news, O* out, int width, int tokens) {
        if (on_keys || row0 >= tokens) return;
        const uint32_t left = shared_address(scores) + row0 * CHUNK_PITCH * 4 + left_chunk;
        const uint32_t right = shared_address(news) + side * CHUNK_PITCH * 4 + right_chunk;
#pragma unroll
        for (int k = 0; k < CHUNK / 8; k++) {
            if (k * 8 > row0 + 8) break;
            uint32_t a[4], b[4];
            load_matrices(a, left + k * 32);
            load_matrices(b, right + k * 32);
            multiply_tf32(sum[0], a, b[0], b[1]);
            multiply_tf32(sum[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = row0 + group + half * 8;
            if (token >= tokens) continue;
            O* target = out + (size_t)token * width + side + quad * 2;
#pragma unroll
            for (int n = 0; n < 2; n++) store2(target + n * 8, sum[n][half * 2], sum[n][half * 2 + 1]);
        }
    }

    // state = e^(G_last) state + rested K.
    __device__ __forceinline__ void update_state(const float* rested, const float (&key)[CHUNK][HEAD_PITCH], float last,
                                                 int tokens) {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[m][i] *= last;
        const uint32_t left = shared_address(rested) + left_chunk;
        const float* right = &key[quad][warp * 8 + group];
#pragma unroll
        for (int k = 0; k < CHUNK / 8; k++) {
            if (k * 8 >= tokens) break;
            uint32_t a[2][4];
            load_matrices(a[0], left + k * 32);
            load_matrices(a[1], left + 16 * CHUNK_PITCH * 4 + k * 32);
            const uint32_t b0 = __float_as_uint(right[k * 8 * HEAD_PITCH]);
            const uint32_t b1 = __float_as_uint(right[(k * 8 + 4) * HEAD_PITCH]);
            multiply_tf32(state[0], a[0], b0, b1);
            multiply_tf32(state[1], a[1], b0, b1);
        }
    }
};

struct ChunkShape {
    int key_heads;
    int value_heads;
    int value_dim;
    int reserved;
};

// Segments of several chunks. states [slots, value heads, 128, value_dim]; out [rows, value heads * value_dim].
// Grid: (value_dim / 32, value heads, segments of the level); segments of one chunk are left to `delta_scan_short`.
template <typename O>
__device__ __forceinline__ void delta_scan(const float* qkv, const Prepared* prepared, float* states, O* out,
                                           const Segment* segments, ChunkShape shape) {
    extern __shared__ __align__(16) unsigned char scan_raw[];
    ScanShared& s = *reinterpret_cast<ScanShared*>(scan_raw);
    const Segment segment = segments[blockIdx.z];
    if (segment.len <= CHUNK) return;
    const int head = blockIdx.y;
    const int key_head = head / (shape.value_heads / shape.key_heads);
    const int key_width = shape.key_heads * CHUNK_HEAD;
    const int out_width = shape.value_heads * shape.value_dim;
    const int stride = 2 * key_width + out_width;
    const int column0 = blockIdx.x * SCAN_COLUMNS;
    const int chunks = (segment.len + CHUNK - 1) / CHUNK;
    Scanner me;

    const float* rows = qkv + (size_t)segment.start * stride;
    const float* values = rows + 2 * key_width + head * shape.value_dim + column0;
    const Prepared* parts = prepared + (size_t)segment.first_chunk * shape.value_heads + head;
    const size_t next_rows = (size_t)CHUNK * stride;
    const size_t next_part = (size_t)shape.value_heads * sizeof(Prepared) / 4;
    TileCopy<CHUNK_HEAD, HEAD_PITCH> query_copy(rows + key_head * CHUNK_HEAD, stride);
    TileCopy<CHUNK_HEAD, HEAD_PITCH> key_copy(rows + key_width + key_head * CHUNK_HEAD, stride);
    TileCopy<CHUNK, CHUNK_PITCH> inverse_copy(&parts->inverse[0][0], CHUNK);
    TileCopy<CHUNK, CHUNK_PITCH> scores_copy(&parts->scores[0][0], CHUNK);
    const float* scalars = parts->key_decay;

    auto copy_keys = [&](int chunk) {
        if (chunk < chunks) {
            key_copy.run(&s.key[chunk & 1][0][0], segment.len - chunk * CHUNK, next_rows);
            if (threadIdx.x < CHUNK) {
                copy16(shared_address(&s.scalars[chunk & 1][0][0] + threadIdx.x * 4), scalars + threadIdx.x * 4, true);
            }
            scalars += next_part;
        }
        commit_copies();
    };
    auto copy_queries = [&](int chunk) {
        if (chunk < chunks) query_copy.run(&s.query[0][0], segment.len - chunk * CHUNK, next_rows);
        commit_copies();
    };
    auto copy_inverse = [&](int chunk) {
        if (chunk < chunks) inverse_copy.run(&s.inverse[0][0], CHUNK, next_part);
        commit_copies();
    };
    auto copy_scores = [&](int chunk) {
        if (chunk < chunks) scores_copy.run(&s.scores[0][0], CHUNK, next_part);
        commit_copies();
    };
    copy_keys(0);
    copy_queries(0);
    copy_inverse(0);
    copy_scores(0);
    float2 v[2][2];
    me.load_values(v, values, stride, segment.len);
    const size_t slot_size = (size_t)shape.value_heads * CHUNK_HEAD * shape.value_dim;
    float* const state_base = states + (size_t)head * CHUNK_HEAD * shape.value_dim + column0;
    me.load_state(segment.initial < 0 ? nullptr : state_base + segment.initial * slot_size, shape.value_dim);
    me.show_state(s.state);
    O* target = out + (size_t)segment.start * out_width + head * shape.value_dim + column0;

    for (int chunk = 0; chunk < chunks; chunk++) {
        const int buffer = chunk & 1;
        const int tokens = min(CHUNK, segment.len - chunk * CHUNK);
        const bool active = me.row0 < tokens;
        wait_for_copies<2>();  // keys and queries are here; inverse and scores may still come
        __syncthreads();
        copy_keys(chunk + 1);
        me.first_products(me.on_keys ? &s.key[buffer][0][0] : &s.query[0][0], &s.state[0][0], active);
        me.scale(s.remains, s.scalars[buffer], v);
        wait_for_copies<2>();  // the inverse is here
        __syncthreads();
        copy_queries(chunk + 1);
        values += next_rows;
        if (chunk + 1 < chunks) me.load_values(v, values, stride, segment.len - (chunk + 1) * CHUNK);
        me.make_news(&s.inverse[0][0], &s.remains[0][0], s.news, s.rested, s.scalars[buffer], active);
        wait_for_copies<2>();  // the scores are here
        __syncthreads();
        copy_inverse(chunk + 1);
        me.finish(&s.scores[0][0], &s.news[0][0], target, out_width, tokens);
        target += (size_t)CHUNK * out_width;
        if (chunk + 1 < chunks || segment.last >= 0) {
            me.update_state(&s.rested[0][0], s.key[buffer], s.scalars[buffer][3][0], tokens);
        }
        if (chunk + 1 < chunks) me.show_state(s.state);
        __syncthreads();
        copy_scores(chunk + 1);
    }
    if (segment.last >= 0) me.store_state(state_base + segment.last * slot_size, shape.value_dim);
}

// Segments of one chunk: the same products in the same order, so the same bits.
template <typename O>
__device__ __forceinline__ void delta_scan_short(const float* qkv, const Prepared* prepared, float* states, O* out,
                                                 const Segment* segments, ChunkShape shape) {
    extern __shared__ __align__(16) unsigned char short_raw[];
    ShortShared& s = *reinterpret_cast<ShortShared*>(short_raw);
    const Segment segment = segments[blockIdx.z];
    const int tokens = segment.len;
    if (tokens > CHUNK || tokens == 0) return;
    const int head = blockIdx.y;
    const int key_head = head / (shape.value_heads / shape.key_heads);
    const int key_width = shape.key_heads * CHUNK_HEAD;
    const int out_width = shape.value_heads * shape.value_dim;
    const int stride = 2 * key_width + out_width;
    const int column0 = blockIdx.x * SCAN_COLUMNS;
    Scanner me;
    const bool active = me.row0 < tokens;

    const float* rows = qkv + (size_t)segment.start * stride;
    const Prepared* part = prepared + (size_t)segment.first_chunk * shape.value_heads + head;
    TileCopy<CHUNK_HEAD, HEAD_PITCH>(rows + key_width + key_head * CHUNK_HEAD, stride).run(&s.key[0][0], tokens, 0);
    TileCopy<CHUNK_HEAD, HEAD_PITCH>(rows + key_head * CHUNK_HEAD, stride).run(&s.query[0][0], tokens, 0);
    if (threadIdx.x < CHUNK) {
        copy16(shared_address(&s.scalars[0][0] + threadIdx.x * 4), part->key_decay + threadIdx.x * 4, true);
    }
    commit_copies();
    TileCopy<CHUNK, CHUNK_PITCH>(&part->inverse[0][0], CHUNK).run(&s.inverse[0][0], CHUNK, 0);
    commit_copies();
    const size_t slot_size = (size_t)shape.value_heads * CHUNK_HEAD * shape.value_dim;
    float* const state_base = states + (size_t)head * CHUNK_HEAD * shape.value_dim + column0;
    me.load_state(segment.initial < 0 ? nullptr : state_base + segment.initial * slot_size, shape.value_dim);
    float2 v[2][2];
    me.load_values(v, rows + 2 * key_width + head * shape.value_dim + column0, stride, tokens);
    me.show_state(s.state);
    wait_for_copies<1>();
    __syncthreads();
    me.first_products(me.on_keys ? &s.key[0][0] : &s.query[0][0], &s.state[0][0], active);
    __syncthreads();  // queries and the state have made room
    TileCopy<CHUNK, CHUNK_PITCH>(&part->scores[0][0], CHUNK).run(&s.scores[0][0], CHUNK, 0);
    commit_copies();
    me.scale(s.remains, s.scalars, v);
    wait_for_copies<1>();
    __syncthreads();
    me.make_news(&s.inverse[0][0], &s.remains[0][0], s.news, s.rested, s.scalars, active);
    wait_for_copies<0>();
    __syncthreads();
    me.finish(&s.scores[0][0], &s.news[0][0], out + (size_t)segment.start * out_width + head * shape.value_dim + column0,
              out_width, tokens);
    if (segment.last >= 0) {
        me.update_state(&s.rested[0][0], s.key, s.scalars[3][0], tokens);
        me.store_state(state_base + segment.last * slot_size, shape.value_dim);
    }
}

#define DELTA_SCAN(suffix, O)                                                                                   \
    extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 1)                                               \
        delta_scan_##suffix(const float* qkv, const Prepared* prepared, float* states, O* out,                  \
                            const Segment* segments, ChunkShape shape) {                                        \
        delta_scan<O>(qkv, prepared, states, out, segments, shape);                                             \
    }                                                                                                           \
    extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 2)                                               \
        delta_scan_short_##suffix(const float* qkv, const Prepared* prepared, float* states, O* out,            \
                                  const Segment* segments, ChunkShape shape) {                                  \
        delta_scan_short<O>(qkv, prepared, states, out, segments, shape);                                       \
    }
DELTA_SCAN(f, float)
DELTA_SCAN(h, bf16)
