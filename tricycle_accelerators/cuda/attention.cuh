// What the attention kernels share: which keys a query sees, how scores are made, how arguments describe the arrays.
//
// q: (B, T, H, D). k, v: (B, S, K, D), where H is a multiple of K and query head h uses key head h / (H / K). Scores are
// scale q k^T, perhaps capped, plus a mask; query t sees the keys up to t + offset, and of these perhaps only the last
// so many, the window. Arrays are strided, but for their last axis; strides are in elements.
// logsumexp: (B, H, T), natural logs of the sums of exponentials, -inf where a query sees no key.
#pragma once
#include "common.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct Strides {  // from one item, token and head to the next
    i64 item, token, head;

    template <class T> __device__ T* start(T* array, int b, int h) const { return array + b * item + h * head; }
};

struct Sizes {
    int n_items, n_queries, n_keys, n_heads, n_key_heads, size;
    int causal, offset, window, nothing;  // offset and window count where causal; window 0: no window;
                                          // nothing: one more key with a score of 0
    float scale, cap;                     // cap 0: scores are not capped

    __device__ int heads_per_key() const { return n_heads / n_key_heads; }

    // The number of keys that queries up to `last` see, without the mask; where there is a window, from which on.
    __device__ int seen_by(int last) const {
        if (!causal) return n_keys;
        const int end = last + offset + 1;
        return end < 0 ? 0 : end < n_keys ? end : n_keys;
    }

    // The first key that queries from `first` on see, if they see any.
    __device__ int seen_from(int first) const {
        const int begin = first + offset - window + 1;
        return window && begin > 0 ? begin : 0;
    }

    // The first query that sees a key.
    __device__ int first_to_see(int key) const { return causal && key > offset ? key - offset : 0; }

    // The first query after those that see a key.
    __device__ int end_of_seeing(int key) const {
        const int end = key - offset + window;
        return window && end < n_queries ? end : n_queries;
    }

    __device__ bool hides(int query, int key) const {
        const int distance = query + offset - key;
        return key >= n_keys || query >= n_queries || (causal && distance < 0) || (window && distance >= window);
    }

};

// tanh, with an error of 1e-7 of 1 and few registers.
__device__ inline float quick_tanh(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }

// Products q . k such that `scale` times them are capped scores.
template <int N, int M> __device__ inline void cap_products(float (&products)[N][M], const Sizes& s) {
    const float before = s.scale / s.cap, after = s.cap / s.scale;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < M; ++i) products[n][i] = after * quick_tanh(before * products[n][i]);
}

// The same, and the gradients of capped scores become those of the ones before the cap.
template <int N, int M>
__device__ inline void cap_products(float (&products)[N][M], float (&slopes)[N][M], const Sizes& s) {
    const float before = s.scale / s.cap, after = s.cap / s.scale;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const float share = quick_tanh(before * products[n][i]);
            products[n][i] = after * share;
            slopes[n][i] *= 1.0f - share * share;
        }
}

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
