"""Standard streams that ignore write errors (a closed pipe, a closed terminal, a full disk), for training runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class TolerantStream:
    """A text stream that discards its output after a write error, so that the program continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped stream."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or discard it if writing fails or has failed; return the length of the text in both cases."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; on an OSError, redirect its file descriptor to os.devnull for good instead of raising."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[..., Any], *args: Any) -> None:
        """Call a function; after an error redirect the stream to os.devnull."""
        try:
            act(*args)
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextlib.contextmanager
def tolerant_streams() -> Iterator[None]:
    """Replace stdout and stderr within this context by streams that ignore write errors; restore them at the end."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = TolerantStream(out), TolerantStream(err)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = out, err
