"""`kernels.explain`: which provider of a kernel runs for given arguments, and why the others decline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tricycle import kernels
from tricycle.kernels.dispatch import KERNELS, Kernel, reference_only

PLAIN = "plain"  # the provider name of the reference implementation
UNAVAILABLE: dict[str, str] = {}  # why a provider cannot be used on this machine, by name


class ProviderReport(NamedTuple):
    """One provider of a kernel: its name, its function, and why it declines the arguments (None: it accepts)."""

    provider: str
    place: str
    reason: str | None


class Explanation(NamedTuple):
    """The reports of all providers of a kernel for given arguments, in order of priority."""

    kernel: str
    answers: tuple[ProviderReport, ...]

    @property
    def provider(self) -> str:
        """The name of the provider that runs: the first that accepts the arguments."""
        return next(answer.provider for answer in self.answers if answer.reason is None)

    def __str__(self) -> str:
        """Return lines: which provider runs and where, then each provider with "runs", "would accept" or a reason."""
        runs = next(answer for answer in self.answers if answer.reason is None)
        width = max(len(answer.provider) for answer in self.answers)
        lines = [f"{self.kernel}: {runs.provider} runs ({runs.place})"]
        for answer in self.answers:
            status = "runs" if answer is runs else "would accept" if answer.reason is None else answer.reason
            lines.append(f"  {answer.provider:<{width}}  {status}")
        return "\n".join(lines)


def explain(kernel: Kernel[..., Any] | str, *args: Any, **options: Any) -> Explanation:
    """Report which provider would run a kernel (else the reference), why others decline; ValueError if no args.

    A provider without a decline function is assumed to accept all arguments.

    Args:
        kernel: a kernel, such as `kernels.matmul`, or its name.
    """
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(f"explain: expected one of {', '.join(sorted(KERNELS))}, got {kernel!r}")
        kernel = KERNELS[kernel]
    if not args:
        raise ValueError(f"explain: expected the arguments of {kernel!r}, the first an array, got none")
    answers = []
    kernel.implementations_for(type(args[0]))  # registers all providers
    for implementation in kernel.registered.get(type(args[0]), ()):
        decline_reason = getattr(implementation, "decline_reason", None)
        reason = "within debug.use_reference()" if reference_only.get() else None
        if reason is None and decline_reason is not None:
            reason = decline_reason(*args, **options)
        answers.append(ProviderReport(provider_name(implementation), qualified_name(implementation), reason))
    absent = [ProviderReport(name, "", reason) for name, reason in UNAVAILABLE.items()]
    reference = ProviderReport(PLAIN, qualified_name(kernel.reference), None)
    return Explanation(kernel.reference.__name__, (*answers, reference, *absent))


def qualified_name(function: Callable[..., Any]) -> str:
    """Return the module and qualified name of a function, joined by a dot."""
    return f"{function.__module__}.{getattr(function, '__qualname__', '?')}"


def provider_name(implementation: Callable[..., Any]) -> str:
    """Return the provider of an implementation: PROVIDER of its package, else the top-level package's name."""
    package = implementation.__module__.rpartition(".")[0] or implementation.__module__
    return getattr(sys.modules.get(package), "PROVIDER", package.split(".")[0])


kernels.explain = explain
