"""Worker threads that divide NumPy work; BLAS computes in one thread per worker meanwhile.

NumPy lets go of Python's lock while it computes, so threads that take a part of an array each use all cores, for
elementwise work too. BLAS is held to one thread a worker meanwhile: its own threads, which wait for more work by
spinning, would get in the way.

Nothing here changes the host process for good: helper threads run on whatever processor the system gives them, and
BLAS has its own number of threads back when the work is done. `host.py` is where a program asks for more.

**Results do not depend on who else is at work.** How work is cut depends on its size and on `n_threads()` alone: a
second caller waits for its turn, it does not make do with fewer threads. And BLAS adds up in another order with
another number of threads, which belongs to the whole process; so what calls it with large arrays does so inside
`parallel_for` or `single_blas_thread`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import cache, partial
from typing import Any

from tricycle.system.cgroups import cpu_quota

# -------------------------------------------------------------------- how many threads
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


# Cache: valid for the life of the process: NumPy's BLAS is loaded with NumPy.
@cache
def blas_libraries() -> tuple[Any, ...]:
    """Return threadpoolctl's controllers of NumPy's BLAS, cached; () if threadpoolctl is missing or finds none."""
    import numpy  # noqa: F401, only what is loaded can be found

    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:  # NumPy alone is enough
        return ()
    return tuple(library for library in ThreadpoolController().lib_controllers if library.user_api == "blas")


def requested_threads() -> int | None:
    """Return TRICYCLE_NUM_THREADS as an integer; None if it is not set; ValueError unless it is a number above 0."""
    said = os.environ.get("TRICYCLE_NUM_THREADS", "")
    if not said:
        return None
    if not (said.isdecimal() and int(said) > 0):
        raise ValueError(f"TRICYCLE_NUM_THREADS: expected a whole number above 0, got {said!r}")
    return int(said)


# Cache: None until the number is certain, then valid for the life of the process; `reset_n_threads` clears it.
_n_threads: int | None = None


def n_threads() -> int:
    """Return TRICYCLE_NUM_THREADS, else 1 if no BLAS library can be limited, else OMP_NUM_THREADS or BLAS's number.

    BLAS's number is what it has outside of our own holds, at most the processors of the affinity and the CPU quota.
    While that is less than the machine offers, as inside of a user's `threadpool_limits(1)`, it counts for the moment
    alone; once it is not, it is kept. On macOS, whose BLAS has no threads to limit, several threads are used.

    Raises:
        ValueError: TRICYCLE_NUM_THREADS is no whole number above 0.
    """
    global _n_threads
    if _n_threads is None:
        number, is_certain = _count_threads()
        if not is_certain:
            return number
        _n_threads = number
    return _n_threads


def reset_n_threads() -> None:
    """Forget the cached number of threads, so that the next call of `n_threads` reads the environment again."""
    global _n_threads
    _n_threads = None


def _count_threads() -> tuple[int, bool]:
    """Return (number of threads to share work now, whether that will stay so): by variables, BLAS or 1."""
    asked_for = requested_threads()
    if asked_for is not None:
        return asked_for, True
    if not blas_libraries():
        return (_n_processors() if sys.platform == "darwin" else 1), True
    omp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if omp.isdecimal() and int(omp) > 0:
        return int(omp), True
    now = max(blas_limit.unlimited_threads(library) for library in blas_libraries())
    limits = [int(limit) for name in BLAS_VARIABLES if (limit := os.environ.get(name, "")).isdecimal() and int(limit)]
    return min(now, _n_processors()), now >= min([_n_processors(), *limits])  # as many as BLAS begins with


def _n_processors() -> int:
    """Return how many processors this process may use: by its affinity, and by the CPU quota of its cgroups."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return number if quota is None else min(number, max(1, math.ceil(quota)))


# -------------------------------------------------------------------- state of a thread
class _ThreadState(threading.local):
    """State of the calling thread."""

    def __init__(self) -> None:
        self.in_worker = False  # whether it is in a call of `parallel_for`
        self.holders: set[object] = set()  # of `acquire_limit` in this thread
        self.usual: list[tuple[Any, int]] = []  # what these calls changed of BLAS in this thread alone


_thread_state = _ThreadState()


def in_worker() -> bool:
    """Return whether this thread runs inside a call of `parallel_for`; a nested call would run serially."""
    return _thread_state.in_worker


# -------------------------------------------------------------------- BLAS
def set_blas_threads(library: Any, number: int) -> None:
    """Set a BLAS library's number of threads, even if threadpoolctl lets only another thread set it.

    Later versions of threadpoolctl let only the first thread that tries set the number, and ignore all others until it
    ends. Clearing that thread, before the call for this thread and after it for others, lets any thread set it.
    """
    forget = getattr(library, "clear_controlling_thread", lambda force: None)
    forget(force=True)
    library.set_num_threads(number)
    forget(force=True)


def _limit_blas_threads(usual: list[tuple[Any, int]], of_each_thread: bool) -> None:
    """Set one thread in BLAS libraries that count per thread (OpenMP), or in the others.

    Args:
        usual: receives (library, former number), unless an interrupt has left it so.
        of_each_thread: those where every thread has a number of its own, as OpenMP does it; else those where the
            process has one.
    """
    if not usual:
        layers = ((library, getattr(library, "threading_layer", "")) for library in blas_libraries())
        usual += [(library, library.num_threads) for library, layer in layers if (layer == "openmp") == of_each_thread]
    for library, _ in usual:
        set_blas_threads(library, 1)


def _restore_blas_threads(usual: list[tuple[Any, int]]) -> None:
    """Set the thread numbers of the (library, number) pairs, and clear the list."""
    for library, number in usual:
        set_blas_threads(library, number)
    usual.clear()


class _BlasLimit:
    """Limit of BLAS to one thread, as long as it has holders."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: set[object] = set()  # this object itself until the process ends
        self.usual: list[tuple[Any, int]] = []

    @property
    def is_permanent(self) -> bool:
        """Whether the limit is held until the process ends."""
        return self in self.holders

    def acquire_limit(self, holder: object) -> None:
        """Limit BLAS to one thread for a holder; the first one saves the numbers of threads."""
        with self.lock:
            if not self.holders:
                _limit_blas_threads(self.usual, of_each_thread=False)
            self.holders.add(holder)
        if not _thread_state.holders:
            _limit_blas_threads(_thread_state.usual, of_each_thread=True)
        _thread_state.holders.add(holder)

    def release_limit(self, holder: object) -> None:
        """Undo `acquire_limit`, also one that was interrupted; the last one restores the numbers of BLAS threads."""
        with self.lock:
            self.holders.discard(holder)
            _thread_state.holders.discard(holder)
            if not self.holders:
                _restore_blas_threads(self.usual)
        if not _thread_state.holders:
            _restore_blas_threads(_thread_state.usual)

    def unlimited_threads(self, library: Any) -> int:
        """Return how many threads a library uses outside the limit."""
        with self.lock:
            held = {id(other): number for other, number in [*self.usual, *_thread_state.usual]}
            return held.get(id(library)) or int(library.num_threads)

    def forget_other_threads(self) -> None:
        """After a fork, keep only the holds of this thread; if none, restore the BLAS threads, unless permanent."""
        self.lock = threading.Lock()
        self.holders &= {self, *_thread_state.holders}
        if not self.holders:
            _restore_blas_threads(self.usual)


blas_limit = _BlasLimit()


def limit_blas_until_exit() -> bool:
    """Limit BLAS to one thread until the process ends; return False if there is no BLAS to limit, or it uses OpenMP.

    With OpenMP every thread has a number of its own.
    """
    layers = [getattr(library, "threading_layer", "") for library in blas_libraries()]
    if not layers or "openmp" in layers:
        return False
    blas_limit.acquire_limit(blas_limit)
    return True


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread within a `with` block, then restore it; do nothing where it is limited already."""
    if in_worker() or blas_limit.is_permanent:
        yield
        return
    _register_fork_hook()
    holder = object()
    try:
        blas_limit.acquire_limit(holder)
        yield
    finally:
        try:
            blas_limit.release_limit(holder)
        except BaseException:  # an interrupt
            blas_limit.release_limit(holder)
            raise


# -------------------------------------------------------------------- helper threads
def _no_work() -> None:
    """Do nothing: the work of a helper thread that has no work."""


class _Helper:
    """A worker thread that waits for work. Two locks hand the work over faster than a queue does."""

    def __init__(self) -> None:
        self.work: Callable[[], None] = _no_work
        self.error: BaseException | None = None
        self.finished = True
        self.start = threading.Lock()
        self.done = threading.Lock()
        self.start.acquire()
        self.thread = threading.Thread(target=self._run, name="tricycle", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Run in the worker thread forever: the work of each `begin`; store an exception in `error`, signal the end."""
        _thread_state.in_worker = True
        _limit_blas_threads(_thread_state.usual, of_each_thread=True)
        while True:
            self.start.acquire()
            done = self.done
            try:
                self.work()
            except BaseException as error:
                self.error = error
            self.work = _no_work  # or a model's arrays would live on here
            self.finished = True
            done.release()

    def begin(self, work: Callable[[], None]) -> None:
        """Start to run `work` in this worker's thread, and return at once."""
        while not self.finished:  # a caller that was interrupted has not waited for its work
            self.done.acquire()
        self.error = None
        self.work = work
        self.done = threading.Lock()  # a new one: without the GIL the last one may be released after `end` returned
        self.done.acquire()
        self.finished = False  # last, because an interrupt before the release would make `end` wait forever
        self.start.release()

    def end(self) -> list[BaseException]:
        """Wait until the work is done; return, not raise, its error and any interrupts that come meanwhile."""
        problems: list[BaseException] = []
        while not self.finished:
            try:
                self.done.acquire()
            except BaseException as interrupt:  # whatever a signal's handler raises
                problems.append(interrupt)
        if self.error is not None:
            problems.append(self.error)
            self.error = None
        return problems

    def abandon(self) -> None:
        """Mark the worker as finished in a forked process, where its thread does not exist."""
        if not self.finished:
            self.error = RuntimeError("parallel: the process was forked while threads shared its work")
            self.finished = True


# Cache: grows to the largest number that was needed; a forked process begins with an empty one.
_started: list[_Helper] = []


def _helpers() -> list[_Helper]:
    """Return the n_threads() - 1 worker threads beside the caller's, and start those that are missing.

    The caller holds `pool_lock`.
    """
    _register_fork_hook()
    n_helpers = n_threads() - 1
    while len(_started) < n_helpers:
        _started.append(_Helper())
    return _started[:n_helpers]


_stop_serving: Callable[[bool], None] | None = None


def start_serving(serve: Callable[[int], None], stop: Callable[[bool], None]) -> None:
    """Start `serve(1)`, `serve(2)`, ... in idle workers until `stop(True)` is called; the caller holds `pool_lock`.

    It is called when other work comes.
    """
    global _stop_serving
    if _stop_serving != stop:
        _stop_serving_helpers()
        _stop_serving = stop
    for number, helper in enumerate(_helpers(), 1):
        if helper.finished:
            helper.begin(partial(serve, number))


def _stop_serving_helpers() -> None:
    """Stop workers that serve a mailbox, so that all are idle; raise the first of their errors."""
    if _stop_serving is None or all(helper.finished for helper in _started):
        return
    _stop_serving(True)
    problems = [problem for helper in _started for problem in helper.end()]
    _stop_serving(False)
    if problems:
        raise problems[0]


# Cache: valid for the life of the process: registered once; a forked process inherits that.
@cache
def _register_fork_hook() -> None:
    """Have `_after_fork` called in each forked process; called once."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """Reset locks and workers in a forked process, where the other threads do not exist."""
    global pool_lock
    pool_lock = threading.Lock()
    blas_limit.forget_other_threads()
    for helper in _started:
        helper.abandon()
    _started.clear()


# -------------------------------------------------------------------- sharing work
pool_lock = threading.Lock()  # the helpers work for one caller at a time


def parallel_for(work: Callable[[Any], None], items: Iterable[Any], calls_blas: bool = True) -> None:
    """Call `work` for each item in worker threads, BLAS limited to one thread; serially if nested; raise first error.

    Each call must write where no other does. Called from inside `work` it does all the work itself. While another
    thread is here it waits for its turn, so `work` must not wait for a thread that comes here too.

    Args:
        calls_blas: whether `work` may call BLAS. To limit it takes longer than a compiled loop for a small array.

    Raises:
        whatever `work` raises, after all threads have stopped.
    """
    items = list(items)
    if in_worker() or (len(items) == 1 and not calls_blas):
        for item in items:
            work(item)
        return
    with single_blas_thread() if calls_blas else nullcontext():
        _thread_state.in_worker = True
        try:
            if n_threads() > 1 and len(items) > 1:
                with pool_lock:
                    _run_shared(work, items)
            else:
                for item in items:
                    work(item)
        finally:
            _thread_state.in_worker = False


def _run_shared(work: Callable[[Any], None], items: list[Any]) -> None:
    """Run `work` on items in this thread and the workers, each taking the next; raise the first error when all end."""
    queue = deque(items)  # popleft gives each item once, which an iterator does not in free-threaded Python

    def take() -> None:
        while queue:
            try:
                item = queue.popleft()
            except IndexError:  # another thread took the last one
                return
            work(item)

    _stop_serving_helpers()
    helpers = _helpers()[: len(items) - 1]
    problems: list[BaseException] = []
    try:
        for helper in helpers:
            helper.begin(partial(copy_context().run, take))  # so that NumPy warns there of what it warns of here
        take()
    finally:
        queue.clear()  # after an error the others need not go on
        for helper in helpers:
            problems += helper.end()
    if problems:
        raise problems[0]
