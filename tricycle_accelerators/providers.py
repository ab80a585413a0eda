"""Providers: packages of faster kernels, each with a name, and what they say of arguments that they do not take."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Run = TypeVar("Run", bound=Callable[..., Any])


def unless(why_not: Callable[..., str | None]) -> Callable[[Run], Run]:
    """Make a version of a kernel decline the arguments for which `why_not` gives a reason.

    `why_not` takes the kernel's arguments, reads shapes, dtypes and layouts, and computes nothing;
    `tricycle.kernels.explain` asks it, too. None says that the version takes them.
    """

    def decorate(run: Run) -> Run:
        @wraps(run)
        def version(*args: Any, **options: Any) -> Any:
            return run(*args, **options) if why_not(*args, **options) is None else NotImplemented

        version.why_not = why_not  # type: ignore[attr-defined]
        return version  # type: ignore[return-value]

    return decorate
