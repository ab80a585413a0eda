"""Recurrent layers, some items of the batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from tricycle.kernels import recurrent
from tricycle.kernels.dispatch import is_narrow
from tricycle.kernels.recurrent import Piece
from tricycle_accelerators import threads
from tricycle_accelerators.providers import unless

# With every product of more than one row BLAS copies the matrix into an order that suits it, which takes as long as a
# product of few rows. Up to a million multiplications OpenBLAS reads it where it lies: with so many rows at most, and
# blocks of the matrix of that size.
ITEMS = 32
MOST_TERMS = 480
BLOCK_COLUMNS = 64


class Blocks:
    """A matrix by which many others are multiplied, one after another, copied once into blocks."""

    __array_ufunc__ = None  # so that NumPy leaves `array @ blocks` to us

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix
        self.blocks: np.ndarray | None = None

    # Cache: valid as long as the blocks, which one call of a layer makes and drops.
    @cached_property
    def T(self) -> Blocks:
        return Blocks(self.matrix.T)

    def __rmatmul__(self, left: np.ndarray) -> np.ndarray:
        if len(left) == 1:
            return left @ self.matrix
        if self.blocks is None:
            self.blocks = self._cut()
        n_sums, n_blocks, _, n_columns = self.blocks.shape
        n_rows = len(left)
        out = np.empty((n_sums, n_rows, n_blocks * n_columns), left.dtype)
        terms = left.reshape(n_rows, n_sums, 1, -1).transpose(1, 2, 0, 3)
        np.matmul(terms, self.blocks, out=out.reshape(n_sums, n_rows, n_blocks, -1).swapaxes(1, 2))
        return (out[0] if n_sums == 1 else out.sum(axis=0))[:, : self.matrix.shape[1]]

    def _cut(self) -> np.ndarray:
        """(sums, blocks, terms, columns), with zeros where the last block is not full."""
        n_inner, n_columns = self.matrix.shape
        n_sums = 1
        n_blocks = -(-n_columns // BLOCK_COLUMNS)
        while n_inner > n_sums * MOST_TERMS and n_inner % (2 * n_sums) == 0:
            n_sums *= 2
        whole = np.zeros((n_inner, n_blocks * BLOCK_COLUMNS), self.matrix.dtype)
        whole[:, :n_columns] = self.matrix
        return np.ascontiguousarray(whole.reshape(n_sums, -1, n_blocks, BLOCK_COLUMNS).swapaxes(1, 2))


def _why_not_repeated(matrix: np.ndarray) -> str | None:
    return "floats of 16 bits" if is_narrow(matrix) else None


@unless(_why_not_repeated)
def repeated(matrix: np.ndarray) -> Any:
    return Blocks(matrix)


def _why_not_pipeline(gates: np.ndarray, pieces: list[Piece], *_: Any, **__: Any) -> str | None:
    if gates.shape[1] > ITEMS:
        return f"more than {ITEMS} items"
    return "fewer than two pieces" if len(pieces) < 2 else None


@unless(_why_not_pipeline)
def pipeline(
    gates: np.ndarray, pieces: list[Piece], first: Callable[[Piece], None], then: Callable[[Piece], None]
) -> None:
    """In two threads, one for each function, where items are too few to be shared."""
    ready = threading.Semaphore(0)

    def run(second: bool) -> None:
        if second:
            for piece in pieces:
                ready.acquire()
                then(piece)
            return
        try:
            for piece in pieces:
                first(piece)
                ready.release()
        finally:
            ready.release(len(pieces))  # after an error the other thread must not wait for ever

    threads.parallel(run, [False, True])


def _why_not_project(x: np.ndarray, matrix: Any, *_: Any, **__: Any) -> str | None:
    return None if isinstance(matrix, Blocks) else f"a matrix in blocks alone, got {type(matrix).__name__}"


@unless(_why_not_project)
def project(x: np.ndarray, matrix: Any, bias: np.ndarray | None, out: np.ndarray) -> None:
    """Of so many rows BLAS makes a product best by itself."""
    recurrent.project.plain(x, matrix.matrix, bias, out)


def by_items(plain: Callable[..., None], *arguments: Any) -> None:
    """Threads take some items of the batch each through the whole sequence, for items know nothing of each other.

    No fewer, though there be threads without work: the calls of NumPy would be so short that threads mostly wait for
    each other at Python's lock.
    """
    n_items = arguments[0].shape[-2]

    def of(items: slice, argument: Any) -> Any:
        return argument[..., items, :] if isinstance(argument, np.ndarray) and argument.ndim > 2 else argument

    def work(items: slice) -> None:
        plain(*(of(items, argument) for argument in arguments))

    threads.parallel(work, [slice(i, i + ITEMS) for i in range(0, n_items, ITEMS)])


def rnn(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None, relu: bool
) -> None:
    by_items(recurrent.rnn.plain, gates, states, weights, bias, active, relu)


def gru(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> None:
    by_items(recurrent.gru.plain, gates, states, weights, bias, active)


def lstm(
    gates: np.ndarray, states: np.ndarray, weights: Any, bias: np.ndarray | None, active: np.ndarray | None
) -> None:
    by_items(recurrent.lstm.plain, gates, states, weights, bias, active)


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
    by_items(recurrent.rnn_backward.plain, grad, gates, states, weights, active, d_gates, d_states, relu)


def gru_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> None:
    by_items(recurrent.gru_backward.plain, grad, gates, states, weights, active, d_gates, d_states)


def lstm_backward(
    grad: np.ndarray,
    gates: np.ndarray,
    states: np.ndarray,
    weights: Any,
    active: np.ndarray | None,
    d_gates: np.ndarray,
    d_states: np.ndarray,
) -> None:
    by_items(recurrent.lstm_backward.plain, grad, gates, states, weights, active, d_gates, d_states)
