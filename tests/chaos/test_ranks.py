"""Trials of tests/chaos/ranks.py; skipped without mpi4py and mpiexec."""

import importlib.util
import random
import signal
import subprocess
import sys

import pytest

from benchmarks.ranks import mpiexec

from .kills import SIGNALS
from .ranks import (
    FAILURES,
    TARGETS,
    RankTrial,
    approximate_differences,
    measure_phases,
    new_trials,
    run_failure,
    run_trial,
)
from .runs import PHASES

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        sys.platform != "linux" or mpiexec() is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs Linux, mpi4py and mpiexec",
    ),
]


@pytest.fixture(scope="module")
def phase_times(reference):
    return measure_phases(reference)


def test_all_phases_are_reported(phase_times):
    """One of the ranks prepares the text; rank 0 has all other phases, and rank 1 the common ones."""
    timed_phases = {phase for phase, times in phase_times.items() if times}
    assert {phase.partition(":")[2] for phase in timed_phases} == set(PHASES)
    assert {f"0:{phase}" for phase in PHASES if phase not in ("tokeniser training", "dataset building")} <= timed_phases
    assert {"1:run", "1:update", "1:evaluation"} <= timed_phases and "1:checkpoint" not in timed_phases


@pytest.mark.parametrize(
    ("name", "target", "moments", "n_after"),
    [
        ("SIGKILL", "rank 1", [("1:update", 3, 0.0), ("1:evaluation", 1, 0.001)], 2),
        ("SIGTERM", "mpiexec", [("0:evaluation", 2, 0.0)], 1),
    ],
)
def test_run_resumes_after_a_signal_to_one_process(workspace, reference, phase_times, name, target, moments, n_after):
    trial = RankTrial(name, getattr(signal, name), moments, target=target, n_after=n_after)
    assert run_trial(trial, workspace.new_run(f"{name} to {target}"), reference.run_folder).problems == []
    assert trial.n_delivered == len(moments)


def test_differences_beyond_rounding_are_reported(workspace, reference, phase_times):
    case = workspace.new_run("seed", "--seed", "5")
    assert case.train().status == 0
    found = approximate_differences(case.run_folder, reference.run_folder)
    assert any("last.safetensors: model." in line for line in found)
    assert approximate_differences(reference.run_folder, reference.run_folder) == []


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", [signal.SIGKILL, *SIGNALS])
def test_run_resumes_after_every_signal_and_target(workspace, phase_times, reference, number, target):
    for i, trial in enumerate(new_trials(random.Random(7), phase_times, 2, 0, [number])):
        if trial.target == target:
            assert run_trial(trial, workspace.new_run(f"{trial.name}-{i}"), reference.run_folder).problems == []


IN_RANKS = [
    pytest.param(name, rank, marks=[pytest.mark.long] * (i % 2 != rank))
    for i, name in enumerate(FAILURES)
    for rank in (0, 1)
]


@pytest.mark.parametrize(("name", "rank"), IN_RANKS)
def test_every_failure_of_a_rank_ends_all_ranks(workspace, phase_times, reference, name, rank):
    case = workspace.new_run(f"failure {list(FAILURES).index(name)} {rank}")
    assert run_failure(name, case, reference.run_folder, rank, step=6).problems == []


@pytest.mark.long
def test_ranks_command_prints_a_table_of_failures():
    words = "--n 0 --phases 0 --failures 1 --seed 3".split()
    done = subprocess.run([sys.executable, "-m", "tests.chaos.ranks", *words], capture_output=True, text=True)
    assert done.returncode == 0 and "| meets NaN (--on-nan stop) | 1 | 1 | 0 |" in done.stdout, (
        done.stdout + done.stderr
    )
