"""Export of GPT models to GGUF files for llama.cpp: architectures llama and gpt2, with 32 to 4 bits per weight."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.configs.model import ModelConfig
from tricycle.kernels.quantized import quantized_dtype
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS
from tricycle.models import GPT
from tricycle.pretrained.config_fields import size_fields
from tricycle.pretrained.export import export_tensors, match_family
from tricycle.pretrained.families.family import TensorMapping
from tricycle.pretrained.families.gpt2 import GPT2
from tricycle.pretrained.families.llama import LLAMA
from tricycle.pretrained.ggml_quantization import quantize_blocks
from tricycle.pretrained.gguf_config import SIZE_METADATA, llama3_divisors
from tricycle.pretrained.gguf_file_types import FILE_TYPES, Mixture
from tricycle.pretrained.gguf_names import TENSOR_MAPPINGS, AttentionHeads, WeightTransform
from tricycle.pretrained.gguf_tokenizer_writer import tokenizer_metadata
from tricycle.pretrained.stored_model import error_prefix
from tricycle.system.files import atomic_write

Metadata = dict[str, Any]

_QUANTIZATION_VERSION = 2  # of ggml's block formats
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


def export_gguf(
    model: Any,
    tokeniser: Any,
    path: str | os.PathLike[str],
    dtype_name: str = "F32",
    importance: Mapping[str, np.ndarray] | None = None,
    progress: bool = False,
) -> str:
    """Write a GPT and tokenizer (or None) to a GGUF file of a type in FILE_TYPES; return its architecture.

    Args:
        model: a `GPT` whose config is that of a Llama or a GPT-2.
        tokeniser: Tricycle's with GPT-2's pre-tokenizer, or another byte-level BPE. With None the file has no
            tokenizer: llama.cpp cannot run it, but other programs can read it.
        path: of the file, which is replaced.
        dtype_name: one of FILE_TYPES, such as F16 or Q4_K_M. A matrix whose rows are not whole blocks gets another
            format, as in files of llama.cpp.
        importance: from `measure_importance`, for smaller errors of quantized matrices.
        progress: show a progress bar if it takes more than two seconds.

    Raises:
        ImportError: the package gguf is not installed, or BF16 without ml_dtypes.
        ValueError: llama.cpp does not support the model or tokenizer (the message names the cause), or a weight is not
            finite, or too large for its format.
    """
    from tqdm import tqdm

    if not isinstance(model, GPT):
        raise ValueError(f"export_gguf: expected a GPT, got {type(model).__name__}")
    if dtype_name not in FILE_TYPES:
        raise ValueError(f"export_gguf: expected dtype_name to be one of {', '.join(FILE_TYPES)}, got {dtype_name!r}")
    with error_prefix("export_gguf: llama.cpp cannot run this model: "):
        family, fields, config = match_family(model.config, [LLAMA, GPT2])
        architecture = str(fields["model_type"])
        metadata = {"general.name": Path(path).stem, "general.file_type": FILE_TYPES[dtype_name].number}
        metadata["general.quantization_version"] = _QUANTIZATION_VERSION
        metadata |= _model_metadata(architecture, fields, config)
        if tokeniser is not None:
            metadata |= tokenizer_metadata(tokeniser, config.vocab_size)
    shapes, arrays = export_tensors(model, family, config)
    mixture = Mixture(dtype_name, config, bool(importance))
    plan = {name: _plan_tensor(architecture, name, shape, mixture) for name, shape in shapes.items()}
    heads = AttentionHeads(config.n_heads, config.key_heads, config.channels_per_head)
    mapping = TensorMapping(family, model)
    importances = {part.name: array for name, array in (importance or {}).items() for part in mapping.hf_tensors(name)}
    named_arrays = tqdm(arrays, "Writing", len(plan), unit=" tensors", delay=2, disable=not progress)
    tensors = ((plan[name], _encode(plan[name], array, heads, importances.get(name))) for name, array in named_arrays)
    divisors = _rope_divisors(config) if config.rotary_scaling == "llama3" else {}
    with atomic_write(path) as file:
        _write(file.name, architecture, metadata, [*plan.values(), *divisors], chain(tensors, divisors.items()))
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
def _plan_tensor(architecture: str, name: str, shape: tuple[int, ...], mixture: Mixture) -> WrittenTensor:
    """Return the name, data type, shape and transform of a transformers tensor in the written file."""
    mapping = TENSOR_MAPPINGS[architecture]
    to_gguf = {hf_name: gguf_name for gguf_name, (hf_name, *_) in mapping.names.items()}
    layer, _, suffix = name.rpartition(".")
    number = next((component for component in layer.split(".") if component.isdigit()), "")
    template = to_gguf[layer.replace(f".{number}.", ".N.") if number else layer]
    gguf_name = f"{template.replace('.N.', f'.{number}.')}.{suffix}"
    transform = mapping.transforms.get(template, WeightTransform())
    if transform.transposes:
        shape = shape[::-1]
    return WrittenTensor(gguf_name, mixture.format_of(gguf_name, shape), shape, transform)


def _encode(
    tensor: WrittenTensor, array: np.ndarray, heads: AttentionHeads, importance: np.ndarray | None
) -> np.ndarray:
    """Return the values to write: floats, bfloat16 as uint16, or the bytes of quantized blocks.

    Raises:
        ValueError: a value is too large for the format.
    """
    array = np.ascontiguousarray(tensor.transform.to_gguf(array, heads), "<f4")
    if tensor.dtype_name == "F32":
        return array
    if tensor.dtype_name in BLOCK_FORMATS:
        with error_prefix(f"export_gguf: {tensor.name}: "):
            return quantize_blocks(array, tensor.dtype_name, importance)
    dtype = np.dtype("<f2") if tensor.dtype_name == "F16" else quantized_dtype("bfloat16")
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype)
    if not np.isfinite(narrow.astype(np.float32)).all():
        raise ValueError(
            f"export_gguf: expected values in the range of {tensor.dtype_name}, {tensor.name} has larger ones"
        )
    return narrow if tensor.dtype_name == "F16" else narrow.view("<u2")


def _write(
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
    return tensor.shape, np.dtype({"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.dtype_name])
