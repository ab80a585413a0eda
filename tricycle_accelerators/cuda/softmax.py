"""Softmax and its kin, a row for some threads."""

from __future__ import annotations

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import i64
from tricycle_accelerators.providers import unless


def _rows(name: str, template: tuple[str, ...], x: Array, *others: Array) -> Array:
    out = arrays.empty(x)
    size = x.shape[-1]
    n_rows = x.size // size
    plan = launch.teams(n_rows, size, x.dtype.itemsize)
    launch.launch(
        "rows", name, template, plan, arrays.dense(x), *map(arrays.dense, others), out, i64(n_rows), i64(size)
    )
    return out


@unless(arrays.decline_reason)
def softmax(x: Array, off_by_one: bool = False) -> Array:
    return _rows("softmax", (arrays.kind(x.dtype), str(off_by_one).lower()), x)


@unless(arrays.decline_reason)
def log_softmax(x: Array) -> Array:
    return _rows("log_softmax", (arrays.kind(x.dtype),), x)


def _why_not_softmax_backward(grad: Array, y: Array) -> str | None:
    if grad.shape != y.shape or grad.dtype != y.dtype:
        return f"a gradient like the softmax, {y.shape} {y.dtype}, got {grad.shape} {grad.dtype}"
    return arrays.decline_reason(y)


@unless(_why_not_softmax_backward)
def softmax_backward(grad: Array, y: Array) -> Array:
    return _rows("softmax_backward", (arrays.kind(y.dtype),), grad, y)
