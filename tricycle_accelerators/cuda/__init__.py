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
from tricycle_accelerators.providers import exclusion_reason

PROVIDER = "cuda"


def unavailable_reason() -> str | None:
    """Return why the CUDA kernels are excluded, None if they are not; a GPU is implied by CuPy arrays, not checked."""
    return exclusion_reason(PROVIDER)


def register(array: type) -> None:
    """Register the CUDA implementations of attention, matmul, norms, RNNs and other kernels for an array type."""
    kernels.softmax.register(array)(softmax.softmax)
    kernels.softmax_backward.register(array)(softmax.softmax_backward)
    kernels.log_softmax.register(array)(softmax.log_softmax)

    kernels.gelu.register(array)(elementwise.gelu)
    kernels.gelu_with_derivative.register(array)(elementwise.gelu_with_derivative)
    kernels.gelu_backward.register(array)(elementwise.gelu_backward)
    activations.relu_squared.register(array)(elementwise.relu_squared)
    kernels.sigmoid.register(array)(elementwise.sigmoid)
    kernels.add.register(array)(elementwise.add)
    kernels.multiply.register(array)(elementwise.multiply)
    kernels.dropout_mask.register(array)(elementwise.dropout_mask)
    kernels.apply_rope.register(array)(elementwise.apply_rope)

    kernels.matmul_operand.register(array)(matrices.matmul_operand)
    kernels.matmul_operand_and_sums.register(array)(matrices.matmul_operand_and_sums)
    kernels.to_compute_dtype.register(array)(matrices.to_compute_dtype)
    kernels.matmul.register(array)(matrices.matmul)
    kernels.sum_rows.register(array)(matrices.sum_rows)
    kernels.sum_squares.register(array)(matrices.sum_squares)

    kernels.layer_norm.register(array)(normalisation.layer_norm)
    kernels.layer_norm_backward.register(array)(normalisation.layer_norm_backward)
    kernels.embedding_backward.register(array)(tables.embedding_backward)
    kernels.cross_entropy.register(array)(losses.cross_entropy)

    kernels.attention.register(array)(attention.attention)
    kernels.attention_backward.register(array)(attention.attention_backward)

    kernels.adamw.register(array)(optimisers.adamw)

    recurrent.rnn.register(array)(recurrence.rnn)
    recurrent.rnn_backward.register(array)(recurrence.rnn_backward)
    recurrent.gru.register(array)(recurrence.gru)
    recurrent.gru_backward.register(array)(recurrence.gru_backward)
    recurrent.lstm.register(array)(recurrence.lstm)
    recurrent.lstm_backward.register(array)(recurrence.lstm_backward)
