"""What the kernels ask of arrays, and the copies that they need."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle_accelerators.cuda import launch

i32, i64, f32 = np.int32, np.int64, np.float32


def kind(*arrays: Array) -> str | None:
    """The element type of arrays that share it, as CUDA C++ names it; None where no kernel takes it."""
    dtype = arrays[0].dtype
    return launch.TYPES.get(dtype.name) if all(array.dtype == dtype for array in arrays) else None


def dense(x: Array) -> Array:
    return x if x.flags.c_contiguous else array_module(x).ascontiguousarray(x)


def floats(x: Array) -> Array:
    """As contiguous float32."""
    return dense(cast(x, np.dtype(f32)))


def empty(like: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Array:
    xp = array_module(like)
    return xp.empty(like.shape if shape is None else shape, like.dtype if dtype is None else dtype)


def elements_at_once(n: int, kind: str, *arrays: Array) -> int:
    """How many elements a thread may read at once of rows of n: 16 bytes of them, or 1."""
    width = 4 if kind == "float" else 8
    return width if n % width == 0 and all(launch.address(array) % 16 == 0 for array in arrays) else 1


def cast(x: Array, dtype: np.dtype) -> Array:
    """x in another dtype, in the memory order that it has."""
    if x.dtype == dtype:
        return x
    pair = launch.TYPES.get(x.dtype.name, ""), launch.TYPES.get(dtype.name, "")
    if pair not in launch.KERNELS["elementwise"]["cast"] or not x.size:
        return x.astype(dtype)
    if x.ndim == 2 and x.flags.f_contiguous and not x.flags.c_contiguous:
        return cast(x.T, dtype).T
    out = empty(x, dtype=dtype)
    launch.launch("elementwise", "cast", pair, launch.elementwise(x.size, 8), dense(x), out, i64(x.size))
    return out
