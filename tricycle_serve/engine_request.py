"""Transfer of a request's outputs from the engine thread to the server's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from tricycle_serve.errors import ApiError


class RequestCancelled(Exception):
    """The client has disconnected, so the request was cancelled."""


class EngineRequest:
    """A request that was submitted to an engine.

    The engine thread never waits for a client: outputs are queued until the event loop reads them. The queue holds at
    most one item per requested token, so a client that does not read uses little memory and delays no other client.

    Args:
        n_parts: number of outputs with `is_last` that complete the request, such as one per sequence.
        timeout_seconds: maximum duration of the request.

    Attributes:
        n_cached_tokens: number of prompt tokens that were taken from the prefix cache.
        is_cancelled: whether the client has disconnected.
    """

    def __init__(self, n_parts: int, timeout_seconds: float) -> None:
        self.deadline = time.monotonic() + timeout_seconds
        self.n_cached_tokens = 0
        self.is_cancelled = False
        self._n_unfinished = n_parts
        self._has_failed = False
        self._loop = asyncio.get_running_loop()
        # Items: an output, whether the request is complete, an error.
        self._queue: asyncio.Queue[tuple[Any, bool, BaseException | None]] = asyncio.Queue()

    # ---------------------------------------------------------------- called in the engine thread
    @property
    def has_timed_out(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() > self.deadline

    @property
    def is_finished(self) -> bool:
        """Return whether the request is complete, has failed, or was cancelled."""
        return self.is_cancelled or self._has_failed or self._n_unfinished == 0

    def put(self, output: Any, is_last: bool) -> None:
        """Send an output to `outputs`; `is_last` ends one of `n_parts`, and the last of these completes the request."""
        self._n_unfinished -= is_last
        self._send(output, self._n_unfinished == 0)

    def fail(self, error: BaseException) -> None:
        """End the request: `outputs` raises `error` if it is an ApiError, else an ApiError of status 500."""
        self._has_failed = True
        self._send(None, False, error)

    def _send(self, output: Any, is_complete: bool, error: BaseException | None = None) -> None:
        """Pass an item from any thread to `outputs`; if the event loop is closed, mark the request as cancelled."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (output, is_complete, error))
        except RuntimeError:  # the event loop is closed
            self.is_cancelled = True

    # ---------------------------------------------------------------- called in the event loop
    def cancel(self) -> None:
        """Cancel the request: `outputs` raises RequestCancelled, and the engine stops work at its next step."""
        self.is_cancelled = True
        self._queue.put_nowait((None, False, None))

    async def outputs(self) -> AsyncIterator[list[Any]]:
        """Yield lists of available outputs until complete; raise ApiError if failed, RequestCancelled if cancelled."""
        is_complete = False
        while not is_complete:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            if self.is_cancelled:
                raise RequestCancelled
            if outputs := [output for output, _, _ in items if output is not None]:
                yield outputs
            is_complete = any(complete for _, complete, _ in items)
            error = next((error for _, _, error in items if error is not None), None)
            if error is not None and not is_complete:
                raise error if isinstance(error, ApiError) else ApiError("the model failed", status=500)
