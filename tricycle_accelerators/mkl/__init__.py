"""Products of bfloat16 by Intel's MKL, which uses the matrix tiles of AMX (`pip install 'tricycle-gpt[mkl]'`).

MKL's products of float32 are a choice of BLAS, `tricycle_accelerators/blas.py`, and need no version of a kernel.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle_accelerators import blas, matmul_plan
from tricycle_accelerators.mkl import matrices

PROVIDER = "mkl"


def unavailable_reason() -> str | None:
    """Return why these versions cannot be used; None when they can."""
    return blas.unavailable_reason() or matmul_plan.amx_missing_reason(matmul_plan.this_machine())


def register(array: type) -> None:
    """Offer these versions for a type of arrays."""
    kernels.matmul.register(array)(matrices.matmul)
