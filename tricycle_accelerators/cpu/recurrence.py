"""Recurrent layers (RNN, GRU, LSTM) with batch items divided among threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from tricycle.kernels import recurrent
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.recurrent import Piece
from tricycle_accelerators import threads
from tricycle_accelerators.providers import decline_when

ITEMS = 32  # of a thread at a time


def _run_batch_parallel_decline_reason(gates: np.ndarray, pieces: list[Piece], *_: Any, **__: Any) -> str | None:
    """Return a reason for more than ITEMS (32) batch items or fewer than two pieces, else None."""
    if gates.shape[1] > ITEMS:
        return f"more than {ITEMS} items"
    return "fewer than two pieces" if len(pieces) < 2 else None


@decline_when(_run_batch_parallel_decline_reason)
def run_batch_parallel(
    gates: np.ndarray, pieces: list[Piece], first: Callable[[Piece], None], then: Callable[[Piece], None]
) -> None:
    """Call `first` per piece in one thread, then `then` in another; NotImplemented for 1 piece or over 32 items."""
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

    threads.parallel_for(run, [False, True])


def _by_items(kernel: Kernel[..., None]) -> Callable[..., None]:
    """Return an implementation of a recurrent kernel whose threads run the reference on ITEMS (32) batch items each.

    No fewer items, though there be threads without work: the calls of NumPy would be so short that threads mostly wait
    for each other at Python's lock.
    """

    @wraps(kernel.reference, assigned=("__name__", "__qualname__"))
    def version(*arguments: Any, **options: Any) -> None:
        def work(items: slice) -> None:
            def part(x: Any) -> Any:
                return x[..., items, :] if isinstance(x, np.ndarray) and x.ndim > 2 else x

            kernel.reference(*map(part, arguments), **{name: part(option) for name, option in options.items()})

        n_items = arguments[0].shape[-2]
        threads.parallel_for(work, [slice(i, i + ITEMS) for i in range(0, n_items, ITEMS)])

    return version


rnn, rnn_backward = _by_items(recurrent.rnn), _by_items(recurrent.rnn_backward)
gru, gru_backward = _by_items(recurrent.gru), _by_items(recurrent.gru_backward)
lstm, lstm_backward = _by_items(recurrent.lstm), _by_items(recurrent.lstm_backward)
