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
    const i64 i = pack_start<4>();
    if (!(factor > 0) || i >= n) return;
    if (step_at != nullptr) step = *step_at;
    if (learning_rate_at != nullptr) learning_rate = *learning_rate_at;
    // 1 - beta^step, which loses no digits where beta^step is close to 1
    const float correction1 = -expm1f(step * log_beta1), root2 = sqrtf(-expm1f(step * log_beta2));
    float w[4], g[4], m[4], v[4];
    load(w, weights + i, n - i);
    load(g, grad + i, n - i);
    load(m, first + i, n - i);
    load(v, second + i, n - i);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        g[k] *= factor;
        m[k] = beta1 * m[k] + (1 - beta1) * g[k];
        v[k] = beta2 * v[k] + (1 - beta2) * g[k] * g[k];
        w[k] *= 1 - learning_rate * decay;
        w[k] -= learning_rate / correction1 * m[k] / (sqrtf(v[k]) / root2 + eps);
    }
    store(weights + i, w, n - i);
    store(first + i, m, n - i);
    store(second + i, v, n - i);
}
