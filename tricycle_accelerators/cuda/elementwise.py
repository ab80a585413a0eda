"""One element at a time: activations, products, dropout's masks, rotary positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import unless


def _elementwise(name: str, x: Array, n_results: int) -> Any:
    results = [arrays.empty(x) for _ in range(n_results)]
    plan = launch.elementwise(x.size, launch.pack(x.dtype.itemsize))
    launch.launch("elementwise", name, (arrays.kind(x.dtype),), plan, arrays.dense(x), *results, i64(x.size))
    return results[0] if n_results == 1 else tuple(results)


@unless(arrays.decline_reason)
def gelu(x: Array) -> Array:
    return _elementwise("gelu", x, 1)


@unless(arrays.decline_reason)
def gelu_with_derivative(x: Array) -> tuple[Array, Array]:
    return _elementwise("gelu_with_derivative", x, 2)


def _why_not_multiply(a: Array, b: Array) -> str | None:
    if type(b) is not type(a):
        return f"an array to multiply by, got {type(b).__name__}"
    if b.ndim and (b.shape != a.shape or b.dtype != a.dtype):
        return f"two arrays of one shape and dtype, got {a.shape} {a.dtype} and {b.shape} {b.dtype}"
    return arrays.decline_reason(a)


@unless(_why_not_multiply)
def multiply(a: Array, b: Array) -> Array:
    """Two arrays of one shape, or an array and a 0-d one."""
    return _multiply(a, b)


def _multiply(a: Array, b: Array) -> Array:
    out, template = arrays.empty(a), (arrays.kind(a.dtype),)
    plan = launch.elementwise(a.size, launch.pack(a.dtype.itemsize))
    name, other = ("multiply", arrays.dense(b)) if b.ndim else ("scale", arrays.floats(b))
    launch.launch("elementwise", name, template, plan, arrays.dense(a), other, out, i64(a.size))
    return out


def _why_not_gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> str | None:
    return "no slope kept by the forward" if slope is None else _why_not_multiply(grad, slope)


@unless(_why_not_gelu_backward)
def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array:
    return _multiply(grad, slope)


@unless(arrays.decline_reason)
def relu_squared(x: Array) -> tuple[Array, Array]:
    return _elementwise("relu_squared", x, 2)


@unless(arrays.decline_reason)
def sigmoid(x: Array) -> Array:
    return _elementwise("sigmoid", x, 1)


def _why_not_random_mask(like: Array, shape: tuple[int, ...], *_: Any, **__: Any) -> str | None:
    return "an empty mask" if 0 in shape else arrays.why_not_dtype(like)


@unless(_why_not_random_mask)
def dropout_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Zeros and 1 / keep in the dtype of `like`, drawn on the device from one number of a host generator."""
    kind, size = arrays.kind(like.dtype), math.prod(shape)
    mask = arrays.empty(like, shape)
    seed = int(generator.integers(2**63))
    keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    launch.launch("dropout", "random_mask", (kind,), launch.elementwise(size, 4), mask, i64(size), f32(keep), *keys)
    return mask


def _why_not_rotate(x: Array, *_: Any, **__: Any) -> str | None:
    return f"an even head size, got {x.shape[-1]}" if x.shape[-1] % 2 else arrays.decline_reason(x)


@unless(_why_not_rotate)
def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    x = x if x.strides[-1] == x.dtype.itemsize else arrays.dense(x)
    _, n_tokens, n_heads, size = x.shape
    out, kind = arrays.empty(x), arrays.kind(x.dtype)
    strides = [i64(stride // x.dtype.itemsize) for stride in x.strides[:3]]
    numbers = i64(x.size // 2), i32(n_tokens), i32(n_heads), i32(size // 2), *strides
    plan = launch.elementwise(x.size // 2, 1)
    launch.launch("elementwise", "rotate", (kind,), plan, x, arrays.floats(cos), arrays.floats(sin), out, *numbers)
    return out
