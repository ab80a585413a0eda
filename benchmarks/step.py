"""Where a training step's time goes: python -m benchmarks.step --shape S --out step.png

Every kernel's calls are timed, once with the plain reference kernels and once with the fast ones, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.shapes import SHAPES
from benchmarks.workers import BLAS_PIN_VARIABLES, tricycle_step
from tricycle.debug import use_reference
from tricycle_cli.kernel_times import timed_kernels
from tricycle_lab.plot import new_figure, require_matplotlib

# Each part of a step and the kernels that belong to it; what is left is graph, sums, embeddings and reshapes.
PARTS = {
    "matrix products": ["matmul"],
    "attention": ["attention", "attention_backward"],
    "activation": ["gelu_with_derivative", "gelu_backward", "multiply"],
    "norms": ["layer_norm", "layer_norm_backward"],
    "sums for biases": ["matmul_operand_and_sums"],
    "loss": ["cross_entropy"],
    "AdamW": ["adamw", "run_independent"],
}
REST = "everything else"


def kernel_times(shape: str, n_steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each part, with plain and with fast kernels: medians over steps that take turns."""
    step = tricycle_step(SHAPES[shape])
    times: dict[str, list[dict[str, float]]] = {"plain kernels": [], "fast kernels": []}

    def one() -> dict[str, float]:
        start = time.perf_counter()
        with timed_kernels() as seconds:
            step()
        total = time.perf_counter() - start
        parts = {part: 1e3 * sum(seconds[name] for name in names) for part, names in PARTS.items()}
        return parts | {REST: 1e3 * total - sum(parts.values())}

    for turn in range(n_steps + 1):
        with use_reference():
            one()
            plain = one()
        one()
        fast = one()
        if turn:
            times["plain kernels"].append(plain)
            times["fast kernels"].append(fast)
    return {
        name: {part: statistics.median(each[part] for each in steps) for part in [*PARTS, REST]}
        for name, steps in times.items()
    }


def draw_bars(times: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """One bar each, cut into parts."""
    figure = new_figure(9, 3.2)
    axes = figure.subplots()
    for i, part in enumerate([*PARTS, REST]):
        lefts = [sum(list(parts.values())[:i]) for parts in times.values()]
        widths = [parts[part] for parts in times.values()]
        axes.barh(list(times), widths, left=lefts, label=part, color=f"C{i}")
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds a step", title=title)
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S", help="model and batch")
    parser.add_argument("--steps", type=int, default=8, help="timed steps with each set of kernels")
    parser.add_argument("--out", type=Path, help="draw a chart to this PNG file")
    arguments = parser.parse_args()
    if arguments.out:
        require_matplotlib("--out")
    if any(name in os.environ for name in BLAS_PIN_VARIABLES):  # BLAS reads them when it is loaded
        clean = {name: value for name, value in os.environ.items() if name not in BLAS_PIN_VARIABLES}
        sys.exit(subprocess.run([sys.executable, "-m", "benchmarks.step", *sys.argv[1:]], env=clean).returncode)
    times = kernel_times(arguments.shape, arguments.steps)
    print(f"{'milliseconds a step':<20}" + "".join(f"{name:>15}" for name in times))
    for part in [*PARTS, REST]:
        print(f"{part:<20}" + "".join(f"{parts[part]:>15.1f}" for parts in times.values()))
    print(f"{'sum':<20}" + "".join(f"{sum(parts.values()):>15.1f}" for parts in times.values()))
    if arguments.out:
        draw_bars(times, f"Where a training step goes, shape {arguments.shape}", arguments.out)


if __name__ == "__main__":
    main()
