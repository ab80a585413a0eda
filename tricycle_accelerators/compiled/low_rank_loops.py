"""Numba loop of low-rank updates. The import compiles it or loads cached machine code."""

from __future__ import annotations

import numpy as np

from tricycle_accelerators.compiled.jit import compile_loop, contiguous_row, convert_for, to_float32
from tricycle_accelerators.compiled.tiles import ROWS, aligned_zeros, copy_rows, multiply


@compile_loop([f"void(f4[:, ::1], f4[:, ::1], {x}[:, :])" for x in ("f4", "u2")])
def add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Add a (M, K) @ b (K, N) to `out` (M, N), of float32 or bfloat16 bits with contiguous rows; LANES divides N."""
    n_terms, n_columns = b.shape
    right, left = aligned_zeros(n_terms, n_columns, a), aligned_zeros(ROWS, n_terms, a)
    sums = aligned_zeros(ROWS, n_columns, a)
    copy_rows(b, right)
    for start in range(0, len(out), ROWS):
        rows = out[start : start + ROWS]
        copy_rows(a[start : start + ROWS], left)
        if len(rows) == ROWS and out.itemsize == 4:
            multiply(left, right, rows, True)
            continue
        multiply(left, right, sums, False)
        for i in range(len(rows)):
            row, addend = contiguous_row(rows, i), contiguous_row(sums, i)
            for j in range(len(row)):
                row[j] = convert_for(row, to_float32(row[j]) + addend[j])
