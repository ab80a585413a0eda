"""Elementwise CUDA kernels: activations, products, dropout masks and RoPE."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, graphs, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import decline_when


def _elementwise(name: str, x: Array, n_results: int) -> Any:
    """Launch an elementwise kernel on x; return its new results like x: one array, or a tuple of `n_results`."""
    results = [arrays.empty_like(x) for _ in range(n_results)]
    plan = launch.plan_elementwise(x.size, launch.elements_per_16_bytes(x.dtype.itemsize))
    launch.launch("elementwise", name, (arrays.cuda_type(x.dtype),), plan, arrays.contiguous(x), *results, i64(x.size))
    return results[0] if n_results == 1 else tuple(results)


@decline_when(arrays.array_decline_reason)
def gelu(x: Array) -> Array:
    """Return GELU (tanh approximation) of x in its dtype by a CUDA kernel; NotImplemented for float64 or an empty x."""
    return _elementwise("gelu", x, 1)


@decline_when(arrays.array_decline_reason)
def gelu_with_derivative(x: Array) -> tuple[Array, None]:
    """Return (GELU of x, None: `gelu_backward` recomputes it) by CUDA; NotImplemented for float64 or an empty x."""
    return _elementwise("gelu", x, 1), None


def _pair_decline_reason(a: Array, b: Array) -> str | None:
    """Return why a and b are not two arrays of one shape and supported dtype, or None if they are."""
    if type(b) is not type(a):
        return f"two arrays, got {type(a).__name__} and {type(b).__name__}"
    if b.shape != a.shape or b.dtype != a.dtype:
        return f"two arrays of one shape and dtype, got {a.shape} {a.dtype} and {b.shape} {b.dtype}"
    return arrays.array_decline_reason(a)


def _pairwise(name: str, a: Array, b: Array, out: Array | None = None) -> Array:
    """Launch an elementwise kernel on a and b; return `out`, by default a new array like a."""
    out = arrays.empty_like(a) if out is None else out
    plan = launch.plan_elementwise(a.size, launch.elements_per_16_bytes(a.dtype.itemsize))
    operands = arrays.contiguous(a), arrays.contiguous(b), out, i64(a.size)
    launch.launch("elementwise", name, (arrays.cuda_type(a.dtype),), plan, *operands)
    return out


def _add_decline_reason(a: Array, b: Array, out: Array | None = None) -> str | None:
    """Return why a kernel cannot add: `out` not contiguous or unlike a, or a and b differ; else None."""
    if out is not None and (out.shape != a.shape or out.dtype != a.dtype or not out.flags.c_contiguous):
        return f"a contiguous output of shape {a.shape} and dtype {a.dtype}"
    return _pair_decline_reason(a, b)


@decline_when(_add_decline_reason)
def add(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a + b, in `out` if given (which may be a or b), by CUDA; NotImplemented if shapes or dtypes differ."""
    return _pairwise("add", a, b, out)


def _multiply_decline_reason(a: Array, b: Array) -> str | None:
    """Return why a kernel cannot multiply: b is neither like a nor a 0-d array, or an unsupported dtype; else None."""
    is_scalar = type(b) is type(a) and b.ndim == 0
    return arrays.array_decline_reason(a) if is_scalar else _pair_decline_reason(a, b)


@decline_when(_multiply_decline_reason)
def multiply(a: Array, b: Array) -> Array:
    """Return a * b for two arrays of one shape and dtype, or a 0-d b, by a CUDA kernel; else NotImplemented."""
    return _pairwise("multiply", a, b) if b.ndim else _pairwise("scale", a, b.astype(f32, copy=False))


def _gelu_backward_decline_reason(grad: Array, x: Array | None, slope: Array | None) -> str | None:
    """Return a reason if x is None or unlike `grad`, else None; the slope is not examined."""
    return "the input of the forward, got its derivative" if x is None else _pair_decline_reason(grad, x)


@decline_when(_gelu_backward_decline_reason)
def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array:
    """Return `grad` times GELU's derivative at x by a CUDA kernel, `slope` unused; NotImplemented if x is None."""
    return _pairwise("gelu_backward", grad, x)


@decline_when(arrays.array_decline_reason)
def relu_squared(x: Array) -> tuple[Array, Array]:
    """Return relu(x) ** 2 and derivative 2 relu(x), in x's dtype, by CUDA; NotImplemented for float64 or an empty x."""
    return _elementwise("relu_squared", x, 2)


@decline_when(arrays.array_decline_reason)
def sigmoid(x: Array) -> Array:
    """Return the sigmoid of x in its dtype by a CUDA kernel; NotImplemented for float64 or an empty x."""
    return _elementwise("sigmoid", x, 1)


def _random_mask_decline_reason(like: Array, shape: tuple[int, ...], *_: Any, **__: Any) -> str | None:
    """Return a reason for an empty shape or an unsupported dtype of `like`, else None."""
    return "an empty mask" if 0 in shape else arrays.dtype_decline_reason(like)


@decline_when(_random_mask_decline_reason)
def dropout_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Return a mask, 0 or 1 / keep, dtype of `like`, seed from `generator`; NotImplemented if empty or float64."""
    kind, size = arrays.cuda_type(like.dtype), math.prod(shape)
    mask = arrays.empty_like(like, shape)
    seed, seed_at = graphs.draw(lambda: int(generator.integers(2**63)))
    plan, numbers = launch.plan_elementwise(size, 4), (i64(size), f32(keep), np.uint64(seed), seed_at)
    launch.launch("dropout", "random_mask", (kind,), plan, mask, *numbers)
    return mask


def _rotate_decline_reason(x: Array, *_: Any, **__: Any) -> str | None:
    """Return a reason for an odd head size, an empty x or an unsupported dtype, else None."""
    return f"an even head size, got {x.shape[-1]}" if x.shape[-1] % 2 else arrays.array_decline_reason(x)


@decline_when(_rotate_decline_reason)
def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Return x (B, T, H, D), pairs (i, i + D/2) rotated, by CUDA; NotImplemented if D is odd, x empty or float64."""
    x = x if x.strides[-1] == x.dtype.itemsize else arrays.contiguous(x)
    _, n_tokens, n_heads, size = x.shape
    out, kind = arrays.empty_like(x), arrays.cuda_type(x.dtype)
    strides = [i64(stride // x.dtype.itemsize) for stride in x.strides[:3]]
    numbers = i64(x.size // 2), i32(n_tokens), i32(n_heads), i32(size // 2), *strides
    plan = launch.plan_elementwise(x.size // 2, 1)
    operands = x, arrays.contiguous_float32(cos), arrays.contiguous_float32(sin), out
    launch.launch("elementwise", "rotate", (kind,), plan, *operands, *numbers)
    return out
