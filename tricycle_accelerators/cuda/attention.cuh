// What the attention kernels share: which keys a query sees, and how arguments describe the arrays.
//
// q: (B, T, H, D). k, v: (B, S, H, D). Scores are q k^T / sqrt(D), for query t of the keys up to t + offset, plus a
// mask. Arrays are strided, but for their last axis; steps are in elements. log_total: (B, H, T), natural logs of the
// sums of exponentials, -inf where a query sees no key.
#pragma once
#include "common.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Steps {  // from one item, token and head to the next
    i64 item, token, head;

    template <class T> __device__ T* start(T* array, int b, int h) const { return array + b * item + h * head; }
};

struct Sizes {
    int n_items, n_queries, n_keys, n_heads, size;
    int causal, offset, nothing;  // offset counts where causal; nothing: one more key with a score of 0
    float scale;  // 1 / sqrt(D)

    // The number of keys that queries up to `last` see, without the mask.
    __device__ int seen_by(int last) const {
        if (!causal) return n_keys;
        const int end = last + offset + 1;
        return end < 0 ? 0 : end < n_keys ? end : n_keys;
    }

    // The first query that sees a key.
    __device__ int first_to_see(int key) const { return causal && key > offset ? key - offset : 0; }

    __device__ bool hides(int query, int key) const {
        return key >= n_keys || query >= n_queries || (causal && key > query + offset);
    }
};

// A mask is added to the scores: (B or 1, H or 1, T or 1, S), 0 as the step of an axis of length 1; null: no mask.
struct Mask {
    const float* values;
    i64 item, head, query;

    __device__ Mask at(int b, int h) const { return {values ? values + b * item + h * head : values, 0, 0, query}; }
    __device__ float of(int row, int key) const { return values ? values[row * query + key] : 0.0f; }
};

// A block works on one tile of one head of one item. Tiles of a head follow each other, so that what they share stays
// in the second-level cache; where `last_first`, the last tile, which sees most, begins.
struct Place {
    int tile, item, head;

    __device__ Place(int n_tiles, int n_heads, bool last_first) {
        const unsigned both = blockIdx.x / n_tiles, at = blockIdx.x % n_tiles;
        tile = last_first ? n_tiles - 1 - at : at;
        item = both / n_heads;
        head = both % n_heads;
    }
};
