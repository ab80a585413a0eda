// Zeros and 1 / keep from a counter-based generator: element i depends on seed and i alone, whatever the grid.
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3": Philox 4x32 with ten rounds.
#include "common.cuh"

__device__ inline void philox(unsigned (&counter)[4], unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, counter[0]), low0 = 0xD2511F53u * counter[0];
        const unsigned high1 = __umulhi(0xCD9E8D57u, counter[2]), low1 = 0xCD9E8D57u * counter[2];
        counter[0] = high1 ^ counter[1] ^ key0;
        counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ key1;
        counter[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// Each draw is 24 bits, as a float from 0 to below 1. The seed is read from the device where a pointer is given.
template <class T>
__global__ void random_mask(T* mask, i64 n, float keep, unsigned long long seed, const unsigned long long* seed_at) {
    const i64 block = (i64)blockIdx.x * blockDim.x + threadIdx.x, i = block * 4;
    if (i >= n) return;
    unsigned draws[4] = {(unsigned)block, (unsigned)(block >> 32), 0, 0};
    if (seed_at != nullptr) seed = *seed_at;
    philox(draws, (unsigned)seed, (unsigned)(seed >> 32));
    const T kept = from_float<T>(1.0f / keep), none = from_float<T>(0.0f);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (i + k < n) mask[i + k] = (draws[k] >> 8) * (1.0f / 16777216.0f) < keep ? kept : none;
}
