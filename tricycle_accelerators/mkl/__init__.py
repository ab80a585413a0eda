"""bfloat16 matrix products by Intel's MKL, which uses AMX (`pip install 'tricycle-gpt[mkl]'`).

MKL's products of float32 are a choice of BLAS, `tricycle_accelerators/blas.py`, and need no version of a kernel.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle_accelerators import blas, matmul_plan
from tricycle_accelerators.mkl import matrices

PROVIDER = "mkl"


def unavailable_reason() -> str | None:
    """Return why MKL's bfloat16 products cannot be used; None when they can."""
    return blas.unavailable_reason() or matmul_plan.amx_missing_reason(matmul_plan.this_machine())


def register(array: type) -> None:
    """Register the MKL matmul kernel for an array type."""
    kernels.matmul.register(array)(matrices.matmul)
