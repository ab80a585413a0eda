"""Matrix products of float32 and bfloat16 by AMX tiles in threads, on Intel's processors that have AMX."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np

from tricycle_accelerators import buffers, chunks, matmul_plan, processor, threads
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.tiled_matmul import even_slices
from tricycle_accelerators.providers import decline_when, exclusion_reason

NO_BIAS = np.empty(0, np.float32)
ALL = slice(None)
BLOCK = 32  # rows or columns of a block, and terms of a step
_thread = threading.local()  # memory: bytes that grow to the largest size asked for


# Cache: valid for the life of the process: depends on the processor and on TRICYCLE_KERNELS.
@cache
def unavailable_reason() -> str | None:
    """Return why AMX is not used, in one line; None when it is. The first call asks Linux for permission."""
    why = exclusion_reason("amx") or matmul_plan.amx_missing_reason(matmul_plan.this_machine())
    if why is not None:
        return why
    if not load_loops("jit").FEATURES.get("amx-bf16", False):
        return "Numba compiles for a processor without AMX"
    return None if processor.request_amx() else "the system does not permit AMX"


def pairs_unavailable_reason() -> str | None:
    """Return why products of pairs (`tiles.py`) cannot be computed as they were compiled for this processor, or None.

    Where it has AMX, they were compiled for that.
    """
    return unavailable_reason() if load_loops("jit").HAS_AMX else None


def _matmul_decline_reason(
    a: np.ndarray, b: np.ndarray, bias: Any = None, out: Any = None, dtype: Any = None, *_: Any, **__: Any
) -> str | None:
    """Return why AMX cannot run (a small product, a call in a worker, dtypes, strides, no AMX), or None."""
    kind = "float32" if a.dtype == np.float32 else "bfloat16"
    why = matmul_plan.amx_decline_reason((*a.shape, b.shape[1]), kind)
    if why is not None:
        return why
    if threads.in_worker():
        return "a call by one of several threads at work"
    if not _fits(a) or not _fits(b) or a.dtype != b.dtype:
        return f"aligned matrices of float32 or of bfloat16 in rows or columns, got {a.dtype} and {b.dtype}"
    if out is not None and (out.dtype != np.float32 or out.strides[1] != 4 or not out.flags.behaved):
        return "an out of float32 with contiguous rows"
    name = "float32" if dtype is None else np.dtype(dtype).name
    if name != "float32" and (name != "bfloat16" or a.dtype.name != name or out is not None):
        return f"results of float32, or of bfloat16 for operands of bfloat16, got {name}"
    return unavailable_reason()


@decline_when(_matmul_decline_reason)
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> np.ndarray:
    """Return a @ b + bias by AMX tiles in threads, float32 or `dtype`, in `out` if given; NotImplemented if not suited.

    NotImplemented also where operands of float32 have a result that is not finite: the parts of an infinite number are
    infinite and NaN.
    """
    product = buffers.empty((len(a), b.shape[1]), np.float32 if dtype is None else dtype) if out is None else out
    share = matmul_plan.amx_partition((*a.shape, b.shape[1]))
    are_finite = []

    def some_terms(part: slice) -> np.ndarray:
        total = buffers.empty(product.shape, np.float32)
        are_finite.append(multiply(a[:, part], b[part], None, total))
        return total

    def some_results(part: slice) -> None:
        rows, columns = (part, ALL) if share == "rows" else (ALL, part)
        shift = None if bias is None else bias[columns]
        are_finite.append(multiply(a[rows], b[:, columns], shift, product[rows, columns]))

    if share == "terms":
        total = chunks.sum_over_chunks(some_terms, even_slices(len(b), BLOCK, threads.n_threads()))
        np.add(total, 0 if bias is None else bias, out=product, casting="unsafe")
    else:
        longer = product.shape[share == "columns"]
        threads.parallel_for(some_results, even_slices(longer, BLOCK, threads.n_threads()))
    return product if all(are_finite) or a.dtype != np.float32 else NotImplemented


def multiply(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray) -> bool:
    """Write a @ b + bias into `out` by AMX tiles in this thread; return whether all results are finite."""
    loops = load_loops("amx_loops")
    n_inner = len(b) if out.dtype != np.float32 else loops.even_inner(len(b))
    scratch = _scratch(loops.scratch_bytes(a, out.shape[1], n_inner))
    bits = [x if x.dtype == np.float32 else x.view(np.uint16) for x in (a, b, out)]
    shift = NO_BIAS if bias is None else np.ascontiguousarray(bias, np.float32)
    return bool(loops.multiply_large(bits[0], bits[1], shift, bits[2], n_inner, scratch))


def pack_as_tiles(matrix: np.ndarray) -> np.ndarray:
    """Copy a float32 matrix (K, N) to tiles for `packed_matmul.multiply_packed`."""
    if 4 not in matrix.strides:
        matrix = np.ascontiguousarray(matrix)
    shape = -(-matrix.shape[1] // BLOCK), -(-len(matrix) // BLOCK), load_loops("amx_packed").WIDTH
    packed = buffers.aligned_empty(shape, np.float32)  # in large pages: a step reads all of it
    load_loops("amx_loops").pack_as_tiles(matrix, packed)
    return packed


def _scratch(n_bytes: int) -> np.ndarray:
    """Return this thread's bytes for operands that are laid out, from the start of a cache line; the next call's, too.

    They stay in caches from one product to the next. Tiles that cross cache lines take four times as long to load.
    """
    memory = getattr(_thread, "memory", None)
    if memory is None or len(memory) < n_bytes:
        memory = _thread.memory = buffers.aligned_empty((n_bytes,), np.uint8)
    return memory[:n_bytes]


def _fits(x: np.ndarray) -> bool:
    """Return whether x is an aligned matrix of float32 or bfloat16 with contiguous rows or columns."""
    return x.dtype.name in ("float32", "bfloat16") and x.flags.aligned and x.itemsize in x.strides
