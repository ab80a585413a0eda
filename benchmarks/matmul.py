"""Matrix products of a layer, by provider, beside PyTorch's: python -m benchmarks.matmul --precision bfloat16

Of each layer x (N, K) times weights (K, M) three products are measured, as `linear` makes them: forward, the gradient
of x, and that of the weights. Each side runs in a separate process, and they are interleaved: Tricycle with all
providers, without one of those that are usable here (`TRICYCLE_KERNELS=-onednn`), and PyTorch. Operands have the
precision already; Tricycle's results are float32, PyTorch's have the precision of the operands.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from typing import Any

import numpy as np

from benchmarks.interleave import Schedule, run_interleaved
from benchmarks.workers import Worker
from tricycle import kernels

LAYERS = [(4096, 384, 1536), (4096, 1536, 384), (512, 768, 3072), (512, 768, 50304), (2048, 2048, 2048)]  # (N, K, M)
PASSES = ("forward", "input gradient", "weight gradient")
Product = tuple[tuple[int, int, int], int]  # a layer, and which of PASSES


def operands(product: Product) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 operands as they lie in memory in that pass."""
    (n_rows, n_inner, n_columns), which = product
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    if which == 0:
        return draw(n_rows, n_inner), draw(n_inner, n_columns)
    if which == 1:
        return draw(n_rows, n_columns), draw(n_inner, n_columns).T
    return draw(n_rows, n_inner).T, draw(n_rows, n_columns)


def tricycle_product(product: Product, precision: str) -> tuple[Callable[[], Any], str]:
    """Return a function that multiplies, and the name of the provider that does."""
    a, b = (kernels.matmul_operand(x.T, precision).T if x.flags.f_contiguous else x for x in operands(product))
    a, b = (kernels.matmul_operand(x, precision) for x in (a, b))
    return (lambda: kernels.matmul(a, b)), kernels.explain(kernels.matmul, a, b).provider


def torch_product(product: Product, precision: str) -> tuple[Callable[[], Any], str]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    a, b = (torch.from_numpy(x).to(getattr(torch, precision)) for x in operands(product))  # keeps the strides
    return (lambda: a @ b), f"torch {torch.__version__}"


def serve(side: str, precision: str) -> None:
    """Answer each line, a product as JSON, with the provider and the seconds that it took."""
    prepare = torch_product if side == "torch" else tricycle_product
    prepared: dict[str, tuple[Callable[[], Any], str]] = {}
    for line in sys.stdin:
        if line not in prepared:
            prepared.clear()
            layer, which = json.loads(line)
            prepared[line] = prepare((tuple(layer), which), precision)
        multiply, provider = prepared[line]
        start = time.perf_counter()
        multiply()
        print(json.dumps([provider, time.perf_counter() - start]), flush=True)


def start_workers(precision: str, n_threads: int, peer: str) -> list[Worker]:
    """Start a process for each side."""
    from tricycle_accelerators import compiled, mkl, onednn

    usable = [provider.PROVIDER for provider in (compiled, mkl, onednn) if provider.unavailable_reason() is None]
    words = "benchmarks.matmul", "--serve"
    workers = [Worker("tricycle", n_threads, *words, "tricycle", "--precision", precision)]
    for name in usable:
        settings = {"TRICYCLE_KERNELS": f"-{name}"}
        workers.append(Worker(f"-{name}", n_threads, *words, "tricycle", "--precision", precision, settings=settings))
    if peer == "torch":
        workers.append(Worker("torch", n_threads, *words, "torch", "--precision", precision))
    return workers


def measure_rates(
    workers: list[Worker], layers: list[tuple[int, int, int]], pace: Schedule
) -> Iterator[tuple[Product, list[tuple[str, float]]]]:
    """Yield each product with the provider and the GFLOP/s of each side."""
    for layer in layers:
        for which in range(len(PASSES)):
            line = json.dumps([layer, which])
            answers = run_interleaved([partial(worker.ask, line) for worker in workers], pace)
            work = 2e-9 * layer[0] * layer[1] * layer[2]
            yield (
                (layer, which),
                [(some[0][0], work / statistics.median(seconds for _, seconds in some)) for some in answers],
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="of the operands")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="what to compare with")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side")
    parser.add_argument("--layer", type=int, nargs=3, metavar=("N", "K", "M"), help="one layer, instead of five")
    parser.add_argument("--serve", choices=["tricycle", "torch"], help=argparse.SUPPRESS)
    Schedule.add_flags(parser)
    parser.set_defaults(rounds=5, seconds=0.5, settling=0.2)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.precision)
        return
    workers = start_workers(arguments.precision, arguments.threads, arguments.peer)
    pace = Schedule.of(arguments)
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {arguments.threads} threads")
    print(f"{arguments.precision}, GFLOP/s, medians of {pace}")
    names = [worker.side for worker in workers]
    print(
        f"{'N x K x M':<18}{'pass':<17}{'provider':<10}"
        + "".join(f"{name:>10}" for name in names)
        + f"{'speed-up':>10}"
    )
    for (layer, which), rates in measure_rates(workers, [tuple(arguments.layer)] if arguments.layer else LAYERS, pace):
        row = f"{'x'.join(map(str, layer)):<18}{PASSES[which]:<17}{rates[0][0]:<10}"
        row += "".join(f"{rate:>10,.0f}" for _, rate in rates)
        print(row + (f"{rates[0][1] / rates[-1][1]:>10.2f}" if names[-1] == "torch" else ""), flush=True)
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
