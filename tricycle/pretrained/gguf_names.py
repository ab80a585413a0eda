"""What llama.cpp's files call a model's layers, what Hugging Face's do, and how values differ between the two.

N stands for the number of a block; `.weight` and `.bias` follow a name. Where several of Hugging Face's names belong
to one layer, its rows are theirs one after the other.
(llama.cpp's `gguf-py/gguf/tensor_mapping.py`, and `convert_hf_to_gguf.py` for the values.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Heads:
    """Of attention: how many of queries, how many of keys and values, and the channels of one."""

    n_heads: int
    n_key_heads: int
    size: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Of the matrices that make queries, keys and values."""
        return self.n_heads * self.size, self.n_key_heads * self.size, self.n_key_heads * self.size


@dataclass(frozen=True)
class Change:
    """What a converter did to the values of a layer.

    Attributes:
        back: values of llama.cpp's file to Hugging Face's.
        there: and the other way.
        transposes: whether matrices have their two dimensions in the other order.
        rows: how many a layer has by its heads, where values change places by these.
    """

    back: Callable[[np.ndarray, Heads], np.ndarray]
    there: Callable[[np.ndarray, Heads], np.ndarray]
    transposes: bool = False
    rows: Callable[[Heads], int] | None = None


@dataclass(frozen=True)
class Layout:
    """The layers of an architecture.

    Attributes:
        names: llama.cpp's to Hugging Face's.
        changes: by llama.cpp's names; other layers have the same values in both.
    """

    names: Names
    changes: dict[str, Change] = field(default_factory=dict)


# -------------------------------------------------------------------- values
def _paired(n_heads: Callable[[Heads], int]) -> Change:
    """Rotary channels i and i + size / 2 of a head, which turn together, lie side by side in llama.cpp's llama."""

    def back(values: np.ndarray, heads: Heads) -> np.ndarray:
        return values.reshape(n_heads(heads), heads.size // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)

    def there(values: np.ndarray, heads: Heads) -> np.ndarray:
        return values.reshape(n_heads(heads), 2, heads.size // 2, -1).swapaxes(1, 2).reshape(values.shape)

    return Change(back, there, rows=lambda heads: n_heads(heads) * heads.size)


def _woven_back(values: np.ndarray, heads: Heads) -> np.ndarray:
    """All queries, all keys, all values to those of one head after those of another."""
    return values.reshape(3, heads.n_heads, heads.size, -1).swapaxes(0, 1).reshape(values.shape)


def _woven_there(values: np.ndarray, heads: Heads) -> np.ndarray:
    return values.reshape(heads.n_heads, 3, heads.size, -1).swapaxes(0, 1).reshape(values.shape)


def _transposed(values: np.ndarray, heads: Heads) -> np.ndarray:
    return values.T


_QUERIES = _paired(lambda heads: heads.n_heads)
_KEYS = _paired(lambda heads: heads.n_key_heads)
_WOVEN = Change(_woven_back, _woven_there, rows=lambda heads: 3 * heads.n_heads * heads.size)
_CONV1D = Change(_transposed, _transposed, transposes=True)
_ONE_MORE = Change(lambda values, heads: values - np.float32(1), lambda values, heads: values + np.float32(1))


# -------------------------------------------------------------------- names
def _names(table: str) -> Names:
    """Lines of a name of llama.cpp's and one or more of Hugging Face's."""
    lines = [line.split() for line in table.strip().splitlines()]
    return {ours: tuple(theirs) for ours, *theirs in lines}


_LLAMA = _names("""
token_embd             model.embed_tokens
blk.N.attn_norm        model.layers.N.input_layernorm
blk.N.attn_q           model.layers.N.self_attn.q_proj
blk.N.attn_k           model.layers.N.self_attn.k_proj
blk.N.attn_v           model.layers.N.self_attn.v_proj
blk.N.attn_output      model.layers.N.self_attn.o_proj
blk.N.ffn_norm         model.layers.N.post_attention_layernorm
blk.N.ffn_gate         model.layers.N.mlp.gate_proj
blk.N.ffn_up           model.layers.N.mlp.up_proj
blk.N.ffn_down         model.layers.N.mlp.down_proj
output_norm            model.norm
output                 lm_head
""")
_QK_NORMS = _names("""
blk.N.attn_q_norm      model.layers.N.self_attn.q_norm
blk.N.attn_k_norm      model.layers.N.self_attn.k_norm
""")
_OUTPUT_NORMS = _names("""
blk.N.post_attention_norm  model.layers.N.post_attention_layernorm
blk.N.post_ffw_norm        model.layers.N.post_feedforward_layernorm
""")
_NO_NORMS = {name: theirs for name, theirs in _LLAMA.items() if name not in ("blk.N.attn_norm", "blk.N.ffn_norm")}
_OLMO2 = _NO_NORMS | _QK_NORMS | _OUTPUT_NORMS
_GEMMA2 = _LLAMA | _names("""
blk.N.post_attention_norm  model.layers.N.post_attention_layernorm
blk.N.ffn_norm             model.layers.N.pre_feedforward_layernorm
blk.N.post_ffw_norm        model.layers.N.post_feedforward_layernorm
""")
_GPT2 = _names("""
token_embd             transformer.wte
position_embd          transformer.wpe
blk.N.attn_norm        transformer.h.N.ln_1
blk.N.attn_qkv         transformer.h.N.attn.c_attn
blk.N.attn_output      transformer.h.N.attn.c_proj
blk.N.ffn_norm         transformer.h.N.ln_2
blk.N.ffn_up           transformer.h.N.mlp.c_fc
blk.N.ffn_down         transformer.h.N.mlp.c_proj
output_norm            transformer.ln_f
output                 lm_head
""")
_NEOX = _names("""
token_embd             gpt_neox.embed_in
blk.N.attn_norm        gpt_neox.layers.N.input_layernorm
blk.N.attn_qkv         gpt_neox.layers.N.attention.query_key_value
blk.N.attn_output      gpt_neox.layers.N.attention.dense
blk.N.ffn_norm         gpt_neox.layers.N.post_attention_layernorm
blk.N.ffn_up           gpt_neox.layers.N.mlp.dense_h_to_4h
blk.N.ffn_down         gpt_neox.layers.N.mlp.dense_4h_to_h
output_norm            gpt_neox.final_layer_norm
output                 embed_out
""")
_PHI2 = _names("""
token_embd             model.embed_tokens
blk.N.attn_norm        model.layers.N.input_layernorm
blk.N.attn_qkv         model.layers.N.self_attn.q_proj model.layers.N.self_attn.k_proj model.layers.N.self_attn.v_proj
blk.N.attn_q           model.layers.N.self_attn.q_proj
blk.N.attn_k           model.layers.N.self_attn.k_proj
blk.N.attn_v           model.layers.N.self_attn.v_proj
blk.N.attn_output      model.layers.N.self_attn.dense
blk.N.ffn_up           model.layers.N.mlp.fc1
blk.N.ffn_down         model.layers.N.mlp.fc2
output_norm            model.final_layernorm
output                 lm_head
""")
_BERT = _names("""
token_embd             embeddings.word_embeddings
position_embd          embeddings.position_embeddings
token_types            embeddings.token_type_embeddings
token_embd_norm        embeddings.LayerNorm
blk.N.attn_q           encoder.layer.N.attention.self.query
blk.N.attn_k           encoder.layer.N.attention.self.key
blk.N.attn_v           encoder.layer.N.attention.self.value
blk.N.attn_output      encoder.layer.N.attention.output.dense
blk.N.attn_output_norm encoder.layer.N.attention.output.LayerNorm
blk.N.ffn_up           encoder.layer.N.intermediate.dense
blk.N.ffn_down         encoder.layer.N.output.dense
blk.N.layer_output_norm  encoder.layer.N.output.LayerNorm
""")


def _one_more(names: Names) -> dict[str, Change]:
    """Gemma multiplies by 1 + gain, and llama.cpp's file has the sum."""
    return {name: _ONE_MORE for name in names if name.endswith("_norm")}


_MATRICES_OF_GPT2 = ("blk.N.attn_qkv", "blk.N.attn_output", "blk.N.ffn_up", "blk.N.ffn_down")
_GEMMA3 = _GEMMA2 | _QK_NORMS

# By `general.architecture`. Files of Mistral and SmolLM2 say llama.
LAYOUTS: dict[str, Layout] = {
    "llama": Layout(_LLAMA, {"blk.N.attn_q": _QUERIES, "blk.N.attn_k": _KEYS}),
    "qwen2": Layout(_LLAMA),
    "qwen3": Layout(_LLAMA | _QK_NORMS),
    "olmo2": Layout(_OLMO2),
    "gemma2": Layout(_GEMMA2, _one_more(_GEMMA2)),
    "gemma3": Layout(_GEMMA3, _one_more(_GEMMA3)),
    "gpt2": Layout(_GPT2, dict.fromkeys(_MATRICES_OF_GPT2, _CONV1D)),
    "gptneox": Layout(_NEOX, {"blk.N.attn_qkv": _WOVEN}),
    "phi2": Layout(_PHI2),
    "bert": Layout(_BERT),
}
