"""Signals: remembered while work is finished, answered at once elsewhere."""

import os
import signal
import threading
import time

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
        assert caught.value.number == number
        assert signals()
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


def test_cleaning_up_is_not_interrupted_again():
    with Signals():
        try:
            send()
        except Interrupted:
            send()
            send(signal.SIGHUP)


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

    def gone(handle, content):
        raise OSError(5, "Input/output error")

    with Signals() as signals, signals.deferred():
        monkeypatch.setattr(os, "write", gone)
        send()
        assert signals()


def test_no_handlers_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def work() -> None:
        with Signals() as signals:
            handlers.append((signals(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [(False, before)]


def test_exceptions_of_c_code_become_interrupted():
    """Matplotlib says "Invalid bounding box" where one came while it asked for a number."""

    def send_and_fail() -> None:
        try:
            send(signal.SIGHUP)
        except Interrupted:
            raise ValueError("Invalid bounding box") from None

    with Signals() as signals:
        with pytest.raises(Interrupted) as caught, signals.restore_interrupts():
            send_and_fail()
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
