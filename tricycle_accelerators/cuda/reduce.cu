// Sums over rows, over everything, and of squares: each in two launches, partial sums first, so that their order is
// fixed however many blocks run at once.
#include "common.cuh"

// (n_rows, n) to (gridDim.y, n): the sum of each chunk of rows. A thread has one pack of columns and every blockDim.y-th
// row; what the rows of threads found is added up in order. Dynamic shared memory: one pack of floats a thread.
template <class T> __global__ void sum_rows(const T* x, float* out, i64 n_rows, i64 n, i64 chunk) {
    constexpr int N = PACK<T>;
    extern __shared__ float found[];
    const i64 column = pack_start<N>();
    const i64 first = blockIdx.y * chunk, last = first + chunk < n_rows ? first + chunk : n_rows;
    const int width = blockDim.x * N, own = threadIdx.x * N;
    auto add = [&](i64 c, auto count) {
        constexpr int M = decltype(count)::value;
        float sums[M] = {};
#pragma unroll 4
        for (i64 row = first + threadIdx.y; row < last; row += blockDim.y) {
            float values[M];
            load(values, x + row * n + c);
#pragma unroll
            for (int k = 0; k < M; ++k) sums[k] += values[k];
        }
#pragma unroll
        for (int k = 0; k < M; ++k) found[threadIdx.y * width + own + (c - column) + k] = sums[k];
    };
    if (n % N == 0 && aligned(x)) {
        if (column < n) add(column, Count<N>());
    } else {
        for (i64 c = column; c < column + N && c < n; ++c) add(c, Count<1>());
    }
    __syncthreads();
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < width; c += blockDim.x * blockDim.y) {
        const i64 at = (i64)blockIdx.x * width + c;
        if (at >= n) continue;
        float total = 0.0f;
        for (int y = 0; y < blockDim.y; ++y) total += found[y * width + c];
        out[blockIdx.y * n + at] = total;
    }
}

// out[block] = the sum, or the sum of squares, of this block's share of x (n,).
template <class T, bool SQUARES> __global__ void LARGE_BLOCK sum_all(const T* x, float* out, i64 n) {
    constexpr int N = PACK<T>;
    float sum = 0.0f;
    auto add = [&](i64 i, auto count) {
        constexpr int M = decltype(count)::value;
        float values[M];
        load(values, x + i);
#pragma unroll
        for (int k = 0; k < M; ++k) sum += SQUARES ? values[k] * values[k] : values[k];
    };
    const i64 n_packs = aligned(x) ? n / N : 0, step = (i64)gridDim.x * blockDim.x;
    for (i64 pack = pack_start<1>(); pack < n_packs; pack += step) add(pack * N, Count<N>());
    for (i64 i = n_packs * N + pack_start<1>(); i < n; i += step) add(i, Count<1>());
    sum = team<Sum>(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
