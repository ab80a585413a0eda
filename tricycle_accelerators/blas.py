"""Matrix products in one thread, by NumPy's BLAS or, on an Intel processor, by MKL where MKL is installed.

Intel's own library (`pip install 'tricycle-gpt[mkl]'`, 220 MB) is up to a quarter faster there than the OpenBLAS of
NumPy's wheels; on AMD's processors it is slower. It is called with ctypes and without threads of its own, for ours
share the work.

Source: "Developer Reference for Intel oneAPI Math Kernel Library for C", cblas_?gemm and "Conditional Numerical
Reproducibility Control".
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tricycle_accelerators import buffers, libraries, processor, threads
from tricycle_accelerators.providers import exclusion_reason

DISTRIBUTION, LIBRARY, EXTRA = "mkl", "libmkl_rt.so", "pip install 'tricycle-gpt[mkl]'"
LP64, SEQUENTIAL = 0, 1  # MKL_INTERFACE_LP64, MKL_THREADING_SEQUENTIAL
SAME_EVERY_RUN = 2  # MKL_CBWR_AUTO: the same bits from run to run, wherever the arrays lie
ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # CblasRowMajor, CblasNoTrans, CblasTrans
GEMM: list[Any] = [c_int] * 6 + [c_float, c_void_p, c_int, c_void_p, c_int, c_float, c_void_p, c_int]


class _Mkl(NamedTuple):
    """Its functions for operands of float32 and of bfloat16; both have results of float32."""

    sgemm: Any
    gemm_bf16: Any


def unavailable_reason() -> str | None:
    """Return why MKL cannot be used, in one line; None when it can."""
    found = _mkl()
    return found if isinstance(found, str) else None


# Cache: valid for the life of the process: depends on the processor and on what is installed.
@cache
def _mkl() -> _Mkl | str:
    """Load MKL on the first call (cached); return its functions, or one line of text that says why it is not used."""
    if why := exclusion_reason("mkl"):
        return why
    if not processor.is_intel():
        return "MKL is for Intel's processors"
    if any(library.internal_api == "mkl" for library in threads.blas_libraries()):
        return "NumPy calls MKL itself"
    path = libraries.find_library("MKL", DISTRIBUTION, LIBRARY, EXTRA)
    if isinstance(path, str):
        return path
    try:
        return load_mkl(str(path))
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}"


def load_mkl(path: str) -> _Mkl:
    """Load MKL for one thread, reproducible; return its (sgemm, gemm_bf16); OSError or AttributeError if it fails."""
    library = ctypes.CDLL(path)
    library.MKL_Set_Interface_Layer(LP64)
    library.MKL_Set_Threading_Layer(SEQUENTIAL)
    library.MKL_CBWR_Set(SAME_EVERY_RUN)
    functions = _Mkl(library.cblas_sgemm, library.cblas_gemm_bf16bf16f32)
    for function in functions:
        function.argtypes, function.restype = GEMM, None
    return functions


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the matrix product (M, K) x (K, N), in `out` if given, by MKL if usable and float32, else `np.matmul`."""
    mkl = _mkl()
    if isinstance(mkl, str) or not (_fits(a, np.float32) and _fits(b, np.float32)):
        product: np.ndarray = np.matmul(a, b, out=out)
        return product
    if out is None:
        out = buffers.empty((a.shape[0], b.shape[1]), np.float32)
    elif not _fits(out, np.float32) or out.strides[1] != out.itemsize:
        return np.matmul(a, b, out=out)
    _gemm(mkl.sgemm, a, b, out)
    return out


def multiply_bfloat16(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Write the product of two bfloat16 matrices into float32 `out` by MKL in one thread; RuntimeError without MKL.

    The strides of a single row or column need not be valid leading dimensions, so it is copied.
    """
    mkl = _mkl()
    if isinstance(mkl, str):
        raise RuntimeError(f"multiply_bfloat16: {mkl}")
    a, b = (x if _fits(x, x.dtype) else np.array(x, order="C") for x in (a, b))
    _gemm(mkl.gemm_bf16, a, b, out)


def _fits(x: np.ndarray, dtype: Any) -> bool:
    """Return whether a matrix, at least (2, 2), is aligned, of that dtype, with contiguous separate rows or columns."""
    if x.dtype != dtype or x.ndim != 2 or min(x.shape) < 2 or not x.flags.aligned:
        return False
    down, across = x.strides
    n_rows, n_columns = x.shape
    in_rows = across == x.itemsize and down >= n_columns * x.itemsize and down % x.itemsize == 0
    return in_rows or (down == x.itemsize and across >= n_rows * x.itemsize and across % x.itemsize == 0)


def _gemm(function: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Write a @ b into `out` by a CBLAS function; the rows or the columns of each matrix are contiguous."""
    (n_rows, n_inner), n_columns = a.shape, b.shape[1]
    function(
        ROW_MAJOR,
        *(AS_IT_IS if x.strides[1] == x.itemsize else TRANSPOSED for x in (a, b)),
        *(n_rows, n_columns, n_inner),
        1.0,
        *(a.ctypes.data, max(a.strides) // a.itemsize),
        *(b.ctypes.data, max(b.strides) // b.itemsize),
        0.0,
        *(out.ctypes.data, max(out.strides) // out.itemsize),
    )
