"""Recurrent layers (RNN, GRU, LSTM) on the GPU: one matrix product and one CUDA kernel per time step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from tricycle.devices import Array
from tricycle.kernels import recurrent
from tricycle.kernels.dispatch import Kernel
from tricycle_accelerators.cuda import arrays, gemm, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import decline_when


def _decline_reason(weights: Array, *others: Array | None) -> str | None:
    """Return a reason unless all are contiguous, not empty, float32 (others also bool, or None); else None."""
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


def _forward(kernel: Kernel[..., None]) -> Callable[..., None]:
    """Return the CUDA version of a forward kernel (rnn, gru, lstm): per time step one product and one launch."""

    @decline_when(
        lambda gates, states, weights, bias, active, *_: _decline_reason(weights, gates, states, bias, active)
    )
    @wraps(kernel.reference, assigned=("__name__", "__qualname__"))
    def version(
        gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, *options: bool
    ) -> None:
        n_steps, n_items, _ = gates.shape
        size = states.shape[-1]
        products = arrays.empty_like(gates, gates.shape[1:])
        plan = launch.plan_elementwise(n_items * size, 1)
        numbers = i64(states[0].size), i64(n_items), i32(size), *map(i32, options)
        for t in range(n_steps):
            before, after = states[0, t], states[0, t + 1]
            moves = None if active is None else active[t]
            gemm.matmul(before, weights, None, products)
            operands = gates[t], products, bias, before, after, moves
            launch.launch("recurrent", kernel.reference.__name__, (), plan, *operands, *numbers)

    return version


def _backward(kernel: Kernel[..., None]) -> Callable[..., None]:
    """Return the CUDA version of a backward kernel, last time step first: per step one launch and one product."""

    @decline_when(
        lambda grad, gates, states, weights, active, d_gates, d_states, *_: _decline_reason(
            weights, grad, gates, states, active, d_gates, d_states
        )
    )
    @wraps(kernel.reference, assigned=("__name__", "__qualname__"))
    def version(
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
            launch.launch("recurrent", kernel.reference.__name__, (), plan, *operands, *numbers)
            d_output += gemm.matmul(d_gates[-1, t], across)

    return version


rnn = _forward(recurrent.rnn)
gru = _forward(recurrent.gru)
lstm = _forward(recurrent.lstm)
rnn_backward = _backward(recurrent.rnn_backward)
gru_backward = _backward(recurrent.gru_backward)
lstm_backward = _backward(recurrent.lstm_backward)
