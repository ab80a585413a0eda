"""What the programs of all experiments ask of their flags."""

from __future__ import annotations

from typing import Any


def at_least(settings: Any, **lowest: int) -> None:
    """Refuse numbers below what makes sense, by the name of the flag.

    Raises:
        ValueError: the first of them.
    """
    for name, least in lowest.items():
        if getattr(settings, name) < least:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"expected {flag} to be at least {least}, got {getattr(settings, name)}")
