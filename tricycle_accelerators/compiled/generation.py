"""What a token asks for between its products, in one call each."""

from __future__ import annotations

from functools import cache
from types import ModuleType, NotImplementedType

import numpy as np

from tricycle.kernels.reference.widening import wide


@cache
def loops() -> ModuleType:
    """The compiled functions; the first call imports Numba, and compiles where that has not been done before."""
    from tricycle_accelerators.compiled import loops

    return loops


def _fits(*arrays: np.ndarray | None) -> bool:
    """Whether all are float32 in one piece, or None; in memory as it was compiled for: aligned, and not read-only."""
    return all(a is None or (a.dtype == np.float32 and a.flags.carray) for a in arrays)


def normalise(
    x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None, eps: float, centred: bool
) -> np.ndarray | NotImplementedType:
    if x.ndim != 2 or not x.size or gain is None or not _fits(x, gain, bias):
        return NotImplemented
    y = np.empty_like(x)
    if not centred and bias is None:
        loops().rms_norm(x, gain, eps, y)
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
    if heads.dtype != np.float32 or heads.strides[2] != 4 or not heads.flags.behaved or not _fits(cos, sin):
        return NotImplemented
    loops().turn(heads, cos, sin)
    return None


def attend_one(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, cap: float | None, nothing: bool
) -> np.ndarray | NotImplementedType:
    """BLAS multiplies; all between its two products is one call."""
    keys = wide(keys)
    if q.dtype != np.float32 or keys.dtype != np.float32 or cap is not None:
        return NotImplemented
    n_tokens, n_key_heads, head_size = keys.shape
    products = keys.swapaxes(0, 1) @ q.reshape(n_key_heads, -1, head_size).swapaxes(1, 2)  # (K, S, H / K)
    weights = np.empty((n_key_heads, products.shape[2], n_tokens), np.float32)
    loops().shares(products, float(scale), nothing, weights)
    mixed: np.ndarray = weights @ wide(values).swapaxes(0, 1)
    return mixed.reshape(q.shape)
