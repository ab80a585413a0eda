"""Softmax and its kin, a row for some threads."""

from __future__ import annotations

from types import NotImplementedType

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import i64


def _rows(name: str, template: tuple[str, ...], x: Array, *others: Array) -> Array:
    out = arrays.empty(x)
    size = x.shape[-1]
    n_rows = x.size // size
    plan = launch.teams(n_rows, size, x.dtype.itemsize)
    launch.launch(
        "rows", name, template, plan, arrays.dense(x), *map(arrays.dense, others), out, i64(n_rows), i64(size)
    )
    return out


def softmax(x: Array, off_by_one: bool = False) -> Array | NotImplementedType:
    kind = arrays.kind(x)
    return NotImplemented if kind is None or not x.size else _rows("softmax", (kind, str(off_by_one).lower()), x)


def log_softmax(x: Array) -> Array | NotImplementedType:
    kind = arrays.kind(x)
    return NotImplemented if kind is None or not x.size else _rows("log_softmax", (kind,), x)


def softmax_backward(grad: Array, y: Array) -> Array | NotImplementedType:
    kind = arrays.kind(grad, y)
    if kind is None or not y.size or grad.shape != y.shape:
        return NotImplemented
    return _rows("softmax_backward", (kind,), grad, y)
