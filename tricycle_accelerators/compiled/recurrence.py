"""Recurrent layers: whole sequences in one call, some items of the batch in each thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType, NotImplementedType
from typing import Any

import numpy as np

from tricycle.kernels.recurrent import Piece
from tricycle_accelerators import threads
from tricycle_accelerators.cpu.recurrence import Blocks

FEWEST_ROWS = 16  # of a call, from which on it pays to lay out the weights
FEWEST_ITEMS = 8  # of a thread: with fewer the weights come from memory more slowly than they are used
ALL_ACTIVE = np.zeros((0, 0), np.bool_)


# Cache: valid for the life of the process: a module.
@cache
def _loops() -> ModuleType:
    """What Numba compiles; the first call imports it, and compiles where that has not been done before."""
    from tricycle_accelerators.compiled import recurrent_loops

    return recurrent_loops


class _Panels(Blocks):
    """A matrix that is cut into panels when the loops here ask for it, once."""

    def __init__(self, matrix: np.ndarray) -> None:
        super().__init__(matrix)
        self.lock = threading.Lock()
        self.transposed: _Panels | None = None
        self.panels: np.ndarray | None = None

    @property
    def T(self) -> _Panels:
        with self.lock:
            if self.transposed is None:
                self.transposed = _Panels(self.matrix.T)
            return self.transposed

    def cut(self) -> np.ndarray:
        from tricycle_accelerators.compiled import products

        with self.lock:
            if self.panels is None:
                self.panels = products.panels(self.matrix)
            return self.panels


def repeated(matrix: np.ndarray) -> Any:
    return _Panels(matrix) if matrix.dtype == np.float32 else NotImplemented


def _fits(weights: Any, *arrays: np.ndarray) -> bool:
    """Whether there is enough to do (in the first array), and what each step has of every array is in one piece."""
    matrix = weights.matrix if isinstance(weights, _Panels) else weights
    return (
        isinstance(matrix, np.ndarray)
        and matrix.dtype == np.float32
        and matrix.size > 0
        and math.prod(arrays[0].shape[:2]) >= FEWEST_ROWS
        and all(_whole_rows(a) and a.strides[-2] == 4 * a.shape[-1] for a in arrays)
    )


def _whole_rows(array: np.ndarray) -> bool:
    """Whether it is float32 with its last axis in one piece, in memory as the loops are compiled for: aligned and not
    read-only.
    """
    return array.dtype == np.float32 and array.flags.behaved and array.strides[-1] == 4


def _panels(weights: Any) -> _Panels:
    return weights if isinstance(weights, _Panels) else _Panels(weights)


def _mask(active: np.ndarray | None) -> np.ndarray:
    """(T, B), a copy: what is not may be read-only."""
    return ALL_ACTIVE if active is None else np.array(active[..., 0], np.bool_, order="C")


def _bias(bias: np.ndarray | None, panels: np.ndarray) -> np.ndarray:
    """As long as the panels are wide."""
    n_panels, _, width = panels.shape
    padded = np.zeros(n_panels * width, np.float32)
    if bias is not None:
        padded[: len(bias)] = bias
    return padded


def pipeline(
    gates: np.ndarray, pieces: list[Piece], first: Callable[[Piece], None], then: Callable[[Piece], None]
) -> NotImplementedType | None:
    """Threads take some items each through the whole sequence."""
    n_items = gates.shape[1]
    n_parts = min(threads.n_threads(), n_items // FEWEST_ITEMS)
    if gates.dtype != np.float32 or (n_parts < 2 and threads.n_threads() > 1):
        return NotImplemented
    n_parts = max(1, n_parts)
    ends = [n_items * part // n_parts for part in range(n_parts + 1)]

    def work(part: int) -> None:
        items = slice(ends[part], ends[part + 1])
        for steps, _ in pieces:
            first((steps, items))
            then((steps, items))

    threads.parallel(work, range(n_parts))
    return None


def project(x: np.ndarray, matrix: Any, bias: np.ndarray | None, out: np.ndarray) -> NotImplementedType | None:
    if not isinstance(matrix, _Panels) or not matrix.matrix.size or not _whole_rows(x) or not _whole_rows(out):
        return NotImplemented
    from tricycle_accelerators.compiled import products

    cut = matrix.cut()
    products.multiply(x, cut, _bias(bias, cut), out)
    return None


def _forward(
    loop: str,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    bias: np.ndarray | None,
    active: np.ndarray | None,
    *options: Any,
) -> NotImplementedType | None:
    if not _fits(weights, gates, states):
        return NotImplemented
    cut = _panels(weights).cut()
    getattr(_loops(), loop)(gates, *states, cut, _bias(bias, cut), _mask(active), *options)
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
    if not _fits(weights, gates, grad, states, d_gates, d_states):
        return NotImplemented
    cut = _panels(weights).T.cut()
    _loops().rnn_back(*grad, *states, cut, _mask(active), *d_gates, *d_states, relu)
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
    if not _fits(weights, gates, grad, states, d_gates, d_states):
        return NotImplemented
    cut = _panels(weights).T.cut()
    _loops().gru_back(*grad, gates, *states, cut, _mask(active), *d_gates, *d_states)
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
    if not _fits(weights, gates, grad, states, d_gates, d_states):
        return NotImplemented
    _, c, tanh_c = states
    cut = _panels(weights).T.cut()
    _loops().lstm_back(*grad, gates, c, tanh_c, cut, _mask(active), *d_gates, *d_states)
    return None
