"""Reading a pickled model without trusting it."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from tricycle.attention import RotaryScaling
from tricycle.checkpoint import build_model, expecting
from tricycle.configs import GPTConfig, ModelConfig
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.ops import Op
from tricycle.tensor import Tensor

# What NumPy needs to bring back arrays and generators, and nothing else of it (numpy.testing, numpy.f2py and
# others could run commands).
_NUMPY_NAMES = set(
    """
    numpy.ndarray numpy.dtype numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar
    numpy._core.numeric._frombuffer numpy.random._pickle.__generator_ctor numpy.random._pickle.__bit_generator_ctor
    numpy.random._pcg64.PCG64 numpy.random.bit_generator.SeedSequence
    numpy.random.bit_generator.__pyx_unpickle_SeedSequence
    """.split()
)

# Classes of earlier versions, which may stand in files that these wrote. Nothing of them is used but what they hold.
_FORMER_NAMES = set(
    """
    tricycle.attention.SelfAttention tricycle.attention.CrossAttention
    tricycle.functions.AdaptiveSoftmax tricycle.functions.BlockSoftmax
    """.split()
)

_Unpickler: Any = pickle._Unpickler  # the one in Python: its steps can be overridden


class _Former(Op):
    """Stands for an object of a class that is no more."""


class _ModelUnpickler(_Unpickler):
    """Admits this library's layers, ops, Tensors and configs, and NumPy's arrays and generators."""

    dispatch = dict(_Unpickler.dispatch)

    def load_build(self) -> None:
        # sets attributes: of an object that was just made, never of a class or a function
        if isinstance(self.stack[-2], type) or hasattr(self.stack[-2], "__code__"):
            raise pickle.UnpicklingError(f"it would change {self.stack[-2].__qualname__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if f"{module.replace('numpy.core.', 'numpy._core.')}.{name}" in _NUMPY_NAMES and "." not in name:
            return super().find_class(module, name)
        if f"{module}.{name}" in _FORMER_NAMES:
            return _Former
        if module.startswith("tricycle.") and module in sys.modules:
            found = getattr(sys.modules[module], name, None)
            if isinstance(found, type) and issubclass(found, (Layer, Op, Tensor, ModelConfig, RotaryScaling)):
                return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no model needs")


def load_pickled_model(path: str | os.PathLike[str]) -> GPT:
    """A GPT from a pickle, through an allow-list: whatever else the file asks for is refused before it runs.

    The model is built anew from its config and its weights, so nothing odd in the file stays alive.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no pickle of a GPT, a damaged one, or one that asks for something else.
    """
    path = Path(path)
    with expecting(path, "a pickled Tricycle GPT"):
        with path.open("rb") as file:
            found = _ModelUnpickler(file).load()
        if not isinstance(found, GPT):
            raise TypeError(f"it holds a {type(found).__name__}")
        return build_model(GPTConfig.from_dict(found.config.to_dict()), found.state_dict())
