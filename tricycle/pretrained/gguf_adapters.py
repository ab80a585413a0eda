"""LoRA adapters as GGUF files for llama.cpp, with the module names and the matrix layouts of PEFT.

A file contains the matrices A (r, in) and B (out, r) of a tensor under its name and `.lora_a` or `.lora_b`. The rows of
B have the order of the tensor's rows. llama.cpp multiplies the product by alpha / r, with one alpha for the whole file,
or by 1 if alpha is 0 or missing.
(Sources: llama.cpp's `src/llama-adapter.cpp` for what it reads, `convert_lora_to_gguf.py` for what it writes.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tricycle.pretrained.gguf import GGUFModel, TensorConversion
from tricycle.pretrained.gguf_file import GGUFFile, GGUFTensorInfo, read_gguf_header, short_repr
from tricycle.pretrained.gguf_metadata_writer import match_architecture
from tricycle.pretrained.gguf_model_metadata import ModelMetadata
from tricycle.pretrained.gguf_names import TENSOR_MAPPINGS, AttentionHeads, GGUFTensorMapping
from tricycle.pretrained.gguf_writer import write_arrays
from tricycle.pretrained.stored_model import StoredModel, StoredTensor, error_prefix

_SUFFIXES = ".lora_a", ".lora_b"


class LowRankFactors(NamedTuple):
    """The update of one matrix: A (r, in), B (out, r) as in PEFT, and the factor of their product."""

    down: np.ndarray
    up: np.ndarray
    scale: float


def find_architecture(source: StoredModel | None, config: Any) -> str:
    """Return the value of general.architecture of a model's GGUF file, as read or as exported; ValueError if none.

    Args:
        source: of the model; None for a model trained with Tricycle.
        config: of the model.

    Raises:
        ValueError: llama.cpp has no architecture that computes the config.
    """
    if isinstance(source, GGUFModel):
        return str(source.metadata["general.architecture"])
    with error_prefix("llama.cpp cannot run this model: "):
        return match_architecture(config)[0]


def _adapter_mapping(architecture: str) -> GGUFTensorMapping:
    """Return the names of layers that can have adapters, with the transforms that also apply to the rows of B.

    PEFT's A and B have the same layout for a transposed matrix (Conv1D), so no transposition is needed.
    """
    mapping = TENSOR_MAPPINGS[architecture]
    transforms = {name: transform for name, transform in mapping.transforms.items() if not transform.transposes}
    names = {name: hf_names for name, hf_names in mapping.names.items() if name not in mapping.without_adapters}
    return replace(mapping, names=names, transforms=transforms)


# -------------------------------------------------------------------- writing
def write_gguf_adapter(
    path: str | os.PathLike[str], architecture: str, heads: AttentionHeads, factors: Mapping[str, LowRankFactors]
) -> None:
    """Write or replace a GGUF adapter of F32 tensors atomically; B is scaled where alpha differs from the first one.

    The alpha of the file is that of the first matrix. Where another matrix has another one, B is multiplied by their
    ratio.

    Args:
        path: of the file.
        architecture: of the model, a key of `TENSOR_MAPPINGS`.
        heads: of the model.
        factors: by the name of the matrix in transformers.

    Raises:
        ImportError: the package gguf is not installed.
        ValueError: the architecture has no such matrix, or llama.cpp ignores adapters of it.
    """
    mapping = _adapter_mapping(architecture)
    alphas = {name: factor.scale * len(factor.down) for name, factor in factors.items()}
    alpha = next(iter(alphas.values()))
    tensors: dict[str, np.ndarray] = {}
    for name, (down, up, _) in factors.items():
        try:
            layer, transform = mapping.gguf_layer(name)
        except KeyError:
            advice = "choose other targets, or merge the adapter into the model"
            reason = f"has no matrix {name}, or ignores its adapter"
            raise ValueError(f"{architecture} in llama.cpp {reason}: {advice}") from None
        scaled = np.asarray(up * np.float32(alphas[name] / alpha), np.float32)
        tensors[f"{layer}.weight.lora_a"] = np.ascontiguousarray(down, np.float32)
        tensors[f"{layer}.weight.lora_b"] = np.ascontiguousarray(transform.to_gguf(scaled, heads))
    metadata = {
        "general.type": "adapter",
        "general.name": Path(path).stem,
        "general.file_type": 0,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    write_arrays(path, architecture, metadata, tensors)


# -------------------------------------------------------------------- reading
def read_gguf_adapter(
    path: str | os.PathLike[str], architecture: str, heads: AttentionHeads
) -> tuple[dict[str, Any], dict[str, tuple[StoredTensor, ...]]]:
    """Open a GGUF adapter; return adapter_config.json's fields, unread A and B by module; ValueError if unsupported.

    Shapes are not compared with those of the model.

    Args:
        path: of the file.
        architecture: of the model, a key of `TENSOR_MAPPINGS`.
        heads: of the model.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: not a GGUF file, a damaged file, an adapter of another architecture, or one with other trained
            tensors than pairs of matrices A and B.
    """
    file = read_gguf_header(path)
    metadata = ModelMetadata(file, "adapter")
    _check_kind(metadata, file.metadata, architecture)
    conversion = TensorConversion(file, ModelMetadata(file, architecture), _adapter_mapping(architecture), heads)
    factors: dict[str, tuple[StoredTensor, ...]] = {}
    for name, (down, up) in _pair_tensors(file).items():
        # Several modules share A if their matrices are one tensor of the file.
        for hf_name, stored_up in conversion.convert(name, up):
            module = hf_name.removesuffix(".weight")
            if module in factors:
                raise metadata.error(f"tensor {short_repr(up.name)} is a second adapter of {short_repr(module)}")
            factors[module] = StoredTensor(down.shape, down.dtype_name, partial(file.read, down)), stored_up
    ranks = {module: down.shape[0] for module, (down, _) in factors.items()}
    fields: dict[str, Any] = {"peft_type": "LORA", "r": next(iter(ranks.values())), "target_modules": list(factors)}
    if metadata.get("lora.alpha") in (None, 0):  # llama.cpp then multiplies by 1, which is alpha / r for alpha = r
        fields |= {"lora_alpha": fields["r"], "alpha_pattern": ranks}
    else:
        fields["lora_alpha"] = metadata.positive_float("lora.alpha")
    return fields, factors


def _check_kind(metadata: ModelMetadata, values: Mapping[str, Any], architecture: str) -> None:
    """Raise ValueError if a file is not a LoRA adapter of an architecture, or is an activated LoRA (aLoRA)."""
    expected = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
    for key, value in expected.items():
        if values.get(key) != value:
            raise metadata.error(f"expected {key} to be {value!r}, got {short_repr(values.get(key))}")
    if metadata.get("alora.invocation_tokens") is not None:
        raise metadata.error("is an activated LoRA (adapter.alora.invocation_tokens), which is not supported")


def _pair_tensors(file: GGUFFile) -> dict[str, tuple[GGUFTensorInfo, GGUFTensorInfo]]:
    """Return the infos of A and B by the name of the adapted tensor; ValueError if unsupported or incomplete."""
    layers: dict[str, None] = {}
    for name in file.tensors:
        layer = name.removesuffix(".lora_a").removesuffix(".lora_b")
        if layer == name or not layer.endswith(".weight"):
            expected = "tensors *.weight.lora_a and *.weight.lora_b"
            reason = "trained norms and biases are not supported"
            raise ValueError(f"{file.path}: expected {expected}, got {short_repr(name)}: {reason}")
        if "_embd" in layer:
            raise ValueError(f"{file.path}: {short_repr(name)}: adapters of embeddings are not supported")
        layers[layer] = None
    if not layers:
        raise ValueError(f"{file.path}: expected tensors, got none")
    missing = [layer + suffix for layer in layers for suffix in _SUFFIXES if layer + suffix not in file.tensors]
    if missing:
        raise ValueError(f"{file.path}: expected a tensor {short_repr(missing[0])}, which is missing")
    down, up = _SUFFIXES
    return {layer: (file.tensors[layer + down], file.tensors[layer + up]) for layer in layers}
