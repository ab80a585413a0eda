"""The command line of a study: flags, checks of their values, and the final output."""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tricycle_cli.flags import parse
from tricycle_lab.plot import require_matplotlib

T = TypeVar("T")
Outcome = tuple[dict[str, str], list[str]]  # tables by title, and the names of the files in the output folder


def run_study(
    kind: type[T],
    study: Callable[[T], Outcome],
    description: str | None,
    quick: Mapping[str, Any] | None = None,
    check: Callable[[T], None] = lambda settings: None,
    default: T | None = None,
) -> int:
    """Parse `sys.argv`, check the settings, run a study, print its tables and file names, and return 0.

    Args:
        kind: the dataclass of the flags, with the folder `output`.
        quick: the values of flags that --quick changes; flags on the command line override them.
        check: raises ValueError for values with which nothing could be measured.
        default: the values of flags that are not given; those of the dataclass by default.
    """
    start = kind(**(quick or {})) if "--quick" in sys.argv[1:] else default or kind()
    settings: Any = parse(kind, start, description=description or "")
    check(settings)
    check_output(settings.output)
    tables, files = study(settings)
    print_tables(tables)
    print(f"\n{settings.output}: {', '.join(files)}")
    return 0


def print_tables(tables: Mapping[str, str]) -> None:
    """Print tables with their titles."""
    for title, table in tables.items():
        print(f"\n{title}\n\n{table}")


# -------------------------------------------------------------------- limits
def flag(name: str) -> str:
    """Return the command-line flag of a field, such as "--batch-size" for "batch_size"."""
    return f"--{name.replace('_', '-')}"


def check_output(folder: Path) -> None:
    """Raise ValueError unless files can be written to a folder, or a new folder be made in its nearest parent."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"expected --output to be a folder that can be written to, got {folder}")


def check_minimum(settings: Any, **lowest: int) -> None:
    """Raise ValueError for the first field below its value in `lowest`; ModuleNotFoundError without Matplotlib."""
    require_matplotlib("an experiment")
    for name, least in lowest.items():
        if getattr(settings, name) < least:
            raise ValueError(f"expected {flag(name)} to be at least {least}, got {getattr(settings, name)}")


def check_fractions(settings: Any, *names: str) -> None:
    """Raise ValueError for the first number, or tuple of numbers, that is not above 0 and below 1."""
    for name in names:
        value = getattr(settings, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or not all(0 < number < 1 for number in numbers):
            raise ValueError(f"expected {flag(name)} above 0 and below 1, got {words(numbers)}")


def check_choices(settings: Any, **known: Collection[str]) -> None:
    """Raise ValueError for the first field with a value (or tuple item) that is not in `known`, or an empty tuple."""
    for name, names in known.items():
        value = getattr(settings, name)
        chosen = value if isinstance(value, tuple) else (value,)
        unknown = [one for one in chosen if one not in names]
        if unknown or not chosen:
            comma = "; " if any("," in one for one in names) else ", "
            raise ValueError(f"expected {flag(name)} among {comma.join([*names, 'got ' + words(unknown, comma)])}")


def words(values: Sequence[Any], comma: str = " ") -> str:
    """Return the values as text, joined by the separator `comma`; "none" if there are none."""
    return comma.join(map(str, values)) or "none"
