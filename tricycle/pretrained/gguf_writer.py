"""Models as files of llama.cpp: those of the llama and gpt2 kinds, in 32, 16 or 8 bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.configs.model import ModelConfig
from tricycle.models import GPT
from tricycle.pretrained.export import best_of, weights_of
from tricycle.pretrained.families.gpt2 import GPT2
from tricycle.pretrained.families.llama import LLAMA
from tricycle.pretrained.fields import size_fields
from tricycle.pretrained.ggml_tokens import tokeniser_keys
from tricycle.pretrained.gguf_fields import SIZE_KEYS, llama3_divisors
from tricycle.pretrained.gguf_names import LAYOUTS, Change, Heads
from tricycle.pretrained.quantised import BLOCKS, quantise
from tricycle.pretrained.source import error_prefix
from tricycle.system.files import atomic_write

Keys = dict[str, Any]

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}  # general.file_type
_ALWAYS_F32 = ("position_embd.weight",)  # and all that is no matrix, as in llama.cpp's own files
_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Written:
    """A tensor as it will lie in the file.

    Attributes:
        name: llama.cpp's.
        kind: of its values.
        shape: slowest dimension first.
        change: what is done to Hugging Face's values.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    change: Change


def export_gguf(model: Any, tokeniser: Any, path: str | os.PathLike[str], kind: str = "F32") -> str:
    """Write a model with its tokeniser as one file that llama.cpp runs. It is there whole or not at all.

    Args:
        model: a `GPT` that is a Llama or a GPT-2 by its config.
        tokeniser: our own with GPT-2's pattern, or another byte-level BPE; None leaves it out, and llama.cpp will not
            run the file, but others read it.
        path: of the file, which is replaced.
        kind: of matrices: F32, F16 or Q8_0. Rows that are no whole number of blocks of 32 are F16 where Q8_0 is asked
            for.

    Returns:
        the architecture that the file says, llama or gpt2.

    Raises:
        ImportError: the package gguf is not installed.
        ValueError: llama.cpp knows no such model or tokeniser: names what is in the way; or a weight is not finite, or
            too large for 16 bits.
    """
    if not isinstance(model, GPT):
        raise ValueError(f"export_gguf: expected a GPT, got {type(model).__name__}")
    if kind not in FILE_TYPES:
        raise ValueError(f"export_gguf: expected kind to be one of {', '.join(FILE_TYPES)}, got {kind!r}")
    with error_prefix("export_gguf: llama.cpp cannot run this model: "):
        family, fields, config = best_of(model.config, [LLAMA, GPT2])
        architecture = str(fields["model_type"])
        keys = {"general.name": Path(path).stem, "general.file_type": FILE_TYPES[kind]}
        keys |= _model_keys(architecture, fields, config)
        if tokeniser is not None:
            keys |= tokeniser_keys(tokeniser, config.vocab_size)
    if kind == "Q8_0":
        keys["general.quantization_version"] = 2
    shapes, arrays = weights_of(model, family, config)
    plan = {name: _planned(architecture, name, shape, kind) for name, shape in shapes.items()}
    heads = Heads(config.n_heads, config.key_heads, config.channels_per_head)
    tensors = ((plan[name], _encoded(plan[name], array, heads)) for name, array in arrays)
    extra = _divisors(config) if config.rotary_scaling == "llama3" else {}
    with atomic_write(path) as file:
        _write(file.name, architecture, keys, [*plan.values(), *extra], chain(tensors, extra.items()))
    return architecture


# -------------------------------------------------------------------- keys
def _model_keys(architecture: str, fields: Keys, config: ModelConfig) -> Keys:
    """What the file says about the model.

    Raises:
        ValueError: something that llama.cpp takes for granted is otherwise here.
    """
    expected = {"llama": "swish", "gpt2": "gelu"}[architecture]
    activation = "swish" if config.activation == "swiglu" else config.activation
    if activation != expected:
        raise ValueError(f"in the way of {architecture}: activation={config.activation!r}")
    if architecture == "gpt2" and config.score_scale:
        raise ValueError(f"in the way of gpt2: score_scale={config.score_scale!r}")
    keys: Keys = size_fields(config, **SIZE_KEYS)
    keys |= _llama_keys(config) if architecture == "llama" else {"attention.layer_norm_epsilon": config.norm_eps}
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def _llama_keys(config: ModelConfig) -> Keys:
    size = config.channels_per_head
    keys: Keys = {
        "attention.head_count_kv": config.key_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": size,
        "rope.freq_base": config.rotary_base,
    }
    if size * config.n_heads != config.embedding_dim:
        keys |= {"attention.key_length": size, "attention.value_length": size}
    if config.rotary_scaling == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rotary_factor)}
    return keys


def _divisors(config: ModelConfig) -> dict[Written, np.ndarray]:
    """Llama 3's scaling, which the file has as a tensor."""
    n_pairs = config.channels_per_head // 2
    frequencies = config.rotary_base ** (-np.arange(n_pairs, dtype=np.float64) / n_pairs)
    bounds = config.rotary_low_frequency, config.rotary_high_frequency
    divisors = llama3_divisors(frequencies, config.rotary_factor, config.rotary_original_window, *bounds)
    return {Written(_DIVISORS, "F32", (n_pairs,), Change()): divisors.astype(np.float32)}


# -------------------------------------------------------------------- tensors
def _planned(architecture: str, name: str, shape: tuple[int, ...], kind: str) -> Written:
    """Where a tensor of Hugging Face's goes."""
    layout = LAYOUTS[architecture]
    back = {theirs: ours for ours, (theirs, *_) in layout.names.items()}
    layer, _, suffix = name.rpartition(".")
    number = next((part for part in layer.split(".") if part.isdigit()), "")
    general = back[layer.replace(f".{number}.", ".N.") if number else layer]
    full = f"{general.replace('.N.', f'.{number}.')}.{suffix}"
    change = layout.changes.get(general, Change())
    if change.transposes:
        shape = shape[::-1]
    if len(shape) == 1 or full in _ALWAYS_F32:
        kind = "F32"
    elif kind in BLOCKS and shape[-1] % BLOCKS[kind].n_values:
        kind = "F16"
    return Written(full, kind, shape, change)


def _encoded(tensor: Written, array: np.ndarray, heads: Heads) -> np.ndarray:
    """Values as they lie in the file: floats, or bytes of blocks.

    Raises:
        ValueError: one is too large for 16 bits.
    """
    array = np.ascontiguousarray(tensor.change.there(array, heads), "<f4")
    if tensor.kind == "F32":
        return array
    if np.abs(array).max() > np.finfo(np.float16).max:
        raise ValueError(f"export_gguf: expected values that {tensor.kind} can hold, {tensor.name} has larger ones")
    return quantise(array, tensor.kind) if tensor.kind in BLOCKS else array.astype("<f2")


def _write(
    path: str, architecture: str, keys: Keys, plan: list[Written], tensors: Iterator[tuple[Written, np.ndarray]]
) -> None:
    """Into a file that is there already: one tensor after another, so that no two are in memory at once."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    try:
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in keys.items():
            add[type(value)](key, value)
        for tensor in plan:
            shape, dtype = _in_bytes(tensor)
            n_bytes = int(np.prod(shape)) * dtype.itemsize
            writer.add_tensor_info(tensor.name, shape, dtype, n_bytes, gguf.GGMLQuantizationType[tensor.kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (tensor, array), expected in zip(tensors, plan, strict=True):
            if tensor != expected or array.shape != _in_bytes(tensor)[0]:
                raise ValueError(f"export_gguf: expected {expected.name}, got {tensor.name} {array.shape}")
            writer.write_tensor_data(array)
    finally:
        writer.close()


def _in_bytes(tensor: Written) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of what is written."""
    if tensor.kind in BLOCKS:
        blocks = BLOCKS[tensor.kind]
        row = tensor.shape[-1] // blocks.n_values * blocks.n_bytes
        return (*tensor.shape[:-1], row), np.dtype(np.uint8)
    return tensor.shape, np.dtype(np.float32 if tensor.kind == "F32" else np.float16)
