"""Faster versions for NumPy arrays: the same names and results as in `tricycle/kernels`.

Four ideas do the work. Elementwise chains go through memory in pieces that stay in a core's cache, with results
written into place. Threads share the pieces, the heads and the rows of matrix products; sums over pieces are added
up in order, so results do not change from run to run. Sums along rows are products with ones, which BLAS does at
the speed of memory. And exponentials are not shifted by each row's maximum where one look at a whole block says that
nothing can overflow or vanish.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle.kernels import activations, batched, muon, recurrent, rows
from tricycle.kernels.quantized import few_bits_matmul
from tricycle_accelerators.cpu import (
    attention,
    elementwise,
    few_bits,
    losses,
    matrices,
    normalisation,
    optimisers,
    recurrence,
    tables,
)
from tricycle_accelerators.providers import excluded

PROVIDER = "numpy"


def problem() -> str | None:
    """Return why these versions cannot be used; None when they can."""
    return excluded(PROVIDER)


def register(array: type) -> None:
    """Offer these versions for a type of arrays."""
    kernels.operand.on(array)(matrices.operand)
    kernels.operand_and_sums.on(array)(matrices.operand_and_sums)
    kernels.matmul.on(array)(matrices.matmul)
    batched.batched_matmul.on(array)(matrices.batched_matmul)
    few_bits_matmul.on(array)(few_bits.few_bits_matmul)
    kernels.sum_rows.on(array)(matrices.sum_rows)
    kernels.sum_squares.on(array)(matrices.sum_squares)

    kernels.gelu.on(array)(elementwise.gelu)
    kernels.gelu_with_slope.on(array)(elementwise.gelu_with_slope)
    kernels.gelu_backward.on(array)(elementwise.gelu_backward)
    activations.relu_squared.on(array)(elementwise.relu_squared)
    kernels.swiglu.on(array)(elementwise.swiglu)
    kernels.swiglu_backward.on(array)(elementwise.swiglu_backward)
    kernels.multiply.on(array)(elementwise.multiply)
    kernels.add.on(array)(elementwise.add)
    kernels.rotate.on(array)(elementwise.rotate)

    kernels.layer_norm.on(array)(normalisation.layer_norm)
    kernels.layer_norm_backward.on(array)(normalisation.layer_norm_backward)
    kernels.embedding_backward.on(array)(tables.embedding_backward)
    kernels.cross_entropy.on(array)(losses.cross_entropy)

    batched.for_items.on(array)(attention.for_items)
    kernels.attention.on(array)(attention.attention)
    kernels.attention_backward.on(array)(attention.attention_backward)
    rows.row_attention.on(array)(attention.row_attention)
    rows.row_attention_backward.on(array)(attention.row_attention_backward)

    kernels.adamw.on(array)(optimisers.adamw)
    muon.orthogonalise.on(array)(optimisers.orthogonalise)
    kernels.each.on(array)(optimisers.each)

    recurrent.repeated.on(array)(recurrence.repeated)
    recurrent.pipeline.on(array)(recurrence.pipeline)
    recurrent.project.on(array)(recurrence.project)
    recurrent.rnn.on(array)(recurrence.rnn)
    recurrent.rnn_backward.on(array)(recurrence.rnn_backward)
    recurrent.gru.on(array)(recurrence.gru)
    recurrent.gru_backward.on(array)(recurrence.gru_backward)
    recurrent.lstm.on(array)(recurrence.lstm)
    recurrent.lstm_backward.on(array)(recurrence.lstm_backward)
