"""Predicted speed of n ranks from a measured step and a network link (`python -m benchmarks.scaling --shape S`).

The benchmark measures a step of one rank: the time when each gradient bucket is full, the end of the backward pass, and
the duration of the update. From these and the latency and bandwidth of a link it predicts the steps of n ranks, with
all-reduces that overlap the backward pass and without overlap. `--check` compares predictions with measured steps of 1,
2 and 4 ranks over an artificially slow link.

The model ignores differences in speed between ranks, other traffic on the links, and processor time for all-reduces.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.heading import date_and_processor
from benchmarks.ranks import ranks_worker, stop_ranks
from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker
from tricycle_lab.plot import new_figure, require_matplotlib

GBIT = 1e9 / 8  # bytes per second


# -------------------------------------------------------------------- the model
class Link(NamedTuple):
    """A full-duplex connection of two ranks: latency in seconds, bandwidth in bytes per second."""

    latency: float
    bandwidth: float


class ReduceCost(NamedTuple):
    """The cost of an all-reduce: seconds per call and seconds per byte."""

    call: float
    byte: float

    def seconds(self, n_bytes: float) -> float:
        """Return the seconds of an all-reduce of `n_bytes`."""
        return self.call + n_bytes * self.byte


def ring_cost(n: int, link: Link) -> ReduceCost:
    """Return the cost of a ring all-reduce: 2 (n - 1) messages of an nth of the array from each rank to the next.

    It moves the minimum number of bytes: nearly twice the array, for any n (Patarasuk and Yuan 2009).
    """
    return ReduceCost(2 * (n - 1) * link.latency, 2 * (n - 1) / n / link.bandwidth)


def tree_cost(n: int, link: Link) -> ReduceCost:
    """Return the cost of a tree all-reduce: 2 log2(n) messages, each of the entire array (Thakur et al. 2005)."""
    depth = math.ceil(math.log2(n))
    return ReduceCost(2 * depth * link.latency, 2 * depth / link.bandwidth)


@dataclass(frozen=True)
class StepProfile:
    """A rank's step without communication.

    Attributes:
        buckets: for each gradient bucket, the seconds from the start of the (last) batch until it is full, and its
            bytes.
        compute: seconds of the forward and backward pass of a batch.
        update: seconds of the update.
    """

    buckets: tuple[tuple[float, float], ...]
    compute: float
    update: float

    def faster(self, factor: float) -> StepProfile:
        """Return the profile of a rank that computes `factor` times as fast."""
        buckets = tuple((full_at / factor, n_bytes) for full_at, n_bytes in self.buckets)
        return StepProfile(buckets, self.compute / factor, self.update / factor)


def step_seconds(
    profile: StepProfile, costs: Sequence[ReduceCost] | None, n_batches: int = 1, overlap: bool = True
) -> float:
    """Return seconds of a step whose buckets are reduced in turn, each at the lowest of `costs`; None: one rank.

    Args:
        costs: of each available all-reduce algorithm; each bucket uses the cheapest. None for a single rank.
        n_batches: of each rank.
        overlap: an all-reduce starts when its bucket is full, else after the backward pass.
    """
    reduced_at = 0.0
    for full_at, n_bytes in profile.buckets if costs else ():
        reduced_at = max(reduced_at, full_at if overlap else profile.compute)
        reduced_at += min(cost.seconds(n_bytes) for cost in costs or ())
    return (n_batches - 1) * profile.compute + max(profile.compute, reduced_at) + profile.update


def reduce_costs(n: int, link: Link) -> list[ReduceCost] | None:
    """Return the cost of each all-reduce algorithm over n ranks, None for a single rank."""
    return [ring_cost(n, link), tree_cost(n, link)] if n > 1 else None


def weak_efficiency(profile: StepProfile, n: int, link: Link, overlap: bool = True) -> float:
    """Return the speed of n ranks with a batch each, divided by n times the speed of one."""
    return step_seconds(profile, None) / step_seconds(profile, reduce_costs(n, link), overlap=overlap)


def strong_efficiency(profile: StepProfile, n: int, link: Link, n_batches: int, overlap: bool = True) -> float:
    """Return the efficiency of n ranks that divide `n_batches` batches; the slowest has an nth, rounded up."""
    single = step_seconds(profile, None, n_batches)
    return single / n / step_seconds(profile, reduce_costs(n, link), math.ceil(n_batches / n), overlap)


def min_tokens_to_hide_reduce(flops: float, bandwidth: float) -> float:
    """Return the tokens per rank with which backward hides a ring all-reduce: 2 * FLOP/s / (bytes/s).

    The backward pass of P parameters and T tokens takes 4 P T operations, and a ring moves 2 x 4 P bytes, so the number
    does not depend on P.

    Args:
        flops: operations per second of a rank.
        bandwidth: bytes per second.
    """
    return 2 * flops / bandwidth


# -------------------------------------------------------------------- measurements
def fastest_profile(steps: Sequence[Any]) -> StepProfile:
    """Return the profile of the fastest step, the least disturbed, of `RankSteps.step` results without all-reduces.

    Args:
        steps: results of `RankSteps.step`.
    """
    step = min(steps, key=lambda step: step["seconds"])
    compute = step["backward"]
    buckets = tuple((min(full_at, compute), n_bytes) for full_at, n_bytes in step["buckets"])
    return StepProfile(buckets, compute, step["seconds"] - compute)


def profile_step(worker: Worker, n_steps: int) -> StepProfile:
    """Make n_steps + 1 steps without all-reduces in all ranks; return the profile of the fastest but the first."""
    steps = [worker.request('{"do": "step", "reduce": false}') for _ in range(n_steps + 1)]
    return fastest_profile(steps[1:])


class PredictionCheck(NamedTuple):
    """The predicted and measured seconds of the fastest step of n ranks."""

    n: int
    overlap: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Return the relative error of the prediction: predicted / measured - 1."""
        return self.predicted / self.measured - 1


def check_predictions(shape: str, counts: Sequence[int], n_steps: int) -> list[PredictionCheck]:
    """Measure and predict steps over a slow link; return for each count the overlapped and the late case.

    If there are more ranks than processors, they slow each other down, which the model of the link does not include.
    The profile is therefore that of the same number of ranks without all-reduces, interleaved with the measured steps.
    """
    rows, link = [], Link(1e-3, math.inf)
    for n in counts:
        worker = ranks_worker(shape, n)
        profile = profile_step(worker, n_steps)
        if not math.isfinite(link.bandwidth):  # all-reduces over two ranks then take as long as a batch
            link = link._replace(bandwidth=sum(n_bytes for _, n_bytes in profile.buckets) / profile.compute)
        cost = ring_cost(n, link)
        request = '{"do": "step", "link": [%r, %r], "overlap": %s}'
        steps_without_reduce: list[Any] = []
        step_times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(n_steps):
            steps_without_reduce.append(worker.request('{"do": "step", "reduce": false}'))
            for overlap, times in step_times.items():
                times.append(worker.request(request % (*cost, str(overlap).lower()))["seconds"])
        stop_ranks(worker)
        profile = fastest_profile(steps_without_reduce)
        for overlap, times in step_times.items():
            predicted = step_seconds(profile, [cost] if n > 1 else None, overlap=overlap)
            rows.append(PredictionCheck(n, overlap, predicted, min(times)))
    return rows


# -------------------------------------------------------------------- efficiency
LINKS = {
    "1 Gbit/s": Link(50e-6, GBIT),
    "10 Gbit/s": Link(20e-6, 10 * GBIT),
    "100 Gbit/s": Link(2e-6, 100 * GBIT),
}
COUNTS = [2**i for i in range(10)]
MIN_EFFICIENCY = 0.8


Efficiency = Callable[[int, Link, bool], float]


def max_efficient_ranks(efficiency: Efficiency, link: Link, overlap: bool = True) -> int:
    """Return the largest of COUNTS up to which all have an efficiency of MIN_EFFICIENCY; 1 if none has."""
    largest = 1
    for n in COUNTS:
        if efficiency(n, link, overlap) < MIN_EFFICIENCY:
            break
        largest = n
    return largest


def efficiency_functions(profile: StepProfile, n_batches: int) -> dict[str, Efficiency]:
    """Return {"weak", "strong": function (n, link, overlap) to the efficiency} of a profile."""
    return {
        "weak": lambda n, link, overlap: weak_efficiency(profile, n, link, overlap),
        "strong": lambda n, link, overlap: strong_efficiency(profile, n, link, n_batches, overlap),
    }


def efficiency_table(profile: StepProfile, n_batches: int, n_tokens: int) -> str:
    """Return a text table: the largest efficient number of ranks by link, and the tokens that hide a ring."""
    lines = [
        f"{'ranks with an efficiency of ' + format(MIN_EFFICIENCY, '.0%'):<42}"
        + "".join(f"{name:>12}" for name in LINKS)
    ]
    for kind, efficiency in efficiency_functions(profile, n_batches).items():
        for overlap in (True, False):
            name = f"{kind} scaling, {'overlapped' if overlap else 'all-reduce after backward'}"
            largest = [max_efficient_ranks(efficiency, link, overlap) for link in LINKS.values()]
            lines.append(f"{name:<42}" + "".join(f"{n:>12}" if n < COUNTS[-1] else f"{f'{n}+':>12}" for n in largest))
    n_parameters = sum(n_bytes for _, n_bytes in profile.buckets) / 4
    flops = 6 * n_parameters * n_tokens / profile.compute
    tokens = [min_tokens_to_hide_reduce(flops, link.bandwidth) for link in LINKS.values()]
    lines.append(f"{'tokens per rank that hide a ring':<42}" + "".join(f"{n:>12,.0f}" for n in tokens))
    return "\n".join(lines)


def draw_efficiency(profile: StepProfile, factors: Sequence[float], n_batches: int, title: str, path: Path) -> None:
    """Write an image of the efficiency over n: weak and strong scaling in rows, speeds of the ranks in columns."""
    figure = new_figure(9, 6.5)
    grid = figure.subplots(2, len(factors), sharex=True, sharey=True, squeeze=False)
    for column, factor in enumerate(factors):
        for axes, (kind, efficiency) in zip(
            grid[:, column], efficiency_functions(profile.faster(factor), n_batches).items()
        ):
            for color, (name, link) in enumerate(LINKS.items()):
                for overlap, style in ((True, "-"), (False, "--")):
                    label = name if overlap else "   all-reduce after backward"
                    values = [efficiency(n, link, overlap) for n in COUNTS]
                    axes.plot(COUNTS, values, style, color=f"C{color}", label=label, marker=".")
            axes.axhline(MIN_EFFICIENCY, color="grey", linewidth=0.5)
            batches = "one batch per rank" if kind == "weak" else f"{n_batches} batches in total"
            speed = "ranks as measured" if factor == 1 else f"ranks {factor:g} times as fast"
            axes.set(title=f"{kind} scaling, {batches}; {speed}", xscale="log", ylim=(0, 1.05))
            axes.title.set_fontsize(9)
            axes.set_xticks(COUNTS, [str(n) for n in COUNTS])
            axes.minorticks_off()
    for axes in grid[-1]:
        axes.set_xlabel("ranks")
    for axes in grid[:, 0]:
        axes.set_ylabel("efficiency")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Parse sys.argv, measure a step, print the predictions, and with --out also draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S", help="model and a rank's batch")
    parser.add_argument("--threads", type=int, default=1, help="threads of the measured rank")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, of which the fastest is used")
    parser.add_argument("--batches", type=int, default=512, help="batches of all ranks together, for strong scaling")
    parser.add_argument("--faster", type=float, nargs="+", default=[1, 30], help="speeds of ranks to predict")
    parser.add_argument("--check", choices=SHAPES, help="compare with measured steps of several ranks on this shape")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks for --check")
    parser.add_argument("--out", type=Path, help="draw efficiencies to this PNG file")
    arguments = parser.parse_args()
    if arguments.out:
        require_matplotlib("--out")
    config = SHAPES[arguments.shape]
    worker = ranks_worker(arguments.shape, 1, arguments.threads)
    profile = profile_step(worker, arguments.steps)
    stop_ranks(worker)
    n_bytes = sum(size for _, size in profile.buckets)
    print(
        f"{date_and_processor()}, {arguments.threads} thread\n"
        f"shape {arguments.shape}: batch {1e3 * profile.compute:,.0f} ms, "
        f"update {1e3 * profile.update:,.0f} ms, {n_bytes / 1e6:.1f} MB of gradients in {len(profile.buckets)} "
        f"buckets, the first full after {1e3 * profile.buckets[0][0]:,.0f} ms"
    )
    for factor in arguments.faster:
        print(f"\nranks {factor:g} times as fast; strong scaling of {arguments.batches} batches")
        print(efficiency_table(profile.faster(factor), arguments.batches, config.batch_size * config.context_window))
    if arguments.check:
        print(f"\n{'ranks':>5}{'overlap':>9}{'predicted ms':>14}{'measured ms':>13}{'error':>8}")
        for row in check_predictions(arguments.check, arguments.counts, 4 * arguments.steps):
            times = f"{1e3 * row.predicted:>14.0f}{1e3 * row.measured:>13.0f}"
            print(f"{row.n:>5}{'yes' if row.overlap else 'no':>9}{times}{row.error:>+8.0%}")
    if arguments.out:
        draw_efficiency(
            profile, arguments.faster, arguments.batches, f"Shape {arguments.shape}, predicted", arguments.out
        )


if __name__ == "__main__":
    main()
