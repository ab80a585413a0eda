"""`RowSoftmax.attend`: attention with softmax variants that have no fused kernel."""

from __future__ import annotations

from typing import Any

from tricycle.devices import Array
from tricycle.functions import AttendBackward, RowSoftmax
from tricycle.kernels import ScoreOptions
from tricycle.kernels.row_attention import row_attention, row_attention_backward


def attend(
    softmax: RowSoftmax,
    q: Array,
    k: Array,
    v: Array,
    score_options: ScoreOptions,
    mask: Array | None = None,
    *,
    dtype: Any = None,
) -> tuple[Array, AttendBackward]:
    """Return attention (B, T, H, E) with the variant's `row_softmax`, and `backward`, which fills dq, dk and dv.

    Providers need memory linear, not quadratic, in the number of keys.
    """
    out = row_attention(q, k, v, score_options, softmax.row_softmax, mask)

    def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> None:
        row_attention_backward(
            grad, q, k, v, score_options, softmax.row_softmax, softmax.row_softmax_backward, dq, dk, dv, mask
        )

    return out if dtype is None else out.astype(dtype, copy=False), backward


RowSoftmax.attend = attend
