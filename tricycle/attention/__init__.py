"""Attention: the operation, masks, RoPE, the KV cache, and token-shift layers."""

import numpy as np

from tricycle.attention.attend import Attention, Mask, additive_mask
from tricycle.attention.cache import ALLOCATORS, KeyValueCache, takes_ragged
from tricycle.attention.masks import causal_mask, length_mask
from tricycle.attention.rotary import Rotary
from tricycle.attention.scaling import RotaryScaling
from tricycle.attention.shift import KeyShift, TokenShift
from tricycle.attention.weights import scores_and_weights
from tricycle.kernels.quantized_heads import QuantizedHeads

__all__ = [
    "Attention",
    "KeyShift",
    "KeyValueCache",
    "Mask",
    "Rotary",
    "RotaryScaling",
    "TokenShift",
    "additive_mask",
    "causal_mask",
    "length_mask",
    "scores_and_weights",
    "takes_ragged",
]

ALLOCATORS[np.dtype(np.int8)] = QuantizedHeads.allocate
