"""Keys of llama.cpp's files as the fields of a config.json.

What a file does not say llama.cpp knows by heart: that is said here beside the field.
(Keys: llama.cpp's `gguf-py/gguf/constants.py`; what it knows: `src/llama-model.cpp`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.pretrained.fields import SIZES
from tricycle.pretrained.gguf_file import GGUFFile, shown

Fields = dict[str, Any]
_REQUIRED: Any = object()
# Our fields of sizes by their keys.
SIZE_KEYS = {
    "context_window": "context_length",
    "embedding_dim": "embedding_length",
    "hidden_size": "feed_forward_length",
    "n_layers": "block_count",
    "n_heads": "attention.head_count",
}
_USUAL = (8192.0, 1.0, 4.0)  # of Llama 3.1 and 3.2: original window, lower and upper bound


class Keys:
    """The keys of a file's architecture, checked as they are read.

    Args:
        file: whose metadata these are.
        architecture: what its keys begin with.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.path: Path = file.path
        self.architecture = architecture
        self._metadata = file.metadata
        self._shapes = {name: entry.shape for name, entry in file.tensors.items()}

    def error(self, why: str) -> ValueError:
        """Of one line, that names the file."""
        return ValueError(f"{self.path}: {why}")

    def _get(self, key: str, default: Any) -> tuple[str, Any]:
        full = f"{self.architecture}.{key}"
        value = self._metadata.get(full, default)
        if value is _REQUIRED:
            raise self.error(f"expected a key {full}, which is not there")
        return full, value

    def whole(self, key: str, default: Any = _REQUIRED) -> int:
        """A number from 1 to 2**31 - 1; of a list, one for each layer, all must be equal."""
        full, value = self._get(key, default)
        if isinstance(value, list) and value and value == [value[0]] * len(value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.error(
                f"expected {full} to be a whole number above 0, the same in all layers, got {shown(value)}"
            )
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0: of those that 32 bits hold as this, the one with the fewest digits."""
        full, value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"expected {full} to be a number above 0, got {shown(value)}")
        return float(str(np.float32(value)))

    def maybe(self, key: str) -> Any:
        """A value that may be missing: None then."""
        return self._get(key, None)[1]

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        full, value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"expected {full} to be true or false, got {shown(value)}")
        return value

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor that must be there, a matrix."""
        shape = self._shapes.get(f"{tensor}.weight", ())
        if len(shape) != 2:
            raise self.error(f"expected a matrix {tensor}.weight, got {shape or 'none'}")
        return shape

    def has(self, tensor: str) -> bool:
        """Whether there is such a tensor."""
        return tensor in self._shapes

    # ---------------------------------------------------------------- what several architectures share
    def head_size(self) -> int:
        """Channels of a head: those of a key and a value must be as many."""
        n_heads = self.whole("attention.head_count")
        size = self.whole("attention.key_length", max(1, self.whole("embedding_length") // n_heads))
        values = self.whole("attention.value_length", size)
        if values != size:
            raise self.error(
                f"expected {self.architecture}.attention.value_length to be key_length, {size}, got {values}"
            )
        return size

    def rotated(self) -> int:
        """How many channels of a head turn."""
        return self.whole("rope.dimension_count", self.head_size())

    def ends(self) -> Fields:
        """Fields about the embedding and the output layer."""
        return {"vocab_size": self.shape("token_embd")[0], "tie_word_embeddings": not self.has("output.weight")}

    def special_tokens(self) -> Fields:
        """Ids of tokens that begin, end and fill up texts."""
        ids = {}
        for name in ("bos", "eos", "padding"):
            value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(value, int) and 0 <= value < self.shape("token_embd")[0]:
                ids[f"{name.replace('padding', 'pad')}_token_id"] = value
        return ids


# -------------------------------------------------------------------- angles of positions
def _scaling(keys: Keys, divisors: np.ndarray | None) -> Fields:
    """The field rope_scaling, where there is any."""
    kind = keys.maybe("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind not in (None, "none", "linear"):
        raise keys.error(f"expected {keys.architecture}.rope.scaling.type none or linear, got {shown(kind)}")
    for tensor in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if keys.has(tensor):
            raise keys.error(f"has {tensor}, of the scaling longrope, which is not known here")
    linear = kind != "none" and factor != 1
    if divisors is None:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if linear else {}
    if linear:
        raise keys.error("scales its rotary angles twice, by rope_freqs.weight and by a factor")
    return llama3_scaling(keys, divisors)


def llama3_scaling(keys: Keys, divisors: np.ndarray) -> Fields:
    """The field rope_scaling whose frequencies are the usual ones over these divisors.

    A file has no more than the divisors (size / 2,). Llama 3's are 1 for fast pairs, the factor for slow ones, and of
    those between 1 / divisor is a straight line in the frequency. Only the ratios of its original window and its two
    bounds count, so that the lower bound can be taken as 1, which it is in Llama.

    Raises:
        ValueError: divisors that no such scaling has.
    """
    base = keys.number("rope.freq_base", 10_000.0)
    frequencies = base ** (-np.arange(len(divisors), dtype=np.float64) / len(divisors))
    divisors = divisors.astype(np.float64)
    factor = float(divisors.max())
    if divisors.min() == factor > 0:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}
    sound = np.isfinite(divisors).all() and divisors.min() >= 1
    for window, low, high in [_USUAL, *_fitted(divisors, frequencies, factor)] if sound else []:
        expected = llama3_divisors(frequencies, factor, window, low, high)
        if np.allclose(expected, divisors, rtol=1e-5, atol=0):
            return {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": int(window),
                }
            }
    raise keys.error("expected rope_freqs.weight to be a scaling of llama3's kind, got other divisors")


def llama3_divisors(frequencies: np.ndarray, factor: float, window: float, low: float, high: float) -> np.ndarray:
    """What Llama 3's scaling divides each frequency by: 1 above `high` turns in the window, the factor below `low`."""
    turns = window * frequencies / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)


def _fitted(divisors: np.ndarray, frequencies: np.ndarray, factor: float) -> list[tuple[float, float, float]]:
    """Return candidates for the original window and the two bounds, from the straight line between these."""
    between = (divisors > 1) & (divisors < factor * (1 - 1e-6))
    if between.sum() < 2:
        return _bracketed(divisors, frequencies, factor)
    share = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    turns = frequencies[between] / (2 * np.pi)
    slope, start = np.polyfit(turns, share, 1).tolist()  # share = (window turns - low) / (high - low)
    if not (slope > 0 > start):
        return []
    window, high = slope / -start, 1 + 1 / -start  # for a lower bound of 1
    low = _USUAL[0] / window
    # first in round numbers, then in any
    return [(max(1.0, round(window)), 1.0, round(high, 3)), (_USUAL[0], low, low * high)]


def _bracketed(divisors: np.ndarray, frequencies: np.ndarray, factor: float) -> list[tuple[float, float, float]]:
    """The same where at most one pair lies between the bounds, as in small heads: one of many lines that fit.

    The lower bound lies between the fastest pair that is slowed down fully and the pair between, the upper one between
    that and the slowest pair that is left alone.
    """
    window = _USUAL[0]
    turns = window * frequencies / (2 * np.pi)
    slow, fast = turns[divisors >= factor * (1 - 1e-6)].max(), turns[divisors <= 1]
    highest = fast.min() if fast.size else np.inf
    inside = np.flatnonzero((divisors > 1) & (divisors < factor * (1 - 1e-6)))
    if not inside.size:
        return [(window, float(slow), float(highest))]
    turn = turns[inside[0]]
    share = (1 / divisors[inside[0]] - 1 / factor) / (1 - 1 / factor)
    low = max(slow, (turn - share * highest) / (1 - share)) if fast.size else slow
    return [(window, float(low), float(low + (turn - low) / share))]


# -------------------------------------------------------------------- architectures
def _sizes(keys: Keys, norm: str) -> Fields:
    """What all but GPT-2 share. The norm is "rms" or "layer"."""
    name = {"rms": "layer_norm_rms_epsilon", "layer": "layer_norm_epsilon"}[norm]
    return {
        **{SIZES[ours]: keys.whole(key) for ours, key in SIZE_KEYS.items()},
        f"{norm}_norm_eps": keys.number(f"attention.{name}"),
    }


def _like_llama(keys: Keys, divisors: np.ndarray | None, model_type: str) -> Fields:
    """What llama, qwen, olmo2 and gemma have in common."""
    if keys.maybe("expert_count"):
        raise keys.error(f"is a mixture of {shown(keys.maybe('expert_count'))} experts, which is not known here")
    size = keys.head_size()
    if keys.rotated() != size:
        raise keys.error(f"expected all {size} channels of a head to turn, got {keys.rotated()}")
    return {
        "model_type": model_type,
        **_sizes(keys, "rms"),
        "num_key_value_heads": keys.whole("attention.head_count_kv", keys.whole("attention.head_count")),
        "head_dim": size,
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        **_scaling(keys, divisors),
        **keys.ends(),
    }


def _llama(keys: Keys, divisors: np.ndarray | None) -> Fields:
    fields = _like_llama(keys, divisors, "llama") | {"hidden_act": "silu", "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    fields["attention_bias"] = keys.has("blk.0.attn_q.bias")
    if fields["attention_bias"] and not keys.has("blk.0.attn_output.bias"):  # Hugging Face's Llama has it too, or none
        return fields | {"model_type": "qwen2", "use_sliding_window": False}
    if keys.maybe("attention.sliding_window"):
        fields |= {"model_type": "mistral", "sliding_window": keys.whole("attention.sliding_window")}
    return fields


def _qwen2(keys: Keys, divisors: np.ndarray | None) -> Fields:
    return _like_llama(keys, divisors, "qwen2") | {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(keys: Keys, divisors: np.ndarray | None) -> Fields:
    return _qwen2(keys, divisors) | {"model_type": "qwen3", "attention_bias": keys.has("blk.0.attn_q.bias")}


def _olmo2(keys: Keys, divisors: np.ndarray | None) -> Fields:
    bias = keys.has("blk.0.attn_q.bias")
    return _like_llama(keys, divisors, "olmo2") | {"hidden_act": "silu", "attention_bias": bias}


def _like_gemma(keys: Keys, divisors: np.ndarray | None, model_type: str, layers_of_27b: int) -> Fields:
    """What Gemma 2 and 3 share. Only the largest divides scores by width / heads, known by its number of layers."""
    fields = _like_llama(keys, divisors, model_type)
    largest = fields["num_hidden_layers"] == layers_of_27b
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if largest else fields["head_dim"]
    return fields | {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys, divisors: np.ndarray | None) -> Fields:
    return _like_gemma(keys, divisors, "gemma2", layers_of_27b=46) | {
        "sliding_window": keys.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys, divisors: np.ndarray | None) -> Fields:
    """Every sixth layer sees all tokens; the others rotate by another base."""
    cap = "final_logit_softcapping"
    return _like_gemma(keys, divisors, "gemma3_text", layers_of_27b=62) | {
        "sliding_window": keys.whole("attention.sliding_window"),
        "sliding_window_pattern": keys.whole("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "attn_logit_softcapping": None,
        cap: keys.number(cap) if keys.maybe(cap) else None,
    }


def _gpt2(keys: Keys, divisors: np.ndarray | None) -> Fields:
    return {
        "model_type": "gpt2",
        "n_embd": keys.whole("embedding_length"),
        "n_layer": keys.whole("block_count"),
        "n_head": keys.whole("attention.head_count"),
        "n_positions": keys.shape("position_embd")[0],
        "n_inner": keys.whole("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **keys.ends(),
    }


def _rotated_fraction(keys: Keys) -> float:
    """The fraction of a head's channels that rotate: times the size and cut off, it gives their number."""
    size, rotated = keys.head_size(), keys.rotated()
    part = rotated / size
    return part if int(size * part) == rotated else math.nextafter(part, 1)


def _neox(keys: Keys, divisors: np.ndarray | None) -> Fields:
    return _sizes(keys, "layer") | {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "rotary_pct": _rotated_fraction(keys),
        "rotary_emb_base": keys.number("rope.freq_base", 10_000.0),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        **_scaling(keys, divisors),
        **keys.ends(),
    }


def _phi2(keys: Keys, divisors: np.ndarray | None) -> Fields:
    return _sizes(keys, "layer") | {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "num_key_value_heads": keys.whole("attention.head_count_kv", keys.whole("attention.head_count")),
        "partial_rotary_factor": _rotated_fraction(keys),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        **_scaling(keys, divisors),
        **keys.ends(),
    }


def _bert(keys: Keys, divisors: np.ndarray | None) -> Fields:
    sizes = {"vocab_size": "token_embd", "type_vocab_size": "token_types", "max_position_embeddings": "position_embd"}
    shapes = {name: keys.shape(tensor)[0] for name, tensor in sizes.items()}
    return _sizes(keys, "layer") | {"model_type": "bert", "hidden_act": "gelu", **shapes}


# By `general.architecture`: keys, and the values of rope_freqs.weight where a file has it.
FIELDS: dict[str, Callable[[Keys, np.ndarray | None], Fields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gptneox": _neox,
    "phi2": _phi2,
    "bert": _bert,
}
