"""Softmax and log-softmax kernels in CUDA, a warp or a block per row."""

from __future__ import annotations

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import i64
from tricycle_accelerators.providers import decline_when


def _rows(name: str, template: tuple[str, ...], x: Array, *others: Array) -> Array:
    """Launch a kernel of rows.cu on the rows of x and others; return its result, a new array like x."""
    out = arrays.empty_like(x)
    size = x.shape[-1]
    n_rows = x.size // size
    plan = launch.plan_rows(n_rows, size, x.dtype.itemsize)
    launch.launch(
        "rows", name, template, plan, arrays.contiguous(x), *map(arrays.contiguous, others), out, i64(n_rows), i64(size)
    )
    return out


@decline_when(arrays.array_decline_reason)
def softmax(x: Array, off_by_one: bool = False) -> Array:
    """Return softmax (softmax1 if `off_by_one`) over the last axis by CUDA; NotImplemented for float64 or empty x."""
    return _rows("softmax", (arrays.cuda_type(x.dtype), str(off_by_one).lower()), x)


@decline_when(arrays.array_decline_reason)
def log_softmax(x: Array) -> Array:
    """Return log-softmax over the last axis by CUDA, in the dtype of x; NotImplemented for float64 or an empty x."""
    return _rows("log_softmax", (arrays.cuda_type(x.dtype),), x)


def _softmax_backward_decline_reason(grad: Array, y: Array) -> str | None:
    """Return a reason unless `grad` has y's shape and dtype, and the dtype is supported; else None."""
    if grad.shape != y.shape or grad.dtype != y.dtype:
        return f"a gradient like the softmax, {y.shape} {y.dtype}, got {grad.shape} {grad.dtype}"
    return arrays.array_decline_reason(y)


@decline_when(_softmax_backward_decline_reason)
def softmax_backward(grad: Array, y: Array) -> Array:
    """Return softmax's input gradient from that of its output y; NotImplemented if shapes or dtypes of both differ."""
    return _rows("softmax_backward", (arrays.cuda_type(y.dtype),), grad, y)
