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
    """Clear the cached result of the search for MKL."""
    blas._mkl.cache_clear()
    yield
    blas._mkl.cache_clear()


@pytest.fixture
def intel(monkeypatch):
    """An Intel processor under Linux whose NumPy has OpenBLAS."""
    monkeypatch.setattr(processor, "is_intel", lambda: True)
    monkeypatch.setattr(threads, "blas_libraries", lambda: (SimpleNamespace(internal_api="openblas"),))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def matrix(address: int, shape: tuple[int, int], transposed: bool, stride: int) -> np.ndarray:
    """Return the float32 matrix that BLAS reads at an address: the first elements of rows of `stride` elements."""
    n_rows, n_columns = shape[::-1] if transposed else shape
    assert stride >= n_columns
    n_elements = (n_rows - 1) * stride + n_columns
    flat = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (n_elements,))
    rows = np.lib.stride_tricks.as_strided(flat, (n_rows, n_columns), (4 * stride, 4))
    return rows.T if transposed else rows


def cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Follow the BLAS standard, so that the arguments are also checked where MKL is not installed."""
    assert (order, alpha, beta) == (101, 1.0, 0.0)
    left, right = matrix(a, (m, k), trans_a == 112, lda), matrix(b, (k, n), trans_b == 112, ldb)
    matrix(c, (m, n), False, ldc)[...] = left @ right


LAYOUTS = ["plain", "transposed", "part", "every second"]


def draw(shape: tuple[int, int], layout: str) -> np.ndarray:
    n_rows, n_columns = shape
    if layout == "transposed":
        return draw((n_columns, n_rows), "plain").T
    if layout == "part":
        return rng.standard_normal((n_rows + 1, n_columns + 5), np.float32)[1:, 2 : n_columns + 2]
    if layout == "every second":
        return rng.standard_normal((n_rows, 2 * n_columns), np.float32)[:, ::2]
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize("standard", [False, True], ids=["this install's", "by the text"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 3), (5, 1, 3), (5, 3, 1), (33, 70, 18)], ids=str)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_float32_products_match_float64(monkeypatch, standard, shape, left, right):
    if standard:
        monkeypatch.setattr(blas, "_mkl", lambda: cblas_sgemm)
    n_rows, n_inner, n_columns = shape
    a, b = draw((n_rows, n_inner), left), draw((n_inner, n_columns), right)
    expected = a.astype(np.float64) @ b
    np.testing.assert_allclose(blas.multiply(a, b), expected, 1e-4, 1e-5)
    for layout in LAYOUTS:
        out = draw((n_rows, n_columns), layout)
        out[...] = np.nan  # the previous content must not be added
        assert blas.multiply(a, b, out) is out
        np.testing.assert_allclose(out, expected, 1e-4, 1e-5)


def test_other_dtypes_use_numpy(monkeypatch):
    monkeypatch.setattr(blas, "_mkl", lambda: None)  # a call of these would raise
    a, b = rng.standard_normal((4, 3)), rng.standard_normal((3, 5))
    np.testing.assert_array_equal(blas.multiply(a, b), a @ b)
    narrow = b.astype(np.float32)
    np.testing.assert_array_equal(blas.multiply(a, narrow), a @ narrow)


def test_unavailable_reason_names_the_cause(intel, monkeypatch, tmp_path):
    def reason() -> str | None:
        blas._mkl.cache_clear()
        return blas.unavailable_reason()

    def missing(distribution, name):
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(libraries, "find_distribution_file", missing)
    assert "tricycle-gpt[mkl]" in reason()
    monkeypatch.setattr(libraries, "find_distribution_file", lambda distribution, name: None)
    assert "libmkl_rt.so" in reason()
    broken = tmp_path / "libmkl_rt.so.9"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(libraries, "find_distribution_file", lambda distribution, name: broken)
    assert reason().startswith("libmkl_rt.so.9 ")
    monkeypatch.setattr(threads, "blas_libraries", lambda: (SimpleNamespace(internal_api="mkl"),))
    assert "NumPy" in reason()
    monkeypatch.setattr(processor, "is_intel", lambda: False)
    assert "Intel" in reason()


def test_mkl_needs_64_bit_x86(intel, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "i686")
    assert "x86-64" in blas.unavailable_reason()


@pytest.mark.skipif(blas.unavailable_reason() is not None, reason=str(blas.unavailable_reason()))
def test_results_are_bit_identical_for_any_alignment():
    a, b = draw((130, 257), "plain"), draw((257, 96), "plain")
    expected = blas.multiply(a, b)
    for skip in range(1, 16):
        room = np.empty(a.size + skip, np.float32)[skip:].reshape(a.shape)
        room[...] = a
        np.testing.assert_array_equal(blas.multiply(room, b), expected)


def test_mkl_can_be_excluded(intel, monkeypatch):
    monkeypatch.setenv("TRICYCLE_KERNELS", "-mkl")
    assert blas.unavailable_reason() == "excluded by TRICYCLE_KERNELS=-mkl"
