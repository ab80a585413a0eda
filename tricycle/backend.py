"""Which array library holds an array, moving arrays between the host and a GPU, and worker threads.

CuPy is imported the first time a GPU is asked for and never before, so that `import tricycle` costs
no more than NumPy and works where no CUDA exists.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # np.ndarray or cupy.ndarray: both offer the same interface

# The oldest of NVIDIA's drivers with which each version of CUDA works.
DRIVERS = {12: 525, 13: 580}
# The module that computes on each type of array. `cupy.ndarray` joins when the first array moves.
ARRAY_MODULES: dict[type, ModuleType] = {np.ndarray: np}


def array_module(array: Array) -> ModuleType:
    """The module (`numpy` or `cupy`) whose functions work on `array`."""
    try:
        return ARRAY_MODULES[type(array)]
    except KeyError:
        return _module_of_other(array)


def _module_of_other(array: Array) -> ModuleType:
    """NumPy's subclasses (memmap, ...), its scalars, and CuPy arrays that a user made without us."""
    if isinstance(array, (np.ndarray, np.generic)):
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        ARRAY_MODULES[type(array)] = cupy
        return cupy
    raise TypeError(f"expected a NumPy or CuPy array, got {type(array).__name__}")


def is_array(value: object) -> bool:
    """Whether `value` is an array of a library we compute with."""
    try:
        array_module(value)
    except TypeError:
        return False
    return True


def on_gpu(array: Array) -> bool:
    return array_module(array) is not np


@cache
def gpu_problem() -> str | None:
    """Why no GPU can be used here, in one line; None when one can."""
    try:
        import cupy
    except ModuleNotFoundError:
        return "CuPy is not installed (pip install 'tricycle-gpt[cuda13]', or [cuda12])"
    except ImportError as error:
        return f"CuPy cannot be loaded: {' '.join(str(error).split())}"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        has, needs = runtime.driverGetVersion() // 1000, runtime.runtimeGetVersion() // 1000  # 12040 is CUDA 12.4
        if not has:
            return "there is no NVIDIA driver, so no NVIDIA GPU that could be used"
        oldest = DRIVERS.get(needs, f"for CUDA {needs}")
        advice = f"install driver {oldest} or newer, or tricycle-gpt[cuda{has}] in place of this CuPy"
        return f"CUDA reports: {error}" if has >= needs else f"the driver is for CUDA {has}, CuPy for {needs}: {advice}"
    return None if count else "CUDA sees no device"


def gpu_available() -> bool:
    return gpu_problem() is None


def gpu_memory() -> tuple[int, int]:
    """Bytes of the current GPU that a new array could have, and all of them."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return free + cupy.get_default_memory_pool().free_bytes(), total


def to_gpu(array: Array, device: int = 0) -> Array:
    """A copy of `array` on GPU number `device`; the same array if it is there already.

    Where no GPU can be used the array stays where it is, with one warning that says why: the same script then
    runs on any machine. Programs that insist on a GPU ask `gpu_problem` first.
    """
    problem = gpu_problem()
    if problem:
        warnings.warn(f"to_gpu: no GPU can be used, so this stays on the CPU: {problem}", stacklevel=3)
        return array
    import cupy

    ARRAY_MODULES[cupy.ndarray] = cupy
    with cupy.cuda.Device(device):
        return cupy.asarray(array)


def to_cpu(array: Array) -> np.ndarray:
    """The array in host memory; the same array if it is there already."""
    if isinstance(array, np.ndarray):
        return array
    xp = array_module(array)
    return np.asarray(array) if xp is np else xp.asnumpy(array)


# -------------------------------------------------------------------- worker threads
# NumPy lets go of Python's lock while it computes, so threads that take a part of an array each use all cores,
# for elementwise work too. BLAS is held to one thread a worker meanwhile: its own threads, which wait for more
# work by spinning, would get in the way.
_one_at_a_time = threading.Lock()


@cache
def blas_libraries() -> tuple[Any, ...]:
    """The BLAS that NumPy calls, as threadpoolctl's controllers; () where it is not installed or knows none."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:  # NumPy alone is enough
        return ()
    return tuple(library for library in ThreadpoolController().lib_controllers if library.user_api == "blas")


@cache
def n_threads() -> int:
    """How many threads share the work: TRICYCLE_NUM_THREADS, else OMP_NUM_THREADS, else as many as BLAS would use.

    Read once. Without the first, one where nothing can hold BLAS to one thread a worker (but not on macOS, whose BLAS
    has no threads to hold).

    Raises:
        ValueError: TRICYCLE_NUM_THREADS is no whole number above 0.
    """
    said = os.environ.get("TRICYCLE_NUM_THREADS", "")
    if said and not (said.isdecimal() and int(said) > 0):
        raise ValueError(f"TRICYCLE_NUM_THREADS: expected a whole number above 0, got {said!r}")
    if said:
        for library in blas_libraries():
            library.set_num_threads(int(said))
        return int(said)
    if not blas_libraries() and sys.platform != "darwin":
        return 1
    omp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if omp.isdecimal() and int(omp) > 0:
        return int(omp)
    return max((library.num_threads for library in blas_libraries()), default=os.cpu_count() or 1)


@cache
def _keep_memory() -> None:
    """Where the C library is glibc: freed memory stays with the process, in pages of 2 MB where the system has them.

    Otherwise large arrays go back to the system when they are freed, and it clears every page that it hands out to
    the next step; and with pages of 4 kB the processor spends time on looking up where they lie. Together a tenth of
    a training step.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        return
    m_trim_threshold, m_mmap_max, madv_hugepage, page = -1, -4, 14, 4096
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)
    # Addresses alone are taken here, no memory: half as many as the machine has, marked, and given back to malloc.
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(size))
    if block:
        start = -(-block // page) * page
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - page), madv_hugepage)
        libc.free(ctypes.c_void_p(block))


class _Helper:
    """A thread that waits for work. Two bare locks hand it over faster than a queue does.

    Args:
        cpu: the processor to stay on, if any.
    """

    def __init__(self, cpu: int | None) -> None:
        self.cpu = cpu
        self.work: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.start, self.done = threading.Lock(), threading.Lock()
        self.start.acquire()
        self.done.acquire()
        threading.Thread(target=self._run, name="tricycle", daemon=True).start()

    def _run(self) -> None:
        if self.cpu is not None:
            os.sched_setaffinity(0, {self.cpu})
        while True:
            self.start.acquire()
            try:
                self.work()
            except BaseException as error:
                self.error = error
            self.done.release()


@cache
def _helpers() -> tuple[_Helper, ...]:
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_after_fork)
    cpus: list = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) != n_threads():
        cpus = [None] * n_threads()
    # Linux likes to wake a thread on the processor of its waker, where both then take turns while another idles.
    return tuple(_Helper(cpu) for cpu in cpus[1:])


def _after_fork() -> None:
    """Threads do not live on in a forked process."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    _helpers.cache_clear()


def all_at_work() -> bool:
    """Whether a call of `parallel` goes on, so that another one would do all its work itself."""
    return _one_at_a_time.locked()


def parallel(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call `work` for each item, in several threads, each with one thread of BLAS.

    Each call must write where no other does. Called from inside `work`, or while another thread is here, it does
    all the work itself.

    Raises:
        whatever `work` raises, after all threads have stopped.
    """
    _keep_memory()
    items = list(items)
    if n_threads() == 1 or not _one_at_a_time.acquire(blocking=False):
        for item in items:
            work(item)
        return
    queue = iter(items)  # taking the next item of a list is one step that no other thread comes between

    def take() -> None:
        for item in queue:
            work(item)

    usual = [(library, library.num_threads) for library in blas_libraries()]
    started: list[_Helper] = []
    try:
        for library, _ in usual:
            library.set_num_threads(1)
        for helper in _helpers()[: len(items) - 1]:
            helper.work, helper.error = take, None
            helper.start.release()
            started.append(helper)
        take()
    finally:
        for _ in queue:  # after an error the others need not go on
            pass
        for helper in started:
            helper.done.acquire()
        for library, number in usual:
            library.set_num_threads(number)
        _one_at_a_time.release()
    for helper in started:
        if helper.error is not None:
            raise helper.error
