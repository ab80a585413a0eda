// Attention on tensor cores, for 16-bit arrays: the mathematics of attention.cu, with exponentials to base 2.
//
// Four warps work on a tile of 64 queries (or, for dk and dv, 64 keys); each has 16 rows. Products of scores stay in
// registers: the layout in which a warp holds sums is that of a left matrix, so weights multiply values without going
// through memory. The other side comes in tiles through shared memory, where rows have 16 bytes more than they need, so
// that the eight rows of a small matrix lie in different banks. The tile after the next is on its way meanwhile.
// Source: Dao 2023, "FlashAttention-2". As in attention.cu, no sum is atomic.
//
// Every row must start at a multiple of 16 bytes. D, the head size, is 32, 64, 96 or 128.
#include "attention.cuh"
#include "mma.cuh"

constexpr int WARPS = 4, ROWS = 16 * WARPS;

template <int D> constexpr int WIDTH = D + 8;  // of a row in shared memory

// ROWS_ rows of an array from `first` on, and zeros beyond the last, as part of the current group.
template <int D, int ROWS_, class T>
__device__ inline void fetch(T* to, const T* from, i64 step, int first, int n) {
    constexpr int PACKS = D / 8;
    for (int at = threadIdx.x; at < ROWS_ * PACKS; at += WARPS * 32) {
        const int row = at / PACKS, i = at % PACKS * 8;
        const bool there = first + row < n;
        copy_later(to + row * WIDTH<D> + i, there ? from + (first + row) * step + i : from, there);
    }
}

// The left matrix that starts at (row, column) of a tile.
template <int D, class T> __device__ inline Left left_matrix(const T* tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    Left a;
    load_matrices<false>(a.part, tile + (row + lane % 16) * WIDTH<D> + column + lane / 16 * 8);
    return a;
}

// sums (16, COLUMNS) = rows of `left` from `row` on times the transpose of `right` (COLUMNS, D).
template <int D, int COLUMNS, class T>
__device__ inline void scores_of(float (&sums)[COLUMNS / 8][4], const T* left, int row, const T* right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        const Left a = left_matrix<D>(left, row, d);
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            unsigned b[4];  // rows n to n + 7 for d to d + 7 and d + 8 to d + 15, then the next eight rows
            load_matrices<false>(b, right + (n + lane / 16 * 8 + lane % 8) * WIDTH<D> + d + lane / 8 % 2 * 8);
            multiply_add(sums[n / 8], a, b[0], b[1], T());
            multiply_add(sums[n / 8 + 1], a, b[2], b[3], T());
        }
    }
}

// sums (16, D) += weights (16, TERMS) times `right` (TERMS, D).
template <int D, int TERMS, class T>
__device__ inline void apply_weights(float (&sums)[D / 8][4], const float (&weights)[TERMS / 8][4], const T* right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < TERMS; k += 16) {
        const float(&low)[4] = weights[k / 8], (&high)[4] = weights[k / 8 + 1];
        const Left a = {{two<T>(low[0], low[1]), two<T>(low[2], low[3]), two<T>(high[0], high[1]),
                         two<T>(high[2], high[3])}};
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            unsigned b[4];  // terms k to k + 7 and k + 8 to k + 15 for columns d to d + 7, then for the next eight
            load_matrices<true>(b, right + (k + lane % 16) * WIDTH<D> + d + lane / 16 * 8);
            multiply_add(sums[d / 8], a, b[0], b[1], T());
            multiply_add(sums[d / 8 + 1], a, b[2], b[3], T());
        }
    }
}

// Over the four lanes that hold a row.
template <class How> __device__ inline float over_row(float value) {
    value = How::join(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return How::join(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Adds the mask of two rows to the scores of the keys before their ends, the first of this lane's being `key`.
template <int TILES>
__device__ inline void add_mask(
    float (&scores)[TILES][4], const float* const (&masked)[2], const int (&ends)[2], int key
) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (key + 8 * n + i % 2 < ends[i / 2]) scores[n][i] += masked[i / 2][key + 8 * n + i % 2] * LOG2_E;
}

// Rows `row` (and 8 further) of sums (16, D), each times its factor; `to` is where the tile's first row goes.
template <int D, class T>
__device__ inline void write_rows(
    const float (&sums)[D / 8][4], const float (&factors)[2], T* to, i64 step, int row, int n_left
) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (row + 8 * half < n_left)
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                *reinterpret_cast<unsigned*>(to + (row + 8 * half) * step + 8 * n + column) =
                    two<T>(sums[n][2 * half] * factors[half], sums[n][2 * half + 1] * factors[half]);
            }
}

// Dynamic shared memory: (ROWS + 4 KEYS) WIDTH numbers.
template <class T, int D, int KEYS>
__global__ void __launch_bounds__(WARPS * 32, 2) attention_mma(
    const T* q, const T* k, const T* v, T* out, float* logsumexp, const Sizes s, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides out_strides, const Mask mask
) {
    constexpr int TILE = KEYS * WIDTH<D>;
    extern __shared__ __align__(16) unsigned char shared[];
    T *queries = reinterpret_cast<T*>(shared), *keys = queries + ROWS * WIDTH<D>, *values = keys + 2 * TILE;
    const Place at((s.n_queries + ROWS - 1) / ROWS, s.n_heads, s.causal);
    const int first = at.tile * ROWS, lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    const int row = own + lane / 4, column = lane % 4 * 2;  // of the first of this lane's four sums
    const int key_head = at.head / s.heads_per_key();
    const T *k_start = k_strides.start(k, at.item, key_head), *v_start = v_strides.start(v, at.item, key_head);
    const Mask hidden = mask.at(at.item, at.head);
    const int last = first + ROWS < s.n_queries ? first + ROWS - 1 : s.n_queries - 1, n_seen = s.seen_by(last);
    // every query of the tile sees the keys from `free_from` to `free_to`
    const int begin = s.seen_from(first) / KEYS * KEYS, free_from = s.seen_from(last), free_to = s.seen_by(first);
    const float to_base_2 = s.scale * LOG2_E;
    float sums[D / 8][4] = {}, largest[2], total[2];
    int begins[2], ends[2];  // the first keys that the two queries see, and the first after them
    const float* masked[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = first + row + 8 * half;
        begins[half] = s.seen_from(query);
        ends[half] = query < s.n_queries ? s.seen_by(query) : 0;
        masked[half] = hidden.values + query * hidden.query;
        largest[half] = s.nothing ? 0.0f : -INFINITY;
        total[half] = s.nothing && lane % 4 == 0 ? 1.0f : 0.0f;  // each lane its own part until the end
    }
    fetch<D, ROWS>(queries, q_strides.start(q, at.item, at.head), q_strides.token, first, s.n_queries);
    fetch<D, KEYS>(keys, k_start, k_strides.token, begin, s.n_keys);
    fetch<D, KEYS>(values, v_start, v_strides.token, begin, s.n_keys);
    end_group();
    for (int start = begin, now = 0; start < n_seen; start += KEYS, now ^= 1) {
        if (start + KEYS < n_seen) {
            fetch<D, KEYS>(keys + (now ^ 1) * TILE, k_start, k_strides.token, start + KEYS, s.n_keys);
            fetch<D, KEYS>(values + (now ^ 1) * TILE, v_start, v_strides.token, start + KEYS, s.n_keys);
        }
        end_group();
        wait_for_groups<1>();
        __syncthreads();  // what every thread asked for is there
        float scores[KEYS / 8][4];
        scores_of<D, KEYS>(scores, queries, own, keys + now * TILE);
        if (s.cap != 0.0f) cap_products(scores, s);
        const bool whole = start >= free_from && start + KEYS <= free_to;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, key = start + 8 * n + column + i % 2;
                const bool seen = whole || (key >= begins[half] && key < ends[half]);
                scores[n][i] = seen ? scores[n][i] * to_base_2 : -INFINITY;
            }
        if (mask.values != nullptr) add_mask(scores, masked, ends, start + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float next = largest[half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) next = fmaxf(next, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            next = over_row<Largest>(next);
            const float by = next == -INFINITY ? 0.0f : next, rescale = exp2f(largest[half] - by);
            largest[half] = next;
            total[half] *= rescale;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2f(scores[n][i] - by);
                    total[half] += scores[n][i];
                }
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                sums[n][2 * half] *= rescale;
                sums[n][2 * half + 1] *= rescale;
            }
        }
        apply_weights<D, KEYS>(sums, scores, values + now * TILE);
        __syncthreads();  // the tile has been read, and another may come in its place
    }
    wait_for_groups<0>();
    const i64 rows = ((i64)at.item * s.n_heads + at.head) * s.n_queries + first;
    float shares[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float whole = over_row<Sum>(total[half]);
        shares[half] = whole == 0 ? 1.0f : 1.0f / whole;
        if (lane % 4 == 0 && first + row + 8 * half < s.n_queries)
            logsumexp[rows + row + 8 * half] = whole == 0 ? -INFINITY : largest[half] * LN_2 + logf(whole);
    }
    T* to = out_strides.start(out, at.item, at.head) + first * out_strides.token;
    write_rows<D>(sums, shares, to, out_strides.token, row, s.n_queries - first);
}

// dk and dv of a tile of 64 keys, which query heads that share them add to one after another: scores are made turned,
// keys down and queries across, so that weights and their gradients are left matrices again.
// Dynamic shared memory: (2 ROWS + 4 QUERIES) WIDTH numbers and 4 QUERIES floats.
template <class T, int D, int QUERIES>
__global__ void __launch_bounds__(WARPS * 32, 2) attention_mma_backward_keys(
    const T* grad, const T* q, const T* k, const T* v, const float* logsumexp, const float* inner, T* dk, T* dv,
    const Sizes s, const Strides grad_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dk_strides, const Strides dv_strides, const Mask mask
) {
    constexpr int TILE = QUERIES * WIDTH<D>;
    extern __shared__ __align__(16) unsigned char shared[];
    T *keys = reinterpret_cast<T*>(shared), *values = keys + ROWS * WIDTH<D>, *queries = values + ROWS * WIDTH<D>;
    T* grads = queries + 2 * TILE;
    float *totals = reinterpret_cast<float*>(grads + 2 * TILE), *inners = totals + 2 * QUERIES;
    const Place at((s.n_keys + ROWS - 1) / ROWS, s.n_key_heads, false);
    const int first = at.tile * ROWS, lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    const int row = own + lane / 4, column = lane % 4 * 2;
    const float to_base_2 = s.scale * LOG2_E;
    float dkeys[D / 8][4] = {}, dvalues[D / 8][4] = {};
    const int begin = s.first_to_see(first) / QUERIES * QUERIES, end = s.end_of_seeing(first + ROWS - 1);
    fetch<D, ROWS>(keys, k_strides.start(k, at.item, at.head), k_strides.token, first, s.n_keys);
    fetch<D, ROWS>(values, v_strides.start(v, at.item, at.head), v_strides.token, first, s.n_keys);
    const int first_head = at.head * s.heads_per_key();
    for (int head = first_head; head < first_head + s.heads_per_key(); ++head) {
        const T *q_start = q_strides.start(q, at.item, head), *grad_start = grad_strides.start(grad, at.item, head);
        const i64 rows = ((i64)at.item * s.n_heads + head) * s.n_queries;
        auto fetch_queries = [&](int start, int where) {
            fetch<D, QUERIES>(queries + where * TILE, q_start, q_strides.token, start, s.n_queries);
            fetch<D, QUERIES>(grads + where * TILE, grad_start, grad_strides.token, start, s.n_queries);
            for (int i = threadIdx.x; i < QUERIES; i += WARPS * 32) {
                const bool there = start + i < s.n_queries;
                const float total = there ? logsumexp[rows + start + i] : -INFINITY;
                totals[where * QUERIES + i] = total == -INFINITY ? 0.0f : total * LOG2_E;
                inners[where * QUERIES + i] = there ? inner[rows + start + i] : 0.0f;
            }
        };
        if (begin < end) fetch_queries(begin, 0);
        end_group();
        for (int start = begin, now = 0; start < end; start += QUERIES, now ^= 1) {
            if (start + QUERIES < end) fetch_queries(start + QUERIES, now ^ 1);
            end_group();
            wait_for_groups<1>();
            __syncthreads();
            float weights[QUERIES / 8][4], slopes[QUERIES / 8][4];
            scores_of<D, QUERIES>(weights, keys, own, queries + now * TILE);
            scores_of<D, QUERIES>(slopes, values, own, grads + now * TILE);
#pragma unroll
            for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) slopes[n][i] -= inners[now * QUERIES + 8 * n + column + i % 2];
            if (s.cap != 0.0f) cap_products(weights, slopes, s);
            // every query of the tile sees all of the keys
            const bool whole = first + ROWS <= s.seen_by(start) && s.seen_from(start + QUERIES - 1) <= first;
            const float* hidden = mask.at(at.item, head).values;
#pragma unroll
            for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int place = 8 * n + column + i % 2, query = start + place, key = first + row + i / 2 * 8;
                    weights[n][i] = weights[n][i] * to_base_2 - totals[now * QUERIES + place];
                    if (!whole && s.hides(query, key)) weights[n][i] = -INFINITY;
                    if (hidden != nullptr && query < s.n_queries && key < s.n_keys)
                        weights[n][i] += hidden[query * mask.query + key] * LOG2_E;
                }
#pragma unroll
            for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    weights[n][i] = exp2f(weights[n][i]);
                    slopes[n][i] *= weights[n][i];
                }
            apply_weights<D, QUERIES>(dvalues, weights, grads + now * TILE);
            apply_weights<D, QUERIES>(dkeys, slopes, queries + now * TILE);
            __syncthreads();
        }
    }
    wait_for_groups<0>();
    const float ones[2] = {1.0f, 1.0f}, scales[2] = {s.scale, s.scale};
    T* to_keys = dk_strides.start(dk, at.item, at.head) + first * dk_strides.token;
    T* to_values = dv_strides.start(dv, at.item, at.head) + first * dv_strides.token;
    write_rows<D>(dkeys, scales, to_keys, dk_strides.token, row, s.n_keys - first);
    write_rows<D>(dvalues, ones, to_values, dv_strides.token, row, s.n_keys - first);
}

// dq of a tile of 64 queries. Dynamic shared memory: (2 ROWS + 4 KEYS) WIDTH numbers.
template <class T, int D, int KEYS>
__global__ void __launch_bounds__(WARPS * 32, 2) attention_mma_backward_queries(
    const T* grad, const T* q, const T* k, const T* v, const float* logsumexp, const float* inner, T* dq,
    const Sizes s, const Strides grad_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dq_strides, const Mask mask
) {
    constexpr int TILE = KEYS * WIDTH<D>;
    extern __shared__ __align__(16) unsigned char shared[];
    T *queries = reinterpret_cast<T*>(shared), *grads = queries + ROWS * WIDTH<D>, *keys = grads + ROWS * WIDTH<D>;
    T* values = keys + 2 * TILE;
    const Place at((s.n_queries + ROWS - 1) / ROWS, s.n_heads, s.causal);
    const int first = at.tile * ROWS, lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    const int row = own + lane / 4, column = lane % 4 * 2;
    const int key_head = at.head / s.heads_per_key();
    const T *k_start = k_strides.start(k, at.item, key_head), *v_start = v_strides.start(v, at.item, key_head);
    const i64 rows = ((i64)at.item * s.n_heads + at.head) * s.n_queries + first;
    const Mask hidden = mask.at(at.item, at.head);
    const int last = first + ROWS < s.n_queries ? first + ROWS - 1 : s.n_queries - 1, n_seen = s.seen_by(last);
    const int begin = s.seen_from(first) / KEYS * KEYS, free_from = s.seen_from(last), free_to = s.seen_by(first);
    const float to_base_2 = s.scale * LOG2_E;
    float sums[D / 8][4] = {}, by[2], inners[2];
    int begins[2], ends[2];
    const float* masked[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int query = first + row + 8 * half;
        const bool there = query < s.n_queries;
        begins[half] = s.seen_from(query);
        ends[half] = there ? s.seen_by(query) : 0;
        masked[half] = hidden.values + query * hidden.query;
        const float total = there ? logsumexp[rows + row + 8 * half] : -INFINITY;
        by[half] = total == -INFINITY ? 0.0f : total * LOG2_E;
        inners[half] = there ? inner[rows + row + 8 * half] : 0.0f;
    }
    fetch<D, ROWS>(queries, q_strides.start(q, at.item, at.head), q_strides.token, first, s.n_queries);
    fetch<D, ROWS>(grads, grad_strides.start(grad, at.item, at.head), grad_strides.token, first, s.n_queries);
    fetch<D, KEYS>(keys, k_start, k_strides.token, begin, s.n_keys);
    fetch<D, KEYS>(values, v_start, v_strides.token, begin, s.n_keys);
    end_group();
    for (int start = begin, now = 0; start < n_seen; start += KEYS, now ^= 1) {
        if (start + KEYS < n_seen) {
            fetch<D, KEYS>(keys + (now ^ 1) * TILE, k_start, k_strides.token, start + KEYS, s.n_keys);
            fetch<D, KEYS>(values + (now ^ 1) * TILE, v_start, v_strides.token, start + KEYS, s.n_keys);
        }
        end_group();
        wait_for_groups<1>();
        __syncthreads();
        float weights[KEYS / 8][4], slopes[KEYS / 8][4];
        scores_of<D, KEYS>(weights, queries, own, keys + now * TILE);
        scores_of<D, KEYS>(slopes, grads, own, values + now * TILE);
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) slopes[n][i] -= inners[i / 2];
        if (s.cap != 0.0f) cap_products(weights, slopes, s);
        const bool whole = start >= free_from && start + KEYS <= free_to;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, key = start + 8 * n + column + i % 2;
                const bool seen = whole || (key >= begins[half] && key < ends[half]);
                weights[n][i] = seen ? weights[n][i] * to_base_2 - by[half] : -INFINITY;
            }
        if (mask.values != nullptr) add_mask(weights, masked, ends, start + column);
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) slopes[n][i] *= exp2f(weights[n][i]);
        apply_weights<D, KEYS>(sums, slopes, keys + now * TILE);
        __syncthreads();
    }
    wait_for_groups<0>();
    const float scales[2] = {s.scale, s.scale};
    T* to = dq_strides.start(dq, at.item, at.head) + first * dq_strides.token;
    write_rows<D>(sums, scales, to, dq_strides.token, row, s.n_queries - first);
}
