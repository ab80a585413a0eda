"""`QuantizedMatrix`: weights in int8, bfloat16 or float16, for inference, and matrix products with them.

Generation reads each weight once per token, so its speed is limited by the size of the weights. Products are computed
in float32. Quantized weights cannot be trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad
from tricycle.create_graph import rule
from tricycle.devices import ARRAY_MODULES, Array, on_gpu
from tricycle.functions import linear
from tricycle.kernels import FEW_ROWS
from tricycle.kernels.dispatch import Kernel, kernel, upcast
from tricycle.ops import as_floating, check_device
from tricycle.tensor import Tensor, record

DTYPE_NAMES = ("int8", "bfloat16", "float16")
EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # bits that are all 1 in infinity and NaN alone
MAX_INT8 = 127  # the largest absolute value
CHUNK = 2**18  # elements that are converted to float32 at a time: they fit into the cache of a core
ROW_MULTIPLE = 32  # rows that are shared by threads: products of whole vector registers take less time


@kernel
def quantized_matmul(x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32") -> Array:
    """Compute x @ matrix + bias, (N, K) by (K, M), dequantizing some rows at a time; the result has the dtype of x.

    The product is computed in float32 or more. The precision "bfloat16" may round x to 16 bits.
    """
    rows = upcast(x)
    product = np.zeros((len(rows), matrix.shape[1]), rows.dtype)
    for chunk in matrix.row_chunks():
        part = matrix.dequantize_rows(chunk).astype(rows.dtype, copy=False)
        if matrix.transposed:
            product[:, chunk] = rows @ part.T
        else:
            product += rows[:, chunk] @ part
    if bias is not None:
        product += bias
    return product.astype(x.dtype, copy=False)


@Kernel
def to_float32(x: np.ndarray) -> np.ndarray:
    """Return a copy of an array of 8-bit or 16-bit numbers in float32."""
    return x.astype(np.float32)


@Kernel
def round_float32(x: np.ndarray, out: np.ndarray) -> None:
    """Write float32 numbers into `out`, rounded to its 16-bit dtype."""
    out[...] = x


class QuantizedMatrix:
    """An immutable matrix with 8-bit or 16-bit elements, in host memory.

    The stored rows are the rows of an embedding table or, if `transposed`, the columns of a linear layer's matrix. So a
    table can be shared with a tied head, and each output of a layer has its own scales.

    Args:
        values: (N, K), int8, bfloat16 or float16.
        scales: for int8, (N, 1): an element is its value times the scale of its row.
        transposed: whether the matrix is used as (K, N).
        prepared: layouts that providers have made of it, shared with the transposed matrix.
    """

    ndim = 2
    __slots__ = ("values", "scales", "transposed", "prepared", "shape", "dtype", "size")

    def __init__(
        self,
        values: np.ndarray,
        scales: np.ndarray | None = None,
        transposed: bool = False,
        prepared: dict[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.scales = scales
        self.transposed = transposed
        self.prepared: dict[str, Any] = {} if prepared is None else prepared
        self.shape: tuple[int, ...] = values.shape[::-1] if transposed else values.shape
        self.dtype = values.dtype
        self.size = values.size

    @classmethod
    def quantize(cls, matrix: np.ndarray, dtype_name: str, transposed: bool = False) -> QuantizedMatrix:
        """Convert to int8 with a scale per row (`transposed`: column), or 16-bit floats; ValueError if not finite.

        The scale is such that the largest element of the row becomes 127.

        Args:
            matrix: (N, K), or (K, N) if `transposed`. A matrix that has the 16-bit dtype already is not copied.
            dtype_name: one of DTYPE_NAMES.

        Raises:
            ValueError: an unknown dtype, or elements that are not finite or too large for it.
            ImportError: bfloat16 without ml_dtypes.
        """
        rows, dtype = matrix.T if transposed else matrix, quantized_dtype(dtype_name)
        values = rows if rows.dtype == dtype else np.empty(rows.shape, dtype)
        scales = np.empty((len(rows), 1), np.float32) if dtype_name == "int8" else None
        for chunk in chunks_in_cache(*rows.shape):
            floats = rows[chunk] if values is rows else np.array(rows[chunk], np.float32, order="C")
            if not _is_finite(floats):
                raise ValueError(f"quantized weights ({dtype_name}): expected finite numbers, got infinity or NaN")
            if scales is not None:
                _round(floats, values[chunk], scales[chunk])
            elif values is not rows:
                with np.errstate(over="ignore"):
                    values[chunk] = floats
                if not _is_finite(values[chunk]):
                    raise ValueError(f"quantized weights ({dtype_name}): got elements that are too large")
        return cls(values, scales, transposed)

    # ---------------------------------------------------------------- description
    @property
    def format_name(self) -> str:
        """The format of the elements, such as "int8" or "bfloat16"."""
        return str(self.dtype.name)

    @property
    def arrays(self) -> list[np.ndarray]:
        """The stored arrays: values and, for int8, scales."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    @property
    def nbytes(self) -> int:
        """The size of the stored arrays in bytes."""
        return sum(array.nbytes for array in self.arrays)

    def __repr__(self) -> str:
        """Return the shape and the format, such as "(64, 32) int8"."""
        return f"{self.shape} {self.format_name}"

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def linear(
        self, x: Tensor, weights: Tensor, bias: Tensor | None, name: str, precision: str, dtype: Any = None
    ) -> Tensor:
        """Compute x W + b with this matrix as W, with gradients for x and bias; ValueError if `weights` needs one."""
        if weights.requires_grad:
            raise ValueError(f"{name}: expected float32 weights to train, got {self!r}")
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
        """Return the transposed matrix, sharing the values; the matrix itself for the order (0, 1)."""
        if tuple(order) == (0, 1):
            return self
        return QuantizedMatrix(self.values, self.scales, not self.transposed, self.prepared)

    @property
    def T(self) -> QuantizedMatrix:
        """The transposed matrix, without a copy."""
        return self.transpose()

    def copy(self) -> QuantizedMatrix:
        """Return the matrix itself, as it is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedMatrix:
        """Return the matrix itself, as it is immutable."""
        return self

    def __getitem__(self, ids: Any) -> np.ndarray:
        """Return stored rows by index as float32, as an embedding table does; TypeError if `transposed`."""
        if self.transposed:
            raise TypeError(
                f"quantized weights: expected an embedding table to look up rows, got a layer's matrix {self!r}"
            )
        return self.dequantize_rows(ids)

    def dequantize_rows(self, rows: Any) -> np.ndarray:
        """Return stored rows (..., K) by a slice or index array, the columns if `transposed`, as float32."""
        floats = to_float32(self.values[rows])
        if self.scales is not None:
            floats *= self.scales[rows]
        return floats

    def row_ranges(self) -> list[slice]:
        """Return [slice(0, n_rows)]: the ranges of stored rows within which a slice for `dequantize_rows` must be."""
        return [slice(0, len(self.values))]

    def row_chunks(self, n_threads: int = 1) -> Iterator[slice]:
        """Yield slices of stored rows that fit into the CPU cache as float32, split equally for `n_threads`."""
        row_size = max(1, self.size // max(1, self.row_ranges()[-1].stop))
        for rows in self.row_ranges():
            n_rows = rows.stop - rows.start
            n_chunks = n_threads * -(-n_rows * row_size // (CHUNK * n_threads))
            step = -(-n_rows // max(1, n_chunks))
            step = step if n_threads == 1 else -(-step // ROW_MULTIPLE) * ROW_MULTIPLE
            for start in range(rows.start, rows.stop, max(1, step)):
                yield slice(start, min(start + step, rows.stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a dequantized copy in the matrix's shape, float32 by default; `copy` has no effect."""
        shape = self.shape[::-1] if self.transposed else self.shape
        whole = np.empty(shape, np.float32 if dtype is None else dtype)
        for chunk in self.row_chunks():
            whole[chunk] = self.dequantize_rows(chunk)
        return whole.T if self.transposed else whole

    def stored_values(self) -> np.ndarray:
        """Return a view of the values in the matrix's shape, without scales, so meaningful only for 16-bit dtypes."""
        return self.values.T if self.transposed else self.values


ARRAY_MODULES[QuantizedMatrix] = np  # it is in host memory, and np.asarray dequantizes it


@rule("tricycle.kernels.quantized.QuantizedMatrix.linear")
def _linear(node: Tensor, grad: Tensor, v: Any) -> list[Tensor | None]:
    """Return [gradient of x, None, gradient of any bias] of a product with a quantized matrix, as Tensors."""
    dy = grad.reshape(v.n_rows, v.self.shape[1])
    dx = linear(dy, Tensor(v.self.T, False)).reshape(v.shape) if node.args[0].requires_grad else None
    return [dx, None, dy.sum(axis=0)][: len(node.args)]


def quantized_dtype(dtype_name: str) -> np.dtype:
    """Return the dtype of "int8", "bfloat16" (ImportError without ml_dtypes) or "float16"; ValueError for others."""
    if dtype_name not in DTYPE_NAMES:
        raise ValueError(f"quantized weights: expected one of {', '.join(DTYPE_NAMES)}, got {dtype_name!r}")
    if dtype_name != "bfloat16":
        return np.dtype(dtype_name)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError("bfloat16 needs ml_dtypes (pip install 'tricycle-gpt[bf16]')") from None
    dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)
    return dtype


def chunks_in_cache(n_rows: int, row_size: int) -> Iterator[slice]:
    """Return an iterator over slices of rows of at most 2**18 elements (or one row), the last maybe beyond the end."""
    step = max(1, CHUNK // max(1, row_size))
    return (slice(start, start + step) for start in range(0, n_rows, step))


def _is_finite(x: np.ndarray) -> bool:
    """Return whether all numbers are finite; 16-bit ones are examined by their bits, which takes least time."""
    exponent = EXPONENTS.get(x.dtype.name)
    if exponent is None:
        return bool(np.isfinite(x).all())
    return not (x.view(np.uint16) & exponent == exponent).any()


def _round(floats: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    """Write rows of `floats` as int8 values and scales, 0 where a scale would be 0 or subnormal; overwrite `floats`."""
    largest = np.abs(floats).max(axis=1, keepdims=True, initial=0)
    np.divide(largest, MAX_INT8, out=scales)
    scales[scales < np.finfo(np.float32).tiny] = 0  # subnormal scales have no finite inverse
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    floats *= inverse
    np.rint(floats, out=floats)
    values[...] = np.clip(floats, -MAX_INT8, MAX_INT8, out=floats)
