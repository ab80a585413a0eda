"""Launch CUDA kernels: the table of kernels in the .cu files, pure functions that plan launches, and `launch`.

A plan is a pure function of shapes, so that it can be tested without a GPU. Modules are compiled by CuPy when a kernel
of them first runs, one for each file and choice of template arguments, and kept by it on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import Array

FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++17",)
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")  # which CuPy adds by itself

# The element types that kernels know, and how CUDA C++ names them.
TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
SMALL = ("__half", "__nv_bfloat16")
_ALL, _SMALL = tuple((name,) for name in TYPES.values()), tuple((name,) for name in SMALL)
_CASTS = tuple(pair for small in SMALL for pair in (("float", small), (small, "float")))
# Rows of a tile of the attention kernels for each head size; that of float32 is rounded up to one of these sizes.
TENSOR_CORE_TILES, TENSOR_CORE_BACKWARD_TILES = {32: 64, 64: 64, 128: 32}, {32: 64, 64: 32, 128: 32}
FLOAT32_TILES, FLOAT32_BACKWARD_TILES = {32: 64, 64: 64, 128: 32}, {32: 32, 64: 32, 128: 16}
PADDED_SIZES = tuple(FLOAT32_TILES)


def _attention_templates(
    tiles: dict[int, int], types: tuple[tuple[str, ...], ...] = ((),)
) -> tuple[tuple[str, ...], ...]:
    """Return (*type, head size, tile), as text, for all types, each a tuple of a name or none, and head sizes."""
    return tuple((*kind, str(size), str(tile)) for kind in types for size, tile in tiles.items())


def _width(name: str) -> str:
    """Return "4" for "float", else "8": how many elements fit into 16 bytes, as text."""
    return "4" if name == "float" else "8"


def _reads(name: str) -> tuple[tuple[str, str], ...]:
    """Return the norm backward's template arguments for a type: (elements per load, loads per thread) pairs."""
    return ("1", "4"), *((_width(name), str(times)) for times in (1, 2, 3, 4))


# file -> kernel -> the template arguments that it is compiled with
KERNELS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "elementwise": {
        **dict.fromkeys(
            ("gelu", "gelu_backward", "relu_squared", "sigmoid", "add", "multiply", "scale", "rotate"), _ALL
        ),
        "cast": _CASTS,
    },
    "rows": {
        "softmax": tuple((name, nothing) for name in TYPES.values() for nothing in ("false", "true")),
        **dict.fromkeys(("log_softmax", "softmax_backward", "cross_entropy"), _ALL),
    },
    "reduce": {
        "sum_rows": _ALL,
        "sum_all": (("float", "false"), *((name, "true") for name in TYPES.values())),
    },
    "norm": {
        "layer_norm": _ALL,
        "layer_norm_backward": tuple((name, *held) for name in TYPES.values() for held in _reads(name)),
    },
    "embedding": {
        **dict.fromkeys(("rank_tokens", "add_tiles", "start_rows", "sort_tokens"), ((),)),
        "sum_tokens": tuple((name, width) for name in TYPES.values() for width in ("1", _width(name))),
    },
    "adamw": {"adamw": _ALL},
    "dropout": {"random_mask": _ALL},
    "recurrent": dict.fromkeys(("rnn", "gru", "lstm", "rnn_backward", "gru_backward", "lstm_backward"), ((),)),
    "attention": {
        "attention": _attention_templates(FLOAT32_TILES),
        "attention_inner": _ALL,
        "attention_backward_keys": _attention_templates(FLOAT32_BACKWARD_TILES),
        "attention_backward_queries": _attention_templates(FLOAT32_BACKWARD_TILES),
    },
    "attention_mma": {
        "attention_mma": _attention_templates(TENSOR_CORE_TILES, _SMALL),
        "attention_mma_backward_keys": _attention_templates(TENSOR_CORE_BACKWARD_TILES, _SMALL),
        "attention_mma_backward_queries": _attention_templates(TENSOR_CORE_BACKWARD_TILES, _SMALL),
    },
}


def template_name(kernel: str, template: Sequence[str] = ()) -> str:
    """Return the C++ name of a kernel with its template arguments."""
    return f"{kernel}<{', '.join(template)}>" if template else kernel


def template_names(file: str, template: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return C++ names of a .cu file's instantiations in KERNELS, or of those with these template arguments."""
    return tuple(
        template_name(kernel, each)
        for kernel, choices in KERNELS[file].items()
        for each in choices
        if template is None or each == tuple(template)
    )


# Cache: valid for the life of the process: files of this package do not change while it runs.
@cache
def read_source(file: str, folders: tuple[Path, ...] = (FOLDER,)) -> str:
    """Return the text of `file`.cu with #include "..." lines replaced by the headers, each once (not <...>); cached.

    CuPy looks at this text alone to find out whether it has compiled it before, so headers must be in it.
    """
    included: set[str] = set()

    def text(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        path = next(folder / name for folder in folders if (folder / name).is_file())
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            own = line.startswith('#include "')
            lines.append(text(line.split('"')[1]) if own else "" if line.startswith("#pragma once") else line)
        return "".join(lines)

    return text(f"{file}.cu")


# -------------------------------------------------------------------- plans
MAX_THREADS, MAX_GRID_X, MAX_GRID_Y = 1024, 2**31 - 1, 65_535
DEFAULT_MAX_SHARED = 48 * 1024
MAX_SHARED = 99 * 1024  # what a block gets on every GPU from sm_86 on (sm_80 and sm_90 have more)
THREADS = 256


class LaunchPlan(NamedTuple):
    """The grid, block and dynamic shared memory (bytes per block) of a kernel launch."""

    grid: tuple[int, int]
    block: tuple[int, int]
    shared: int = 0

    def check(self) -> LaunchPlan:
        """Return self; ValueError if grid or shared memory is too large, or threads no multiple of 32 up to 1024.

        Raises:
            ValueError: no GPU could run it.
        """
        (x, y), (a, b) = self.grid, self.block
        if not (0 < x <= MAX_GRID_X and 0 < y <= MAX_GRID_Y):
            raise ValueError(f"expected a grid from (1, 1) to ({MAX_GRID_X}, {MAX_GRID_Y}), got {self.grid}")
        if not (0 < a * b <= MAX_THREADS and a * b % 32 == 0):
            raise ValueError(f"expected a multiple of 32 threads, at most {MAX_THREADS}, got {self.block}")
        if not 0 <= self.shared <= MAX_SHARED:
            raise ValueError(f"expected at most {MAX_SHARED} bytes of shared memory, got {self.shared}")
        return self


def ceil_div(n: int, size: int) -> int:
    """Return n divided by size, rounded up."""
    return -(-n // size)


def elements_per_16_bytes(itemsize: int) -> int:
    """Return how many elements of `itemsize` bytes fit into 16 bytes."""
    return 16 // itemsize


def plan_elementwise(n: int, per_thread: int) -> LaunchPlan:
    """Plan a launch over n elements, `per_thread` per thread, THREADS per block; ValueError if 0 or too large."""
    return LaunchPlan((ceil_div(n, per_thread * THREADS), 1), (THREADS, 1)).check()


def plan_rows(n_rows: int, row_size: int, itemsize: int, max_threads: int = MAX_THREADS) -> LaunchPlan:
    """Plan a launch: a warp per short row (4 per block), a block per long row; ValueError for 0 or too many rows."""
    n_packs = ceil_div(row_size, elements_per_16_bytes(itemsize))
    if n_packs <= 4 * 32:
        return LaunchPlan((ceil_div(n_rows, 4), 1), (32, 4)).check()
    return LaunchPlan((n_rows, 1), (min(max_threads, 32 * ceil_div(n_packs, 4 * 32)), 1)).check()


NORM_BLOCKS = 396  # three for each multiprocessor of an H100, as many as run at once
# The longest rows by the elements that a thread reads at once, four times for each of the NORM_THREADS of norm.cu.
LONGEST_NORM = {1: 4096, 4: 8192, 8: 8192}


def plan_norm_backward(n_rows: int, row_size: int, at_once: int) -> tuple[LaunchPlan, int]:
    """Plan the norm backward launch; return (plan, loads of `at_once` elements a thread makes per row, 4 for 1)."""
    threads = 32 * ceil_div(row_size, 4 * 32 * at_once)
    n_teams = 4 if threads == 32 else 1
    plan = LaunchPlan(
        (min(NORM_BLOCKS, ceil_div(n_rows, n_teams)), 1), (threads, n_teams), 8 * row_size if n_teams > 1 else 0
    )
    return plan.check(), 4 if at_once == 1 else ceil_div(row_size, threads * at_once)


def plan_column_sums(n_rows: int, row_size: int, itemsize: int) -> tuple[LaunchPlan, int]:
    """Plan a launch that sums columns by chunks of rows; return (plan, rows that each block adds up)."""
    n_packs, n_chunks = ceil_div(row_size, elements_per_16_bytes(itemsize)), 1
    lanes = 32 if n_rows > 2048 else 8  # few rows: rather more blocks than longer accesses
    across = ceil_div(n_packs, lanes)
    if n_rows > 2048:
        n_chunks = min(ceil_div(n_rows, 256), max(1, 1056 // across))
    chunk = ceil_div(n_rows, n_chunks)
    shared = THREADS * elements_per_16_bytes(itemsize) * 4
    return LaunchPlan((across, ceil_div(n_rows, chunk)), (lanes, THREADS // lanes), shared).check(), chunk


def plan_total_sum(n: int, itemsize: int) -> LaunchPlan:
    """Plan a launch that sums n elements into one partial sum per block, at most 1024 blocks."""
    return LaunchPlan(
        (max(1, min(1024, ceil_div(n, elements_per_16_bytes(itemsize) * MAX_THREADS))), 1), (MAX_THREADS, 1)
    ).check()


TOKENS, SHARED_TOKENS = 512, 32  # tokens of a tile; of one id, above which several teams share a row


def plan_token_sums(n_rows: int, row_size: int, at_once: int) -> LaunchPlan:
    """Plan a launch that sums token gradients into a table, four table rows per block; ValueError if 0 or too many."""
    lanes = min(128, 32 * ceil_div(row_size, 32 * at_once))
    return LaunchPlan((ceil_div(n_rows, 4), 1), (lanes, 4), 4 * lanes * 4 * at_once).check()


def plan_attention(n_tokens: int, n_heads: int, tile: int, threads: int, shared: int) -> LaunchPlan:
    """Plan attention: a block of `threads`, `shared` bytes per `tile` tokens of each head; ValueError if too large."""
    return LaunchPlan((ceil_div(n_tokens, tile) * n_heads, 1), (threads, 1), shared).check()


class AttentionSharedMemory(NamedTuple):
    """Bytes of shared memory of the attention forward kernel and of the two backward kernels."""

    forward: int
    keys: int
    queries: int


def tensor_core_shared_memory(size: int) -> AttentionSharedMemory:
    """Return bytes of shared memory per block of tensor-core attention (forward, keys, queries) for a head size."""
    row, forward, backward = 2 * (size + 8), TENSOR_CORE_TILES[size], TENSOR_CORE_BACKWARD_TILES[size]
    queries = (2 * 64 + 4 * backward) * row
    return AttentionSharedMemory((64 + 4 * forward) * row, queries + 4 * 4 * backward, queries)


def float32_shared_memory(size: int) -> AttentionSharedMemory:
    """Return bytes of shared memory per block of float32 attention (forward, keys, queries) for a padded head size."""
    forward, backward = FLOAT32_TILES[size], FLOAT32_BACKWARD_TILES[size]
    rows, square = backward * (size + 1), backward * (backward + 1)
    whole = 2 * forward * (size + 1) + forward * (forward + 1)
    return AttentionSharedMemory(4 * whole, 4 * (4 * rows + 2 * square), 4 * (4 * rows + square))


# -------------------------------------------------------------------- arguments
SIZES = np.dtype(
    [(name, np.int32) for name in ("items", "queries", "keys", "heads", "key_heads", "size")]
    + [(name, np.int32) for name in ("causal", "offset", "window", "nothing")]
    + [(name, np.float32) for name in ("scale", "cap")]
)
STRIDES = np.dtype([(name, np.int64) for name in ("item", "token", "head")])
MASK = np.dtype([("values", np.uint64), *((name, np.int64) for name in ("item", "head", "query"))])
NULL = np.uint64(0)


def struct_argument(dtype: np.dtype, *values: Any) -> np.ndarray:
    """Pack values into a one-element structured array, which a kernel takes as a struct by value."""
    return np.array([values], dtype)


def device_address(array: Array) -> int:
    """Return the memory address of an array's first element."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


# -------------------------------------------------------------------- launch
# Cache: valid for the life of the process: a module.
@cache
def _runtime() -> Any:
    """Return CuPy's module of CUDA runtime functions, imported on the first call."""
    from cupy.cuda import runtime

    return runtime


def _device() -> int:
    """Return the number of the current CUDA device."""
    return _runtime().getDevice()


# Cache: valid for the life of the process: depends on the device alone.
@cache
def _capability(device: int) -> int:
    """Return a CUDA device's compute capability as an integer without the point, such as 90 for 9.0; cached."""
    from cupy.cuda import Device

    return int(Device(device).compute_capability)


def has_tensor_cores() -> bool:
    """Return whether the current device has compute capability 8.0 (Ampere) or later, for the tensor-core kernels."""
    return _capability(_device()) >= 80


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def _include() -> tuple[str, ...]:
    """Return CUDA headers' include option for a CuPy that does not find them, as a tuple; () if none are found."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return ()
    header = find_nvidia_header_directory("cudart")
    return () if header is None else (f"-I{header}",)


# Cache: valid for the life of the process: one for each device and kernel source.
@cache
def _module(file: str, template: tuple[str, ...], device: int) -> Any:
    """Return the CuPy RawModule of a .cu file and template arguments, compiled at first use; cached per device."""
    import cupy

    names = template_names(file, template)
    return cupy.RawModule(code=read_source(file), options=OPTIONS + _include(), name_expressions=names)


# Cache: valid for the life of the process: one for each device, kernel and size of shared memory.
@cache
def _function(file: str, kernel: str, template: tuple[str, ...], device: int, shared: int) -> Any:
    """Return a compiled kernel, cached, that may use `shared` bytes; ValueError for an unknown template."""
    if template not in KERNELS[file][kernel]:
        raise ValueError(f"{file}.cu: expected {kernel} with one of {KERNELS[file][kernel]}, got {template}")
    function = _module(file, template, device).get_function(template_name(kernel, template))
    if shared > DEFAULT_MAX_SHARED:
        function.max_dynamic_shared_size_bytes = shared
    return function


def launch(file: str, kernel: str, template: tuple[str, ...], plan: LaunchPlan, *arguments: Any) -> None:
    """Launch a kernel (compiled once) on its arrays' device and current stream, async; ValueError for several devices.

    Args:
        arguments: arrays, None for a null pointer, NumPy scalars and `struct`s of the types that the kernel declares.

    Raises:
        ValueError: arrays lie on several devices.
    """
    filled = tuple(NULL if argument is None else argument for argument in arguments)
    where = _device_of(kernel, filled)
    device = _device() if where is None else where
    with on_device(device):
        function = _function(file, kernel, template, device, plan.shared)
        function(plan.grid, plan.block, filled, shared_mem=plan.shared)


def _device_of(kernel: str, arguments: Sequence[Any]) -> int | None:
    """Return the number of the device of all arrays among the arguments; None without arrays; ValueError if several.

    Raises:
        ValueError: there are several.
    """
    numbers = {each.device.id for each in arguments if not isinstance(each, (np.ndarray, np.generic))}
    if len(numbers) > 1:
        names = " and ".join(map(str, sorted(numbers)))
        raise ValueError(f"{kernel}: expected arrays on one device, got some on {names}")
    return numbers.pop() if numbers else None


@contextmanager
def on_device(number: int) -> Iterator[None]:
    """Make a device the current one within a `with` block."""
    if number == _device():
        yield
        return
    from cupy.cuda import Device

    with Device(number):
        yield
