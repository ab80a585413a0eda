"""NumPy and CuPy arrays, and copies between host and GPU memory; CuPy is imported on the first use of a GPU."""

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
# The module whose functions accept each array type. `cupy.ndarray` is added when the first array moves to a GPU.
ARRAY_MODULES: dict[type, ModuleType] = {np.ndarray: np}


def array_module(array: Array) -> ModuleType:
    """Return the module of an array or NumPy scalar, numpy or cupy; raise a TypeError for other objects."""
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
    """Return whether `value` is a NumPy or CuPy array, or a NumPy scalar."""
    try:
        return array_module(value) is not None
    except TypeError:
        return False


def on_gpu(array: Array) -> bool:
    """Return whether an array is in GPU memory; raise a TypeError if it is no NumPy or CuPy array."""
    return array_module(array) is not np


# Cache: valid for the life of the process: one array for each device and dtype. It is a view, so no leaf keeps it.
@cache
def one(xp: ModuleType, device: str, dtype: np.dtype[Any]) -> Array:
    """Return 1 of shape (), made on the current device, cached by module, device and dtype: `is` recognizes it."""
    return xp.broadcast_to(xp.ones(1, dtype), (1,)).reshape(())  # read-only in NumPy


# Cache: valid for the life of the process; packages installed later are found after a restart.
@cache
def gpu_problem() -> str | None:
    """Return why no GPU can be used, with advice, in one line; None if a GPU is available. The result is cached."""
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
            return "no NVIDIA driver is installed"
        driver = {12: 525, 13: 580}.get(needs, f"for CUDA {needs}")  # the oldest for each version
        advice = f"install driver {driver} or newer, or tricycle-gpt[cuda{has}] in place of this CuPy"
        return f"CUDA reports: {error}" if has >= needs else f"the driver is for CUDA {has}, CuPy for {needs}: {advice}"


def to_gpu(array: Array, device: int = 0) -> Array:
    """Return a copy on GPU `device`, or the array itself if it is there or, with a warning, if no GPU can be used."""
    if problem := gpu_problem():
        warnings.warn(f"to_gpu: no GPU can be used, so this stays on the CPU: {problem}", stacklevel=3)
        return array
    import cupy

    ARRAY_MODULES[cupy.ndarray] = cupy
    with cupy.cuda.Device(device):
        return cupy.asarray(array)


def to_cpu(array: Array) -> np.ndarray:
    """Return the array as a NumPy array, copied only if it is on a GPU."""
    xp = array_module(array)
    return np.asarray(array) if xp is np else xp.asnumpy(array)


def owns_memory(array: Array) -> bool:
    """Return whether an array owns its memory or it was lent to this array alone; False for other views."""
    return array.flags.owndata or hasattr(array.base, "lent_to_one_array")  # by `tricycle_accelerators.buffers`


def joined_view(arrays: Sequence[Array]) -> Array | None:
    """Return a view of the array that `arrays` partition along the last axis; None if they do not partition one."""
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
