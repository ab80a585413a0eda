"""Which array library holds an array, and moving arrays between the host and a GPU.

CuPy is imported the first time a GPU is asked for and never before, so that `import tricycle` costs
no more than NumPy and works where no CUDA exists.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # np.ndarray or cupy.ndarray: both offer the same interface

# The module that computes on each type of array. `cupy.ndarray` joins when the first array moves.
ARRAY_MODULES: dict[type, ModuleType] = {np.ndarray: np}


def array_module(array: Array) -> ModuleType:
    """The module (`numpy` or `cupy`) whose functions work on `array`."""
    try:
        return ARRAY_MODULES[type(array)]
    except KeyError:
        return _module_of_other(array)


def _module_of_other(array: Array) -> ModuleType:
    """NumPy's subclasses (memmap, ...), its scalars, and CuPy arrays that a user made without us."""
    if isinstance(array, (np.ndarray, np.generic)):
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        ARRAY_MODULES[type(array)] = cupy
        return cupy
    raise TypeError(f"expected a NumPy or CuPy array, got {type(array).__name__}")


def is_array(value: object) -> bool:
    """Whether `value` is an array of a library we compute with."""
    try:
        array_module(value)
    except TypeError:
        return False
    return True


def on_gpu(array: Array) -> bool:
    return array_module(array) is not np


@cache
def gpu_problem() -> str | None:
    """Why no GPU can be used here, in one line; None when one can."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install 'tricycle-gpt[cuda13]', or [cuda12])"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA reports: {error}"
    return None if count else "CUDA sees no device"


def gpu_available() -> bool:
    return gpu_problem() is None


def to_gpu(array: Array, device: int = 0) -> Array:
    """A copy of `array` on GPU number `device`; the same array if it is there already.

    Where no GPU can be used the array stays where it is, with one warning that says why: the same script then
    runs on any machine. Programs that insist on a GPU ask `gpu_problem` first.
    """
    problem = gpu_problem()
    if problem:
        warnings.warn(f"to_gpu: no GPU can be used, so this stays on the CPU: {problem}", stacklevel=3)
        return array
    import cupy

    ARRAY_MODULES[cupy.ndarray] = cupy
    with cupy.cuda.Device(device):
        return cupy.asarray(array)


def to_cpu(array: Array) -> np.ndarray:
    """The array in host memory; the same array if it is there already."""
    if isinstance(array, np.ndarray):
        return array
    xp = array_module(array)
    return np.asarray(array) if xp is np else xp.asnumpy(array)


def random_mask(generator: np.random.Generator, shape: tuple[int, ...], keep: float, like: Array) -> Array:
    """Zeros and 1 / keep, each element kept with probability `keep`, on the device and in the dtype of `like`.

    The draw is made by a host generator, so a run can be repeated and resumed on any device.
    """
    mask = array_module(like).asarray(generator.random(shape, dtype=np.float32) < keep).astype(like.dtype)
    mask /= keep
    return mask
