"""Numba loops over the time steps of RNN, GRU and LSTM layers, one call per sequence.

The import compiles the loops or loads cached machine code.

Shapes are those of `tricycle/kernels/recurrent.py`. `weight_panels` is the weight matrix (transposed in the backward
loops), packed into panels by `packed_matmul.py`; a bias has the length of all panels together. `active` (T, B) has no
rows if all items are active in all steps. Every other array is contiguous within a time step.
"""

from __future__ import annotations

import numba
import numpy as np

from tricycle_accelerators.compiled.jit import ONE, ZERO, compile_loop, contiguous_row, copy_row, exp
from tricycle_accelerators.compiled.packed_matmul import PANEL, multiply_packed


@numba.njit(inline="always")
def _sigmoid(x: np.float32) -> np.float32:
    """Compute 1 / (1 + e^-x) of a float32."""
    return ONE / (ONE + exp(-x))


@numba.njit(inline="always")
def _tanh(x: np.float32) -> np.float32:
    """Compute tanh of a float32, near 0 by its series and elsewhere by the sigmoid."""
    square = x * x
    series = np.float32(62 / 2835)
    series = series * square - np.float32(17 / 315)
    series = series * square + np.float32(2 / 15)
    series = series * square - np.float32(1 / 3)
    series = x + x * (series * square)
    far = np.float32(2) * _sigmoid(np.float32(2) * x) - ONE
    return series if square < np.float32(0.0625) else far


@compile_loop("void(f4[::1], f4[::1])")
def _to_sigmoid(x: np.ndarray, more: np.ndarray) -> None:
    """Replace x by sigmoid(x + more), elementwise."""
    for j in range(len(x)):
        x[j] = _sigmoid(x[j] + more[j])


@compile_loop("void(f4[::1], f4[::1])")
def _to_tanh(x: np.ndarray, more: np.ndarray) -> None:
    """Replace x by tanh(x + more), elementwise."""
    for j in range(len(x)):
        x[j] = _tanh(x[j] + more[j])


@compile_loop("void(f4[::1], f4[::1])")
def _add(x: np.ndarray, more: np.ndarray) -> None:
    """Add a vector to x in place."""
    for j in range(len(x)):
        x[j] += more[j]


@compile_loop("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def _add_rows(x: np.ndarray, sums: np.ndarray, grad: np.ndarray) -> None:
    """Add `sums` and `grad` to the gradients x of states (B, H), in place."""
    for b in range(len(x)):
        row, product, slopes = x[b], sums[b], grad[b]
        for j in range(len(row)):
            row[j] += product[j] + slopes[j]


# -------------------------------------------------------------------- Elman's
@compile_loop("void(f4[:, :, :], f4[:, :, :], f4[:, :, ::1], f4[::1], b1[:, ::1], b1)")
def rnn(
    gates: np.ndarray,
    h: np.ndarray,
    weight_panels: np.ndarray,
    bias: np.ndarray,
    active: np.ndarray,
    relu: bool,
) -> None:
    """Run an Elman RNN (T, B, H) from h[0]: pre-activations into `gates`, states into h[1:], kept where inactive."""
    n_items, size = h.shape[1:]
    sums = np.empty((1, n_items, size), np.float32)
    for t in range(len(gates)):
        multiply_packed(h[t : t + 1], weight_panels, bias, sums)
        gate_rows, before, after = contiguous_row(gates, t), contiguous_row(h, t), contiguous_row(h, t + 1)
        for b in range(n_items):
            gate, more, new = gate_rows[b], sums[0, b], after[b]
            if relu:
                for j in range(size):
                    gate[j] += more[j]
                    new[j] = max(gate[j], ZERO)
            else:
                for j in range(size):
                    gate[j] += more[j]
                    new[j] = _tanh(gate[j])
            if len(active) and not active[t, b]:
                copy_row(before[b], new)


@compile_loop("void(f4[:, :, :], f4[:, :, :], f4[:, :, ::1], b1[:, ::1], f4[:, :, :], f4[:, ::1], b1)")
def rnn_backward(
    grad: np.ndarray,
    h: np.ndarray,
    weight_panels: np.ndarray,
    active: np.ndarray,
    d_gates: np.ndarray,
    dh: np.ndarray,
    relu: bool,
) -> None:
    """Write an Elman RNN's gradients `d_gates` (T, B, H); turn `dh` from the gradient of h[T] into that of h[0].

    grad[t] is the further gradient of h[t], t < T.
    """
    n_items, size = dh.shape
    sums = np.empty((1, n_items, size), np.float32)
    nothing = np.zeros(len(weight_panels) * PANEL, np.float32)
    for t in range(len(d_gates) - 1, -1, -1):
        d_rows, after = contiguous_row(d_gates, t), contiguous_row(h, t + 1)
        for b in range(n_items):
            d, slope, y = d_rows[b], dh[b], after[b]
            if len(active) and not active[t, b]:
                d[:] = ZERO
                continue
            if relu:
                for j in range(size):
                    d[j] = slope[j] if y[j] > ZERO else ZERO
            else:
                for j in range(size):
                    d[j] = slope[j] * (ONE - y[j] * y[j])
            slope[:] = ZERO
        multiply_packed(d_gates[t : t + 1], weight_panels, nothing, sums)
        _add_rows(dh, sums[0], contiguous_row(grad, t))


# -------------------------------------------------------------------- GRU
@compile_loop("void(f4[::1], f4[::1], f4[::1], f4[::1])")
def _gru_step(gate: np.ndarray, recurrent: np.ndarray, before: np.ndarray, h: np.ndarray) -> None:
    """Replace the inputs of gates r, z, n (3 H,) by their values; write the next state (H,) into h.

    In several loops, each over few arrays: of more the compiler does not see that they lie apart.
    """
    size = len(h)
    _to_sigmoid(gate[: 2 * size], recurrent[: 2 * size])
    r, z, n, of_n = gate[:size], gate[size : 2 * size], gate[2 * size :], recurrent[2 * size :]
    for j in range(size):
        n[j] = _tanh(n[j] + r[j] * of_n[j])
    for j in range(size):
        h[j] = n[j] + z[j] * (before[j] - n[j])


@compile_loop("void(f4[:, :, :], f4[:, :, :], f4[:, :, :], f4[:, :, ::1], f4[::1], b1[:, ::1])")
def gru(
    gates: np.ndarray,
    h: np.ndarray,
    recurrent_n: np.ndarray,
    weight_panels: np.ndarray,
    bias: np.ndarray,
    active: np.ndarray,
) -> None:
    """Run a GRU from h[0]: input parts in `gates` become values; write h[1:], n's state part to recurrent_n[1:]."""
    n_items, size = h.shape[1:]
    sums = np.empty((1, n_items, 3 * size), np.float32)
    for t in range(len(gates)):
        multiply_packed(h[t : t + 1], weight_panels, bias, sums)
        gate, before, after, part_before, part_after = (
            contiguous_row(gates, t),
            contiguous_row(h, t),
            contiguous_row(h, t + 1),
            contiguous_row(recurrent_n, t),
            contiguous_row(recurrent_n, t + 1),
        )
        for b in range(n_items):
            _gru_step(gate[b], sums[0, b], before[b], after[b])
            copy_row(sums[0, b, 2 * size :], part_after[b])
            if len(active) and not active[t, b]:
                copy_row(before[b], after[b])
                copy_row(part_before[b], part_after[b])


@compile_loop("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1])")
def _gru_step_back(
    gate: np.ndarray, before: np.ndarray, recurrent_n: np.ndarray, dh: np.ndarray, d: np.ndarray
) -> None:
    """Write a GRU step's gate input gradients (3 H,) into `d`; multiply the state's gradient `dh` by z in place."""
    size = len(dh)
    for j in range(size):
        r, z, n = gate[j], gate[size + j], gate[2 * size + j]
        rest = ONE - z
        dn = dh[j] * rest * (ONE - n * n)
        d[j] = dn * recurrent_n[j] * r * (ONE - r)
        d[size + j] = dh[j] * (before[j] - n) * z * rest
        d[2 * size + j] = dn
        dh[j] *= z


@compile_loop("void(f4[::1], f4[::1], f4[::1])")
def _with_reset(d_input_gates: np.ndarray, gate: np.ndarray, d_state_gates: np.ndarray) -> None:
    """Copy `d_input_gates` (3 H,) into `d_state_gates`, with the part of n multiplied by the reset gate r."""
    size = len(gate) // 3
    copy_row(d_input_gates, d_state_gates)
    n, r = d_state_gates[2 * size :], gate[:size]
    for j in range(size):
        n[j] *= r[j]


@compile_loop(
    "void(f4[:, :, :], f4[:, :, :], f4[:, :, :], f4[:, :, :], "
    "f4[:, :, ::1], b1[:, ::1], f4[:, :, :], f4[:, :, :], f4[:, ::1])"
)
def gru_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    h: np.ndarray,
    recurrent_n: np.ndarray,
    weight_panels: np.ndarray,
    active: np.ndarray,
    d_input_gates: np.ndarray,
    d_state_gates: np.ndarray,
    dh: np.ndarray,
) -> None:
    """Write a GRU's gate gradients; turn `dh`, of state h[T], into that of h[0], adding grad[t] of h[t], t < T."""
    n_items, size = dh.shape
    sums = np.empty((1, n_items, size), np.float32)
    nothing = np.zeros(len(weight_panels) * PANEL, np.float32)
    for t in range(len(gates) - 1, -1, -1):
        gate, before, after_part = contiguous_row(gates, t), contiguous_row(h, t), contiguous_row(recurrent_n, t + 1)
        of_input, of_state = contiguous_row(d_input_gates, t), contiguous_row(d_state_gates, t)
        for b in range(n_items):
            if len(active) and not active[t, b]:
                of_input[b] = ZERO
                of_state[b] = ZERO
            else:
                _gru_step_back(gate[b], before[b], after_part[b], dh[b], of_input[b])
                _with_reset(of_input[b], gate[b], of_state[b])
        multiply_packed(d_state_gates[t : t + 1], weight_panels, nothing, sums)
        _add_rows(dh, sums[0], contiguous_row(grad, t))


# -------------------------------------------------------------------- LSTM
@compile_loop("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1])")
def _lstm_step(
    gate: np.ndarray, recurrent: np.ndarray, before: np.ndarray, h: np.ndarray, c: np.ndarray, tanh_c: np.ndarray
) -> None:
    """Replace the inputs of gates i, f, g, o (4 H,) by their values; write the next h, c and tanh(c) (H,)."""
    size = len(h)
    _to_sigmoid(gate[: 2 * size], recurrent[: 2 * size])
    _to_tanh(gate[2 * size : 3 * size], recurrent[2 * size : 3 * size])
    _to_sigmoid(gate[3 * size :], recurrent[3 * size :])
    i, f, g, o = gate[:size], gate[size : 2 * size], gate[2 * size : 3 * size], gate[3 * size :]
    for j in range(size):
        c[j] = f[j] * before[j] + i[j] * g[j]
    for j in range(size):
        tanh_c[j] = _tanh(c[j])
        h[j] = o[j] * tanh_c[j]


@compile_loop("void(f4[:, :, :], f4[:, :, :], f4[:, :, :], f4[:, :, :], f4[:, :, ::1], f4[::1], b1[:, ::1])")
def lstm(
    gates: np.ndarray,
    h: np.ndarray,
    c: np.ndarray,
    tanh_c: np.ndarray,
    weight_panels: np.ndarray,
    bias: np.ndarray,
    active: np.ndarray,
) -> None:
    """Run an LSTM in place from h[0], c[0]: fill gates, h[1:], c[1:], tanh_c[1:]; inactive items keep their state."""
    n_items, size = h.shape[1:]
    sums = np.empty((1, n_items, 4 * size), np.float32)
    for t in range(len(gates)):
        multiply_packed(h[t : t + 1], weight_panels, bias, sums)
        gate, c_before, h_after, c_after, tanh_after = (
            contiguous_row(gates, t),
            contiguous_row(c, t),
            contiguous_row(h, t + 1),
            contiguous_row(c, t + 1),
            contiguous_row(tanh_c, t + 1),
        )
        for b in range(n_items):
            _lstm_step(gate[b], sums[0, b], c_before[b], h_after[b], c_after[b], tanh_after[b])
            if len(active) and not active[t, b]:
                copy_row(contiguous_row(h, t)[b], h_after[b])
                copy_row(c_before[b], c_after[b])
                copy_row(contiguous_row(tanh_c, t)[b], tanh_after[b])


@compile_loop("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1])")
def _lstm_step_back(
    gate: np.ndarray, before: np.ndarray, tanh_c: np.ndarray, dh: np.ndarray, dc: np.ndarray, d: np.ndarray
) -> None:
    """Write an LSTM step's gate input gradients (4 H,) to `d`; turn `dc` into the previous cell's, `dh` into 0."""
    size = len(dh)
    for j in range(size):
        i, f, g, o = gate[j], gate[size + j], gate[2 * size + j], gate[3 * size + j]
        slope = dc[j] + dh[j] * o * (ONE - tanh_c[j] * tanh_c[j])
        d[j] = slope * g * i * (ONE - i)
        d[size + j] = slope * before[j] * f * (ONE - f)
        d[2 * size + j] = slope * i * (ONE - g * g)
        d[3 * size + j] = dh[j] * tanh_c[j] * o * (ONE - o)
        dc[j] = slope * f
        dh[j] = ZERO


@compile_loop(
    "void(f4[:, :, :], f4[:, :, :], f4[:, :, :], f4[:, :, :], f4[:, :, :], "
    "f4[:, :, ::1], b1[:, ::1], f4[:, :, :], f4[:, ::1], f4[:, ::1])"
)
def lstm_backward(
    grad_h: np.ndarray,
    grad_c: np.ndarray,
    gates: np.ndarray,
    c: np.ndarray,
    tanh_c: np.ndarray,
    weight_panels: np.ndarray,
    active: np.ndarray,
    d_gates: np.ndarray,
    dh: np.ndarray,
    dc: np.ndarray,
) -> None:
    """Write LSTM `d_gates`; turn dh, dc of states T into those of states 0, adding grad_h[t], grad_c[t], t < T."""
    n_items, size = dh.shape
    sums = np.empty((1, n_items, size), np.float32)
    nothing = np.zeros(len(weight_panels) * PANEL, np.float32)
    for t in range(len(gates) - 1, -1, -1):
        gate, before, after, d, slopes = (
            contiguous_row(gates, t),
            contiguous_row(c, t),
            contiguous_row(tanh_c, t + 1),
            contiguous_row(d_gates, t),
            contiguous_row(grad_c, t),
        )
        for b in range(n_items):
            if len(active) and not active[t, b]:
                d[b] = ZERO
            else:
                _lstm_step_back(gate[b], before[b], after[b], dh[b], dc[b], d[b])
            _add(dc[b], slopes[b])
        multiply_packed(d_gates[t : t + 1], weight_panels, nothing, sums)
        _add_rows(dh, sums[0], contiguous_row(grad_h, t))
