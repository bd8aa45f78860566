// Rung 2 of the delta rule, first half: what the chunks of a pass need apart from the state, all at once.
#include "delta_chunks.cuh"

struct PrepareShared {
    float key[CHUNK][HEAD_PITCH];
    float query[CHUNK][HEAD_PITCH];
    float lower[CHUNK][CHUNK_PITCH];    // A
    float inverse[CHUNK][CHUNK_PITCH];  // (I + A)^-1
    float product[CHUNK / 2][CHUNK / 2 + 4];
    float beta[CHUNK];
    float sums[CHUNK];  // G, in powers of two
    float key_scale[CHUNK];
    float query_scale[CHUNK];
};

template <int N> struct __align__(4 * N) Lanes {
    float v[N];
};

// Joins inverses of pairs of neighbouring diagonal blocks of HALF rows: the lower left part becomes
// -(inverse right) (lower left part) (inverse left). Every thread makes a few neighbouring elements.
template <int HALF> __device__ __forceinline__ void join_inverses(PrepareShared& s) {
    constexpr int WIDTH = CHUNK / 2 * HALF / PREPARE_THREADS;
    const int block = threadIdx.x * WIDTH / (HALF * HALF);
    const int i = threadIdx.x * WIDTH / HALF % HALF;
    const int j = threadIdx.x * WIDTH % HALF;
    const int top = block * 2 * HALF;
    float sum[WIDTH];
#pragma unroll
    for (int x = 0; x < WIDTH; x++) sum[x] = 0.f;
#pragma unroll
    for (int k = 0; k < HALF; k += 4) {
        const float4 left = load4(&s.lower[top + HALF + i][top + k]);
        const float lefts[4] = {left.x, left.y, left.z, left.w};
#pragma unroll
        for (int l = 0; l < 4; l++) {
            const Lanes<WIDTH> right = *reinterpret_cast<const Lanes<WIDTH>*>(&s.inverse[top + k + l][top + j]);
#pragma unroll
            for (int x = 0; x < WIDTH; x++) sum[x] = fmaf(lefts[l], right.v[x], sum[x]);
        }
    }
#pragma unroll
    for (int x = 0; x < WIDTH; x++) {
        s.product[block * HALF + i][j + x] = sum[x];
        sum[x] = 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < HALF; k += 4) {
        const float4 left = load4(&s.inverse[top + HALF + i][top + HALF + k]);
        const float lefts[4] = {-left.x, -left.y, -left.z, -left.w};
#pragma unroll
        for (int l = 0; l < 4; l++) {
            const Lanes<WIDTH> right = *reinterpret_cast<const Lanes<WIDTH>*>(&s.product[block * HALF + k + l][j]);
#pragma unroll
            for (int x = 0; x < WIDTH; x++) sum[x] = fmaf(lefts[l], right.v[x], sum[x]);
        }
    }
#pragma unroll
    for (int x = 0; x < WIDTH; x++) s.inverse[top + HALF + i][top + j + x] = sum[x];
    __syncthreads();
}

// Inverts I + lower in FP32: diagonal blocks of 16 by substitution, a column a lane, then pairs of blocks, then the
// two halves. The upper right part of `inverse` is zero already.
__device__ __forceinline__ void invert(PrepareShared& s) {
    const int warp = threadIdx.x >> 5;
    const int lane = threadIdx.x & 31;
    if (warp < 4 && lane < 16) {
        const int base = warp * 16;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = i == lane ? 1.f : 0.f;
#pragma unroll
            for (int k = 0; k < i; k += 4) {
                const float4 left = load4(&s.lower[base + i][base + k]);
                sum = fmaf(-left.x, x[k], sum);
                if (k + 1 < i) sum = fmaf(-left.y, x[k + 1], sum);
                if (k + 2 < i) sum = fmaf(-left.z, x[k + 2], sum);
                if (k + 3 < i) sum = fmaf(-left.w, x[k + 3], sum);
            }
            x[i] = sum;
            s.inverse[base + i][base + lane] = sum;
        }
    }
    __syncthreads();
    join_inverses<16>(s);
    join_inverses<32>(s);
}

// qkv [rows, q | k | v]; gates [rows, beta | decay]; prepared [chunks, value heads].
// Grid: (chunks, value heads / heads). A block makes `heads` value heads, which share their key head.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS, 2)
    delta_prepare(const float* qkv, const float* gates, Prepared* prepared, const Chunk* chunks, const Segment* segments,
                  int key_heads, int value_heads, int value_dim, int heads) {
    extern __shared__ __align__(16) unsigned char prepare_raw[];
    PrepareShared& s = *reinterpret_cast<PrepareShared*>(prepare_raw);
    const Chunk chunk = chunks[blockIdx.x];
    if (chunk.x < 0) return;  // padding of a shape class
    const Segment segment = segments[chunk.x];
    const int tokens = min(CHUNK, segment.len - chunk.y);
    const size_t first = segment.start + chunk.y;
    const int key_head = blockIdx.y * heads / (value_heads / key_heads);
    const int key_width = key_heads * CHUNK_HEAD;
    const int stride = 2 * key_width + value_heads * value_dim;
    const int warp = threadIdx.x >> 5;
    const int lane = threadIdx.x & 31;
    const int group = lane >> 2;
    const int quad = lane & 3;

    {
        const int row = threadIdx.x / (CHUNK_HEAD / 4);
        const int column = threadIdx.x % (CHUNK_HEAD / 4) * 4;
        constexpr int STEP = PREPARE_THREADS / (CHUNK_HEAD / 4);
        const float* source = qkv + (first + row) * stride + key_head * CHUNK_HEAD + column;
#pragma unroll
        for (int i = 0; i < CHUNK / STEP; i++) {
            const bool valid = row + i * STEP < tokens;
            copy16(shared_address(&s.query[row + i * STEP][column]), source + (size_t)i * STEP * stride, valid);
            copy16(shared_address(&s.key[row + i * STEP][column]), source + (size_t)i * STEP * stride + key_width, valid);
        }
        commit_copies();
    }
    for (int i = threadIdx.x; i < CHUNK * CHUNK_PITCH / 4; i += PREPARE_THREADS) {
        store4(&s.inverse[0][0] + i * 4, make_float4(0.f, 0.f, 0.f, 0.f));
    }
    wait_for_copies<0>();
    __syncthreads();
    {
        // Norms: four lanes a token.
        const int token = warp * 8 + group;
        float kk = 0.f, qq = 0.f;
#pragma unroll
        for (int i = 0; i < CHUNK_HEAD / 16; i++) {
            const float4 k = load4(&s.key[token][i * 16 + quad * 4]);
            const float4 q = load4(&s.query[token][i * 16 + quad * 4]);
            kk = fmaf(k.x, k.x, fmaf(k.y, k.y, fmaf(k.z, k.z, fmaf(k.w, k.w, kk))));
            qq = fmaf(q.x, q.x, fmaf(q.y, q.y, fmaf(q.z, q.z, fmaf(q.w, q.w, qq))));
        }
#pragma unroll
        for (int offset = 1; offset < 4; offset <<= 1) {
            kk += __shfl_xor_sync(0xffffffffu, kk, offset);
            qq += __shfl_xor_sync(0xffffffffu, qq, offset);
        }
        if (quad == 0) {
            s.key_scale[token] = 1.f / sqrtf(kk + 1e-6f);
            s.query_scale[token] = 1.f / sqrtf(qq + 1e-6f) / sqrtf((float)CHUNK_HEAD);
        }
    }

    // A warp makes 16 rows and 32 columns of both products.
    const int row0 = (warp & 3) * 16;
    const int column0 = (warp >> 2) * 32;
    float kk[4][4], qk[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) kk[n][i] = qk[n][i] = 0.f;
    if (column0 < row0 + 16) {
        const uint32_t rows = (row0 + (lane & 15)) * HEAD_PITCH * 4 + (lane >> 4) * 16;
        const uint32_t columns = (column0 + (lane & 7) + ((lane >> 4) << 3)) * HEAD_PITCH * 4 + ((lane >> 3) & 1) * 16;
        const uint32_t keys = shared_address(s.key);
        const uint32_t queries = shared_address(s.query);
#pragma unroll 8
        for (int k = 0; k < CHUNK_HEAD / 8; k++) {
            uint32_t a[4], b[4], c[2][4];
            load_matrices(a, keys + rows + k * 32);
            load_matrices(b, queries + rows + k * 32);
            load_matrices(c[0], keys + columns + k * 32);
            load_matrices(c[1], keys + columns + 16 * HEAD_PITCH * 4 + k * 32);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                multiply_tf32(kk[n], a, c[n >> 1][(n & 1) * 2], c[n >> 1][(n & 1) * 2 + 1]);
                multiply_tf32(qk[n], b, c[n >> 1][(n & 1) * 2], c[n >> 1][(n & 1) * 2 + 1]);
            }
        }
    }

    for (int one = 0; one < heads; one++) {
        const int head = blockIdx.y * heads + one;
        Prepared& target = prepared[(size_t)blockIdx.x * value_heads + head];
        if (warp == 0) {
            // Inclusive sums over 64 tokens, two a lane; past the end nothing decays and nothing is written.
            float decay[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int token = lane * 2 + i;
                const float* gate = gates + (first + (token < tokens ? token : 0)) * 2 * value_heads + head;
                s.beta[token] = token < tokens ? gate[0] : 0.f;
                decay[i] = token < tokens ? gate[value_heads] * LOG2_E : 0.f;
            }
            float sum = decay[0] + decay[1];
#pragma unroll
            for (int offset = 1; offset < 32; offset <<= 1) {
                const float other = __shfl_up_sync(0xffffffffu, sum, offset);
                if (lane >= offset) sum += other;
            }
            s.sums[lane * 2] = sum - decay[1];
            s.sums[lane * 2 + 1] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = row0 + group + half * 8;
            const float sum = s.sums[i];
            const float key_scale = s.beta[i] * s.key_scale[i];
            const float query_scale = s.query_scale[i];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int j = column0 + n * 8 + quad * 2;
                float score[2], lower[2];
#pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    const float decay = j + pair <= i ? exp2f(sum - s.sums[j + pair]) * s.key_scale[j + pair] : 0.f;
                    lower[pair] = j + pair < i ? key_scale * decay * kk[n][half * 2 + pair] : 0.f;
                    score[pair] = rounded_tf32(query_scale * decay * qk[n][half * 2 + pair]);
                }
                *reinterpret_cast<float2*>(&s.lower[i][j]) = make_float2(lower[0], lower[1]);
                *reinterpret_cast<float2*>(&target.scores[i][j]) = make_float2(score[0], score[1]);
            }
        }
        if (threadIdx.x < CHUNK) {
            const int i = threadIdx.x;
            const float last = s.sums[CHUNK - 1];
            target.key_decay[i] = exp2f(s.sums[i]) * s.key_scale[i];
            target.query_decay[i] = exp2f(s.sums[i]) * s.query_scale[i];
            target.key_rest[i] = exp2f(last - s.sums[i]) * s.key_scale[i];
            target.last[i] = exp2f(last);
        }
        __syncthreads();
        invert(s);
        for (int item = threadIdx.x; item < CHUNK * CHUNK / 4; item += PREPARE_THREADS) {
            const int i = item / (CHUNK / 4);
            const int j = item % (CHUNK / 4) * 4;
            const float4 t = load4(&s.inverse[i][j]);
            store4(&target.inverse[i][j],
                   make_float4(rounded_tf32(t.x * s.beta[j]), rounded_tf32(t.y * s.beta[j + 1]),
                               rounded_tf32(t.z * s.beta[j + 2]), rounded_tf32(t.w * s.beta[j + 3])));
        }
        __syncthreads();
    }
}
