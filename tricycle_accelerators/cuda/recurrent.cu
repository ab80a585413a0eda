// What one step of a recurrent layer does beside its matrix products; one thread for each item and unit of the state.
// The roles of the arrays are those of kernels/recurrent.py: gates (B, n H) of this step, states before and after it
// (S, B, H) with `state_step` elements from one to the next, active (B,) or null.
#include "common.cuh"

__device__ inline float logistic(float x) { return 0.5f + 0.5f * tanhf(0.5f * x); }

// The unit of this thread, or -1.
__device__ inline i64 unit(i64 n_items, int size) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    return i < n_items * size ? i : -1;
}

// The gate that the state of `item` gives to column `c`.
__device__ inline float from_state(const float* recurrent, const float* bias, i64 item, int c, int width) {
    return recurrent[item * width + c] + (bias == nullptr ? 0.0f : bias[c]);
}

__global__ void rnn(
    float* gates, const float* recurrent, const float* bias, const float* before, float* after, const bool* active,
    i64 state_step, i64 n_items, int size, int relu
) {
    const i64 i = unit(n_items, size);
    if (i < 0) return;
    const i64 item = i / size;
    const float gate = gates[i] + from_state(recurrent, bias, item, i % size, size);
    gates[i] = gate;
    const float h = relu ? (gate < 0 ? 0.0f : gate) : tanhf(gate);
    after[i] = active == nullptr || active[item] ? h : before[i];
}

__global__ void gru(
    float* gates, const float* recurrent, const float* bias, const float* before, float* after, const bool* active,
    i64 state_step, i64 n_items, int size
) {
    const i64 i = unit(n_items, size);
    if (i < 0) return;
    const i64 item = i / size;
    const int c = i % size, width = 3 * size;
    float* gate = gates + item * width + c;
    const float part = from_state(recurrent, bias, item, c + 2 * size, width);
    const float r = logistic(gate[0] + from_state(recurrent, bias, item, c, width));
    const float z = logistic(gate[size] + from_state(recurrent, bias, item, c + size, width));
    const float n = tanhf(gate[2 * size] + r * part), h = before[i];
    gate[0] = r;
    gate[size] = z;
    gate[2 * size] = n;
    const bool moves = active == nullptr || active[item];
    after[i] = moves ? n + z * (h - n) : h;
    after[state_step + i] = moves ? part : before[state_step + i];
}

__global__ void lstm(
    float* gates, const float* recurrent, const float* bias, const float* before, float* after, const bool* active,
    i64 state_step, i64 n_items, int size
) {
    const i64 at = unit(n_items, size);
    if (at < 0) return;
    const i64 item = at / size;
    const int c = at % size, width = 4 * size;
    float* gate = gates + item * width + c;
    const float i = logistic(gate[0] + from_state(recurrent, bias, item, c, width));
    const float f = logistic(gate[size] + from_state(recurrent, bias, item, c + size, width));
    const float g = tanhf(gate[2 * size] + from_state(recurrent, bias, item, c + 2 * size, width));
    const float o = logistic(gate[3 * size] + from_state(recurrent, bias, item, c + 3 * size, width));
    gate[0] = i;
    gate[size] = f;
    gate[2 * size] = g;
    gate[3 * size] = o;
    const float cell = f * before[state_step + at] + i * g, tanh_cell = tanhf(cell);
    const bool moves = active == nullptr || active[item];
    after[at] = moves ? o * tanh_cell : before[at];
    after[state_step + at] = moves ? cell : before[state_step + at];
    after[2 * state_step + at] = moves ? tanh_cell : before[2 * state_step + at];
}

// Back in time: d (B, n H), and for the GRU a second one, `d_step` elements on, are the gradients of what went into the
// gates; d_states (S, B, H) turn into those of the states before, but for what goes through the weights; `grad`, with
// grad_step elements from one state to the next, is what the output of the step before adds.
__global__ void rnn_backward(
    const float* gates, const float* before, const float* after, const float* grad, float* d_states, float* d,
    const bool* active, i64 state_step, i64 grad_step, i64 d_step, i64 n_items, int size, int relu
) {
    const i64 i = unit(n_items, size);
    if (i < 0) return;
    const float h = after[i], dh = d_states[i];
    const bool moves = active == nullptr || active[i / size];
    d[i] = !moves ? 0.0f : relu ? (h > 0 ? dh : 0.0f) : dh * (1 - h * h);
    d_states[i] = (moves ? 0.0f : dh) + grad[i];
}

__global__ void gru_backward(
    const float* gates, const float* before, const float* after, const float* grad, float* d_states, float* d,
    const bool* active, i64 state_step, i64 grad_step, i64 d_step, i64 n_items, int size
) {
    const i64 i = unit(n_items, size);
    if (i < 0) return;
    const i64 item = i / size;
    const int c = i % size, width = 3 * size;
    const float* gate = gates + item * width + c;
    float *from_input = d + item * width + c, *from_output = from_input + d_step;
    const float r = gate[0], z = gate[size], n = gate[2 * size], dh = d_states[i];
    const bool moves = active == nullptr || active[item];
    const float dz = moves ? dh * (before[i] - n) * z * (1 - z) : 0.0f;
    const float dn = moves ? dh * (1 - z) * (1 - n * n) : 0.0f;
    const float dr = moves ? dn * after[state_step + i] * r * (1 - r) : 0.0f;
    from_input[0] = from_output[0] = dr;
    from_input[size] = from_output[size] = dz;
    from_input[2 * size] = dn;
    from_output[2 * size] = moves ? dn * r : 0.0f;
    d_states[i] = (moves ? dh * z : dh) + grad[i];
}

__global__ void lstm_backward(
    const float* gates, const float* before, const float* after, const float* grad, float* d_states, float* d,
    const bool* active, i64 state_step, i64 grad_step, i64 d_step, i64 n_items, int size
) {
    const i64 at = unit(n_items, size);
    if (at < 0) return;
    const i64 item = at / size, n = n_items * size;
    const int c = at % size, width = 4 * size;
    const float* gate = gates + item * width + c;
    const float i = gate[0], f = gate[size], g = gate[2 * size], o = gate[3 * size];
    const float dh = d_states[at], dc = d_states[n + at], tanh_cell = after[2 * state_step + at];
    const float inner = dc + dh * o * (1 - tanh_cell * tanh_cell);
    const bool moves = active == nullptr || active[item];
    float* to = d + item * width + c;
    to[0] = moves ? inner * g * i * (1 - i) : 0.0f;
    to[size] = moves ? inner * before[state_step + at] * f * (1 - f) : 0.0f;
    to[2 * size] = moves ? inner * i * (1 - g * g) : 0.0f;
    to[3 * size] = moves ? dh * tanh_cell * o * (1 - o) : 0.0f;
    d_states[at] = (moves ? 0.0f : dh) + grad[at];
    d_states[n + at] = (moves ? inner * f : dc) + grad[grad_step + at];
}
