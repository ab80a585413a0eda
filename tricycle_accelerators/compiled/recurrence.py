"""Recurrent layers: whole sequences in one call, some items of the batch in each thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from tricycle.kernels.recurrent import Piece
from tricycle_accelerators import threads
from tricycle_accelerators.providers import unless
from tricycle_accelerators.recurrent_blocks import Blocks

FEWEST_ROWS = 16  # of a call, from which on it pays to lay out the weights
FEWEST_ITEMS = 8  # of a thread: with fewer the weights come from memory more slowly than they are used
STEPS = "steps of float32 in one piece, aligned and not read-only"
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


def _why_not_repeated(matrix: np.ndarray) -> str | None:
    return None if matrix.dtype == np.float32 else f"float32 alone, got {matrix.dtype}"


@unless(_why_not_repeated)
def repeated(matrix: np.ndarray) -> _Panels:
    return _Panels(matrix)


def _why_not(weights: Any, *arrays: np.ndarray) -> str | None:
    """Return why not: too little to do (in the first array), or what a step has of an array is not in one piece."""
    matrix = weights.matrix if isinstance(weights, _Panels) else weights
    if not isinstance(matrix, np.ndarray) or matrix.dtype != np.float32 or not matrix.size:
        return "weights of float32 that the loops can lay out"
    if math.prod(arrays[0].shape[:2]) < FEWEST_ROWS:
        return f"fewer than {FEWEST_ROWS} rows: it does not pay to lay out the weights"
    for array in arrays:
        if not _whole_rows(array) or array.strides[-2] != 4 * array.shape[-1]:
            return STEPS
    return None


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


def _why_not_pipeline(gates: np.ndarray, *_: Any, **__: Any) -> str | None:
    if gates.dtype != np.float32:
        return f"float32 alone, got {gates.dtype}"
    if gates.shape[1] < 2 * FEWEST_ITEMS and threads.n_threads() > 1:
        return f"fewer than {2 * FEWEST_ITEMS} items, too few for two threads"
    return None


@unless(_why_not_pipeline)
def pipeline(
    gates: np.ndarray, pieces: list[Piece], first: Callable[[Piece], None], then: Callable[[Piece], None]
) -> None:
    """Threads take some items each through the whole sequence."""
    n_items = gates.shape[1]
    n_parts = max(1, min(threads.n_threads(), n_items // FEWEST_ITEMS))
    ends = [n_items * part // n_parts for part in range(n_parts + 1)]

    def work(part: int) -> None:
        items = slice(ends[part], ends[part + 1])
        for steps, _ in pieces:
            first((steps, items))
            then((steps, items))

    threads.parallel(work, range(n_parts))


def _why_not_project(x: np.ndarray, matrix: Any, bias: np.ndarray | None, out: np.ndarray) -> str | None:
    if not isinstance(matrix, _Panels) or not matrix.matrix.size:
        return "a matrix that `repeated` has laid out, with numbers"
    if not _whole_rows(x) or not _whole_rows(out):
        return STEPS
    return None


@unless(_why_not_project)
def project(x: np.ndarray, matrix: _Panels, bias: np.ndarray | None, out: np.ndarray) -> None:
    from tricycle_accelerators.compiled import products

    cut = matrix.cut()
    products.multiply(x, cut, _bias(bias, cut), out)


def _forward(
    loop: str,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    bias: np.ndarray | None,
    active: np.ndarray | None,
    *options: Any,
) -> None:
    cut = _panels(weights).cut()
    getattr(_loops(), loop)(gates, *states, cut, _bias(bias, cut), _mask(active), *options)


def _why_not_forward(gates: np.ndarray, states: np.ndarray, weights: Any, *_: Any, **__: Any) -> str | None:
    return _why_not(weights, gates, states)


def _why_not_backward(
    grad: Any, gates: Any, states: Any, weights: Any, active: Any, d_gates: Any, d_states: Any, relu: bool = False
) -> str | None:
    return _why_not(weights, gates, grad, states, d_gates, d_states)


# -------------------------------------------------------------------- Elman's
@unless(_why_not_forward)
def rnn(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None, relu: bool
) -> None:
    _forward("rnn", gates, states, weights, bias, active, relu)


@unless(_why_not_backward)
def rnn_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
    relu: bool,
) -> None:
    cut = _panels(weights).T.cut()
    _loops().rnn_back(*grad, *states, cut, _mask(active), *d_gates, *d_states, relu)


# -------------------------------------------------------------------- GRU
@unless(_why_not_forward)
def gru(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> None:
    _forward("gru", gates, states, weights, bias, active)


@unless(_why_not_backward)
def gru_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> None:
    cut = _panels(weights).T.cut()
    _loops().gru_back(*grad, gates, *states, cut, _mask(active), *d_gates, *d_states)


# -------------------------------------------------------------------- LSTM
@unless(_why_not_forward)
def lstm(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> None:
    _forward("lstm", gates, states, weights, bias, active)


@unless(_why_not_backward)
def lstm_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> None:
    _, c, tanh_c = states
    cut = _panels(weights).T.cut()
    _loops().lstm_back(*grad, gates, c, tanh_c, cut, _mask(active), *d_gates, *d_states)
