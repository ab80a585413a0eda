"""Recurrent layers (RNN, GRU, LSTM) on the GPU: one matrix product and one CUDA kernel per time step."""

from __future__ import annotations

from typing import Any

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, gemm, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import decline_when


def _decline_reason(weights: Array, *others: Array | None) -> str | None:
    for x in others:
        if x is None:
            continue
        if x.dtype.name not in ("float32", "bool"):
            return f"float32, got {x.dtype}"
        if not x.flags.c_contiguous:
            return "arrays in one piece"
        if not x.size:
            return "an empty array"
    return None if weights.dtype == f32 else f"weights in float32, got {weights.dtype}"


def _forward(
    name: str, gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, *options: bool
) -> None:
    n_steps, n_items, _ = gates.shape
    size = states.shape[-1]
    recurrent = arrays.empty_like(gates, gates.shape[1:])
    plan = launch.plan_elementwise(n_items * size, 1)
    numbers = i64(states[0].size), i64(n_items), i32(size), *map(i32, options)
    for t in range(n_steps):
        before, after = states[0, t], states[0, t + 1]
        moves = None if active is None else active[t]
        gemm.matmul(before, weights, None, recurrent)
        launch.launch("recurrent", name, (), plan, gates[t], recurrent, bias, before, after, moves, *numbers)


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
) -> None:
    n_steps, n_items, _ = gates.shape
    size = states.shape[-1]
    across = weights.T
    d_output = d_states[0]
    plan = launch.plan_elementwise(n_items * size, 1)
    strides = i64(states[0].size), i64(grad[0].size), i64(d_gates[0].size)
    numbers = *strides, i64(n_items), i32(size), *map(i32, options)
    for t in reversed(range(n_steps)):
        moves = None if active is None else active[t]
        operands = gates[t], states[0, t], states[0, t + 1], grad[0, t], d_states, d_gates[0, t], moves
        launch.launch("recurrent", name, (), plan, *operands, *numbers)
        d_output += gemm.matmul(d_gates[-1, t], across)


def _forward_decline_reason(
    gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, *_: Any, **__: Any
) -> str | None:
    return _decline_reason(weights, gates, states, bias, active)


@decline_when(_forward_decline_reason)
def rnn(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, relu: bool) -> None:
    """Run an RNN from states[:, 0] (n, T + 1, B, H): overwrite gates (T, B, ...), write states[:, 1:]; float32 only."""
    _forward("rnn", gates, states, weights, bias, active, relu)


@decline_when(_forward_decline_reason)
def gru(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None) -> None:
    """Run a GRU from states[:, 0] (n, T + 1, B, H): overwrite gates (T, B, ...), write states[:, 1:]; float32 only."""
    _forward("gru", gates, states, weights, bias, active)


@decline_when(_forward_decline_reason)
def lstm(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None) -> None:
    """Run an LSTM from states[:, 0] (n, T + 1, B, H): overwrite gates (T, B, ...), write states[:, 1:]; float32."""
    _forward("lstm", gates, states, weights, bias, active)


def _backward_decline_reason(
    grad: Array,
    gates: Array,
    states: Array,
    weights: Array,
    active: Array | None,
    d_gates: Array,
    d_states: Array,
    *_: Any,
    **__: Any,
) -> str | None:
    return _decline_reason(weights, grad, gates, states, active, d_gates, d_states)


@decline_when(_backward_decline_reason)
def rnn_backward(
    grad: Array,
    gates: Array,
    states: Array,
    weights: Array,
    active: Array | None,
    d_gates: Array,
    d_states: Array,
    relu: bool,
) -> None:
    """Backpropagate through an RNN: write `d_gates`; turn `d_states` of the last states into that of the first."""
    _backward("rnn_backward", grad, gates, states, weights, active, d_gates, d_states, relu)


@decline_when(_backward_decline_reason)
def gru_backward(
    grad: Array, gates: Array, states: Array, weights: Array, active: Array | None, d_gates: Array, d_states: Array
) -> None:
    """Backpropagate through a GRU: write `d_gates`; turn `d_states` of the last states into that of the first."""
    _backward("gru_backward", grad, gates, states, weights, active, d_gates, d_states)


@decline_when(_backward_decline_reason)
def lstm_backward(
    grad: Array, gates: Array, states: Array, weights: Array, active: Array | None, d_gates: Array, d_states: Array
) -> None:
    """Backpropagate through an LSTM: write `d_gates`; turn `d_states` of the last states into that of the first."""
    _backward("lstm_backward", grad, gates, states, weights, active, d_gates, d_states)
