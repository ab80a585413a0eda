"""One thread's products of float32: by NumPy's BLAS, or on an Intel processor by MKL where that is installed.

Intel's own library (`pip install 'tricycle-gpt[mkl]'`, 220 MB) is up to a quarter faster there than the OpenBLAS of
NumPy's wheels; on AMD's processors it is slower. It is called with ctypes and without threads of its own, for ours
share the work.

Source: "Developer Reference for Intel oneAPI Math Kernel Library for C", cblas_?gemm and "Conditional Numerical
Reproducibility Control".
"""

from __future__ import annotations

import ctypes
import platform
import sys
from ctypes import c_float, c_int, c_void_p
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np

from tricycle_accelerators import buffers, libraries, processor, threads

DISTRIBUTION, LIBRARY, EXTRA = "mkl", "libmkl_rt.so", "pip install 'tricycle-gpt[mkl]'"
LP64, SEQUENTIAL = 0, 1  # MKL_INTERFACE_LP64, MKL_THREADING_SEQUENTIAL
SAME_EVERY_RUN = 2  # MKL_CBWR_AUTO: the same bits from run to run, wherever the arrays lie
ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # CblasRowMajor, CblasNoTrans, CblasTrans
SGEMM: list[Any] = [c_int] * 6 + [c_float, c_void_p, c_int, c_void_p, c_int, c_float, c_void_p, c_int]


def problem() -> str | None:
    """Why MKL is not called, in one line; None when it is."""
    found = _sgemm()
    return found if isinstance(found, str) else None


# Cache: valid for the life of the process: depends on the processor and on what is installed.
@cache
def _sgemm() -> Any:
    """Its function, or why there is none."""
    if not processor.is_intel():
        return "MKL is for Intel's processors"
    if any(library.internal_api == "mkl" for library in threads.blas_libraries()):
        return "NumPy calls MKL itself"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"MKL is called on Linux on x86-64 alone, and this is {platform.system()} on {platform.machine()}"
    try:
        path = libraries.shipped(DISTRIBUTION, LIBRARY)
    except metadata.PackageNotFoundError:
        return f"MKL is not installed ({EXTRA})"
    if path is None:
        return f"{DISTRIBUTION} holds no {LIBRARY} (reinstall it: {EXTRA})"
    try:
        library = ctypes.CDLL(str(path))
        library.MKL_Set_Interface_Layer(LP64)
        library.MKL_Set_Threading_Layer(SEQUENTIAL)
        library.MKL_CBWR_Set(SAME_EVERY_RUN)
        sgemm = library.cblas_sgemm
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}"
    sgemm.argtypes, sgemm.restype = SGEMM, None
    return sgemm


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The product (M, N) of (M, K) and (K, N), written into `out` if that is given."""
    if problem() is not None or not (_fits(a) and _fits(b)):
        product: np.ndarray = np.matmul(a, b, out=out)
        return product
    if out is None:
        out = buffers.empty((a.shape[0], b.shape[1]), np.float32)
    elif not _fits(out) or out.strides[1] != out.itemsize:
        return np.matmul(a, b, out=out)
    _multiply(a, b, out)
    return out


def _fits(x: np.ndarray) -> bool:
    """Whether a matrix is float32 with rows, or columns, in one piece each, none within another."""
    if x.dtype != np.float32 or x.ndim != 2 or min(x.shape) < 2 or not x.flags.aligned:
        return False
    down, across = x.strides
    n_rows, n_columns = x.shape
    in_rows = across == x.itemsize and down >= n_columns * x.itemsize and down % x.itemsize == 0
    return in_rows or (down == x.itemsize and across >= n_rows * x.itemsize and across % x.itemsize == 0)


def _multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    (n_rows, n_inner), n_columns = a.shape, b.shape[1]
    _sgemm()(
        ROW_MAJOR,
        *(AS_IT_IS if x.strides[1] == x.itemsize else TRANSPOSED for x in (a, b)),
        *(n_rows, n_columns, n_inner),
        1.0,
        *(a.ctypes.data, max(a.strides) // a.itemsize),
        *(b.ctypes.data, max(b.strides) // b.itemsize),
        0.0,
        *(out.ctypes.data, max(out.strides) // out.itemsize),
    )
