"""Export of GPT models to GGUF files for llama.cpp: architectures llama and gpt2, with 32, 16 or 8 bits per weight."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.configs.model import ModelConfig
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS
from tricycle.models import GPT
from tricycle.pretrained.config_fields import size_fields
from tricycle.pretrained.export import export_tensors, match_family
from tricycle.pretrained.families.gpt2 import GPT2
from tricycle.pretrained.families.llama import LLAMA
from tricycle.pretrained.ggml_quantization import quantize_blocks
from tricycle.pretrained.gguf_config import SIZE_METADATA, llama3_divisors
from tricycle.pretrained.gguf_names import TENSOR_MAPPINGS, AttentionHeads, WeightTransform
from tricycle.pretrained.gguf_tokenizer_writer import tokenizer_metadata
from tricycle.pretrained.stored_model import error_prefix
from tricycle.system.files import atomic_write

Metadata = dict[str, Any]

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}  # values of general.file_type
_ALWAYS_F32 = ("position_embd.weight",)  # with all tensors that are not matrices, as in llama.cpp's own files
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of the written file.

    Attributes:
        name: its name in llama.cpp.
        dtype_name: the data type of its values.
        shape: slowest dimension first.
        transform: the conversion from the values of transformers.
    """

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    transform: WeightTransform


def export_gguf(model: Any, tokeniser: Any, path: str | os.PathLike[str], dtype_name: str = "F32") -> str:
    """Write a GPT and tokenizer (or None) to a GGUF file of F32, F16 or Q8_0; return "llama" or "gpt2", or ValueError.

    Args:
        model: a `GPT` whose config is that of a Llama or a GPT-2.
        tokeniser: Tricycle's with GPT-2's pre-tokenizer, or another byte-level BPE. With None the file has no
            tokenizer: llama.cpp cannot run it, but other programs can read it.
        path: of the file, which is replaced.
        dtype_name: data type of the matrices: F32, F16 or Q8_0. With Q8_0, a matrix whose rows are not a whole number
            of blocks of 32 is written as F16.

    Raises:
        ImportError: the package gguf is not installed.
        ValueError: llama.cpp does not support the model or tokenizer (the message names the cause), or a weight is not
            finite, or too large for 16 bits.
    """
    if not isinstance(model, GPT):
        raise ValueError(f"export_gguf: expected a GPT, got {type(model).__name__}")
    if dtype_name not in FILE_TYPES:
        raise ValueError(f"export_gguf: expected dtype_name to be one of {', '.join(FILE_TYPES)}, got {dtype_name!r}")
    with error_prefix("export_gguf: llama.cpp cannot run this model: "):
        family, fields, config = match_family(model.config, [LLAMA, GPT2])
        architecture = str(fields["model_type"])
        metadata = {"general.name": Path(path).stem, "general.file_type": FILE_TYPES[dtype_name]}
        metadata |= _model_metadata(architecture, fields, config)
        if tokeniser is not None:
            metadata |= tokenizer_metadata(tokeniser, config.vocab_size)
    if dtype_name == "Q8_0":
        metadata["general.quantization_version"] = 2
    shapes, arrays = export_tensors(model, family, config)
    plan = {name: _plan_tensor(architecture, name, shape, dtype_name) for name, shape in shapes.items()}
    heads = AttentionHeads(config.n_heads, config.key_heads, config.channels_per_head)
    tensors = ((plan[name], _encode(plan[name], array, heads)) for name, array in arrays)
    divisors = _rope_divisors(config) if config.rotary_scaling == "llama3" else {}
    with atomic_write(path) as file:
        write_gguf(file.name, architecture, metadata, [*plan.values(), *divisors], chain(tensors, divisors.items()))
    return architecture


# -------------------------------------------------------------------- metadata
def _model_metadata(architecture: str, fields: dict[str, Any], config: ModelConfig) -> Metadata:
    """Return the metadata of the model's architecture.

    Raises:
        ValueError: a field that llama.cpp does not read has another value than the one it assumes.
    """
    expected = {"llama": "swish", "gpt2": "gelu"}[architecture]
    activation = "swish" if config.activation == "swiglu" else config.activation
    if activation != expected:
        raise ValueError(f"{architecture} does not support activation={config.activation!r}")
    if architecture == "gpt2" and config.score_scale:
        raise ValueError(f"gpt2 does not support score_scale={config.score_scale!r}")
    metadata: Metadata = size_fields(config, **SIZE_METADATA)
    is_llama = architecture == "llama"
    metadata |= _llama_metadata(config) if is_llama else {"attention.layer_norm_epsilon": config.norm_eps}
    return {f"{architecture}.{name}": value for name, value in metadata.items()}


def _llama_metadata(config: ModelConfig) -> Metadata:
    head_size = config.channels_per_head
    metadata: Metadata = {
        "attention.head_count_kv": config.key_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": head_size,
        "rope.freq_base": config.rotary_base,
    }
    if head_size * config.n_heads != config.embedding_dim:
        metadata |= {"attention.key_length": head_size, "attention.value_length": head_size}
    if config.rotary_scaling == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rotary_factor)}
    return metadata


def _rope_divisors(config: ModelConfig) -> dict[WrittenTensor, np.ndarray]:
    """Return the tensor of divisors of RoPE frequencies, which stores Llama 3's scaling."""
    n_pairs = config.channels_per_head // 2
    frequencies = config.rotary_base ** (-np.arange(n_pairs, dtype=np.float64) / n_pairs)
    bounds = config.rotary_low_frequency, config.rotary_high_frequency
    divisors = llama3_divisors(frequencies, config.rotary_factor, config.rotary_original_window, *bounds)
    return {WrittenTensor(_ROPE_DIVISORS, "F32", (n_pairs,), WeightTransform()): divisors.astype(np.float32)}


# -------------------------------------------------------------------- tensors
def _plan_tensor(architecture: str, name: str, shape: tuple[int, ...], dtype_name: str) -> WrittenTensor:
    """Return the name, data type, shape and transform of a transformers tensor in the written file."""
    hf_layer, _, suffix = name.rpartition(".")
    layer, transform = TENSOR_MAPPINGS[architecture].gguf_layer(hf_layer)
    gguf_name = f"{layer}.{suffix}"
    if transform.transposes:
        shape = shape[::-1]
    if len(shape) == 1 or gguf_name in _ALWAYS_F32:
        dtype_name = "F32"
    elif dtype_name in BLOCK_FORMATS and shape[-1] % BLOCK_FORMATS[dtype_name].n_values:
        dtype_name = "F16"
    return WrittenTensor(gguf_name, dtype_name, shape, transform)


def _encode(tensor: WrittenTensor, array: np.ndarray, heads: AttentionHeads) -> np.ndarray:
    """Return the values to write: floats, or the bytes of quantized blocks.

    Raises:
        ValueError: a value is too large for 16 bits.
    """
    array = np.ascontiguousarray(tensor.transform.to_gguf(array, heads), "<f4")
    if tensor.dtype_name == "F32":
        return array
    if np.abs(array).max() > np.finfo(np.float16).max:
        raise ValueError(
            f"export_gguf: expected values in the range of {tensor.dtype_name}, {tensor.name} has larger ones"
        )
    return quantize_blocks(array, tensor.dtype_name) if tensor.dtype_name in BLOCK_FORMATS else array.astype("<f2")


def write_gguf(
    path: str,
    architecture: str,
    metadata: Metadata,
    plan: list[WrittenTensor],
    tensors: Iterator[tuple[WrittenTensor, np.ndarray]],
) -> None:
    """Write metadata and tensors to an existing file; only one tensor is in memory at a time."""
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
        for key, value in metadata.items():
            add[type(value)](key, value)
        for tensor in plan:
            shape, dtype = _stored_shape_and_dtype(tensor)
            n_bytes = int(np.prod(shape)) * dtype.itemsize
            writer.add_tensor_info(tensor.name, shape, dtype, n_bytes, gguf.GGMLQuantizationType[tensor.dtype_name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (tensor, array), expected in zip(tensors, plan, strict=True):
            if tensor != expected or array.shape != _stored_shape_and_dtype(tensor)[0]:
                raise ValueError(f"export_gguf: expected {expected.name}, got {tensor.name} {array.shape}")
            writer.write_tensor_data(array)
    finally:
        writer.close()


def _stored_shape_and_dtype(tensor: WrittenTensor) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype of the array that is written: uint8 (..., bytes per row) for quantized blocks."""
    if tensor.dtype_name in BLOCK_FORMATS:
        block = BLOCK_FORMATS[tensor.dtype_name]
        row_bytes = tensor.shape[-1] // block.n_values * block.n_bytes
        return (*tensor.shape[:-1], row_bytes), np.dtype(np.uint8)
    return tensor.shape, np.dtype(np.float32 if tensor.dtype_name == "F32" else np.float16)
