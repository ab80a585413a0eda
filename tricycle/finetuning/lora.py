"""LoRA and DoRA adapters: small trainable matrices that are added to the frozen weights of dense layers.

A layer x W + b becomes x W + b + s (x A) B, where A is (in, R) and B is (R, out) with a small rank R. Only A and B are
trained, so gradients, optimizer state and files are small, and W may be quantized. B is initialized to zeros, so that
a new adapter does not change the model.

One matrix of Tricycle may contain several matrices of other libraries, such as those of queries, keys and values, each
with its own A and B. A layer therefore has one or several pairs, each for a range of output columns (`LoRATarget`).

DoRA also trains the norm m of each column: m (W + s A B) / |W + s A B|.

`tricycle.pretrained.adapters` creates, loads and saves adapters; `tricycle finetune` trains them.

Sources: Hu et al. 2021, "LoRA"; rank-stabilised: Kalajdzievski 2023; quantized weights: Dettmers et al. 2023, "QLoRA";
Liu et al. 2024, "DoRA: weight-decomposed low-rank adaptation".

Shapes: N rows, R sum of the ranks of all targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, increment_versions
from tricycle.configs.validated import Rule, ValidatedConfig
from tricycle.create_graph import scatter, unfused
from tricycle.devices import Array, array_module, to_cpu
from tricycle.functions import linear
from tricycle.kernels import FEW_ROWS
from tricycle.kernels.low_rank import add_matmul
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
    """Hyper-parameters of an adapter.

    Attributes:
        rank: r, the number of columns of A and of rows of B.
        alpha: the product with A and B is multiplied by alpha / r.
        targets: the matrices to adapt: ends of their names in Hugging Face's model, such as "q_proj", or "all-linear"
            for all matrices in the blocks, as in PEFT without stacked experts and their routers.
        dropout: the probability of zeroing an element of A's input.
        rank_stabilised: multiply by alpha / sqrt(r) instead, so that the update does not shrink with the rank.
        dora: train the norms of the columns (DoRA).
    """

    rules = RULES
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    rank_stabilised: bool = False
    dora: bool = False


class LoRATarget(NamedTuple):
    """The output columns of a layer that one pair of A and B adapts.

    Attributes:
        name: of the adapted layer in Hugging Face's model.
        start, stop: the range of output columns.
        rank: r.
        scale: s, the factor of (x A) B.
    """

    name: str
    start: int
    stop: int
    rank: int
    scale: float


class LowRankUpdate(Layer):
    """The trainable matrices of one layer: A of all targets in one array, and B of each target.

    Attributes:
        down: A of all targets, (in, R).
        ups: B of each target, (rank, stop - start).
        magnitudes: for DoRA the norms of each target's columns, (stop - start,); otherwise empty.

    Args:
        from_size, to_size: the sizes of the layer.
        targets: in the order of their columns.
        dropout: as of `LoRAConfig`.
        generator: initializes A and draws the dropout masks.
    """

    def __init__(
        self,
        from_size: int,
        to_size: int,
        targets: Sequence[LoRATarget],
        dropout: float,
        generator: np.random.Generator,
    ) -> None:
        self.to_size = to_size
        self.targets = tuple(targets)
        bound = 1 / math.sqrt(from_size)  # PyTorch's initialization of linear layers, which PEFT uses
        n_ranks = sum(target.rank for target in self.targets)
        self.down = Parameter(generator.uniform(-bound, bound, (from_size, n_ranks)).astype(np.float32), "matrix")
        self.ups = [Parameter(np.zeros((t.rank, t.stop - t.start), np.float32), "matrix") for t in self.targets]
        self.magnitudes: list[Parameter] = []
        self.dropout = Dropout(dropout, generator)

    def factors(self) -> Iterator[tuple[LoRATarget, slice, Tensor]]:
        """Yield (target, slice of its columns of A, its B) for each target."""
        start = 0
        for target, up in zip(self.targets, self.ups):
            yield target, slice(start, start + target.rank), up
            start += target.rank

    def init_dora_magnitudes(self, base: Dense) -> None:
        """Set `magnitudes`, DoRA's, to parameters with the column norms of a layer's weights, one for each target."""
        norms = np.sqrt(to_cpu(squared_column_norms(base.weights)))
        self.magnitudes = [Parameter(norms[t.start : t.stop].copy(), "gain") for t in self.targets]

    def column_norms(self, weights: Tensor, squared_norms: Array) -> Array:
        """Compute the column norms (out,) of W + s A B from W and its `squared_norms`, without computing this matrix.

        The squared norms are those of W plus the diagonals of 2 s (Wᵀ A) B and s² Bᵀ (Aᵀ A) B.

        Args:
            weights: W.
            squared_norms: the squared column norms of W, from `squared_column_norms`.
        """
        down = self.down.array
        a_weights = linear(Tensor(down.T.copy(), False), Tensor(weights.array, False)).array  # Aᵀ W, (R, out)
        total = squared_norms.copy()
        for target, ranks, up in self.factors():
            columns, a, b = slice(target.start, target.stop), down[:, ranks], up.array
            terms = 2 * a_weights[ranks, columns] + target.scale * ((a.T @ a) @ b)
            total[columns] += target.scale * (terms * b).sum(axis=0)
        return array_module(total).sqrt(total)

    def merged_weights(self, base: Dense) -> np.ndarray:
        """Return a new array of a layer's weights (in, out) plus this update, for DoRA with the magnitudes applied."""
        total = base.weights.numpy() + self.delta_weights()
        for target, magnitude in zip(self.targets, self.magnitudes):
            columns = total[:, target.start : target.stop]
            columns *= magnitude.numpy() / np.linalg.norm(columns, axis=0)
        return total

    def delta_weights(self) -> np.ndarray:
        """Return s A B of all targets as one matrix (in, out), without DoRA's magnitudes."""
        total = np.zeros((self.down.shape[0], self.to_size), np.float32)
        for target, ranks, up in self.factors():
            total[:, target.start : target.stop] = target.scale * (self.down.numpy()[:, ranks] @ up.numpy())
        return total


class AdaptedDense(Dense):
    """A dense layer with frozen weights and bias and a trainable low-rank update.

    Args:
        base: the layer whose weights and bias are used.
        low_rank: the update.
    """

    def __init__(self, base: Dense, low_rank: LowRankUpdate) -> None:
        _share_weights(base, self)
        self.low_rank = low_rank
        self._squares: tuple[Any, int, Array] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickling, without the cached column norms."""
        return {**vars(self), "_squares": None}

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """Compute x W + b + s (dropout(x) A) B, rescaled by DoRA magnitudes if any; ValueError if W or b is trainable.

        Raises:
            ValueError: the weights or the bias are not frozen.
        """
        x = as_tensor(x, self.weights)
        if self.weights.requires_grad or (self.bias is not None and self.bias.requires_grad):
            advice = "freeze() them, or merge() the adapter"
            raise ValueError(f"AdaptedDense: expected frozen weights, got trainable ones; {advice}")
        low_rank = self.low_rank
        bias = None if low_rank.magnitudes else self.bias
        if low_rank.training and low_rank.dropout.probability:
            delta = adapted_linear(low_rank.dropout(x), None, low_rank, self.precision)
            y = linear(x, self.weights, bias, "dense", self.precision) + delta
        else:
            y = adapted_linear(x, self, low_rank, self.precision)
        y = self._apply_magnitudes(y) if low_rank.magnitudes else y
        if dtype is None or dtype == y.dtype:
            return y
        return record(y.array.astype(dtype), (y,), lambda grad, needs_grad: (grad.astype(y.dtype),), "dense")

    def _apply_magnitudes(self, y: Tensor) -> Tensor:
        """Scale the columns of y = x (W + s A B) by DoRA's magnitudes over their norms, and add the bias.

        The gradient treats the norms as constants, as in section 4.3 of the paper.
        """
        low_rank = self.low_rank
        norms = low_rank.column_norms(self.weights, self._squared_column_norms())
        ranges = [slice(target.start, target.stop) for target in low_rank.targets]
        factor = array_module(norms).ones_like(norms)
        for columns, magnitude in zip(ranges, low_rank.magnitudes):
            factor[columns] = magnitude.array / norms[columns]
        dtype, plain = y.dtype, y.array
        values = plain * factor if self.bias is None else plain * factor + self.bias.array

        def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array]:
            sums = (grad * plain).reshape(-1, self.to_size).sum(axis=0) / norms
            return [(grad * factor).astype(dtype, copy=False), *(sums[columns] for columns in ranges)]

        return record(values.astype(dtype, copy=False), (y, *low_rank.magnitudes), backward, "dense")

    def _squared_column_norms(self) -> Array:
        """Return `squared_column_norms` of the weights, cached until the array or its version changes."""
        weights = self.weights
        if self._squares is None or self._squares[0] is not weights.array or self._squares[1] != weights._version:
            self._squares = weights.array, weights._version, squared_column_norms(weights)
        return self._squares[2]


@unfused("tricycle.finetuning.lora.AdaptedDense._apply_magnitudes")
def _apply_magnitudes(node: Tensor, v: Any) -> Tensor:
    """Recompute the scaling by DoRA's magnitudes and the bias on Tensors, with the norms as constants."""
    y, *magnitudes = node.args
    factor = v.factor.copy()
    for columns in v.ranges:
        factor[columns] = 0
    scaled = [scatter(m / v.norms[c], (c,), factor, unique=True) for m, c in zip(magnitudes, v.ranges)]
    y = y * sum(scaled, as_tensor(factor))
    return y if v.self.bias is None else y + v.self.bias


def squared_column_norms(weights: Tensor) -> Array:
    """Return the sum of squares of each column of a matrix, (out,)."""
    matrix: Any = weights.numpy() if isinstance(weights.array, QuantizedMatrix) else weights.array
    return array_module(matrix).einsum("ij,ij->j", matrix, matrix)


def adapted_linear(x: Tensor, base: AdaptedDense | None, low_rank: LowRankUpdate, precision: str) -> Tensor:
    """Compute x W + b + s (x A) B (only s (x A) B without `base`) as one graph node, with gradients for x, A and B.

    Args:
        x: (..., in).
        base: contains W and b. Without it the result is s (x A) B. With DoRA magnitudes b is not added here.

    Returns:
        (..., out), in the dtype of x W.
    """
    from_size = low_rank.down.shape[0]
    to_size = low_rank.to_size
    check_last_axis(f"Dense(from_size={from_size})", x, from_size)
    factors = [(target, ranks, kernels.matmul_operand(up.array, precision)) for target, ranks, up in low_rank.factors()]
    down = kernels.matmul_operand(low_rank.down.array, precision)
    rows = as_floating(x.array).reshape(math.prod(x.shape[:-1]), from_size)
    wide, rows = rows, kernels.matmul_operand(rows, precision)
    hidden = kernels.matmul_operand(_scale_hidden(_matmul(rows, down, precision), factors), precision)  # (N, R)
    bias = None if base is None or base.bias is None or low_rank.magnitudes else base.bias.array
    if base is None:
        y = x.xp.zeros((len(wide), to_size), wide.dtype)
    else:
        y = _base_matmul(wide, rows, base.weights.array, bias, precision)
    for target, ranks, up in factors:
        add_matmul(y[:, target.start : target.stop], hidden[:, ranks], up, precision)

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
        wide_dy = grad.reshape(len(rows), to_size)
        dy = kernels.matmul_operand(wide_dy, precision)
        dhiddens, dups = [], []
        for target, ranks, up in factors:
            dcolumns = dy[:, target.start : target.stop]
            dhiddens.append(_matmul(dcolumns, up.T, precision))
            dups.append(_matmul(hidden[:, ranks].T, dcolumns, precision))
        dhidden = kernels.matmul_operand(_scale_hidden(x.xp.concatenate(dhiddens, axis=1), factors), precision)
        ddown = _matmul(rows.T, dhidden, precision)
        if not needs_grad[0]:
            return [None, ddown, *dups]
        if base is None:
            dx = _matmul(dhidden, down.T, precision)
        else:
            dx = _base_matmul(wide_dy, dy, base.weights.array.T, None, precision)
            add_matmul(dx, dhidden, down.T, precision)
        return [dx.reshape(x.shape), ddown, *dups]

    return record(y.reshape(*x.shape[:-1], to_size), (x, low_rank.down, *low_rank.ups), backward, "dense")


@unfused("tricycle.finetuning.lora.adapted_linear")
def _adapted_linear(node: Tensor, v: Any) -> Tensor:
    """Recompute x W + s (x A) B on Tensors, by a product for each matrix; the bias has no gradient, and is left out."""
    x, down, *ups = node.args
    hidden = linear(x, down, precision=v.precision)
    parts = [] if v.base is None else [linear(x, v.base.weights, precision=v.precision)]
    for (target, ranks, _), up in zip(v.factors, ups):
        update = linear(hidden[..., ranks] * target.scale, up, precision=v.precision)
        parts.append(scatter(update, (..., slice(target.start, target.stop)), node.array, unique=True))
    return sum(parts[1:], parts[0])


def _matmul(a: Array, b: Array, precision: str) -> Array:
    """Return the product of two operands of a precision, in float32 or wider."""
    return kernels.matmul(a, b, None, None, None, precision)


def _scale_hidden(hidden: Array, factors: Sequence[tuple[LoRATarget, slice, Array]]) -> Array:
    """Multiply the columns of each target in (N, R) by its scale, in place; return the array."""
    for target, ranks, _ in factors:
        hidden[:, ranks] *= target.scale
    return hidden


def _base_matmul(wide: Array, rows: Array, matrix: Any, bias: Array | None, precision: str) -> Array:
    """Return x W + b as a new array (N, out) for frozen weights, which may be quantized.

    Args:
        wide: x, (N, in).
        rows: x as an operand of the precision.
        matrix: W. It is not copied as a whole, unless `kernels.matmul_operand` has to convert it.
    """
    if isinstance(matrix, QuantizedMatrix):
        if matrix.dtype.name != precision or len(wide) <= FEW_ROWS:
            return quantized_matmul(wide, matrix, bias, precision)
        matrix = matrix.stored_values()
    activation_dtype = wide.dtype if wide.dtype.itemsize == 2 else None
    return kernels.matmul(rows, kernels.matmul_operand(matrix, precision), bias, None, activation_dtype, precision)


# -------------------------------------------------------------------- the adapter of a model
class Adapter(Layer):
    """The low-rank updates of a model: a layer whose only parameters are the trainable matrices.

    While an adapter is attached, the model computes with it, and all other parameters are frozen. A model may have
    several adapters, of which at most one is attached.

    Args:
        model: the model; its layers keep their weights.
        low_ranks: the updates by the names of Dense layers.
        config: the hyper-parameters.
        base_name: the name or path of the model, which is written to the adapter's files.

    Attributes:
        is_attached: whether the model computes with the adapter.

    Raises:
        ValueError: a name does not belong to a Dense layer.
    """

    def __init__(
        self, model: Layer, low_ranks: Mapping[str, LowRankUpdate], config: LoRAConfig, base_name: str = ""
    ) -> None:
        self.low_ranks = dict(low_ranks)
        self.config = config
        self.base_name = base_name
        self.is_attached = False
        self._is_merged = False
        self._model_reference = SimpleNamespace(model=model)  # not a layer of this one
        layers = dict(model.named_layers())
        for name in self.low_ranks:
            if not isinstance(layers.get(name), Dense):
                raise ValueError(f"Adapter: expected the name of a Dense layer, got {name!r}")

    @property
    def model(self) -> Any:
        """The model for which the adapter was created."""
        return self._model_reference.model

    def attach(self) -> Adapter:
        """Adapt layers, freeze all other parameters, return self; ValueError if merged, or another is attached."""
        if self._is_merged:
            raise ValueError("Adapter.attach: expected an adapter that is not merged, got a merged one; load it again")
        if self.is_attached:
            return self
        if any(isinstance(layer, AdaptedDense) for layer in self.model.layers()):
            raise ValueError("Adapter.attach: expected a model without an adapter, got one; detach() that one first")
        self.model.freeze()
        layers = dict(self.model.named_layers())
        for name, low_rank in self.low_ranks.items():
            base: Any = layers[name]
            low_rank.train(vars(base).get("training", True))  # as set: `base.training` is False within `evaluation`
            for parameter in low_rank.parameters():
                parameter.requires_grad = True
                if base.weights.on_gpu:
                    parameter.to_gpu(base.weights.array.device.id)
            _replace_layer(layers, name, AdaptedDense(base, low_rank))
        self.is_attached = True
        return self

    def detach(self) -> Adapter:
        """Make the model compute without the adapter, by Dense layers; return self; all parameters remain frozen."""
        layers = dict(self.model.named_layers())
        for name in self.low_ranks if self.is_attached else ():
            _replace_layer(layers, name, _share_weights(layers[name], Dense.__new__(Dense)))
        self.is_attached = False
        return self

    def merge(self) -> Any:
        """Add updates to the weights in place (quantized: as float32); detach; return the model; ValueError if done.

        Quantized and 16-bit weights become float32, because rounding would remove small updates.

        Raises:
            ValueError: another adapter is attached, or this one has been merged before.
        """
        self.attach()
        self.detach()
        self._is_merged = True
        layers = dict(self.model.named_layers())
        for name, low_rank in self.low_ranks.items():
            base: Any = layers[name]
            merged = low_rank.merged_weights(base)
            if isinstance(base.weights.array, QuantizedMatrix):
                base.weights.array = merged
            else:
                base.weights.array[...] = base.weights.xp.asarray(merged)
                increment_versions([base.weights])
        return self.model


def _replace_layer(layers: Mapping[str, Layer], name: str, layer: Layer) -> None:
    """Replace the layer with a dotted name by another, as an attribute of its parent in `layers`."""
    parent, _, attribute = name.rpartition(".")
    if parent in layers:
        setattr(layers[parent], attribute, layer)
    else:  # in a list
        owner, _, container = parent.rpartition(".")
        getattr(layers[owner], container)[int(attribute)] = layer


def _share_weights(layer: Dense, other: Dense) -> Dense:
    """Give another layer the weights and settings of a dense layer, without an update, and return it."""
    names = ("from_size", "to_size", "weights", "bias", "precision", "training")
    vars(other).update({name: value for name, value in vars(layer).items() if name in names})
    return other
