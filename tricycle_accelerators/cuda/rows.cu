// Softmax and its kin over the last axis: one team of threads a row, which reads it twice (once from memory).
#include "common.cuh"

// The largest value of a row and the sum of exponentials below it, in one look: what came before is rescaled whenever
// a larger value comes (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
struct Exponentials {
    float largest = -INFINITY, total = 0.0f;

    // What exponents are taken off; for a row of -inf alone, nothing. NaN never becomes the largest, but enters the sum.
    static __device__ float shift(float largest) { return largest == -INFINITY ? 0.0f : largest; }

    template <int N> __device__ void add(const float (&values)[N]) {
        float now = largest;
#pragma unroll
        for (int k = 0; k < N; ++k) now = fmaxf(now, values[k]);
        const float by = shift(now);
        total *= __expf(largest - by);
#pragma unroll
        for (int k = 0; k < N; ++k) total += __expf(values[k] - by);
        largest = now;
    }

    __device__ void over_team() {
        const float whole = team<Largest>(largest);
        total = team<Sum>(total * __expf(largest - shift(whole)));
        largest = whole;
    }
};

template <class T, bool NOTHING> __global__ void LARGE_BLOCK softmax(const T* x, T* y, i64 n_rows, i64 n) {
    const i64 row = team_row();
    if (row >= n_rows) return;
    const T* from = x + row * n;
    T* to = y + row * n;
    Exponentials e;
    along(from, to, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        float values[decltype(count)::value];
        load(values, from + i);
        e.add(values);
    });
    e.over_team();
    if (NOTHING) {  // one more score of 0
        const float largest = fmaxf(e.largest, 0.0f);
        e.total = e.total * __expf(e.largest - largest) + __expf(-largest);
        e.largest = largest;
    }
    const float by = Exponentials::shift(e.largest), share = e.total == 0 ? 1.0f : 1.0f / e.total;
    along(from, to, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float values[N];
        load(values, from + i);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = __expf(values[k] - by) * share;
        store(to + i, values);
    });
}

template <class T> __global__ void LARGE_BLOCK log_softmax(const T* x, T* y, i64 n_rows, i64 n) {
    const i64 row = team_row();
    if (row >= n_rows) return;
    const T* from = x + row * n;
    T* to = y + row * n;
    Exponentials e;
    along(from, to, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        float values[decltype(count)::value];
        load(values, from + i);
        e.add(values);
    });
    e.over_team();
    const float logsumexp = logf(e.total);
    along(from, to, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float values[N];
        load(values, from + i);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = values[k] - e.largest - logsumexp;
        store(to + i, values);
    });
}

// dx = y (grad - sum(grad y))
template <class T> __global__ void LARGE_BLOCK softmax_backward(const T* grad, const T* y, T* dx, i64 n_rows, i64 n) {
    const i64 row = team_row();
    if (row >= n_rows) return;
    const T *grads = grad + row * n, *weights = y + row * n;
    T* to = dx + row * n;
    // weights and results lie alike, for both are whole arrays of one shape; if the gradient does not, it goes slowly
    const T* other = ((size_t)weights - (size_t)to) % 16 ? reinterpret_cast<const T*>((size_t)grads + 1) : weights;
    float inner = 0.0f;
    along(grads, other, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float a[N], b[N];
        load(a, grads + i);
        load(b, weights + i);
#pragma unroll
        for (int k = 0; k < N; ++k) inner += a[k] * b[k];
    });
    inner = team<Sum>(inner);
    along(grads, other, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float a[N], b[N];
        load(a, grads + i);
        load(b, weights + i);
#pragma unroll
        for (int k = 0; k < N; ++k) a[k] = b[k] * (a[k] - inner);
        store(to + i, a);
    });
}

// -------------------------------------------------------------------- cross-entropy
// Cost and slope of one row of logits a block. costs[row] = weight * -log softmax(logits)[label], 0 where the weight is.
// The slope may overwrite the logits: each element is read by the thread that writes it, after all have read the row
// once. No slope is written where `slope` is null. A label that is none makes the cost NaN.
template <class T>
__global__ void LARGE_BLOCK cross_entropy(
    const T* logits, const i64* labels, const float* weights, float* costs, T* slope, i64 n_rows, i64 n, float smoothing
) {
    const i64 row = team_row();
    if (row >= n_rows) return;
    const T* from = logits + row * n;
    T* to = slope == nullptr ? const_cast<T*>(from) : slope + row * n;  // nothing is written where it is null
    const float weight = weights[row];
    if (weight == 0) {  // all threads of the team agree
        if (threadIdx.x == 0) costs[row] = 0.0f;
        if (slope != nullptr)
            along(from, to, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
                const float zeros[decltype(count)::value] = {};
                store(to + i, zeros);
            });
        return;
    }
    const i64 label = labels[row];
    const float truth = label >= 0 && label < n ? to_float(from[label]) : NAN;
    Exponentials e;
    float sum = 0.0f;
    along(from, to, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float values[N];
        load(values, from + i);
        e.add(values);
        if (smoothing != 0)
#pragma unroll
            for (int k = 0; k < N; ++k) sum += values[k];
    });
    e.over_team();
    if (smoothing != 0) sum = team<Sum>(sum);
    __syncwarp();  // a team of one warp has met no barrier that orders its reads of the truth before the writes below
    if (threadIdx.x == 0) {
        float cost = logf(e.total) - (1 - smoothing) * (truth - e.largest);
        if (smoothing != 0) cost -= smoothing * (sum / n - e.largest);
        costs[row] = weight * cost;
    }
    if (slope == nullptr) return;
    const float by = e.largest, share = weight / e.total, common = weight * (smoothing / n);
    along(from, to, n, threadIdx.x, blockDim.x, [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float values[N];
        load(values, from + i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            values[k] = __expf(values[k] - by) * share - common;
            if (i + k == label) values[k] -= weight * (1 - smoothing);
        }
        store(to + i, values);
    });
}
