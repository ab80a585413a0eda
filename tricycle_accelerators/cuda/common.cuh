// What all kernels share: number formats, 16-byte memory accesses, and sums over the threads that share a row.
//
// Arithmetic is float32 whatever the arrays hold. Every sum is made in an order that depends on shapes alone, so
// the same call gives the same bits each time. A pack is as many elements as 16 bytes hold.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef INFINITY  // NVRTC knows no <math.h>
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

typedef long long i64;  // places in arrays: B T V may exceed 2^31

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// -------------------------------------------------------------------- memory, 16 bytes at a time
template <class T> constexpr int PACK = 16 / sizeof(T);

__device__ inline bool aligned(const void* p) { return (size_t)p % 16 == 0; }

// N floats from p on, of which `left` exist; zeros for the others.
template <int N, class T> __device__ inline void load(float (&out)[N], const T* p, i64 left) {
    constexpr int M = N < PACK<T> ? N : PACK<T>;
    static_assert(N % M == 0, "whole packs");
    if (M == PACK<T> && left >= N && aligned(p)) {
#pragma unroll
        for (int i = 0; i < N; i += M) {
            uint4 bits = *reinterpret_cast<const uint4*>(p + i);
            T held[PACK<T>];
            memcpy(held, &bits, 16);
#pragma unroll
            for (int k = 0; k < M; ++k) out[i + k] = to_float(held[k]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = i < left ? to_float(p[i]) : 0.0f;
    }
}

// The first `left` of N floats go to p and what follows it.
template <int N, class T> __device__ inline void store(T* p, const float (&in)[N], i64 left) {
    constexpr int M = N < PACK<T> ? N : PACK<T>;
    static_assert(N % M == 0, "whole packs");
    if (M == PACK<T> && left >= N && aligned(p)) {
#pragma unroll
        for (int i = 0; i < N; i += M) {
            T held[PACK<T>];
#pragma unroll
            for (int k = 0; k < M; ++k) held[k] = from_float<T>(in[i + k]);
            uint4 bits;
            memcpy(&bits, held, 16);
            *reinterpret_cast<uint4*>(p + i) = bits;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < left) p[i] = from_float<T>(in[i]);
    }
}

// body(i, values) for the n elements of a row, by `step` threads of which this is number `first`: one at a time up to
// the first 16-byte boundary and at the end, whole packs between, so that rows of any length and place are read fast.
template <class T, class Body>
__device__ inline void along(const T* row, i64 n, int first, int step, Body body) {
    constexpr int N = PACK<T>;
    i64 head = (16 - (size_t)row % 16) % 16 / sizeof(T);
    if (head > n) head = n;
    const i64 n_packs = (n - head) / N, n_single = n - n_packs * N;
    for (i64 pack = first; pack < n_packs; pack += step) {
        const i64 i = head + pack * N;
        float values[N];
        load(values, row + i, N);
        body(i, values);
    }
    for (i64 single = first; single < n_single; single += step) {
        const i64 i = single < head ? single : single + n_packs * N;
        float values[1] = {to_float(row[i])};
        body(i, values);
    }
}

// -------------------------------------------------------------------- a team: the threads of one row
// blockDim.x threads, a multiple of 32. Either that is one warp, and the blockDim.y teams of a block know nothing of
// each other, or it is several, and the block is one team: then all of its threads must come here together.
struct Sum {
    static __device__ float none() { return 0.0f; }
    static __device__ float join(float a, float b) { return a + b; }
};
struct Largest {
    static __device__ float none() { return -INFINITY; }
    static __device__ float join(float a, float b) { return fmaxf(a, b); }
};

template <class How, int N> __device__ inline void team(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int away = 16; away; away /= 2)
            values[i] = How::join(values[i], __shfl_xor_sync(0xffffffffu, values[i], away));
    if (blockDim.x == 32) return;
    __shared__ float of_warps[N][32];
    const int lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    __syncthreads();  // what a call before left may still be read
    if (lane == 0)
        for (int i = 0; i < N; ++i) of_warps[i][threadIdx.x / 32] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i] = lane < n_warps ? of_warps[i][lane] : How::none();
#pragma unroll
        for (int away = 16; away; away /= 2)
            values[i] = How::join(values[i], __shfl_xor_sync(0xffffffffu, values[i], away));
    }
}

template <class How> __device__ inline float team(float value) {
    float values[1] = {value};
    team<How>(values);
    return values[0];
}

// The row of this team, and whether it is one of `n_rows`.
__device__ inline i64 team_row() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }

// Where this thread's pack of an array starts.
template <int N> __device__ inline i64 pack_start() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N; }
