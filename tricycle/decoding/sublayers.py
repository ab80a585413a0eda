"""Fused sublayers of blocks for one token: when the kernels of `kernels/sublayers.py` can replace the layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.activation import GeLU, SwiGLU
from tricycle.attention.attend import Attention
from tricycle.attention.cache import KeyValueCache
from tricycle.attention.rotary import Rotary
from tricycle.blocks import FUSED_SUBLAYERS, MLPBlock, MultiHeadSelfAttention
from tricycle.functions import Softmax, Softmax1
from tricycle.kernels.sublayers import Linear, Norm, attention_sublayer, mlp_sublayer
from tricycle.layers import Dense, Dropout, LayerNorm, RMSNorm
from tricycle.tensor import Tensor

FLOAT32 = np.dtype(np.float32)
KERNEL_NAMES = {SwiGLU: "swiglu", GeLU: "gelu"}
# The methods that the kernels replace, by the types of layers that they know. Users may override each of them.
_NAMES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Dense, LayerNorm, RMSNorm, Dropout, Rotary, GeLU, MLPBlock, Attention), ("forward",)),
    **dict.fromkeys((Softmax, Softmax1), ("attend",)),
    SwiGLU: ("forward", "_gate"),
    MultiHeadSelfAttention: ("forward", "_project", "_attend_to_cached"),
}
REPLACED = {kind: [(name, getattr(kind, name)) for name in names] for kind, names in _NAMES.items()}


def _is_known(*layers: Any) -> bool:
    """Return whether all layers have types in REPLACED, and the methods listed there, without an override or hook."""
    for layer in layers:
        kind, own = type(layer), vars(layer)
        if kind not in REPLACED:
            return False
        for name, method in REPLACED[kind]:
            if name in own or getattr(kind, name) is not method:
                return False
    return True


def _linear(layer: Any) -> Linear:
    """Return the parameters of a `Dense` layer."""
    return Linear(layer.weights.array, None if layer.bias is None else layer.bias.array)


def _norm(layer: Any, x: Tensor) -> Norm:
    """Return the parameters of a norm for x."""
    return Norm(layer._gains(x), None if layer.bias is None else layer.bias.array, layer.eps, layer._subtract_mean)


def fused_mlp(x: Tensor, mlp: Any, norm: Any) -> Tensor | None:
    """Return x + mlp(norm(x)) of one token x (1, 1, C) by one kernel; None unless all parts are of the basic types."""
    activation = mlp.activation
    if type(x.array) is not np.ndarray or x.array.dtype != FLOAT32 or type(activation) not in KERNEL_NAMES:
        return None
    if not _is_known(mlp, norm, mlp.up, activation, mlp.projection, mlp.dropout) or x.array.shape[-1] != norm.size:
        return None  # in the last case the layer raises the error
    if type(activation) is GeLU and not activation.approximate:
        return None
    linears = _linear(mlp.up), _linear(mlp.projection)
    y = mlp_sublayer(x.array.reshape(1, -1), _norm(norm, x), *linears, KERNEL_NAMES[type(activation)])
    return Tensor(y.reshape(x.array.shape), False, x.is_batched)


def fused_attention(x: Tensor, layer: Any, norm: Any, cache: Any = None, mask: Any = None) -> Tensor | None:
    """Return x + layer(norm(x), cache) of one token x (1, 1, C) by one kernel; None unless all parts are basic."""
    op, rotary = layer.attention, layer.rotary
    if type(x.array) is not np.ndarray or x.array.dtype != FLOAT32 or mask is not None:
        return None
    if type(cache) is not KeyValueCache or cache.dtype not in (None, FLOAT32) or cache.length >= layer.context_window:
        return None
    if not _is_known(layer, norm, layer.qkv, op, op.softmax, layer.projection, layer.dropout):
        return None
    if x.array.shape[-1] != norm.size:
        return None  # the layer raises the error
    if layer.query_norm is not None or layer.uses_shift or not (rotary is None or _is_known(rotary)):
        return None
    rope = None if rotary is None else rotary.angles(layer.head_size, cache.segments(1), x.array)
    new = np.empty((1, 1, layer.n_key_heads, layer.head_size), FLOAT32)
    cached = cache.append(new, new)  # the kernel writes the key and the value
    linears, off_by_one = (_linear(layer.qkv), _linear(layer.projection)), op.softmax.off_by_one
    row = x.array.reshape(1, -1)
    y = attention_sublayer(row, _norm(norm, x), *linears, rope, cached, op.score_options(new, cached[0]), off_by_one)
    return Tensor(y.reshape(x.array.shape), False, x.is_batched)


FUSED_SUBLAYERS[MLPBlock], FUSED_SUBLAYERS[MultiHeadSelfAttention] = fused_mlp, fused_attention
