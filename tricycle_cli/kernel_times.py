"""Measure the time of each kernel, for `tricycle machine --speed`."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tricycle.kernels.dispatch import Kernel


@contextmanager
def timed_kernels(clock: Callable[[], float] = time.perf_counter) -> Iterator[defaultdict[str, float]]:
    """Yield a dict of seconds by kernel name, to which this thread's outermost kernel calls add within the context.

    A kernel that another kernel calls counts as part of the caller, so that the sum is at most the elapsed time. Calls
    of other threads do not count, because they run within a call of this thread.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    kernel_class: Any = Kernel
    owner, untimed = threading.get_ident(), kernel_class.__call__
    inside = False

    def call(kernel: Kernel[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal inside
        if inside or threading.get_ident() != owner:
            return untimed(kernel, *args, **options)
        inside = True
        start = clock()
        try:
            return untimed(kernel, *args, **options)
        finally:
            seconds[kernel.reference.__name__] += clock() - start
            inside = False

    kernel_class.__call__ = call
    try:
        yield seconds
    finally:
        kernel_class.__call__ = untimed
