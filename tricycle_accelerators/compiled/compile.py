"""Compilation of all loops ahead of their first use, for `python -m tricycle_accelerators.compiled`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter

from tricycle_accelerators import threads
from tricycle_accelerators.compiled.loader import AMX_MODULES, MODULES, load_loops


def compile_module(name: str) -> tuple[str, float]:
    """Compile, or load, the loops of a module of this folder; return its name and the seconds that it took."""
    start = perf_counter()
    load_loops(name)
    return name, perf_counter() - start


def compile_all() -> Iterator[tuple[str, float]]:
    """Compile all loops for this processor, with as many processes as threads; yield (module, seconds)."""
    names = MODULES + (AMX_MODULES if load_loops("jit").HAS_AMX else ())
    with ProcessPoolExecutor(threads.n_threads(), get_context("spawn")) as processes:
        yield from processes.map(compile_module, names)
