"""Table of vector instruction sets: register sizes, and tile sizes of the Numba matrix products and attention.

A processor for which a set is missing is one more row; `product_plan` and `compiled/registers.py` read the table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class InstructionSet(NamedTuple):
    """Vector registers of an instruction set, and the tile of a matrix product that fits into the registers.

    Attributes:
        names: of the processor's feature, as LLVM and as Linux give it.
        lanes: float32 numbers in a register.
        n_registers: registers.
        tile_rows: rows of a tile.
        tile_vectors: registers of columns of a tile.
        slower_blas: libraries whose products of float32 are slower than by these tiles (not on Intel's processors).
    """

    names: tuple[str, ...]
    lanes: int
    n_registers: int
    tile_rows: int
    tile_vectors: int
    slower_blas: tuple[str, ...] = ()


# The first that a processor has counts. Tiles of AVX2 reach 0.97 to 1.06 of OpenBLAS's rate with 3 registers of
# columns, and 0.88 to 0.94 with 2 (one core of a Zen 5 with AVX-512 switched off, 2026-11-25).
INSTRUCTION_SETS = (
    InstructionSet(("avx512f",), 16, 32, 4, 4, slower_blas=("openblas",)),
    InstructionSet(("avx2",), 8, 16, 4, 3),
    InstructionSet(("neon", "asimd"), 4, 32, 4, 4),
)
BASELINE = InstructionSet((), 4, 16, 4, 2)  # SSE2, and what is not known


def widest_instruction_set(features: Collection[str]) -> InstructionSet:
    """Return the first of INSTRUCTION_SETS with a name among `features` (LLVM's or Linux's names), else BASELINE."""
    return next((row for row in INSTRUCTION_SETS if any(name in features for name in row.names)), BASELINE)
