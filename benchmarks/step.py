"""Time of each group of kernels in a training step (`python -m benchmarks.step --shape S --out step.png`).

All kernel calls are timed, with the reference kernels and with the fast ones, in interleaved steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.interleave import run_rounds
from benchmarks.shapes import SHAPES
from benchmarks.workers import BLAS_PIN_VARIABLES, tricycle_step
from tricycle.debug import use_reference
from tricycle_cli.speed import timed_kernels
from tricycle_lab.plot import new_figure, require_matplotlib

# Groups of kernels. The remaining time is spent on the graph, gradient sums, embeddings and reshapes.
KERNEL_GROUPS = {
    "matrix products": ["matmul"],
    "attention": ["attention", "attention_backward"],
    "activation": ["gelu_with_derivative", "gelu_backward", "multiply"],
    "norms": ["layer_norm", "layer_norm_backward"],
    "sums for biases": ["matmul_operand_and_sums"],
    "loss": ["cross_entropy"],
    "AdamW": ["adamw", "run_independent"],
}
OTHER = "everything else"


def kernel_times(shape: str, n_steps: int) -> dict[str, dict[str, float]]:
    """Return {"reference kernels" and "fast kernels": {group: ms per step}}, medians over `n_steps` steps."""
    step = tricycle_step(SHAPES[shape])

    def timed_step() -> dict[str, float]:
        start = time.perf_counter()
        with timed_kernels() as seconds:
            step()
        total = time.perf_counter() - start
        groups = {group: 1e3 * sum(seconds[name] for name in names) for group, names in KERNEL_GROUPS.items()}
        return groups | {OTHER: 1e3 * total - sum(groups.values())}

    def second_step() -> dict[str, float]:
        timed_step()
        return timed_step()

    times = run_rounds({"reference kernels": use_reference()(second_step), "fast kernels": second_step}, n_steps)
    return {
        name: {group: statistics.median(step[group] for step in steps) for group in [*KERNEL_GROUPS, OTHER]}
        for name, steps in times.items()
    }


def draw_bars(times: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """Write an image with a stacked bar for each set of kernels; `times` is the result of `kernel_times`."""
    figure = new_figure(9, 3.2)
    axes = figure.subplots()
    for i, group in enumerate([*KERNEL_GROUPS, OTHER]):
        lefts = [sum(list(groups.values())[:i]) for groups in times.values()]
        widths = [groups[group] for groups in times.values()]
        axes.barh(list(times), widths, left=lefts, label=group, color=f"C{i}")
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per step", title=title)
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Parse sys.argv, print ms by kernel group, with --out draw a PNG; if BLAS is pinned, rerun unpinned and exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S", help="model and batch")
    parser.add_argument("--steps", type=int, default=8, help="timed steps with each set of kernels")
    parser.add_argument("--out", type=Path, help="draw a chart to this PNG file")
    arguments = parser.parse_args()
    if arguments.out:
        require_matplotlib("--out")
    if any(name in os.environ for name in BLAS_PIN_VARIABLES):  # BLAS reads them at import: start a new process
        clean = {name: value for name, value in os.environ.items() if name not in BLAS_PIN_VARIABLES}
        sys.exit(subprocess.run([sys.executable, "-m", "benchmarks.step", *sys.argv[1:]], env=clean).returncode)
    times = kernel_times(arguments.shape, arguments.steps)
    print(f"{'ms per step':<20}" + "".join(f"{name:>19}" for name in times))
    for group in [*KERNEL_GROUPS, OTHER]:
        print(f"{group:<20}" + "".join(f"{groups[group]:>19.1f}" for groups in times.values()))
    print(f"{'sum':<20}" + "".join(f"{sum(groups.values()):>19.1f}" for groups in times.values()))
    if arguments.out:
        draw_bars(times, f"Time of a training step by kernel group, shape {arguments.shape}", arguments.out)


if __name__ == "__main__":
    main()
