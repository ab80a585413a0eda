"""CUDA kernels for CuPy arrays: the same names and results as in `tricycle/kernels`.

Each looks at its arrays and launches. What it does not take (float64, rows that are too long, head sizes above 128) it
declines. Arrays that are not contiguous are copied first. Nothing here waits for the device or reads from it.
Importing compiles nothing and does not need CuPy.
"""

from __future__ import annotations

from tricycle import kernels
from tricycle.kernels import activations, recording, recurrent
from tricycle_accelerators.cuda import (
    attention,
    elementwise,
    graphs,
    losses,
    matrices,
    normalisation,
    optimisers,
    recurrence,
    softmax,
    tables,
)
from tricycle_accelerators.providers import exclusion_reason, register_kernels

PROVIDER = "cuda"


def unavailable_reason() -> str | None:
    """Return why the CUDA kernels are excluded, None if they are not; a GPU is implied by CuPy arrays, not checked."""
    return exclusion_reason(PROVIDER)


def register(array: type) -> None:
    """Register the CUDA implementations of attention, matmul, norms, RNNs and other kernels for an array type."""
    k, r = kernels, recurrent
    activated = (k.gelu, k.gelu_with_derivative, k.gelu_backward, activations.relu_squared, k.sigmoid)
    operands = (k.matmul_operand, k.matmul_operand_and_sums, k.to_compute_dtype, k.matmul)
    register_kernels(
        array,
        (softmax, (k.softmax, k.softmax_backward, k.log_softmax)),
        (elementwise, (*activated, k.add, k.multiply, k.dropout_mask, k.apply_rope)),
        (matrices, (*operands, k.sum_rows, k.sum_squares)),
        (normalisation, (k.layer_norm, k.layer_norm_backward)),
        (tables, (k.embedding_backward, k.add_at)),
        (losses, [k.cross_entropy]),
        (attention, (k.attention, k.attention_backward)),
        (optimisers, [k.adamw]),
        (graphs, [recording.new_recorder]),
        (recurrence, (r.rnn, r.rnn_backward, r.gru, r.gru_backward, r.lstm, r.lstm_backward)),
    )
