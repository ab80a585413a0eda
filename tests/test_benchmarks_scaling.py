"""Tests of the predictions for many ranks against closed forms, and of the benchmarks of ranks and their tables."""

import importlib.util
import math
import time

import numpy as np
import pytest
from programs import call, good

from benchmarks import processes, rank_equality, scaling
from benchmarks.ranks import CompletedReduce, DelayedReduce, InstrumentedGroup, mpiexec
from benchmarks.scaling import (
    COUNTS,
    Link,
    ReduceCost,
    StepProfile,
    ring_cost,
    step_seconds,
    strong_efficiency,
    tree_cost,
    weak_efficiency,
)
from tricycle.distributed.processes import SINGLE_PROCESS

NEEDS_MPI = pytest.mark.skipif(
    mpiexec() is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpiexec"
)
LINK = Link(1e-3, 1e6)
FREE = Link(0.0, math.inf)
# Ten buckets of 100 kB, full after 1.1 s to 2 s, the end of the backward pass; then an update of 0.5 s.
PROFILE = StepProfile(tuple((1 + i / 10, 1e5) for i in range(1, 11)), 2.0, 0.5)


# -------------------------------------------------------------------- all-reduces
@pytest.mark.parametrize("n", [2, 3, 4, 7, 64])
def test_ring_sends_2_n_minus_2_messages_of_an_nth(n):
    messages = 2 * (n - 1) * (LINK.latency + 6e6 / n / LINK.bandwidth)
    assert ring_cost(n, LINK).seconds(6e6) == pytest.approx(messages)


@pytest.mark.parametrize(("n", "depth"), [(2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_tree_sends_two_messages_per_level(n, depth):
    assert tree_cost(n, LINK).seconds(3e6) == pytest.approx(2 * depth * (LINK.latency + 3e6 / LINK.bandwidth))


# -------------------------------------------------------------------- steps
@pytest.mark.parametrize(
    ("costs", "options", "seconds"),
    [
        (None, {}, 2.5),
        (None, {"n_batches": 3}, 6.5),
        ([ReduceCost(0.01, 1e-6)], {"overlap": False}, 2 + 10 * (0.01 + 0.1) + 0.5),
        # A fast link exposes only the last bucket, also if a reduction takes all the time between two buckets.
        ([ReduceCost(0.01, 0.0)], {}, 2 + 0.01 + 0.5),
        ([ReduceCost(0.1, 0.0)], {}, 2 + 0.1 + 0.5),
        # A slow link is busy from the first bucket on. Earlier accumulated batches hide nothing.
        ([ReduceCost(0.0, 2e-6)], {}, 1.1 + 10 * 0.2 + 0.5),
        ([ReduceCost(0.0, 2e-6)], {"n_batches": 4}, 1.1 + 10 * 0.2 + 0.5 + 3 * 2),
    ],
)
def test_seconds_of_a_step(costs, options, seconds):
    assert step_seconds(PROFILE, costs, **options) == pytest.approx(seconds)


def test_each_bucket_uses_the_cheaper_algorithm():
    profile = StepProfile(((1.0, 10.0), (1.0, 1e6)), 1.0, 0.0)
    low_latency, high_bandwidth = ReduceCost(0.0, 1e-6), ReduceCost(0.5, 1e-9)
    assert step_seconds(profile, [low_latency, high_bandwidth]) == pytest.approx(1 + 1e-5 + 0.501)


# -------------------------------------------------------------------- efficiency
def test_free_link_costs_nothing():
    for n in COUNTS:
        assert weak_efficiency(PROFILE, n, FREE) == weak_efficiency(PROFILE, n, FREE, overlap=False) == 1


def test_strong_scaling_over_a_free_link_follows_amdahls_law():
    """The update is the serial part."""
    for n in (1, 2, 4, 8):
        expected = (8 * 2 + 0.5) / (n * (8 / n * 2 + 0.5))
        assert strong_efficiency(PROFILE, n, FREE, 8) == pytest.approx(expected)
    assert strong_efficiency(PROFILE, 16, FREE, 8) == pytest.approx(16.5 / 16 / 2.5)  # half of the ranks are idle


@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1e8])
def test_overlap_never_costs_and_efficiency_falls_with_the_number_of_ranks(bandwidth):
    link = Link(1e-4, bandwidth)
    values = [weak_efficiency(PROFILE, n, link) for n in COUNTS]
    assert values == sorted(values, reverse=True) and values[0] == 1
    assert all(value >= weak_efficiency(PROFILE, n, link, overlap=False) for n, value in zip(COUNTS, values))


def test_faster_ranks_need_a_faster_link():
    faster = PROFILE.faster(10)
    assert weak_efficiency(faster, 8, Link(1e-4, 1e7)) == pytest.approx(weak_efficiency(PROFILE, 8, Link(1e-3, 1e6)))
    assert weak_efficiency(faster, 8, LINK) < weak_efficiency(PROFILE, 8, LINK)


def test_largest_efficient_number_of_ranks():
    assert scaling.max_efficient_ranks(lambda n, *_: 1 - 0.01 * n, LINK) == 16
    assert scaling.max_efficient_ranks(lambda n, *_: 1.0 if n == 1 else 0.5, LINK) == 1
    assert scaling.max_efficient_ranks(lambda *_: 1.0, LINK) == COUNTS[-1]


def test_number_of_tokens_that_hides_a_ring():
    """The backward pass of any model then takes as long as the all-reduces."""
    flops, bandwidth, n_parameters = 5e10, 1.25e8, 1e7
    n_tokens = scaling.min_tokens_to_hide_reduce(flops, bandwidth)
    assert n_tokens == 800
    assert 4 * n_parameters * n_tokens / flops == pytest.approx(
        ring_cost(10**6, Link(0, bandwidth)).seconds(4e7), rel=1e-5
    )


def test_profile_is_that_of_the_fastest_step():
    steps = [{"seconds": 3 + i, "backward": 2 + i / 2, "buckets": [[1 + i, 8], [2.1, 4]]} for i in (2, 0, 1)]
    assert scaling.fastest_profile(steps) == StepProfile(((1, 8), (2, 4)), 2, 1)


# -------------------------------------------------------------------- slow links and their costs
def test_all_reduces_over_a_slow_link_are_sequential():
    group = InstrumentedGroup(SINGLE_PROCESS)
    group.link = (0.02, 1e-3)
    start = time.perf_counter()
    first, second = (group.start_all_reduce(np.zeros(5, np.float32)) for _ in range(2))
    assert second.completion_time - first.completion_time >= 0.04 - 1e-9
    second.wait()
    assert time.perf_counter() - start >= 0.08
    assert [n_bytes for _, n_bytes in group.records] == [20, 20]


def test_completed_all_reduce_takes_no_longer():
    start = time.perf_counter()
    DelayedReduce(CompletedReduce(), start - 1).wait()
    assert time.perf_counter() - start < 0.5


def test_costs_of_communication():
    costs = processes.communication_costs(overlapped=1.1, late=1.4, no_reduce=1.0)
    assert costs == pytest.approx((0.1 / 1.1, 0.75))
    assert processes.communication_costs(overlapped=1.0, late=1.01, no_reduce=1.0) == (0.0, None)


# -------------------------------------------------------------------- programs
@pytest.mark.nightly
def test_scaling_prints_its_table_and_draws(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    words = ["--shape", "tiny", "--steps", "2", "--faster", "1", "10", "--batches", "8", "--check", "tiny"]
    words += ["--counts", "1", "--out", str(tmp_path / "it.png")]
    monkeypatch.setattr("sys.argv", ["benchmarks.scaling", *words])
    scaling.main()
    out = capsys.readouterr().out
    assert out.count("weak scaling, overlapped") == 2
    assert out.splitlines()[-1].split()[:2] == ["1", "no"]
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
@NEEDS_MPI
def test_steps_of_two_ranks_over_a_slow_link_are_predicted_roughly():
    """The link takes most of the time, even if other programs run."""
    rows = scaling.check_predictions("tiny", [2], 3)
    assert [row.overlap for row in rows] == [True, False]
    assert all(-0.7 < row.error < 2 for row in rows), rows
    assert all(row.measured > 0.002 for row in rows)


WORDS = ["--shape", "tiny", "--rounds", "1", "--seconds", "0", "--warmup", "0"]


@pytest.mark.nightly
@NEEDS_MPI
def test_processes_print_their_table():
    out = good(call("-m", "benchmarks.processes", "--peer", "none", *WORDS))
    for name in (processes.RANKS, processes.LATE_REDUCE, processes.NO_REDUCE, processes.ONE_PROCESS):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name}  ")]
        assert float(line.removeprefix(name).split()[0].replace(",", "")) > 0
    assert "communication: " in out


@pytest.mark.slow
@NEEDS_MPI
def test_processes_compare_with_ddp():
    pytest.importorskip("torch")
    out = good(call("-m", "benchmarks.processes", *WORDS))
    assert any(line.startswith("DDP  ") for line in out.splitlines())


def test_single_rank_is_an_error():
    done = call("-m", "benchmarks.processes", "--ranks", "1")
    assert done.returncode == 2
    assert "--ranks" in done.stderr and "got 1" in done.stderr


# -------------------------------------------------------------------- the table of equality
@pytest.mark.nightly
@NEEDS_MPI
def test_rank_equality_prints_its_table(monkeypatch, capsys):
    monkeypatch.setattr(rank_equality, "PRECISIONS", ("float64",))
    monkeypatch.setattr(rank_equality, "NAMES", {"muon": "Muon"})
    monkeypatch.setattr("sys.argv", ["equality", "--steps", "4", "--ranks", "2"])
    assert rank_equality.main() == 0
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")[1:-1]]
    assert row[0] == "float64, Muon" and row[2:4] == ["equal", "equal"]
    assert float(row[1]) < 1e-10
    state, shard = row[4].split(";")
    assert 0.4 * float(state) < float(shard) < 0.7 * float(state)


def test_unequal_losses_are_reported_as_not_equal(tmp_path):
    for kind, loss in {"replicated": 1.0, "repeated": 1.0, "sharded": 1.0 + 1e-9}.items():
        for n in (1, 2):
            result = {"losses": [loss], "weights": [2.0], "n_bytes": [8, 4], "n_copies": 1}
            np.savez(tmp_path / f"{n}-float64-adamw-{kind}.npz", **result)
    row = rank_equality.equality_row(tmp_path, [2], "float64", "adamw")
    assert row == "| float64, AdamW | 0e+00 | equal | NOT EQUAL | 0; 0 |"
