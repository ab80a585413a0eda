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
    float sums[N] = {};
    if (column < n)
#pragma unroll 4
        for (i64 row = first + threadIdx.y; row < last; row += blockDim.y) {
            float values[N];
            load(values, x + row * n + column, n - column);
#pragma unroll
            for (int k = 0; k < N; ++k) sums[k] += values[k];
        }
    const int width = blockDim.x * N;
#pragma unroll
    for (int k = 0; k < N; ++k) found[threadIdx.y * width + threadIdx.x * N + k] = sums[k];
    __syncthreads();
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < width; c += blockDim.x * blockDim.y) {
        const i64 at = (i64)blockIdx.x * width + c;
        float total = 0.0f;
        for (int y = 0; y < blockDim.y; ++y) total += found[y * width + c];
        if (at < n) out[blockIdx.y * n + at] = total;
    }
}

// out[block] = the sum, or the sum of squares, of this block's share of x (n,).
template <class T, bool SQUARES> __global__ void sum_all(const T* x, float* out, i64 n) {
    constexpr int N = PACK<T>;
    float sum = 0.0f;
    const i64 step = (i64)gridDim.x * blockDim.x * N;
    for (i64 i = pack_start<N>(); i < n; i += step) {
        float values[N];
        load(values, x + i, n - i);
#pragma unroll
        for (int k = 0; k < N; ++k) sum += SQUARES ? values[k] * values[k] : values[k];
    }
    sum = team<Sum>(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
