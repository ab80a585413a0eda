"""A request between two threads: the model's, which hands out pieces, and the server's, which sends them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from tricycle_serve.errors import ApiError


class Gone(Exception):
    """Whoever asked is no longer there."""


class Work:
    """What is done for a request.

    The model's thread never waits for a client: pieces are kept until they are fetched. There are never more of them
    than tokens were asked for, so a client that does not read takes little memory and nobody's time.

    Args:
        n_parts: how many of the pieces that come are last ones.
        seconds: after which it has to end.

    Attributes:
        n_cached: tokens of prompts that needed not be read again.
        gone: nobody waits for it any more.
    """

    def __init__(self, n_parts: int, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.n_cached = 0
        self.gone = False
        self._n_open = n_parts
        self._pieces: list[Any] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------- for the model's thread
    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do for it."""
        return self.gone or self._error is not None or self._n_open == 0

    def put(self, piece: Any, last: bool) -> None:
        """Hand something on."""
        with self._lock:
            self._pieces.append(piece)
            self._n_open -= last
        self._tell()

    def fail(self, error: BaseException) -> None:
        """It comes to nothing, or to nothing more."""
        with self._lock:
            self._error = self._error or error
        self._tell()

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:  # the server's thread has ended
            self.gone = True

    # ---------------------------------------------------------------- for the server's thread
    def leave(self) -> None:
        """Nobody waits for it any more."""
        self.gone = True
        self._changed.set()

    async def pieces(self) -> AsyncIterator[list[Any]]:
        """All pieces that are there, until the last has come.

        Raises:
            ApiError: it came to nothing.
            Gone: nobody waits for it.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.gone:
                raise Gone
            with self._lock:
                some, self._pieces = self._pieces, []
                done = self._n_open == 0
                error = self._error
            if some:
                yield some
            if done:
                return
            if error is not None:
                raise error if isinstance(error, ApiError) else ApiError("the model failed", status=500)
