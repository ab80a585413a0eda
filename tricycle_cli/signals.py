"""Ctrl-C, SIGTERM and SIGHUP: where they are answered, so that nothing is lost and nobody waits.

A program asks for nothing until it is told to go, and then it has work at hand. Some work may be left anywhere, as the
tokenising of a text, an evaluation, a picture: there a signal raises `Interrupted` at once. Other work is finished
first, as an update and the checkpoint after it: there a signal is remembered, and the program asks between two updates.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

# Ctrl-C; what systems and schedulers end a program by; a terminal or a connection that is closed; Ctrl-Break.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
AGAIN = 0.02  # seconds after which a signal is sent once more that came where Python tells nobody of errors
STOPPING = b"\nstopping after this step (Ctrl-C again to leave at once)\n"


class Interrupted(KeyboardInterrupt):
    """A signal came.

    Attributes:
        number: which.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Within a `with` block signals are answered as this module says; called, it says whether one has come.

    The first signal counts. After it Ctrl-C leaves at once, and others are let pass: a closed terminal sends more than
    one. What the process was told to ignore, as `nohup` does with SIGHUP, stays ignored. Outside the main thread
    nothing is changed.

    Attributes:
        names: of the signals.
        announces: when a signal is remembered, that is said.
    """

    def __init__(self, names: Sequence[str] = NAMES, announces: bool = True) -> None:
        self.names, self.announces = names, announces
        self.number = 0  # of the first that came
        self._finishing = 0  # blocks of work that is finished first
        self._raised = False  # an `Interrupted` that nobody has caught yet
        self._before: dict[int, Any] = {}
        self._hook: Callable[[Any], Any] | None = None

    def __call__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for name in self.names:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._answer)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._send_again
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._hook is not None:
            sys.unraisablehook = self._hook
            self._hook = None

    def _answer(self, number: int, frame: FrameType | None) -> None:
        first = not self.number
        self.number = self.number or number
        if self._finishing and first:
            with contextlib.suppress(OSError):  # no print: the signal may have come in the middle of one
                os.write(2, STOPPING if self.announces else b"")
        elif first or number == signal.SIGINT:
            self._raised = True
            raise Interrupted(number)

    def _send_again(self, lost: Any) -> None:
        """An error that Python can raise nowhere, as in a `__del__`: if a signal made it, that comes once more."""
        if isinstance(lost.exc_value, Interrupted):
            self.number, self._raised = 0, False
            threading.Timer(AGAIN, os.kill, (os.getpid(), lost.exc_value.number)).start()
        elif self._hook is not None:
            self._hook(lost)

    @contextlib.contextmanager
    def restore_interrupts(self) -> Iterator[None]:
        """Within this block an `Interrupted` arrives as such: C code that calls Python may make another error of it.

        Raises:
            Interrupted: a signal came where it is answered at once.
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
    def finishing(self) -> Iterator[None]:
        """Work that is finished before a signal is answered: by who asks, or when other work begins."""
        self._finishing += 1
        try:
            yield
        finally:
            self._finishing -= 1

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within work that is finished first, some that need not be.

        Raises:
            Interrupted: a signal comes, or has come.
        """
        finishing, self._finishing = self._finishing, 0
        try:
            self.check()
            with self.restore_interrupts():
                yield
        finally:
            self._finishing = finishing

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.number:
            raise Interrupted(self.number)


def exit_by_signal(number: int) -> None:
    """End this process by a signal, as if nobody had caught it: who started it should see so."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
