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


def test_ring_never_moves_an_array_more_than_twice():
    assert ring_cost(2, LINK).byte == pytest.approx(1 / LINK.bandwidth)
    assert [ring_cost(n, LINK).byte < ring_cost(2 * n, LINK).byte < 2 / LINK.bandwidth for n in COUNTS[1:]] == [
        True
    ] * 9
    assert ring_cost(10**6, LINK).byte == pytest.approx(2 / LINK.bandwidth, rel=1e-5)


@pytest.mark.parametrize(("n", "depth"), [(2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_tree_sends_two_messages_per_level(n, depth):
    assert tree_cost(n, LINK).seconds(3e6) == pytest.approx(2 * depth * (LINK.latency + 3e6 / LINK.bandwidth))


def test_tree_is_faster_for_few_bytes_and_ring_for_many():
    assert tree_cost(64, LINK).seconds(8) < ring_cost(64, LINK).seconds(8)
    assert ring_cost(64, LINK).seconds(1e9) < tree_cost(64, LINK).seconds(1e9)


# -------------------------------------------------------------------- steps
def test_single_rank_reduces_nothing():
    assert step_seconds(PROFILE, None) == 2.5
    assert step_seconds(PROFILE, None, n_batches=3) == 6.5


def test_without_overlap_all_times_are_summed():
    assert step_seconds(PROFILE, [ReduceCost(0.01, 1e-6)], overlap=False) == pytest.approx(2 + 10 * (0.01 + 0.1) + 0.5)


def test_fast_link_exposes_only_the_last_bucket():
    assert step_seconds(PROFILE, [ReduceCost(0.01, 0.0)]) == pytest.approx(2 + 0.01 + 0.5)
    assert step_seconds(PROFILE, [ReduceCost(0.1, 0.0)]) == pytest.approx(2 + 0.1 + 0.5)  # the time between two buckets


def test_slow_link_is_busy_from_the_first_bucket_on():
    assert step_seconds(PROFILE, [ReduceCost(0.0, 2e-6)]) == pytest.approx(1.1 + 10 * 0.2 + 0.5)


def test_earlier_accumulated_batches_hide_nothing():
    cost = [ReduceCost(0.0, 2e-6)]
    assert step_seconds(PROFILE, cost, n_batches=4) == pytest.approx(step_seconds(PROFILE, cost) + 3 * 2)


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


def test_weak_scaling_without_overlap():
    expected = 2.5 / (2.5 + 10 * 1e-3 * 2 * 3 + 1e6 * 2 * 3 / 4 / 1e8)
    seconds = step_seconds(PROFILE, [ring_cost(4, Link(1e-3, 1e8))], overlap=False)
    assert 2.5 / seconds == pytest.approx(expected)


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
    def falling_efficiency(n, link, overlap):
        return 1 - 0.01 * n

    assert scaling.max_efficient_ranks(falling_efficiency, LINK) == 16
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


@pytest.mark.nightly
@NEEDS_MPI
def test_processes_print_their_table():
    words = ["--shape", "tiny", "--peer", "none", "--rounds", "1", "--seconds", "0", "--warmup", "0"]
    out = good(call("-m", "benchmarks.processes", *words))
    for name in (processes.RANKS, processes.LATE_REDUCE, processes.NO_REDUCE, processes.ONE_PROCESS):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name}  ")]
        assert float(line.removeprefix(name).split()[0].replace(",", "")) > 0
    assert "communication: " in out


@pytest.mark.slow
@NEEDS_MPI
def test_processes_compare_with_ddp():
    pytest.importorskip("torch")
    out = good(
        call("-m", "benchmarks.processes", "--shape", "tiny", "--rounds", "1", "--seconds", "0", "--warmup", "0")
    )
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
