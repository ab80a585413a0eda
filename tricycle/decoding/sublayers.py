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
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.kernels.sublayers import Linear, Norm, attention_sublayer, mlp_sublayer
from tricycle.layers import Dense, Dropout, LayerNorm, RMSNorm
from tricycle.tensor import Tensor

KERNEL_NAMES = {SwiGLU: "swiglu", GeLU: "gelu"}


def _are_plain(*layers: Any) -> bool:
    """Return whether no instance has a `forward` other than its class's, such as a hook."""
    return not any("forward" in vars(layer) for layer in layers)


def _linear(layer: Any) -> Linear | None:
    """Return the parameters of a `Dense` layer with a quantized matrix; None for other layers."""
    if type(layer) is not Dense or "forward" in vars(layer) or not isinstance(layer.weights.array, QuantizedMatrix):
        return None
    return Linear(layer.weights.array, None if layer.bias is None else layer.bias.array)


def _norm(layer: Any, x: Tensor) -> Norm | None:
    """Return the parameters of a `LayerNorm` or `RMSNorm` for x; None for other layers."""
    if type(layer) not in (RMSNorm, LayerNorm) or "forward" in vars(layer):
        return None
    bias = None if layer.bias is None else layer.bias.array
    return Norm(layer._gains(x), bias, layer.eps, layer._subtract_mean)


def fused_mlp(x: Tensor, mlp: Any, norm: Any) -> Tensor | None:
    """Return x + mlp(norm(x)) of one token x (1, 1, C) in one kernel; None unless all parts are of the basic types."""
    activation, parameters = mlp.activation, _norm(norm, x)
    up, down, name = _linear(mlp.up), _linear(mlp.projection), KERNEL_NAMES.get(type(activation))
    if not (parameters and up and down and name and _are_plain(mlp, activation, mlp.dropout)):
        return None
    if name == "gelu" and not activation.approximate:
        return None
    y = mlp_sublayer(x.array.reshape(1, -1), parameters, up, down, name)
    return Tensor(y.reshape(x.shape), False, x.is_batched)


def fused_attention(x: Tensor, layer: Any, norm: Any, cache: Any = None, mask: Any = None) -> Tensor | None:
    """Return x + layer(norm(x), cache) of one token x (1, 1, C) in one kernel; None unless all parts are basic."""
    op, rotary, parameters = layer.attention, layer.rotary, _norm(norm, x)
    qkv, projection = _linear(layer.qkv), _linear(layer.projection)
    if not (parameters and qkv and projection and type(cache) is KeyValueCache and mask is None):
        return None
    is_standard = type(op) is Attention and type(op.softmax) in (Softmax, Softmax1) and type(rotary) in KINDS_OF_ROTARY
    if not is_standard or cache.dtype not in (None, np.float32) or layer.query_norm is not None or layer.uses_shift:
        return None
    if not _are_plain(layer, op, op.softmax, layer.dropout, *([] if rotary is None else [rotary])):
        return None
    rope = None if rotary is None else rotary.angles(layer.head_size, cache.segments(1))
    new = np.empty((2, 1, 1, layer.n_key_heads, layer.head_size), np.float32)  # the kernel writes key and value
    keys, values = cache.append(*new)
    q = np.empty((1, 1, layer.n_heads, layer.head_size), np.float32)
    options = op.score_options(q, keys)
    y = attention_sublayer(
        x.array.reshape(1, -1),
        parameters,
        qkv,
        projection,
        rope,
        (keys, values),
        options,
        op.softmax.off_by_one,
    )
    return Tensor(y.reshape(x.shape), False, x.is_batched)


KINDS_OF_ROTARY = (type(None), Rotary)
FUSED_SUBLAYERS.update({MLPBlock: fused_mlp, MultiHeadSelfAttention: fused_attention})
