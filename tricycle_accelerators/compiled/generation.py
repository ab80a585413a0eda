"""What a token asks for between its products, in one call each."""

from __future__ import annotations

from functools import cache
from types import ModuleType, NotImplementedType

import numpy as np

from tricycle.kernels.reference.widening import is_narrow


# Cache: valid for the life of the process: a module.
@cache
def loops() -> ModuleType:
    """What Numba compiles for this; the first call imports it, and compiles where that has not been done before."""
    from tricycle_accelerators.compiled import loops

    return loops


# Cache: valid for the life of the process: a module.
@cache
def training_loops() -> ModuleType:
    """The same for training."""
    from tricycle_accelerators.compiled import training_loops

    return training_loops


def _fits(array: np.ndarray | None) -> bool:
    """Whether it is float32 in one piece, or None; in memory as it was compiled for: aligned, and not read-only."""
    return array is None or (array.dtype == np.float32 and array.flags.carray)


def normalise(
    x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None, eps: float, centred: bool
) -> np.ndarray | NotImplementedType:
    if x.ndim != 2 or not x.size or gain is None or not (_fits(x) and _fits(gain) and _fits(bias)):
        return NotImplemented
    y = np.empty_like(x)
    if not centred and bias is None:
        loops().rms_norm(x, gain, eps, y, np.empty(len(x), np.float32))
        return y
    if not centred or bias is None:
        return NotImplemented
    loops().layer_norm(x, gain, bias, eps, y)
    return y


def gated_swish(x: np.ndarray) -> np.ndarray | NotImplementedType:
    if x.ndim != 2 or not _fits(x):
        return NotImplemented
    y = np.empty((len(x), x.shape[1] // 2), np.float32)
    loops().gated_swish(x, y)
    return y


def turn(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> NotImplementedType | None:
    if heads.dtype != np.float32 or heads.strides[2] != 4 or not heads.flags.behaved or not (_fits(cos) and _fits(sin)):
        return NotImplemented
    loops().turn(heads, cos, sin)
    return None


def attend_one(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, cap: float | None, nothing: bool
) -> np.ndarray | NotImplementedType:
    if cap is not None or not keys.size or not _fits(q):
        return NotImplemented
    mixed = np.empty_like(q)
    if _fits(keys) and _fits(values):
        loops().attend(q, keys, values, float(scale), nothing, mixed)
        return mixed
    if not (is_narrow(keys) and keys.dtype == values.dtype and keys.flags.carray and values.flags.carray):
        return NotImplemented
    bits = keys.view(np.uint16), values.view(np.uint16)
    loops().attend_16(q, *bits, keys.dtype != np.float16, float(scale), nothing, mixed)
    return mixed
