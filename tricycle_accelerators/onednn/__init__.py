"""Kernel implementations for NumPy arrays by oneDNN: the same names and results as in `tricycle/kernels`.

Each answers NotImplemented for what it leaves to NumPy. Products take operands of bfloat16 or int8; all else, and
every result, is float32. The threads are ours: each calls oneDNN for its piece of the arrays.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle.kernels import muon
from tricycle.kernels.quantized import quantized_matmul
from tricycle_accelerators.onednn import library, matrices, optimisers, quantized
from tricycle_accelerators.providers import register_kernels

PROVIDER, unavailable_reason = "onednn", library.unavailable_reason


def register(array: type) -> None:
    """Register the oneDNN kernels (matrix products, quantized products, Muon's orthogonalize) for an array type."""
    products = (kernels.matmul_operand, kernels.matmul_operand_and_sums, kernels.matmul)
    register_kernels(array, (matrices, products), (quantized, [quantized_matmul]), (optimisers, [muon.orthogonalize]))
