"""Versions for NumPy arrays that Numba compiles (https://numba.pydata.org): many small steps in one call.

They are for what a token asks for between its products, where each call of NumPy costs more than what it computes; for
steps of training that NumPy goes through memory for several times; and for products that BLAS makes below the rate of
the processor. They come with `pip install 'tricycle-gpt[numba]'`. Compiling takes some seconds once; what comes of it
is kept beside the files, or in the user's cache where these cannot be written to. Nothing is imported or compiled
before the first call.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tricycle import kernels
from tricycle.kernels import recurrent
from tricycle.kernels.quantized import few_bits_matmul
from tricycle_accelerators import narrow_rows as narrow
from tricycle_accelerators.compiled import (
    attention,
    elementwise,
    losses,
    matrices,
    narrow_rows,
    normalisation,
    optimisers,
    recurrence,
    tables,
    vectors,
)
from tricycle_accelerators.providers import excluded

PROVIDER = "numba"
MISSING = "Numba is not installed (pip install 'tricycle-gpt[numba]')"


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def available() -> bool:
    """Whether Numba is installed, and selected."""
    return problem() is None


def problem() -> str | None:
    """Why what Numba compiles cannot be used here; None when it can."""
    why = excluded(PROVIDER)
    try:
        return why or (None if find_spec("numba") else MISSING)
    except ImportError:
        return MISSING


def is_yet_to_compile() -> bool:
    """Whether nothing was compiled beside these files so far, though Numba is installed and there is a place for it."""
    here = Path(__file__).parent
    return available() and os.access(here, os.W_OK) and not any(here.glob("__pycache__/training_loops.*.nbi"))


def register(array: type) -> None:
    """Offer these versions for a type of arrays."""
    kernels.attention.on(array)(attention.attention)
    kernels.attention_backward.on(array)(attention.attention_backward)
    kernels.matmul.on(array)(vectors.matmul)
    few_bits_matmul.on(array)(vectors.few_bits_matmul)
    narrow.product_by_int8.on(array)(narrow_rows.product_by_int8)
    narrow.product_by_bfloat16.on(array)(narrow_rows.product_by_bfloat16)
    kernels.matmul.on(array)(matrices.matmul)
    kernels.gelu.on(array)(elementwise.gelu)
    kernels.gelu_with_slope.on(array)(elementwise.gelu_with_slope)
    kernels.gelu_backward.on(array)(elementwise.gelu_backward)
    kernels.sum_rows.on(array)(elementwise.sum_rows)
    kernels.sum_squares.on(array)(elementwise.sum_squares)
    kernels.swiglu.on(array)(elementwise.swiglu)
    kernels.swiglu_backward.on(array)(elementwise.swiglu_backward)
    kernels.rotate.on(array)(elementwise.rotate)
    kernels.layer_norm.on(array)(normalisation.layer_norm)
    kernels.layer_norm_backward.on(array)(normalisation.layer_norm_backward)
    recurrent.repeated.on(array)(recurrence.repeated)
    recurrent.pipeline.on(array)(recurrence.pipeline)
    recurrent.project.on(array)(recurrence.project)
    recurrent.rnn.on(array)(recurrence.rnn)
    recurrent.rnn_backward.on(array)(recurrence.rnn_backward)
    recurrent.lstm.on(array)(recurrence.lstm)
    recurrent.lstm_backward.on(array)(recurrence.lstm_backward)
    recurrent.gru.on(array)(recurrence.gru)
    recurrent.gru_backward.on(array)(recurrence.gru_backward)
    kernels.cross_entropy.on(array)(losses.cross_entropy)
    kernels.embedding_backward.on(array)(tables.embedding_backward)
    kernels.adamw.on(array)(optimisers.adamw)
