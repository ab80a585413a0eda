"""Steps of LSTM and GRU, each in one pass over memory."""

from __future__ import annotations

from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.kernels.reference.recurrence import back_through_time, through_time
from tricycle_accelerators.compiled.generation import training_loops
from tricycle_accelerators.cpu.recurrence import by_items


def _fits(*arrays: np.ndarray) -> bool:
    """Whether each step of these is float32 and in one piece, in memory as the loops are compiled for: aligned, and not
    read-only.
    """
    return all(
        a.dtype == np.float32 and a.flags.behaved and a.strides[-1] == 4 and a.strides[-2] == 4 * a.shape[-1]
        for a in arrays
    )


def lstm(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> NotImplementedType | None:
    if not _fits(gates, states):
        return NotImplemented
    by_items(_lstm, gates, states, weights, bias, active)
    return None


def _lstm(gates: np.ndarray, states: np.ndarray, weights: Any, bias: Any, active: Any) -> None:
    compute = training_loops().lstm_step

    def step(gate: np.ndarray, recurrent: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        compute(gate, np.ascontiguousarray(recurrent), before[1], *after)

    through_time(step, gates, states, weights, bias, active)


def lstm_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> NotImplementedType | None:
    if not _fits(gates, states, d_gates, d_states):
        return NotImplemented
    by_items(_lstm_backward, grad, gates, states, weights, active, d_gates, d_states)
    return None


def _lstm_backward(grad: Any, gates: Any, states: Any, weights: Any, active: Any, d_gates: Any, d_states: Any) -> None:
    compute = training_loops().lstm_step_back

    def step(gate: np.ndarray, before: np.ndarray, after: np.ndarray, d_states: np.ndarray, d: np.ndarray) -> None:
        compute(gate, before[1], after[2], *d_states, d[0])

    back_through_time(step, grad, gates, states, weights, active, d_gates, d_states)


def gru(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> NotImplementedType | None:
    if not _fits(gates, states):
        return NotImplemented
    by_items(_gru, gates, states, weights, bias, active)
    return None


def _gru(gates: np.ndarray, states: np.ndarray, weights: Any, bias: Any, active: Any) -> None:
    compute = training_loops().gru_step

    def step(gate: np.ndarray, recurrent: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        compute(gate, np.ascontiguousarray(recurrent), before[0], *after)

    through_time(step, gates, states, weights, bias, active)


def gru_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> NotImplementedType | None:
    if not _fits(gates, states, d_gates, d_states):
        return NotImplemented
    by_items(_gru_backward, grad, gates, states, weights, active, d_gates, d_states)
    return None


def _gru_backward(grad: Any, gates: Any, states: Any, weights: Any, active: Any, d_gates: Any, d_states: Any) -> None:
    compute = training_loops().gru_step_back

    def step(gate: np.ndarray, before: np.ndarray, after: np.ndarray, d_states: np.ndarray, d: np.ndarray) -> None:
        compute(gate, before[0], after[1], d_states[0], *d)

    back_through_time(step, grad, gates, states, weights, active, d_gates, d_states)
