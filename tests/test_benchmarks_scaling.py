"""Predictions for many ranks follow known closed forms; the benchmarks of ranks run and print their tables."""

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
# Ten buckets of 100 kB, the first full after 1.1 s, the last with the end of the pass after 2 s; half a second more.
PARTS = StepProfile(tuple((1 + i / 10, 1e5) for i in range(1, 11)), 2.0, 0.5)


# -------------------------------------------------------------------- sums
@pytest.mark.parametrize("n", [2, 3, 4, 7, 64])
def test_a_ring_passes_an_nth_on_2_n_minus_2_times(n):
    messages = 2 * (n - 1) * (LINK.latency + 6e6 / n / LINK.bandwidth)
    assert ring_cost(n, LINK).seconds(6e6) == pytest.approx(messages)


def test_a_ring_never_moves_an_array_more_than_twice():
    assert ring_cost(2, LINK).byte == pytest.approx(1 / LINK.bandwidth)
    assert [ring_cost(n, LINK).byte < ring_cost(2 * n, LINK).byte < 2 / LINK.bandwidth for n in COUNTS[1:]] == [
        True
    ] * 9
    assert ring_cost(10**6, LINK).byte == pytest.approx(2 / LINK.bandwidth, rel=1e-5)


@pytest.mark.parametrize(("n", "depth"), [(2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_a_tree_goes_up_and_down(n, depth):
    assert tree_cost(n, LINK).seconds(3e6) == pytest.approx(2 * depth * (LINK.latency + 3e6 / LINK.bandwidth))


def test_a_tree_is_faster_for_few_bytes_and_a_ring_for_many():
    assert tree_cost(64, LINK).seconds(8) < ring_cost(64, LINK).seconds(8)
    assert ring_cost(64, LINK).seconds(1e9) < tree_cost(64, LINK).seconds(1e9)


# -------------------------------------------------------------------- steps
def test_one_rank_has_nothing_to_sum():
    assert step_seconds(PARTS, None) == 2.5
    assert step_seconds(PARTS, None, n_batches=3) == 6.5


def test_without_overlap_everything_is_added_up():
    assert step_seconds(PARTS, [ReduceCost(0.01, 1e-6)], overlap=False) == pytest.approx(2 + 10 * (0.01 + 0.1) + 0.5)


def test_on_a_quick_link_only_the_last_bucket_shows():
    assert step_seconds(PARTS, [ReduceCost(0.01, 0.0)]) == pytest.approx(2 + 0.01 + 0.5)
    assert step_seconds(PARTS, [ReduceCost(0.1, 0.0)]) == pytest.approx(2 + 0.1 + 0.5)  # as fast as buckets come


def test_on_a_slow_link_sums_follow_each_other_from_the_first_bucket_on():
    assert step_seconds(PARTS, [ReduceCost(0.0, 2e-6)]) == pytest.approx(1.1 + 10 * 0.2 + 0.5)


def test_earlier_batches_hide_nothing():
    cost = [ReduceCost(0.0, 2e-6)]
    assert step_seconds(PARTS, cost, n_batches=4) == pytest.approx(step_seconds(PARTS, cost) + 3 * 2)


def test_each_bucket_takes_the_cheaper_sum():
    parts = StepProfile(((1.0, 10.0), (1.0, 1e6)), 1.0, 0.0)
    dear, cheap = ReduceCost(0.0, 1e-6), ReduceCost(0.5, 1e-9)
    assert step_seconds(parts, [dear, cheap]) == pytest.approx(1 + 1e-5 + 0.501)


# -------------------------------------------------------------------- efficiency
def test_a_free_link_costs_nothing():
    for n in COUNTS:
        assert weak_efficiency(PARTS, n, FREE) == weak_efficiency(PARTS, n, FREE, overlap=False) == 1


def test_strong_scaling_over_a_free_link_leaves_the_update():
    """Amdahl's law: the update is what is not shared out."""
    for n in (1, 2, 4, 8):
        expected = (8 * 2 + 0.5) / (n * (8 / n * 2 + 0.5))
        assert strong_efficiency(PARTS, n, FREE, 8) == pytest.approx(expected)
    assert strong_efficiency(PARTS, 16, FREE, 8) == pytest.approx(16.5 / 16 / 2.5)  # half of them idle


def test_weak_scaling_without_overlap():
    expected = 2.5 / (2.5 + 10 * 1e-3 * 2 * 3 + 1e6 * 2 * 3 / 4 / 1e8)
    parts_of_ring = step_seconds(PARTS, [ring_cost(4, Link(1e-3, 1e8))], overlap=False)
    assert 2.5 / parts_of_ring == pytest.approx(expected)


@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1e8])
def test_overlap_never_costs_and_ranks_never_help_each_other(bandwidth):
    link = Link(1e-4, bandwidth)
    values = [weak_efficiency(PARTS, n, link) for n in COUNTS]
    assert values == sorted(values, reverse=True) and values[0] == 1
    assert all(value >= weak_efficiency(PARTS, n, link, overlap=False) for n, value in zip(COUNTS, values))


def test_faster_ranks_need_a_faster_link():
    faster = PARTS.faster(10)
    assert weak_efficiency(faster, 8, Link(1e-4, 1e7)) == pytest.approx(weak_efficiency(PARTS, 8, Link(1e-3, 1e6)))
    assert weak_efficiency(faster, 8, LINK) < weak_efficiency(PARTS, 8, LINK)


def test_until_where_it_pays():
    def falling(n, link, overlap):
        return 1 - 0.01 * n

    assert scaling.max_efficient_ranks(falling, LINK) == 16
    assert scaling.max_efficient_ranks(lambda n, *_: 1.0 if n == 1 else 0.5, LINK) == 1
    assert scaling.max_efficient_ranks(lambda *_: 1.0, LINK) == COUNTS[-1]


def test_how_many_tokens_hide_a_ring():
    """Of any model: the backward pass then takes as long as the sums."""
    flops, bandwidth, n_parameters = 5e10, 1.25e8, 1e7
    n_tokens = scaling.min_tokens_to_hide_reduce(flops, bandwidth)
    assert n_tokens == 800
    assert 4 * n_parameters * n_tokens / flops == pytest.approx(
        ring_cost(10**6, Link(0, bandwidth)).seconds(4e7), rel=1e-5
    )


def test_parts_are_of_the_quickest_step():
    steps = [{"seconds": 3 + i, "backward": 2 + i / 2, "sent": [[1 + i, 8], [2.1, 4]]} for i in (2, 0, 1)]
    assert scaling.fastest_profile(steps) == StepProfile(((1, 8), (2, 4)), 2, 1)


# -------------------------------------------------------------------- scale_frequencies links, and what they cost
def test_sums_over_a_slowed_link_take_turns():
    watched = InstrumentedGroup(SINGLE_PROCESS)
    watched.link = (0.02, 1e-3)
    start = time.perf_counter()
    first, second = (watched.start_all_reduce(np.zeros(5, np.float32)) for _ in range(2))
    assert second.until - first.until >= 0.04 - 1e-9
    second.wait()
    assert time.perf_counter() - start >= 0.08
    assert [n_bytes for _, n_bytes in watched.sent] == [20, 20]


def test_a_sum_that_was_waited_for_elsewhere_takes_no_longer():
    start = time.perf_counter()
    DelayedReduce(CompletedReduce(), start - 1).wait()
    assert time.perf_counter() - start < 0.5


def test_costs_of_communication():
    assert processes.costs_of(overlapped=1.1, late=1.4, silent=1.0) == pytest.approx((0.1 / 1.1, 0.75))
    assert processes.costs_of(overlapped=1.0, late=1.01, silent=1.0) == (0.0, None)


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
def test_what_two_ranks_do_over_a_slow_link_is_predicted():
    """Roughly: whatever else computes here, the link is most of it."""
    rows = scaling.check_predictions("tiny", [2], 3)
    assert [row.overlap for row in rows] == [True, False]
    assert all(-0.7 < row.error < 2 for row in rows), rows
    assert all(row.measured > 0.002 for row in rows)


@pytest.mark.nightly
@NEEDS_MPI
def test_processes_print_their_table():
    words = ["--shape", "tiny", "--peer", "none", "--turns", "1", "--seconds", "0", "--settling", "0"]
    out = good(call("-m", "benchmarks.processes", *words))
    rows = dict.fromkeys((processes.OURS, processes.LATE, processes.SILENT, processes.ONE))
    for name in rows:
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name}  ")]
        assert float(line.removeprefix(name).split()[0].replace(",", "")) > 0
    assert "communication: " in out and "of a step" in out


@pytest.mark.slow
@NEEDS_MPI
def test_processes_beside_ddp():
    pytest.importorskip("torch")
    out = good(
        call("-m", "benchmarks.processes", "--shape", "tiny", "--turns", "1", "--seconds", "0", "--settling", "0")
    )
    assert any(line.startswith("DDP  ") for line in out.splitlines())


def test_one_process_is_no_comparison():
    done = call("-m", "benchmarks.processes", "--ranks", "1")
    assert done.returncode == 2
    assert "expected 2 or more, got 1" in done.stderr


# -------------------------------------------------------------------- the table of equality
@pytest.mark.nightly
@NEEDS_MPI
def test_the_table_of_equality(monkeypatch, capsys):
    monkeypatch.setattr(rank_equality, "PRECISIONS", ("float64",))
    monkeypatch.setattr(rank_equality, "NAMES", {"muon": "Muon"})
    monkeypatch.setattr("sys.argv", ["equality", "--steps", "4", "--ranks", "2"])
    assert rank_equality.main() == 0
    row = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")[1:-1]]
    assert row[0] == "float64, Muon" and row[2:4] == ["equal", "equal"]
    assert float(row[1]) < 1e-10
    whole, shared = row[4].split(";")
    assert 0.4 * float(whole) < float(shared) < 0.7 * float(whole)


def test_what_is_not_equal_is_said(tmp_path):
    for kind, loss in {"whole": 1.0, "again": 1.0, "shared": 1.0 + 1e-9}.items():
        for n in (1, 2):
            of = {"losses": [loss], "weights": [2.0], "n_bytes": [8, 4], "n_copies": 1}
            np.savez(tmp_path / f"{n}-float64-adamw-{kind}.npz", **of)
    row = rank_equality.equality_row(tmp_path, [2], "float64", "adamw")
    assert row == "| float64, AdamW | 0e+00 | equal | NOT EQUAL | 0; 0 |"
