"""LoRA: a model is taught by small matrices beside its own, which stay as they are.

A layer x W + b becomes x W + b + s (x A) B, where A is (in, R) and B is (R, out) with a small rank R. Only A and B
learn, so gradients, moments and files are small, and W may be kept in few bits. B begins as zeros: the model begins as
it was.

One matrix of ours may stand for several of other people's, side by side: queries, keys and values have their own A and
B there. So a layer has one A or several, each for some columns of the result, and adds just what theirs would.

DoRA gives each column of the sum a length of its own, a number that learns too: m (W + s A B) / |W + s A B|.

Sources: Hu et al. 2021, "LoRA"; rank-stabilised: Kalajdzievski 2023; few bits below: Dettmers et al. 2023, "QLoRA";
Liu et al. 2024, "DoRA: weight-decomposed low-rank adaptation".

Shapes: N rows, R ranks of all parts together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, increment_versions
from tricycle.configs.validated import Rule, ValidatedConfig
from tricycle.devices import Array, array_module, to_cpu
from tricycle.functions import linear
from tricycle.kernels import FEW_ROWS
from tricycle.kernels.quantized import QuantizedMatrix, quantized_matmul
from tricycle.layers import Dense, Dropout, Layer
from tricycle.ops import as_floating, as_tensor, check_last_axis
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, record

ALL_LINEAR = "all-linear"

RULES: list[Rule] = [
    ("rank", lambda v: v >= 1, "at least 1"),
    ("alpha", lambda v: 0 < v < math.inf, "above 0"),
    ("dropout", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("targets", bool, "at least one name"),
]


@dataclass(frozen=True)
class LoRAConfig(ValidatedConfig):
    """How an adapter is made.

    Attributes:
        rank: r, the width of A and B between each other.
        alpha: what A and B give is multiplied by alpha / r.
        targets: which matrices get one: the ends of their names as other people call them, such as "q_proj", or
            "all-linear" for all in the blocks.
        dropout: probability of dropping an element of what A gets.
        rank_stabilised: multiply by alpha / sqrt(r) instead, which lets high ranks learn as fast as low ones.
        dora: columns have lengths that learn.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    rank_stabilised: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        self._check(RULES)


class Part(NamedTuple):
    """One pair of A and B.

    Attributes:
        name: of the layer that it belongs to, as other people call it.
        start, stop: the columns of the result that it adds to.
        rank: r.
        scale: what it gives is multiplied by this.
    """

    name: str
    start: int
    stop: int
    rank: int
    scale: float


class LowRank(Layer):
    """The small matrices of one layer: A of all parts side by side, and B of each.

    Attributes:
        magnitudes: of DoRA, the length of each column, (out,) for each part; else nothing.

    Args:
        from_size, to_size: of the layer.
        parts: in the order of their columns.
        dropout: as of `LoRAConfig`.
        generator: draws A, and what is dropped.
    """

    def __init__(
        self, from_size: int, to_size: int, parts: Sequence[Part], dropout: float, generator: np.random.Generator
    ) -> None:
        self.to_size = to_size
        self.parts = tuple(parts)
        bound = 1 / math.sqrt(from_size)  # as a linear layer of PyTorch begins, for others begin so
        n_ranks = sum(part.rank for part in self.parts)
        self.down = Parameter(generator.uniform(-bound, bound, (from_size, n_ranks)).astype(np.float32), "matrix")
        self.ups = [Parameter(np.zeros((p.rank, p.stop - p.start), np.float32), "matrix") for p in self.parts]
        self.magnitudes: list[Parameter] = []
        self.dropout = Dropout(dropout, generator)

    def ranks(self) -> Iterator[tuple[Part, slice, Tensor]]:
        """Each part, its columns of A, and its B."""
        start = 0
        for part, up in zip(self.parts, self.ups):
            yield part, slice(start, start + part.rank), up
            start += part.rank

    def learn_lengths(self, base: Dense) -> None:
        """Make it DoRA, which begins with the lengths that the columns of a layer have, as B begins with zeros."""
        lengths = np.sqrt(to_cpu(column_squares(base.weights)))
        self.magnitudes = [Parameter(lengths[part.start : part.stop].copy(), "gain") for part in self.parts]

    def lengths(self, weights: Tensor, squares: Array) -> Array:
        """Of the columns of W + s A B, (out,), which is never made: of their squares we have those of W, and to these
        come 2 s (Wᵀ A) B and s² Bᵀ (Aᵀ A) B.

        Args:
            weights: W. squares: of its columns, as `column_squares` gives them.
        """
        down = self.down.array
        crossed = linear(Tensor(down.T.copy(), False), Tensor(weights.array, False)).array  # (R, out)
        total = squares.copy()
        for part, ranks, up in self.ranks():
            columns, a, b = slice(part.start, part.stop), down[:, ranks], up.array
            more = 2 * crossed[ranks, columns] + part.scale * ((a.T @ a) @ b)
            total[columns] += part.scale * (more * b).sum(axis=0)
        return array_module(total).sqrt(total)

    def merged(self, base: Dense) -> np.ndarray:
        """The matrix (in, out) of a layer and of this together."""
        total = base.weights.numpy() + self.matrix()
        for part, magnitude in zip(self.parts, self.magnitudes):
            columns = total[:, part.start : part.stop]
            columns *= magnitude.numpy() / np.linalg.norm(columns, axis=0)
        return total

    def matrix(self) -> np.ndarray:
        """What it adds to a layer's matrix, (in, out), but for lengths."""
        total = np.zeros((self.down.shape[0], self.to_size), np.float32)
        for part, ranks, up in self.ranks():
            total[:, part.start : part.stop] = part.scale * (self.down.numpy()[:, ranks] @ up.numpy())
        return total


class AdaptedDense(Dense):
    """A layer whose matrix and bias are those of another one and stay as they are, with small matrices beside them.

    Args:
        base: the other one.
        low_rank: the small matrices, which learn.
    """

    def __init__(self, base: Dense, low_rank: LowRank) -> None:
        self.from_size = base.from_size
        self.to_size = base.to_size
        self.weights = base.weights
        self.bias = base.bias
        self.low_rank = low_rank
        self._squares: tuple[Any, int, Array] | None = None
        self.precision = base.precision
        self.training = base.training

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_squares": None}

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """(..., from_size) to (..., to_size), in the dtype of x W unless another is given.

        Raises:
            ValueError: the matrix or the bias is to learn.
        """
        x = as_tensor(x, self.weights)
        if self.weights.requires_grad or (self.bias is not None and self.bias.requires_grad):
            raise ValueError("AdaptedDense: expected a frozen matrix with small ones beside it; freeze() or merge()")
        low_rank = self.low_rank
        bias = None if low_rank.magnitudes else self.bias
        if low_rank.training and low_rank.dropout.probability:
            delta = low_rank_linear(low_rank.dropout(x), None, low_rank, self.precision)
            y = linear(x, self.weights, bias, "dense", self.precision) + delta
        else:
            y = low_rank_linear(x, self, low_rank, self.precision)
        y = self._with_lengths(y) if low_rank.magnitudes else y
        if dtype is None or dtype == y.dtype:
            return y
        return record(y.array.astype(dtype), (y,), lambda grad, needs_grad: (grad.astype(y.dtype),), "dense")

    def _with_lengths(self, y: Tensor) -> Tensor:
        """Columns of x (W + s A B) with lengths that learn, and b. For gradients the lengths that they have are
        constants, as in section 4.3 of the paper.
        """
        low_rank = self.low_rank
        lengths = low_rank.lengths(self.weights, self._column_squares())
        parts = [slice(part.start, part.stop) for part in low_rank.parts]
        factor = array_module(lengths).ones_like(lengths)
        for columns, magnitude in zip(parts, low_rank.magnitudes):
            factor[columns] = magnitude.array / lengths[columns]
        dtype, plain = y.dtype, y.array
        values = plain * factor if self.bias is None else plain * factor + self.bias.array

        def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array]:
            sums = (grad * plain).reshape(-1, self.to_size).sum(axis=0) / lengths
            return [(grad * factor).astype(dtype, copy=False), *(sums[columns] for columns in parts)]

        return record(values.astype(dtype, copy=False), (y, *low_rank.magnitudes), backward, "dense")

    def _column_squares(self) -> Array:
        """Return `column_squares` of the matrix.

        Cache: valid while the matrix is the same array and `increment_versions` has not been told of a change.
        """
        weights = self.weights
        if self._squares is None or self._squares[0] is not weights.array or self._squares[1] != weights._version:
            self._squares = weights.array, weights._version, column_squares(weights)
        return self._squares[2]


def column_squares(weights: Tensor) -> Array:
    """The sum of squares of each column of a matrix, (out,)."""
    matrix: Any = weights.numpy() if isinstance(weights.array, QuantizedMatrix) else weights.array
    return array_module(matrix).einsum("ij,ij->j", matrix, matrix)


def low_rank_linear(x: Tensor, base: AdaptedDense | None, low_rank: LowRank, precision: str) -> Tensor:
    """x W + b + s (x A) B as one node of the graph, with gradients for x, A and B.

    Args:
        x: (..., in).
        base: holds W and b; without, they are left out, and of DoRA b is left out in any case.

    Returns:
        (..., out), in the dtype of x W.
    """
    from_size = low_rank.down.shape[0]
    to_size = low_rank.to_size
    check_last_axis(f"Dense(from_size={from_size})", x, from_size)
    parts = [(part, ranks, kernels.matmul_operand(up.array, precision)) for part, ranks, up in low_rank.ranks()]
    down = kernels.matmul_operand(low_rank.down.array, precision)
    rows = as_floating(x.array).reshape(math.prod(x.shape[:-1]), from_size)
    kept = rows.dtype if rows.dtype.itemsize == 2 else None  # activations stay as small as they are
    wide, rows = rows, kernels.matmul_operand(rows, precision)
    hidden = kernels.matmul_operand(_scaled(_product(rows, down, precision), parts), precision)  # (N, R)
    bias = None if base is None or base.bias is None or low_rank.magnitudes else base.bias.array
    y = x.xp.zeros((len(wide), to_size), wide.dtype)
    if base is not None:
        y = _base_product(wide, rows, base, bias, precision)
    for part, ranks, up in parts:
        _add(y[:, part.start : part.stop], _product(hidden[:, ranks], up, precision))

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
        dy = kernels.matmul_operand(grad.reshape(len(rows), to_size), precision)
        dhiddens, dups = [], []
        for part, ranks, up in parts:
            dpart = dy[:, part.start : part.stop]
            dhiddens.append(_product(dpart, up.T, precision))
            dups.append(_product(hidden[:, ranks].T, dpart, precision))
        dhidden = kernels.matmul_operand(_scaled(x.xp.concatenate(dhiddens, axis=1), parts), precision)
        ddown = _product(rows.T, dhidden, precision)
        if not needs_grad[0]:
            return [None, ddown, *dups]
        dx = _product(dhidden, down.T, precision)
        if base is not None:
            few, dx = dx, kernels.matmul(dy, _frozen(base, precision).T, None, None, kept, precision)
            _add(dx, few)
        return [dx.reshape(x.shape), ddown, *dups]

    return record(y.reshape(*x.shape[:-1], to_size), (x, low_rank.down, *low_rank.ups), backward, "dense")


def _product(a: Array, b: Array, precision: str) -> Array:
    """a b of operands of that precision, in float32 or wider."""
    return kernels.matmul(a, b, None, None, None, precision)


def _scaled(hidden: Array, parts: Sequence[tuple[Part, slice, Array]]) -> Array:
    """(N, R) in place, the columns of each part times its scale."""
    for part, ranks, _ in parts:
        hidden[:, ranks] *= part.scale
    return hidden


def _add(total: Array, more: Array) -> None:
    """In place; sums are rounded to the dtype that is there."""
    if total.dtype == more.dtype:
        total += more
    else:
        total[...] = total.astype(more.dtype) + more


def _base_product(wide: Array, rows: Array, base: Dense, bias: Array | None, precision: str) -> Array:
    """x W + b, a new array (N, out).

    Args:
        wide, rows: x (N, in), and as an operand of that precision.
    """
    matrix: Any = base.weights.array
    if isinstance(matrix, QuantizedMatrix) and (matrix.dtype.name != precision or len(wide) <= FEW_ROWS):
        return quantized_matmul(wide, matrix, bias, precision)
    kept = wide.dtype if wide.dtype.itemsize == 2 else None
    return kernels.matmul(rows, _frozen(base, precision), bias, None, kept, precision)


def _frozen(base: Dense, precision: str) -> Array:
    """The matrix of a layer as an operand: made anew each time, for to keep it would take more memory. One that has the
    precision's own 16 bits is not copied.
    """
    matrix: Any = base.weights.array
    if isinstance(matrix, QuantizedMatrix):
        matrix = matrix.stored_values() if matrix.dtype.name == precision else np.asarray(matrix)
    return kernels.matmul_operand(matrix, precision)


# -------------------------------------------------------------------- on a model
class _Held:
    """What a Layer has hold of without being made of it."""

    def __init__(self, model: Layer) -> None:
        self.model = model


class Adapter(Layer):
    """The small matrices of a whole model. It is a layer that is made of these alone: they are its parameters.

    While it is on a model the model computes with it and everything else is frozen. Several adapters may be made for a
    model, and one at a time be on.

    Args:
        model: its layers keep their matrices.
        low_ranks: by the names of layers, which are Dense.
        config: how it was made.

    Attributes:
        is_on: whether the model computes with it.
        base_name: where the model comes from, for who reads the adapter's files.

    Raises:
        ValueError: a name of no Dense layer.
    """

    def __init__(self, model: Layer, low_ranks: Mapping[str, LowRank], config: LoRAConfig, base_name: str = "") -> None:
        self.low_ranks = dict(low_ranks)
        self.config = config
        self.base_name = base_name
        self.is_on = False
        self._is_merged = False
        self._held = _Held(model)
        layers = dict(model.named_layers())
        for name in self.low_ranks:
            if not isinstance(layers.get(name), Dense):
                raise ValueError(f"Adapter: expected the name of a Dense layer, got {name!r}")

    @property
    def model(self) -> Any:
        return self._held.model

    def put_on(self) -> Adapter:
        """Let the model compute with it; returns self.

        Raises:
            ValueError: there is another one on the model, or `merge` has made this one a part of its matrices.
        """
        if self._is_merged:
            raise ValueError("Adapter.put_on: expected an adapter that is not merged, got one that the model contains")
        if self.is_on:
            return self
        if any(isinstance(layer, AdaptedDense) for layer in self.model.layers()):
            raise ValueError("Adapter.put_on: expected a model without an adapter on it: take_off() the other first")
        self.model.freeze()
        layers = dict(self.model.named_layers())
        for name, low_rank in self.low_ranks.items():
            base: Any = layers[name]
            (low_rank.train if base.training else low_rank.eval)()
            for parameter in low_rank.parameters():
                parameter.requires_grad = True
                if base.weights.on_gpu:
                    parameter.to_gpu(base.weights.array.device.id)
            _replace(layers, name, AdaptedDense(base, low_rank))
        self.is_on = True
        return self

    def take_off(self) -> Adapter:
        """Let the model compute as before, still frozen; returns self, which can be put on again."""
        layers = dict(self.model.named_layers())
        for name in self.low_ranks if self.is_on else ():
            _replace(layers, name, _plain(layers[name]))
        self.is_on = False
        return self

    def merge(self) -> Any:
        """Add what it says to the model's own matrices for good, and take it off; returns the model.

        The matrices that it changes have 32 bits afterwards, for fewer would round the change away.

        Raises:
            ValueError: as of `put_on`; so it is merged once.
        """
        self.put_on()
        self.take_off()
        self._is_merged = True
        layers = dict(self.model.named_layers())
        for name, low_rank in self.low_ranks.items():
            base: Any = layers[name]
            merged = low_rank.merged(base)
            if isinstance(base.weights.array, QuantizedMatrix):
                base.weights.array = merged
            else:
                base.weights.array[...] = base.weights.xp.asarray(merged)
                increment_versions([base.weights])
        return self.model


def _replace(layers: Mapping[str, Layer], name: str, layer: Layer) -> None:
    """Put another layer where the one of that name is."""
    parent, _, attribute = name.rpartition(".")
    setattr(layers[parent], attribute, layer)


def _plain(adapted: Any) -> Dense:
    """The layer that an adapted one was made of."""
    plain = Dense.__new__(Dense)
    for name in ("from_size", "to_size", "weights", "bias", "precision", "training"):
        setattr(plain, name, getattr(adapted, name))
    return plain
