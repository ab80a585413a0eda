"""`Layer`, the base of everything with weights, and the layers that models are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from tricycle import devices, kernels
from tricycle.autograd import NeedsGrad, OwnedGradient, SlicedGradient, evaluation, increment_versions, is_evaluating
from tricycle.devices import Array, on_gpu
from tricycle.functions import linear
from tricycle.initialisers import Initialiser, normal, xavier
from tricycle.kernels import FewBits
from tricycle.ops import as_tensor, check_device, check_range, check_width, floating, positive
from tricycle.parameter import Parameter
from tricycle.precision import check_precision
from tricycle.tensor import Operand, Tensor, record, to_tensor


class Updater(Protocol):
    """What `Layer.update` needs of an optimiser."""

    def update(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Change every parameter that has a gradient."""


class Layer:
    """Something with parameters that maps Tensors to Tensors.

    A subclass sets its parameters (Parameters, or plain Tensors) and inner layers (alone, or in lists, tuples or
    dicts) as attributes and defines `forward`. One walk over these attributes gives parameters, moves, state and
    printing. Layers may stand in several places, and may hold each other.
    """

    precision: str = "float32"  # of matrix products in here, as `use_precision` sets it

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

    # ---------------------------------------------------------------- the walk
    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Every Tensor and Layer that is an attribute, or stands in a container that is, with its name."""
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, Layer)):  # as `_unpack` would, but this is the most of what small steps cost
                yield name, value
            elif isinstance(value, (list, tuple, dict)):
                yield from _unpack(name, value)

    def layers(self) -> Iterator[Layer]:
        """This layer and all inside it, each once."""
        seen: dict[int, Layer] = {}
        waiting = [self]
        while waiting:
            layer = waiting.pop()
            if id(layer) not in seen:
                seen[id(layer)] = layer
                # turned round, so that the first is the next
                waiting += [part for part in _items(vars(layer).values()) if isinstance(part, Layer)][::-1]
        return iter(seen.values())

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
                if id(part) in seen:
                    continue
                seen.add(id(part))
                if isinstance(part, Layer):
                    yield from walk(part, f"{prefix}{name}.")
                else:
                    yield prefix + name, part

        seen.add(id(self))
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

    def update(self, optimiser: Updater) -> None:
        """Let the optimiser change every parameter that has a gradient, once, and forget the gradients."""
        named_parameters = list(self.named_parameters())
        optimiser.update(named_parameters)
        for _, parameter in named_parameters:
            parameter.zero_grad()

    def freeze(self) -> Layer:
        """Keep all parameters as they are: no gradient, no update; returns self."""
        return self._set_requires_grad(False)

    def unfreeze(self) -> Layer:
        """Let all parameters learn again; returns self.

        Raises:
            ValueError: some are kept in 16 bits or 8, which are too few for the small steps of training.
        """
        narrow = [name for name, parameter in self.named_parameters() if parameter.dtype.itemsize < 4]
        if narrow:
            got = f"{narrow[0]} and {len(narrow) - 1} more" if len(narrow) > 1 else narrow[0]
            raise ValueError(f"{type(self).__name__}.unfreeze: expected weights of 32 bits, fewer has {got}")
        return self._set_requires_grad(True)

    def _set_requires_grad(self, requires_grad: bool) -> Layer:
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
            parameter.zero_grad()
        return self

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a block within which (and within this thread) dropout is off, and results have no gradients."""
        return evaluation()

    def use_precision(self, precision: str) -> Layer:
        """Let every layer in here multiply at this precision from now on; returns self.

        Raises:
            ValueError: not in `precision.PRECISIONS`.
        """
        check_precision(precision)
        for layer in self.layers():
            layer.precision = precision
        return self

    # ---------------------------------------------------------------- how matrices lie
    def use_order(self, order: str) -> Layer:
        """Let the matrices in here lie so in memory from now on; returns self. Their values stay.

        Args:
            order: "C", row by row, as training is fastest; or "F", column by column, as a product with one row is, and
                so the writing of text. One matrix at a time is copied, where it lies otherwise.

        Raises:
            ValueError: another order.
        """
        if order not in ("C", "F"):
            raise ValueError(f"{type(self).__name__}.use_order: expected 'C' or 'F', got {order!r}")
        for layer in self.layers():
            if isinstance(layer, Dense) and not isinstance(layer.weights.array, FewBits):
                layer.weights.array = layer.weights.xp.asarray(layer.weights.array, order=order)
        return self

    # ---------------------------------------------------------------- few bits
    def quantise(self, kind: str = "int8") -> Layer:
        """Keep the matrices and token embeddings in here in fewer bits, and freeze everything; returns self.

        A product with few rows then takes less time, for it is as fast as its weights come from memory. Gradients flow
        through, but not to them. Matrices that have few bits already stay as they are.

        Args:
            kind: "int8", "bfloat16" or "float16".

        Raises:
            ValueError: another kind, weights that are not finite or lie on a GPU. Nothing has changed then.
            ImportError: bfloat16 without ml_dtypes.
        """
        places = [layer for layer in self.layers() if isinstance(layer, (Dense, Embedding))]
        weights = {id(layer.weights): layer for layer in places if layer.weights.array.dtype.itemsize > 2}
        wanted = [layer for layer in weights.values() if getattr(layer.weights, "role", None) != "position"]
        for layer in wanted:
            if layer.weights.on_gpu:
                raise ValueError(f"{type(self).__name__}.quantise: expected weights in host memory, got them on a GPU")
        new = [FewBits.of(layer.weights.array, kind, turned=isinstance(layer, Dense)) for layer in wanted]
        for layer, matrix in zip(wanted, new):
            layer.weights.array = matrix
        return self.freeze()

    # ---------------------------------------------------------------- moving and state
    def place(self, ids: Any) -> Tensor:
        """Whole numbers as a Tensor on the device of the parameters."""
        tensor, like = ids if isinstance(ids, Tensor) else to_tensor(ids, dtype=int), next(self.parameters())
        return tensor.to_gpu(like.array.device.id) if like.on_gpu else tensor

    def to_gpu(self, device: int = 0) -> Layer:
        """Move all parameters to a GPU, in place; returns self.

        Raises:
            ValueError: weights of few bits, which are for CPUs. Nothing has moved then.
        """
        for name, parameter in self.named_parameters():
            if isinstance(parameter.array, FewBits):
                raise ValueError(
                    f"{type(self).__name__}.to_gpu: expected float32 weights, got {name} {parameter.array}"
                )
        for parameter in self.parameters():
            parameter.to_gpu(device)
        return self

    def from_gpu(self) -> Layer:
        """Move all parameters to host memory, in place; returns self."""
        for parameter in self.parameters():
            parameter.from_gpu()
        return self

    def state_dict(self) -> dict[str, np.ndarray]:
        """The values of all parameters by name, in host memory (not copied where they lie there already).

        Weights of few bits come as the float32 numbers that they stand for.
        """
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
            if isinstance(parameter.array, FewBits):
                problems.append(f"{name}: expected 32 bits to write values into, got {parameter.array}")
            elif not devices.is_array(array) or not _fits(array.dtype, parameter.dtype):
                got = array.dtype if devices.is_array(array) else type(array).__name__
                problems.append(f"{name}: expected an array that fits {parameter.dtype}, got {got}")
            elif array.shape != parameter.shape:
                problems.append(f"{name}: expected shape {parameter.shape}, got {array.shape}")
        if problems:
            raise ValueError(f"{type(self).__name__}.load_state_dict: {'; '.join(problems)}")
        for name, array in state.items():
            array = devices.to_cpu(array)
            own = parameters[name].array
            own[...] = array if isinstance(own, np.ndarray) else parameters[name].xp.asarray(array)
        increment_versions(parameters.values())

    # ---------------------------------------------------------------- printing
    def __repr__(self) -> str:
        return "\n".join(self._tree(()))

    def _tree(self, above: tuple[Layer, ...]) -> list[str]:
        """Lines about this layer and all inside it, but for the layers that it stands in."""
        lines = [f"{type(self).__name__}: {self.n_parameters:,} parameters"]
        above = (*above, self)
        for name, part in self._parts():
            if isinstance(part, Tensor):
                lines.append(f"  {name} {part.array if isinstance(part.array, FewBits) else part.shape}")
            elif any(part is layer for layer in above):
                lines.append(f"  {name} {type(part).__name__}: see above")
            else:
                head, *rest = part._tree(above)
                lines.append(f"  {name} {head}")
                lines += [f"  {line}" for line in rest]
        return lines


def _fits(dtype: np.dtype, own: np.dtype) -> bool:
    """Whether values of that dtype may become a parameter's: whole numbers are no weights, but by mistake."""
    return np.can_cast(dtype, own, "same_kind") and (dtype.kind in "biu") == (own.kind in "biu")


def _items(values: Iterable[Any]) -> Iterator[Any]:
    """Those of the values that are no containers, and what the others contain."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _items(value)
        elif isinstance(value, dict):
            yield from _items(value.values())
        else:
            yield value


def _unpack(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, Layer)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _unpack(f"{name}.{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unpack(f"{name}.{key}", item)


def generators_in(layer: Layer) -> list[np.random.Generator]:
    """Those that a layer and all inside it draw from, each once."""
    values = (value for part in layer.layers() for value in _items(vars(part).values()))
    return list({id(value): value for value in values if isinstance(value, np.random.Generator)}.values())


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
        role: what W is, one of `tensor.ROLES`: "head" for a layer that gives the output of a model.
    """

    def __init__(
        self,
        from_size: int,
        to_size: int,
        bias: bool = True,
        initialiser: Initialiser = xavier,
        generator: np.random.Generator | int | None = None,
        role: str = "matrix",
    ) -> None:
        positive("Dense", from_size=from_size, to_size=to_size)
        self.from_size, self.to_size = from_size, to_size
        self.weights = Parameter(initialiser((from_size, to_size), new_generator(generator)), role)
        self.bias = Parameter(np.zeros(to_size, np.float32), "bias") if bias else None

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """(..., from_size) to (..., to_size), in the dtype of x W unless another is given."""
        return linear(as_tensor(x, self.weights), self.weights, self.bias, "dense", self.precision, dtype)


class Embedding(Layer):
    """A table that gives a vector for each id.

    Args:
        from_size: how many ids there are.
        to_size: length of the vectors.
        role: what the table is, one of `tensor.ROLES`: "position" where the ids are places.
    """

    def __init__(
        self,
        from_size: int,
        to_size: int,
        initialiser: Initialiser | None = None,
        generator: np.random.Generator | int | None = None,
        role: str = "embedding",
    ) -> None:
        positive("Embedding", from_size=from_size, to_size=to_size)
        self.from_size, self.to_size = from_size, to_size
        draw = initialiser or normal(1.0)
        self.weights = Parameter(draw((from_size, to_size), new_generator(generator)), role)

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
        self.gain: Parameter | None = Parameter(np.ones(size, np.float32), "gain")
        self.bias: Parameter | None = Parameter(np.zeros(size, np.float32), "bias") if bias else None

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """(..., size) to (..., size), in the dtype of x unless another is given."""
        x = as_tensor(x, self.gain)
        if x.shape[-1:] != (self.size,):
            check_width(f"{type(self).__name__}(size={self.size})", x, self.size)
        array, gain, centred = floating(x.array), self._gains(x), self._centred
        check_device(self._name, array, gain)
        bias = None if self.bias is None else self.bias.array
        y, mean, scale = kernels.layer_norm(array, gain, bias, self.eps, centred, dtype)
        args = (x,) if self.gain is None else (x, self.gain) if self.bias is None else (x, self.gain, self.bias)

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | OwnedGradient, ...]:
            dx, *others = kernels.layer_norm_backward(grad, array, gain, mean, scale, centred)
            return (OwnedGradient(dx), *others)[: len(args)]

        return record(y, args, backward, self._name)

    def _gains(self, x: Tensor) -> Array:
        """What each channel is multiplied by, (C,)."""
        return x.xp.ones(self.size, np.float32) if self.gain is None else self.gain.array


class RMSNorm(LayerNorm):
    """x / sqrt(mean square + eps) * gain over the last axis: a layer norm that neither centres nor shifts.

    Source: Zhang and Sennrich 2019.

    Args:
        size: length of the last axis.
        gain: learn the gain; without, it is 1.
        unit_offset: multiply by 1 + gain, where the gain starts at 0 (as Gemma does).
    """

    _centred, _name = False, "rms_norm"

    def __init__(self, size: int, eps: float = 1e-5, gain: bool = True, unit_offset: bool = False) -> None:
        super().__init__(size, False, eps)
        self.unit_offset = unit_offset
        if not gain:
            self.gain = None
        elif unit_offset:
            self.gain = Parameter(np.zeros(size, np.float32), "gain")

    def _gains(self, x: Tensor) -> Array:
        if self.gain is None:
            return x.xp.ones(self.size, np.float32)
        return 1 + self.gain.array if self.unit_offset else self.gain.array


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
        return record(array * mask, (x,), lambda grad, needs_grad: (grad * mask,), "dropout")


class Sequential(Layer):
    """Layers and ops one after another."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        self.steps = list(steps)

    def forward(self, x: Operand) -> Tensor:
        for step in self.steps:
            x = step(x)
        return as_tensor(x)
