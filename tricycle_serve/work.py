"""A request between two threads: the model's, which hands out pieces, and the server's, which sends them."""

from __future__ import annotations

import asyncio
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
        self._has_failed = False
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[Any, bool, BaseException | None]] = asyncio.Queue()  # pieces and ends

    # ---------------------------------------------------------------- for the model's thread
    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do for it."""
        return self.gone or self._has_failed or self._n_open == 0

    def put(self, piece: Any, last: bool) -> None:
        """Hand something on."""
        self._n_open -= last
        self._tell(piece, self._n_open == 0)

    def fail(self, error: BaseException) -> None:
        """It comes to nothing, or to nothing more."""
        self._has_failed = True
        self._tell(None, False, error)

    def _tell(self, piece: Any, is_done: bool, error: BaseException | None = None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (piece, is_done, error))
        except RuntimeError:  # the server's thread has ended
            self.gone = True

    # ---------------------------------------------------------------- for the server's thread
    def leave(self) -> None:
        """Nobody waits for it any more."""
        self.gone = True
        self._queue.put_nowait((None, False, None))

    async def pieces(self) -> AsyncIterator[list[Any]]:
        """All pieces that are there, until the last has come.

        Raises:
            ApiError: it came to nothing.
            Gone: nobody waits for it.
        """
        is_done = False
        while not is_done:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            if self.gone:
                raise Gone
            if some := [piece for piece, _, _ in items if piece is not None]:
                yield some
            is_done = any(done for _, done, _ in items)
            error = next((error for _, _, error in items if error is not None), None)
            if error is not None and not is_done:
                raise error if isinstance(error, ApiError) else ApiError("the model failed", status=500)
