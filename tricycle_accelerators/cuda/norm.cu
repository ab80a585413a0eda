// Layer norm, or RMS norm where not `centred`: one team of threads a row.
#include "common.cuh"

// y = (x - mean) * scale * gain + bias, with scale = 1 / sqrt(variance + eps). mean and scale: one float a row.
template <class T>
__global__ void LARGE_BLOCK layer_norm(
    const T* x, const float* gain, const float* bias, T* y, float* means, float* scales, i64 n_rows, int n, float eps,
    int centred
) {
    const i64 row = team_row();
    if (row >= n_rows) return;
    const T* from = x + row * n;
    T* to = y + row * n;
    const bool whole = n % PACK<T> == 0 && aligned(from) && aligned(to) && aligned(gain) && aligned(bias);
    float mean = 0.0f, square = 0.0f;
    if (centred) {
        across<PACK<T>>(n, whole, threadIdx.x, blockDim.x, [&](int i, auto count) {
            constexpr int N = decltype(count)::value;
            float values[N];
            load(values, from + i);
#pragma unroll
            for (int k = 0; k < N; ++k) mean += values[k];
        });
        mean = team<Sum>(mean) / n;
    }
    across<PACK<T>>(n, whole, threadIdx.x, blockDim.x, [&](int i, auto count) {
        constexpr int N = decltype(count)::value;
        float values[N];
        load(values, from + i);
#pragma unroll
        for (int k = 0; k < N; ++k) square += (values[k] - mean) * (values[k] - mean);
    });
    const float scale = 1.0f / sqrtf(team<Sum>(square) / n + eps);
    across<PACK<T>>(n, whole, threadIdx.x, blockDim.x, [&](int i, auto count) {
        constexpr int N = decltype(count)::value;
        float values[N], gains[N], shifts[N] = {};
        load(values, from + i);
        load(gains, gain + i);
        if (bias != nullptr) load(shifts, bias + i);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = (values[k] - mean) * scale * gains[k] + shifts[k];
        store(to + i, values);
    });
    if (threadIdx.x == 0) {
        means[row] = mean;
        scales[row] = scale;
    }
}

// The more a thread holds, the more registers it takes, and the fewer threads a block may have.
template <int N> constexpr int NORM_THREADS = N == 1 ? 1024 : N == 4 ? 512 : 256;

// dx for every gridDim.x-th group of rows; their part of the gradients of gain and bias goes to sums[block]: (2, n).
// A thread has the same HELD times N columns in all of its rows, so that these sums stay in registers; blockDim.x * HELD
// * N cover a row, and n is a multiple of N. N is a pack, and every array aligned, or 1.
// Dynamic shared memory, where a block has several teams: 2 n floats.
template <class T, int N, int HELD>
__global__ void __launch_bounds__(NORM_THREADS<N>) layer_norm_backward(
    const T* grad, const T* x, const float* gain, const float* means, const float* scales, T* dx, float* sums,
    i64 n_rows, int n, int centred
) {
    extern __shared__ float joined[];
    float dgain[HELD][N] = {}, dbias[HELD][N] = {};
    for (i64 row = team_row(); row < n_rows; row += (i64)gridDim.x * blockDim.y) {
        const float mean = means[row], scale = scales[row];
        float normal[HELD][N], inner[HELD][N], totals[2] = {};  // of inner, and of inner * normal
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int i = (j * blockDim.x + threadIdx.x) * N;
            if (i < n) {
                float gains[N];
                load(normal[j], x + row * n + i);
                load(inner[j], grad + row * n + i);
                load(gains, gain + i);
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    normal[j][k] = (normal[j][k] - mean) * scale;
                    dgain[j][k] += inner[j][k] * normal[j][k];
                    dbias[j][k] += inner[j][k];
                    inner[j][k] *= gains[k];
                    totals[0] += inner[j][k];
                    totals[1] += inner[j][k] * normal[j][k];
                }
            }
        }
        team<Sum>(totals);
        const float shift = centred ? totals[0] / n : 0.0f, tilt = totals[1] / n;
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int i = (j * blockDim.x + threadIdx.x) * N;
            if (i < n) {
#pragma unroll
                for (int k = 0; k < N; ++k) inner[j][k] = (inner[j][k] - shift - normal[j][k] * tilt) * scale;
                store(dx + row * n + i, inner[j]);
            }
        }
    }
    for (int y = 1; y < blockDim.y; ++y) {  // the first team gathers what the others found, one after another
        __syncthreads();
        if (threadIdx.y == y)
#pragma unroll
            for (int j = 0; j < HELD; ++j)
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const int i = (j * blockDim.x + threadIdx.x) * N + k;
                    if (i < n) {
                        joined[i] = dgain[j][k];
                        joined[n + i] = dbias[j][k];
                    }
                }
        __syncthreads();
        if (threadIdx.y == 0)
#pragma unroll
            for (int j = 0; j < HELD; ++j)
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    const int i = (j * blockDim.x + threadIdx.x) * N + k;
                    if (i < n) {
                        dgain[j][k] += joined[i];
                        dbias[j][k] += joined[n + i];
                    }
                }
    }
    if (threadIdx.y == 0)
#pragma unroll
        for (int j = 0; j < HELD; ++j)
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const int i = (j * blockDim.x + threadIdx.x) * N + k;
                if (i < n) {
                    sums[(i64)blockIdx.x * 2 * n + i] = dgain[j][k];
                    sums[(i64)blockIdx.x * 2 * n + n + i] = dbias[j][k];
                }
            }
}
