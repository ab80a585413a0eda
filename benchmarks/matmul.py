"""Matrix products by provider, compared with PyTorch (`python -m benchmarks.matmul --precision bfloat16`).

For each layer x (N, K) times weights (K, M), three products are measured, as `linear` makes them: forward, the gradient
of x, and the gradient of the weights. The sides run in separate processes and are interleaved: Tricycle with all
providers, Tricycle without each available one (`TRICYCLE_KERNELS=-onednn`), and PyTorch. Operands are converted to the
precision before; Tricycle's results are float32, PyTorch's have the precision of the operands.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.heading import date_and_processor
from benchmarks.interleave import Schedule, add_comparison_flags, run_interleaved
from benchmarks.workers import Worker
from tricycle import kernels

LAYERS = [(4096, 384, 1536), (4096, 1536, 384), (512, 768, 3072), (512, 768, 50304), (2048, 2048, 2048)]  # (N, K, M)
PASSES = ("forward", "input gradient", "weight gradient")
Product = tuple[tuple[int, int, int], int]  # a layer, and an index into PASSES


def operands(product: Product) -> tuple[np.ndarray, np.ndarray]:
    """Return random float32 operands (a, b) of the product a @ b, with the memory layout of that pass."""
    (n_rows, n_inner, n_columns), pass_index = product
    rng = np.random.default_rng(0)
    draw: Any = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    if pass_index == 0:
        return draw(n_rows, n_inner), draw(n_inner, n_columns)
    if pass_index == 1:
        return draw(n_rows, n_columns), draw(n_inner, n_columns).T
    return draw(n_rows, n_inner).T, draw(n_rows, n_columns)


def tricycle_product(product: Product, precision: str) -> tuple[Callable[[], Any], str]:
    """Return (function that computes a product with Tricycle in `precision`, name of the provider)."""
    a, b = (kernels.matmul_operand(x.T, precision).T if x.flags.f_contiguous else x for x in operands(product))
    a, b = (kernels.matmul_operand(x, precision) for x in (a, b))
    return (lambda: kernels.matmul(a, b)), kernels.explain(kernels.matmul, a, b).provider


def torch_product(product: Product, precision: str) -> tuple[Callable[[], Any], str]:
    """Return (function that computes a product with PyTorch in `precision`, "torch VERSION")."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    a, b = (torch.from_numpy(x).to(getattr(torch, precision)) for x in operands(product))  # keeps the strides
    return (lambda: a @ b), f"torch {torch.__version__}"


def serve(side: str, precision: str) -> None:
    """Compute the product of each JSON line of stdin until it ends, and print JSON [provider, seconds]."""
    prepare = torch_product if side == "torch" else tricycle_product
    prepared: dict[str, tuple[Callable[[], Any], str]] = {}
    for line in sys.stdin:
        if line not in prepared:
            prepared.clear()
            layer, pass_index = json.loads(line)
            prepared[line] = prepare((tuple(layer), pass_index), precision)
        multiply, provider = prepared[line]
        start = time.perf_counter()
        multiply()
        print(json.dumps([provider, time.perf_counter() - start]), flush=True)


def start_workers(precision: str, n_threads: int, peer: str) -> list[Worker]:
    """Start workers "tricycle", "-NAME" without each available provider, and "torch" if `peer` is "torch"."""
    from tricycle_accelerators import blas, compiled, onednn
    from tricycle_accelerators.compiled import amx_matmul

    sources = {"numba": compiled, "amx": amx_matmul, "mkl": blas, "onednn": onednn}
    usable = [name for name, source in sources.items() if source.unavailable_reason() is None]

    def start_worker(name: str, side: str, variables: dict[str, str] | None = None) -> Worker:
        arguments = "--serve", side, "--precision", precision
        return Worker(name, n_threads, "benchmarks.matmul", *arguments, variables=variables)

    workers = [start_worker("tricycle", "tricycle")]
    workers += [start_worker(f"-{name}", "tricycle", {"TRICYCLE_KERNELS": f"-{name}"}) for name in usable]
    return workers + ([start_worker("torch", "torch")] if peer == "torch" else [])


def measure_rates(
    workers: list[Worker], layers: list[tuple[int, int, int]], schedule: Schedule
) -> Iterator[tuple[Product, list[tuple[str, float]]]]:
    """Yield (product, [(provider, GFLOP/s) of each worker]) for each layer and pass, from median times."""
    for layer in layers:
        for pass_index in range(len(PASSES)):
            line = json.dumps([layer, pass_index])
            results = run_interleaved([partial(worker.request, line) for worker in workers], schedule)
            gflop = 2e-9 * layer[0] * layer[1] * layer[2]
            yield (
                (layer, pass_index),
                [(steps[0][0], gflop / statistics.median(seconds for _, seconds in steps)) for steps in results],
            )


def main() -> None:
    """Parse sys.argv, and print the GFLOP/s of each side by layer and pass; with --serve, run as a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="precision of the operands"
    )
    parser.add_argument("--layer", type=int, nargs=3, metavar=("N", "K", "M"), help="one layer, instead of five")
    parser.add_argument("--serve", choices=["tricycle", "torch"], help=argparse.SUPPRESS)
    add_comparison_flags(parser)
    parser.set_defaults(rounds=5, seconds=0.5, warmup=0.2)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.precision)
        return
    workers = start_workers(arguments.precision, arguments.threads, arguments.peer)
    schedule = Schedule.from_arguments(arguments)
    print(f"{date_and_processor()}, {arguments.threads} threads")
    print(f"{arguments.precision}, GFLOP/s, medians of {schedule}")
    names = [worker.side for worker in workers]
    print(
        f"{'N x K x M':<18}{'pass':<17}{'provider':<10}"
        + "".join(f"{name:>10}" for name in names)
        + f"{'speed-up':>10}"
    )
    for (layer, pass_index), rates in measure_rates(
        workers, [tuple(arguments.layer)] if arguments.layer else LAYERS, schedule
    ):
        row = f"{'x'.join(map(str, layer)):<18}{PASSES[pass_index]:<17}{rates[0][0]:<10}"
        row += "".join(f"{rate:>10,.0f}" for _, rate in rates)
        print(row + (f"{rates[0][1] / rates[-1][1]:>10.2f}" if names[-1] == "torch" else ""), flush=True)
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main()
