"""Matrix products that Numba compiles. Importing this compiles them, or loads what was compiled before.

A core multiplies at its full rate where all the sums that it works on stay in registers, as many as there are. The
compiler would not find that by itself, so the innermost loop is written in the compiler's own language, with vectors
as wide as this processor's; how wide and how many is all that differs between processors.

Shapes: R rows, K terms, N columns; P panels of PANEL columns.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types

from tricycle_accelerators.compiled.jit import compiled, intrinsic


def _registers() -> tuple[int, int]:
    """How many float32 a vector register of this processor holds, and how many such registers there are."""
    if llvmlite.binding.get_default_triple().startswith(("aarch64", "arm64")):
        return 4, 32
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know how to ask this system
        return 4, 16
    if features.get("avx512f"):
        return 16, 32
    return (8 if features.get("avx2") else 4), 16


LANES, N_REGISTERS = _registers()
N_VECTORS = 2  # of a panel's row
PANEL = N_VECTORS * LANES  # columns
MOST_ROWS = 12 if N_REGISTERS == 32 else 6  # of a tile: its sums, a row of a panel and one number fit into registers

FLOAT, INDEX = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
TOGETHER = ("contract",)  # a product and a sum may be one instruction


@intrinsic
def _tile(
    context: Any, n_rows: Any, rows: Any, row_size: Any, panel: Any, n_terms: Any, bias: Any, out: Any, out_size: Any
) -> Any:
    """Write some rows (K,) times a panel (K, PANEL), plus a bias (PANEL,).

    Args:
        n_rows: 1 to MOST_ROWS.
        rows, panel, bias, out: addresses.
        row_size, out_size: bytes from one row to the next.
        n_terms: K, 1 or more.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count, *rest = arguments
        end = builder.append_basic_block("tiles_end")
        choice = builder.switch(count, end)
        for n in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"tile_of_{n}")
            choice.add_case(ir.Constant(INDEX, n), block)
            builder.position_at_end(block)
            _write_tile(builder, n, *rest)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), code


def _write_tile(
    builder: Any, n_rows: int, rows: Any, row_size: Any, panel: Any, n_terms: Any, bias: Any, out: Any, out_size: Any
) -> None:
    """The instructions for a tile of so many rows."""
    sources = [_row(builder, rows, row_size, i) for i in range(n_rows)]
    zero = ir.Constant(INDEX, 0)
    first_sums = [builder.load(place, align=4) for place in _vectors(builder, _row(builder, bias, zero, 0), zero)]
    start = builder.basic_block
    loop = builder.append_basic_block("terms")
    end = builder.append_basic_block("terms_end")
    builder.branch(loop)
    builder.position_at_end(loop)
    term = builder.phi(INDEX)
    term.add_incoming(zero, start)
    sums = [[builder.phi(VECTOR) for _ in range(N_VECTORS)] for _ in range(n_rows)]
    vectors = _vectors(builder, _row(builder, panel, zero, 0), term)
    parts = [builder.load(vector, align=4) for vector in vectors]
    totals = [_with_term(builder, row, builder.load(builder.gep(x, [term])), parts) for row, x in zip(sums, sources)]
    following = builder.add(term, ir.Constant(INDEX, 1))
    term.add_incoming(following, loop)
    for row, new_row in zip(sums, totals):
        for old, first_sum, new in zip(row, first_sums, new_row):
            old.add_incoming(first_sum, start)
            old.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, n_terms), loop, end)
    builder.position_at_end(end)
    for i, row in enumerate(totals):
        places = _vectors(builder, _row(builder, out, out_size, i), zero)
        for place, total in zip(places, row):
            builder.store(total, place, align=4)


def _row(builder: Any, address: Any, size: Any, i: int) -> Any:
    n_bytes = builder.mul(size, ir.Constant(INDEX, i))
    return builder.inttoptr(builder.add(address, n_bytes), FLOAT.as_pointer())


def _vectors(builder: Any, panel: Any, row: Any) -> list[Any]:
    """Where the vectors of a panel's row are."""
    first = builder.mul(row, ir.Constant(INDEX, PANEL))
    places = [builder.gep(panel, [builder.add(first, ir.Constant(INDEX, i * LANES))]) for i in range(N_VECTORS)]
    return [builder.bitcast(place, VECTOR.as_pointer()) for place in places]


def _with_term(builder: Any, sums: list[Any], number: Any, parts: list[Any]) -> list[Any]:
    """The sums and a number times each of the parts."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    alone = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    factor = builder.shuffle_vector(alone, undefined, everywhere)
    products = [builder.fmul(factor, part, flags=TOGETHER) for part in parts]
    return [builder.fadd(total, product, flags=TOGETHER) for total, product in zip(sums, products)]


def panels(matrix: np.ndarray) -> np.ndarray:
    """(K, N) of float32 as (P, K, PANEL), the last panel filled up with zeros."""
    n_terms, n_columns = matrix.shape
    n_panels = -(-n_columns // PANEL)
    cut = np.zeros((n_panels, n_terms, PANEL), np.float32)
    n_full = n_columns // PANEL
    cut[:n_full] = matrix[:, : n_full * PANEL].reshape(n_terms, n_full, PANEL).swapaxes(0, 1)
    cut[n_full:, :, : n_columns - n_full * PANEL] = matrix[:, n_full * PANEL :]
    return cut


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), code


@numba.njit(inline="always")
def at(x: np.ndarray, t: int) -> np.ndarray:
    """x[t] of an array (T, B, H), for which the caller knows that it is in one piece, as the compiler does not."""
    return numba.carray(_pointer(x.ctypes.data + t * x.strides[0]), (x.shape[1], x.shape[2]))


@numba.njit(inline="always")
def _rows_times_panel(
    x: np.ndarray, t: int, cut: np.ndarray, p: int, bias: np.ndarray, out: int, out_size: int
) -> None:
    """x[t] (B, K) times a panel, plus its part of the bias, to an address."""
    n_rows = x.shape[1]
    n_tiles = (n_rows + MOST_ROWS - 1) // MOST_ROWS
    of_x, row_size = x.ctypes.data + t * x.strides[0], x.strides[1]
    of_cut, of_bias = cut.ctypes.data + p * cut.strides[0], bias.ctypes.data + 4 * PANEL * p
    first = 0
    for tile in range(n_tiles):
        last = (tile + 1) * n_rows // n_tiles  # as many rows in each as can be: few make poor use of a panel
        place = out + first * out_size
        _tile(last - first, of_x + first * row_size, row_size, of_cut, x.shape[2], of_bias, place, out_size)
        first = last


@compiled("void(f4[:, :, :], f4[:, :, ::1], f4[::1], f4[:, :, :])")
def multiply(x: np.ndarray, cut: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write x (T, B, K) times a matrix that `panels` has cut, plus a bias (P PANEL,), into `out` (T, B, N).

    Each sum is made in order. The last axes are in one piece.
    """
    n_steps, n_rows, n_columns = out.shape
    n_full = n_columns // PANEL
    for p in range(n_full):  # a panel stays in the first cache while all rows go by
        for t in range(n_steps):
            place = out.ctypes.data + t * out.strides[0] + 4 * PANEL * p
            _rows_times_panel(x, t, cut, p, bias, place, out.strides[1])
    if n_full == len(cut):
        return
    edge = np.empty((n_rows, PANEL), np.float32)
    for t in range(n_steps):
        _rows_times_panel(x, t, cut, n_full, bias, edge.ctypes.data, 4 * PANEL)
        for b in range(n_rows):
            for j in range(n_columns - n_full * PANEL):
                out[t, b, n_full * PANEL + j] = edge[b, j]
