"""How fast n ranks would be, from the parts of a step here and a link's figures: python -m benchmarks.scaling --shape S

A step of one rank is measured: when each bucket of gradients is full, when the backward pass ends, how long the update
takes. From these, a link's latency and bandwidth follow the steps of n ranks, with sums that overlap the backward pass
and without. `--check` compares that with 1, 2 and 4 ranks here, over a link that is made slow.

What it leaves out: ranks that are not equally fast, links that others use too, the processor's share in a sum.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ranks import ranks_worker, stop_ranks
from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker
from tricycle_lab.plot import new_figure, require_matplotlib

GBIT = 1e9 / 8  # bytes a second


# -------------------------------------------------------------------- the model
class Link(NamedTuple):
    """What connects two ranks: seconds until a message arrives, bytes a second, both ways at once."""

    latency: float
    bandwidth: float


class ReduceCost(NamedTuple):
    """What a sum over ranks takes: seconds of each, and of each of its bytes."""

    call: float
    byte: float

    def seconds(self, n_bytes: float) -> float:
        return self.call + n_bytes * self.byte


def ring_cost(n: int, link: Link) -> ReduceCost:
    """n - 1 times everybody passes an nth on, which is added up, and n - 1 times more, until all have all sums.

    The fewest bytes that are possible: nearly twice the array, however many ranks (Patarasuk and Yuan 2009).
    """
    return ReduceCost(2 * (n - 1) * link.latency, 2 * (n - 1) / n / link.bandwidth)


def tree_cost(n: int, link: Link) -> ReduceCost:
    """Pairs add up, then pairs of pairs, and the sum goes back: few messages of all bytes (Thakur et al. 2005)."""
    depth = math.ceil(math.log2(n))
    return ReduceCost(2 * depth * link.latency, 2 * depth / link.bandwidth)


Collective = Callable[[int, Link], ReduceCost]
COLLECTIVES: dict[str, Collective] = {"ring": ring_cost, "tree": tree_cost}


@dataclass(frozen=True)
class StepProfile:
    """A rank's step without communication.

    Attributes:
        sent: of each bucket the seconds from the start of the (last) batch until it is full, and its bytes.
        compute: seconds of a batch, forward and backward.
        update: seconds after the sums are there.
    """

    sent: tuple[tuple[float, float], ...]
    compute: float
    update: float

    def faster(self, factor: float) -> StepProfile:
        """Of a rank that computes so many times as fast."""
        sent = tuple((moment / factor, n_bytes) for moment, n_bytes in self.sent)
        return StepProfile(sent, self.compute / factor, self.update / factor)


def step_seconds(
    parts: StepProfile, costs: Sequence[ReduceCost] | None, n_batches: int = 1, overlap: bool = True
) -> float:
    """A step of equal ranks, each with so many batches, whose buckets are summed one after another.

    Args:
        costs: what to sum takes, of each kind of sum; each bucket takes the cheapest. None where one rank is alone.
        overlap: a sum begins when its bucket is full, else when the backward pass has ended.
    """
    moment = 0.0
    for full, n_bytes in parts.sent if costs else ():
        moment = max(moment, full if overlap else parts.compute)
        moment += min(cost.seconds(n_bytes) for cost in costs or ())
    return (n_batches - 1) * parts.compute + max(parts.compute, moment) + parts.update


def reduce_costs(
    n: int, link: Link, collectives: Sequence[Collective] = (ring_cost, tree_cost)
) -> list[ReduceCost] | None:
    return [collective(n, link) for collective in collectives] if n > 1 else None


def weak_efficiency(parts: StepProfile, n: int, link: Link, overlap: bool = True) -> float:
    """The speed of n ranks over n times that of one, each with one batch."""
    return step_seconds(parts, None) / step_seconds(parts, reduce_costs(n, link), overlap=overlap)


def strong_efficiency(parts: StepProfile, n: int, link: Link, n_batches: int, overlap: bool = True) -> float:
    """The same where all ranks together have so many batches: the slowest has its share, rounded up."""
    alone = step_seconds(parts, None, n_batches)
    return alone / n / step_seconds(parts, reduce_costs(n, link), math.ceil(n_batches / n), overlap)


def min_tokens_to_hide_reduce(flops: float, bandwidth: float) -> float:
    """How many tokens a rank must have in a step for the backward pass to hide the sums.

    Of P parameters and T tokens it takes 4 P T operations, and a ring moves 2 x 4 P bytes: P does not matter.

    Args:
        flops: operations a second of a rank.
        bandwidth: bytes a second.
    """
    return 2 * flops / bandwidth


# -------------------------------------------------------------------- measuring
def fastest_profile(steps: Sequence[Any]) -> StepProfile:
    """From what steps without sums said of themselves: of the quickest, which others disturbed least."""
    step = min(steps, key=lambda step: step["seconds"])
    compute = step["backward"]
    sent = tuple((min(moment, compute), n_bytes) for moment, n_bytes in step["sent"])
    return StepProfile(sent, compute, step["seconds"] - compute)


def profile_step(worker: Worker, n_steps: int) -> StepProfile:
    """The parts of a step of these ranks, while all of them compute."""
    steps = [worker.ask('{"do": "step", "summing": false}') for _ in range(n_steps + 1)]
    return fastest_profile(steps[1:])


class PredictionCheck(NamedTuple):
    """A prediction beside what was measured: seconds of the quickest step."""

    n: int
    overlap: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def check_predictions(shape: str, counts: Sequence[int], n_steps: int) -> list[PredictionCheck]:
    """Steps over a slow link as predicted and as they are.

    More ranks than processors slow each other down, which is no matter of links: the parts are those of as many ranks
    without sums, measured in turns with the steps.
    """
    rows, link = [], Link(1e-3, math.inf)
    for n in counts:
        worker = ranks_worker(shape, n)
        parts = profile_step(worker, n_steps)
        if not math.isfinite(link.bandwidth):  # sums over two ranks then take as long as a batch
            link = link._replace(bandwidth=sum(n_bytes for _, n_bytes in parts.sent) / parts.compute)
        cost = ring_cost(n, link)
        words = '{"do": "step", "link": [%r, %r], "overlap": %s}'
        silent: list[Any] = []
        slow: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(n_steps):
            silent.append(worker.ask('{"do": "step", "summing": false}'))
            for overlap, times in slow.items():
                times.append(worker.ask(words % (*cost, str(overlap).lower()))["seconds"])
        stop_ranks(worker)
        parts = fastest_profile(silent)
        for overlap, times in slow.items():
            predicted = step_seconds(parts, [cost] if n > 1 else None, overlap=overlap)
            rows.append(PredictionCheck(n, overlap, predicted, min(times)))
    return rows


# -------------------------------------------------------------------- what follows
LINKS = {
    "1 Gbit/s": Link(50e-6, GBIT),
    "10 Gbit/s": Link(20e-6, 10 * GBIT),
    "100 Gbit/s": Link(2e-6, 100 * GBIT),
}
COUNTS = [2**i for i in range(10)]
MIN_EFFICIENCY = 0.8  # of n times the speed


Efficiency = Callable[[int, Link, bool], float]


def max_efficient_ranks(efficiency: Efficiency, link: Link, overlap: bool = True) -> int:
    """The most ranks, of COUNTS, up to which efficiency stays at PAYS or above."""
    last = 1
    for n in COUNTS:
        if efficiency(n, link, overlap) < MIN_EFFICIENCY:
            break
        last = n
    return last


def efficiency_functions(parts: StepProfile, n_batches: int) -> dict[str, Efficiency]:
    return {
        "weak": lambda n, link, overlap: weak_efficiency(parts, n, link, overlap),
        "strong": lambda n, link, overlap: strong_efficiency(parts, n, link, n_batches, overlap),
    }


def efficiency_table(parts: StepProfile, n_batches: int, n_tokens: int) -> str:
    """Up to how many ranks each link pays, and how many tokens a rank needs for a ring to be hidden."""
    lines = [
        f"{'ranks with an efficiency of ' + format(MIN_EFFICIENCY, '.0%'):<36}"
        + "".join(f"{name:>12}" for name in LINKS)
    ]
    for kind, efficiency in efficiency_functions(parts, n_batches).items():
        for overlap in (True, False):
            name = f"{kind} scaling, {'overlapped' if overlap else 'sums after backward'}"
            most = [max_efficient_ranks(efficiency, link, overlap) for link in LINKS.values()]
            lines.append(f"{name:<36}" + "".join(f"{n:>12}" if n < COUNTS[-1] else f"{f'{n}+':>12}" for n in most))
    n_parameters = sum(n_bytes for _, n_bytes in parts.sent) / 4
    flops = 6 * n_parameters * n_tokens / parts.compute
    tokens = [min_tokens_to_hide_reduce(flops, link.bandwidth) for link in LINKS.values()]
    lines.append(f"{'tokens a rank, to hide a ring':<36}" + "".join(f"{n:>12,.0f}" for n in tokens))
    return "\n".join(lines)


def draw_efficiency(parts: StepProfile, factors: Sequence[float], n_batches: int, title: str, path: Path) -> None:
    """Efficiency against n: weak and strong scaling above each other, faster ranks to the right."""
    figure = new_figure(9, 6.5)
    grid = figure.subplots(2, len(factors), sharex=True, sharey=True, squeeze=False)
    for column, factor in enumerate(factors):
        for axes, (kind, efficiency) in zip(
            grid[:, column], efficiency_functions(parts.faster(factor), n_batches).items()
        ):
            for colour, (name, link) in enumerate(LINKS.items()):
                for overlap, style in ((True, "-"), (False, "--")):
                    label = name if overlap else "   sums after backward"
                    values = [efficiency(n, link, overlap) for n in COUNTS]
                    axes.plot(COUNTS, values, style, color=f"C{colour}", label=label, marker=".")
            axes.axhline(MIN_EFFICIENCY, color="grey", linewidth=0.5)
            what = "one batch a rank" if kind == "weak" else f"{n_batches} batches together"
            rank = "ranks as measured" if factor == 1 else f"ranks {factor:g} times as fast"
            axes.set(title=f"{kind} scaling, {what}; {rank}", xscale="log", ylim=(0, 1.05))
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S", help="model and a rank's batch")
    parser.add_argument("--threads", type=int, default=1, help="of the rank that is measured")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, of which the quickest counts")
    parser.add_argument("--batches", type=int, default=512, help="of all ranks together, for strong scaling")
    parser.add_argument("--faster", type=float, nargs="+", default=[1, 30], help="ranks so many times as fast, too")
    parser.add_argument("--check", choices=SHAPES, help="compare with ranks here, on this shape")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4], help="of ranks, to compare with")
    parser.add_argument("--out", type=Path, help="draw efficiencies to this PNG file")
    arguments = parser.parse_args()
    if arguments.out:
        require_matplotlib("--out")
    config = SHAPES[arguments.shape]
    worker = ranks_worker(arguments.shape, 1, arguments.threads)
    parts = profile_step(worker, arguments.steps)
    stop_ranks(worker)
    n_bytes = sum(size for _, size in parts.sent)
    print(
        f"{date.today()}, shape {arguments.shape}, {arguments.threads} thread: batch {1e3 * parts.compute:,.0f} ms, "
        f"update {1e3 * parts.update:,.0f} ms, {n_bytes / 1e6:.1f} MB of gradients in {len(parts.sent)} buckets, the "
        f"first full after {1e3 * parts.sent[0][0]:,.0f} ms"
    )
    for factor in arguments.faster:
        print(f"\nranks {factor:g} times as fast; strong scaling of {arguments.batches} batches")
        print(efficiency_table(parts.faster(factor), arguments.batches, config.batch_size * config.context_window))
    if arguments.check:
        print(f"\n{'ranks':>5}{'overlap':>9}{'predicted ms':>14}{'measured ms':>13}{'error':>8}")
        for row in check_predictions(arguments.check, arguments.counts, 4 * arguments.steps):
            times = f"{1e3 * row.predicted:>14.0f}{1e3 * row.measured:>13.0f}"
            print(f"{row.n:>5}{'yes' if row.overlap else 'no':>9}{times}{row.error:>+8.0%}")
    if arguments.out:
        draw_efficiency(
            parts, arguments.faster, arguments.batches, f"Shape {arguments.shape}, by prediction", arguments.out
        )


if __name__ == "__main__":
    main()
