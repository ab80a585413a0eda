"""The short causal convolution of layers with a state: each channel is mixed with those of the latest tokens.

For generation, the `last` of a layer's `KeyValueCache` holds the inputs of the latest tokens.

Shapes: B batch, T tokens, E channels, W width.
"""

from __future__ import annotations

from tricycle import extra_ops
from tricycle.attention.cache import KeyValueCache
from tricycle.tensor import Tensor


def convolve(x: Tensor, weights: Tensor, bias: Tensor | None, cache: KeyValueCache | None) -> Tensor:
    """Return a causal depthwise convolution of x (B, T, E) by weights (E, 1, W), latest token last; update the cache.

    Before the first token, or those of the cache, are zeros.
    """
    n_tokens, width = x.shape[1], weights.shape[-1]
    before = None if cache is None else cache.last.get("conv")
    if before is None:
        before = x.xp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype)
    padded = extra_ops.concatenate([Tensor(before, False), x], axis=1)
    if cache is not None:
        cache.last["conv"] = padded.array[:, n_tokens:].copy()
    out = padded[:, :n_tokens] * weights[:, 0, 0]
    for i in range(1, width):
        out = out + padded[:, i : i + n_tokens] * weights[:, 0, i]
    return out if bias is None else out + bias
