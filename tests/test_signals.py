"""Signals: remembered while work is finished, answered at once elsewhere."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tricycle_cli.signals import Interrupted, Signals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")


def send(number=signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_at_once(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        assert not signals()
        with pytest.raises(Interrupted) as caught:
            send(number)
        send(signal.SIGTERM)  # cleaning up is not interrupted again
        send(signal.SIGHUP)
        assert caught.value.number == signals.number == number
    assert signal.getsignal(number) is before


def test_deferred_signals(capfd):
    with Signals() as signals:
        with signals.deferred():
            send()
            assert signals()
        assert "stopping after this step" in capfd.readouterr().err
        with pytest.raises(Interrupted):
            signals.check()


def test_interruptible_work_inside_deferred_work():
    done = []
    with Signals() as signals, signals.deferred():
        with pytest.raises(Interrupted), signals.interruptible():
            send()
            done.append("more")
        with pytest.raises(Interrupted), signals.interruptible():  # it has come before
            done.append("still more")
        send()  # work that is finished first is so again, and one more changes nothing
    assert done == []


def test_only_ctrl_c_interrupts_as_a_second_signal():
    """A terminal that is closed sends SIGHUP more than once, and some systems SIGTERM after it."""
    with Signals() as signals, signals.deferred():
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        send(signal.SIGTERM)
        assert signals.number == signal.SIGHUP
        with pytest.raises(Interrupted):
            send(signal.SIGINT)


def test_ignored_signals_stay_ignored():
    """As SIGHUP by nohup, or SIGINT in the background of a shell."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            send(signal.SIGHUP)
            assert not signals()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_with_closed_stderr(monkeypatch):
    """Standard error may be a terminal that is gone."""
    with Signals() as signals, signals.deferred():
        monkeypatch.setattr(os, "write", lambda handle, content: os.stat("a terminal that is gone"))
        send()
        assert signals()


def test_no_handlers_outside_the_main_thread():
    def work() -> tuple:
        with Signals() as signals:
            return signals(), signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(work).result() == (False, signal.getsignal(signal.SIGTERM))


def test_exceptions_of_c_code_become_interrupted():
    """Matplotlib says "Invalid bounding box" where one came while it asked for a number."""
    with Signals() as signals:
        with pytest.raises(Interrupted) as caught, signals.restore_interrupts():
            try:
                send(signal.SIGHUP)
            finally:
                raise ValueError("Invalid bounding box")
        assert caught.value.number == signal.SIGHUP
        with pytest.raises(OSError, match="full"), signals.restore_interrupts():  # a later error is raised
            raise OSError("full")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lost_signal_is_sent_again(number):
    class Dying:
        def __del__(self) -> None:
            send(number)

    with Signals() as signals:
        with pytest.raises(Interrupted):
            Dying()
            time.sleep(10)
        assert signals.number == number
