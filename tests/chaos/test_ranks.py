"""Some kills of ranks of those that `python -m tests.chaos.ranks` tries. Left out without mpi4py and an mpiexec."""

import importlib.util
import os
import random
import signal
import subprocess
import sys

import pytest

from benchmarks.ranks import mpiexec

from .kills import SIGNALS
from .ranks import FAILURES, TARGETS, RankTrial, fail, perform, profile_of, rough_differences, trials_of
from .runs import PHASES

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        sys.platform != "linux" or mpiexec() is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs Linux, mpi4py and mpiexec",
    ),
]


@pytest.fixture(scope="module")
def profile(whole):
    return profile_of(whole)


def test_all_phases_are_seen(profile):
    """Whoever is first prepares the text; the rest rank 0 has all, and rank 1 what they do together."""
    seen = {phase for phase, times in profile.seconds.items() if times}
    assert {phase.partition(":")[2] for phase in seen} == set(PHASES)
    assert {f"0:{phase}" for phase in PHASES if phase not in ("tokeniser training", "dataset building")} <= seen
    assert {"1:run", "1:update", "1:evaluation"} <= seen and "1:checkpoint" not in seen


@pytest.mark.parametrize(
    ("name", "target", "moments", "n_after"),
    [
        ("SIGKILL", "rank 1", [("1:update", 3, 0.0), ("1:evaluation", 1, 0.001)], 2),
        ("SIGTERM", "mpiexec", [("0:evaluation", 2, 0.0)], 1),
    ],
)
def test_a_signal_in_one_of_them(bench, whole, profile, name, target, moments, n_after):
    trial = RankTrial(name, getattr(signal, name), moments, target=target, n_after=n_after)
    assert perform(trial, bench.case(f"{name} to {target}"), whole.run).trouble == []
    assert trial.hits == len(moments)


def test_the_end_of_ranks_of_which_one_fails(bench):
    """Within 10 s, with one message that says which and why."""
    failure = fail("meets NaN (--on-nan stop)", bench.case("failing"), None, rank=1, step=3)
    assert failure.trouble == []


def test_what_differs_more_than_by_rounding_is_seen(bench, whole, profile):
    case = bench.case("seed", "--seed", "5")
    assert case.train().status == 0
    assert any("last.safetensors: model." in line for line in rough_differences(case.run, whole.run))
    assert rough_differences(whole.run, whole.run) == []


@pytest.mark.slow
@pytest.mark.skipif("TRICYCLE_LONG" not in os.environ, reason="takes minutes: TRICYCLE_LONG=1 runs it")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", [signal.SIGKILL, *SIGNALS])
def test_every_signal_to_each(bench, profile, whole, number, target):
    for i, trial in enumerate(trials_of(random.Random(7), profile, 2, 0, [number])):
        if trial.target == target:
            assert perform(trial, bench.case(f"{trial.name}-{i}"), whole.run).trouble == []


LONG = pytest.mark.skipif("TRICYCLE_LONG" not in os.environ, reason="takes minutes: TRICYCLE_LONG=1 runs it")
IN_RANKS = [
    pytest.param(name, rank, marks=[LONG] * (i % 2 != rank)) for i, name in enumerate(FAILURES) for rank in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), IN_RANKS)
def test_every_way_to_fail(bench, profile, whole, name, rank):
    case = bench.case(f"failure {list(FAILURES).index(name)} {rank}")
    assert fail(name, case, whole.run, rank, step=6).trouble == []


@pytest.mark.slow
@pytest.mark.skipif("TRICYCLE_LONG" not in os.environ, reason="takes minutes: TRICYCLE_LONG=1 runs it")
def test_the_long_form():
    words = "--n 0 --phases 0 --failures 1 --seed 3".split()
    done = subprocess.run([sys.executable, "-m", "tests.chaos.ranks", *words], capture_output=True, text=True)
    assert done.returncode == 0 and "| meets NaN (--on-nan stop) | 1 | 0 |" in done.stdout, done.stdout + done.stderr
