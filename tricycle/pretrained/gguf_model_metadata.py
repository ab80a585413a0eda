"""Metadata of a model in a GGUF file, checked when read, and the RoPE scaling that they describe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.pretrained.gguf_file import GGUFFile, short_repr

Fields = dict[str, Any]
_REQUIRED: Any = object()
# Architectures with divisors of RoPE frequencies, and their number of dimensions: 1 for Llama 3's scaling (the tensor
# rope_freqs.weight), 2 for LongRoPE (two tensors rope_factors_*.weight).
WITH_ROPE_DIVISORS = {"llama": 1, "phi3": 2}
ROPE_DIVISORS = "rope_freqs.weight"
LONGROPE_DIVISORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_LLAMA_3_BOUNDS = (8192.0, 1.0, 4.0)  # of Llama 3.1 and 3.2: original window, lower and upper bound


class ModelMetadata:
    """Typed access to the metadata of a file's architecture; a wrong or missing value raises a ValueError.

    Args:
        file: whose metadata are read.
        architecture: the prefix of the keys.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.path: Path = file.path
        self.architecture = architecture
        self._metadata = file.metadata
        self._shapes = {name: info.shape for name, info in file.tensors.items()}

    def error(self, why: str) -> ValueError:
        """Return (not raise) a ValueError whose message is the path of the file, a colon, and `why`."""
        return ValueError(f"{self.path}: {why}")

    def _get(self, key: str, default: Any) -> tuple[str, Any]:
        """Return the key with its prefix, and the value or `default`; ValueError if required and missing."""
        full_key = f"{self.architecture}.{key}"
        value = self._metadata.get(full_key, default)
        if value is _REQUIRED:
            raise self.error(f"expected a key {full_key}, which is missing")
        return full_key, value

    def positive_int(self, key: str, default: Any = _REQUIRED, skip_zeros: bool = False) -> int:
        """Return the integer above 0 of a key without its prefix, or `default` if it is missing; else ValueError.

        A list with one value for all layers counts as that value, with `skip_zeros` also if it is 0 in some layers. The
        largest integer is 2**31 - 1.
        """
        full_key, value = self._get(key, default)
        if isinstance(value, list) and skip_zeros:
            value = [count for count in value if count != 0]
        if isinstance(value, list) and value and value == [value[0]] * len(value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.error(
                f"expected {full_key} to be a whole number above 0, the same in all layers, got {short_repr(value)}"
            )
        return value

    def optional_int(self, key: str) -> int | None:
        """Return the integer above 0 of a key, or None if the key is missing or 0; ValueError for other values."""
        return self.positive_int(key) if self.get(key) else None

    def positive_float(self, key: str, default: Any = _REQUIRED) -> float:
        """Return a number above 0, the shortest decimal of a stored float32; `default` if missing; else ValueError."""
        full_key, value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"expected {full_key} to be a number above 0, got {short_repr(value)}")
        return float(str(np.float32(value)))

    def get(self, key: str) -> Any:
        """Return the value of a key without its architecture prefix, unchecked; None if it is missing."""
        return self._get(key, None)[1]

    def boolean(self, key: str, default: bool) -> bool:
        """Return a Boolean, or `default` if the key is missing; raise ValueError for another type."""
        full_key, value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"expected {full_key} to be true or false, got {short_repr(value)}")
        return value

    def shape(self, layer: str, n_dimensions: int = 2) -> tuple[int, ...]:
        """Return the shape of LAYER.weight, (rows, columns) of a matrix; ValueError for other dimensions or none."""
        shape = self._shapes.get(f"{layer}.weight", ())
        if len(shape) != n_dimensions:
            expected = "a matrix" if n_dimensions == 2 else f"{n_dimensions} dimensions of"
            raise self.error(f"expected {expected} {layer}.weight, got {shape or 'none'}")
        return shape

    def n_experts(self) -> int:
        """Return the number of experts of a mixture, or 0 if the key expert_count is missing or 0."""
        return self.optional_int("expert_count") or 0

    def n_layers(self) -> int:
        """Return the number of layers; the last blocks of some files, which predict further tokens, do not count."""
        key, n_blocks = "nextn_predict_layers", self.positive_int("block_count")
        n_further = self.optional_int(key) or 0
        if n_further >= n_blocks:
            raise self.error(f"expected {self.architecture}.{key} to be below block_count, {n_blocks}, got {n_further}")
        return n_blocks - n_further

    def n_dense_layers(self) -> int:
        """Return the number of first layers of a mixture without experts; 0 if the key is missing."""
        return self.optional_int("leading_dense_block_count") or 0

    def expert_width_key(self) -> str:
        """Return the key of an expert's hidden width: expert_feed_forward_length if set, else feed_forward_length."""
        key = "expert_feed_forward_length"
        return "feed_forward_length" if self.get(key) is None else key

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor of this full name, such as "output.weight"."""
        return name in self._shapes

    # ---------------------------------------------------------------- values of several architectures
    def n_key_heads(self) -> int:
        """Return the number of key and value heads of layers with attention; by default that of the query heads."""
        return self.positive_int("attention.head_count_kv", self.positive_int("attention.head_count"), skip_zeros=True)

    def attention_layers(self) -> tuple[int, ...]:
        """Return the layers that have attention: all, unless head_count_kv is a list with 0 for the others."""
        value, n_layers = self.get("attention.head_count_kv"), self.positive_int("block_count")
        counts = value if isinstance(value, list) else [value] * n_layers
        if len(counts) != n_layers:
            raise self.error(f"expected attention.head_count_kv to have {n_layers} values, got {len(counts)}")
        return tuple(layer for layer, count in enumerate(counts) if count != 0)

    def head_size(self) -> int:
        """Return the channels of a head: key_length, else width // heads; ValueError if value_length differs.

        In latent attention, they are those of the latent and of the rotated key, and may differ.
        """
        n_heads = self.positive_int("attention.head_count")
        size = self.positive_int("attention.key_length", max(1, self.positive_int("embedding_length") // n_heads))
        value_size = self.positive_int("attention.value_length", size)
        if value_size != size and self.get("attention.kv_lora_rank") is None:
            raise self.error(
                f"expected {self.architecture}.attention.value_length to be key_length, {size}, got {value_size}"
            )
        return size

    def rotary_size(self) -> int:
        """Return the number of channels of a head to which RoPE is applied; by default all."""
        return self.positive_int("rope.dimension_count", self.head_size())

    def vocabulary_fields(self) -> Fields:
        """Return fields vocab_size (ValueError without token_embd.weight), tie_word_embeddings (no output.weight)."""
        return {"vocab_size": self.shape("token_embd")[0], "tie_word_embeddings": not self.has_tensor("output.weight")}

    def special_tokens(self) -> Fields:
        """Return the bos_token_id, eos_token_id and pad_token_id that the file has, if within the vocabulary."""
        ids = {}
        for name in ("bos", "eos", "padding"):
            value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(value, int) and 0 <= value < self.shape("token_embd")[0]:
                ids[f"{name.replace('padding', 'pad')}_token_id"] = value
        return ids


# -------------------------------------------------------------------- RoPE scaling
def rope_scaling(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return {"rope_scaling": ...} from metadata and divisors, or {} without scaling; ValueError if unsupported."""
    kind = metadata.get("rope.scaling.type")
    factor = metadata.positive_float("rope.scaling.factor", metadata.positive_float("rope.scale_linear", 1.0))
    n_dimensions = WITH_ROPE_DIVISORS.get(metadata.architecture)
    if divisors is not None and divisors.ndim == n_dimensions == 2 and kind in (None, "longrope"):
        return _longrope(metadata, divisors)
    if kind not in (None, "none", "linear", "yarn"):
        expected = f"expected {metadata.architecture}.rope.scaling.type none, linear or yarn"
        raise metadata.error(f"{expected}, got {short_repr(kind)}")
    for tensor in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if metadata.has_tensor(tensor):
            raise metadata.error(f"has {tensor}, of the scaling longrope, which is not supported")
    is_scaled = kind == "yarn" or (kind != "none" and factor != 1)
    if divisors is None:
        scaling = {"rope_type": "linear", "factor": factor} if kind != "yarn" else _yarn(metadata, factor)
        return {"rope_scaling": scaling} if is_scaled else {}
    if divisors.ndim != n_dimensions:
        raise metadata.error(f"has rope_freqs.weight, which is unknown in the architecture {metadata.architecture}")
    if is_scaled:
        raise metadata.error("has two RoPE scalings: the tensor rope_freqs.weight and a factor")
    return llama3_scaling(metadata, divisors)


def _yarn(metadata: ModelMetadata, factor: float) -> Fields:
    """Return rope_scaling for YaRN with llama.cpp's defaults and rounded bounds; ValueError for unsupported keys."""
    is_latent = metadata.get("attention.kv_lora_rank") is not None
    for key in ("yarn_ext_factor", "yarn_attn_factor", *(() if is_latent else ("yarn_log_multiplier",))):
        if metadata.get(f"rope.scaling.{key}") is not None:
            raise metadata.error(f"expected no key {metadata.architecture}.rope.scaling.{key}, which is not supported")
    attention_factor = metadata.positive_float("rope.scaling.attn_factor", 1.0)
    window = metadata.positive_int("rope.scaling.original_context_length", metadata.positive_int("context_length"))
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": metadata.positive_float("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.positive_float("rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": attention_factor * yarn_attention_factor(factor),
        "original_max_position_embeddings": window,
        "truncate": True,
    }
    return scaling | (_factor_of_scores(metadata, attention_factor) if is_latent else {})


def _factor_of_scores(metadata: ModelMetadata, attention_factor: float) -> Fields:
    """Return the fields of YaRN in latent attention, where all scores have a factor, and rotated channels have none.

    Without yarn_log_multiplier, llama.cpp multiplies both by factors that transformers does not have.
    """
    if attention_factor != 1:
        raise metadata.error(f"expected rope.scaling.attn_factor to be missing or 1, got {attention_factor}")
    mscale = float(str(np.float32(10 * metadata.positive_float("rope.scaling.yarn_log_multiplier"))))
    return {"attention_factor": 1.0, "mscale": mscale, "mscale_all_dim": mscale}


def _longrope(metadata: ModelMetadata, divisors: Any) -> Fields:
    """Return the fields of LongRoPE with divisors (2, pairs) for short and long texts; ValueError unless above 0."""
    if not (np.isfinite(divisors).all() and divisors.min() > 0):
        raise metadata.error("expected numbers above 0 in rope_factors_short.weight and rope_factors_long.weight")
    window = metadata.positive_int("rope.scaling.original_context_length", metadata.positive_int("context_length"))
    short, long = ([float(str(value)) for value in half] for half in divisors.astype(np.float32))
    attention_factor = metadata.positive_float("rope.scaling.attn_factor", 1.0)
    scaling = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
    }
    return {"rope_scaling": scaling, "original_max_position_embeddings": window}


def yarn_attention_factor(factor: float) -> float:
    """Return llama.cpp's own factor of queries and keys for YaRN, 1 + 0.1 log(factor), besides attn_factor."""
    return 1 + 0.1 * math.log(max(1.0, factor))


def llama3_scaling(metadata: ModelMetadata, divisors: np.ndarray) -> Fields:
    """Return {"rope_scaling": linear or llama3} or {} for RoPE divisors (head_size / 2,); ValueError if neither fits.

    A file stores only the divisors. Llama 3's are 1 for high frequencies and the factor for low ones; in between,
    1 / divisor is linear in the frequency. Only the ratios of the original window and the two bounds matter, so the
    lower bound is set to 1, as in Llama.

    Raises:
        ValueError: Llama 3's scaling cannot have these divisors.
    """
    base = metadata.positive_float("rope.freq_base", 10_000.0)
    frequencies = base ** (-np.arange(len(divisors), dtype=np.float64) / len(divisors))
    divisors = divisors.astype(np.float64)
    factor = float(divisors.max())
    if divisors.min() == factor > 0:
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}
    is_valid = np.isfinite(divisors).all() and divisors.min() >= 1
    for window, low, high in [_LLAMA_3_BOUNDS, *_fit_bounds(divisors, frequencies, factor)] if is_valid else []:
        expected = llama3_divisors(frequencies, factor, window, low, high)
        if np.allclose(expected, divisors, rtol=1e-5, atol=0):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return {"rope_scaling": {**scaling, "original_max_position_embeddings": int(window)}}
    raise metadata.error("expected rope_freqs.weight to be a scaling of the type llama3, got other divisors")


def llama3_divisors(frequencies: np.ndarray, factor: float, window: float, low: float, high: float) -> np.ndarray:
    """Return Llama 3's divisors of RoPE frequencies: 1 for pairs that rotate >= `high` times, `factor` for <= `low`.

    Rotations within the window count; in between, 1 / divisor is interpolated linearly.
    """
    n_rotations = window * frequencies / (2 * np.pi)
    weight = np.clip((n_rotations - low) / (high - low), 0, 1)
    return 1 / ((1 - weight) / factor + weight)


def _fit_bounds(divisors: np.ndarray, frequencies: np.ndarray, factor: float) -> list[tuple[float, float, float]]:
    """Return candidates (window, low, high) of Llama 3's scaling, by a line through interpolated pairs; [] if none."""
    is_between = (divisors > 1) & (divisors < factor * (1 - 1e-6))
    if is_between.sum() < 2:
        return _fit_bounds_of_one_pair(divisors, frequencies, factor)
    weight = (1 / divisors[is_between] - 1 / factor) / (1 - 1 / factor)
    rotations_per_token = frequencies[is_between] / (2 * np.pi)
    # weight = (window * rotations_per_token - low) / (high - low)
    slope, intercept = np.polyfit(rotations_per_token, weight, 1).tolist()
    if not (slope > 0 > intercept):
        return []
    window, high = slope / -intercept, 1 + 1 / -intercept  # for a lower bound of 1
    low = _LLAMA_3_BOUNDS[0] / window
    # The rounded values are tried before the exact ones.
    return [(max(1.0, round(window)), 1.0, round(high, 3)), (_LLAMA_3_BOUNDS[0], low, low * high)]


def _fit_bounds_of_one_pair(
    divisors: np.ndarray, frequencies: np.ndarray, factor: float
) -> list[tuple[float, float, float]]:
    """Return [(window, low, high)], one of many solutions, if at most one pair is interpolated.

    The lower bound is between the fastest pair with the full factor and the interpolated pair, and the upper bound
    between the interpolated pair and the slowest pair with the divisor 1.
    """
    window = _LLAMA_3_BOUNDS[0]
    n_rotations = window * frequencies / (2 * np.pi)
    slow, fast = n_rotations[divisors >= factor * (1 - 1e-6)].max(), n_rotations[divisors <= 1]
    highest = fast.min() if fast.size else np.inf
    between = np.flatnonzero((divisors > 1) & (divisors < factor * (1 - 1e-6)))
    if not between.size:
        return [(window, float(slow), float(highest))]
    middle = n_rotations[between[0]]
    weight = (1 / divisors[between[0]] - 1 / factor) / (1 - 1 / factor)
    low = max(slow, (middle - weight * highest) / (1 - weight)) if fast.size else slow
    return [(window, float(low), float(low + (middle - low) / weight))]
