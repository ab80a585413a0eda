"""One element at a time: activations, products, dropout's masks, rotary positions."""

from __future__ import annotations

import math
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64


def _elementwise(name: str, x: Array, n_results: int) -> Any:
    kind = arrays.kind(x)
    if kind is None or not x.size:
        return NotImplemented
    results = [arrays.empty(x) for _ in range(n_results)]
    plan = launch.elementwise(x.size, launch.pack(x.dtype.itemsize))
    launch.launch("elementwise", name, (kind,), plan, arrays.dense(x), *results, i64(x.size))
    return results[0] if n_results == 1 else tuple(results)


def gelu(x: Array) -> Array | NotImplementedType:
    return _elementwise("gelu", x, 1)


def gelu_with_slope(x: Array) -> tuple[Array, Array] | NotImplementedType:
    return _elementwise("gelu_with_slope", x, 2)


def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array | NotImplementedType:
    return NotImplemented if slope is None else multiply(grad, slope)


def relu_squared(x: Array) -> tuple[Array, Array] | NotImplementedType:
    return _elementwise("relu_squared", x, 2)


def sigmoid(x: Array) -> Array | NotImplementedType:
    return _elementwise("sigmoid", x, 1)


def multiply(a: Array, b: Array) -> Array | NotImplementedType:
    """Two arrays of one shape, or an array and a 0-d one."""
    kind = arrays.kind(a)
    fits = type(b) is type(a) and (b.ndim == 0 or (b.shape == a.shape and b.dtype == a.dtype))
    if kind is None or not a.size or not fits:
        return NotImplemented
    out = arrays.empty(a)
    plan = launch.elementwise(a.size, launch.pack(a.dtype.itemsize))
    if b.ndim:
        launch.launch("elementwise", "multiply", (kind,), plan, arrays.dense(a), arrays.dense(b), out, i64(a.size))
    else:
        launch.launch("elementwise", "scale", (kind,), plan, arrays.dense(a), arrays.floats(b), out, i64(a.size))
    return out


def random_mask(
    like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator
) -> Array | NotImplementedType:
    """Zeros and 1 / keep in the dtype of `like`, drawn on the device from one number of a host generator."""
    kind = arrays.kind(like)
    size = math.prod(shape)
    if kind is None or not size:
        return NotImplemented
    mask = arrays.empty(like, shape)
    seed = int(generator.integers(2**63))
    keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    launch.launch("dropout", "random_mask", (kind,), launch.elementwise(size, 4), mask, i64(size), f32(keep), *keys)
    return mask


def rotate(x: Array, cos: Array, sin: Array) -> Array | NotImplementedType:
    kind = arrays.kind(x)
    if kind is None or not x.size or x.shape[-1] % 2:
        return NotImplemented
    x = x if x.strides[-1] == x.dtype.itemsize else arrays.dense(x)
    _, n_tokens, n_heads, size = x.shape
    out = arrays.empty(x)
    strides = [i64(stride // x.dtype.itemsize) for stride in x.strides[:3]]
    numbers = i64(x.size // 2), i32(n_tokens), i32(n_heads), i32(size // 2), *strides
    plan = launch.elementwise(x.size // 2, 1)
    launch.launch("elementwise", "rotate", (kind,), plan, x, arrays.floats(cos), arrays.floats(sin), out, *numbers)
    return out
