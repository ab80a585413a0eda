"""Recurrent layers: a product and one kernel for each step in time."""

from __future__ import annotations

from types import NotImplementedType

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, gemm, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64


def _fits(weights: Array, *others: Array | None) -> bool:
    """Whether the kernels take these: contiguous float32 (and booleans), and something to do."""
    present = [array for array in others if array is not None]
    plain = all(a.flags.c_contiguous and a.size and a.dtype.name in ("float32", "bool") for a in present)
    return plain and weights.dtype == f32


def _forward(
    name: str, gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, *options: bool
) -> NotImplementedType | None:
    if not _fits(weights, gates, states, bias, active):
        return NotImplemented
    n_steps, n_items, _ = gates.shape
    size = states.shape[-1]
    recurrent = arrays.empty(gates, gates.shape[1:])
    plan = launch.elementwise(n_items * size, 1)
    numbers = i64(states[0].size), i64(n_items), i32(size), *map(i32, options)
    for t in range(n_steps):
        before, after = states[0, t], states[0, t + 1]
        moves = None if active is None else active[t]
        gemm.matmul(before, weights, None, recurrent)
        launch.launch("recurrent", name, (), plan, gates[t], recurrent, bias, before, after, moves, *numbers)
    return None


def _backward(
    name: str,
    grad: Array,
    gates: Array,
    states: Array,
    weights: Array,
    active: Array | None,
    d_gates: Array,
    d_states: Array,
    *options: bool,
) -> NotImplementedType | None:
    if not _fits(weights, grad, gates, states, active, d_gates, d_states):
        return NotImplemented
    n_steps, n_items, _ = gates.shape
    size = states.shape[-1]
    across = weights.T
    d_output = d_states[0]
    plan = launch.elementwise(n_items * size, 1)
    strides = i64(states[0].size), i64(grad[0].size), i64(d_gates[0].size)
    numbers = *strides, i64(n_items), i32(size), *map(i32, options)
    for t in reversed(range(n_steps)):
        moves = None if active is None else active[t]
        operands = gates[t], states[0, t], states[0, t + 1], grad[0, t], d_states, d_gates[0, t], moves
        launch.launch("recurrent", name, (), plan, *operands, *numbers)
        d_output += gemm.matmul(d_gates[-1, t], across)
    return None


def rnn(
    gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, relu: bool
) -> NotImplementedType | None:
    return _forward("rnn", gates, states, weights, bias, active, relu)


def gru(
    gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None
) -> NotImplementedType | None:
    return _forward("gru", gates, states, weights, bias, active)


def lstm(
    gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None
) -> NotImplementedType | None:
    return _forward("lstm", gates, states, weights, bias, active)


def rnn_backward(
    grad: Array,
    gates: Array,
    states: Array,
    weights: Array,
    active: Array | None,
    d_gates: Array,
    d_states: Array,
    relu: bool,
) -> NotImplementedType | None:
    return _backward("rnn_backward", grad, gates, states, weights, active, d_gates, d_states, relu)


def gru_backward(
    grad: Array, gates: Array, states: Array, weights: Array, active: Array | None, d_gates: Array, d_states: Array
) -> NotImplementedType | None:
    return _backward("gru_backward", grad, gates, states, weights, active, d_gates, d_states)


def lstm_backward(
    grad: Array, gates: Array, states: Array, weights: Array, active: Array | None, d_gates: Array, d_states: Array
) -> NotImplementedType | None:
    return _backward("lstm_backward", grad, gates, states, weights, active, d_gates, d_states)
