"""`Layer`, the base of everything with weights, and the layers that models are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tricycle import backend, kernels
from tricycle.backend import Array
from tricycle.functions import check_precision, linear, shared_backward
from tricycle.initialisers import Initialiser, normal, xavier
from tricycle.ops import as_tensor, check_device, check_range, check_width, floating, positive
from tricycle.tensor import Operand, Tensor, no_grad, record, to_tensor

if TYPE_CHECKING:
    from tricycle.optimisers import Optimiser


class Layer:
    """Something with parameters that maps Tensors to Tensors.

    A subclass sets its parameters (Tensors) and inner layers (alone, or in lists, tuples or dicts) as
    attributes and defines `forward`. One walk over these attributes gives parameters, moves, state and
    printing.
    """

    training: bool = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # a Tensor, or several
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # ---------------------------------------------------------------- the walk
    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Every Tensor and Layer that is an attribute, or stands in a container that is, with its name."""
        for name, value in vars(self).items():
            yield from _unpack(name, value)

    def layers(self) -> Iterator[Layer]:
        """This layer and all inside it, each once."""
        return (layer for _, layer in self.named_layers())

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """This layer, as "", and all inside it, each once under the first of its names, such as "blocks.0.mlp"."""
        seen: set[int] = set()

        def walk(layer: Layer, prefix: str) -> Iterator[tuple[str, Layer]]:
            if id(layer) not in seen:
                seen.add(id(layer))
                yield prefix.removesuffix("."), layer
                for name, part in layer._parts():
                    if isinstance(part, Layer):
                        yield from walk(part, f"{prefix}{name}.")

        return walk(self, "")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter once, under the first of its names, such as "blocks.0.attention.projection.weights"."""
        seen: set[int] = set()

        def walk(layer: Layer, prefix: str) -> Iterator[tuple[str, Tensor]]:
            for name, part in layer._parts():
                if isinstance(part, Layer):
                    yield from walk(part, f"{prefix}{name}.")
                elif id(part) not in seen:
                    seen.add(id(part))
                    yield prefix + name, part

        return walk(self, "")

    def parameters(self) -> Iterator[Tensor]:
        """Each parameter once."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def n_parameters(self) -> int:
        """How many numbers the parameters hold; shared ones count once."""
        return sum(parameter.size for parameter in self.parameters())

    # ---------------------------------------------------------------- training
    def train(self) -> Layer:
        """Turn dropout on; returns self."""
        return self._set_training(True)

    def eval(self) -> Layer:
        """Turn dropout off; returns self."""
        return self._set_training(False)

    def _set_training(self, training: bool) -> Layer:
        for layer in self.layers():
            layer.training = training
        return self

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def update(self, optimiser: Optimiser) -> None:
        """Let the optimiser change every parameter that has a gradient, once, and forget the gradients."""
        optimiser.update(self.named_parameters())
        self.zero_grad()

    def freeze(self) -> Layer:
        """Keep all parameters as they are: no gradient, no update; returns self."""
        return self._set_requires_grad(False)

    def unfreeze(self) -> Layer:
        """Let all parameters learn again; returns self."""
        return self._set_requires_grad(True)

    def _set_requires_grad(self, requires_grad: bool) -> Layer:
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
            parameter.zero_grad()
        return self

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within this block dropout is off and nothing is remembered for gradients."""
        was_training = self.training
        self.eval()
        try:
            with no_grad():
                yield
        finally:
            self._set_training(was_training)

    def use_precision(self, precision: str) -> Layer:
        """Let every `Dense` in here multiply at this precision from now on; returns self.

        Raises:
            ValueError: not in `functions.PRECISIONS`.
        """
        for layer in self.layers():
            if isinstance(layer, Dense):
                layer.precision = check_precision(precision)
        return self

    # ---------------------------------------------------------------- moving and state
    def place(self, ids: Any) -> Tensor:
        """Whole numbers as a Tensor on the device of the parameters."""
        tensor, like = ids if isinstance(ids, Tensor) else to_tensor(ids, dtype=int), next(self.parameters())
        return tensor.to_gpu(like.array.device.id) if like.on_gpu else tensor

    def to_gpu(self, device: int = 0) -> Layer:
        """Move all parameters to a GPU, in place; returns self."""
        for parameter in self.parameters():
            parameter.to_gpu(device)
        return self

    def from_gpu(self) -> Layer:
        """Move all parameters to host memory, in place; returns self."""
        for parameter in self.parameters():
            parameter.from_gpu()
        return self

    def state_dict(self) -> dict[str, np.ndarray]:
        """The values of all parameters by name, in host memory (not copied where they lie there already)."""
        return {name: parameter.numpy() for name, parameter in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over the values of all parameters.

        Raises:
            ValueError: names every missing, extra, misshapen and non-numeric entry; nothing has changed then.
        """
        parameters = dict(self.named_parameters())
        problems = [f"missing {name}" for name in parameters if name not in state]
        problems += [f"unexpected {name}" for name in state if name not in parameters]
        for name, parameter in parameters.items():
            array = state.get(name, parameter.array)
            if not backend.is_array(array) or not np.can_cast(array.dtype, parameter.dtype, "same_kind"):
                got = array.dtype if backend.is_array(array) else type(array).__name__
                problems.append(f"{name}: expected an array that fits {parameter.dtype}, got {got}")
            elif array.shape != parameter.shape:
                problems.append(f"{name}: expected shape {parameter.shape}, got {array.shape}")
        if problems:
            raise ValueError(f"{type(self).__name__}.load_state_dict: {'; '.join(problems)}")
        for name, array in state.items():
            array = backend.to_cpu(array)
            own = parameters[name].array
            own[...] = array if isinstance(own, np.ndarray) else parameters[name].xp.asarray(array)

    # ---------------------------------------------------------------- printing
    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}: {self.n_parameters:,} parameters"]
        for name, part in self._parts():
            if isinstance(part, Tensor):
                lines.append(f"  {name} {part.shape}")
            else:
                head, *rest = repr(part).splitlines()
                lines += [f"  {name} {head}", *(f"  {line}" for line in rest)]
        return "\n".join(lines)


def _unpack(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, Layer)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _unpack(f"{name}.{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unpack(f"{name}.{key}", item)


Generator = np.random.Generator | int | None


def new_generator(generator: Generator) -> np.random.Generator:
    """A generator as it is, one made from a seed, or for None one that differs from run to run."""
    return np.random.default_rng(generator)


class Dense(Layer):
    """x W + b over the last axis.

    Args:
        from_size, to_size: length of the last axis before and after.
        bias: add a vector b, which starts at 0.
        initialiser: first values of W.
        generator: a NumPy generator or a seed.

    Attributes:
        precision: of the products, as `Layer.use_precision` sets it.
    """

    precision = "float32"

    def __init__(
        self, from_size: int, to_size: int, bias: bool = True, initialiser: Initialiser = xavier,
        generator: np.random.Generator | int | None = None,
    ) -> None:
        positive("Dense", from_size=from_size, to_size=to_size)
        self.from_size, self.to_size = from_size, to_size
        self.weights = to_tensor(initialiser((from_size, to_size), new_generator(generator)))
        self.bias = to_tensor(np.zeros(to_size, np.float32)) if bias else None

    def forward(self, x: Operand) -> Tensor:
        """(..., from_size) to (..., to_size)."""
        return linear(as_tensor(x, self.weights), self.weights, self.bias, "dense", self.precision)


class Embedding(Layer):
    """A table that gives a vector for each id.

    Args:
        from_size: how many ids there are.
        to_size: length of the vectors.
    """

    def __init__(
        self, from_size: int, to_size: int, initialiser: Initialiser | None = None,
        generator: np.random.Generator | int | None = None,
    ) -> None:
        positive("Embedding", from_size=from_size, to_size=to_size)
        self.from_size, self.to_size = from_size, to_size
        self.weights = to_tensor((initialiser or normal(1.0))((from_size, to_size), new_generator(generator)))

    def forward(self, ids: Operand) -> Tensor:
        """Whole numbers (...) to vectors (..., to_size).

        Raises:
            ValueError: ids that are not whole numbers from 0 to from_size - 1 (checked in host memory only).
        """
        ids = as_tensor(ids)
        table, index = self.weights.array, ids.array
        if index.dtype.kind not in "iu":
            raise ValueError(f"Embedding: expected whole numbers (dtype=int) as ids, got {index.dtype}")
        check_device("Embedding", table, index)
        check_range(f"Embedding(from_size={self.from_size})", index, self.from_size)

        def back_fn(grad: Tensor) -> Array:
            rows = grad.array.reshape(-1, self.to_size)
            return kernels.embedding_backward(rows, index.reshape(-1), self.from_size)

        return record(table[index], (self.weights,), (back_fn,), "embedding", ids.is_batched)


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * gain + bias over the last axis (Ba et al. 2016).

    Args:
        size: length of the last axis.
        bias: add a learned vector.
    """

    _centred, _name = True, "layer_norm"

    def __init__(self, size: int, bias: bool = True, eps: float = 1e-5) -> None:
        positive(type(self).__name__, size=size)
        if not eps > 0:
            raise ValueError(f"{type(self).__name__}: expected an eps above 0, got {eps!r}")
        self.size, self.eps = size, eps
        self.gain = to_tensor(np.ones(size, np.float32))
        self.bias = to_tensor(np.zeros(size, np.float32)) if bias else None

    def forward(self, x: Operand) -> Tensor:
        """(..., size) to (..., size)."""
        x = as_tensor(x, self.gain)
        check_width(f"{type(self).__name__}(size={self.size})", x, self.size)
        array, gain, centred = floating(x.array), self.gain.array, self._centred
        check_device(self._name, array, gain)
        bias = None if self.bias is None else self.bias.array
        y, mean, scale = kernels.layer_norm(array, gain, bias, self.eps, centred)
        args = (x, self.gain) if self.bias is None else (x, self.gain, self.bias)
        back_fns = shared_backward(
            lambda grad: kernels.layer_norm_backward(grad, array, gain, mean, scale, centred), len(args)
        )
        return record(y, args, back_fns, self._name)


class RMSNorm(LayerNorm):
    """x / sqrt(mean square + eps) * gain over the last axis: a layer norm that neither centres nor shifts.

    Source: Zhang and Sennrich 2019.
    """

    _centred, _name = False, "rms_norm"

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__(size, False, eps)


class Dropout(Layer):
    """While training, set each element to 0 with a probability and scale the others up to keep the mean.

    Args:
        probability: from 0 (never) to below 1.
        generator: a NumPy generator or a seed; layers of one model may share a generator.
    """

    def __init__(self, probability: float, generator: np.random.Generator | int | None = None) -> None:
        if not 0 <= probability < 1:
            raise ValueError(f"Dropout: expected a probability from 0 to below 1, got {probability!r}")
        self.probability = probability
        self.generator = new_generator(generator)

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if not self.training or self.probability == 0:
            return x
        array = floating(x.array)
        mask = kernels.random_mask(array, x.shape, 1 - self.probability, self.generator)
        return record(array * mask, (x,), (lambda grad: grad.array * mask,), "dropout")


class Sequential(Layer):
    """Layers and ops one after another."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        self.steps = list(steps)

    def forward(self, x: Operand) -> Tensor:
        for step in self.steps:
            x = step(x)
        return as_tensor(x)
