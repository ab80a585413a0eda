"""Handle Ctrl-C, SIGTERM and SIGHUP in training and chat, so that a run stops soon and loses no progress.

Some work can be interrupted anywhere, such as tokenizing a text, an evaluation or a plot: there a signal raises
`Interrupted` at once. Other work must be finished first, such as an update and the checkpoint after it: there the
signal is deferred, and the program checks for signals between two updates.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

# Ctrl-C; the signal of schedulers; a closed terminal or connection; Ctrl-Break.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
RESEND_SECONDS = 0.02  # before a signal is sent again whose exception Python could not raise
STOPPING = b"\nstopping after this step (press Ctrl-C again to stop at once)\n"


class Interrupted(KeyboardInterrupt):
    """A signal arrived.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """A context manager that handles signals; calling the object returns whether a signal has arrived.

    The first signal counts. After it, Ctrl-C interrupts at once, and other signals are ignored, because a closed
    terminal sends several. Signals that the process ignores (SIGHUP with `nohup`) stay ignored. Outside the main thread
    no handler is installed.

    Attributes:
        names: the names of the signals.
        announces: print a line when a signal is deferred.
    """

    def __init__(self, names: Sequence[str] = NAMES, announces: bool = True) -> None:
        self.names, self.announces = names, announces
        self.number = 0  # of the first signal that arrived
        self._deferring = 0  # the number of active `deferred` contexts
        self._raised = False  # whether an `Interrupted` was raised and not caught yet
        self._before: dict[int, Any] = {}
        self._hook: Callable[[Any], Any] | None = None

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.number != 0

    def __enter__(self) -> Signals:
        """Install handlers for signals that are not ignored, in the main thread only; return self."""
        if threading.current_thread() is threading.main_thread():
            for name in self.names:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._send_again
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers and the hook for unraisable exceptions."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._hook is not None:
            sys.unraisablehook, self._hook = self._hook, None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Store the first signal; if deferred only print a note, else, or at another Ctrl-C, raise `Interrupted`."""
        first = not self.number
        self.number = self.number or number
        if self._deferring and first:
            with contextlib.suppress(OSError):  # os.write, because the signal may have interrupted a print
                os.write(2, STOPPING if self.announces else b"")
        elif first or number == signal.SIGINT:
            self._raised = True
            raise Interrupted(number)

    def _send_again(self, lost: Any) -> None:
        """As `sys.unraisablehook`, send a signal again whose exception was lost, as in a `__del__`; pass others on."""
        if isinstance(lost.exc_value, Interrupted):
            self.number, self._raised = 0, False
            # On Windows `os.kill` ends the process; elsewhere it also wakes a main thread that waits for the system.
            send = signal.raise_signal if sys.platform == "win32" else partial(os.kill, os.getpid())
            threading.Timer(RESEND_SECONDS, send, (lost.exc_value.number,)).start()
        elif self._hook is not None:
            self._hook(lost)

    @contextlib.contextmanager
    def restore_interrupts(self) -> Iterator[None]:
        """Raise `Interrupted` again where code within this context replaced it by another exception.

        C code that calls Python may replace an `Interrupted` by another exception.
        """
        try:
            yield
        except Interrupted:
            self._raised = False
            raise
        except Exception as error:
            if not self._raised:
                raise
            self._raised = False
            raise Interrupted(self.number) from error

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals within this context; calling the object returns whether one has arrived, and `check` raises."""
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within this context, also in `deferred`, raise `Interrupted` at a signal, or at once if one has arrived."""
        deferring, self._deferring = self._deferring, 0
        try:
            self.check()
            with self.restore_interrupts():
                yield
        finally:
            self._deferring = deferring

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self.number:
            raise Interrupted(self.number)


def exit_by_signal(error: Interrupted) -> None:
    """End this process by the default action of the signal, so that the parent sees it; for Ctrl-C do nothing."""
    if error.number != signal.SIGINT:
        sys.stdout.flush()
        signal.signal(error.number, signal.SIG_DFL)
        os.kill(os.getpid(), error.number)
