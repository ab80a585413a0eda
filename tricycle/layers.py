"""`Layer`, the base of everything with weights, and the layers that models are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, OwnedGradient, SlicedGradient, evaluation, is_evaluating
from tricycle.devices import Array, on_gpu
from tricycle.functions import PRECISIONS, linear
from tricycle.initialisers import Initialiser, normal, xavier
from tricycle.ops import as_floating, as_tensor, check_device, check_last_axis, check_positive, check_range
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, record, to_tensor

Generator: TypeAlias = "np.random.Generator | int | None"  # or a seed, or None for another one in each run


def new_generator(generator: Generator) -> np.random.Generator:
    """Return a generator as it is, or one made from a seed."""
    return np.random.default_rng(generator)


class Layer:
    """A map from Tensors to Tensors with parameters.

    A subclass defines `forward` and has its parameters (Parameters, or plain Tensors) and inner layers as attributes,
    alone or in lists, tuples and dicts. A layer may be used in several places, and layers may hold each other.
    """

    precision: str = "float32"  # of matrix products in here, as `use_precision` sets it
    # `tricycle.state` has these methods, and the printed tree.
    freeze: Callable[[], Layer]
    unfreeze: Callable[[], Layer]
    to_gpu: Callable[..., Layer]
    from_gpu: Callable[[], Layer]
    state_dict: Callable[[], dict[str, np.ndarray]]
    load_state_dict: Callable[[Mapping[str, np.ndarray]], None]
    run_and_free: Callable[..., Any]

    @property
    def training(self) -> bool:
        """Whether dropout is on: as `train` and `eval` set it (on at first), but never in a block of `evaluation`."""
        return vars(self).get("training", True) and not is_evaluating()

    @training.setter
    def training(self, training: bool) -> None:
        vars(self)["training"] = training

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # a Tensor, or several
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield every Tensor and Layer among the attributes, and in containers that are, with its name."""
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, Layer)):  # as below, but faster: most of what a small step costs
                yield name, value
            elif isinstance(value, (list, tuple, dict)):
                yield from (part for part in _flatten(name, value) if isinstance(part[1], (Tensor, Layer)))

    def _walk(self, kind: type, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
        """Yield everything of a kind inside (Tensor or Layer), once, under the first of its names."""
        for name, part in self._parts():
            if id(part) not in seen:
                seen.add(id(part))
                if isinstance(part, kind):
                    yield prefix + name, part
                if isinstance(part, Layer):
                    yield from part._walk(kind, f"{prefix}{name}.", seen)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Yield this layer, as "", and all inside it, each once under the first of its names ("blocks.0.mlp")."""
        yield "", self
        yield from self._walk(Layer, "", {id(self)})

    def layers(self) -> Iterator[Layer]:
        return iter([layer for _, layer in self.named_layers()])  # a list, for the caller may set attributes

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter once, under the first of its names ("blocks.0.attention.projection.weights")."""
        return self._walk(Tensor, "", {id(self)})

    def parameters(self) -> Iterator[Tensor]:
        return (parameter for _, parameter in self.named_parameters())

    @property
    def n_parameters(self) -> int:
        """The number of elements of all parameters; shared ones count once."""
        return sum(parameter.size for parameter in self.parameters())

    def train(self, training: bool = True) -> Layer:
        """Turn dropout on; return self."""
        for layer in self.layers():
            layer.training = training
        return self

    def eval(self) -> Layer:
        """Turn dropout off; return self."""
        return self.train(False)

    evaluating = staticmethod(evaluation)  # a block within which dropout is off and no graph is built

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.zero_grad()

    def update(self, optimiser: Any) -> None:
        """Call `optimiser.update` with all named parameters, each once, and clear their gradients."""
        named_parameters = list(self.named_parameters())
        optimiser.update(named_parameters)
        for _, parameter in named_parameters:
            parameter.zero_grad()

    def use_precision(self, precision: str) -> Layer:
        """Let every layer in here multiply matrices at this precision, one of PRECISIONS; return self."""
        if precision not in PRECISIONS:
            raise ValueError(f"expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}")
        for layer in self.layers():
            layer.precision = precision
        return self

    def place(self, ids: Any) -> Tensor:
        """Return integers as a Tensor on the device of the parameters."""
        tensor, like = ids if isinstance(ids, Tensor) else to_tensor(ids, dtype=int), next(self.parameters())
        return tensor.to_gpu(like.array.device.id) if like.on_gpu else tensor


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what nested lists, tuples and dicts contain, or a value that is none, with its name."""
    if isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flatten(f"{name}.{key}", item)
    else:
        yield name, value


def generators_in(layer: Layer) -> list[np.random.Generator]:
    """Return the random generators that a layer and all inside it draw from, each once."""
    values = (value for inner in layer.layers() for _, value in _flatten("", vars(inner)))
    return list({id(value): value for value in values if isinstance(value, np.random.Generator)}.values())


class Dense(Layer):
    """x W + b over the last axis. W is (from_size, to_size); b, if there is a bias, starts at 0."""

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
        """Map (..., from_size) to (..., to_size), in the dtype of x W unless another is given."""
        x = x if isinstance(x, Tensor) else as_tensor(x, self.weights)
        return linear(x, self.weights, self.bias, "dense", self.precision, dtype)


class Embedding(Layer):
    """A table of from_size vectors of length to_size, one for each id."""

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
        """Map integers (...) to vectors (..., to_size); ids on a GPU are not checked to be below from_size."""
        ids = as_tensor(ids)
        table, index = self.weights.array, ids.array
        if index.dtype.kind not in "iu":
            raise ValueError(f"Embedding: expected whole numbers (dtype=int) as ids, got {index.dtype}")
        check_device("Embedding", table, index)
        check_range(f"Embedding(from_size={self.from_size})", index, self.from_size)

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | SlicedGradient]:
            rows, places = grad.reshape(-1, self.to_size), index.reshape(-1)
            if on_gpu(grad) or len(places) >= self.from_size:
                return (kernels.embedding_backward(rows, places, self.from_size),)
            present, places = np.unique(places, return_inverse=True)  # of a large table the rows that were taken
            return (SlicedGradient(kernels.embedding_backward(rows, places, len(present)), present, once=True),)

        rows = table[index]
        rows = rows.astype(np.float32) if rows.dtype.itemsize == 2 else rows  # tables that are kept in 16 bits
        return record(rows, (self.weights,), backward, "embedding", ids.is_batched)


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * gain + bias over the last axis (Ba et al. 2016)."""

    _subtract_mean, _name = True, "layer_norm"

    def __init__(self, size: int, bias: bool = True, eps: float = 1e-5) -> None:
        check_positive(type(self).__name__, size=size)
        if not eps > 0:
            raise ValueError(f"{type(self).__name__}: expected an eps above 0, got {eps!r}")
        self.size, self.eps = size, eps
        self.gain: Parameter | None = Parameter(np.ones(size, np.float32), "gain")
        self.bias: Parameter | None = Parameter(np.zeros(size, np.float32), "bias") if bias else None

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """Map (..., size) to (..., size), in the dtype of x unless another is given."""
        x = x if isinstance(x, Tensor) else as_tensor(x, self.gain)
        array, gain, subtract_mean = as_floating(x.array), self._gains(x), self._subtract_mean
        if array.shape[-1:] != (self.size,):
            check_last_axis(f"{type(self).__name__}(size={self.size})", x, self.size)
        if type(array) is not type(gain):
            check_device(self._name, array, gain)
        bias = None if self.bias is None else self.bias.array
        y, mean, scale = kernels.layer_norm(array, gain, bias, self.eps, subtract_mean, dtype)
        args = (x,) if self.gain is None else (x, self.gain) if self.bias is None else (x, self.gain, self.bias)

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | OwnedGradient, ...]:
            dx, *others = kernels.layer_norm_backward(grad, array, gain, mean, scale, subtract_mean)
            return (OwnedGradient(dx), *others)[: len(args)]

        return record(y, args, backward, self._name)

    def _gains(self, x: Tensor) -> Array:
        """Return what each channel is multiplied by, (C,)."""
        return x.xp.ones(self.size, np.float32) if self.gain is None else self.gain.array


class RMSNorm(LayerNorm):
    """x / sqrt(mean square + eps) * gain over the last axis (Zhang and Sennrich 2019).

    Without `gain` it is 1; with `unit_offset` the factor is 1 + gain, and the gain starts at 0 (as in Gemma).
    """

    _subtract_mean, _name = False, "rms_norm"

    def __init__(self, size: int, eps: float = 1e-5, gain: bool = True, unit_offset: bool = False) -> None:
        super().__init__(size, False, eps)
        self.unit_offset = unit_offset
        initial = np.zeros if unit_offset else np.ones
        self.gain = Parameter(initial(size, np.float32), "gain") if gain else None

    def _gains(self, x: Tensor) -> Array:
        return 1 + self.gain.array if self.unit_offset and self.gain is not None else super()._gains(x)


class Dropout(Layer):
    """While training, set each element to 0 with a probability and scale the others up to keep the mean."""

    def __init__(self, probability: float, generator: Generator = None) -> None:
        if not 0 <= probability < 1:
            raise ValueError(f"Dropout: expected a probability from 0 to below 1, got {probability!r}")
        self.probability = probability
        self.generator = new_generator(generator)

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if not self.training or self.probability == 0:
            return x
        array = as_floating(x.array)
        mask = kernels.dropout_mask(array, x.shape, 1 - self.probability, self.generator)
        return record(array * mask, (x,), lambda grad, needs_grad: (grad * mask,), "dropout")


class Sequential(Layer):
    """Layers and ops one after another."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        self.steps = list(steps)

    def forward(self, x: Operand) -> Tensor:
        for step in self.steps:
            x = step(x)
        return as_tensor(x)
