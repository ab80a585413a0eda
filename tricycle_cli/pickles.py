"""Reading a pickled model without trusting it."""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.attention import RotaryScaling
from tricycle.checkpoint import build_model, expecting
from tricycle.configs import GPTConfig, ModelConfig
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.ops import Op
from tricycle.tensor import Tensor
from tricycle_cli.pickle_data import Made, Refused, read_pickle

# What NumPy's arrays and generators name in pickles. None of it is called: arrays are made anew from their bytes.
_ARRAY = "numpy._core.multiarray._reconstruct"
_ARRAY_IN_PLACE = "numpy._core.numeric._frombuffer"
_DTYPE = "numpy.dtype"
_NUMPY_NAMES = {_ARRAY, _ARRAY_IN_PLACE, _DTYPE} | set(
    """
    numpy.ndarray numpy.random._pickle.__generator_ctor numpy.random._pickle.__bit_generator_ctor
    numpy.random._pcg64.PCG64 numpy.random.bit_generator.SeedSequence
    numpy.random.bit_generator.__pyx_unpickle_SeedSequence
    """.split()
)

# Classes of earlier versions, which may stand in files that these wrote. Nothing of them is used.
_FORMER_NAMES = set(
    """
    tricycle.attention.SelfAttention tricycle.attention.CrossAttention
    tricycle.functions.AdaptiveSoftmax tricycle.functions.BlockSoftmax
    """.split()
)
# Classes that are in another module now, by the names that they have in such files.
_MOVED = {
    "tricycle.tensor.Parameter": "tricycle.parameter.Parameter",
    "tricycle.activation.ReLUSquared": "tricycle.activations.ReLUSquared",
    "tricycle.attention.rotary.RotaryScaling": "tricycle.attention.scaling.RotaryScaling",
    "tricycle.configs.model.EncoderConfig": "tricycle.configs.encoder.EncoderConfig",
}
_MOVED_MODULES = {"tricycle.lora": "tricycle.finetuning.lora"}
_ADMITTED = (Layer, Op, Tensor, ModelConfig, RotaryScaling)

_LETTERS = ("f4", "f8")  # what weights are made of
_ORDERS = {"C": "C", "F": "F", False: "C", True: "F"}
_MOST_AXES = 8
_DEEPEST = 40  # layers inside each other, lists and dicts counted


def load_pickled_model(path: str | os.PathLike[str]) -> GPT:
    """A GPT from a pickle, read as plain data: nothing that the file names is imported or called.

    The model is built anew from its config and its weights, so nothing odd in the file stays alive.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no pickle of a GPT, a damaged one, or one that asks for something else.
    """
    path = Path(path)
    with expecting(path, "a pickled Tricycle GPT"), path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        model = read_pickle(content, _admit)
        if not isinstance(model, Made) or not issubclass(_class_of(model), GPT):
            raise Refused(f"it holds a {model.name if isinstance(model, Made) else type(model).__name__}")
        state = _state_of(model)
        weights = dict(_weights(state))
        n_bytes = sum(array.nbytes for array in weights.values())
        if n_bytes > len(content):  # some of them are the same bytes, taken several times
            raise Refused(f"its weights have {n_bytes} bytes, the file has {len(content)}")
        return build_model(_config_of(state["config"]), weights)


def _admit(module: str, name: str) -> str | None:
    module = _MOVED_MODULES.get(module, module.replace("numpy.core.", "numpy._core."))
    full = f"{module}.{name}"
    full = _MOVED.get(full, full)
    if "." not in name and full in _NUMPY_NAMES | _FORMER_NAMES:
        return full
    return full if _own_class(full) is not None else None


def _own_class(full: str) -> type | None:
    """The class of ours of that name, if a model can have parts of it. Nothing is imported."""
    module, _, name = full.rpartition(".")
    if not module.startswith("tricycle.") or module not in sys.modules:
        return None
    known = vars(sys.modules[module]).get(name)
    return known if isinstance(known, type) and issubclass(known, _ADMITTED) else None


def _class_of(value: Any) -> type:
    """Of something that the file says was made; `object` where it is nothing of ours."""
    return (_own_class(value.name) if isinstance(value, Made) else None) or object


def _state_of(made: Made) -> dict[str, Any]:
    if not isinstance(made.state, dict):
        raise Refused(f"expected a {made.name} with attributes, got none")
    return made.state


def _config_of(config: Any) -> GPTConfig:
    kind: Any = _class_of(config)
    if not issubclass(kind, ModelConfig):
        raise Refused("expected a config of ours in its model")
    state = _state_of(config)
    fields = kind.__dataclass_fields__
    return GPTConfig.from_dict({name: state.get(name, field.default) for name, field in fields.items()})


# -------------------------------------------------------------------- weights
def _weights(state: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter once, under the name that `Layer.named_parameters` gives it."""
    seen: set[int] = set()

    def walk(values: Any, prefix: str, depth: int) -> Iterator[tuple[str, np.ndarray]]:
        if depth > _DEEPEST:
            raise Refused(f"expected layers in each other to a depth of {_DEEPEST}, got more")
        for name, value in values:
            if id(value) in seen or not isinstance(value, (Made, list, tuple, dict)):
                continue
            seen.add(id(value))
            kind = _class_of(value)
            if isinstance(value, (list, tuple)):
                yield from walk(enumerate(value), f"{prefix}{name}.", depth + 1)
            elif isinstance(value, dict):
                yield from walk(value.items(), f"{prefix}{name}.", depth + 1)
            elif issubclass(kind, Layer):
                yield from walk(_state_of(value).items(), f"{prefix}{name}.", depth + 1)
            elif issubclass(kind, Tensor):
                yield f"{prefix}{name}", _array(_state_of(value)["array"])

    return walk(state.items(), "", 0)


def _array(made: Any) -> np.ndarray:
    """The values where they lie in the file.

    Raises:
        Refused: no array of numbers, or one whose bytes are not those of its shape.
    """
    match made:
        case Made(name=name, args=(_, _, _), state=(_, shape, dtype, order, content)) if name == _ARRAY:
            pass
        case Made(name=name, args=(content, dtype, shape, order), state=None) if name == _ARRAY_IN_PLACE:
            pass
        case _:
            raise Refused("expected weights as an array, got something else")
    kind = _dtype(dtype)
    whole = isinstance(shape, tuple) and len(shape) <= _MOST_AXES and all(type(n) is int and n >= 0 for n in shape)
    if not whole or not isinstance(order, (str, bool)) or order not in _ORDERS or not isinstance(content, memoryview):
        raise Refused("expected weights as an array with a shape, an order and bytes")
    if math.prod(shape) * kind.itemsize != len(content):
        raise Refused(f"{len(content)} bytes are not those of shape {shape} in {kind}"[:200])
    order_letter: Any = _ORDERS[order]
    return np.frombuffer(content, kind).reshape(shape, order=order_letter)


def _dtype(made: Any) -> np.dtype:
    match made:
        case Made(name=name, args=(letter, *_), state=(_, "<" | ">" as byte_order, None, None, None, *_)):
            if name == _DTYPE and isinstance(letter, str) and letter in _LETTERS:
                return np.dtype(byte_order + letter)
    raise Refused(f"expected weights of the types {', '.join(_LETTERS)}, got another")
