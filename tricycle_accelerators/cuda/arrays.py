"""What the kernels ask of arrays, and the copies that they need."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle_accelerators.cuda import launch

i32, i64, f32 = np.int32, np.int64, np.float32


# Cache: valid for the life of the process: depends on the dtype alone.
@cache
def cuda_type(dtype: np.dtype) -> str:
    """An element type as CUDA C++ names it; empty where no kernel takes it."""
    return launch.TYPES.get(dtype.name, "")


def dtype_decline_reason(x: Array) -> str | None:
    return None if cuda_type(x.dtype) else f"float32, float16 or bfloat16, got {x.dtype}"


def array_decline_reason(x: Array, *_: Any, **__: Any) -> str | None:
    """Return why no kernel takes x, whatever the other arguments are."""
    return dtype_decline_reason(x) if x.size else "an empty array"


def contiguous(x: Array) -> Array:
    return x if x.flags.c_contiguous else array_module(x).ascontiguousarray(x)


def contiguous_float32(x: Array) -> Array:
    """As contiguous float32."""
    return contiguous(cast(x, np.dtype(f32)))


def empty_like(like: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Array:
    xp = array_module(like)
    return xp.empty(like.shape if shape is None else shape, like.dtype if dtype is None else dtype)


def vector_width(n: int, kind: str, *arrays: Array) -> int:
    """How many elements a thread may read at once of rows of n: 16 bytes of them, or 1.

    Arrays that are not contiguous count as the copies that `dense` makes of them.
    """
    width = 4 if kind == "float" else 8
    aligned = all(not array.flags.c_contiguous or launch.device_address(array) % 16 == 0 for array in arrays)
    return width if n % width == 0 and aligned else 1


def cast(x: Array, dtype: np.dtype) -> Array:
    """x in another dtype, in the memory order that it has."""
    if x.dtype == dtype:
        return x
    pair = cuda_type(x.dtype), cuda_type(dtype)
    if pair not in launch.KERNELS["elementwise"]["cast"] or not x.size:
        return x.astype(dtype)
    if x.ndim == 2 and x.flags.f_contiguous and not x.flags.c_contiguous:
        return cast(x.T, dtype).T
    out = empty_like(x, dtype=dtype)
    launch.launch("elementwise", "cast", pair, launch.plan_elementwise(x.size, 8), contiguous(x), out, i64(x.size))
    return out
