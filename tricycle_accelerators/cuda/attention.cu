// Attention in float32 on the ordinary arithmetic units, forward and backward, in memory that grows with the number of
// tokens: tiles of queries against tiles of keys, with softmax made on the way (Dao et al. 2022, "FlashAttention").
//
// 256 threads, 16 by 16, share a TILE by TILE block of scores: thread (y, x) has rows y, y + 16, ... and columns x,
// x + 16, .... Rows of shared memory have one float more than they need, so that columns fall into different banks.
// D: the head size rounded up to 32, 64 or 128. The gradients have no atomic sums: one kernel goes along the keys for
// dq, one along the queries for dk and dv, both making the scores anew.
#include "attention.cuh"

constexpr int SIDE = 16;

// TILE rows of an array from `first` on, zeros beyond the last and beyond the head size.
template <int D, int TILE>
__device__ inline void load_tile(float* to, const float* from, i64 step, int first, int n, int size) {
    for (int at = threadIdx.x; at < TILE * D; at += SIDE * SIDE) {
        const int row = at / D, i = at % D;
        to[row * (D + 1) + i] = first + row < n && i < size ? from[(first + row) * step + i] : 0.0f;
    }
}

// out[i][j] = a[row i] . b[row j]
template <int D, int PER>
__device__ inline void products(float (&out)[PER][PER], const float* a, const float* b, int y, int x) {
#pragma unroll
    for (int i = 0; i < PER; ++i)
#pragma unroll
        for (int j = 0; j < PER; ++j) out[i][j] = 0.0f;
#pragma unroll 8
    for (int d = 0; d < D; ++d) {
        float left[PER], right[PER];
#pragma unroll
        for (int i = 0; i < PER; ++i) left[i] = a[(y + SIDE * i) * (D + 1) + d];
#pragma unroll
        for (int j = 0; j < PER; ++j) right[j] = b[(x + SIDE * j) * (D + 1) + d];
#pragma unroll
        for (int i = 0; i < PER; ++i)
#pragma unroll
            for (int j = 0; j < PER; ++j) out[i][j] += left[i] * right[j];
    }
}

// sums[i][c] += sum over k of weights[row i, k] * values[k, x + 16 c], or of weights[k, row i] where TURNED.
template <int D, int TILE, bool TURNED, int PER, int COLUMNS>
__device__ inline void apply_weights(float (&sums)[PER][COLUMNS], const float* weights, const float* values, int y, int x) {
#pragma unroll 4
    for (int k = 0; k < TILE; ++k) {
        float left[PER], right[COLUMNS];
#pragma unroll
        for (int i = 0; i < PER; ++i)
            left[i] = TURNED ? weights[k * (TILE + 1) + y + SIDE * i] : weights[(y + SIDE * i) * (TILE + 1) + k];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) right[c] = values[k * (D + 1) + x + SIDE * c];
#pragma unroll
        for (int i = 0; i < PER; ++i)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sums[i][c] += left[i] * right[c];
    }
}

// Over the 16 threads of a row, which are half a warp.
template <class How> __device__ inline float over_row(float value) {
#pragma unroll
    for (int away = SIDE / 2; away; away /= 2)
        value = How::join(value, __shfl_xor_sync(0xffffffffu, value, away));
    return value;
}

template <int D, int PER>
__device__ inline void write_rows(
    const float (&values)[PER][D / SIDE], float* to, i64 step, int first, int n, int size, int y, int x
) {
#pragma unroll
    for (int i = 0; i < PER; ++i)
#pragma unroll
        for (int c = 0; c < D / SIDE; ++c)
            if (first + y + SIDE * i < n && x + SIDE * c < size)
                to[(first + y + SIDE * i) * step + x + SIDE * c] = values[i][c];
}

// Dynamic shared memory: 2 TILE (D + 1) + TILE (TILE + 1) floats.
template <int D, int TILE>
__global__ void __launch_bounds__(SIDE* SIDE) attention(
    const float* q, const float* k, const float* v, float* out, float* logsumexp, const Sizes s,
    const Strides q_strides, const Strides k_strides, const Strides v_strides, const Strides out_strides, const Mask mask
) {
    constexpr int PER = TILE / SIDE;
    extern __shared__ float shared[];
    float *queries = shared, *keys = queries + TILE * (D + 1), *weights = keys + TILE * (D + 1);
    const Place at((s.n_queries + TILE - 1) / TILE, s.n_heads, s.causal);
    const int first = at.tile * TILE, y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const int key_head = at.head / s.heads_per_key();
    const float *k_start = k_strides.start(k, at.item, key_head), *v_start = v_strides.start(v, at.item, key_head);
    const Mask hidden = mask.at(at.item, at.head);
    load_tile<D, TILE>(queries, q_strides.start(q, at.item, at.head), q_strides.token, first, s.n_queries, s.size);
    float largest[PER], total[PER], sums[PER][D / SIDE] = {};
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        largest[i] = s.nothing ? 0.0f : -INFINITY;
        total[i] = s.nothing && x == 0 ? 1.0f : 0.0f;  // each thread its own part; the sum comes at the end
    }
    const int n_seen = s.seen_by(first + TILE < s.n_queries ? first + TILE - 1 : s.n_queries - 1);
    for (int start = s.seen_from(first) / TILE * TILE; start < n_seen; start += TILE) {
        __syncthreads();  // the values of the tile before have been read
        load_tile<D, TILE>(keys, k_start, k_strides.token, start, s.n_keys, s.size);
        __syncthreads();
        float scores[PER][PER];
        products<D>(scores, queries, keys, y, x);
        if (s.cap != 0.0f) cap_products(scores, s);
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            const int query = first + y + SIDE * i;
            float now = largest[i];
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                const int key = start + x + SIDE * j;
                scores[i][j] = s.hides(query, key) ? -INFINITY : scores[i][j] * s.scale + hidden.of(query, key);
                now = fmaxf(now, scores[i][j]);
            }
            now = over_row<Largest>(now);
            const float by = now == -INFINITY ? 0.0f : now, rescale = __expf(largest[i] - by);
            largest[i] = now;
            total[i] *= rescale;
#pragma unroll
            for (int c = 0; c < D / SIDE; ++c) sums[i][c] *= rescale;
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                const float weight = __expf(scores[i][j] - by);
                total[i] += weight;
                weights[(y + SIDE * i) * (TILE + 1) + x + SIDE * j] = weight;
            }
        }
        __syncthreads();  // the keys have been read, the weights written
        load_tile<D, TILE>(keys, v_start, v_strides.token, start, s.n_keys, s.size);
        __syncthreads();
        apply_weights<D, TILE, false>(sums, weights, keys, y, x);
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const int query = first + y + SIDE * i;
        const float whole = over_row<Sum>(total[i]);
        if (x == 0 && query < s.n_queries)
            logsumexp[((i64)at.item * s.n_heads + at.head) * s.n_queries + query] =
                whole == 0 ? -INFINITY : largest[i] + logf(whole);
#pragma unroll
        for (int c = 0; c < D / SIDE; ++c) sums[i][c] /= whole == 0 ? 1.0f : whole;
    }
    write_rows<D>(sums, out_strides.start(out, at.item, at.head), out_strides.token, first, s.n_queries, s.size, y, x);
}

// inner[b, h, t] = grad . out, the part of a score's gradient that its whole row shares. One warp a row.
template <class T>
__global__ void attention_inner(
    const T* grad, const T* out, float* inner, const Sizes s, const Strides grad_strides, const Strides out_strides
) {
    const i64 row = team_row();
    if (row >= (i64)s.n_items * s.n_heads * s.n_queries) return;
    const int t = row % s.n_queries, h = row / s.n_queries % s.n_heads, b = row / s.n_queries / s.n_heads;
    const T* left = grad_strides.start(grad, b, h) + t * grad_strides.token;
    const T* right = out_strides.start(out, b, h) + t * out_strides.token;
    float sum = 0.0f;
    for (int d = threadIdx.x; d < s.size; d += 32) sum += to_float(left[d]) * to_float(right[d]);
    sum = team<Sum>(sum);
    if (threadIdx.x == 0) inner[row] = sum;
}

// The weights of a tile and the gradient of its scores, from `queries . keys` and `grads . values`.
template <int PER>
__device__ inline void slopes(
    float (&weights)[PER][PER], float (&dweights)[PER][PER], const float* logsumexp, const float* inner, const Sizes& s,
    const Mask& hidden, int first_query, int first_key, int y, int x
) {
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const int query = first_query + y + SIDE * i;
        const float shared_part = query < s.n_queries ? inner[query] : 0.0f;
#pragma unroll
        for (int j = 0; j < PER; ++j) dweights[i][j] -= shared_part;
    }
    if (s.cap != 0.0f) cap_products(weights, dweights, s);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const int query = first_query + y + SIDE * i;
        const float total = query < s.n_queries ? logsumexp[query] : -INFINITY;
        const float by = total == -INFINITY ? 0.0f : total;
#pragma unroll
        for (int j = 0; j < PER; ++j) {
            const int key = first_key + x + SIDE * j;
            const bool seen = !s.hides(query, key);
            weights[i][j] = seen ? __expf(weights[i][j] * s.scale + hidden.of(query, key) - by) : 0.0f;
            dweights[i][j] *= weights[i][j] * s.scale;
        }
    }
}

// dk and dv of a tile of keys, which query heads that share them add to one after another. Dynamic shared memory: 4 TILE (D + 1) + 2 TILE (TILE + 1) floats.
template <int D, int TILE>
__global__ void __launch_bounds__(SIDE* SIDE) attention_backward_keys(
    const float* grad, const float* q, const float* k, const float* v, const float* logsumexp, const float* inner,
    float* dk, float* dv, const Sizes s, const Strides grad_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dk_strides, const Strides dv_strides, const Mask mask
) {
    constexpr int PER = TILE / SIDE, ROWS = TILE * (D + 1), SQUARE = TILE * (TILE + 1);
    extern __shared__ float shared[];
    float *keys = shared, *values = keys + ROWS, *queries = values + ROWS, *grads = queries + ROWS;
    float *weights = grads + ROWS, *dscores = weights + SQUARE;
    const Place at((s.n_keys + TILE - 1) / TILE, s.n_key_heads, false);
    const int first = at.tile * TILE, y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    load_tile<D, TILE>(keys, k_strides.start(k, at.item, at.head), k_strides.token, first, s.n_keys, s.size);
    load_tile<D, TILE>(values, v_strides.start(v, at.item, at.head), v_strides.token, first, s.n_keys, s.size);
    float key_sums[PER][D / SIDE] = {}, value_sums[PER][D / SIDE] = {};
    const int begin = s.first_to_see(first) / TILE * TILE, end = s.end_of_seeing(first + TILE - 1);
    const int first_head = at.head * s.heads_per_key();
    for (int head = first_head; head < first_head + s.heads_per_key(); ++head) {
        const i64 row = ((i64)at.item * s.n_heads + head) * s.n_queries;
        const Mask hidden = mask.at(at.item, head);
        const float *q_start = q_strides.start(q, at.item, head), *grad_start = grad_strides.start(grad, at.item, head);
        for (int start = begin; start < end; start += TILE) {
            __syncthreads();  // the tile before has been read
            load_tile<D, TILE>(queries, q_start, q_strides.token, start, s.n_queries, s.size);
            load_tile<D, TILE>(grads, grad_start, grad_strides.token, start, s.n_queries, s.size);
            __syncthreads();
            float p[PER][PER], dp[PER][PER];
            products<D>(p, queries, keys, y, x);
            products<D>(dp, grads, values, y, x);
            slopes(p, dp, logsumexp + row, inner + row, s, hidden, start, first, y, x);
#pragma unroll
            for (int i = 0; i < PER; ++i)
#pragma unroll
                for (int j = 0; j < PER; ++j) {
                    weights[(y + SIDE * i) * (TILE + 1) + x + SIDE * j] = p[i][j];
                    dscores[(y + SIDE * i) * (TILE + 1) + x + SIDE * j] = dp[i][j];
                }
            __syncthreads();
            apply_weights<D, TILE, true>(value_sums, weights, grads, y, x);
            apply_weights<D, TILE, true>(key_sums, dscores, queries, y, x);
        }
    }
    write_rows<D>(key_sums, dk_strides.start(dk, at.item, at.head), dk_strides.token, first, s.n_keys, s.size, y, x);
    write_rows<D>(value_sums, dv_strides.start(dv, at.item, at.head), dv_strides.token, first, s.n_keys, s.size, y, x);
}

// dq of a tile of queries. Dynamic shared memory: 4 TILE (D + 1) + TILE (TILE + 1) floats.
template <int D, int TILE>
__global__ void __launch_bounds__(SIDE* SIDE) attention_backward_queries(
    const float* grad, const float* q, const float* k, const float* v, const float* logsumexp, const float* inner,
    float* dq, const Sizes s, const Strides grad_strides, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides dq_strides, const Mask mask
) {
    constexpr int PER = TILE / SIDE, ROWS = TILE * (D + 1);
    extern __shared__ float shared[];
    float *queries = shared, *grads = queries + ROWS, *keys = grads + ROWS, *values = keys + ROWS;
    float* dscores = values + ROWS;
    const Place at((s.n_queries + TILE - 1) / TILE, s.n_heads, s.causal);
    const int first = at.tile * TILE, y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    const i64 row = ((i64)at.item * s.n_heads + at.head) * s.n_queries;
    const Mask hidden = mask.at(at.item, at.head);
    load_tile<D, TILE>(queries, q_strides.start(q, at.item, at.head), q_strides.token, first, s.n_queries, s.size);
    const float* grad_start = grad_strides.start(grad, at.item, at.head);
    load_tile<D, TILE>(grads, grad_start, grad_strides.token, first, s.n_queries, s.size);
    const int key_head = at.head / s.heads_per_key();
    const float *k_start = k_strides.start(k, at.item, key_head), *v_start = v_strides.start(v, at.item, key_head);
    float sums[PER][D / SIDE] = {};
    const int n_seen = s.seen_by(first + TILE < s.n_queries ? first + TILE - 1 : s.n_queries - 1);
    for (int start = s.seen_from(first) / TILE * TILE; start < n_seen; start += TILE) {
        __syncthreads();
        load_tile<D, TILE>(keys, k_start, k_strides.token, start, s.n_keys, s.size);
        load_tile<D, TILE>(values, v_start, v_strides.token, start, s.n_keys, s.size);
        __syncthreads();
        float p[PER][PER], dp[PER][PER];
        products<D>(p, queries, keys, y, x);
        products<D>(dp, grads, values, y, x);
        slopes(p, dp, logsumexp + row, inner + row, s, hidden, first, start, y, x);
#pragma unroll
        for (int i = 0; i < PER; ++i)
#pragma unroll
            for (int j = 0; j < PER; ++j) dscores[(y + SIDE * i) * (TILE + 1) + x + SIDE * j] = dp[i][j];
        __syncthreads();
        apply_weights<D, TILE, false>(sums, dscores, keys, y, x);
    }
    write_rows<D>(sums, dq_strides.start(dq, at.item, at.head), dq_strides.token, first, s.n_queries, s.size, y, x);
}
