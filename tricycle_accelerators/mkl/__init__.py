"""Products of bfloat16 by Intel's MKL, which uses the matrix tiles of AMX (`pip install 'tricycle-gpt[mkl]'`).

MKL's products of float32 are a choice of BLAS, `tricycle_accelerators/blas.py`, and need no version of a kernel.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle_accelerators import blas, product_plan
from tricycle_accelerators.mkl import matrices

PROVIDER = "mkl"


def problem() -> str | None:
    """Return why these versions cannot be used; None when they can."""
    return blas.problem() or product_plan.why_no_amx(product_plan.this_machine())


def register(array: type) -> None:
    """Offer these versions for a type of arrays."""
    kernels.matmul.register(array)(matrices.matmul)
