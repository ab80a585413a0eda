"""Kernel implementations for NumPy arrays in threads: the same names and results as in `tricycle/kernels`.

Four ideas do the work. Elementwise chains go through memory in pieces that stay in a core's cache, with results
written into place. Threads share the pieces, the heads and the rows of matrix products; sums over pieces are added
up in order, so results do not change from run to run. Sums along rows are products with ones, which BLAS does at
the speed of memory. And exponentials are not shifted by each row's maximum where one look at a whole block says that
nothing can overflow or vanish.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle.kernels import activations, batched, muon, recurrent, row_attention
from tricycle.kernels.quantized import quantized_matmul
from tricycle_accelerators.cpu import (
    attention,
    chunkwise,
    elementwise,
    losses,
    matrices,
    normalisation,
    optimisers,
    quantized,
    recurrence,
    tables,
)
from tricycle_accelerators.providers import exclusion_reason, register_kernels

PROVIDER = "numpy"


def unavailable_reason() -> str | None:
    """Return why the threaded NumPy kernels cannot be used; None when they can."""
    return exclusion_reason(PROVIDER)


def register(array: type) -> None:
    """Register the threaded NumPy implementations of matmul, attention, norms and other kernels for an array type."""
    k, r = kernels, recurrent
    products = (
        k.matmul,
        batched.batched_matmul,
        k.matmul_operand,
        k.matmul_operand_and_sums,
        k.sum_rows,
        k.sum_squares,
    )
    activated = (k.gelu, k.gelu_with_derivative, k.gelu_backward, k.swiglu, k.swiglu_backward)
    rows = (k.softmax, k.softmax_backward, k.log_softmax)
    exact = (activations.exact_gelu, activations.exact_gelu_backward)
    attending = (k.attention, k.attention_backward, row_attention.row_attention, row_attention.row_attention_backward)
    layers = (r.rnn, r.rnn_backward, r.gru, r.gru_backward, r.lstm, r.lstm_backward)
    register_kernels(
        array,
        (matrices, products),
        (quantized, [quantized_matmul]),
        (elementwise, (*activated, activations.relu_squared, k.empty, k.apply_rope)),
        (chunkwise, (k.compute_in_chunks, k.multiply, k.add, k.sigmoid, *exact, *rows)),
        (normalisation, (k.layer_norm, k.layer_norm_backward)),
        (tables, (k.embedding_backward, k.add_at)),
        (losses, [k.cross_entropy]),
        (attention, (batched.run_over_batch, *attending)),
        (optimisers, (k.adamw, muon.orthogonalize, k.run_independent)),
        (recurrence, (r.run_batch_parallel, *layers)),
    )
