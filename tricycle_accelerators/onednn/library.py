"""Call oneDNN with ctypes: bfloat16 and int8 matrix products and conversions on CPUs.

NumPy has no bfloat16; oneDNN (https://github.com/uxlfoundation/oneDNN) has, for processors with AVX-512 bf16 or AMX,
where a product of 16-bit operands takes half the time of a float32 one. Its sums are float32. It comes with
`pip install 'tricycle-gpt[bf16]'`.

Each of the library's worker threads calls it for one part of the work, and OpenMP inside oneDNN is set to one thread
for each of them: a second team would spin beside this one, and sums would depend on how work was divided. Products of a
few rows alone are OpenMP's to share, while its threads keep up (`spin_threads.py`).

Sources: oneDNN Developer Guide, "Basic Concepts" and "Matrix Multiplication"; constants as in `dnnl_types.h`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache, lru_cache
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from tricycle_accelerators import buffers, libraries, spin_threads, threads
from tricycle_accelerators.providers import exclusion_reason

DISTRIBUTION, LIBRARY, EXTRA = "onednn-cpu-gomp", "libdnnl.so.3", "pip install 'tricycle-gpt[bf16]'"
SPIN_COUNT = "100000"  # a millisecond
N_PRIMITIVES = 512  # kept by each thread
OUT_OF_MEMORY = 1  # dnnl_out_of_memory
CPU, IN_ORDER = 1, 1  # dnnl_cpu, dnnl_stream_in_order
BF16, F32, S8 = 2, 3, 5  # dnnl_bf16, dnnl_f32, dnnl_s8
KINDS = {1: S8, 2: BF16, 4: F32}  # by the bytes of an element
ANY_LAYOUT, WEIGHTS_LAYOUT = 1, 131  # dnnl_format_tag_any, dnnl_query_weights_md
ISA_BF16 = 0x80  # the bit that avx512_core_bf16 has and avx512_core_vnni has not, nor any before it
MULTIPLY = 0x1FFF1  # dnnl_binary_mul
# Places of arguments: DNNL_ARG_SRC (and _FROM), _WEIGHTS, _DST (and _TO), _BIAS; DNNL_ARG_ATTR_MULTIPLE_POST_OP(i) is
# FACTOR (i + 1).
SOURCE, WEIGHTS, RESULT, BIAS, FACTOR = 1, 33, 17, 41, 32768


# -------------------------------------------------------------------- the library
class _Argument(ctypes.Structure):
    _fields_ = [("kind", c_int), ("memory", c_void_p)]


_MADE = POINTER(c_void_p)  # where a handle is written

# What we call and with what; all but the two of OpenMP's give 0, or the number of an error.
SIGNATURES: dict[str, list[Any]] = {
    "dnnl_engine_create": [_MADE, c_int, c_size_t],
    "dnnl_stream_create": [_MADE, c_void_p, c_int],
    "dnnl_memory_desc_create_with_strides": [_MADE, c_int, c_void_p, c_int, c_void_p],
    "dnnl_memory_desc_create_with_tag": [_MADE, c_int, c_void_p, c_int, c_int],
    "dnnl_memory_desc_clone": [_MADE, c_void_p],
    "dnnl_memory_desc_get_size": [c_void_p],
    "dnnl_primitive_desc_query_md": [c_void_p, c_int, c_int],
    "dnnl_memory_desc_destroy": [c_void_p],
    "dnnl_memory_create": [_MADE, *[c_void_p] * 3],
    "dnnl_memory_set_data_handle": [c_void_p] * 2,
    "dnnl_memory_destroy": [c_void_p],
    "dnnl_post_ops_create": [_MADE],
    "dnnl_post_ops_append_sum": [c_void_p, c_float, c_int, c_int],
    "dnnl_post_ops_append_binary": [c_void_p, c_int, c_void_p],
    "dnnl_post_ops_destroy": [c_void_p],
    "dnnl_primitive_attr_create": [_MADE],
    "dnnl_primitive_attr_set_post_ops": [c_void_p] * 2,
    "dnnl_primitive_attr_destroy": [c_void_p],
    "dnnl_reorder_primitive_desc_create": [_MADE, *[c_void_p] * 5],
    "dnnl_matmul_primitive_desc_create": [_MADE, *[c_void_p] * 6],
    "dnnl_primitive_create": [_MADE, c_void_p],
    "dnnl_primitive_desc_destroy": [c_void_p],
    "dnnl_primitive_execute": [c_void_p, c_void_p, c_int, c_void_p],
    "dnnl_primitive_destroy": [c_void_p],
}


class _Library(NamedTuple):
    free: Any  # called without Python's lock
    held: Any  # called with it, which is quicker where a call is short
    engine: c_void_p


_one_at_a_time = threading.Lock()


def _library() -> _Library:
    """Return the loaded oneDNN library; RuntimeError with the reason if it cannot be used."""
    library = _loaded()
    if isinstance(library, str):
        raise RuntimeError(f"oneDNN cannot be used: {library}")
    return library


def unavailable_reason() -> str | None:
    """Return why oneDNN cannot be used, in one line; None when it can."""
    with _one_at_a_time:  # there must be one engine
        library = _loaded()
    return library if isinstance(library, str) else None


@contextmanager
def _openmp_spin_count() -> Iterator[None]:
    """Make OpenMP, if loaded within, spin 1 ms before sleep by GOMP_SPINCOUNT, then unset, unless the user set it.

    OpenMP reads the variable when it is loaded. A thread that sleeps between two products of a token wakes up too late.
    """
    name = "GOMP_SPINCOUNT"
    if name in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ[name] = SPIN_COUNT
    try:
        yield
    finally:
        del os.environ[name]


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def _loaded() -> _Library | str:
    """Load oneDNN on the first call (cached); return it with an engine, or the reason (text) why it cannot be used."""
    path = exclusion_reason("onednn") or libraries.find_library("oneDNN", DISTRIBUTION, LIBRARY, EXTRA)
    if isinstance(path, str):
        return path
    try:
        import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
    except ImportError:
        return f"ml_dtypes is not installed ({EXTRA})"
    try:
        with _openmp_spin_count():
            free = ctypes.CDLL(str(path))
        held = ctypes.PyDLL(str(path))
        for name, arguments in SIGNATURES.items():
            for library in (free, held):
                getattr(library, name).argtypes = arguments
        isa = free.dnnl_get_effective_cpu_isa()
        held.omp_set_num_threads.argtypes = [c_int]
        held.omp_set_num_threads.restype = None
        free.dnnl_memory_desc_get_size.restype = c_size_t
        free.dnnl_primitive_desc_query_md.restype = c_void_p
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}"
    if not isa & ISA_BF16:
        return "this processor has neither AVX-512 bf16 nor AMX"
    engine = c_void_p()
    _check("dnnl_engine_create", free.dnnl_engine_create(byref(engine), CPU, 0))
    libraries.release_memory()
    return _Library(free, held, engine)


def bfloat16() -> np.dtype:
    """Return the NumPy dtype bfloat16 of ml_dtypes."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _check(function: str, status: int) -> None:
    """Raise a RuntimeError with the function's name, or for the status 1 a MemoryError, unless the status is 0."""
    if status == OUT_OF_MEMORY:
        raise MemoryError(
            f"oneDNN: {function} found too little memory: use a smaller batch, raise the limit of `ulimit -v`, or set "
            "TRICYCLE_KERNELS=-onednn"
        )
    if status:
        raise RuntimeError(f"oneDNN: {function} gave the error {status} (dnnl_status_t)")


def _call(function: str, *arguments: Any) -> None:
    """Call a oneDNN function without the GIL; RuntimeError for a status other than 0."""
    _check(function, getattr(_library().free, function)(*arguments))


def _create(function: str, *arguments: Any) -> c_void_p:
    """Call a oneDNN function that creates a handle and writes it through its first argument; return the handle."""
    handle = c_void_p()
    _call(function, byref(handle), *arguments)
    return handle


# -------------------------------------------------------------------- primitives
Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and size of an element, in bytes
Descriptors = dict[int, c_void_p]  # of the memory in each place
PACKED: tuple[int, ...] = ()  # in place of strides: as oneDNN likes it best


def _descriptor(layout: Layout) -> c_void_p:
    """Return a new memory descriptor of a layout, which the caller must destroy."""
    shape, strides, size = layout
    numbers = c_int64 * len(shape)
    if strides == PACKED:
        return _create("dnnl_memory_desc_clone", _packed_descriptor(shape, size))
    places = numbers(*(stride // size for stride in strides))
    return _create("dnnl_memory_desc_create_with_strides", len(shape), numbers(*shape), KINDS[size], places)


# Cache: valid for the life of the process: must not change, for sizes of memory follow from it.
@cache
def _packed_descriptor(shape: tuple[int, ...], size: int) -> c_void_p:
    """Return oneDNN's preferred descriptor of a matrix (K, M) for any number of rows, cached; set OpenMP to 1 thread.

    Asked for once: what oneDNN answers depends on the number of threads that OpenMP has just then, and another answer
    later would be another size of memory.
    """
    n_inner, n_columns = shape
    held = _library().held
    held.omp_set_num_threads(threads.n_threads())
    try:
        rows = _descriptor(((1, n_inner), (n_inner * size, size), size))
        result = _descriptor(((1, n_columns), (4 * n_columns, 4), 4))
        anyhow = _create("dnnl_memory_desc_create_with_tag", 2, (c_int64 * 2)(*shape), KINDS[size], ANY_LAYOUT)
        description = _create("dnnl_matmul_primitive_desc_create", _library().engine, rows, anyhow, None, result, None)
    finally:
        held.omp_set_num_threads(1)
    borrowed = _library().free.dnnl_primitive_desc_query_md(description, WEIGHTS_LAYOUT, 0)
    laid = _create("dnnl_memory_desc_clone", borrowed)
    for descriptor in (rows, result, anyhow):
        _call("dnnl_memory_desc_destroy", descriptor)
    _call("dnnl_primitive_desc_destroy", description)
    return laid


def _reorder(of: Descriptors) -> c_void_p:
    """Create the description of a copy from SOURCE's layout and dtype to RESULT's."""
    engine = _library().engine
    return _create("dnnl_reorder_primitive_desc_create", of[SOURCE], engine, of[RESULT], engine, None)


def _matmul(of: Descriptors, *then: str) -> c_void_p:
    """Create the description of a matrix product and its post-operations: "times" a factor, or "add" to the output."""
    post = _create("dnnl_post_ops_create")
    attributes = _create("dnnl_primitive_attr_create")
    for i, what in enumerate(then):
        if what == "add":
            _call("dnnl_post_ops_append_sum", post, 1.0, 0, 0)
        else:
            _call("dnnl_post_ops_append_binary", post, MULTIPLY, of[FACTOR * (i + 1) + 2])
    _call("dnnl_primitive_attr_set_post_ops", attributes, post)
    operands = of[SOURCE], of[WEIGHTS], of.get(BIAS), of[RESULT]
    description = _create("dnnl_matmul_primitive_desc_create", _library().engine, *operands, attributes)
    _call("dnnl_post_ops_destroy", post)
    _call("dnnl_primitive_attr_destroy", attributes)
    return description


class _Primitive:
    """A computation made for some layouts of its arguments, then called with arrays that have them.

    Args:
        describe: one of the functions above. options: its further arguments.
        places: of the arguments, oneDNN's numbers. layouts: of each.
        n_threads: of OpenMP's, that will share it.
    """

    def __init__(
        self,
        describe: Callable[..., c_void_p],
        options: tuple[Any, ...],
        places: tuple[int, ...],
        *layouts: Layout,
        n_threads: int = 1,
    ) -> None:
        # before the number of threads is set, because the layout that oneDNN selects depends on it
        descriptors = {place: _descriptor(layout) for place, layout in zip(places, layouts)}
        self.free, self.held, engine = _library()
        self.held.omp_set_num_threads(n_threads)
        try:
            description = describe(descriptors, *options)
            self.handle = _create("dnnl_primitive_create", description)
        finally:
            self.held.omp_set_num_threads(1)
        self.memories = [_create("dnnl_memory_create", descriptors[place], engine, None) for place in places]
        self.arguments = (_Argument * len(places))(*map(_Argument, places, self.memories))
        for descriptor in descriptors.values():
            _call("dnnl_memory_desc_destroy", descriptor)
        _call("dnnl_primitive_desc_destroy", description)

    def __call__(self, stream: c_void_p, arrays: tuple[np.ndarray, ...]) -> None:
        """Execute the primitive on the arrays, in the order of its places; an error of oneDNN is raised."""
        for memory, array in zip(self.memories, arrays):
            self.held.dnnl_memory_set_data_handle(memory, array.ctypes.data)
        status = self.free.dnnl_primitive_execute(self.handle, stream, len(arrays), self.arguments)
        _check("dnnl_primitive_execute", status)

    def __del__(self) -> None:
        """Free oneDNN's memory objects and the primitive, if they were created."""
        if hasattr(self, "arguments"):
            for memory in self.memories:
                self.free.dnnl_memory_destroy(memory)
            self.free.dnnl_primitive_destroy(self.handle)


class _Thread(threading.local):
    """The stream and primitives of a thread: a primitive has scratch memory and must not run twice at once.

    Made anew in every thread that looks.
    """

    def __init__(self) -> None:
        _library().held.omp_set_num_threads(1)  # for the calls that this thread will make
        self.stream = _create("dnnl_stream_create", _library().engine, IN_ORDER)
        # Cache: keyed by layouts, what is done then and the number of threads; the least recently used go
        self.primitive = lru_cache(N_PRIMITIVES)(_Primitive)


# Cache: valid for the life of the process: what each thread has is in a threading.local.
@cache
def _this_thread() -> _Thread:
    """Return the stream and primitive cache of the calling thread, created at its first call."""
    return _Thread()


def _run(
    describe: Callable[..., c_void_p],
    options: tuple[Any, ...],
    places: tuple[int, ...],
    arrays: tuple[np.ndarray, ...],
    layouts: tuple[Layout, ...] | None = None,
) -> None:
    """Run the cached primitive of `describe(descriptors, *options)` on arrays; `layouts` default to the arrays' own."""
    thread = _this_thread()
    layouts = tuple([_layout(array) for array in arrays]) if layouts is None else layouts
    thread.primitive(describe, options, places, *layouts)(thread.stream, arrays)


def matmul_openmp(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Write a @ b into `out` by oneDNN in OpenMP threads and time it for `spin_policy`, which the caller has checked.

    Arguments are those of `matmul`.
    """
    spin_threads.disable_after_fork()
    thread = _this_thread()
    n_threads = threads.n_threads()
    layouts = _layout(a), _layout(b), _layout(out)
    primitive = thread.primitive(_matmul, (), (SOURCE, WEIGHTS, RESULT), *layouts, n_threads=n_threads)
    set_threads = primitive.held.omp_set_num_threads
    start = perf_counter()
    set_threads(n_threads)
    try:
        primitive(thread.stream, (a, b, out))
    finally:
        set_threads(1)
    spin_threads.spin_policy.record_seconds(perf_counter() - start, a.nbytes + b.nbytes)


def _layout(array: np.ndarray) -> Layout:
    """Return (shape, strides in bytes, item size) of an array."""
    return array.shape, array.strides, array.itemsize


# -------------------------------------------------------------------- functions for kernels, called by each thread
# Arrays are float32 unless said. None may be empty.
def convert(x: np.ndarray, out: np.ndarray) -> None:
    """Write float32 or bfloat16 values into an array of either dtype, rounded to nearest even; NaN stays NaN."""
    _run(_reorder, (), (SOURCE, RESULT), (x, out))


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray, bias: np.ndarray | None = None) -> None:
    """Write bfloat16 a @ b plus bias (1, M) into `out` (float32 too) by oneDNN in this thread; no array may be empty.

    Args:
        a, b: (..., N, K) and (..., K, M), bfloat16, either may be a transposed view.
        out: (..., N, M), float32 or bfloat16; its last axis lies in one piece.
        bias: (1, M).
    """
    arrays = (a, b, out) if bias is None else (a, b, out, bias)
    _run(_matmul, (), (SOURCE, WEIGHTS, RESULT, BIAS)[: len(arrays)], arrays)


class PackedMatrix:
    """A weight matrix in oneDNN's preferred layout, packed once.

    Args:
        matrix: (K, M), int8 or bfloat16.
        factors: (M,), what each column of a product is multiplied by; None for 1.
    """

    def __init__(self, matrix: np.ndarray, factors: np.ndarray | None = None) -> None:
        self.shape, self.itemsize = matrix.shape, matrix.itemsize
        self.layout: Layout = (self.shape, PACKED, self.itemsize)
        self.factors = None if factors is None else np.ascontiguousarray(factors, np.float32)[None]
        descriptor = _descriptor(self.layout)
        n_bytes = _library().free.dnnl_memory_desc_get_size(descriptor)
        _call("dnnl_memory_desc_destroy", descriptor)
        self.memory = buffers.aligned_empty((n_bytes,), np.uint8)
        _run(_reorder, (), (SOURCE, RESULT), (matrix, self.memory), (_layout(matrix), self.layout))

    def product(self, x: np.ndarray, out: np.ndarray, add: bool = False) -> None:
        """Write the rows x times this matrix, times its column factors, into `out` (N, M); add it there if `add`.

        Args:
            x: (N, K), of the matrix's dtype.
            out: in one piece: oneDNN is very slow where factors meet a part of a larger array.
        """
        if len(x) == 1 and self.factors is not None:  # oneDNN takes 200 times as long for one row as for two
            pair = np.repeat(out, 2, axis=0)
            self.product(np.repeat(x, 2, axis=0), pair, add)
            out[...] = pair[:1]
            return
        places: tuple[int, ...] = (SOURCE, WEIGHTS, RESULT)
        layouts: tuple[Layout, ...] = (_layout(x), self.layout, _layout(out))
        arrays: tuple[np.ndarray, ...] = (x, self.memory, out)
        then = ("add",) * add
        if self.factors is not None:
            places, then = (*places, FACTOR + 2), ("times", *then)
            layouts, arrays = (*layouts, _layout(self.factors)), (*arrays, self.factors)
        _run(_matmul, then, places, arrays, layouts)
