"""Steps of LSTM and GRU, each in one pass over memory."""

from __future__ import annotations

from functools import partial
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.kernels.reference.recurrence import Step, StepBack, back_through_time, through_time
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


def _forward(step: Step, gates: np.ndarray, states: np.ndarray, *rest: Any) -> NotImplementedType | None:
    if not _fits(gates, states):
        return NotImplemented
    by_items(partial(through_time, step), gates, states, *rest)
    return None


def _backward(
    step: StepBack,
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
    by_items(partial(back_through_time, step), grad, gates, states, weights, active, d_gates, d_states)
    return None


# -------------------------------------------------------------------- LSTM
def lstm(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> NotImplementedType | None:
    return _forward(_lstm_step, gates, states, weights, bias, active)


def _lstm_step(gate: np.ndarray, recurrent: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    training_loops().lstm_step(gate, np.ascontiguousarray(recurrent), before[1], *after)


def lstm_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> NotImplementedType | None:
    return _backward(_lstm_step_back, grad, gates, states, weights, active, d_gates, d_states)


def _lstm_step_back(
    gate: np.ndarray, before: np.ndarray, after: np.ndarray, d_states: np.ndarray, d: np.ndarray
) -> None:
    training_loops().lstm_step_back(gate, before[1], after[2], *d_states, d[0])


# -------------------------------------------------------------------- GRU
def gru(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> NotImplementedType | None:
    return _forward(_gru_step, gates, states, weights, bias, active)


def _gru_step(gate: np.ndarray, recurrent: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    training_loops().gru_step(gate, np.ascontiguousarray(recurrent), before[0], *after)


def gru_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> NotImplementedType | None:
    return _backward(_gru_step_back, grad, gates, states, weights, active, d_gates, d_states)


def _gru_step_back(
    gate: np.ndarray, before: np.ndarray, after: np.ndarray, d_states: np.ndarray, d: np.ndarray
) -> None:
    training_loops().gru_step_back(gate, before[0], after[1], d_states[0], *d)
