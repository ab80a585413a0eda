"""Attention: one op of queries, keys and values, and what goes with it: masks, positions, the cache of generation."""

from tricycle.attention.attend import Attention
from tricycle.attention.cache import Cache, KeyValueCache, RaggedCache, call_with_cache, join, takes_ragged
from tricycle.attention.masks import Mask, additive_mask, causal_mask, length_mask
from tricycle.attention.rotary import Rotary, RotaryScaling
from tricycle.attention.shift import KeyShift, TokenShift

__all__ = [
    "Attention",
    "Cache",
    "KeyShift",
    "KeyValueCache",
    "Mask",
    "RaggedCache",
    "Rotary",
    "RotaryScaling",
    "TokenShift",
    "additive_mask",
    "call_with_cache",
    "causal_mask",
    "join",
    "length_mask",
    "takes_ragged",
]
