// One update of AdamW, in place (Loshchilov and Hutter 2019, algorithm 2). Weights and moments are float32.
#include "common.cuh"

// What changes from step to step comes as a number, or from the device where a pointer is given: then the host need not
// know it. `factor` multiplies the gradient; where it is not above 0 nothing changes.
template <class T>
__global__ void adamw(
    float* weights, const T* grad, float* first, float* second, i64 n, float step, const float* step_at,
    float learning_rate, const float* learning_rate_at, const float* factor_at, float beta1, float beta2,
    float log_beta1, float log_beta2, float eps, float decay
) {
    const float factor = factor_at != nullptr ? *factor_at : 1.0f;
    if (!(factor > 0)) return;
    if (step_at != nullptr) step = *step_at;
    if (learning_rate_at != nullptr) learning_rate = *learning_rate_at;
    // 1 - beta^step, which loses no digits where beta^step is close to 1
    const float correction1 = -expm1f(step * log_beta1), root2 = sqrtf(-expm1f(step * log_beta2));
    const float rate = learning_rate / correction1, kept = 1 - learning_rate * decay;
    const bool whole = aligned(weights) && aligned(grad) && aligned(first) && aligned(second);
    each<PACK<T>>(n, whole, [&](i64 i, auto count) {
        constexpr int N = decltype(count)::value;
        float w[N], g[N], m[N], v[N];
        load(w, weights + i);
        load(g, grad + i);
        load(m, first + i);
        load(v, second + i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            g[k] *= factor;
            m[k] = beta1 * m[k] + (1 - beta1) * g[k];
            v[k] = beta2 * v[k] + (1 - beta2) * g[k] * g[k];
            w[k] = kept * w[k] - rate * m[k] / (sqrtf(v[k]) / root2 + eps);
        }
        store(weights + i, w);
        store(first + i, m);
        store(second + i, v);
    });
}
