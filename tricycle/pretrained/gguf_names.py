"""What llama.cpp's files call a model's layers, what Hugging Face's do, and how values differ between the two.

N stands for the number of a block; `.weight` and `.bias` follow a name. Where several of Hugging Face's names belong
to one layer, its rows are theirs one after the other.
(llama.cpp's `gguf-py/gguf/tensor_mapping.py`, and `convert_hf_to_gguf.py` for the values.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tricycle.pretrained.families.bert import BERT
from tricycle.pretrained.families.family import Family
from tricycle.pretrained.families.gemma import GEMMA2, GEMMA3
from tricycle.pretrained.families.gpt2 import GPT2
from tricycle.pretrained.families.llama import LLAMA, OLMO2, QWEN2, QWEN3
from tricycle.pretrained.families.neox import NEOX
from tricycle.pretrained.families.phi import PHI


class Heads(NamedTuple):
    """Of attention: how many of queries, how many of keys and values, and the channels of one."""

    n_heads: int
    n_key_heads: int
    size: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Of the matrices that make queries, keys and values."""
        return self.n_heads * self.size, self.n_key_heads * self.size, self.n_key_heads * self.size


def _unchanged(values: np.ndarray, heads: Heads) -> np.ndarray:
    return values


@dataclass(frozen=True)
class Change:
    """What a converter did to the values of a layer: nothing, unless given.

    Attributes:
        back: values of llama.cpp's file to Hugging Face's.
        there: and the other way.
        transposes: whether matrices have their two dimensions in the other order.
        rows: how many a layer has by its heads, where values change places by these.
    """

    back: Callable[[np.ndarray, Heads], np.ndarray] = _unchanged
    there: Callable[[np.ndarray, Heads], np.ndarray] = _unchanged
    transposes: bool = False
    rows: Callable[[Heads], int] | None = None


@dataclass(frozen=True)
class Layout:
    """The layers of an architecture.

    Attributes:
        names: llama.cpp's to Hugging Face's.
        changes: by llama.cpp's names; other layers have the same values in both.
    """

    names: dict[str, tuple[str, ...]]
    changes: dict[str, Change] = field(default_factory=dict)


# -------------------------------------------------------------------- values
def _exchanged(dimensions: Callable[[Heads], tuple[int, int, int, int]]) -> Change:
    """Rows that are (a, b, c, d) in llama.cpp's file are (a, c, b, d) in Hugging Face's."""

    def back(values: np.ndarray, heads: Heads) -> np.ndarray:
        return values.reshape(*dimensions(heads), -1).swapaxes(1, 2).reshape(values.shape)

    def there(values: np.ndarray, heads: Heads) -> np.ndarray:
        a, b, c, d = dimensions(heads)
        return values.reshape(a, c, b, d, -1).swapaxes(1, 2).reshape(values.shape)

    return Change(back, there, rows=lambda heads: math.prod(dimensions(heads)))


# Rotary channels i and i + size / 2 of a head, which rotate together, are neighbours in llama.cpp's llama.
_QUERIES = _exchanged(lambda heads: (heads.n_heads, heads.size // 2, 2, 1))
_KEYS = _exchanged(lambda heads: (heads.n_key_heads, heads.size // 2, 2, 1))
# All queries, all keys, all values; Hugging Face's NeoX has those of one head after those of another.
_INTERLEAVED = _exchanged(lambda heads: (1, 3, heads.n_heads, heads.size))
_CONV1D = Change(lambda values, heads: values.T, lambda values, heads: values.T, transposes=True)
# Gemma multiplies by 1 + gain, and llama.cpp's file has the sum.
_ONE_MORE = Change(lambda values, heads: values - np.float32(1), lambda values, heads: values + np.float32(1))


# -------------------------------------------------------------------- names
# llama.cpp's names of our layers; a layer that is several of Hugging Face's has as many.
_NAMES = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "type_embedding": "token_types",
    "embedding_norm": "token_embd_norm",
    "blocks.N.attention_norm": "blk.N.attn_norm",
    "blocks.N.attention.qkv": "blk.N.attn_q blk.N.attn_k blk.N.attn_v",
    "blocks.N.attention.query_norm": "blk.N.attn_q_norm",
    "blocks.N.attention.key_norm": "blk.N.attn_k_norm",
    "blocks.N.attention.projection": "blk.N.attn_output",
    "blocks.N.attention_post_norm": "blk.N.post_attention_norm",
    "blocks.N.mlp_norm": "blk.N.ffn_norm",
    "blocks.N.mlp.up": "blk.N.ffn_up blk.N.ffn_gate",
    "blocks.N.mlp.projection": "blk.N.ffn_down",
    "blocks.N.mlp_post_norm": "blk.N.post_ffw_norm",
    "norm": "output_norm",
    "head": "output",
}
_FUSED = "blk.N.attn_qkv"  # queries, keys and values in one matrix
_OLMO2 = {"blocks.N.attention_norm": "blk.N.post_attention_norm", "blocks.N.mlp_norm": "blk.N.post_ffw_norm"}
_BERT = {"blocks.N.attention_norm": "blk.N.attn_output_norm", "blocks.N.mlp_norm": "blk.N.layer_output_norm"}


def _layout(family: Family, changes: dict[str, Change] | None = None, table: dict[str, str] = _NAMES) -> Layout:
    names: dict[str, tuple[str, ...]] = {}
    for ours, theirs in family.names.items():
        named = _FUSED if ours.endswith(".qkv") and len(theirs) == 1 else table[ours]
        names |= {name: (one,) for name, one in zip(named.split(), theirs)}
    return Layout(names, changes or {})


def _gemma(family: Family) -> Layout:
    layout = _layout(family)
    return Layout(layout.names, {name: _ONE_MORE for name in layout.names if name.endswith("_norm")})


_MATRICES_OF_GPT2 = (_FUSED, "blk.N.attn_output", "blk.N.ffn_up", "blk.N.ffn_down")
_PHI = _layout(PHI).names | {_FUSED: tuple(PHI.names["blocks.N.attention.qkv"])}  # files have either form

# By `general.architecture`. Files of Mistral and SmolLM2 say llama.
LAYOUTS: dict[str, Layout] = {
    "llama": _layout(LLAMA, {"blk.N.attn_q": _QUERIES, "blk.N.attn_k": _KEYS}),
    "qwen2": _layout(QWEN2),
    "qwen3": _layout(QWEN3),
    "olmo2": _layout(OLMO2, table=_NAMES | _OLMO2),
    "gemma2": _gemma(GEMMA2),
    "gemma3": _gemma(GEMMA3),
    "gpt2": _layout(GPT2, dict.fromkeys(_MATRICES_OF_GPT2, _CONV1D)),
    "gptneox": _layout(NEOX, {_FUSED: _INTERLEAVED}),
    "phi2": Layout(_PHI),
    "bert": _layout(BERT, table=_NAMES | _BERT),
}
