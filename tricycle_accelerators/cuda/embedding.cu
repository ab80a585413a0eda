// The gradient of a table whose rows were looked up: the tokens are sorted by id, in an order that does not depend on
// which thread comes first, and each row of the table is the sum of its tokens' gradients in the order of the text.
// Ids that are none of the table's are left out.
#include "common.cuh"

constexpr int TILE = 512;  // tokens, one a thread

// ranks[i]: how many tokens of the same tile before token i have its id; counts[tile][id]: how many the tile has.
// counts must come as zeros.
__global__ void __launch_bounds__(TILE) rank_tokens(const i64* ids, int* ranks, int* counts, i64 n, i64 n_rows) {
    __shared__ i64 tile[TILE];
    const i64 i = (i64)blockIdx.x * TILE + threadIdx.x;
    const i64 id = i < n && ids[i] >= 0 && ids[i] < n_rows ? ids[i] : -1;
    tile[threadIdx.x] = id;
    __syncthreads();
    if (id < 0) return;
    int before = 0, after = 0;
    for (int other = 0; other < TILE; ++other) {
        const int same = tile[other] == id;
        before += same && other < threadIdx.x;
        after += same && other > threadIdx.x;
    }
    ranks[i] = before;
    if (after == 0) counts[blockIdx.x * n_rows + id] = before + 1;
}

// counts[tile][id] becomes how many tokens of earlier tiles have the id; totals[id]: how many tokens have it.
__global__ void add_tiles(int* counts, int* totals, i64 n_tiles, i64 n_rows) {
    const i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= n_rows) return;
    int total = 0;
    for (i64 tile = 0; tile < n_tiles; ++tile) {
        const int here = counts[tile * n_rows + id];
        counts[tile * n_rows + id] = total;
        total += here;
    }
    totals[id] = total;
}

// starts[id]: how many tokens have a smaller id; starts[n_rows]: how many there are. One block of 1024 threads.
__global__ void LARGE_BLOCK start_rows(const int* totals, int* starts, i64 n_rows) {
    __shared__ int sums[1024];
    const i64 share = (n_rows + 1023) / 1024, first = threadIdx.x * share;
    const i64 last = first + share < n_rows ? first + share : n_rows;
    int sum = 0;
    for (i64 id = first; id < last; ++id) sum += totals[id];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int away = 1; away < 1024; away *= 2) {  // sums of this thread and those before it
        const int more = threadIdx.x >= away ? sums[threadIdx.x - away] : 0;
        __syncthreads();
        sums[threadIdx.x] += more;
        __syncthreads();
    }
    int start = sums[threadIdx.x] - sum;
    for (i64 id = first; id < last; ++id) {
        starts[id] = start;
        start += totals[id];
    }
    if (threadIdx.x == 1023) starts[n_rows] = sums[1023];
}

__global__ void __launch_bounds__(TILE) sort_tokens(
    const i64* ids, const int* ranks, const int* counts, const int* starts, int* sorted, i64 n, i64 n_rows
) {
    const i64 i = (i64)blockIdx.x * TILE + threadIdx.x;
    if (i >= n || ids[i] < 0 || ids[i] >= n_rows) return;
    sorted[starts[ids[i]] + counts[blockIdx.x * n_rows + ids[i]] + ranks[i]] = i;
}

// sums = tokens first, first + step, ... of `sorted`, for a team's columns from `column` on.
template <class T, int N>
__device__ inline void add_tokens(
    float (&sums)[N], const T* grad, const int* sorted, int first, int last, int step, i64 n, i64 column
) {
#pragma unroll
    for (int k = 0; k < N; ++k) sums[k] = 0.0f;
#pragma unroll 4
    for (int place = first; place < last; place += step) {
        float values[N];
        load(values, grad + sorted[place] * n + column);
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k] += values[k];
    }
}

// grad: (tokens, n); table: (n_rows, n), all of it written. A block has blockDim.y rows, one for each team; rows with
// more tokens than `many` are shared by all teams. N is a pack where n is a multiple of it and grad aligned, else 1.
// Dynamic shared memory: N floats a thread.
template <class T, int N>
__global__ void __launch_bounds__(512) sum_tokens(
    const T* grad, const int* sorted, const int* starts, float* table, i64 n_rows, i64 n, int many
) {
    extern __shared__ float found[];
    const i64 first_row = (i64)blockIdx.x * blockDim.y, own = first_row + threadIdx.y;
    for (i64 start = 0; start < n; start += (i64)blockDim.x * N) {
        const i64 column = start + threadIdx.x * N;
        if (own < n_rows && column < n && starts[own + 1] - starts[own] <= many) {
            float sums[N];
            add_tokens(sums, grad, sorted, starts[own], starts[own + 1], 1, n, column);
            store(table + own * n + column, sums);
        }
        for (i64 row = first_row; row < first_row + blockDim.y && row < n_rows; ++row) {
            if (starts[row + 1] - starts[row] <= many) continue;  // all threads agree
            float sums[N] = {};
            if (column < n)
                add_tokens(sums, grad, sorted, starts[row] + threadIdx.y, starts[row + 1], blockDim.y, n, column);
            __syncthreads();  // what was found for the row before has been read
#pragma unroll
            for (int k = 0; k < N; ++k) found[(threadIdx.y * blockDim.x + threadIdx.x) * N + k] = sums[k];
            __syncthreads();
            if (threadIdx.y == 0 && column < n) {
                for (int y = 1; y < blockDim.y; ++y)
#pragma unroll
                    for (int k = 0; k < N; ++k) sums[k] += found[(y * blockDim.x + threadIdx.x) * N + k];
                store(table + row * n + column, sums);
            }
        }
    }
}
