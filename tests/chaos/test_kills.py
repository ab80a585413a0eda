"""Trials of tests/chaos/kills.py; and closed terminals, closed pipes and concurrent runs."""

import os
import random
import signal
import subprocess
import sys

import pytest

from .kills import (
    PATIENT,
    PHASES,
    SIGNALS,
    MonitoredProcess,
    Trial,
    check_trial,
    kills_by_phase,
    measure_phases,
    random_kills,
)
from .runs import differences, finish

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]


@pytest.fixture(scope="module")
def phase_times(reference):
    return measure_phases(reference)


def test_all_phases_are_reported(phase_times):
    assert {phase for phase in PHASES if phase_times[phase]} == set(PHASES)


def test_run_resumes_equal_after_two_kills(workspace, phase_times, reference):
    (_, trial) = random_kills(random.Random(1), phase_times, 2, signal.SIGKILL)
    trial.moments = [("update", 3, 0.0), ("evaluation", 1, 0.001)]
    check_trial(trial, workspace.new_run("twice"), reference)
    assert trial.n_delivered == 2


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("SIGHUP", "tokeniser training"),
        ("SIGKILL", "dataset building"),
        ("SIGTERM", "evaluation"),
        ("SIGINT", "sampling"),
        ("SIGKILL", "checkpoint"),
        ("SIGTERM", "plot"),
    ],
)
def test_run_resumes_equal_after_a_signal(workspace, phase_times, reference, name, phase):
    number = getattr(signal, name)
    check_trial(Trial(name, number, [(phase, 1, 0.0)]), workspace.new_run(f"{name} in {phase}"), reference)


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_run_resumes_equal_after_every_signal_and_phase(workspace, phase_times, reference, phase):
    for trial in kills_by_phase(random.Random(phase), phase_times, 1, [signal.SIGKILL, *SIGNALS]):
        if trial.name.endswith(f" in {phase}"):
            check_trial(trial, workspace.new_run(trial.name), reference)


# -------------------------------------------------------------------- closed terminals and pipes
def test_run_saves_its_state_when_the_terminal_closes(workspace, phase_times, reference):
    """The run gets SIGHUP and cannot print; its state is saved, and it can be resumed."""
    import fcntl
    import pty
    import termios

    case = workspace.new_run("terminal")
    master, slave = pty.openpty()
    slow = "from tricycle import training\nimport time\noriginal = training.compute_gradients\n"
    slow += "training.compute_gradients = lambda *args: (time.sleep(0.1), original(*args))[1]\n"
    streams = {"stdin": slave, "stdout": slave, "stderr": slave, "encoding": None, "errors": None}
    take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    process = case.start(prelude=slow, start_new_session=True, preexec_fn=take, **streams)
    os.close(slave)
    metrics = case.run_folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):  # it trains
        os.read(master, 4096)
    os.close(master)
    assert process.wait(PATIENT) == 0
    assert not list(case.run_folder.glob(".*"))
    done = case.resume()
    assert done.status == 0, done.err
    assert "resuming after step" in done.out
    assert differences(case.run_folder, reference.run_folder) == []


def test_training_continues_after_its_pipe_is_closed(workspace, reference):
    """As in `python train_smol_gpt.py | head -1`: training continues."""
    case = workspace.new_run("head")
    process = case.start()
    assert process.stdout.readline().startswith("data: text")
    process.stdout.close()
    assert process.wait(60) == 0
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert differences(case.run_folder, reference.run_folder) == []


def test_ignored_signals_stay_ignored(workspace, reference):
    """As by `nohup`."""
    case = workspace.new_run("nohup")
    program = MonitoredProcess(case, case.start_args, "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    assert program.wait_for_phase("update", 2)
    program.process.send_signal(signal.SIGHUP)
    assert program.finish().status == 0
    assert differences(case.run_folder, reference.run_folder) == []


# -------------------------------------------------------------------- concurrent runs
def test_second_process_in_a_run_folder_is_rejected(workspace, reference):
    case = workspace.new_run("two")
    program = MonitoredProcess(case, case.start_args)
    assert program.wait_for_phase("update", 3)
    program.process.send_signal(signal.SIGSTOP)
    (case.run_folder / ".being written.part").touch()
    for words in (["--resume", str(case.run_folder)], case.start_args):
        done = finish(case.start(words))
        assert done.status == 1
        (line,) = done.error_lines
        assert f"process {program.process.pid} on " in line
    assert (case.run_folder / ".being written.part").exists()  # files of another process are not removed
    (case.run_folder / ".being written.part").unlink()
    program.process.send_signal(signal.SIGCONT)
    assert program.finish().status == 0
    assert differences(case.run_folder, reference.run_folder) == []


def test_one_of_two_concurrent_starts_is_rejected(workspace, reference):
    """One process trains; the other exits with an error."""
    case = workspace.new_run("race")
    outcomes = [finish(process) for process in [case.start(), case.start()]]
    assert sorted(outcome.status for outcome in outcomes) == [0, 1]
    assert differences(case.run_folder, reference.run_folder) == []


# -------------------------------------------------------------------- the command
def test_kills_command_prints_a_table_of_trials():
    words = "--n 2 --signals 1 --phases 0 --large 0 --seed 3".split()
    done = subprocess.run([sys.executable, "-m", "tests.chaos.kills", *words], capture_output=True, text=True)
    assert "| SIGKILL | 2 |" in done.stdout, done.stderr
