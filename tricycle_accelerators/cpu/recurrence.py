"""Recurrent layers, some items of the batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tricycle.kernels import recurrent
from tricycle.kernels.dispatch import is_narrow
from tricycle.kernels.recurrent import Piece
from tricycle_accelerators import threads
from tricycle_accelerators.providers import unless
from tricycle_accelerators.recurrent_blocks import Blocks

ITEMS = 32  # of a thread at a time; of a product's rows, up to which `Blocks` are quicker than BLAS alone


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
