"""Attention of several texts that are decoded in one batch: one query of each text, to its own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tricycle import kernels
from tricycle.devices import Array, array_module
from tricycle.kernels import ScoreOptions
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.quantized_heads import QuantizedHeads, quantized_attention


@Kernel
def ragged_attention(
    q: Array, keys: Sequence[Any], values: Sequence[Any], score_options: ScoreOptions, off_by_one: bool
) -> Array:
    """Return attention (N, H, D) of the last query of each of N texts to its keys, by softmax or softmax1 (off by one).

    Args:
        q: (N, H, D).
        keys, values: for each text (1, S, K, D), arrays or QuantizedHeads; the query is at the last key.
        score_options: their offset is ignored.
    """
    parts = []
    for n, (k, v) in enumerate(zip(keys, values, strict=True)):
        options = score_options._replace(offset=k.shape[1] - 1)
        query = q[None, n : n + 1]
        is_quantized = isinstance(k, QuantizedHeads)
        attend: Any = quantized_attention if is_quantized else kernels.attention
        out = attend(query, k, v, options, off_by_one)
        parts.append((out if is_quantized else out[0])[0])
    return array_module(q).concatenate(parts)
