"""Methods of `Layer` that act on all its parameters: freeze, move between devices, save, restore and print."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tricycle import devices
from tricycle.autograd import increment_versions
from tricycle.layers import Layer
from tricycle.state.activations import run_and_free
from tricycle.tensor import Tensor


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a Tensor holds a quantized matrix and not an array."""
    return hasattr(tensor.array, "linear")


def freeze(layer: Layer) -> Layer:
    """Set `requires_grad` of all parameters to False (no updates), clear their gradients; return the layer."""
    return _set_requires_grad(layer, False)


def unfreeze(layer: Layer) -> Layer:
    """Set `requires_grad` of all parameters, clear gradients, return the layer; ValueError for weights of 16 bits."""
    narrow = [name for name, parameter in layer.named_parameters() if parameter.dtype.itemsize < 4]
    if narrow:
        got = f"{narrow[0]} and {len(narrow) - 1} more" if len(narrow) > 1 else narrow[0]
        raise ValueError(f"{type(layer).__name__}.unfreeze: expected weights of 32 bits, got fewer in {got}")
    return _set_requires_grad(layer, True)


def _set_requires_grad(layer: Layer, requires_grad: bool) -> Layer:
    """Set `requires_grad` of all parameters, remove their gradients, and return the layer."""
    for parameter in layer.parameters():
        parameter.requires_grad = requires_grad
        parameter.zero_grad()
    return layer


def to_gpu(layer: Layer, device: int = 0) -> Layer:
    """Move all parameters to a GPU in place; return the layer. Raise ValueError if a weight is quantized.

    Raises:
        ValueError: weights are quantized, which only CPUs support. No parameter is moved then.
    """
    for name, parameter in layer.named_parameters():
        if is_quantized(parameter):
            got = f"{name} {parameter.array}"
            raise ValueError(f"{type(layer).__name__}.to_gpu: expected float32 weights, got {got}")
    for parameter in layer.parameters():
        parameter.to_gpu(device)
    return layer


def from_gpu(layer: Layer) -> Layer:
    """Move all parameters to host memory in place, and return the layer."""
    for parameter in layer.parameters():
        parameter.from_gpu()
    return layer


def state_dict(layer: Layer) -> dict[str, np.ndarray]:
    """Return the values of all parameters by name, as arrays in host memory (without a copy if they are there).

    Quantized weights are dequantized to float32.
    """
    return {name: parameter.numpy() for name, parameter in layer.named_parameters()}


def load_state_dict(layer: Layer, state: Mapping[str, np.ndarray]) -> None:
    """Copy arrays by name into all parameters, cast; raise ValueError, before any change, if names or shapes differ.

    Raises:
        ValueError: entries are missing, unexpected, misshapen or of another kind (integers for floats), or a parameter
            is quantized; the message names all of them, and no parameter is changed.
    """
    parameters = dict(layer.named_parameters())
    problems = [f"missing {name}" for name in parameters if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in parameters]
    for name, parameter in parameters.items():
        array = state.get(name, parameter.array)
        if is_quantized(parameter):
            problems.append(f"{name}: expected 32 bits to write values into, got {parameter.array}")
        elif not devices.is_array(array) or not _fits(array.dtype, parameter.dtype):
            got = array.dtype if devices.is_array(array) else type(array).__name__
            problems.append(f"{name}: expected an array that fits {parameter.dtype}, got {got}")
        elif array.shape != parameter.shape:
            problems.append(f"{name}: expected shape {parameter.shape}, got {array.shape}")
    if problems:
        raise ValueError(f"{type(layer).__name__}.load_state_dict: {'; '.join(problems)}")
    for name, array in state.items():
        array = devices.to_cpu(array)
        own = parameters[name].array
        own[...] = array if isinstance(own, np.ndarray) else parameters[name].xp.asarray(array)
    increment_versions(parameters.values())


def _fits(dtype: np.dtype, own: np.dtype) -> bool:
    """Return whether NumPy can cast a dtype to a parameter's within its kind; integers and floats do not mix."""
    return np.can_cast(dtype, own, "same_kind") and (dtype.kind in "biu") == (own.kind in "biu")


def format_tree(layer: Layer) -> str:
    """Return the tree of sublayers and parameters as text, one per line, with names and sizes."""
    return "\n".join(_tree(layer, ()))


def _tree(layer: Layer, above: tuple[Layer, ...]) -> list[str]:
    """Return the lines of a layer's tree, sublayers indented; those in `above`, which contain it, are not expanded."""
    lines = [f"{type(layer).__name__}: {layer.n_parameters:,} parameters"]
    above = (*above, layer)
    for name, part in layer._parts():
        if isinstance(part, Tensor):
            lines.append(f"  {name} {part.array if is_quantized(part) else part.shape}")
        elif any(part is other for other in above):
            lines.append(f"  {name} {type(part).__name__}: see above")
        else:
            head, *rest = _tree(part, above)
            lines += [f"  {name} {head}", *(f"  {line}" for line in rest)]
    return lines


for _name, _method in {
    "freeze": freeze,
    "unfreeze": unfreeze,
    "to_gpu": to_gpu,
    "from_gpu": from_gpu,
    "state_dict": state_dict,
    "load_state_dict": load_state_dict,
    "__repr__": format_tree,
    "run_and_free": run_and_free,
}.items():
    setattr(Layer, _name, _method)
