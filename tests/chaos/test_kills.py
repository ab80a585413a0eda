"""A few kills of those that `python -m tests.chaos.kills` tries by hundreds; and terminals and readers that go away."""

import os
import random
import signal
import subprocess
import sys

import pytest

from .kills import PHASES, SIGNALS, Trial, Watched, kills_by_phase, perform, profile_of, random_kills
from .runs import differences, finish

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]
PATIENT = 30.0  # seconds: machines that test many things at once are slow; the long form has the limit that is promised


@pytest.fixture(scope="module")
def profile(whole):
    return profile_of(whole)


def check(trial: Trial, case, whole) -> None:
    trial.limit = PATIENT
    assert perform(trial, case, whole.run).trouble == []
    assert trial.hits  # else nothing was tried


def test_all_phases_are_seen(profile):
    assert {phase for phase in PHASES if profile.seconds[phase]} == set(PHASES)


def test_a_run_that_is_killed_twice(bench, profile, whole):
    (_, trial) = random_kills(random.Random(1), profile, 2, signal.SIGKILL)
    trial.moments = [("update", 3, 0.0), ("evaluation", 1, 0.001)]
    check(trial, bench.case("twice"), whole)
    assert trial.hits == 2


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        pytest.param("SIGHUP", "tokeniser training", marks=pytest.mark.slow),
        ("SIGKILL", "dataset building"),
        ("SIGTERM", "evaluation"),
        pytest.param("SIGINT", "sampling", marks=pytest.mark.slow),
        ("SIGKILL", "checkpoint"),
        pytest.param("SIGTERM", "plot", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_a_phase(bench, profile, whole, name, phase):
    number = getattr(signal, name)
    check(Trial(name, number, [(phase, 1, 0.0)]), bench.case(f"{name} in {phase}"), whole)


@pytest.mark.slow
@pytest.mark.skipif("TRICYCLE_LONG" not in os.environ, reason="takes minutes: TRICYCLE_LONG=1 runs it")
@pytest.mark.parametrize("phase", PHASES)
def test_every_signal_in_every_phase(bench, profile, whole, phase):
    for trial in kills_by_phase(random.Random(phase), profile, 1, [signal.SIGKILL, *SIGNALS]):
        if trial.name.endswith(f" in {phase}"):
            trial.limit = PATIENT
            assert perform(trial, bench.case(trial.name), whole.run).trouble == []


# -------------------------------------------------------------------- nobody there any more
def test_a_terminal_that_is_closed(bench, profile, whole):
    """The run gets SIGHUP, and can print nothing any more; it is saved, and goes on elsewhere."""
    import fcntl
    import pty
    import termios

    case = bench.case("terminal")
    master, slave = pty.openpty()
    slow = "from tricycle import training\nimport time\nusual = training.compute_gradients\n"
    slow += "training.compute_gradients = lambda *args: (time.sleep(0.1), usual(*args))[1]\n"
    streams = {"stdin": slave, "stdout": slave, "stderr": slave, "encoding": None, "errors": None}
    take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    process = case.start(prelude=slow, start_new_session=True, preexec_fn=take, **streams)
    os.close(slave)
    metrics = case.run / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):  # it trains
        os.read(master, 4096)
    os.close(master)
    assert process.wait(PATIENT) == 0
    assert not list(case.run.glob(".*"))
    done = case.resume()
    assert done.status == 0, done.err
    assert "resuming after step" in done.out
    assert differences(case.run, whole.run) == []


def test_a_reader_that_has_had_enough(bench, whole):
    """As in `python train_smol_gpt.py | head -1`: training goes on."""
    case = bench.case("head")
    process = case.start()
    assert process.stdout.readline().startswith("data: text")
    process.stdout.close()
    assert process.wait(60) == 0
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert differences(case.run, whole.run) == []


def test_a_signal_that_is_ignored_stays_ignored(bench, whole):
    """As by `nohup`."""
    case = bench.case("nohup")
    program = Watched(case, case.words, "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    assert program.wait_for("update", 2)
    program.process.send_signal(signal.SIGHUP)
    assert program.finish().status == 0
    assert differences(case.run, whole.run) == []


# -------------------------------------------------------------------- two at once
def test_a_second_trainer_is_refused(bench, whole):
    case = bench.case("two")
    program = Watched(case, case.words)
    assert program.wait_for("update", 3)
    program.process.send_signal(signal.SIGSTOP)
    (case.run / ".being written.part").touch()
    for words in (["--resume", str(case.run)], case.words):
        done = finish(case.start(words))
        assert done.status == 1
        (line,) = done.error_lines
        assert f"process {program.process.pid} on " in line
    assert (case.run / ".being written.part").exists()  # nobody else's files are cleared away
    (case.run / ".being written.part").unlink()
    program.process.send_signal(signal.SIGCONT)
    assert program.finish().status == 0
    assert differences(case.run, whole.run) == []


def test_two_that_start_at_once(bench, whole):
    """One trains, the other says so."""
    case = bench.case("race")
    outcomes = [finish(process) for process in [case.start(), case.start()]]
    assert sorted(outcome.status for outcome in outcomes) == [0, 1]
    assert differences(case.run, whole.run) == []


# -------------------------------------------------------------------- the command
@pytest.mark.slow
def test_the_long_form():
    words = "--n 2 --signals 1 --phases 0 --large 0 --seed 3".split()
    done = subprocess.run([sys.executable, "-m", "tests.chaos.kills", *words], capture_output=True, text=True)
    assert "| SIGKILL | 2 |" in done.stdout, done.stderr
