"""Layer norm and RMS norm, over the last axis."""

from __future__ import annotations

from typing import Any

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import wide


@kernel
def layer_norm(
    x: Array, gain: Array, bias: Array | None, eps: float, centred: bool, dtype: Any = None
) -> tuple[Array, Array, Array]:
    """Layer norm (Ba et al. 2016), or RMS norm (Zhang and Sennrich 2019) where not `centred`.

    Args:
        x: (..., C).
        gain, bias: (C,).
        eps: added to the variance (or mean square).
        dtype: of the result; that of x unless given.

    Returns:
        y: (..., C), and the mean and 1 / deviation of each row (..., 1), which the backward needs.
    """
    xp = array_module(x)
    dtype = dtype or x.dtype
    x = wide(x)
    mean = x.mean(axis=-1, keepdims=True) if centred else xp.zeros_like(x[..., :1])
    difference = x - mean
    scale = 1 / xp.sqrt((difference * difference).mean(axis=-1, keepdims=True) + eps)
    y = difference * scale * gain
    return (y if bias is None else y + bias).astype(dtype, copy=False), mean, scale


@kernel
def layer_norm_backward(
    grad: Array, x: Array, gain: Array, mean: Array, scale: Array, centred: bool
) -> tuple[Array, Array, Array]:
    """The gradients of x, in its dtype, of gain and of bias."""
    dtype = x.dtype
    grad, x = wide(grad), wide(x)
    rows = tuple(range(x.ndim - 1))
    normal = (x - mean) * scale
    inner = grad * gain
    dx = inner - normal * (inner * normal).mean(axis=-1, keepdims=True)
    if centred:
        dx -= inner.mean(axis=-1, keepdims=True)
    return (dx * scale).astype(dtype, copy=False), (grad * normal).sum(axis=rows), grad.sum(axis=rows)
