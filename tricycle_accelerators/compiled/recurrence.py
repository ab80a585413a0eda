"""Recurrent layers: whole sequences in one call, some items of the batch in each thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from types import ModuleType, NotImplementedType
from typing import Any

import numpy as np

from tricycle_accelerators import threads
from tricycle_accelerators.cpu.recurrence import Blocks

FEWEST_ROWS = 16  # of all steps, from which on it pays to lay out the weights
FEWEST_ITEMS = 8  # of a thread: with fewer the weights come from memory more slowly than they are used
NO_BIAS = np.zeros(0, np.float32)
ALL_ACTIVE = np.zeros((0, 0), np.bool_)


@cache
def _loops() -> ModuleType:
    """What Numba compiles; the first call imports it, and compiles where that has not been done before."""
    from tricycle_accelerators.compiled import recurrent_loops

    return recurrent_loops


class _Panels(Blocks):
    """A matrix that is cut into panels when the loops here ask for it, once."""

    @cached_property
    def T(self) -> _Panels:
        return _Panels(self.matrix.T)

    @cached_property
    def panels(self) -> np.ndarray:
        from tricycle_accelerators.compiled import products

        return products.panels(self.matrix)


def repeated(matrix: np.ndarray) -> Any:
    return _Panels(matrix) if matrix.dtype == np.float32 else NotImplemented


def _fits(n_steps: int, n_items: int, weights: Any, *arrays: np.ndarray) -> bool:
    """Whether there is enough to do, and each array float32 in one piece: aligned, and not read-only."""
    matrix = weights.matrix if isinstance(weights, _Panels) else weights
    return (
        isinstance(matrix, np.ndarray)
        and matrix.dtype == np.float32
        and matrix.size > 0
        and n_steps * n_items >= FEWEST_ROWS
        and all(a.dtype == np.float32 and a.flags.carray for a in arrays)
    )


def _panels(weights: Any) -> _Panels:
    return weights if isinstance(weights, _Panels) else _Panels(weights)


def _run(loop: Callable[..., None], n_items: int, *arguments: Any) -> None:
    """Threads take some items each through all steps, for items know nothing of each other."""
    n_parts = max(1, min(threads.n_threads(), n_items // FEWEST_ITEMS))
    ends = [n_items * part // n_parts for part in range(n_parts + 1)]
    threads.parallel(lambda part: loop(*arguments, ends[part], ends[part + 1]), range(n_parts))


def _mask(active: np.ndarray | None) -> np.ndarray:
    """(T, B)."""
    return ALL_ACTIVE if active is None else np.ascontiguousarray(active[..., 0], np.bool_)


def _bias(bias: np.ndarray | None) -> np.ndarray:
    return NO_BIAS if bias is None else np.ascontiguousarray(bias, np.float32)


def _forward(
    loop: str,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    bias: np.ndarray | None,
    active: np.ndarray | None,
    *options: Any,
) -> NotImplementedType | None:
    n_steps, n_items, _ = gates.shape
    if not _fits(n_steps, n_items, weights, gates, *states):
        return NotImplemented
    cut = _panels(weights).panels
    _run(getattr(_loops(), loop), n_items, gates, *states, cut, _bias(bias), _mask(active), *options)
    return None


# -------------------------------------------------------------------- Elman's
def rnn(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None, relu: bool
) -> NotImplementedType | None:
    return _forward("rnn", gates, states, weights, bias, active, relu)


def rnn_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
    relu: bool,
) -> NotImplementedType | None:
    n_steps, n_items, _ = gates.shape
    if not _fits(n_steps, n_items, weights, *grad, *states, *d_gates, *d_states):
        return NotImplemented
    cut = _panels(weights).T.panels
    _run(_loops().rnn_back, n_items, *grad, *states, cut, _mask(active), *d_gates, *d_states, relu)
    return None


# -------------------------------------------------------------------- GRU
def gru(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> NotImplementedType | None:
    return _forward("gru", gates, states, weights, bias, active)


def gru_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> NotImplementedType | None:
    n_steps, n_items, _ = gates.shape
    if not _fits(n_steps, n_items, weights, *grad, gates, *states, *d_gates, *d_states):
        return NotImplemented
    cut = _panels(weights).T.panels
    _run(_loops().gru_back, n_items, *grad, gates, *states, cut, _mask(active), *d_gates, *d_states)
    return None


# -------------------------------------------------------------------- LSTM
def lstm(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> NotImplementedType | None:
    return _forward("lstm", gates, states, weights, bias, active)


def lstm_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> NotImplementedType | None:
    n_steps, n_items, _ = gates.shape
    _, c, tanh_c = states
    if not _fits(n_steps, n_items, weights, *grad, gates, c, tanh_c, *d_gates, *d_states):
        return NotImplemented
    cut = _panels(weights).T.panels
    _run(_loops().lstm_back, n_items, *grad, gates, c, tanh_c, cut, _mask(active), *d_gates, *d_states)
    return None
