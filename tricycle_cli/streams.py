"""Standard streams that may go away: a pipe whose reader has had enough, a terminal that is closed, a full disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class TolerantStream:
    """A text stream whose reader may leave: from then on what is written is dropped, and the program goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop it."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Hand on what is waiting, or drop it."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., Any], *args: Any) -> None:
        """Call a function; where that fails, let all that is still waiting, and all that comes, go nowhere."""
        try:
            act(*args)
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextlib.contextmanager
def tolerant_streams() -> Iterator[None]:
    """Within this block nothing that is printed can end the program."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = TolerantStream(out), TolerantStream(err)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = out, err
