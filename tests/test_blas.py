"""Products of float32 by MKL: the same numbers, whatever the layout, and why it is not called."""

from __future__ import annotations

import ctypes
import re
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from tricycle_accelerators import blas, libraries, matmul_plan, mkl, processor, threads

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


def matrix(address: int, shape: tuple[int, int], transposed: bool, stride: int, dtype=np.float32) -> np.ndarray:
    """Return the matrix that BLAS reads at an address: the first elements of rows of `stride` elements."""
    n_rows, n_columns = shape[::-1] if transposed else shape
    size = np.dtype(dtype).itemsize
    assert stride >= n_columns
    n_bytes = size * ((n_rows - 1) * stride + n_columns)
    flat = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_ubyte)), (n_bytes,)).view(dtype)
    rows = np.lib.stride_tricks.as_strided(flat, (n_rows, n_columns), (size * stride, size))
    return rows.T if transposed else rows


def cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, dtype=np.float32):
    """Follow the BLAS standard, so that the arguments are also checked where MKL is not installed."""
    assert (order, alpha, beta) == (101, 1.0, 0.0)
    left, right = matrix(a, (m, k), trans_a == 112, lda, dtype), matrix(b, (k, n), trans_b == 112, ldb, dtype)
    matrix(c, (m, n), False, ldc)[...] = left.astype(np.float32) @ right.astype(np.float32)


def cblas_gemm_bf16bf16f32(*arguments):
    cblas_sgemm(*arguments, dtype=pytest.importorskip("ml_dtypes").bfloat16)


LAYOUTS = ["plain", "transposed", "part", "every second"]


def draw(shape: tuple[int, int], layout: str, dtype=np.float32) -> np.ndarray:
    n_rows, n_columns = shape
    if layout == "transposed":
        return draw((n_columns, n_rows), "plain", dtype).T
    if layout == "part":
        return rng.standard_normal((n_rows + 1, n_columns + 5)).astype(dtype)[1:, 2 : n_columns + 2]
    if layout == "every second":
        return rng.standard_normal((n_rows, 2 * n_columns)).astype(dtype)[:, ::2]
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("standard", [False, True], ids=["this install's", "by the text"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 3), (5, 1, 3), (5, 3, 1), (33, 70, 18)], ids=str)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_float32_products_match_float64(monkeypatch, standard, shape, left, right):
    if standard:
        monkeypatch.setattr(blas, "_mkl", lambda: blas._Mkl(cblas_sgemm, None))
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
    monkeypatch.setattr(blas, "_mkl", lambda: blas._Mkl(None, None))  # a call of these would raise
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


def test_mkl_needs_64_bit_x86_and_for_bfloat16_amx(intel, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "i686")
        assert "x86-64" in blas.unavailable_reason()
    monkeypatch.setattr(blas, "_mkl", lambda: blas._Mkl(None, None))
    machine = matmul_plan.Machine("GenuineIntel", frozenset({"avx512f"}), "openblas", frozenset())
    monkeypatch.setattr(matmul_plan, "this_machine", lambda: machine)
    assert "AMX" in mkl.unavailable_reason()


@pytest.mark.skipif(blas.unavailable_reason() is not None, reason=str(blas.unavailable_reason()))
def test_results_are_bit_identical_for_any_alignment():
    a, b = draw((130, 257), "plain"), draw((257, 96), "plain")
    expected = blas.multiply(a, b)
    for skip in range(1, 16):
        room = np.empty(a.size + skip, np.float32)[skip:].reshape(a.shape)
        room[...] = a
        np.testing.assert_array_equal(blas.multiply(room, b), expected)


# -------------------------------------------------------------------- bfloat16
def installed_mkl() -> blas._Mkl | None:
    """Return the MKL of this environment or None; its bfloat16 products run on every processor, though slowly."""
    try:
        path = libraries.find_distribution_file(blas.DISTRIBUTION, blas.LIBRARY)
    except metadata.PackageNotFoundError:
        return None
    return None if path is None else blas.load_mkl(str(path))


@pytest.fixture(params=["by the text", "this install's"])
def amx(monkeypatch, request):
    """An Intel processor with AMX and MKL."""
    mkl = installed_mkl() if request.param == "this install's" else blas._Mkl(cblas_sgemm, cblas_gemm_bf16bf16f32)
    if mkl is None:
        pytest.skip("MKL is not installed")
    monkeypatch.setattr(blas, "_mkl", lambda: mkl)
    machine = matmul_plan.Machine("GenuineIntel", frozenset({"amx_bf16"}), "openblas", frozenset())
    monkeypatch.setattr(matmul_plan, "this_machine", lambda: machine)
    monkeypatch.setattr(threads, "n_threads", lambda: 3)


@pytest.mark.parametrize("shape", [(17, 20, 33), (1100, 40, 65), (48, 64, 1601), (65, 2000, 17)], ids=str)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_bfloat16_products_match_float64(amx, shape, left, right):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert mkl.unavailable_reason() is None
    n_rows, _, n_columns = shape
    a, b = draw(shape[:2], left, bfloat16), draw(shape[1:], right, bfloat16)
    bias = rng.standard_normal(n_columns).astype(np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    out = np.full((n_rows, n_columns + 3), np.nan, np.float32)[:, 1:-2]
    assert mkl.matrices.matmul(a, b, None, out) is out
    for product, expected_values in ((out, expected), (mkl.matrices.matmul(a, b, bias), expected + bias)):
        np.testing.assert_allclose(product, expected_values, 1e-4, 1e-3)


def test_provider_declines_unsupported_operands():
    narrow = np.zeros((64, 64), pytest.importorskip("ml_dtypes").bfloat16)
    decline_reason = mkl.matrices.matmul.decline_reason
    assert decline_reason(narrow, narrow) is None
    assert decline_reason(narrow, narrow.astype(np.float32)).startswith("operands of bfloat16")
    assert decline_reason(narrow[:16], narrow).startswith("more than 16 rows")
    assert "contiguous rows" in decline_reason(narrow, narrow, None, np.zeros((64, 64), np.float32).T)
    assert re.search("results.*got bfloat16", decline_reason(narrow, narrow, None, None, narrow.dtype))


def test_mkl_can_be_excluded(intel, monkeypatch):
    monkeypatch.setenv("TRICYCLE_KERNELS", "-mkl")
    assert blas.unavailable_reason() == mkl.unavailable_reason() == "excluded by TRICYCLE_KERNELS=-mkl"
