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
from typing import Any

import numpy as np

from tricycle_accelerators import buffers, libraries, parallel_matmul, processor, threads
from tricycle_accelerators.providers import exclusion_reason

DISTRIBUTION, LIBRARY, EXTRA = "mkl", "libmkl_rt.so", "pip install 'tricycle-gpt[mkl]'"
LP64, SEQUENTIAL = 0, 1  # MKL_INTERFACE_LP64, MKL_THREADING_SEQUENTIAL
SAME_EVERY_RUN = 2  # MKL_CBWR_AUTO: the same bits from run to run, wherever the arrays lie
ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # CblasRowMajor, CblasNoTrans, CblasTrans
GEMM: list[Any] = [c_int] * 6 + [c_float, c_void_p, c_int, c_void_p, c_int, c_float, c_void_p, c_int]


def unavailable_reason() -> str | None:
    """Return why MKL cannot be used, in one line; None when it can."""
    found = _mkl()
    return found if isinstance(found, str) else None


# Cache: valid for the life of the process: depends on the processor and on what is installed.
@cache
def _mkl() -> Any:
    """Load MKL on the first call (cached); return its `cblas_sgemm`, or one line of text: why it is not used."""
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
        return _load_mkl(str(path))
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}"


def _load_mkl(path: str) -> Any:
    """Load MKL for one thread, reproducible; return its `cblas_sgemm`; OSError or AttributeError if it fails."""
    library = ctypes.CDLL(path)
    library.MKL_Set_Interface_Layer(LP64)
    library.MKL_Set_Threading_Layer(SEQUENTIAL)
    library.MKL_CBWR_Set(SAME_EVERY_RUN)
    sgemm = library.cblas_sgemm
    sgemm.argtypes, sgemm.restype = GEMM, None
    return sgemm


def multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the matrix product (M, K) x (K, N), in `out` if given, by MKL if usable and float32, else `np.matmul`."""
    sgemm = _mkl()
    if isinstance(sgemm, str) or not (_fits(a) and _fits(b)):
        product: np.ndarray = np.matmul(a, b, out=out)
        return product
    if out is None:
        out = buffers.empty((a.shape[0], b.shape[1]), np.float32)
    elif not _fits(out) or out.strides[1] != out.itemsize:
        return np.matmul(a, b, out=out)
    (n_rows, n_inner), n_columns = a.shape, b.shape[1]
    sgemm(
        ROW_MAJOR,
        *(AS_IT_IS if x.strides[1] == x.itemsize else TRANSPOSED for x in (a, b)),
        *(n_rows, n_columns, n_inner),
        1.0,
        *(a.ctypes.data, max(a.strides) // a.itemsize),
        *(b.ctypes.data, max(b.strides) // b.itemsize),
        0.0,
        *(out.ctypes.data, max(out.strides) // out.itemsize),
    )
    return out


def _fits(x: np.ndarray) -> bool:
    """Return whether x is aligned float32, at least (2, 2), with contiguous rows or columns that are separate."""
    is_matrix = x.dtype == np.float32 and x.ndim == 2 and min(x.shape) > 1 and x.flags.aligned
    return is_matrix and parallel_matmul.has_contiguous_axis(x)
