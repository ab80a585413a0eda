"""Upcasting of 16-bit arguments for kernels that write into their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from tricycle.kernels.dispatch import is_16_bit, upcast

P = ParamSpec("P")


def upcasting_in_place(*written: int) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator: upcast 16-bit arguments to float32, run, then round back those at the positions `written`.

    Args:
        written: the positions of the arguments that the kernel writes into.
    """

    def decorate(kernel: Callable[P, None]) -> Callable[P, None]:
        @wraps(kernel)
        def run(*args: P.args, **options: P.kwargs) -> None:
            if not any(map(is_16_bit, args)):
                kernel(*args, **options)
                return
            widened: list[Any] = [upcast(argument) for argument in args]
            call: Callable[..., None] = kernel
            call(*widened, **{name: upcast(option) for name, option in options.items()})
            for place in written:
                target: Any = args[place]
                if widened[place] is not target:
                    target[...] = widened[place]

        return run

    return decorate
