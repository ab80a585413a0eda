"""Fused sublayers of transformer blocks for one token: which layers the kernels of `kernels/sublayers.py` can replace."""

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
from tricycle.layers import Dense, LayerNorm, RMSNorm
from tricycle.tensor import Tensor

FLOAT32 = np.dtype(np.float32)
KERNEL_NAMES = {SwiGLU: "swiglu", GeLU: "gelu"}


def _has_hook(*layers: Any) -> bool:
    """Return whether one of the layers has a `forward` that is not its class's."""
    for layer in layers:  # a loop is faster than `any`
        if "forward" in vars(layer):
            return True
    return False


def _linear(layer: Any) -> Linear | None:
    """Return the parameters of a `Dense` layer without a hook; None for other layers."""
    if type(layer) is not Dense or "forward" in vars(layer):
        return None
    bias = layer.bias
    return Linear(layer.weights.array, None if bias is None else bias.array)


def _norm(layer: Any, x: Tensor) -> Norm | None:
    """Return the parameters of a `LayerNorm` or `RMSNorm` without a hook; None for others, or if x is not float32."""
    if type(layer) not in (RMSNorm, LayerNorm) or "forward" in vars(layer):
        return None
    if type(x.array) is not np.ndarray or x.array.dtype != FLOAT32:
        return None
    bias = layer.bias
    return Norm(layer._gains(x), None if bias is None else bias.array, layer.eps, layer._subtract_mean)


def fused_mlp(x: Tensor, mlp: Any, norm: Any) -> Tensor | None:
    """Return x + mlp(norm(x)) of one token x (1, 1, C) by one kernel; None unless all parts are of the basic types."""
    activation = mlp.activation
    name = KERNEL_NAMES.get(type(activation))
    if name is None or (name == "gelu" and not activation.approximate) or _has_hook(mlp, activation, mlp.dropout):
        return None
    parameters, up, down = _norm(norm, x), _linear(mlp.up), _linear(mlp.projection)
    if parameters is None or up is None or down is None:
        return None
    y = mlp_sublayer(x.array.reshape(1, -1), parameters, up, down, name)
    return Tensor(y.reshape(x.array.shape), False, x.is_batched)


def fused_attention(x: Tensor, layer: Any, norm: Any, cache: Any = None, mask: Any = None) -> Tensor | None:
    """Return x + layer(norm(x), cache) of one token x (1, 1, C) by one kernel; None unless all parts are basic."""
    op, rotary = layer.attention, layer.rotary
    if type(cache) is not KeyValueCache or cache.dtype not in (None, FLOAT32) or mask is not None:
        return None
    if type(op) is not Attention or type(op.softmax) not in (Softmax, Softmax1) or op.softcap is not None:
        return None
    if not (rotary is None or type(rotary) is Rotary) or layer.query_norm is not None or layer.uses_shift:
        return None
    if _has_hook(layer, op, op.softmax, layer.dropout) or (rotary is not None and _has_hook(rotary)):
        return None
    parameters, qkv, projection = _norm(norm, x), _linear(layer.qkv), _linear(layer.projection)
    if parameters is None or qkv is None or projection is None:
        return None
    if cache.length >= layer.context_window:
        return None  # the layer raises the error
    rope = None if rotary is None else rotary.angles(layer.head_size, cache.segments(1))
    new = np.empty((1, 1, layer.n_key_heads, layer.head_size), FLOAT32)
    cached = cache.append(new, new)  # the kernel writes the key and the value
    options = op.score_options(new, cached[0])
    y = attention_sublayer(
        x.array.reshape(1, -1), parameters, qkv, projection, rope, cached, options, op.softmax.off_by_one
    )
    return Tensor(y.reshape(x.array.shape), False, x.is_batched)


FUSED_SUBLAYERS.update({MLPBlock: fused_mlp, MultiHeadSelfAttention: fused_attention})
