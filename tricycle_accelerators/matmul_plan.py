"""Choose the provider of a matrix product and how threads divide it: pure functions of shapes, layouts and the machine.

The providers' versions of `kernels.matmul` ask these functions, and check of the arrays only what a plan cannot know,
such as whether they are aligned. Shapes: (N, K) times (K, M).
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.kernels import FEW_ROWS
from tricycle.kernels.explanation import explain
from tricycle_accelerators import processor, threads
from tricycle_accelerators.instruction_sets import widest_instruction_set

Shape = tuple[int, int, int]  # N, K, M

MIN_VECTOR_BYTES = 2**12  # of the right matrix: with fewer NumPy multiplies one row about as fast
MIN_VECTORS_BYTES = 2**18  # the same with several rows
MAX_VECTORS = 64  # rows of the left matrix up to which OpenBLAS, which copies the right one, takes longer everywhere
MIN_TILED_ROWS = 128  # for fewer it takes too long to pack the right matrix
MIN_TILED_WORK = 2**24  # multiplications
MIN_FEW_ROWS_WORK = MIN_SHARED_WORK = 2**18  # multiplications: a smaller product is as fast in one thread, by NumPy
# Rows and columns, and multiplications: for fewer, operands take too long to lay out.
MIN_AMX = {"float32": (128, 2**26), "bfloat16": (32, 2**20)}
NO_TILED_MATMUL = "OpenBLAS and AVX-512 on a processor not of Intel's: elsewhere BLAS is as fast"
MAX_INNER_SPLIT_ROWS = 4  # for which threads share the terms: each reads its part of the right matrix in one piece
MAX_COLUMN_CHUNK_ROWS = 16  # for which a right matrix by columns is multiplied in pieces that stay in a cache


class Machine(NamedTuple):
    """The properties of a machine that a matmul plan depends on.

    Attributes:
        vendor: of the processor, as CPUID gives it: "GenuineIntel", "AuthenticAMD", ...; "" where it is not known.
        features: of the processor, by Linux's names: "avx512f", "avx512_bf16", "amx_bf16", ...
        blas: NumPy's: "openblas", "mkl", "" (where it is not known), ...
        providers: those that can be used.
    """

    vendor: str
    features: frozenset[str]
    blas: str
    providers: frozenset[str]


# Cache: valid for the life of the process: depends on the processor and on NumPy's BLAS.
@cache
def this_machine() -> Machine:
    """Return the cached vendor, features, BLAS ("" unless exactly one) of this machine, with an empty provider set."""
    vendor, features = processor.vendor_and_features()
    blas = {getattr(library, "internal_api", "") for library in threads.blas_libraries()}
    return Machine(vendor, features, blas.pop() if len(blas) == 1 else "", frozenset())


class MatmulSpec(NamedTuple):
    """The shape, dtype and layouts of a matrix product.

    Both operands have one dtype; each is contiguous by "rows" or by "columns".
    """

    n_rows: int
    n_inner: int
    n_columns: int
    dtype: str = "float32"
    left: str = "rows"
    right: str = "rows"


class MatmulPlan(NamedTuple):
    """The provider of a matrix product, and the dimension that its threads divide.

    Attributes:
        share: "rows" or "columns" of the result, "rows and columns", "pieces of columns" that stay in a cache, "terms"
            of the sums, or "nothing".
    """

    provider: str
    share: str


def plan_matmul(product: MatmulSpec, machine: Machine, n_threads: int) -> MatmulPlan:
    """Return a MatmulPlan: the first provider that takes `product`, else "numpy"; and the axis that threads divide.

    Operands are aligned and writable.
    """
    shape = product[:3]
    amx = amx_decline_reason(shape, product.dtype) or amx_missing_reason(machine)
    if product.dtype == "bfloat16":
        share = inner_or_longer_axis(shape) if upcasts_bfloat16(machine) else longer_axis(shape)
        versions = [("numba", amx, amx_partition(shape)), ("onednn", None, share)]
    else:
        n_bytes = 4 * product.n_inner * product.n_columns
        vectors = vector_decline_reason(product.n_rows, n_bytes, product.right, machine)
        tiles = tiled_decline_reason(shape, product.left) or tile_processor_decline_reason(machine)
        tiles = tiles or tile_shape_decline_reason(shape[2], widest_instruction_set(machine.features).lanes)
        versions = [
            ("numba", vectors, "columns"),
            ("numba", amx, amx_partition(shape)),
            ("numba", tiles, "rows and columns"),
            ("onednn", few_rows_decline_reason(shape, product.right), "columns"),
        ]
    takers = ((name, share) for name, why, share in versions if why is None and name in machine.providers)
    provider, share = next(takers, ("numpy", blas_partition(shape, product.right)))
    return MatmulPlan(provider, share if n_threads > 1 else "nothing")


# -------------------------------------------------------------------- providers
def vector_decline_reason(n_rows: int, n_bytes: int, right: str, machine: Machine) -> str | None:
    """Return why Numba's products of a few vectors decline; None for a large enough right matrix by "columns".

    More rows than one are faster than by OpenBLAS, which copies the matrix, where there are tiles up to their least
    number of rows. Other BLAS were not compared.

    Args:
        n_bytes: the size of the right matrix.
    """
    most = MAX_VECTORS if machine.blas == "openblas" else 1
    if tile_processor_decline_reason(machine) is None:
        most = MIN_TILED_ROWS - 1
    if not 1 <= n_rows <= most:
        return f"from 1 to {most} rows, got {n_rows}"
    min_bytes = MIN_VECTOR_BYTES if n_rows == 1 else MIN_VECTORS_BYTES
    if n_bytes < min_bytes:
        return f"a matrix of fewer than {min_bytes} bytes: NumPy is as quick"
    return None if right == "columns" else "a matrix by columns"


def tiled_decline_reason(shape: Shape, left: str) -> str | None:
    """Return why Numba's tiled matmul declines (N, K, M): few rows, little work or `left` not "rows"; else None."""
    if shape[0] < MIN_TILED_ROWS:
        return f"fewer than {MIN_TILED_ROWS} rows"
    if math.prod(shape) < MIN_TILED_WORK:
        return f"fewer than {MIN_TILED_WORK} multiplications"
    return None if left == "rows" else "rows in one piece: a transposed left matrix is left to BLAS"


def tile_processor_decline_reason(machine: Machine) -> str | None:
    """Return why BLAS is as fast as Numba's tiles on this machine; None where the tiles are faster."""
    slower_blas = widest_instruction_set(machine.features).slower_blas
    return None if machine.blas in slower_blas and "GenuineIntel" not in machine.vendor else NO_TILED_MATMUL


def tile_shape_decline_reason(n_columns: int, lanes: int) -> str | None:
    """Return why the columns of a result do not fill whole registers of `lanes` numbers; None if they do."""
    return f"a multiple of {lanes} columns, got {n_columns}" if n_columns % lanes else None


def amx_missing_reason(machine: Machine) -> str | None:
    """Return why a machine has no AMX for bfloat16; None if it has."""
    return None if "amx_bf16" in machine.features else "this processor has no AMX for bfloat16"


def upcasts_bfloat16(machine: Machine) -> bool:
    """Return whether bfloat16 products are computed in float32, as is faster on Intel processors without AMX."""
    return "GenuineIntel" in machine.vendor and amx_missing_reason(machine) is not None


def amx_decline_reason(shape: Shape, dtype: str) -> str | None:
    """Return why AMX declines a product (N, K, M): few rows or columns, or little work; None if it accepts."""
    least, work = MIN_AMX[dtype]
    if min(shape[0], shape[2]) < least:
        return f"at least {least} rows and columns of {dtype}, got {shape}"
    return None if math.prod(shape) >= work else f"fewer than {work} multiplications"


def few_rows_decline_reason(shape: Shape, right: str) -> str | None:
    """Return why oneDNN declines a float32 product: not 2 to FEW_ROWS rows, too small, by columns; None otherwise."""
    if shape[0] < 2:
        return "fewer than two rows of float32"
    if shape[0] > FEW_ROWS:
        return "more than a few rows of float32"
    if math.prod(shape) < MIN_FEW_ROWS_WORK:
        return "a small product: NumPy is as fast"
    return None if right == "rows" else "a matrix by rows"


# -------------------------------------------------------------------- sharing
def longer_axis(shape: Shape) -> str:
    """Return "rows" or "columns", the longer axis of the result of a product (N, K, M); "rows" if both are equal."""
    return "rows" if shape[0] >= shape[2] else "columns"


def inner_or_longer_axis(shape: Shape, factor: int = 2) -> str:
    """Return "terms" if K of a shape (N, K, M) is at least `factor` times N and M, else `longer_axis(shape)`."""
    n_rows, n_inner, n_columns = shape
    return "terms" if n_inner >= factor * max(n_rows, n_columns) else longer_axis(shape)


def amx_partition(shape: Shape) -> str:
    """Return what threads divide of a product (N, K, M) by AMX: "terms" where K is far larger, else the longer axis.

    To lay out K terms of the smaller operand for each thread takes longer then than to add up partial sums.
    """
    return inner_or_longer_axis(shape, 4)


def blas_partition(shape: Shape, right: str, has_out: bool = False) -> str:
    """Return what threads divide: "nothing", "rows", "columns", or, unless has_out, "terms", "pieces of columns".

    `right` is the order in which the right matrix is contiguous. Where `has_out` the result has its place already, so
    that there are no partial sums to add up.
    """
    n_rows, _, n_columns = shape
    work = math.prod(shape)
    if not work or work < MIN_SHARED_WORK:
        return "nothing"
    if has_out:
        return longer_axis(shape)
    if n_rows <= MAX_INNER_SPLIT_ROWS and right == "rows":
        return "terms"
    if right == "columns" and n_rows == 1:
        return "columns"
    if right == "columns" and n_rows <= MAX_COLUMN_CHUNK_ROWS < n_columns:
        return "pieces of columns"
    return inner_or_longer_axis(shape)


# Cache: valid for the life of the process: depends on the processor and on the installed providers.
@cache
def multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 in less time than float32, and a provider does so."""
    report = explain(kernels.matmul_operand, np.ones((1, 1), np.float32), "bfloat16")
    return report.provider == "onednn" and not {"avx512_bf16", "amx_bf16"}.isdisjoint(this_machine().features)
