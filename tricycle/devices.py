"""NumPy's and CuPy's arrays, and moving them between host and GPU; CuPy is imported when a GPU is first asked for."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # np.ndarray or cupy.ndarray: both offer the same interface
# The module that computes on each type of array. `cupy.ndarray` joins when the first array moves.
ARRAY_MODULES: dict[type, ModuleType] = {np.ndarray: np}


def array_module(array: Array) -> ModuleType:
    """Return the module (`numpy` or `cupy`) whose functions work on `array`."""
    if module := ARRAY_MODULES.get(type(array)):
        return module
    if isinstance(array, (np.ndarray, np.generic)):  # subclasses (memmap, ...) and scalars
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):  # made by the user
        ARRAY_MODULES[type(array)] = cupy
        return cupy
    raise TypeError(f"expected a NumPy or CuPy array, got {type(array).__name__}")


def is_array(value: object) -> bool:
    """Return whether `value` is a NumPy or CuPy array."""
    try:
        return array_module(value) is not None
    except TypeError:
        return False


def on_gpu(array: Array) -> bool:
    return array_module(array) is not np


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def gpu_problem() -> str | None:
    """Return why no GPU can be used here, in one line; None if one can."""
    try:
        import cupy
    except ModuleNotFoundError:
        return "CuPy is not installed (pip install 'tricycle-gpt[cuda13]', or [cuda12])"
    except ImportError as error:
        return f"CuPy cannot be loaded: {' '.join(str(error).split())}"
    runtime = cupy.cuda.runtime
    try:
        return None if runtime.getDeviceCount() else "CUDA sees no device"
    except runtime.CUDARuntimeError as error:
        has, needs = runtime.driverGetVersion() // 1000, runtime.runtimeGetVersion() // 1000  # 12040 is CUDA 12.4
        if not has:
            return "there is no NVIDIA driver, so no NVIDIA GPU that could be used"
        driver = {12: 525, 13: 580}.get(needs, f"for CUDA {needs}")  # the oldest for each version
        advice = f"install driver {driver} or newer, or tricycle-gpt[cuda{has}] in place of this CuPy"
        return f"CUDA reports: {error}" if has >= needs else f"the driver is for CUDA {has}, CuPy for {needs}: {advice}"


def to_gpu(array: Array, device: int = 0) -> Array:
    """Return the array on a GPU, copied unless it is there; where none can be used, the array itself with a warning."""
    if problem := gpu_problem():
        warnings.warn(f"to_gpu: no GPU can be used, so this stays on the CPU: {problem}", stacklevel=3)
        return array
    import cupy

    ARRAY_MODULES[cupy.ndarray] = cupy
    with cupy.cuda.Device(device):
        return cupy.asarray(array)


def to_cpu(array: Array) -> np.ndarray:
    """Return the array in host memory, copied unless it is there."""
    xp = array_module(array)
    return np.asarray(array) if xp is np else xp.asnumpy(array)


def owns_memory(array: Array) -> bool:
    """Return whether no other array is the base of this one, whose memory is then its alone but for its views."""
    return array.flags.owndata or hasattr(array.base, "lent_to_one_array")  # by `tricycle_accelerators.buffers`


def joined_view(arrays: Sequence[Array]) -> Array | None:
    """Return the contiguous array whose consecutive parts along the last axis are these, as a view; None if none is."""
    first, memory = arrays[0], arrays[0].base
    if memory is None or any(array.base is not memory for array in arrays):
        return None
    shape = (*first.shape[:-1], sum(array.shape[-1] for array in arrays))
    if memory.size != math.prod(shape) or not memory.flags.c_contiguous or memory.dtype != first.dtype:
        return None
    whole = memory if memory.shape == shape else memory.reshape(shape)
    address_of: Callable[[Array], int] = lambda a: a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr
    address = address_of(whole)
    for array in arrays:
        if array.shape[:-1] != shape[:-1] or array.strides != whole.strides or address_of(array) != address:
            return None
        address += array.shape[-1] * array.itemsize
    return whole
