"""Fused array functions: arrays in, arrays out, no Tensor.

Each is a plain function in `reference/`, always right, made a `Kernel` (`dispatch.py`): calling it runs a faster
version where one is registered for the type of its first array. `tricycle.kernels.gelu.plain` is the plain one.
"""

from tricycle.kernels.dispatch import KERNELS, Kernel, use_reference
from tricycle.kernels.reference.attention import (
    Scoring,
    attention,
    attention_backward,
    attention_scores,
    for_items,
    row_attention,
    row_attention_backward,
)
from tricycle.kernels.reference.elementwise import (
    add,
    gelu,
    gelu_backward,
    gelu_with_slope,
    multiply,
    random_mask,
    relu_squared,
    rotate,
    sigmoid,
    swiglu,
    swiglu_backward,
)
from tricycle.kernels.reference.losses import cross_entropy, cross_entropy_with_slope
from tricycle.kernels.reference.matrices import (
    FEW_ROWS,
    batched_matmul,
    matmul,
    operand,
    operand_and_sums,
    sum_rows,
    sum_squares,
    to_compute_dtype,
)
from tricycle.kernels.reference.normalisation import layer_norm, layer_norm_backward
from tricycle.kernels.reference.optimisers import adamw, each, orthogonalise
from tricycle.kernels.reference.recurrence import (
    gru,
    gru_backward,
    lstm,
    lstm_backward,
    pipeline,
    project,
    repeated,
    rnn,
    rnn_backward,
)
from tricycle.kernels.reference.softmax import log_softmax, softmax, softmax1, softmax_backward
from tricycle.kernels.reference.tables import embedding_backward

__all__ = [
    "add",
    "KERNELS",
    "Kernel",
    "FEW_ROWS",
    "Scoring",
    "use_reference",
    "softmax",
    "softmax1",
    "softmax_backward",
    "log_softmax",
    "gelu",
    "gelu_with_slope",
    "gelu_backward",
    "relu_squared",
    "sigmoid",
    "swiglu",
    "swiglu_backward",
    "multiply",
    "operand",
    "operand_and_sums",
    "to_compute_dtype",
    "matmul",
    "batched_matmul",
    "sum_rows",
    "sum_squares",
    "random_mask",
    "layer_norm",
    "layer_norm_backward",
    "embedding_backward",
    "cross_entropy",
    "cross_entropy_with_slope",
    "for_items",
    "attention_scores",
    "attention",
    "attention_backward",
    "row_attention",
    "row_attention_backward",
    "rotate",
    "adamw",
    "orthogonalise",
    "each",
    "repeated",
    "pipeline",
    "project",
    "rnn",
    "rnn_backward",
    "gru",
    "gru_backward",
    "lstm",
    "lstm_backward",
]
