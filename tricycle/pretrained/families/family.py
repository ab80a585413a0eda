"""What a family of models is: its config's fields as ours and back, and the names and layouts of its tensors.

Shapes: H heads of queries, K heads of keys and values, D head size; "in" and "out" are the two sides of a linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tricycle.kernels.quantized import QuantizedMatrix, quantized_dtype
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.parameter import Parameter
from tricycle.pretrained.fields import Fields
from tricycle.pretrained.source import Source, StoredTensor, let_go
from tricycle.tensor import Tensor

# Our names of layers to theirs; several of theirs lie side by side in ours. N stands for the number of a block.
Names = dict[str, list[str]]

# Tensors that are no weights: masks and tables that older versions of transformers wrote too.
BUFFERS = re.compile(
    r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids)$"
)
KEEPS_16_BITS = ("matrix", "embedding", "head")  # roles; norms and biases are small, and are always float32
BLOCK_BYTES = 2**22  # of a file that are in memory at once while they are copied
MOST_NAMED = 4  # tensors in a message


def empty_gpt(config: Any) -> Layer:
    """A GPT whose weights are not drawn."""
    return GPT(config, draw_weights=False)


@dataclass(frozen=True)
class Family:
    """How models of one kind are written down.

    Attributes:
        model_types: of config.json, that are read by this family.
        architecture: of config.json, the class of transformers, as it is written.
        to_config: their fields to our config.
        to_fields: our config to their fields. It writes what can be said; `export` compares what comes back.
        names: our layers to theirs; the first is that of the token embedding.
        prefixes: what stands before the names of the model without its head, in files of several makers; the first is
            that of `names`.
        renamed: parts of names that some files write in another way: that way to the one in `names`.
        unread: a pattern of the names of tensors, behind the prefix, that belong to parts that are not here.
        woven: queries, keys and values of one head lie side by side in one matrix of theirs (GPT-NeoX).
        in_out: their matrices are (in, out) as ours are (GPT-2's Conv1D).
        new_model: a model of a config, its weights not drawn.
    """

    model_types: tuple[str, ...]
    architecture: str
    to_config: Callable[[Fields], Any]
    to_fields: Callable[[Any], dict[str, Any]]
    names: Names
    prefixes: tuple[str, ...] = ("",)
    renamed: dict[str, str] = field(default_factory=dict)
    unread: str = "(?!)"
    woven: bool = False
    in_out: bool = False
    new_model: Callable[[Any], Layer] = empty_gpt


class Piece(NamedTuple):
    """One tensor of theirs, its shape, and what it fills of our last axis (of rows, where both are alike)."""

    name: str
    shape: tuple[int, ...]
    columns: slice


class Layout:
    """Which tensors of theirs make up which parameter of ours, and how they lie in it.

    Args:
        family: theirs.
        model: ours.
    """

    def __init__(self, family: Family, model: Layer) -> None:
        self.family = family
        self.config: Any = model.config  # type: ignore[attr-defined]
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())

    def pieces(self, name: str) -> list[Piece]:
        """Those of a parameter of ours.

        Raises:
            KeyError: a layer that this family has no name for.
        """
        parameter = self.parameters[name]
        layer, _, kind = name.rpartition(".")
        block = re.search(r"\.(\d+)(\.|$)", layer)
        number = f".{block[1]}." if block else ""
        template = layer if block is None else f"{layer[: block.start(1)]}N{layer[block.end(1) :]}"
        ending = "bias" if kind == "bias" else "weight"
        names = [f"{theirs.replace('.N.', number)}.{ending}" for theirs in self.family.names[template]]
        sizes = [parameter.shape[-1] // len(names)] * len(names)  # of their parts of our last axis
        if len(names) == 3 and ".qkv." in name:
            heads = (self.config.n_heads, self.config.key_heads, self.config.key_heads)
            sizes = [n * self.config.channels_per_head for n in heads]
        pieces, start = [], 0
        for their_name, size in zip(names, sizes):
            columns, start = slice(start, start + size), start + size
            shape = parameter.shape if len(names) == 1 else (*parameter.shape[:-1], size)
            pieces.append(Piece(their_name, shape[::-1] if self.is_transposed(name) else shape, columns))
        return pieces

    def is_transposed(self, name: str) -> bool:
        """Whether theirs is (out, in) where ours is (in, out)."""
        role = role_of(self.parameters[name])
        return role == "head" or (role == "matrix" and not self.family.in_out)

    def is_woven(self, name: str) -> bool:
        """Whether theirs has the heads' queries, keys and values side by side."""
        return self.family.woven and ".qkv." in name

    def slices(self, name: str, piece: Piece, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[Any, Any]]:
        """Views of the same shape and the same meaning, of a parameter and of a tensor of theirs, a few rows each."""
        if piece.columns.stop - piece.columns.start < ours.shape[-1]:
            ours = ours[..., piece.columns]
        if self.is_woven(name):
            ours, theirs = self.by_head(ours, theirs)
        elif self.is_transposed(name):
            ours = ours.T
        if not theirs.size:
            return
        n_rows = max(1, BLOCK_BYTES // (theirs.itemsize * max(1, theirs.size // len(theirs))))
        for start in range(0, len(theirs), n_rows):
            yield ours[start : start + n_rows], theirs[start : start + n_rows]

    def by_head(self, ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views (H, 3, D, ...) of (..., 3 H D) and (H 3 D, ...)."""
        n_heads = self.config.n_heads
        theirs = theirs.reshape(n_heads, 3, -1, *theirs.shape[1:])
        ours = ours.reshape(*ours.shape[:-1], 3, n_heads, -1)
        return np.moveaxis(ours, (-2, -3, -1), (0, 1, 2)), theirs


def role_of(parameter: Tensor) -> str | None:
    """What a parameter is, one of `tensor.ROLES`."""
    return parameter.role if isinstance(parameter, Parameter) else None


# -------------------------------------------------------------------- in
def fill(model: Layer, family: Family, source: Source, weights: str) -> None:
    """Give a model the weights that lie in files.

    Args:
        weights: as of `pretrained.load`.

    Raises:
        ValueError: tensors that are missing, too many, misshapen, or of a type that holds no weights; named as in the
            files. Nothing has been read then.
    """
    layout = Layout(family, model)
    tensors = by_our_spelling(family, source.tensors)
    plan = {name: layout.pieces(name) for name in layout.parameters}
    _check(plan, {name: tensor for name, tensor in tensors.items() if not re.match(family.unread, name)})
    _check_head(layout, tensors)
    for name, pieces in sorted(plan.items(), key=lambda item: -layout.parameters[item[0]].size):
        # the largest first: what a reader must make in memory for it then comes on top of the least
        parameter = layout.parameters[name]
        theirs = [tensors[piece.name] for piece in pieces]
        kind = _kind_of(layout, name, theirs, weights)
        if kind == "blocks":
            read = [tensor.blocks() for tensor in theirs if tensor.blocks is not None]
            values, scales = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*read))
            parameter.array = QuantizedMatrix(values, scales, role_of(parameter) != "embedding")
        elif kind == "float32":
            if role_of(parameter) in ("matrix", "head"):
                parameter.array = np.empty(
                    parameter.shape, np.float32, order="F"
                )  # as `weights.set_memory_order` tells
            _write(layout, name, pieces, theirs, parameter.array)
        else:
            parameter.array = _of_few_bits(layout, name, pieces, theirs, kind)
        parameter.requires_grad = kind == "float32"


def _kind_of(layout: Layout, name: str, theirs: list[StoredTensor], weights: str) -> str:
    """How a parameter is kept: "float32", a kind of `QuantizedMatrix`, or "blocks", as they lie in the file."""
    if weights == "float32" or role_of(layout.parameters[name]) not in KEEPS_16_BITS:
        return "float32"
    if weights in ("stored", "int8") and all(tensor.blocks for tensor in theirs) and not layout.is_woven(name):
        return "blocks"
    if weights != "stored":
        return weights
    kinds = {tensor.kind for tensor in theirs}
    return {"F16": "float16", "BF16": "bfloat16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _write(layout: Layout, name: str, pieces: list[Piece], theirs: list[StoredTensor], ours: np.ndarray) -> None:
    """Their values into an array in the layout of our parameter."""
    for piece, tensor in zip(pieces, theirs):
        for target, part in layout.slices(name, piece, ours, tensor.read()):
            target[...] = part
            let_go(part)


def _of_few_bits(
    layout: Layout, name: str, pieces: list[Piece], theirs: list[StoredTensor], kind: str
) -> QuantizedMatrix:
    """Through float32 for int8 alone, whose scales come from whole rows."""
    # the columns of our matrix are the rows of few bits, but of an embedding
    transposed = role_of(layout.parameters[name]) != "embedding"
    shape = layout.parameters[name].shape
    rows = np.empty(shape[::-1] if transposed else shape, np.float32 if kind == "int8" else quantized_dtype(kind))
    with np.errstate(over="ignore"):
        _write(layout, name, pieces, theirs, rows.T if transposed else rows)
    try:
        return QuantizedMatrix.quantize(rows, kind).transpose((1, 0) if transposed else (0, 1))
    except ValueError as error:
        names = " or ".join(piece.name for piece in pieces)  # they are one matrix here
        raise ValueError(f"{names}: {error}") from None


def by_our_spelling(family: Family, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Their tensors by the names that `family.names` has."""
    standard = family.prefixes[0]
    first = next(iter(family.names.values()))[0].removeprefix(standard) + ".weight"
    renamed = tensors
    for theirs, ours in family.renamed.items():
        renamed = {re.sub(theirs, ours, name): tensor for name, tensor in renamed.items()}
    prefix = next((prefix for prefix in family.prefixes if prefix + first in renamed), standard)
    if prefix == standard:
        return renamed
    heads = tuple(name for names in family.names.values() for name in names if not name.startswith(standard))

    def spelled(name: str) -> str:
        bare = name.removeprefix(prefix.partition(".")[0] + ".") if prefix else name
        if heads and bare.startswith(heads):
            return bare
        return standard + name.removeprefix(prefix) if name.startswith(prefix) else name

    return {spelled(name): tensor for name, tensor in renamed.items()}


def _check(plan: dict[str, list[Piece]], tensors: dict[str, StoredTensor]) -> None:
    """Raise ValueError, as of `fill`, where the tensors are not those of the plan."""
    pieces = [piece for pieces in plan.values() for piece in pieces]
    wanted = {piece.name for piece in pieces}
    missing = [piece.name for piece in pieces if piece.name not in tensors]
    extra = [name for name in tensors if name not in wanted and not BUFFERS.search(name) and not _is_head(name)]
    problems = [f"missing {some_names(missing)}"] if missing else []
    problems += [f"unexpected {some_names(extra)}"] if extra else []
    misshapen = [piece for piece in pieces if piece.name in tensors and tensors[piece.name].shape != piece.shape]
    for piece in misshapen[:MOST_NAMED]:
        problems.append(f"{piece.name}: expected shape {piece.shape}, got {tensors[piece.name].shape}")
    for name in wanted & set(tensors):
        if not re.fullmatch(r"F16|BF16|F32|F64|Q\d\w*", tensors[name].kind):
            problems.append(f"{name}: expected floating-point numbers, got {tensors[name].kind}")
    if problems:
        raise ValueError(f"the weights are not those of the config: {'; '.join(problems[: 2 + MOST_NAMED])}")


def some_names(names: list[str]) -> str:
    """Return the first of some names, and the number of the others."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_head(name: str) -> bool:
    return name in ("lm_head.weight", "embed_out.weight")


def _check_head(layout: Layout, tensors: dict[str, StoredTensor]) -> None:
    """Where the head is the token embedding, a file may have it twice, but not with other values.

    Raises:
        ValueError: the two differ.
    """
    name = next((name for name in tensors if _is_head(name)), None)
    if name is None or "head.weights" in layout.parameters:
        return
    embedding = layout.family.names["token_embedding"][0] + ".weight"
    if tensors[name].shape != tensors[embedding].shape or not _same(tensors[name].read(), tensors[embedding].read()):
        raise ValueError(f"tie_word_embeddings says that {name} is {embedding}, but their values differ")


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    n_rows = max(1, BLOCK_BYTES // (4 * max(1, a.size // max(1, len(a)))))
    for start in range(0, len(a), n_rows):
        rows = slice(start, start + n_rows)
        if not np.array_equal(a[rows], b[rows]):
            return False
        let_go(a)
        let_go(b)
    return True


# -------------------------------------------------------------------- out
def their_arrays(layout: Layout, name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of theirs that an array in the layout of one of our parameters makes up."""
    for piece in layout.pieces(name):
        theirs = np.empty(piece.shape, array.dtype)
        for source, target in layout.slices(name, piece, array, theirs):
            target[...] = source
        yield piece.name, theirs
