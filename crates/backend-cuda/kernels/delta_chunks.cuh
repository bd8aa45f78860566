// The gated delta rule in chunks of 64 tokens on tensor cores (TF32 operands, FP32 sums), for head shapes of 128.
//
// With G the inclusive sums of the decays inside a chunk, k and q normalised, and S the state before it:
//     A = strictly lower part of beta_i (k_i . k_j) e^(G_i - G_j);  T = (I + A)^-1 diag(beta)
//     N = T (V - e^G K S);  O = e^G Q S + P N  with P = lower part of (q_i . k_j) e^(G_i - G_j)
//     S <- e^(G_last) S + (e^(G_last - G) K)^T N
// Rung 2 splits this: `delta_prepare` makes T and P of all chunks at once (the inverse in FP32), `delta_scan` carries
// the state through the chunks of a segment, one block for 32 columns of a head's state. Norms of q and k are row
// scales of products, so q and k are read as the convolution left them: already rounded to TF32 (`conv.cu`).
//
// Chunks start at the segment's start, so a text split at a multiple of 64 tokens gives the same bits.
#pragma once

#include "common.cuh"

constexpr int CHUNK = 64;
constexpr int CHUNK_HEAD = 128;
constexpr int PREPARE_THREADS = 256;
constexpr int SCAN_THREADS = 512;
constexpr int SCAN_COLUMNS = 32;
// Rows of tiles are 16 bytes apart modulo 128, so that the eight rows of a fragment lie in different banks.
constexpr int HEAD_PITCH = CHUNK_HEAD + 4;
constexpr int CHUNK_PITCH = CHUNK + 4;
constexpr float LOG2_E = 1.4426950408889634f;

// What `delta_prepare` leaves for one chunk and head.
struct Prepared {
    float inverse[CHUNK][CHUNK];  // T, rounded to TF32
    float scores[CHUNK][CHUNK];   // P, rounded to TF32
    float key_decay[CHUNK];       // e^(G_i) / |k_i|
    float query_decay[CHUNK];     // e^(G_i) / |q_i| / sqrt(key_dim)
    float key_rest[CHUNK];        // e^(G_last - G_i) / |k_i|
    float last[CHUNK];            // e^(G_last), everywhere
};

// A chunk of the pass: its segment and its first row inside that.
typedef int2 Chunk;

