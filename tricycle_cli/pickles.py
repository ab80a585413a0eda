"""Load a GPT from a pickle of an untrusted source; `tricycle_cli/models.py` calls `load_pickled_model`."""

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
from tricycle.checkpoint import build_model, wrap_content_errors
from tricycle.configs import GPTConfig, ModelConfig
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.ops import Op
from tricycle.tensor import Tensor
from tricycle_cli.pickle_data import RecordedCall, UnsupportedPickleError, read_pickle

# The names that NumPy's arrays and generators have in pickles. None is called: arrays are built from their bytes.
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

# Classes of earlier versions that pickles of these versions name. Their content is not used.
_FORMER_NAMES = set(
    """
    tricycle.attention.SelfAttention tricycle.attention.CrossAttention
    tricycle.functions.AdaptiveSoftmax tricycle.functions.BlockSoftmax
    """.split()
)
# Classes that have moved to another module: the name in older pickles, and the present name.
_MOVED = {
    "tricycle.tensor.Parameter": "tricycle.parameter.Parameter",
    "tricycle.activation.ReLUSquared": "tricycle.activations.ReLUSquared",
    "tricycle.attention.rotary.RotaryScaling": "tricycle.attention.scaling.RotaryScaling",
    "tricycle.configs.model.EncoderConfig": "tricycle.configs.encoder.EncoderConfig",
}
_MOVED_MODULES = {"tricycle.lora": "tricycle.finetuning.lora"}
_ALLOWED_CLASSES = (Layer, Op, Tensor, ModelConfig, RotaryScaling)

_DTYPES = ("f4", "f8")  # of weights
_ORDERS = {"C": "C", "F": "F", False: "C", True: "F"}
_MAX_NDIM = 8
_MAX_DEPTH = 40  # of nested layers, lists and dicts


def load_pickled_model(path: str | os.PathLike[str]) -> GPT:
    """Build a GPT from a pickle's config and weights, importing and calling nothing in it; ValueError for other files.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a pickle of a GPT, a damaged one, or one that names a class that is not allowed.
    """
    path = Path(path)
    with wrap_content_errors(path, "a pickled Tricycle GPT"), path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        model = read_pickle(content, _resolve_name)
        if not isinstance(model, RecordedCall) or not issubclass(_class_of(model), GPT):
            found = model.name if isinstance(model, RecordedCall) else type(model).__name__
            raise UnsupportedPickleError(f"it holds a {found}")
        state = _state_of(model)
        weights = dict(_weights(state))
        n_bytes = sum(array.nbytes for array in weights.values())
        if n_bytes > len(content):  # some weights use the same bytes of the file
            raise UnsupportedPickleError(f"its weights have {n_bytes} bytes, the file has {len(content)}")
        return build_model(_config_of(state["config"]), weights)


def _resolve_name(module: str, name: str) -> str | None:
    """Return the present full name of an allowed class or function of NumPy or Tricycle; None for others."""
    module = _MOVED_MODULES.get(module, module.replace("numpy.core.", "numpy._core."))
    full = f"{module}.{name}"
    full = _MOVED.get(full, full)
    if "." not in name and full in _NUMPY_NAMES | _FORMER_NAMES:
        return full
    return full if _model_class(full) is not None else None


def _model_class(full: str) -> type | None:
    """Return Tricycle's class of this full name if a model can contain its instances, else None; imports nothing."""
    module, _, name = full.rpartition(".")
    if not module.startswith("tricycle.") or module not in sys.modules:
        return None
    known = vars(sys.modules[module]).get(name)
    return known if isinstance(known, type) and issubclass(known, _ALLOWED_CLASSES) else None


def _class_of(value: Any) -> type:
    """Return Tricycle's class of a recorded call; `object` for anything else."""
    return (_model_class(value.name) if isinstance(value, RecordedCall) else None) or object


def _state_of(call: RecordedCall) -> dict[str, Any]:
    """Return the attributes of a recorded object; UnsupportedPickleError if it has none."""
    if not isinstance(call.state, dict):
        raise UnsupportedPickleError(f"expected a {call.name} with attributes, got none")
    return call.state


def _config_of(config: Any) -> GPTConfig:
    """Return a GPTConfig of a pickled config, missing fields by default; UnsupportedPickleError if none."""
    kind: Any = _class_of(config)
    if not issubclass(kind, ModelConfig):
        raise UnsupportedPickleError("expected a config class of Tricycle in the model, got another")
    state = _state_of(config)
    fields = kind.__dataclass_fields__
    return GPTConfig.from_dict({name: state.get(name, field.default) for name, field in fields.items()})


# -------------------------------------------------------------------- weights
def _weights(state: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of each parameter once, named as by `Layer.named_parameters`; an error if nested too deep."""
    seen: set[int] = set()

    def walk(values: Any, prefix: str, depth: int) -> Iterator[tuple[str, np.ndarray]]:
        if depth > _MAX_DEPTH:
            raise UnsupportedPickleError(f"expected at most {_MAX_DEPTH} levels of nested layers, got more")
        for name, value in values:
            if id(value) in seen or not isinstance(value, (RecordedCall, list, tuple, dict)):
                continue
            seen.add(id(value))
            kind = _class_of(value)
            if isinstance(value, RecordedCall) and issubclass(kind, Tensor):
                yield f"{prefix}{name}", _array(_state_of(value)["array"])
            elif issubclass(kind, Layer) or not isinstance(value, RecordedCall):
                inner = _state_of(value) if isinstance(value, RecordedCall) else value
                items = inner.items() if isinstance(inner, dict) else enumerate(inner)
                yield from walk(items, f"{prefix}{name}.", depth + 1)

    return walk(state.items(), "", 0)


def _array(call: Any) -> np.ndarray:
    """Return a recorded array as a view of its bytes in the file; UnsupportedPickleError if it is no such array.

    Raises:
        UnsupportedPickleError: not a numeric array, or one whose bytes do not match its shape.
    """
    match call:
        case RecordedCall(name=name, args=(_, _, _), state=(_, shape, dtype, order, content)) if name == _ARRAY:
            pass
        case RecordedCall(name=name, args=(content, dtype, shape, order), state=None) if name == _ARRAY_IN_PLACE:
            pass
        case _:
            raise UnsupportedPickleError("expected weights as an array, got something else")
    parsed = _dtype(dtype)
    is_shape = isinstance(shape, tuple) and len(shape) <= _MAX_NDIM and all(type(n) is int and n >= 0 for n in shape)
    is_order = isinstance(order, (str, bool)) and order in _ORDERS
    if not is_shape or not is_order or not isinstance(content, memoryview):
        raise UnsupportedPickleError("expected weights as an array with a shape, an order and bytes")
    if math.prod(shape) * parsed.itemsize != len(content):
        raise UnsupportedPickleError(f"expected the bytes of shape {shape} in {parsed}, got {len(content)} bytes"[:200])
    order_letter: Any = _ORDERS[order]
    return np.frombuffer(content, parsed).reshape(shape, order=order_letter)


def _dtype(call: Any) -> np.dtype:
    """Return the dtype of a recorded call; UnsupportedPickleError for another than weights may have."""
    match call:
        case RecordedCall(name=name, args=(letters, *_), state=(_, "<" | ">" as byte_order, None, None, None, *_)):
            if name == _DTYPE and isinstance(letters, str) and letters in _DTYPES:
                return np.dtype(byte_order + letters)
    raise UnsupportedPickleError(f"expected weights of dtype {' or '.join(_DTYPES)}, got another")
