"""Results of studies as JSON files: atomic writing, resuming, and selection."""

import dataclasses
import json
import os
import platform
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.system.files import atomic_write

Runs = list[dict[str, Any]]
ABOUT = ("settings", "date", "machine")  # what `save` adds to results


def settings_without_paths(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict, without Path values, which belong to one machine."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if not isinstance(value, Path)}


def about() -> dict[str, str]:
    """Return "date" (ISO format) and "machine" (architecture and cores), to be stored with results."""
    return {"date": str(date.today()), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


def save(path: Path, settings: Any, **results: Any) -> dict[str, Any]:
    """Write results, "settings", "date" and "machine" as JSON, replacing the file atomically; return them."""
    everything = {"settings": settings_without_paths(settings), **about(), **results}
    write_json(path, everything)
    return everything


def write_json(path: Path, content: Any) -> None:
    """Write JSON, replacing the file atomically; make missing folders."""
    with atomic_write(path, text=True) as file:
        json.dump(content, file, ensure_ascii=False)
        file.write("\n")


def read(path: Path) -> Any:
    """Return the content of a JSON file; FileNotFoundError if there is none."""
    return json.loads(path.read_text(encoding="utf-8"))


def rounded(value: Any, digits: int = 5) -> Any:
    """Return a JSON value with floats rounded to `digits` significant digits; tuples and arrays become lists."""
    if isinstance(value, Mapping):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [rounded(inner, digits) for inner in value]
    return float(f"{value:.{digits}g}") if isinstance(value, (float, np.floating)) else value


# -------------------------------------------------------------------- resuming
class Record(dict[str, Any]):
    """The content of results.json, written after each step, so that an interrupted study resumes.

    Args:
        settings: with the folder `output`.
        free: settings that may differ from those of the stored results.
        empty: the content at first.

    Raises:
        ValueError: the folder holds results of other settings.
    """

    def __init__(self, settings: Any, free: Collection[str] = (), **empty: Any) -> None:
        super().__init__(empty)
        self.settings, self.path = settings, settings.output / "results.json"
        if self.path.is_file():
            self.update(read(self.path))
            here = {name: value for name, value in settings_without_paths(settings).items() if name not in free}
            check_same_settings(self.path, self["settings"], here)

    def save(self) -> None:
        """Write the record to its file as `save` does, and update its settings, date and machine."""
        self.update(save(self.path, self.settings, **{name: self[name] for name in self if name not in ABOUT}))

    def append(self, name: str, value: Any) -> None:
        """Append a value to the list of this name, and write the record."""
        self[name].append(value)
        self.save()


def check_same_settings(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ValueError if a value of `here` differs in `there`; names that only `there` has are ignored."""
    here = json.loads(json.dumps(here))
    pairs = {name: (there.get(name), value) for name, value in here.items()}
    other = [f"{name} {a!r} there and {b!r} here" for name, (a, b) in pairs.items() if a != b]
    if other:
        raise ValueError(f"{path} holds results of other settings: {'; '.join(other)}; name another --output")


# -------------------------------------------------------------------- selecting
def select(runs: Iterable[dict[str, Any]], **values: Any) -> Runs:
    """Return the runs whose fields have all these values; runs without such a field are left out."""
    return [run for run in runs if values.items() <= run.items()]


def distinct(runs: Iterable[Mapping[str, Any]], key: str = "model") -> list[Any]:
    """Return the values of a key, each once, in the order in which they come."""
    return list(dict.fromkeys(run[key] for run in runs))


def of(runs: Iterable[Any], *keys: Any) -> list[Any]:
    """Return run[keys[0]][keys[1]]... for each run, as a list; KeyError or IndexError if there is none."""
    values = list(runs)
    for key in keys:
        values = [inner[key] for inner in values]
    return values
