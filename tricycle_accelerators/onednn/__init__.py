"""Versions for NumPy arrays that oneDNN makes faster: the same names and results as in `tricycle/kernels/reference`.

Each answers NotImplemented for what it leaves to NumPy. Products take operands of bfloat16 or int8; all else, and
every result, is float32. The threads are ours: each calls oneDNN for its piece of the arrays.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle_accelerators.onednn import attention, elementwise, few_bits, library, matrices, normalisation, optimisers


def register(array: type) -> None:
    """Offer these versions, where oneDNN can be used."""
    if library.problem() is not None:
        return
    kernels.operand.on(array)(matrices.operand)
    kernels.operand_and_sums.on(array)(matrices.operand_and_sums)
    kernels.matmul.on(array)(matrices.matmul)
    kernels.few_bits_matmul.on(array)(few_bits.few_bits_matmul)
    kernels.gelu.on(array)(elementwise.gelu)
    kernels.gelu_with_slope.on(array)(elementwise.gelu_with_slope)
    kernels.gelu_backward.on(array)(elementwise.gelu_backward)
    kernels.layer_norm.on(array)(normalisation.layer_norm)
    kernels.layer_norm_backward.on(array)(normalisation.layer_norm_backward)
    kernels.attention.on(array)(attention.attention)
    kernels.attention_backward.on(array)(attention.attention_backward)
    kernels.orthogonalise.on(array)(optimisers.orthogonalise)
