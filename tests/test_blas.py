"""Products of float32 by MKL: the same numbers, whatever the layout, and why it is not called."""

from __future__ import annotations

import ctypes
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from tricycle_accelerators import blas, libraries, processor, threads

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def fresh():
    """MKL is looked for anew."""
    blas._sgemm.cache_clear()
    yield
    blas._sgemm.cache_clear()


@pytest.fixture
def intel(monkeypatch):
    """An Intel processor under Linux whose NumPy has OpenBLAS."""
    monkeypatch.setattr(processor, "is_intel", lambda: True)
    monkeypatch.setattr(threads, "blas_libraries", lambda: (SimpleNamespace(internal_api="openblas"),))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def matrix(address: int, shape: tuple[int, int], turned: bool, stride: int) -> np.ndarray:
    """What BLAS reads there: rows of so many numbers each, of which the first are the matrix's."""
    n_rows, n_columns = shape[::-1] if turned else shape
    numbers = ctypes.POINTER(ctypes.c_float)
    assert stride >= n_columns
    flat = np.ctypeslib.as_array(ctypes.cast(address, numbers), ((n_rows - 1) * stride + n_columns,))
    rows = np.lib.stride_tricks.as_strided(flat, (n_rows, n_columns), (4 * stride, 4))
    return rows.T if turned else rows


def cblas_sgemm(order, turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """By the text of the standard, so that what we call it with is checked where there is no MKL."""
    assert (order, alpha, beta) == (101, 1.0, 0.0)
    left, right = matrix(a, (m, k), turn_a == 112, lda), matrix(b, (k, n), turn_b == 112, ldb)
    matrix(c, (m, n), False, ldc)[...] = left @ right


def draw(shape: tuple[int, int], layout: str) -> np.ndarray:
    n_rows, n_columns = shape
    if layout == "turned":
        return draw((n_columns, n_rows), "plain").T
    if layout == "part":
        return rng.standard_normal((n_rows + 1, n_columns + 5)).astype(np.float32)[1:, 2 : n_columns + 2]
    if layout == "every second":
        return rng.standard_normal((n_rows, 2 * n_columns)).astype(np.float32)[:, ::2]
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("standard", [False, True], ids=["this install's", "by the text"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 3), (5, 1, 3), (5, 3, 1), (33, 70, 18)], ids=str)
@pytest.mark.parametrize("left", ["plain", "turned", "part", "every second"])
@pytest.mark.parametrize("right", ["plain", "turned", "part", "every second"])
def test_products(monkeypatch, standard, shape, left, right):
    if standard:
        monkeypatch.setattr(blas, "_sgemm", lambda: cblas_sgemm)
    n_rows, n_inner, n_columns = shape
    a, b = draw((n_rows, n_inner), left), draw((n_inner, n_columns), right)
    expected = a.astype(np.float64) @ b
    np.testing.assert_allclose(blas.multiply(a, b), expected, 1e-4, 1e-5)
    for layout in ("plain", "turned", "part", "every second"):
        out = draw((n_rows, n_columns), layout)
        out[...] = np.nan  # nothing of what was there is added
        assert blas.multiply(a, b, out) is out
        np.testing.assert_allclose(out, expected, 1e-4, 1e-5)


def test_other_dtypes_are_numpys(monkeypatch):
    monkeypatch.setattr(blas, "_sgemm", lambda: None)  # a call of it would raise
    a, b = rng.standard_normal((4, 3)), rng.standard_normal((3, 5))
    np.testing.assert_array_equal(blas.multiply(a, b), a @ b)
    narrow = b.astype(np.float32)
    np.testing.assert_array_equal(blas.multiply(a, narrow), a @ narrow)


def test_why_it_is_not_called(intel, monkeypatch, tmp_path):
    def why() -> str | None:
        blas._sgemm.cache_clear()
        return blas.problem()

    def missing(distribution, name):
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(libraries, "shipped", missing)
    assert why() == "MKL is not installed (pip install 'tricycle-gpt[mkl]')"
    monkeypatch.setattr(libraries, "shipped", lambda distribution, name: None)
    assert why() == "mkl holds no libmkl_rt.so (reinstall it: pip install 'tricycle-gpt[mkl]')"
    broken = tmp_path / "libmkl_rt.so.9"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(libraries, "shipped", lambda distribution, name: broken)
    assert why().startswith("libmkl_rt.so.9 cannot be loaded: ")
    monkeypatch.setattr(threads, "blas_libraries", lambda: (SimpleNamespace(internal_api="mkl"),))
    assert why() == "NumPy calls MKL itself"
    monkeypatch.setattr(processor, "is_intel", lambda: False)
    assert why() == "MKL is for Intel's processors"


def test_elsewhere_than_on_linux(intel, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "i686")
    assert blas.problem().startswith("MKL is called on Linux on x86-64 alone")


@pytest.mark.skipif(blas.problem() is not None, reason=str(blas.problem()))
def test_the_same_bits_wherever_arrays_lie():
    a, b = draw((130, 257), "plain"), draw((257, 96), "plain")
    expected = blas.multiply(a, b)
    for skip in range(1, 16):
        room = np.empty(a.size + skip, np.float32)[skip:].reshape(a.shape)
        room[...] = a
        np.testing.assert_array_equal(blas.multiply(room, b), expected)
