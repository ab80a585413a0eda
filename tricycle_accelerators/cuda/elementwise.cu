// One result for each element, with nothing shared between threads.
#include "common.cuh"

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f, CUBIC = 0.044715f;

__device__ inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

// gelu(x) = x g(v) with v = 2 sqrt(2 / pi) (x + 0.044715 x^3), for tanh(v / 2) / 2 + 1 / 2 is the logistic function.
__device__ inline float gelu_gate(float x) {
    const float v = 2 * SQRT_2_OVER_PI * x * (1 + CUBIC * x * x);
    return __fdividef(1.0f, 1.0f + __expf(-v));
}

template <class T> __global__ void gelu(const T* x, T* y, i64 n) {
    each<PACK<T>>(n, aligned(x) && aligned(y), [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float a[N];
        load(a, x + i);
#pragma unroll
        for (int k = 0; k < N; ++k) a[k] *= gelu_gate(a[k]);
        store(y + i, a);
    });
}

// y = join(a, b) for arrays of one size; y may be a or b.
template <class T, class Join> __device__ inline void pairwise(const T* a, const T* b, T* y, i64 n, Join join) {
    each<PACK<T>>(n, aligned(a) && aligned(b) && aligned(y), [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float left[N], right[N];
        load(left, a + i);
        load(right, b + i);
#pragma unroll
        for (int k = 0; k < N; ++k) left[k] = join(left[k], right[k]);
        store(y + i, left);
    });
}

// dx = grad times the derivative, g + x g (1 - g) v', which costs less to compute again than to write and read.
template <class T> __global__ void gelu_backward(const T* grad, const T* x, T* dx, i64 n) {
    pairwise(grad, x, dx, n, [](float grad, float x) {
        const float g = gelu_gate(x), dv = 2 * SQRT_2_OVER_PI * (1 + 3 * CUBIC * x * x);
        return grad * (g * (1 + x * (1 - g) * dv));
    });
}

template <class T> __global__ void add(const T* a, const T* b, T* y, i64 n) {
    pairwise(a, b, y, n, [](float a, float b) { return a + b; });
}

template <class T> __global__ void multiply(const T* a, const T* b, T* y, i64 n) {
    pairwise(a, b, y, n, [](float a, float b) { return a * b; });
}

template <class T> __global__ void relu_squared(const T* x, T* y, T* slope, i64 n) {
    each<PACK<T>>(n, aligned(x) && aligned(y) && aligned(slope), [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float a[N], d[N];
        load(a, x + i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float positive = a[k] < 0 ? 0.0f : a[k];  // NaN stays
            a[k] = positive * positive;
            d[k] = 2 * positive;
        }
        store(y + i, a);
        store(slope + i, d);
    });
}

template <class T> __global__ void sigmoid(const T* x, T* y, i64 n) {
    each<PACK<T>>(n, aligned(x) && aligned(y), [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float a[N];
        load(a, x + i);
#pragma unroll
        for (int k = 0; k < N; ++k) a[k] = logistic(a[k]);
        store(y + i, a);
    });
}

// By a number that lies on the device.
template <class T> __global__ void scale(const T* a, const float* factor, T* y, i64 n) {
    const float by = *factor;
    each<PACK<T>>(n, aligned(a) && aligned(y), [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float values[N];
        load(values, a + i);
#pragma unroll
        for (int k = 0; k < N; ++k) values[k] *= by;
        store(y + i, values);
    });
}

// From float32 to 16 bits, or back.
template <class From, class To> __global__ void cast(const From* x, To* y, i64 n) {
    each<8>(n, aligned(x) && aligned(y), [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float a[N];
        load(a, x + i);
        store(y + i, a);
    });
}

// Turn pairs (x_i, x_{i + D/2}) by the angle of their position. x: (B, T, H, D) with strides between items, positions and
// heads; cos and sin: (T, D/2); y: (B, T, H, D) without gaps. One thread a pair.
template <class T>
__global__ void rotate(
    const T* x, const float* cos, const float* sin, T* y, i64 n_pairs, int n_tokens, int n_heads, int half,
    i64 item_stride, i64 token_stride, i64 head_stride
) {
    const i64 pair = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= n_pairs) return;
    const int i = pair % half, head = pair / half % n_heads;
    const i64 place = pair / half / n_heads, token = place % n_tokens, item = place / n_tokens;
    const T* from = x + item * item_stride + token * token_stride + head * head_stride + i;
    T* to = y + (place * n_heads + head) * 2 * half + i;
    const float a = to_float(from[0]), b = to_float(from[half]);
    const float c = cos[token * half + i], s = sin[token * half + i];
    to[0] = from_float<T>(a * c - b * s);
    to[half] = from_float<T>(b * c + a * s);
}
