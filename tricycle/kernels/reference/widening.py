"""Floats of 16 bits: taken and given, computed with in 32."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import NotImplementedType
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def is_narrow(x: Any) -> bool:
    """Whether x is an array of floats of 16 bits."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.itemsize == 2 and dtype.kind not in "biu"


def wide(x: Any) -> Any:
    """Floats of 16 bits as float32; anything else as it is."""
    return x.astype(np.float32) if is_narrow(x) else x


def widening(n_narrow: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The kernel for arrays of 16 bits too: computed in float32. The first array is given by position.

    Args:
        n_narrow: so many of its results come in the dtype of its first array; the others (statistics, losses, sums,
            gradients of parameters) stay float32.
    """

    def decorate(kernel: Callable[P, R]) -> Callable[P, R]:
        @wraps(kernel)
        def run(*args: P.args, **options: P.kwargs) -> R:
            if not is_narrow(args[0]):
                return kernel(*args, **options)
            results: R = _narrowed(_call_wide(kernel, args, options), n_narrow, args[0])
            return results

        return run

    return decorate


def _call_wide(kernel: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return kernel(*map(wide, args), **{name: wide(option) for name, option in options.items()})


def _narrowed(results: Any, n_narrow: int, like: Any) -> Any:
    """The first results in the dtype of `like`."""
    if isinstance(results, NotImplementedType):
        return results
    if not isinstance(results, tuple):
        return results.astype(like.dtype) if n_narrow else results
    return (*(result.astype(like.dtype) for result in results[:n_narrow]), *results[n_narrow:])


def widening_in_place(*written: int) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """The kernel that writes into some of its arguments for arrays of 16 bits too: computed in float32, written once.

    Args:
        written: the places of these arguments, which are given by position.
    """

    def decorate(kernel: Callable[P, None]) -> Callable[P, None]:
        @wraps(kernel)
        def run(*args: P.args, **options: P.kwargs) -> None:
            if not any(map(is_narrow, args)):
                kernel(*args, **options)
                return
            widened: list[Any] = [wide(argument) for argument in args]
            _call_wide(kernel, tuple(widened), options)
            for place in written:
                target: Any = args[place]
                if widened[place] is not target:
                    target[...] = widened[place]

        return run

    return decorate
