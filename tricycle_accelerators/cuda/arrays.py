"""Conversions and checks of CuPy arrays for the CUDA kernels: dtypes, contiguity, alignment."""

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
    """Return the CUDA C++ name of a dtype; "" if no kernel supports the dtype."""
    return launch.TYPES.get(dtype.name, "")


def dtype_decline_reason(x: Array) -> str | None:
    """Return why no CUDA kernel supports the dtype of x; None if the dtype is supported."""
    return None if cuda_type(x.dtype) else f"float32, float16 or bfloat16, got {x.dtype}"


def array_decline_reason(x: Array, *_: Any, **__: Any) -> str | None:
    """Return why no CUDA kernel supports x (empty, or an unsupported dtype); None if x is supported."""
    return dtype_decline_reason(x) if x.size else "an empty array"


def contiguous(x: Array) -> Array:
    """Return x if it is C-contiguous, else a contiguous copy."""
    return x if x.flags.c_contiguous else array_module(x).ascontiguousarray(x)


def contiguous_float32(x: Array) -> Array:
    """Return x as a C-contiguous float32 array: x itself if it is one, else a copy."""
    return contiguous(cast(x, np.dtype(f32)))


def empty_like(like: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Array:
    """Allocate an uninitialized array on the device of `like`, with its shape and dtype unless given."""
    xp = array_module(like)
    return xp.empty(like.shape if shape is None else shape, like.dtype if dtype is None else dtype)


def vector_width(n: int, kind: str, *arrays: Array) -> int:
    """Return how many elements of rows of n a thread loads at once: 16 bytes (4 or 8) if divisible and aligned, else 1.

    Arrays that are not contiguous count as the copies that `contiguous` makes of them.
    """
    width = 4 if kind == "float" else 8
    aligned = all(not array.flags.c_contiguous or launch.device_address(array) % 16 == 0 for array in arrays)
    return width if n % width == 0 and aligned else 1


def cast(x: Array, dtype: np.dtype) -> Array:
    """Return x itself if it has `dtype`, else a copy in it by CUDA or CuPy; a 2-D Fortran-ordered x stays so."""
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
