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

template <int N> struct Count {  // how many elements a body of a loop is given, known to the compiler
    static constexpr int value = N;
};

__device__ inline bool aligned(const void* p) { return (size_t)p % 16 == 0; }

// N elements from p on. Whole packs must be aligned to 16 bytes.
template <int N, class T> __device__ inline void load(float (&out)[N], const T* p) {
    if constexpr (N % PACK<T> == 0) {
#pragma unroll
        for (int i = 0; i < N; i += PACK<T>) {
            const uint4 bits = *reinterpret_cast<const uint4*>(p + i);
            T held[PACK<T>];
            memcpy(held, &bits, 16);
#pragma unroll
            for (int k = 0; k < PACK<T>; ++k) out[i + k] = to_float(held[k]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = to_float(p[i]);
    }
}

template <int N, class T> __device__ inline void store(T* p, const float (&in)[N]) {
    if constexpr (N % PACK<T> == 0) {
#pragma unroll
        for (int i = 0; i < N; i += PACK<T>) {
            T held[PACK<T>];
#pragma unroll
            for (int k = 0; k < PACK<T>; ++k) held[k] = from_float<T>(in[i + k]);
            uint4 bits;
            memcpy(&bits, held, 16);
            *reinterpret_cast<uint4*>(p + i) = bits;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) p[i] = from_float<T>(in[i]);
    }
}

// Where this thread's N elements of an array start, if each thread of the grid has N.
template <int N> __device__ inline i64 pack_start() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * N; }

// body(i, count) for this thread's N elements of n: all at once where they are there and `whole` says that every array
// can be read so, else one at a time.
template <int N, class Body> __device__ inline void each(i64 n, bool whole, Body body) {
    const i64 first = pack_start<N>();
    if (whole && first + N <= n)
        body(first, Count<N>());
    else
#pragma unroll 1
        for (i64 i = first; i < first + N && i < n; ++i) body(i, Count<1>());
}

// body(i, count) for the n elements of a row, by `step` threads of which this is number `first`; N at a time where
// `whole` says that every array can be read so, which needs n to be a multiple of N.
template <int N, class Body> __device__ inline void across(int n, bool whole, int first, int step, Body body) {
    if (whole)
        for (int i = first * N; i < n; i += step * N) body(i, Count<N>());
    else
        for (int i = first; i < n; i += step) body(i, Count<1>());
}

// The same for rows of any length and place: one at a time up to the first 16-byte boundary and at the end, whole packs
// between. `other` is what else is read or written at the same i: unless it lies alike, everything goes one at a time.
template <class T, class Body>
__device__ inline void along(const T* row, const T* other, i64 n, int first, int step, Body body) {
    constexpr int N = PACK<T>;
    i64 head = (16 - (size_t)row % 16) % 16 / sizeof(T);
    if (head > n || ((size_t)row - (size_t)other) % 16 != 0) head = n;
    const i64 n_packs = (n - head) / N, n_single = n - n_packs * N;
#pragma unroll 2
    for (i64 pack = first; pack < n_packs; pack += step) body(head + pack * N, Count<N>());
    for (i64 single = first; single < n_single; single += step)
        body(single < head ? single : single + n_packs * N, Count<1>());
}

// Kernels of teams may have blocks of this many threads, which leaves 64 registers to each.
#define LARGE_BLOCK __launch_bounds__(1024, 1)

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
