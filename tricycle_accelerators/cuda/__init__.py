"""CUDA kernels for CuPy arrays: the same names and results as in `tricycle/kernels`.

Each looks at its arrays and launches. What it does not take (float64, rows that are too long, head sizes above 128) it
declines. Arrays that are not contiguous are copied first. Nothing here waits for the device or reads from it.
Importing compiles nothing and does not need CuPy.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle.kernels import activations, recurrent
from tricycle_accelerators.cuda import (
    attention,
    elementwise,
    losses,
    matrices,
    normalisation,
    optimisers,
    recurrence,
    softmax,
    tables,
)
from tricycle_accelerators.providers import excluded

PROVIDER = "cuda"


def problem() -> str | None:
    """Return why these versions cannot be used; None when they can. Where an array is CuPy's, there is a GPU."""
    return excluded(PROVIDER)


def register(array: type) -> None:
    """Offer these versions for a type of arrays."""
    kernels.softmax.on(array)(softmax.softmax)
    kernels.softmax_backward.on(array)(softmax.softmax_backward)
    kernels.log_softmax.on(array)(softmax.log_softmax)

    kernels.gelu.on(array)(elementwise.gelu)
    kernels.gelu_with_slope.on(array)(elementwise.gelu_with_slope)
    kernels.gelu_backward.on(array)(elementwise.gelu_backward)
    activations.relu_squared.on(array)(elementwise.relu_squared)
    kernels.sigmoid.on(array)(elementwise.sigmoid)
    kernels.multiply.on(array)(elementwise.multiply)
    kernels.random_mask.on(array)(elementwise.random_mask)
    kernels.rotate.on(array)(elementwise.rotate)

    kernels.operand.on(array)(matrices.operand)
    kernels.operand_and_sums.on(array)(matrices.operand_and_sums)
    kernels.to_compute_dtype.on(array)(matrices.to_compute_dtype)
    kernels.matmul.on(array)(matrices.matmul)
    kernels.sum_rows.on(array)(matrices.sum_rows)
    kernels.sum_squares.on(array)(matrices.sum_squares)

    kernels.layer_norm.on(array)(normalisation.layer_norm)
    kernels.layer_norm_backward.on(array)(normalisation.layer_norm_backward)
    kernels.embedding_backward.on(array)(tables.embedding_backward)
    kernels.cross_entropy.on(array)(losses.cross_entropy)

    kernels.attention.on(array)(attention.attention)
    kernels.attention_backward.on(array)(attention.attention_backward)

    kernels.adamw.on(array)(optimisers.adamw)

    recurrent.rnn.on(array)(recurrence.rnn)
    recurrent.rnn_backward.on(array)(recurrence.rnn_backward)
    recurrent.gru.on(array)(recurrence.gru)
    recurrent.gru_backward.on(array)(recurrence.gru_backward)
    recurrent.lstm.on(array)(recurrence.lstm)
    recurrent.lstm_backward.on(array)(recurrence.lstm_backward)
