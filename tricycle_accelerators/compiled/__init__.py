"""Kernel implementations for NumPy arrays that Numba compiles (https://numba.pydata.org).

They are for what a token asks for between its products, where each call of NumPy costs more than what it computes; for
steps of training that NumPy goes through memory for several times; and for products that BLAS makes below the rate of
the processor. They come with `pip install 'tricycle-gpt[numba]'`. Compiling takes up to a minute once; what comes of it
is kept beside the files, or in the user's cache where these cannot be written to. Nothing is imported or compiled
before the first call.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from tricycle import kernels
from tricycle.kernels import activations, recurrent
from tricycle.kernels import experts as mixtures
from tricycle.kernels.low_rank import add_matmul
from tricycle.kernels.quantized import quantized_matmul, round_float32, to_float32
from tricycle.kernels.quantized_blocks import dequantize_blocks
from tricycle.kernels.quantized_heads import quantized_attention
from tricycle.kernels.ragged_attention import ragged_attention
from tricycle.kernels.sublayers import run_sublayers
from tricycle_accelerators.compiled import (
    amx_matmul,
    attention,
    block_matmul,
    elementwise,
    experts,
    losses,
    low_rank,
    normalisation,
    optimisers,
    recurrence,
    sublayers,
    tables,
    tiled_matmul,
    vector_matmul,
)
from tricycle_accelerators.providers import exclusion_reason, register_kernels

PROVIDER = "numba"
INSTALL = "(pip install 'tricycle-gpt[numba]')"
MISSING = f"Numba is not installed {INSTALL}"


def unavailable_reason() -> str | None:
    """Return why the Numba kernels cannot be used, in one line; None when they can."""
    if why := exclusion_reason(PROVIDER):
        return why
    try:
        found = version("numba") if find_spec("numba") else ""
    except ImportError:
        return MISSING
    # LLVM ends the process when Numba 0.61 compiles bfloat16 loops for x86-64.
    old = found.startswith("0.") and int(found.split(".")[1]) < 62
    return f"expected Numba 0.62 or later, got {found} {INSTALL}" if old else (None if found else MISSING)


def register(array: type) -> None:
    """Register the Numba implementations of attention, matmul, norms, RNNs and other kernels for an array type."""
    k, r, m = kernels, recurrent, mixtures
    activated = (k.gelu, k.gelu_with_derivative, k.gelu_backward, k.swiglu, k.swiglu_backward)
    by_expert = (m.grouped_matmul, m.grouped_weight_gradients, m.sum_by_token, m.sum_by_token_backward)
    layers = (r.rnn, r.rnn_backward, r.gru, r.gru_backward, r.lstm, r.lstm_backward)
    register_kernels(
        array,
        (attention, (k.attention, k.attention_backward, quantized_attention, ragged_attention)),
        (block_matmul, (quantized_matmul, dequantize_blocks)),
        (vector_matmul, (k.matmul, quantized_matmul)),
        (amx_matmul, [k.matmul]),
        (tiled_matmul, [k.matmul]),
        (low_rank, [add_matmul]),
        (elementwise, (*activated, k.matmul_operand_and_sums, k.sum_rows, k.sum_squares, k.apply_rope)),
        (elementwise, (k.softmax, k.softmax_backward, k.sigmoid, to_float32, round_float32)),
        (elementwise, (activations.exact_gelu, activations.exact_gelu_backward)),
        (normalisation, (k.layer_norm, k.layer_norm_backward)),
        (recurrence, (r.prepare_matrix, r.run_batch_parallel, r.project, *layers)),
        (experts, (m.route, m.mix_swiglu_experts, *by_expert)),
        (sublayers, [run_sublayers]),
        (losses, [k.cross_entropy]),
        (tables, [k.embedding_backward]),
        (optimisers, [k.adamw]),
    )
