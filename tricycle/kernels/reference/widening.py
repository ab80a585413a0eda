"""Kernels on 16-bit floats: they take and return 16 bits, and compute in 32."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tricycle.kernels.dispatch import Kernel, kernel

P = ParamSpec("P")
R = TypeVar("R")


def is_narrow(x: Any) -> bool:
    """Return whether x is an array of floats of 16 bits."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.itemsize == 2 and dtype.kind not in "biu"


def wide(x: Any) -> Any:
    """Return floats of 16 bits as float32, anything else as it is."""
    return x.astype(np.float32) if is_narrow(x) else x


def widening(n_narrow: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compute a kernel in float32 where its first array has 16 bits, and return `n_narrow` results in its dtype.

    The other results (statistics, losses, sums, gradients of parameters) stay float32.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        @wraps(kernel)
        def run(*args: Any, **options: Any) -> Any:
            if not is_narrow(args[0]):
                return kernel(*args, **options)
            results = kernel(*map(wide, args), **{name: wide(option) for name, option in options.items()})
            if not n_narrow or results is NotImplemented:
                return results
            if not isinstance(results, tuple):
                return results.astype(args[0].dtype)
            return (*(result.astype(args[0].dtype) for result in results[:n_narrow]), *results[n_narrow:])

        return run

    return decorate


def wide_kernel(n_narrow: int) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a kernel of its plain version, which is `widening(n_narrow)`."""
    return lambda plain: kernel(widening(n_narrow)(plain))
