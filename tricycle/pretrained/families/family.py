"""The description of a model family, and the conversion of tensors between Hugging Face's and Tricycle's layouts.

A family converts the fields of config.json to a Tricycle config and back, and names the tensors of its checkpoints.
Variables called `theirs` are tensors in the layout of Hugging Face checkpoints, `ours` are Tricycle's parameters.

Shapes: H query heads, D head size; "in" and "out" are the input and output sizes of a linear layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.configs.model import ModelConfig
from tricycle.kernels.quantized import DTYPE_NAMES, QuantizedMatrix, quantized_dtype
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.parameter import Parameter
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families.stacks import Stacks
from tricycle.pretrained.stored_model import StoredModel, StoredTensor, join_blocks, release_pages
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tensor import Tensor

# Names of Tricycle's layers or parameters to those of Hugging Face's. Several of the latter are concatenated along the
# output axis of one Tricycle layer. N is the number of a block, and M that of an expert. ".weight" or ".bias" is added
# to the name of a layer, but not to that of a parameter.
TensorNames = dict[str, list[str]]
# A function of config, ours and theirs, the outputs (out, ...) of one linear layer in Tricycle's and in another order,
# that yields views of both with equal elements.
Layout = Callable[[Any, np.ndarray, np.ndarray], Iterator[tuple[np.ndarray, np.ndarray]]]

# Masks and tables, which older versions of transformers also saved; they are not weights.
BUFFERS = re.compile(
    r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids)$"
)
NUMBER = r"(?<=\.)\d+(?=\.|$)"  # a component of a name
QUANTIZED_ROLES = ("matrix", "embedding", "head")  # norms, biases and routers are small and stay float32
CHUNK_BYTES = 2**22  # of a mapped file that are copied at once, which bounds the memory that copying needs
MAX_LISTED_NAMES = 4  # in an error message


# The classes of models whose config is not that of a `GPT`.
MODEL_CLASSES: dict[type[ModelConfig], Callable[..., Layer]] = {
    EncoderConfig: TextEncoder,
    EncoderDecoderConfig: EncoderDecoderTransformer,
}


def new_model(config: ModelConfig) -> Layer:
    """Make the model of a config with all weights at 0 (gains at 1), for weights that are loaded afterwards."""
    return MODEL_CLASSES.get(type(config), GPT)(config, draw_weights=False)


@dataclass(frozen=True)
class Family:
    """A model family: conversion of its config, and the names and layouts of its tensors.

    Attributes:
        model_types: values of model_type in config.json that belong to this family; exports have the first.
        architecture: the class of transformers that exports name in config.json.
        to_config: converts fields of config.json to a Tricycle config.
        to_fields: converts a Tricycle config to fields of config.json. It drops what these cannot express: `export`
            converts the result back and compares.
        names: names of Tricycle's layers to those of Hugging Face's; the first entry is the token embedding.
        prefixes: the prefixes of tensor names, apart from the output layer, that occur in checkpoints; the first is
            that of `names`.
        legacy_names: regular expressions of outdated parts of names, and the parts in `names` that replace them.
        ignored: a regular expression of names, without the prefix, of tensors that Tricycle does not use.
        layouts: how the checkpoint orders the outputs of a linear layer, by the last component of its name there.
        stacks: tensors with the matrices of all experts.
        part_sizes: by the name of a Tricycle layer that is several tensors of other than equal sizes, a function of the
            config that returns the numbers of their outputs.
        fan_in_fan_out: matrices are (in, out), as Tricycle's are (GPT-2's Conv1D).
        config_class: the class of the configs that `to_config` returns.
        fallbacks: names of tensors that may be missing, and the names of the tensors that they equal, or "" for zeros.
        applies_to: whether the fields of a config.json belong to this family, among several of the same model_type.
        models: names of the models, for the table in docs/pretrained.md.
    """

    model_types: tuple[str, ...]
    architecture: str
    to_config: Callable[[ConfigFields], Any]
    to_fields: Callable[[Any], dict[str, Any]]
    names: TensorNames
    prefixes: tuple[str, ...] = ("model.", "")
    legacy_names: dict[str, str] = field(default_factory=dict)
    ignored: str = "(?!)"
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    stacks: Stacks = field(default_factory=dict)
    part_sizes: Mapping[str, Callable[[Any], list[int]]] = field(default_factory=dict)
    fan_in_fan_out: bool = False
    config_class: type[ModelConfig] = ModelConfig
    fallbacks: dict[str, str] = field(default_factory=dict)
    applies_to: Callable[[dict[str, Any]], bool] = lambda fields: True
    models: str = ""


class HFTensor(NamedTuple):
    """A tensor of a Hugging Face checkpoint, and the indices on the last axis of Tricycle's parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    columns: slice


class TensorMapping:
    """The mapping between a model's parameters and the tensors of a Hugging Face checkpoint.

    Args:
        family: the family of the checkpoint.
        model: the Tricycle model.
    """

    def __init__(self, family: Family, model: Layer) -> None:
        self.family = family
        self.config: Any = model.config  # type: ignore[attr-defined]
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())

    def hf_tensors(self, name: str) -> list[HFTensor]:
        """Return HFTensors (name, shape, columns) that form a parameter, in order of its last axis; else KeyError."""
        parameter = self.parameters[name]
        layer, _, kind = name.rpartition(".")
        numbers = re.findall(NUMBER, layer)
        letters = iter("NM")
        template = re.sub(NUMBER, lambda number: next(letters, number[0]), layer)
        own = self.family.names.get(f"{template}.{kind}".lstrip("."))  # the tensor of a single parameter
        ending = "" if own else ".bias" if kind == "bias" else ".weight"
        names = [fill_numbers(theirs, numbers) + ending for theirs in own or self.family.names[template]]
        sizes = [parameter.shape[-1] // len(names)] * len(names)  # on the parameter's last axis
        if len(names) == 3 and ".qkv." in name:
            keys = self.config.key_heads * self.config.channels_per_head
            sizes = [parameter.shape[-1] - 2 * keys, keys, keys]  # queries may have gates
        if template in self.family.part_sizes:
            sizes = self.family.part_sizes[template](self.config)
        hf_tensors, start = [], 0
        for their_name, size in zip(names, sizes):
            columns, start = slice(start, start + size), start + size
            shape = parameter.shape if len(names) == 1 else (*parameter.shape[:-1], size)
            hf_tensors.append(HFTensor(their_name, shape[::-1] if self.is_transposed(name) else shape, columns))
        return hf_tensors

    def is_transposed(self, name: str) -> bool:
        """Return whether a parameter (in, out) is stored as (out, in) in the checkpoint, by its role and family."""
        role = declared_role(self.parameters[name])
        return role in ("head", "router") or (role == "matrix" and not self.family.fan_in_fan_out)

    def matching_views(
        self, name: str, hf_tensor: HFTensor, ours: np.ndarray, theirs: np.ndarray
    ) -> Iterator[tuple[Any, Any]]:
        """Yield views of matching elements of parameter `ours` and tensor `theirs`, a few rows at a time, to copy."""
        if hf_tensor.columns.stop - hf_tensor.columns.start < ours.shape[-1]:
            ours = ours[..., hf_tensor.columns]
        if self.is_transposed(name):
            ours = ours.T
        if not theirs.size:
            return
        for mine, their_part in self.reordered_views(hf_tensor.name, ours, theirs):
            n_rows = max(1, CHUNK_BYTES // (theirs.itemsize * max(1, their_part.size // len(their_part))))
            for start in range(0, len(their_part), n_rows):
                yield mine[start : start + n_rows], their_part[start : start + n_rows]

    def reordered_views(self, hf_name: str, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of views (ours, theirs) of a layer's outputs (out, ...), matched by the family's layout."""
        layout = self.family.layouts.get(layer_kind(hf_name))
        yield from [(ours, theirs)] if layout is None else layout(self.config, ours, theirs)


# -------------------------------------------------------------------- orders of outputs
def by_head(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield one pair of views (ours, theirs) (H, 3, D, ...) of Q, K, V (3 H D, ...), interleaved by head in theirs."""
    rest = ours.shape[1:]
    yield ours.reshape(3, config.n_heads, -1, *rest).swapaxes(0, 1), theirs.reshape(config.n_heads, 3, -1, *rest)


def by_group(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of Q, of K and of V; theirs has the queries, key and value of a key head together."""
    n_groups, size, rest = config.key_heads, config.channels_per_head, ours.shape[1:]
    n_queries = config.n_heads // n_groups
    heads, theirs = ours.reshape(-1, size, *rest), theirs.reshape(n_groups, n_queries + 2, size, *rest)
    yield heads[: config.n_heads].reshape(n_groups, n_queries, size, *rest), theirs[:, :n_queries]
    yield heads[config.n_heads : config.n_heads + n_groups], theirs[:, n_queries]
    yield heads[config.n_heads + n_groups :], theirs[:, n_queries + 1]


def adjacent_pairs(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of queries or keys, which RoPE rotates as pairs i, i + R/2 here, 2i, 2i + 1 there."""
    rest, n_rotated = ours.shape[1:], int(config.channels_per_head * config.rotary_fraction)
    ours, theirs = (x.reshape(-1, config.channels_per_head, *rest) for x in (ours, theirs))
    n_heads, half = len(ours), n_rotated // 2
    pairs = theirs[:, :n_rotated].reshape(n_heads, half, 2, *rest).swapaxes(1, 2)
    yield ours[:, :n_rotated].reshape(n_heads, 2, half, *rest), pairs
    yield ours[:, n_rotated:], theirs[:, n_rotated:]


def gate_first(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of both halves of a gated layer (2 F, ...), the gate last in ours, first in theirs."""
    half = len(ours) // 2
    yield ours[half:], theirs[:half]
    yield ours[:half], theirs[half:]


def gate_interleaved(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of a gated layer's halves (2 F, ...), interleaved in theirs, each gate first."""
    half = len(ours) // 2
    yield ours[half:], theirs[0::2]
    yield ours[:half], theirs[1::2]


def layer_kind(hf_name: str) -> str:
    """Return a name's last component, of a layer or without the ending .weight or .bias."""
    return re.sub(r"\.(weight|bias)$", "", hf_name).rpartition(".")[2]


def fill_numbers(template: str, numbers: Sequence[str]) -> str:
    """Return a name with its components N and M replaced by the numbers of a block and an expert."""
    for letter, number in zip("NM", numbers):
        template = re.sub(rf"\.{letter}(?=\.|$)", f".{number}", template)
    return template


def declared_role(parameter: Tensor) -> str | None:
    """Return the role that a `Parameter` was created with, one of `tensor.ROLES`; None for other tensors."""
    return parameter.role if isinstance(parameter, Parameter) else None


# -------------------------------------------------------------------- loading
class _Arena:
    """An arena allocator: arrays lie side by side in blocks for which NumPy asks Linux for pages of 2 MB.

    It does so for arrays of 4 MB and more. Many matrices are smaller, and in pages of 4 kB tokens took 3% more time.
    """

    BLOCK_BYTES, LINE_BYTES = 2**25, 64

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def empty(self, shape: Sequence[int], dtype: Any, order: Literal["C", "F"] = "C") -> np.ndarray:
        """Return an array that is not initialized."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if n_bytes > len(self._free):
            memory = np.empty(max(n_bytes, self.BLOCK_BYTES) + self.LINE_BYTES, np.uint8)
            self._free = memory[-memory.ctypes.data % self.LINE_BYTES :]
        taken = self._free[:n_bytes]
        self._free = self._free[-(-n_bytes // self.LINE_BYTES) * self.LINE_BYTES :]
        return taken.view(dtype).reshape(shape, order=order)


def load_weights(model: Layer, family: Family, source: StoredModel, weights: str) -> None:
    """Check all tensors, before any is read, then load them as `weights`; those below float32 are frozen.

    Args:
        weights: as of `pretrained.load`.

    Raises:
        ValueError: tensors are missing, unexpected, of a wrong shape or not of floating-point numbers; names them as
            the files do.
    """
    mapping = TensorMapping(family, model)
    tensors = canonicalize_names(family, source.tensors)
    expected = {name: mapping.hf_tensors(name) for name in mapping.parameters}
    tensors = _add_fallbacks(family, tensors, expected)
    _check_tensors(expected, tensors, family.ignored)
    _check_tied_head(mapping, tensors)
    arena = _Arena()
    for name, hf_tensors in sorted(expected.items(), key=lambda item: -mapping.parameters[item[0]].size):
        # The largest comes first, because the temporary copies that it needs then meet the fewest loaded parameters.
        parameter = mapping.parameters[name]
        theirs = [tensors[hf_tensor.name] for hf_tensor in hf_tensors]
        kind = _storage_format(mapping, name, theirs, weights)
        if kind == "blocks":
            parts = join_blocks(tensor.read_blocks() for tensor in theirs if tensor.read_blocks is not None)
            parameter.array = BlockMatrix(parts, declared_role(parameter) != "embedding", weights == "exact")
        elif kind == "float32":
            if declared_role(parameter) in ("matrix", "head", "router"):
                # Decoding reads this order fastest: see `weights.set_memory_order`.
                parameter.array = arena.empty(parameter.shape, np.float32, "F")
            _copy_tensors(mapping, name, hf_tensors, theirs, parameter.array)
        else:
            parameter.array = _read_quantized(mapping, name, hf_tensors, theirs, kind, arena)
        parameter.requires_grad = kind == "float32"


def _add_fallbacks(
    family: Family, tensors: dict[str, StoredTensor], expected: dict[str, list[HFTensor]]
) -> dict[str, StoredTensor]:
    """Return the tensors, with expected ones that are missing from `family.fallbacks`: another tensor's, or zeros."""
    missing = [hf for hfs in expected.values() for hf in hfs if hf.name in family.fallbacks and hf.name not in tensors]
    added: dict[str, StoredTensor] = {}
    for name, shape, _ in missing:
        other = family.fallbacks[name]
        if not other:
            added[name] = StoredTensor(shape, "F32", lambda shape=shape: np.zeros(shape, np.float32))  # type: ignore[misc]
        elif other in tensors:
            added[name] = tensors[other]
    return {**tensors, **added}


def _storage_format(mapping: TensorMapping, name: str, theirs: list[StoredTensor], weights: str) -> str:
    """Return how to store a parameter: "float32", a dtype of `QuantizedMatrix`, or "blocks" as in the file."""
    if weights == "float32" or declared_role(mapping.parameters[name]) not in QUANTIZED_ROLES:
        return "float32"
    kinds = {tensor.dtype_name for tensor in theirs}
    reordered = any(layer_kind(hf_tensor.name) in mapping.family.layouts for hf_tensor in mapping.hf_tensors(name))
    have_blocks = all(tensor.read_blocks for tensor in theirs) and not reordered
    if have_blocks and keeps_blocks(weights, kinds):
        return "blocks"
    if weights in DTYPE_NAMES:
        return weights
    return {"F16": "float16", "BF16": "bfloat16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def keeps_blocks(weights: str, block_formats: set[str]) -> bool:
    """Return whether `load` with this `weights` leaves matrices in quantized blocks of these formats as they are."""
    return weights in ("stored", "exact") or (weights == "int8" and block_formats == {"Q8_0"})


def _copy_tensors(
    mapping: TensorMapping, name: str, hf_tensors: list[HFTensor], theirs: list[StoredTensor], ours: np.ndarray
) -> None:
    """Copy checkpoint tensors into an array in the layout of a parameter, and release their pages."""
    for hf_tensor, tensor in zip(hf_tensors, theirs):
        for target, part in mapping.matching_views(name, hf_tensor, ours, tensor.read()):
            target[...] = part
            release_pages(part)


def _read_quantized(
    mapping: TensorMapping,
    name: str,
    hf_tensors: list[HFTensor],
    theirs: list[StoredTensor],
    kind: str,
    arena: _Arena,
) -> QuantizedMatrix:
    """Return a parameter as a QuantizedMatrix: int8 of float32 values, or copied 16 bits; ValueError if not finite."""
    # A QuantizedMatrix is stored transposed, except for an embedding.
    transposed = declared_role(mapping.parameters[name]) != "embedding"
    shape = mapping.parameters[name].shape
    shape = shape[::-1] if transposed else shape
    reordered = any(layer_kind(hf_tensor.name) in mapping.family.layouts for hf_tensor in hf_tensors)
    try:
        if kind == "int8" and mapping.is_transposed(name) == transposed and not reordered:
            matrix = _quantize_rows(shape, [(t.columns if transposed else slice(None)) for t in hf_tensors], theirs)
        else:
            rows = np.empty(shape, np.float32) if kind == "int8" else arena.empty(shape, quantized_dtype(kind))
            with np.errstate(over="ignore"):
                _copy_tensors(mapping, name, hf_tensors, theirs, rows.T if transposed else rows)
            matrix = QuantizedMatrix.quantize(rows, kind)
        return matrix.transpose((1, 0) if transposed else (0, 1))
    except ValueError as error:
        names = " or ".join(hf_tensor.name for hf_tensor in hf_tensors)  # which are one matrix in Tricycle
        raise ValueError(f"{names}: {error}") from None


def _quantize_rows(shape: Sequence[int], places: Sequence[slice], theirs: Sequence[StoredTensor]) -> QuantizedMatrix:
    """Return tensors, which are the rows at `places` of a matrix, in int8; a few rows at a time are read in float32."""
    matrix = QuantizedMatrix(np.empty(shape, np.int8), np.empty((shape[0], 1), np.float32))
    for place, tensor in zip(places, theirs):
        source, (values, scales) = tensor.read(), (array[place] for array in matrix.arrays)
        n_rows = max(1, CHUNK_BYTES // (4 * shape[1]))
        for chunk in (slice(start, start + n_rows) for start in range(0, len(source), n_rows)):
            values[chunk], scales[chunk] = QuantizedMatrix.quantize(source[chunk], "int8").arrays
            release_pages(source)
    return matrix


def canonicalize_names(family: Family, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors renamed to `family.names`, replacing other prefixes and legacy names, without any check."""
    standard = family.prefixes[0]
    first = next(iter(family.names.values()))[0].removeprefix(standard) + ".weight"
    updated = tensors
    for legacy, current in family.legacy_names.items():
        updated = {re.sub(legacy, current, name): tensor for name, tensor in updated.items()}
    prefix = next((prefix for prefix in family.prefixes if prefix + first in updated), standard)
    if prefix == standard:
        return updated
    heads = tuple(name for names in family.names.values() for name in names if not name.startswith(standard))

    def canonicalize(name: str) -> str:
        bare = name.removeprefix(prefix.partition(".")[0] + ".") if prefix else name
        if heads and bare.startswith(heads):
            return bare
        return standard + name.removeprefix(prefix) if name.startswith(prefix) else name

    return {canonicalize(name): tensor for name, tensor in updated.items()}


def _check_tensors(expected: dict[str, list[HFTensor]], tensors: dict[str, StoredTensor], ignored: str) -> None:
    """Raise ValueError if tensors (canonical names) are missing, unexpected and not `ignored`, or of a wrong kind."""
    hf_tensors = [hf_tensor for hf_tensors in expected.values() for hf_tensor in hf_tensors]
    names = {hf_tensor.name for hf_tensor in hf_tensors}
    missing = [hf_tensor.name for hf_tensor in hf_tensors if hf_tensor.name not in tensors]
    unused = [name for name in tensors if name not in names and not BUFFERS.search(name) and not _is_head(name)]
    unexpected = [name for name in unused if not re.match(ignored, name)]
    problems = [f"missing {abbreviate_names(missing)}"] if missing else []
    problems += [f"unexpected {abbreviate_names(unexpected)}"] if unexpected else []
    wrong_shapes = [(name, shape) for name, shape, _ in hf_tensors if name in tensors and tensors[name].shape != shape]
    for name, shape in wrong_shapes[:MAX_LISTED_NAMES]:
        problems.append(f"{name}: expected shape {shape}, got {tensors[name].shape}")
    for name in names & set(tensors):
        if not re.fullmatch(r"F16|BF16|F32|F64|Q\d\w*|MXFP4", tensors[name].dtype_name):
            problems.append(f"{name}: expected floating-point numbers, got {tensors[name].dtype_name}")
    if problems:
        raise ValueError(f"the weights are not those of the config: {'; '.join(problems[: 2 + MAX_LISTED_NAMES])}")


def abbreviate_names(names: list[str]) -> str:
    """Return the first names of a list, joined by commas, and "and N more" for any others, for an error message."""
    more = len(names) - MAX_LISTED_NAMES
    return ", ".join(names[:MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def _is_head(name: str) -> bool:
    """Return whether a tensor's name is that of an output matrix: lm_head.weight or embed_out.weight."""
    return name in ("lm_head.weight", "embed_out.weight")


def _check_tied_head(mapping: TensorMapping, tensors: dict[str, StoredTensor]) -> None:
    """Raise ValueError if a file contains an output layer that differs from the embedding to which it is tied."""
    name = next((name for name in tensors if _is_head(name)), None)
    if name is None or "head.weights" in mapping.parameters:
        return
    embedding = next(iter(mapping.family.names.values()))[0] + ".weight"
    head, tied = tensors[name], tensors[embedding]
    if head.shape != tied.shape or not _arrays_equal(head.read(), tied.read()):
        raise ValueError(f"tie_word_embeddings says that {name} is {embedding}, but their values differ")


def _arrays_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal, compared in chunks; release the memory of views of files."""
    n_rows = max(1, CHUNK_BYTES // (4 * max(1, a.size // max(1, len(a)))))
    for start in range(0, len(a), n_rows):
        rows = slice(start, start + n_rows)
        if not np.array_equal(a[rows], b[rows]):
            return False
        release_pages(a)
        release_pages(b)
    return True


# -------------------------------------------------------------------- export
def to_hf_tensors(mapping: TensorMapping, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, new array of the same dtype) of each checkpoint tensor that a parameter consists of."""
    for hf_tensor in mapping.hf_tensors(name):
        theirs = np.empty(hf_tensor.shape, array.dtype)
        for source, target in mapping.matching_views(name, hf_tensor, array, theirs):
            target[...] = source
        yield hf_tensor.name, theirs
