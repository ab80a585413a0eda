"""Products by AMX: operands and the parts of a float32 with AVX-512 bf16, products with AMX."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("numba")
bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

import numba  # noqa: E402

from tricycle import kernels  # noqa: E402
from tricycle_accelerators import matmul_plan, processor, threads  # noqa: E402
from tricycle_accelerators.compiled import amx_matmul, amx_tiles, recurrence  # noqa: E402
from tricycle_accelerators.compiled.loader import load_loops  # noqa: E402

rng = np.random.default_rng(0)
REASON = amx_matmul.unavailable_reason()
needs_amx = pytest.mark.skipif(REASON is not None, reason=str(REASON))
HAS_BFLOAT = load_loops("jit").HAS_BFLOAT
needs_bfloat = pytest.mark.skipif(not HAS_BFLOAT, reason="elsewhere LLVM calls a function that Numba does not have")


def draw(n_rows: int, n_columns: int, dtype=np.float32, transposed: bool = False) -> np.ndarray:
    if transposed:
        return draw(n_columns, n_rows, dtype).T
    return rng.standard_normal((n_rows, n_columns), np.float32).astype(dtype)


# -------------------------------------------------------------------- operands
def packed(x: np.ndarray, is_left: bool) -> np.ndarray:
    """Return the tile of each part of x (16, 32), rows of a left operand or columns of a right one: (parts, 16, 32)."""
    in_rows = x.flags.c_contiguous
    n_parts = 3 if x.dtype == np.float32 else 1
    pack = amx_tiles.PACK_TILE[n_parts][not in_rows, is_left != in_rows]
    lines = x if in_rows else x.T
    tiles = np.zeros((n_parts, 2, 16, 32), np.uint16)

    @numba.njit
    def run(lines, tiles):
        pack(lines.ctypes.data, lines.strides[0], tiles.ctypes.data, tiles.strides[0])

    run(lines if n_parts == 3 else lines.view(np.uint16), tiles)
    assert not tiles[:, 1].any()
    return tiles[:, 0].view(bfloat16)


@needs_bfloat
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_left", [False, True])
def test_tiles_hold_the_parts_of_each_number(dtype, transposed, is_left):
    x = draw(16, 32, dtype, transposed)
    parts = packed(x, is_left).astype(np.float32)
    if not is_left:  # rows of pairs that follow each other along K
        parts = parts.reshape(-1, 16, 16, 2).transpose(0, 2, 1, 3).reshape(parts.shape)
    np.testing.assert_array_equal(parts[0], x.astype(bfloat16).astype(np.float32))
    np.testing.assert_array_equal(parts[::-1].astype(np.float64).sum(axis=0), x.astype(np.float64))


@needs_bfloat
def test_products_of_parts_leave_out_less_than_rounding_errors():
    a, b = draw(16, 32), draw(16, 32)
    parts = [packed(x, True).astype(np.float64) for x in (a, b)]
    total = sum(parts[0][i] * parts[1][j] for i, j in amx_tiles.FLOAT32_PRODUCTS)
    exact = a.astype(np.float64) * b
    errors = total / exact - 1
    assert np.abs(errors).max() < 2**-23
    assert np.sqrt(np.square(errors).mean()) < 2**-26.5
    assert len(set(amx_tiles.FLOAT32_PRODUCTS)) == 6
    for before, after in zip(amx_tiles.FLOAT32_PRODUCTS, amx_tiles.FLOAT32_PRODUCTS[1:]):
        assert (before[0] == after[0]) != (before[1] == after[1])  # one operand stays in its tiles


# -------------------------------------------------------------------- products
@pytest.fixture
def large(monkeypatch):
    """Return amx_matmul.matmul with three threads and without minimum sizes."""
    monkeypatch.setattr(matmul_plan, "MIN_AMX", {"float32": (1, 1), "bfloat16": (1, 1)})
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    return amx_matmul.matmul


@needs_amx
@pytest.mark.parametrize("shape", [(3, 1, 5), (33, 70, 48), (133, 769, 1040), (40, 1700, 31), (2100, 20, 96)])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_products_match_float64(large, shape, left, right, dtype):
    n_rows, n_inner, n_columns = shape
    a, b = draw(n_rows, n_inner, dtype, left), draw(n_inner, n_columns, dtype, right)
    bias = draw(1, n_columns)[0]
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(large(a, b), expected, 1e-4, 1e-6 * n_inner)
    wide = np.full((n_rows, n_columns + 3), np.nan, np.float32)
    assert large(a, b, bias, wide[:, 1:-2]).base is wide
    np.testing.assert_allclose(wide[:, 1:-2], expected + bias, 1e-4, 1e-6 * n_inner)
    assert np.isnan(wide[:, [0, -2, -1]]).all()
    if dtype == bfloat16:
        narrow = large(a, b, bias, dtype=dtype)
        assert narrow.dtype == dtype
        np.testing.assert_allclose(narrow.astype(np.float64), expected + bias, 2**-8, 1e-6 * n_inner)


@needs_amx
def test_more_columns_of_memory_than_are_laid_out_at_once_are_multiplied():
    a, b = draw(23_000, 40, transposed=True), draw(40, 33)
    out = np.empty((23_000, 33), np.float32)
    assert amx_matmul.multiply(a, b, None, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b, 1e-4, 1e-4)


@needs_amx
@pytest.mark.parametrize(("shape", "dtype"), [((70, 40, 11_000), np.float32), ((70, 3000, 900), bfloat16)])
def test_rows_that_meet_many_groups_of_columns_are_laid_out_once(shape, dtype):
    n_rows, n_inner, n_columns = shape
    loops, a, b = load_loops("amx_loops"), draw(n_rows, n_inner, dtype), draw(n_inner, n_columns, dtype)
    group = loops._group_bytes(3 if dtype == np.float32 else 1, n_inner)
    for n, n_left in ((n_columns // 4, 1), (n_columns, 3)):
        n_right = loops._n_groups(n, group, loops.RIGHT_BYTES)
        assert loops.scratch_bytes(a, n, n_inner) == (n_left + n_right) * group
    out = np.empty((n_rows, n_columns), dtype)
    assert amx_matmul.multiply(a, b, None, out)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), expected, 2**-8 if dtype == bfloat16 else 1e-4, 1e-6 * n_inner)


@needs_amx
def test_rows_that_lie_in_one_place_are_multiplied(large):
    a, b = np.broadcast_to(draw(1, 70), (40, 70)), np.broadcast_to(draw(1, 70), (48, 70)).T
    for left, right in ((a, b), (a[::-1], b), (a, np.ascontiguousarray(b))):
        np.testing.assert_allclose(large(left, right), left.astype(np.float64) @ right, 1e-4, 1e-4)


@needs_amx
@pytest.mark.parametrize("n_inner", [384, 4096])
def test_float32_products_are_at_least_as_exact_as_those_of_blas(large, n_inner):
    a, b = draw(256, n_inner), draw(n_inner, 256)
    expected = a.astype(np.float64) @ b
    errors = [np.square(product - expected).mean() for product in (large(a, b), a @ b)]
    assert errors[0] <= errors[1]


@needs_amx
def test_products_are_bit_identical_for_any_number_of_threads(large, monkeypatch):
    a, b = draw(301, 1000), draw(1000, 448)
    products = []
    for n_threads in (1, 2, 4, 5, 7, 16):
        monkeypatch.setattr(threads, "n_threads", lambda n=n_threads: n)
        products.append(large(a, b))
    assert all((product == products[0]).all() for product in products)


@needs_amx
def test_infinity_and_nan_are_left_to_blas(large):
    a, b = draw(256, 256), draw(256, 256)
    for number in (np.inf, np.nan, np.finfo(np.float32).max):  # the last is rounded to an infinite bfloat16
        a[3, 4] = number
        assert amx_matmul.matmul(a, b) is NotImplemented
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(kernels.matmul(a, b), a @ b, 1e-4, 1e-4)
    assert not np.isfinite(amx_matmul.matmul(a.astype(bfloat16), b.astype(bfloat16))[3]).any()


# -------------------------------------------------------------------- a recurrent layer's products
def multiply_packed(x: np.ndarray, matrix: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return x (T, B, K) @ matrix + bias by AMX, written to a part of an array whose rest is not changed."""
    packed, n_columns = amx_matmul.pack_as_tiles(matrix), matrix.shape[1]
    padded = np.zeros(32 * len(packed), np.float32)
    padded[:n_columns] = bias
    wide = np.full((*x.shape[:2], n_columns + 3), np.nan, np.float32)
    load_loops("packed_matmul").multiply_packed(x, packed, padded, wide[..., 1:-2])
    assert np.isnan(wide[..., [0, -2, -1]]).all()
    return wide[..., 1:-2]


@needs_amx
@pytest.mark.parametrize(("n_steps", "n_items"), [(1, 1), (1, 16), (3, 5), (8, 16), (2, 20), (1, 40), (5, 33)])
@pytest.mark.parametrize(("n_inner", "n_columns"), [(1, 1), (32, 32), (64, 96), (70, 33), (256, 128)])
@pytest.mark.parametrize("layout", [np.array, np.asfortranarray, lambda x: np.repeat(x, 2, axis=1)[:, ::2]])
def test_products_with_packed_tiles_match_float64(n_steps, n_items, n_inner, n_columns, layout):
    x, matrix = draw(n_steps * n_items, n_inner).reshape(n_steps, n_items, -1), draw(n_inner, n_columns)
    bias = draw(1, n_columns)[0]
    expected = x.astype(np.float64) @ matrix.astype(np.float64) + bias
    matrix = layout(matrix)
    matrix.flags.writeable = False
    np.testing.assert_allclose(multiply_packed(x, matrix, bias), expected, 1e-4, 1e-5)
    part = np.full((n_steps, n_items + 2, n_inner), np.nan, np.float32)[:, 1:-1]
    part[:] = x
    np.testing.assert_array_equal(multiply_packed(part, matrix, bias), multiply_packed(x, matrix, bias))


@needs_amx
@pytest.mark.parametrize("number", [np.inf, np.nan, np.finfo(np.float32).max])
def test_rows_with_numbers_that_are_not_finite_match_numpy(number):
    x, matrix, bias = draw(40, 70).reshape(2, 20, 70), draw(70, 45), draw(1, 45)[0]
    x[1, 3, 4] = number
    with np.errstate(all="ignore"):
        expected = x @ matrix + bias
    np.testing.assert_allclose(multiply_packed(x, matrix, bias), expected, 1e-4, 1e-4)


@needs_amx
def test_matrix_is_packed_as_tiles_for_as_many_rows_as_fill_them(monkeypatch):
    matrix = recurrence.prepare_matrix(draw(32, 40))
    panels, tiles = matrix.packed(recurrence.FEWEST_TILE_ITEMS - 1), matrix.packed(recurrence.FEWEST_TILE_ITEMS)
    assert panels.shape == (2, 32, 32) and tiles.shape == (2, 1, load_loops("amx_packed").WIDTH)
    assert matrix.packed(100) is tiles
    monkeypatch.setattr(amx_matmul, "unavailable_reason", lambda: "none here")
    assert matrix.packed(100) is panels


# -------------------------------------------------------------------- reasons
def test_unsupported_operands_are_declined_with_a_reason(large, monkeypatch):
    a, b = draw(64, 64), draw(64, 64)
    decline_reason = amx_matmul.matmul.decline_reason
    for arguments, phrase in (
        ((a.astype(np.float64), b.astype(np.float64)), "got float64 and float64"),
        ((a, b.astype(bfloat16)), "got float32 and bfloat16"),
        ((a[:, ::2], b[:32]), "in rows or columns"),
        ((a, b, None, np.empty((64, 64), np.float32).T), "an out of float32 with contiguous rows"),
        ((a, b, None, None, bfloat16), "results of float32"),
        ((a, b, None, None, np.float64), "got float64"),
    ):
        assert re.search(phrase, decline_reason(*arguments))
        assert amx_matmul.matmul(*arguments) is NotImplemented
    monkeypatch.setattr(matmul_plan, "MIN_AMX", {"float32": (65, 1)})
    assert "at least 65 rows" in decline_reason(a, b)
    monkeypatch.setattr(matmul_plan, "MIN_AMX", {"float32": (64, 2**20)})
    assert "fewer than 1048576 multiplications" in decline_reason(a, b)


def test_unavailable_reason_names_the_cause(monkeypatch):
    def reason() -> str | None:
        amx_matmul.unavailable_reason.cache_clear()
        return amx_matmul.unavailable_reason()

    try:
        machine = matmul_plan.Machine("GenuineIntel", frozenset({"amx_bf16"}), "openblas", frozenset())
        monkeypatch.setattr(matmul_plan, "this_machine", lambda: machine)
        monkeypatch.setattr(processor, "request_amx", lambda: False)
        features = type("Loops", (), {"FEATURES": {"amx-bf16": True}})
        monkeypatch.setattr(amx_matmul, "load_loops", lambda name: features)
        assert "does not permit" in reason()
        features.FEATURES["amx-bf16"] = False
        assert "without AMX" in reason()
        monkeypatch.setattr(matmul_plan, "this_machine", lambda: machine._replace(features=frozenset()))
        assert "no AMX" in reason()
        monkeypatch.setenv("TRICYCLE_KERNELS", "-amx")
        assert reason() == "excluded by TRICYCLE_KERNELS=-amx"
    finally:
        amx_matmul.unavailable_reason.cache_clear()
