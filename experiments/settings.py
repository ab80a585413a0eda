"""What the programs of all experiments ask of their flags, and how they leave their results."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

from tricycle.system.files import atomic_write
from tricycle_lab.plot import require_matplotlib


def at_least(settings: Any, **lowest: int) -> None:
    """Refuse numbers below what makes sense, by the name of the flag, and an environment that cannot draw the results.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: the first of the numbers.
    """
    require_matplotlib("an experiment")
    for name, least in lowest.items():
        if getattr(settings, name) < least:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"expected {flag} to be at least {least}, got {getattr(settings, name)}")


def save(path: Path, settings: Any, **results: Any) -> dict[str, Any]:
    """Write results as JSON, whole or not at all, with settings, date and machine; returns what was written."""
    stated = {name: value for name, value in dataclasses.asdict(settings).items() if not isinstance(value, Path)}
    about = {"settings": stated, "date": str(date.today()), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    everything = {**about, **results}
    with atomic_write(path, text=True) as file:
        json.dump(everything, file, ensure_ascii=False)
        file.write("\n")
    return everything
