"""Matrices whose numbers have 8 or 16 bits, and products with them.

A model that writes reads each of its weights once a token, so it is as fast as its weights are small. What is computed
with them has 32 bits all the same. They are for models that are used: nothing here can be trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad
from tricycle.devices import ARRAY_MODULES, Array, on_gpu
from tricycle.functions import linear
from tricycle.kernels import FEW_ROWS
from tricycle.kernels.dispatch import kernel, upcast
from tricycle.ops import as_floating, check_device
from tricycle.tensor import Tensor, record

KINDS = ("int8", "bfloat16", "float16")
MOST = 127  # of an int8, on both sides of 0
AT_ONCE = 2**18  # numbers that are float32 at one time: they stay in a core's cache


@kernel
def quantized_matmul(x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32") -> Array:
    """x W + bias for rows x (N, K), a matrix of few bits (K, M) and a bias (M,).

    Computed as if the matrix had 32 bits. The result has the dtype of x, which may be 16 bits.

    Args:
        precision: "bfloat16" may round x to 16 bits.
    """
    rows = upcast(x)
    product = np.zeros((len(rows), matrix.shape[1]), rows.dtype)
    for piece in matrix.row_chunks():
        part = matrix.dequantize_rows(piece).astype(rows.dtype, copy=False)
        if matrix.transposed:
            product[:, piece] = rows @ part.T
        else:
            product += rows[:, piece] @ part
    if bias is not None:
        product += bias
    return product.astype(x.dtype, copy=False)


class QuantizedMatrix:
    """A matrix of 8 or 16 bits a number, in host memory. It never changes.

    Its rows lie as they do in other people's files: those of a table of embeddings, or, `transposed`, the columns of a
    layer's matrix. So one table serves a tied head, and each output of a layer has scales of its own.

    Args:
        values: (N, K), int8, bfloat16 or float16.
        scales: of int8, (N, B): a number is the value times the scale of its row and of its block of K / B. None for 16
            bits.
        turned: seen as (K, N).
        ready: what a faster version has made of it, shared with the same matrix turned.
    """

    ndim = 2
    __slots__ = ("values", "scales", "transposed", "ready", "shape", "dtype", "size")

    def __init__(
        self,
        values: np.ndarray,
        scales: np.ndarray | None = None,
        transposed: bool = False,
        ready: dict[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.scales = scales
        self.transposed = transposed
        self.ready: dict[str, Any] = {} if ready is None else ready
        self.shape: tuple[int, ...] = values.shape[::-1] if transposed else values.shape
        self.dtype = values.dtype
        self.size = values.size

    @classmethod
    def quantize(cls, matrix: np.ndarray, dtype_name: str, transposed: bool = False) -> QuantizedMatrix:
        """The matrix of a kind that is nearest to one of floats.

        An int8 has a scale a row (a column where `transposed`): the largest number of it is 127.

        Args:
            matrix: (N, K), or (K, N) where `transposed`. One of the kind's own 16 bits is not copied.
            dtype_name: in KINDS.

        Raises:
            ValueError: an unknown dtype_name, numbers that are not finite or too large for the kind.
            ImportError: bfloat16 without ml_dtypes.
        """
        rows = matrix.T if transposed else matrix
        values = rows if rows.dtype == dtype_of(dtype_name) else np.empty(rows.shape, dtype_of(dtype_name))
        scales = np.empty((len(rows), 1), np.float32) if dtype_name == "int8" else None
        for piece in _pieces(*rows.shape):
            floats = np.array(rows[piece], np.float32, order="C")
            if not np.isfinite(floats).all():
                raise ValueError(f"weights of few bits ({dtype_name}): expected finite numbers, got infinity or NaN")
            if values is rows:
                continue
            if scales is None:
                with np.errstate(over="ignore"):
                    values[piece] = floats
                if not np.isfinite(values[piece].astype(np.float32)).all():
                    raise ValueError(f"weights of few bits ({dtype_name}): got numbers that are too large for them")
            else:
                _round(floats, values[piece], scales[piece])
        return cls(values, scales, transposed)

    # ---------------------------------------------------------------- what it says of itself
    @property
    def kind(self) -> str:
        """Such as "int8", "int8 in blocks of 32" or "bfloat16"."""
        name = self.dtype.name
        blocks = 1 if self.scales is None else self.scales.shape[1]
        return f"{name} in blocks of {self.values.shape[1] // blocks}" if blocks > 1 else name

    @property
    def nbytes(self) -> int:
        """Of the values and their scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __repr__(self) -> str:
        return f"{self.shape} {self.kind}"

    def __len__(self) -> int:
        return self.shape[0]

    def linear(
        self, x: Tensor, weights: Tensor, bias: Tensor | None, name: str, precision: str, dtype: Any = None
    ) -> Tensor:
        """Compute x W + b, as `tricycle.functions.linear` does with weights of which this is the array.

        Raises:
            ValueError: the weights require a gradient.
        """
        if weights.requires_grad:
            raise ValueError(f"{name}: expected weights of 32 bits to train, got {self!r}")
        if on_gpu(x.array):
            check_device(name, x.array, self)
        shape, n_rows = x.array.shape, math.prod(x.array.shape[:-1])
        if n_rows > FEW_ROWS and self.dtype.name == precision:
            return linear(x, Tensor(self.stored_values(), False), bias, name, precision, dtype)
        rows = as_floating(x.array).reshape(n_rows, self.shape[0])
        y = quantized_matmul(rows, self, None if bias is None else bias.array, precision)
        y = y if dtype is None else y.astype(dtype, copy=False)
        args = (x, weights) if bias is None else (x, weights, bias)

        def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
            dy = grad.reshape(n_rows, self.shape[1])
            dx = quantized_matmul(dy, self.T).reshape(shape) if needs_grad[0] else None
            return [dx, None, kernels.sum_rows(dy) if any(needs_grad[2:]) else None][: len(args)]

        return record(y.reshape(*shape[:-1], self.shape[1]), args, backward, name)

    # ---------------------------------------------------------------- as an array
    def transpose(self, order: tuple[int, ...] = (1, 0)) -> QuantizedMatrix:
        """The same matrix, or with its axes the other way round; nothing is copied."""
        if tuple(order) == (0, 1):
            return self
        return QuantizedMatrix(self.values, self.scales, not self.transposed, self.ready)

    @property
    def T(self) -> QuantizedMatrix:
        """The matrix with its axes the other way round."""
        return self.transpose()

    def copy(self) -> QuantizedMatrix:
        """Itself: it never changes."""
        return self

    def __getitem__(self, ids: Any) -> np.ndarray:
        """Rows of a table by their numbers, as float32."""
        if self.transposed:
            raise TypeError(f"weights of few bits: expected a table to take rows of, got a layer's matrix {self!r}")
        return _floats(self.values[ids], None if self.scales is None else self.scales[ids])

    def dequantize_rows(self, piece: slice) -> np.ndarray:
        """Some of the rows of `values`, as float32."""
        return _floats(self.values[piece], None if self.scales is None else self.scales[piece])

    def row_chunks(self) -> Iterator[slice]:
        """Rows of `values`, some at a time."""
        return _pieces(*self.values.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.values.shape, np.float32 if dtype is None else dtype)
        for piece in self.row_chunks():
            whole[piece] = self.dequantize_rows(piece)
        return whole.T if self.transposed else whole

    def stored_values(self) -> np.ndarray:
        """Numbers of 16 bits as they are; nothing is copied."""
        return self.values.T if self.transposed else self.values

    def with_row_scales(self) -> QuantizedMatrix:
        """An int8 with one scale a row: itself, or rounded once more where it has blocks."""
        if self.scales is None or self.scales.shape[1] == 1:
            return self
        values = np.empty_like(self.values)
        scales = np.empty((len(values), 1), np.float32)
        for piece in self.row_chunks():
            _round(self.dequantize_rows(piece), values[piece], scales[piece])
        return QuantizedMatrix(values, scales, self.transposed)


ARRAY_MODULES[QuantizedMatrix] = np  # it lies in host memory, and np.asarray gives its numbers


def dtype_of(dtype_name: str) -> np.dtype:
    """That of the values.

    Raises:
        ValueError: not in KINDS.
        ImportError: bfloat16 without ml_dtypes.
    """
    if dtype_name not in KINDS:
        raise ValueError(f"weights of few bits: expected one of {', '.join(KINDS)}, got {dtype_name!r}")
    if dtype_name != "bfloat16":
        return np.dtype(dtype_name)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError("bfloat16 needs ml_dtypes (pip install 'tricycle-gpt[bf16]')") from None
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _pieces(n_rows: int, row_size: int) -> Iterator[slice]:
    step = max(1, AT_ONCE // max(1, row_size))
    return (slice(start, start + step) for start in range(0, n_rows, step))


def _floats(values: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """(..., K) with scales (..., B) as float32."""
    floats = values.astype(np.float32)
    if scales is None:
        return floats
    if scales.shape[-1] == 1:
        floats *= scales
        return floats
    blocks = floats.reshape(*scales.shape, -1)
    blocks *= scales[..., None]
    return floats


def _round(floats: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """Write rows as int8, and the scale of each, which is 0 for a row of zeros."""
    largest = np.abs(floats).max(axis=1, keepdims=True, initial=0)
    np.divide(largest, MOST, out=scales)
    scales[scales < np.finfo(np.float32).tiny] = 0  # nor is there an inverse of what is smaller
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    floats *= inverse
    np.rint(floats, out=floats)
    values[...] = np.clip(floats, -MOST, MOST, out=floats)
