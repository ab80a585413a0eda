"""Export of models to GGUF files for llama.cpp, with 32 to 4 bits per weight.

`gguf_metadata_writer.METADATA_WRITERS` has the architectures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.kernels.quantized import quantized_dtype
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS
from tricycle.pretrained.export import check_exportable, export_tensors
from tricycle.pretrained.families.family import Family, TensorMapping
from tricycle.pretrained.ggml_quantization import quantize_blocks
from tricycle.pretrained.gguf_config import POOLING_TYPES
from tricycle.pretrained.gguf_file_types import FILE_TYPES, Mixture
from tricycle.pretrained.gguf_metadata_writer import architecture_metadata, match_architecture, rope_divisors
from tricycle.pretrained.gguf_model_metadata import LONGROPE_DIVISORS, ROPE_DIVISORS
from tricycle.pretrained.gguf_names import TENSOR_MAPPINGS, AttentionHeads, WeightTransform
from tricycle.pretrained.gguf_tokenizer_reader import LEFT_STRIPPED
from tricycle.pretrained.gguf_tokenizer_writer import tokenizer_metadata
from tricycle.pretrained.stored_model import error_prefix
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.softmaxes import config_with_softmax
from tricycle.system.files import atomic_write

Metadata = dict[str, Any]
NamedArray = tuple[str, np.ndarray]

_QUANTIZATION_VERSION = 2  # of ggml's block formats


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
    transform: WeightTransform = field(default_factory=WeightTransform)


def export_gguf(
    model: Any,
    tokeniser: Any,
    path: str | os.PathLike[str],
    dtype_name: str = "F32",
    importance: Mapping[str, np.ndarray] | None = None,
    pooling: str = "mean",
    progress: bool = False,
) -> str:
    """Write a GPT or encoder and its tokenizer (or None) to a GGUF file; return its architecture; else ValueError.

    Args:
        model: a `GPT`, a `TextEncoder` or an `EncoderDecoderTransformer` that an architecture in
            `gguf_metadata_writer.METADATA_WRITERS` computes.
        tokeniser: Tricycle's with GPT-2's pre-tokenizer, or another byte-level BPE, a SentencePiece BPE or a lower-case
            WordPiece. With None the file has no tokenizer: llama.cpp cannot run it, but other programs can read it.
        path: of the file, which is replaced.
        dtype_name: one of FILE_TYPES, such as F16 or Q4_K_M. A matrix whose rows are not whole blocks gets another
            format, as in files of llama.cpp.
        importance: from `measure_importance`, for smaller errors of quantized matrices.
        pooling: of an encoder, "mean" or "first".
        progress: show a progress bar if it takes more than two seconds.

    Raises:
        ImportError: the package gguf is not installed, or BF16 without ml_dtypes.
        ValueError: llama.cpp does not support the model or tokenizer (the message names the cause), an adapter is
            attached, or a weight is not finite, or too large for its format.
    """
    from tqdm import tqdm

    architecture, family, config, metadata = describe_gguf(model, tokeniser, dtype_name, pooling)
    # llama.cpp removes the spaces before some tokens only in models whose name contains that of the pre-tokenizer
    pre_tokenizer = metadata.get("tokenizer.ggml.pre")
    metadata["general.name"] = Path(path).stem + f" {pre_tokenizer}" * (pre_tokenizer in LEFT_STRIPPED)
    shapes, arrays = _split_tensors(architecture, config, *export_tensors(model, family, config))
    mixture = Mixture(dtype_name, config, bool(importance), TENSOR_MAPPINGS[architecture].eight_bit_output)
    sizes = config.n_heads, config.key_heads, config.channels_per_head
    heads = AttentionHeads(*sizes, getattr(config, "n_groups", 1), config.vocab_size)
    plan = {name: _plan_tensor(architecture, name, shape, mixture, heads) for name, shape in shapes.items()}
    mapping = TensorMapping(family, model)
    importances = {part.name: array for name, array in (importance or {}).items() for part in mapping.hf_tensors(name)}
    named_arrays = tqdm(arrays, "Writing", len(plan), unit=" tensors", delay=2, disable=not progress)
    tensors = ((plan[name], _encode(plan[name], array, heads, importances.get(name))) for name, array in named_arrays)
    divisors = _divisor_tensors(rope_divisors(config))
    with atomic_write(path) as file:
        write_gguf(file.name, architecture, metadata, [*plan.values(), *divisors], chain(tensors, divisors.items()))
    return architecture


def describe_gguf(
    model: Any, tokeniser: Any, dtype_name: str = "F32", pooling: str = "mean"
) -> tuple[str, Family, Any, Metadata]:
    """Return the architecture, family, config and metadata of the file that `export_gguf` writes; errors as there.

    It writes nothing, so that callers can check a model before long work. The metadata do not have the model's name.
    """
    check_exportable(model, "export_gguf")
    if dtype_name not in FILE_TYPES:
        raise ValueError(f"export_gguf: expected dtype_name to be one of {', '.join(FILE_TYPES)}, got {dtype_name!r}")
    if pooling not in POOLING_TYPES:
        raise ValueError(f"export_gguf: expected pooling to be one of {', '.join(POOLING_TYPES)}, got {pooling!r}")
    _import_gguf()
    with error_prefix("export_gguf: llama.cpp cannot run this model: "):
        architecture, family, config = match_architecture(config_with_softmax(model))
        metadata: Metadata = {"general.file_type": FILE_TYPES[dtype_name].number}
        metadata["general.quantization_version"] = _QUANTIZATION_VERSION
        metadata |= architecture_metadata(architecture, config)
        if tokeniser is not None:
            metadata |= tokenizer_metadata(tokeniser, config.vocab_size)
    if isinstance(model, TextEncoder):
        metadata[f"{architecture}.pooling_type"] = POOLING_TYPES[pooling]
        if model.config.token_types:
            metadata["tokenizer.ggml.token_type_count"] = model.config.token_types
    return architecture, family, config, metadata


# -------------------------------------------------------------------- tensors
def _split_tensors(
    architecture: str, config: Any, shapes: dict[str, tuple[int, ...]], arrays: Iterator[NamedArray]
) -> tuple[dict[str, tuple[int, ...]], Iterator[NamedArray]]:
    """Return shapes by name and a lazy iterator of (name, values), with parts of tensors, and zeros for unused ones."""
    split, unused = partial(TENSOR_MAPPINGS[architecture].split, config), TENSOR_MAPPINGS[architecture].unused(config)
    arrays = chain(arrays, ((name, np.zeros(shape, np.float32)) for name, shape in unused.items()))
    shapes = shapes | unused
    zeros = ((name, np.broadcast_to(np.float32(0), shape)) for name, shape in shapes.items())  # without memory
    parts = {part: values.shape for name, array in zeros for part, values in split(name, array)}
    return parts, (part for name, array in arrays for part in split(name, array))


def _divisor_tensors(divisors: np.ndarray | None) -> dict[WrittenTensor, np.ndarray]:
    """Return the tensors of divisors of RoPE frequencies: one for Llama 3's scaling, two for LongRoPE; {} without."""
    if divisors is None:
        return {}
    rows = {ROPE_DIVISORS: divisors} if divisors.ndim == 1 else dict(zip(LONGROPE_DIVISORS, divisors))
    return {WrittenTensor(name, "F32", row.shape): row for name, row in rows.items()}


def _plan_tensor(
    architecture: str, name: str, shape: tuple[int, ...], mixture: Mixture, heads: AttentionHeads
) -> WrittenTensor:
    """Return the name, data type, shape and transform of a transformers tensor in the written file."""
    gguf_name, transform = TENSOR_MAPPINGS[architecture].gguf_tensor(name)
    shape = transform.gguf_shape(shape, heads)
    return WrittenTensor(gguf_name, mixture.format_of(gguf_name, shape), shape, transform)


def _encode(
    tensor: WrittenTensor, array: np.ndarray, heads: AttentionHeads, importance: np.ndarray | None
) -> np.ndarray:
    """Return values to write: floats, bfloat16 as uint16, or bytes of quantized blocks; ValueError if out of range.

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


def write_arrays(
    path: str | os.PathLike[str], architecture: str, metadata: Metadata, arrays: Mapping[str, np.ndarray]
) -> None:
    """Write or replace a GGUF file with metadata and float32 arrays by name, atomically."""
    plan = [WrittenTensor(name, "F32", array.shape) for name, array in arrays.items()]
    with atomic_write(path) as file:
        write_gguf(file.name, architecture, metadata, plan, zip(plan, arrays.values()))


def write_gguf(
    path: str,
    architecture: str,
    metadata: Metadata,
    plan: list[WrittenTensor],
    tensors: Iterator[tuple[WrittenTensor, np.ndarray]],
) -> None:
    """Fill a file with metadata and lazy tensors, one in memory at a time; ValueError if they differ from `plan`."""
    gguf = _import_gguf()
    writer = gguf.GGUFWriter(path, architecture)
    try:
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
            bytes: writer.add_array,
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


def _import_gguf() -> Any:
    """Import and return the package gguf; ModuleNotFoundError that names the extra without it."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError('writing GGUF files needs gguf: pip install "tricycle-gpt[pretrained]"') from None
    return gguf


def _stored_shape_and_dtype(tensor: WrittenTensor) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype of the array that is written: uint8 (..., bytes per row) for quantized blocks."""
    if tensor.dtype_name in BLOCK_FORMATS:
        block = BLOCK_FORMATS[tensor.dtype_name]
        row_bytes = tensor.shape[-1] // block.n_values * block.n_bytes
        return (*tensor.shape[:-1], row_bytes), np.dtype(np.uint8)
    return tensor.shape, np.dtype({"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.dtype_name])
