"""Which array library holds an array, and moving arrays between the host and a GPU.

CuPy is imported the first time a GPU is asked for and never before, so that `import tricycle` costs
no more than NumPy and works where no CUDA exists.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # np.ndarray or cupy.ndarray: both offer the same interface

# The oldest of NVIDIA's drivers with which each version of CUDA works.
DRIVERS = {12: 525, 13: 580}
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


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def gpu_problem() -> str | None:
    """Why no GPU can be used here, in one line; None when one can."""
    try:
        import cupy
    except ModuleNotFoundError:
        return "CuPy is not installed (pip install 'tricycle-gpt[cuda13]', or [cuda12])"
    except ImportError as error:
        return f"CuPy cannot be loaded: {' '.join(str(error).split())}"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        has, needs = runtime.driverGetVersion() // 1000, runtime.runtimeGetVersion() // 1000  # 12040 is CUDA 12.4
        if not has:
            return "there is no NVIDIA driver, so no NVIDIA GPU that could be used"
        oldest = DRIVERS.get(needs, f"for CUDA {needs}")
        advice = f"install driver {oldest} or newer, or tricycle-gpt[cuda{has}] in place of this CuPy"
        return f"CUDA reports: {error}" if has >= needs else f"the driver is for CUDA {has}, CuPy for {needs}: {advice}"
    return None if count else "CUDA sees no device"


def gpu_available() -> bool:
    return gpu_problem() is None


def gpu_memory() -> tuple[int, int]:
    """Bytes of the current GPU that a new array could have, and all of them."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return free + cupy.get_default_memory_pool().free_bytes(), total


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


# -------------------------------------------------------------------- arrays that lie side by side
def side_by_side(arrays: Sequence[Array]) -> Array | None:
    """The array of which these are the consecutive parts along the last axis, in one piece of memory; None if none is.

    Nothing is copied: a change of one is a change of the other.
    """
    memory = arrays[0].base
    if memory is None or any(array.base is not memory for array in arrays):
        return None
    shape = (*arrays[0].shape[:-1], sum(array.shape[-1] for array in arrays))
    if memory.size != math.prod(shape) or not memory.flags.c_contiguous or memory.dtype != arrays[0].dtype:
        return None
    whole = memory if memory.shape == shape else memory.reshape(shape)
    place = address(whole)
    for array in arrays:
        fits = array.shape[:-1] == shape[:-1] and array.strides == whole.strides
        if not fits or address(array) != place:
            return None
        place += array.shape[-1] * array.itemsize
    return whole


def address(array: Array) -> int:
    """Where the first element lies, in its device's memory."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
