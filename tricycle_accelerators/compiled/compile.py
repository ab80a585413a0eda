"""Compilation of all loops ahead of their first use, for `python -m tricycle_accelerators.compiled`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from multiprocessing import get_context
from time import perf_counter

from tricycle_accelerators import threads
from tricycle_accelerators.compiled.attention import LEAST_KEYS_OF_PARTS, operand_dtypes
from tricycle_accelerators.compiled.loader import AMX_MODULES, MODULES, load_loops

ATTENTION = "compile_attention", "compile_attention_backward"  # functions of `attention_loops`


def compile_loops(name: str) -> tuple[str, float]:
    """Compile, or load, a module of this folder or the loops of a function in ATTENTION; return name and seconds.

    Of the latter those for training in float32 and in bfloat16, in one process: Numba keeps them in one index file.
    """
    start = perf_counter()
    with redirect_stderr(None):  # without a note from each process that it compiles
        if name in ATTENTION:
            for narrow in (False, True):
                for operands in operand_dtypes(narrow, LEAST_KEYS_OF_PARTS):
                    getattr(load_loops("attention_loops"), name)(operands, narrow, False)
        else:
            load_loops(name)
    return name, perf_counter() - start


def compile_all() -> Iterator[tuple[str, float]]:
    """Compile all loops for this processor, with as many processes as threads; yield (name, seconds) of each part."""
    names = MODULES + (AMX_MODULES if load_loops("jit").HAS_AMX else ())
    with ProcessPoolExecutor(threads.n_threads(), get_context("spawn")) as processes:
        yield from processes.map(compile_loops, ATTENTION + names)
