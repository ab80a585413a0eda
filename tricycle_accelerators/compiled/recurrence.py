"""Recurrent layers (RNN, GRU, LSTM) by Numba: one call per sequence, batch items divided among threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from tricycle.kernels import recurrent
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.recurrent import Piece
from tricycle_accelerators import threads
from tricycle_accelerators.compiled import amx_matmul
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when

FEWEST_ROWS = 16  # of a call, from which on it pays to lay out the weights
FEWEST_TILE_ITEMS = 12  # of a thread, from which on AMX takes less time than AVX-512: fewer fill a tile of 16 badly
FEWEST_ITEMS = 8  # of a thread: with fewer the weights come from memory more slowly than they are used
STEPS = "steps of float32 in one piece, aligned and not read-only"
ALL_ACTIVE = np.zeros((0, 0), np.bool_)


class _Panels:
    """A matrix by which many others are multiplied, cut into panels when the loops here need it, once."""

    __array_ufunc__ = None  # so that NumPy leaves `array @ panels` to `__rmatmul__`

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix
        self.lock = threading.Lock()
        self.transposed: _Panels | None = None
        self.layouts: dict[bool, np.ndarray] = {}  # whether as AMX tiles: the packed matrix

    def __rmatmul__(self, left: np.ndarray) -> np.ndarray:
        """Return `left` times the unpacked matrix, computed by NumPy."""
        product: np.ndarray = left @ self.matrix
        return product

    @property
    def T(self) -> _Panels:
        """Return the panels of the transposed matrix, created at the first access."""
        with self.lock:
            if self.transposed is None:
                self.transposed = _Panels(self.matrix.T)
            return self.transposed

    def packed(self, n_items: int) -> np.ndarray:
        """Return the matrix packed for `multiply_packed` of `n_items` rows of a step, packed at the first call."""
        as_tiles = n_items >= FEWEST_TILE_ITEMS and amx_matmul.unavailable_reason() is None
        with self.lock:
            if as_tiles not in self.layouts:
                pack = amx_matmul.pack_as_tiles if as_tiles else load_loops("packed_matmul").pack_panels
                self.layouts[as_tiles] = pack(self.matrix)
            return self.layouts[as_tiles]


@decline_when(lambda matrix: None if matrix.dtype == np.float32 else f"float32 alone, got {matrix.dtype}")
def prepare_matrix(matrix: np.ndarray) -> _Panels:
    """Return a wrapper, for `x @ wrapper` and `.T`, that packs a float32 matrix once; NotImplemented if not float32."""
    return _Panels(matrix)


def _decline_reason(weights: Any, *arrays: np.ndarray) -> str | None:
    """Return why the loops cannot run (no float32 weights, few rows, arrays not contiguous), or None."""
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
    """Return whether an array is float32, aligned, writable, and contiguous along its last axis."""
    return array.dtype == np.float32 and array.flags.behaved and array.strides[-1] == 4


def _panels(weights: Any) -> _Panels:
    """Return weights as _Panels: unchanged if they are, else a new object for the matrix."""
    return weights if isinstance(weights, _Panels) else _Panels(weights)


def _mask(active: np.ndarray | None) -> np.ndarray:
    """Return a boolean copy (T, B) of `active` (T, B, 1), or an empty array for None."""
    return ALL_ACTIVE if active is None else np.array(active[..., 0], np.bool_, order="C")


def _bias(bias: np.ndarray | None, packed: np.ndarray) -> np.ndarray:
    """Return the bias padded with zeros to the width of a packed matrix; zeros for None."""
    padded = np.zeros(len(packed) * load_loops("packed_matmul").PANEL, np.float32)
    if bias is not None:
        padded[: len(bias)] = bias
    return padded


def _run_batch_parallel_decline_reason(gates: np.ndarray, *_: Any, **__: Any) -> str | None:
    """Return why batch items are not divided among threads (not float32, or few items), or None."""
    if gates.dtype != np.float32:
        return f"float32 alone, got {gates.dtype}"
    if gates.shape[1] < 2 * FEWEST_ITEMS and threads.n_threads() > 1:
        return f"fewer than {2 * FEWEST_ITEMS} items, too few for two threads"
    return None


@decline_when(_run_batch_parallel_decline_reason)
def run_batch_parallel(
    gates: np.ndarray, pieces: list[Piece], first: Callable[[Piece], None], then: Callable[[Piece], None]
) -> None:
    """Call `first`, then `then`, per piece, in threads by batch range; NotImplemented if not float32 or few items."""
    n_items = gates.shape[1]
    n_parts = max(1, min(threads.n_threads(), n_items // FEWEST_ITEMS))
    ends = [n_items * part // n_parts for part in range(n_parts + 1)]

    def work(part: int) -> None:
        items = slice(ends[part], ends[part + 1])
        for steps, _ in pieces:
            first((steps, items))
            then((steps, items))

    threads.parallel_for(work, range(n_parts))


def _project_decline_reason(x: np.ndarray, matrix: Any, bias: np.ndarray | None, out: np.ndarray) -> str | None:
    """Return a reason unless the matrix is the _Panels of this `prepare_matrix`; only the matrix is examined."""
    return None if isinstance(matrix, _Panels) else "a matrix that `prepare_matrix` has laid out"


@decline_when(_project_decline_reason)
def project(x: np.ndarray, matrix: _Panels, bias: np.ndarray | None, out: np.ndarray) -> None:
    """Write x (T, B, K) @ matrix + bias to `out`; NotImplemented if the matrix is not from this `prepare_matrix`.

    BLAS computes the product where the matrix is empty or arrays are not contiguous.
    """
    if not matrix.matrix.size or not _whole_rows(x) or not _whole_rows(out):
        recurrent.project.reference(x, matrix.matrix, bias, out)
        return
    packed = matrix.packed(x.shape[1])
    load_loops("packed_matmul").multiply_packed(x, packed, _bias(bias, packed), out)


def _backward_decline_reason(
    grad: Any, gates: Any, states: Any, weights: Any, active: Any, d_gates: Any, d_states: Any, relu: bool = False
) -> str | None:
    """Return why the backward loop cannot run (weights not float32, few rows, arrays not contiguous), or None."""
    return _decline_reason(weights, gates, grad, states, d_gates, d_states)


def _options(relu: bool | None) -> tuple[bool, ...]:
    """Return the loops' arguments that are no arrays: (relu,), or () for None."""
    return () if relu is None else (relu,)


def _forward(kernel: Kernel[..., None]) -> Callable[..., None]:
    """Return the Numba implementation of a forward kernel (rnn, gru or lstm), which calls the loop of its name."""

    @decline_when(lambda gates, states, weights, *_, **__: _decline_reason(weights, gates, states))
    @wraps(kernel.reference, assigned=("__name__", "__qualname__"))
    def version(
        gates: np.ndarray, states: np.ndarray, weights: Any, bias: Any, active: Any, relu: bool | None = None
    ) -> None:
        loop = getattr(load_loops("recurrent_loops"), kernel.reference.__name__)
        packed = _panels(weights).packed(gates.shape[1])
        loop(gates, *states, packed, _bias(bias, packed), _mask(active), *_options(relu))

    return version


def _backward(kernel: Kernel[..., None], needed: Callable[[Any, Any], Sequence[np.ndarray]]) -> Callable[..., None]:
    """Return the Numba implementation of a backward kernel, whose loop takes `needed(gates, states)`."""

    @decline_when(_backward_decline_reason)
    @wraps(kernel.reference, assigned=("__name__", "__qualname__"))
    def version(
        grad: Any, gates: Any, states: Any, weights: Any, active: Any, d_gates: Any, d_states: Any, relu: Any = None
    ) -> None:
        loop = getattr(load_loops("recurrent_loops"), kernel.reference.__name__)
        packed = _panels(weights).T.packed(gates.shape[1])
        loop(*grad, *needed(gates, states), packed, _mask(active), *d_gates, *d_states, *_options(relu))

    return version


rnn = _forward(recurrent.rnn)
gru = _forward(recurrent.gru)
lstm = _forward(recurrent.lstm)
rnn_backward = _backward(recurrent.rnn_backward, lambda gates, states: states)
gru_backward = _backward(recurrent.gru_backward, lambda gates, states: (gates, *states))
lstm_backward = _backward(recurrent.lstm_backward, lambda gates, states: (gates, *states[1:]))
