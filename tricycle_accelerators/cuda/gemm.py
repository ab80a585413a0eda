"""Matrix products on a GPU by cuBLASLt: 16-bit or float32 operands, float32 sums, fused bias.

CuPy multiplies through cuBLAS, but gives results of 16-bit operands in 16 bits only, and cannot be captured in a graph.
cuBLASLt comes along with cuBLAS, so nothing more is installed; it is called through ctypes. Where it cannot be loaded,
or knows no way for some product, CuPy multiplies.

Source: NVIDIA's reference of cuBLASLt, and the constants of its header cublasLt.h.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import Array

WORKSPACE = 32 * 1024**2  # bytes, as NVIDIA recommends for Hopper
MAX_ALIGNMENT = 256  # bytes: more is of no use to any algorithm
# What cublasLt.h and library_types.h call these.
DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
COMPUTE_32F, COMPUTE_TF32 = 68, 77
DESCRIPTION_TRANSPOSE_A, DESCRIPTION_TRANSPOSE_B, DESCRIPTION_EPILOGUE, DESCRIPTION_BIAS = 3, 4, 7, 8
EPILOGUE_BIAS, TRANSPOSED = 4, 1
PREFERENCE_WORKSPACE, PREFERENCE_ALIGNMENT_A = 1, 5  # B, C and D follow A
STATUS = {
    1: "not initialised",
    3: "out of memory",
    7: "invalid value",
    8: "this GPU cannot",
    11: "mapping error",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}


# -------------------------------------------------------------------- what is asked for: pure, without a GPU
class MatrixLayout(NamedTuple):
    """The memory layout of a matrix: row-major, or column-major if `transposed`, and its leading dimension.

    Attributes:
        step: elements from the start of one to the start of the next.
    """

    transposed: bool
    step: int


class MatmulSpec(NamedTuple):
    """The sizes, layouts, dtypes and alignments of a matrix product; equal specs share a plan.

    Attributes:
        operands, result: names of dtypes.
        alignments: of the addresses of a, b and the result, in bytes.
    """

    n_rows: int
    n_inner: int
    n_columns: int
    a: MatrixLayout
    b: MatrixLayout
    result_step: int
    operands: str
    result: str
    tf32: bool
    with_bias: bool
    alignments: tuple[int, ...]


def matrix_layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> MatrixLayout | None:
    """Return a matrix's MatrixLayout (step in elements) from strides in bytes; None if no axis is contiguous."""
    (n_rows, n_columns), (down, across) = shape, strides
    for transposed, near, far, length, number in (
        (False, across, down, n_columns, n_rows),
        (True, down, across, n_rows, n_columns),
    ):
        contiguous = length == 1 or near == itemsize
        apart = number == 1 or (far % itemsize == 0 and far >= length * itemsize)
        if contiguous and apart:
            return MatrixLayout(transposed, length if number == 1 else far // itemsize)
    return None


def column_major_shape(n_rows: int, n_columns: int, lies: MatrixLayout) -> tuple[int, int, int]:
    """Return a row-major matrix's (rows, columns, leading dimension) as column-major cuBLASLt sees it: transposed."""
    return (n_rows, n_columns, lies.step) if lies.transposed else (n_columns, n_rows, lies.step)


def address_alignment(address: int) -> int:
    """Return the largest power of two that divides an address, at most MAX_ALIGNMENT."""
    return min(address & -address, MAX_ALIGNMENT) or MAX_ALIGNMENT


def result_type(operands: Any, dtype: Any, out: Array | None) -> np.dtype:
    """Return a product's dtype: `out`'s, else `dtype`, else float32 for 16-bit `operands`, else that dtype."""
    if out is not None:
        return out.dtype
    return np.dtype(dtype if dtype is not None else np.float32 if operands.itemsize == 2 else operands)


# -------------------------------------------------------------------- the library
class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it needs."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtMatmulDescCreate": (_POINTER, _INT, _INT),
    "cublasLtMatmulDescDestroy": (_POINTER,),
    "cublasLtMatmulDescSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatrixLayoutCreate": (_POINTER, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceCreate": (_POINTER,),
    "cublasLtMatmulPreferenceDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulAlgoGetHeuristic": (*[_POINTER] * 7, _INT, _POINTER, _POINTER),
    "cublasLtMatmul": (*[_POINTER] * 14, _SIZE, _POINTER),
}


# Cache: valid for the life of the process: a loaded library.
@cache
def load_cublaslt() -> ctypes.CDLL:
    """Return CuPy's cuBLASLt with declared argument types; ImportError, OSError or RuntimeError if it is not there.

    Raises:
        ImportError, OSError, RuntimeError: it is not there.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib

    library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    library.cublasLtGetVersion.restype = _SIZE
    return library


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def unavailable_reason() -> str | None:
    """Return why cuBLASLt cannot be used, in one line; None when it can (on a GPU); cached."""
    try:
        load_cublaslt()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"cuBLASLt cannot be loaded: {' '.join(str(error).split()) or type(error).__name__}"
    return None


def version_text() -> str:
    """Return the version of the library as text, such as "cuBLASLt 13.0.2"; raise if it cannot be loaded."""
    number = load_cublaslt().cublasLtGetVersion()
    return f"cuBLASLt {number // 10_000}.{number // 100 % 100}.{number % 100}"


class NotSupportedError(RuntimeError):
    """Raised when cuBLASLt has no algorithm for a matrix product."""


def _call(name: str, *arguments: Any) -> None:
    """Call a function of cuBLASLt; raise NotSupportedError or RuntimeError if its status is not 0."""
    status = getattr(load_cublaslt(), name)(*arguments)
    if status:
        error = NotSupportedError if status in (7, 8, 15) else RuntimeError
        raise error(f"{name}: {STATUS.get(status, 'unknown error')} (status {status})")


# -------------------------------------------------------------------- plans
class MatmulPlan:
    """The cuBLASLt descriptors of a matrix product and the algorithm that computes it.

    cuBLASLt counts columns as contiguous, so it is asked for the transposed result: b^T a^T, whose rows are the columns
    of the result that is meant, with one bias each.
    """

    def __init__(self, product: MatmulSpec) -> None:
        self.product = product
        self.algorithm = _Heuristic()
        kind, result = DATA_TYPES[product.operands], DATA_TYPES[product.result]
        self.description = _POINTER()
        compute = COMPUTE_TF32 if product.tf32 else COMPUTE_32F
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), compute, DATA_TYPES["float32"])
        self._describe(DESCRIPTION_TRANSPOSE_A, ctypes.c_int32(TRANSPOSED * product.b.transposed))
        self._describe(DESCRIPTION_TRANSPOSE_B, ctypes.c_int32(TRANSPOSED * product.a.transposed))
        if product.with_bias:
            self._describe(DESCRIPTION_EPILOGUE, ctypes.c_uint32(EPILOGUE_BIAS))
        self.first = _layout(kind, product.n_inner, product.n_columns, product.b)
        self.second = _layout(kind, product.n_rows, product.n_inner, product.a)
        self.result = _layout(result, product.n_rows, product.n_columns, MatrixLayout(False, product.result_step))

    def _describe(self, attribute: int, value: Any) -> None:
        """Set an attribute of the product's cuBLASLt description to a ctypes value; RuntimeError if it fails."""
        size = ctypes.sizeof(value)
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), size)

    def select_algorithm(self, handle: Any, bias_address: int) -> MatmulPlan:
        """Store the algorithm that cuBLASLt ranks first and return this plan; NotSupportedError if there is none.

        Raises:
            NotSupportedError: there is none.
        """
        if self.product.with_bias:
            self._describe(DESCRIPTION_BIAS, ctypes.c_void_p(bias_address))
        preference, heuristic, number = create_preference(self.product), _Heuristic(), ctypes.c_int()
        layouts = self.first, self.second, self.result, self.result
        wanted = handle, self.description, *layouts, preference, 1, ctypes.byref(heuristic), ctypes.byref(number)
        try:
            _call("cublasLtMatmulAlgoGetHeuristic", *wanted)
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        if not number.value or heuristic.state:
            raise NotSupportedError(f"cublasLtMatmulAlgoGetHeuristic: no algorithm for {self.product}")
        self.algorithm = heuristic
        return self

    def run(self, handle: Any, a: int, b: int, bias: int, out: int, workspace: int, stream: int) -> None:
        """Start the planned product (plus bias) on a stream; a, b, bias, out and workspace are device addresses."""
        if self.product.with_bias:
            self._describe(DESCRIPTION_BIAS, ctypes.c_void_p(bias))
        one, zero, algorithm = map(ctypes.byref, (_ONE, _ZERO, self.algorithm))
        first, second, result = (b, self.first), (a, self.second), (out, self.result)
        scaled = one, *first, *second, zero, *result, *result
        _call("cublasLtMatmul", handle, self.description, *scaled, algorithm, workspace, WORKSPACE, stream)

    def close(self) -> None:
        """Free the descriptors of this plan."""
        _call("cublasLtMatmulDescDestroy", self.description)
        for layout in (self.first, self.second, self.result):
            _call("cublasLtMatrixLayoutDestroy", layout)


_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)


def _layout(kind: int, n_rows: int, n_columns: int, lies: MatrixLayout) -> Any:
    """Return a new cuBLASLt layout of a matrix, which the caller destroys."""
    layout = _POINTER()
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, *column_major_shape(n_rows, n_columns, lies))
    return layout


def create_preference(product: MatmulSpec) -> Any:
    """Return a new cuBLASLt preference with the workspace size and the address alignments; the caller destroys it."""
    preference, a, b, out = _POINTER(), *product.alignments
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    values: list[Any] = [(PREFERENCE_WORKSPACE, ctypes.c_uint64(WORKSPACE))]
    values += [(PREFERENCE_ALIGNMENT_A + i, ctypes.c_uint32(most)) for i, most in enumerate((b, a, out, out))]
    for attribute, value in values:
        size = ctypes.sizeof(value)
        _call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)
    return preference


# -------------------------------------------------------------------- on a device
_one_at_a_time = threading.Lock()  # the bias's address is set in the plan, then the product is started
_plans: dict[tuple[int, MatmulSpec], MatmulPlan | None] = {}
_workspaces: dict[tuple[int, int], Array] = {}
MAX_PLANS = 1024


# Cache: valid for the life of the process: one for each device. CUDA does not survive a fork.
@cache
def _handle(device: int) -> Any:
    """Return a device's cuBLASLt handle, created once on the current device (RuntimeError if that fails)."""
    handle = _POINTER()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _workspace(device: int, stream: int) -> int:
    """Return the device address of a stream's workspace, allocated once and kept."""
    import cupy

    if (device, stream) not in _workspaces:
        _workspaces[device, stream] = cupy.empty(WORKSPACE, cupy.uint8)
    return _workspaces[device, stream].data.ptr


def matmul(
    a: Array,
    b: Array,
    bias: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> Array:
    """Return a @ b + bias, in `out` or `dtype` (float32 for 16 bits), by cuBLASLt or CuPy; TF32 by `precision`."""
    import cupy

    if a.dtype != b.dtype:
        a, b = (x.astype(np.float32) if x.dtype.itemsize == 2 else x for x in (a, b))
    wanted = result_type(a.dtype, dtype, out)
    kind = a.dtype.name
    if kind not in DATA_TYPES or b.dtype != a.dtype or unavailable_reason() or not (a.size and b.size):
        return cupy_matmul(a, b, bias, out, wanted)
    result = wanted.name if wanted.name in (kind, "float32") else "float32"
    (n_rows, n_inner), n_columns = a.shape, b.shape[1]
    (a, at_a), (b, at_b) = _with_layout(a), _with_layout(b)
    place = out if out is not None and out.dtype.name == result else None
    at_out = None if place is None else matrix_layout(place.shape, place.strides, place.itemsize)
    if place is None or at_out is None or at_out.transposed:
        place = cupy.empty((n_rows, n_columns), a.dtype if result == kind else np.float32)
        at_out = MatrixLayout(False, n_columns)
    added = None if bias is None else cupy.ascontiguousarray(bias.astype(place.dtype, copy=False))
    alignments = tuple(address_alignment(x.data.ptr) for x in (a, b, place))
    product = MatmulSpec(
        n_rows,
        n_inner,
        n_columns,
        at_a,
        at_b,
        at_out.step,
        kind,
        result,
        precision == "tf32" and kind == "float32",
        added is not None,
        alignments,
    )
    if not _multiply(product, a, b, added, place):
        return cupy_matmul(a, b, bias, out, wanted)
    if out is None:
        return place.astype(wanted, copy=False)
    if place is not out:
        out[...] = place
    return out


def _with_layout(x: Array) -> tuple[Array, MatrixLayout]:
    """Return a matrix and its layout; copy it to C order if it has no contiguous axis, as cuBLASLt needs."""
    import cupy

    own_side = matrix_layout(x.shape, x.strides, x.itemsize)
    return (x, own_side) if own_side is not None else (cupy.ascontiguousarray(x), MatrixLayout(False, x.shape[1]))


def _multiply(product: MatmulSpec, a: Array, b: Array, bias: Array | None, out: Array) -> bool:
    """Write a @ b (+ bias) into `out` by cuBLASLt with a cached plan; return False, none written, if unsupported."""
    import cupy

    device, stream = a.device.id, cupy.cuda.get_current_stream().ptr
    at_bias = 0 if bias is None else bias.data.ptr
    with _one_at_a_time:
        handle, workspace = _handle(device), _workspace(device, stream)
        key = device, product
        if key not in _plans:
            if len(_plans) >= MAX_PLANS:  # lengths without end, such as of a text that grows: begin anew
                for old in filter(None, _plans.values()):
                    old.close()
                _plans.clear()
            new = MatmulPlan(product)
            try:
                _plans[key] = new.select_algorithm(handle, at_bias)
            except NotSupportedError:
                new.close()
                _plans[key] = None
        plan = _plans[key]
        if plan is not None:
            plan.run(handle, a.data.ptr, b.data.ptr, at_bias, out.data.ptr, workspace, stream)
    return plan is not None


def cupy_matmul(a: Array, b: Array, bias: Array | None, out: Array | None, dtype: Any) -> Array:
    """Return a @ b plus bias, in `out` if given, by CuPy; 16-bit operands of a wider result become float32."""
    import cupy

    if a.dtype.itemsize == 2 and np.dtype(dtype).itemsize > 2:
        a, b = a.astype(np.float32), b.astype(np.float32)
    product = cupy.matmul(a, b).astype(dtype, copy=False)
    if bias is not None:
        product += bias.astype(product.dtype, copy=False)
    if out is None:
        return product
    out[...] = product
    return out
