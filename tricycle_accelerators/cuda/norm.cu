// Layer norm, or RMS norm where not `centred`: one team of threads a row.
#include "common.cuh"

// y = (x - mean) * scale * gain + bias, with scale = 1 / sqrt(variance + eps). mean and scale: one float a row.
template <class T>
__global__ void layer_norm(
    const T* x, const float* gain, const float* bias, T* y, float* means, float* scales, i64 n_rows, int n, float eps,
    int centred
) {
    const i64 row = team_row();
    if (row >= n_rows) return;
    constexpr int N = PACK<T>;
    const T* from = x + row * n;
    T* to = y + row * n;
    float mean = 0.0f, square = 0.0f;
    if (centred) {
        for (int i = threadIdx.x * N; i < n; i += blockDim.x * N) {
            float values[N];
            load(values, from + i, n - i);
#pragma unroll
            for (int k = 0; k < N; ++k) mean += values[k];
        }
        mean = team<Sum>(mean) / n;
    }
    for (int i = threadIdx.x * N; i < n; i += blockDim.x * N) {
        float values[N];
        load(values, from + i, n - i);
#pragma unroll
        for (int k = 0; k < N; ++k) square += i + k < n ? (values[k] - mean) * (values[k] - mean) : 0.0f;
    }
    const float scale = 1.0f / sqrtf(team<Sum>(square) / n + eps);
    for (int i = threadIdx.x * N; i < n; i += blockDim.x * N) {
        float values[N], gains[N], shifts[N] = {};
        load(values, from + i, n - i);
        load(gains, gain + i, n - i);
        if (bias != nullptr) load(shifts, bias + i, n - i);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] = (values[k] - mean) * scale * gains[k] + shifts[k];
        store(to + i, values, n - i);
    }
    if (threadIdx.x == 0) {
        means[row] = mean;
        scales[row] = scale;
    }
}

// dx for every gridDim.x-th group of rows; their part of the gradients of gain and bias goes to sums[block]: (2, n).
// A thread has the same HELD packs of columns in all of its rows, so that these sums stay in registers.
// blockDim.x * HELD packs cover a row. Dynamic shared memory, where a block has several teams: 2 n floats.
template <class T, int HELD>
__global__ void layer_norm_backward(
    const T* grad, const T* x, const float* gain, const float* means, const float* scales, T* dx, float* sums,
    i64 n_rows, int n, int centred
) {
    constexpr int N = PACK<T>;
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
                load(normal[j], x + row * n + i, n - i);
                load(inner[j], grad + row * n + i, n - i);
                load(gains, gain + i, n - i);
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    normal[j][k] = (normal[j][k] - mean) * scale;  // beyond the row, the gradient is 0
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
                store(dx + row * n + i, inner[j], n - i);
            }
        }
    }
    for (int y = 1; y < blockDim.y; ++y) {  // the first team gathers what the others found, one after another
        __syncthreads();
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int i = (j * blockDim.x + threadIdx.x) * N;
            if (threadIdx.y == y && i < n) {
                store(joined + i, dgain[j], n - i);
                store(joined + n + i, dbias[j], n - i);
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int i = (j * blockDim.x + threadIdx.x) * N;
            if (threadIdx.y == 0 && i < n) {
                float more[N];
                load(more, joined + i, n - i);
#pragma unroll
                for (int k = 0; k < N; ++k) dgain[j][k] += more[k];
                load(more, joined + n + i, n - i);
#pragma unroll
                for (int k = 0; k < N; ++k) dbias[j][k] += more[k];
            }
        }
    }
    if (threadIdx.y == 0) {
        float* mine = sums + (i64)blockIdx.x * 2 * n;
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
            const int i = (j * blockDim.x + threadIdx.x) * N;
            if (i < n) {
                store(mine + i, dgain[j], n - i);
                store(mine + n + i, dbias[j], n - i);
            }
        }
    }
}
