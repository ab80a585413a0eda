"""`Layer`, the base class of layers and models, and basic layers: linear, embedding, norms, dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeAlias

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, OwnedGradient, SlicedGradient, evaluation, is_evaluating
from tricycle.devices import Array
from tricycle.functions import PRECISIONS, linear
from tricycle.initialisers import Initialiser, normal, xavier
from tricycle.ops import as_floating, as_tensor, check_device, check_last_axis, check_positive, check_range
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, record, to_tensor

Generator: TypeAlias = "np.random.Generator | int | None"  # or a seed; None for a random seed
MIXTURES: dict[str, Callable[..., Layer]] = {}  # constructors of mixtures of MLPs; `tricycle.experts` adds one


def new_generator(generator: Generator) -> np.random.Generator:
    """Make a random generator from a seed, from the system's entropy for None; return a generator unchanged."""
    return np.random.default_rng(generator)


class Layer:
    """The base of layers and models: a function of Tensors with parameters.

    A subclass defines `forward`. Its parameters and inner layers are attributes, alone or in lists, tuples and dicts. A
    layer may be used in several places, and layers may refer to each other.
    """

    precision: str = "float32"  # of matrix products, set by `use_precision`
    # Defined in `tricycle.state`, with the printed tree.
    freeze: Callable[[], Self]
    unfreeze: Callable[[], Self]
    to_gpu: Callable[..., Self]
    from_gpu: Callable[[], Self]
    state_dict: Callable[[], dict[str, np.ndarray]]
    load_state_dict: Callable[[Mapping[str, np.ndarray]], None]
    run_and_free: Callable[..., Any]

    @property
    def training(self) -> bool:
        """Whether dropout is on, as set by `train` and `eval` (initially on); always off within `evaluation`."""
        return vars(self).get("training", True) and not is_evaluating()

    @training.setter
    def training(self, training: bool) -> None:
        vars(self)["training"] = training

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # a Tensor, or several
        """Compute the result; raise a NotImplementedError unless a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`."""
        return self.forward(*args, **kwargs)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of Tensors and Layers in attributes and nested containers, not inside those Layers."""
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, Layer)):  # a faster special case of the next
                yield name, value
            elif isinstance(value, (list, tuple, dict)):
                yield from (part for part in flatten(name, value) if isinstance(part[1], (Tensor, Layer)))

    def _walk(self, kind: type, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
        """Yield (name, part) of the Tensors or Layers (`kind`) inside, each once, by first name; add ids to `seen`."""
        for name, part in self._parts():
            if id(part) not in seen:
                seen.add(id(part))
                if isinstance(part, kind):
                    yield prefix + name, part
                if isinstance(part, Layer):
                    yield from part._walk(kind, f"{prefix}{name}.", seen)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Yield this layer, named "", and all layers inside it once, with their names ("blocks.0.mlp")."""
        yield "", self
        yield from self._walk(Layer, "", {id(self)})

    def layers(self) -> Iterator[Layer]:
        """Return an iterator over this layer and all layers inside it, each once."""
        return iter([layer for _, layer in self.named_layers()])  # a list, because the caller may set attributes

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over all parameters, each once, with names ("blocks.0.attention.projection.weights")."""
        return self._walk(Tensor, "", {id(self)})

    def parameters(self) -> Iterator[Tensor]:
        """Return an iterator over all parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def n_parameters(self) -> int:
        """The total number of elements of all parameters; shared parameters count once."""
        return sum(parameter.size for parameter in self.parameters())

    def train(self, training: bool = True) -> Self:
        """Enable dropout (disable it with `training=False`) in this layer and all inside; return self."""
        for layer in self.layers():
            layer.training = training
        return self

    def eval(self) -> Self:
        """Disable dropout in this layer and all inside, but not graph building; return self."""
        return self.train(False)

    evaluating = staticmethod(evaluation)  # a context manager that disables dropout and graph building

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def update(self, optimiser: Any) -> None:
        """Update all parameters in place with an optimizer, each once, and set their gradients to None."""
        named_parameters = list(self.named_parameters())
        optimiser.update(named_parameters)
        for _, parameter in named_parameters:
            parameter.zero_grad()

    def use_precision(self, precision: str) -> Self:
        """Set the precision of matrix products, in PRECISIONS (else ValueError), of all layers inside; return self."""
        if precision not in PRECISIONS:
            raise ValueError(f"expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}")
        for layer in self.layers():
            layer.precision = precision
        return self

    def place(self, ids: Any) -> Tensor:
        """Return ids as a Tensor (int64 if not yet one), moved in place to the parameters' GPU if they are on one."""
        tensor, like = ids if isinstance(ids, Tensor) else to_tensor(ids, dtype=int), next(self.parameters())
        return tensor.to_gpu(like.array.device.id) if like.on_gpu else tensor


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, leaf) of nested lists, tuples and dicts, or (name, value) for any other value."""
    if isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten(f"{name}.{key}", item)
    else:
        yield name, value


def generators_in(layer: Layer) -> list[np.random.Generator]:
    """Return the random generators of a layer and all layers inside it, each once."""
    values = (value for inner in layer.layers() for _, value in flatten("", vars(inner)))
    return list({id(value): value for value in values if isinstance(value, np.random.Generator)}.values())


class Dense(Layer):
    """A linear layer, x W + b over the last axis, with weights W (from_size, to_size) and an optional bias b."""

    def __init__(
        self,
        from_size: int,
        to_size: int,
        bias: bool = True,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        role: str = "matrix",
    ) -> None:
        check_positive("Dense", from_size=from_size, to_size=to_size)
        self.from_size, self.to_size = from_size, to_size
        self.weights = Parameter(initialiser((from_size, to_size), new_generator(generator)), role)
        self.bias = Parameter(np.zeros(to_size, np.float32), "bias") if bias else None

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """Map x (..., from_size) to (..., to_size); the result has `dtype`, by default the dtype of x W."""
        x = x if isinstance(x, Tensor) else as_tensor(x, self.weights)
        return linear(x, self.weights, self.bias, "dense", self.precision, dtype)


class Embedding(Layer):
    """A lookup table with a vector of length to_size for each of from_size ids."""

    def __init__(
        self,
        from_size: int,
        to_size: int,
        initialiser: Initialiser | None = None,
        generator: Generator = None,
        role: str = "embedding",
    ) -> None:
        check_positive("Embedding", from_size=from_size, to_size=to_size)
        self.from_size, self.to_size = from_size, to_size
        draw = initialiser or normal(1.0)
        self.weights = Parameter(draw((from_size, to_size), new_generator(generator)), role)

    def forward(self, ids: Operand) -> Tensor:
        """Return rows (..., to_size) of integer ids (...), float32 if of 16 bits; ValueError out of range (on CPUs)."""
        ids = as_tensor(ids)
        table, index = self.weights.array, ids.array
        if index.dtype.kind not in "iu":
            raise ValueError(f"Embedding: expected whole numbers (dtype=int) as ids, got {index.dtype}")
        check_device("Embedding", table, index)
        check_range(f"Embedding(from_size={self.from_size})", index, self.from_size)

        rows = kernels.upcast(table[index])  # a table may be stored in 16 bits
        backward = lambda grad, needs_grad: (SlicedGradient(grad, index),)
        return record(rows, (self.weights,), backward, "embedding", ids.is_batched)


class LayerNorm(Layer):
    """Layer norm over the last axis: (x - mean) / sqrt(variance + eps) * gain + bias (Ba et al. 2016)."""

    _subtract_mean, _name = True, "layer_norm"

    def __init__(self, size: int, bias: bool = True, eps: float = 1e-5) -> None:
        check_positive(type(self).__name__, size=size)
        if not eps > 0:
            raise ValueError(f"{type(self).__name__}: expected an eps above 0, got {eps!r}")
        self.size, self.eps = size, eps
        self.gain: Parameter | None = Parameter(np.ones(size, np.float32), "gain")
        self.bias: Parameter | None = Parameter(np.zeros(size, np.float32), "bias") if bias else None

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """Normalize x (..., size) over the last axis, apply gain and bias; the result has `dtype`, by default x's."""
        x = x if isinstance(x, Tensor) else as_tensor(x, self.gain)
        array, gain = as_floating(x.array), self._gains(x)
        if array.shape[-1:] != (self.size,):
            check_last_axis(f"{type(self).__name__}(size={self.size})", x, self.size)
        if type(array) is not type(gain):
            check_device(self._name, array, gain)
        bias = None if self.bias is None else self.bias.array
        y, mean, scale = kernels.layer_norm(array, gain, bias, self.eps, self._subtract_mean, dtype)
        args = (x,) if self.gain is None else (x, self.gain) if self.bias is None else (x, self.gain, self.bias)

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | OwnedGradient, ...]:
            dx, *others = kernels.layer_norm_backward(grad, array, gain, mean, scale, self._subtract_mean)
            return (OwnedGradient(dx), *others)[: len(args)]

        return record(y, args, backward, self._name)

    def _gains(self, x: Tensor) -> Array:
        """Return the factor of each channel, (C,): the gain, or ones."""
        return x.xp.ones(self.size, np.float32) if self.gain is None else self.gain.array


class RMSNorm(LayerNorm):
    """RMS norm over the last axis: x / sqrt(mean square + eps) * gain (Zhang and Sennrich 2019).

    Without `gain` the factor is 1; with `unit_offset` it is 1 + gain, and the gain starts at 0 (as in Gemma).
    """

    _subtract_mean, _name = False, "rms_norm"

    def __init__(self, size: int, eps: float = 1e-5, gain: bool = True, unit_offset: bool = False) -> None:
        super().__init__(size, False, eps)
        self.unit_offset = unit_offset
        initial = np.zeros if unit_offset else np.ones
        self.gain = Parameter(initial(size, np.float32), "gain") if gain else None

    def _gains(self, x: Tensor) -> Array:
        """Return the factor of each channel, (C,): gain, 1 + gain with `unit_offset`, or ones without a gain."""
        return 1 + self.gain.array if self.unit_offset and self.gain is not None else super()._gains(x)


class Dropout(Layer):
    """Dropout: in training, zero each element with a probability and scale up the others to keep the mean."""

    def __init__(self, probability: float, generator: Generator = None) -> None:
        if not 0 <= probability < 1:
            raise ValueError(f"Dropout: expected a probability from 0 to below 1, got {probability!r}")
        self.probability = probability
        self.generator = new_generator(generator)

    def forward(self, x: Operand) -> Tensor:
        """Apply dropout to x in training, scaled by 1 / (1 - probability); in evaluation or for 0, return x itself."""
        x = as_tensor(x)
        if not self.training or self.probability == 0:
            return x
        array = as_floating(x.array)
        mask = kernels.dropout_mask(array, x.shape, 1 - self.probability, self.generator)
        return record(array * mask, (x,), lambda grad, needs_grad: (grad * mask,), "dropout")


class Sequential(Layer):
    """A sequence of layers and operations, applied one after another."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        self.steps = list(steps)

    def forward(self, x: Operand) -> Tensor:
        """Apply all steps to x in order."""
        for step in self.steps:
            x = step(x)
        return as_tensor(x)
