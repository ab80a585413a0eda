"""Which version of a kernel runs for some arguments, and why the others do not: `kernels.explain`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tricycle import kernels
from tricycle.kernels.dispatch import KERNELS, Kernel, reference_only

PLAIN = "plain"  # what the plain version of a kernel is named
UNAVAILABLE: dict[str, str] = {}  # why providers cannot be used here, by their names; they put it here


class ProviderReport(NamedTuple):
    """What one version says: its provider, where it is defined, and why it declines (None where it would run)."""

    provider: str
    place: str
    reason: str | None


class Explanation(NamedTuple):
    """What all versions of a kernel say of some arguments, in the order in which they are asked."""

    kernel: str
    answers: tuple[ProviderReport, ...]

    @property
    def provider(self) -> str:
        """The name of the first provider that takes the arguments: its version runs."""
        return next(answer.provider for answer in self.answers if answer.reason is None)

    def __str__(self) -> str:
        runs = next(answer for answer in self.answers if answer.reason is None)
        width = max(len(answer.provider) for answer in self.answers)
        lines = [f"{self.kernel}: {runs.provider} runs ({runs.place})"]
        for answer in self.answers:
            said = "runs" if answer is runs else "would take it" if answer.reason is None else answer.reason
            lines.append(f"  {answer.provider:<{width}}  {said}")
        return "\n".join(lines)


def explain(kernel: Kernel[..., Any] | str, *args: Any, **options: Any) -> Explanation:
    """Return which version of a kernel would run for these arguments, and why others would not.

    Nothing is computed. A version that does not say why it declines counts as one that takes everything.

    Args:
        kernel: such as `kernels.matmul`, or its name.

    Raises:
        ValueError: no kernel of that name, or no argument.
    """
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(f"explain: expected one of {', '.join(sorted(KERNELS))}, got {kernel!r}")
        kernel = KERNELS[kernel]
    if not args:
        raise ValueError(f"explain: expected the arguments of {kernel!r}, the first an array, got none")
    answers = []
    kernel.implementations_for(type(args[0]))  # all have registered then
    for version in kernel.registered.get(type(args[0]), ()):
        decline_reason = getattr(version, "decline_reason", None)
        reason = "within debug.use_reference()" if reference_only.get() else None
        if reason is None and decline_reason is not None:
            reason = decline_reason(*args, **options)
        answers.append(ProviderReport(provider_name(version), qualified_name(version), reason))
    absent = [ProviderReport(name, "", reason) for name, reason in UNAVAILABLE.items()]
    return Explanation(
        kernel.reference.__name__, (*answers, ProviderReport(PLAIN, qualified_name(kernel.reference), None), *absent)
    )


def qualified_name(version: Callable[..., Any]) -> str:
    return f"{version.__module__}.{getattr(version, '__qualname__', '?')}"


def provider_name(version: Callable[..., Any]) -> str:
    """Return the name of who provides a version: PROVIDER of its package, else the package's own name."""
    package = version.__module__.rpartition(".")[0] or version.__module__
    return getattr(sys.modules.get(package), "PROVIDER", package.split(".")[0])


kernels.explain = explain
