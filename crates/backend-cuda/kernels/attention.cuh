// Causal attention over a tree, output gate fused.
//
// A tile is 16 consecutive queries of one segment. Keys are visited in blocks of 32 absolute positions of the
// sequence, wherever their arena rows lie, and a masked key adds exact zeros; so a query's bits depend on its position
// and its sequence only, not on the tile, the split of the keys into ranges or the split of the text into passes.
#pragma once

#include "common.cuh"

constexpr int TILE_QUERIES = 16;
constexpr int BLOCK_KEYS = 32;

// A tile of queries: segment and the first query inside it.
typedef int2 Tile;

// Arena row of a position of the segment's sequence.
__device__ __forceinline__ int key_row(const KeyRange* ranges, int count, int position) {
    for (int i = 0; i < count; i++) {
        const int offset = position - ranges[i].position;
        if (offset < ranges[i].len) return ranges[i].row + offset;
    }
    return -1;
}
