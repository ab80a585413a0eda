"""cuBLASLt without a GPU: plans, and whole products through a stand-in for the library that multiplies by NumPy."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tricycle import kernels
from tricycle_accelerators.cuda import gemm
from tricycle_accelerators.cuda.gemm import MatmulSpec, MatrixLayout

SHAPES = [(1, 1, 1), (2, 3, 4), (1, 5, 3), (5, 1, 3), (5, 3, 1), (64, 48, 32), (33, 65, 17)]


# -------------------------------------------------------------------- layout, alignment and dtype
@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((2, 3), (12, 4), MatrixLayout(False, 3)),
        ((2, 3), (40, 4), MatrixLayout(False, 10)),
        ((2, 3), (4, 8), MatrixLayout(True, 2)),
        ((2, 3), (4, 80), MatrixLayout(True, 20)),
        ((1, 3), (999, 4), MatrixLayout(False, 3)),
        ((2, 1), (4, 999), MatrixLayout(False, 1)),
        ((2, 1), (40, 4), MatrixLayout(False, 10)),
        ((1, 3), (4, 40), MatrixLayout(True, 10)),
        ((1, 1), (4, 4), MatrixLayout(False, 1)),
        ((2, 3), (24, 8), None),
        ((2, 3), (-12, 4), None),
        ((2, 3), (0, 4), None),
        ((2, 3), (14, 4), None),
        ((2, 3), (4, 4), None),
    ],
)
def test_matrix_layout_from_shape_and_strides(shape, strides, layout):
    assert gemm.matrix_layout(shape, strides, 4) == layout


@pytest.mark.parametrize(("address", "expected"), [(0, 256), (1, 1), (12, 4), (256, 256), (4096, 256), (48, 16)])
def test_address_alignment_is_a_power_of_two_up_to_256(address, expected):
    assert gemm.address_alignment(address) == expected


def test_result_dtype_follows_operands_and_arguments():
    half, single, double = (np.dtype(name) for name in ("float16", "float32", "float64"))
    assert gemm.result_type(half, None, None) == single
    assert gemm.result_type(half, np.float16, None) == half
    assert gemm.result_type(single, None, None) == single
    assert gemm.result_type(double, None, None) == double
    assert gemm.result_type(half, None, np.ones(1, np.float16)) == half


# -------------------------------------------------------------------- the library itself, where it is installed
@pytest.mark.parametrize("kinds", [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")])
@pytest.mark.parametrize("with_bias", [True, False])
def test_plans_are_accepted_by_the_library(kinds, with_bias):
    if gemm.unavailable_reason():
        pytest.skip(gemm.unavailable_reason())
    layouts, tf32 = (MatrixLayout(False, 768), MatrixLayout(True, 768)), kinds[0] == "float32"
    product = MatmulSpec(1024, 768, 3072, *layouts, 3072, *kinds, tf32, with_bias, (256, 16, 4))
    plan = gemm.MatmulPlan(product)
    assert plan.description.value and plan.first.value and gemm.create_preference(product).value
    plan.close()
    assert gemm.version_text().count(".") == 2


def test_missing_library_is_reported_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(gemm, "load_cublaslt", gemm.load_cublaslt.__wrapped__)
    problem = gemm.unavailable_reason.__wrapped__()
    assert problem.startswith("cuBLASLt cannot be loaded: ") and "\n" not in problem


# -------------------------------------------------------------------- a stand-in for the library
class Device(np.ndarray):
    """A NumPy array that exposes its address as CuPy arrays do."""

    device = SimpleNamespace(id=0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def on_device(array: np.ndarray) -> Device:
    return array.view(Device)


def pointed(pointer, kind=ctypes.c_void_p):
    """The value at an address."""
    return ctypes.cast(pointer, ctypes.POINTER(kind)).contents.value


def array_at(address: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Return the array at an address, with strides in elements."""
    length = sum((n - 1) * step for n, step in zip(shape, strides)) + 1
    memory = (ctypes.c_uint8 * (length * dtype.itemsize)).from_address(address)
    flat = np.ctypeslib.as_array(memory).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * dtype.itemsize for step in strides])


class Library:
    """What cuBLASLt does, as its reference says: column-major, D = op(A) op(B) + bias, one bias a row of D."""

    def __init__(self, dtypes: dict[int, np.dtype], has_algorithm: bool = True) -> None:
        self.dtypes, self.has_algorithm = dtypes, has_algorithm
        self.held: dict[int, dict] = {}
        self.products = 0

    def _new(self, pointer, **content) -> int:
        number = len(self.held) + 1
        self.held[number] = content
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p)).contents.value = number
        return 0

    def cublasLtCreate(self, pointer):
        return self._new(pointer)

    def cublasLtMatmulDescCreate(self, pointer, compute, scale):
        assert (compute in (gemm.COMPUTE_32F, gemm.COMPUTE_TF32)) and scale == 0
        return self._new(pointer, compute=compute, attributes={})

    def cublasLtMatmulDescSetAttribute(self, description, attribute, value, size):
        kinds = {4: ctypes.c_int32, 8: ctypes.c_void_p}
        self.held[description.value]["attributes"][attribute] = pointed(value, kinds[size])
        return 0

    def cublasLtMatrixLayoutCreate(self, pointer, kind, rows, columns, step):
        assert rows > 0 and columns > 0 and step >= rows
        return self._new(pointer, kind=kind, rows=rows, columns=columns, step=step)

    def cublasLtMatmulPreferenceCreate(self, pointer):
        return self._new(pointer)

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        assert (attribute, size) in ((1, 8), (5, 4), (6, 4), (7, 4), (8, 4))
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, description, a, b, c, d, preference, n_requested, found, number):
        assert n_requested == 1 and self.held[preference.value] == {}
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int)).contents.value = int(self.has_algorithm)
        return 0

    def _destroy(self, thing):
        assert self.held[thing.value] is not None
        self.held[thing.value] = None
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = _destroy

    def _matrix(self, address, layout):
        about = self.held[layout.value]
        return array_at(address, self.dtypes[about["kind"]], (about["rows"], about["columns"]), (1, about["step"]))

    def cublasLtMatmul(
        self, handle, description, alpha, a, at_a, b, at_b, beta, c, at_c, d, at_d, algorithm, space, size, stream
    ):
        attributes = self.held[description.value]["attributes"]
        assert pointed(alpha, ctypes.c_float) == 1 and pointed(beta, ctypes.c_float) == 0
        assert c == d and at_c.value == at_d.value and size == gemm.WORKSPACE and space
        first, second, out = self._matrix(a, at_a), self._matrix(b, at_b), self._matrix(d, at_d)
        first = first.T if attributes[gemm.DESCRIPTION_TRANSPOSE_A] else first
        second = second.T if attributes[gemm.DESCRIPTION_TRANSPOSE_B] else second
        product = first.astype(np.float64) @ second.astype(np.float64)
        if attributes.get(gemm.DESCRIPTION_EPILOGUE) == gemm.EPILOGUE_BIAS:
            bias = array_at(attributes[gemm.DESCRIPTION_BIAS], out.dtype, (len(out), 1), (1, 1))
            product += bias.astype(np.float64)
        out[...] = product
        self.products += 1
        return 0


@pytest.fixture
def fake_cupy(monkeypatch):
    """Installs a `cupy` with the few functions that `gemm` and `cudnn` call."""
    module = ModuleType("cupy")
    for name in ("logaddexp", "exp", "float32", "uint8"):
        setattr(module, name, getattr(np, name))
    module.empty = lambda shape, dtype: on_device(np.full(shape, 77, dtype))
    module.ascontiguousarray = lambda array: on_device(np.ascontiguousarray(array))
    module.matmul = lambda a, b: on_device(np.asarray(np.matmul(np.asarray(a), np.asarray(b))))
    runtime, stream = SimpleNamespace(getDevice=lambda: 0), SimpleNamespace(ptr=5)
    module.cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", module)


@pytest.fixture
def stand_in(fake_cupy, monkeypatch):
    """Installs the stand-in for the library."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
    library = Library({number: np.dtype(kind) for number, kind in kinds.items()})
    monkeypatch.setattr(gemm, "load_cublaslt", lambda: library)
    monkeypatch.setattr(gemm, "unavailable_reason", lambda: None)
    for name in ("_plans", "_workspaces"):
        monkeypatch.setattr(gemm, name, {})
    gemm._handle.cache_clear()
    yield library
    gemm._handle.cache_clear()


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: np.asfortranarray(x),
    "gaps": lambda x: np.pad(x, ((0, 0), (0, 3)))[:, : x.shape[1]],
    "columns with gaps": lambda x: np.pad(x, ((0, 2), (0, 0))).T.copy().T[: x.shape[0]],
    "every other": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x[::-1].copy()[::-1],
}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name) if name == "bfloat16" else name)


def draw_operands(rng, dtype, left=(6, 5), right=(5, 4), layouts=("rows", "rows")):
    """Two matrices, and their product in float64."""
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in (left, right))
    placed = (on_device(LAYOUTS[name](x)) for name, x in zip(layouts, (a, b)))
    return *placed, a.astype(float) @ b.astype(float)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS if "rows" in (a, b) or a == b])
def test_products_match_reference(stand_in, rng, shape, kind, layouts):
    n_rows, n_inner, n_columns = shape
    dtype = dtype_of(kind)
    a, b, exact = draw_operands(rng, dtype, (n_rows, n_inner), (n_inner, n_columns), layouts)
    bias = rng.standard_normal(n_columns).astype(np.float32)
    for out_dtype in (None, np.float32, dtype):
        for added in (None, on_device(bias)):
            actual = gemm.matmul(a, b, added, None, out_dtype)
            expected = kernels.matmul.reference(
                np.asarray(a), np.asarray(b), None if added is None else bias, None, out_dtype
            )
            assert actual.dtype == expected.dtype and actual.shape == expected.shape
            true = exact if added is None else exact + (bias if actual.dtype == np.float32 else bias.astype(dtype))
            rounding = 1e-5 if actual.dtype == np.float32 else 2.0**-8 if kind == "bfloat16" else 2.0**-10
            np.testing.assert_allclose(actual.astype(float), true, rounding, rounding * 4)
    assert stand_in.products == 6


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps", "columns with gaps", "every other"])
def test_products_are_written_to_out(stand_in, rng, kind, layout):
    dtype = dtype_of(kind)
    a, b, exact = draw_operands(rng, dtype)
    for out_dtype in {np.dtype(np.float32), dtype, np.dtype(np.float64)}:
        out = on_device(LAYOUTS[layout](np.full((6, 4), np.nan)).astype(out_dtype, order="K"))
        assert gemm.matmul(a, b, None, out) is out
        np.testing.assert_allclose(out.astype(float), exact, 1e-2, 1e-1 if out_dtype.itemsize == 2 else 1e-4)


def test_product_into_a_view_leaves_the_rest_unchanged(stand_in, rng):
    whole = on_device(np.full((6, 9), 7, np.float32))
    a, b, exact = draw_operands(rng, np.float32)
    gemm.matmul(a, b, None, whole[:, 2:6])
    np.testing.assert_allclose(whole[:, 2:6], exact, 1e-5, 1e-5)
    assert (whole[:, :2] == 7).all() and (whole[:, 6:] == 7).all()


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty_products_do_not_call_the_library(stand_in, shape):
    n_rows, n_inner, n_columns = shape
    a, b = (on_device(np.ones(s, np.float32)) for s in ((n_rows, n_inner), (n_inner, n_columns)))
    bias = on_device(np.ones(n_columns, np.float32))
    np.testing.assert_array_equal(gemm.matmul(a, b, bias), np.ones((n_rows, n_columns)) * (n_inner + 1))
    assert stand_in.products == 0


def test_products_without_an_algorithm_use_cupy(stand_in, rng):
    stand_in.has_algorithm = False
    for kind in ("float32", "bfloat16", "float64"):
        a, b, exact = draw_operands(rng, dtype_of(kind))
        for _ in range(2):
            found = gemm.matmul(a, b, on_device(np.ones(4, np.float32)))
            np.testing.assert_allclose(found, exact + 1, 1e-4, 1e-4)
            assert found.dtype == (np.float64 if kind == "float64" else np.float32)
    assert stand_in.products == 0


def test_mixed_dtypes_are_multiplied_in_float32(stand_in, rng):
    a, b, _ = draw_operands(rng, np.float32)
    found = gemm.matmul(a.astype(np.float16), b)
    np.testing.assert_allclose(found, a.astype(np.float16).astype(np.float32) @ b, 1e-5, 1e-5)
    assert found.dtype == np.float32


def test_plans_are_cached_and_their_number_is_bounded(stand_in, rng, monkeypatch):
    monkeypatch.setattr(gemm, "MAX_PLANS", 3)
    for n_rows in (2, 2, 3, 4, 2, 5, 6):
        a, b, exact = draw_operands(rng, np.float32, (n_rows, 5))
        np.testing.assert_allclose(gemm.matmul(a, b), exact, 1e-5, 1e-5)
        assert len(gemm._plans) <= 3
    assert len(gemm._workspaces) == 1


def test_only_tf32_rounds_float32(stand_in, rng):
    a = on_device(rng.standard_normal((4, 4)).astype(np.float32))
    for precision in ("float32", "tf32", "bfloat16"):
        gemm.matmul(a, a, precision=precision)
    assert [product.tf32 for _, product in gemm._plans] == [False, True]


def test_library_errors_name_the_function_and_status(stand_in, monkeypatch, rng):
    stand_in.cublasLtMatmul = lambda *arguments: 13
    a = on_device(rng.standard_normal((4, 4)).astype(np.float32))
    with pytest.raises(RuntimeError, match=r"cublasLtMatmul.*status 13"):
        gemm.matmul(a, a)
