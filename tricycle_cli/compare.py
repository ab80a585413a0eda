"""Several run folders beside each other: `tricycle look runs/a runs/b`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from tricycle.configs import GPTConfig
from tricycle.system.files import read_file, read_json_object
from tricycle.system.safetensors_file import read_places
from tricycle_cli.run import read_metrics
from tricycle_lab.look.page import page
from tricycle_lab.look.runs import RunRead, comparison, digest
from tricycle_lab.look.server import Picture

T = TypeVar("T")
MOST_RUNS = 30
MOST_SAMPLES = 2**24  # bytes of samples.txt
MOST_TOKENISER = 2**28


@dataclass(frozen=True)
class Arguments:
    """Which runs to compare."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """two run folders or more"""
    out: Path | None = None
    """write one HTML file that needs nothing else, and serve nothing"""
    port: int = 0
    """where to serve the page on this machine; 0 for any port that is free"""
    browser: bool = True
    """open the page"""


def are_runs(words: Sequence[str]) -> bool:
    """Whether a command line names several run folders, and nothing else but what `Arguments` has.

    Raises:
        ValueError: three words or more of which some are run folders, and one is none.
    """
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags.add_argument("--out")
    flags.add_argument("--port")
    flags.add_argument("--browser", action=argparse.BooleanOptionalAction)
    try:
        places = flags.parse_known_args(list(words))[1]
    except argparse.ArgumentError:
        return False
    if len(places) < 2 or any(word.startswith("-") for word in places):
        return False
    runs = [is_run(Path(word)) for word in places]
    if len(places) > 2 and any(runs) and not all(runs):
        raise ValueError(
            f"{places[runs.index(False)]}: expected a run folder, as the others are; it has no config.json"
        )
    return all(runs)


def is_run(folder: Path) -> bool:
    """Whether a training left this folder."""
    return if_readable(lambda: (folder / "config.json").is_file() and (folder / "data.json").is_file(), False)


class Runs(Picture):
    """Serves the page; it is made anew, from the folders as they are, whenever somebody loads it."""

    def __init__(self, folders: Sequence[Path]) -> None:
        if len(folders) > MOST_RUNS:
            raise ValueError(f"expected at most {MOST_RUNS} run folders, got {len(folders)}")
        self.folders = folders
        self.page()  # so that what cannot be read is an error of the command

    def page(self) -> str:
        """Return what a browser gets; raise ValueError for a folder whose config cannot be read."""
        names = short_names(self.folders)
        read = [read_run(folder, name) for folder, name in zip(self.folders, names)]
        return page("runs", f"{len(read)} runs", comparison(read))


def short_names(folders: Sequence[Path]) -> list[str]:
    """Short names, all different."""
    places = [folder.resolve() for folder in folders]
    for n_parts in range(1, 1 + max(len(place.parts) for place in places)):
        names = [Path(*place.parts[-n_parts:]).as_posix() for place in places]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]  # the same folder twice


def read_run(folder: Path, name: str) -> RunRead:
    """Return what a folder tells, whatever state it is in; raise ValueError if its config cannot be read."""
    config = GPTConfig.from_dict(read_json_object(folder / "config.json"))
    data: dict[str, Any] = if_readable(lambda: read_json_object(folder / "data.json"), {})
    is_tuning = "arguments" in data  # whose rows are of any length
    metrics = read_metrics(folder / "metrics.jsonl")
    return RunRead(
        name,
        fields_of(config, data),
        metrics,
        n_damaged=n_lines(folder / "metrics.jsonl") - len(metrics),
        n_weights=if_readable(lambda: n_weights(folder / "last.safetensors"), 0),
        tokeniser=if_readable(lambda: digest(read_file(folder / "tokeniser.json", MOST_TOKENISER)), ""),
        text=str(data.get("corpus", "")),
        tokens=0 if is_tuning else config.batch_size * config.context_window * config.accumulation_steps,
        samples=if_readable(lambda: read_samples(folder / "samples.txt"), []),
    )


def fields_of(config: GPTConfig, data: dict[str, Any]) -> dict[str, Any]:
    """All settings of a run: of its text, its config, and of a fine-tuning its flags."""
    said = {name: data[name] for name in ("data", "tokeniser", "init_from", "on_nan") if name in data}
    flags = data.get("arguments")
    return {**said, **config.to_dict(), **(flags if isinstance(flags, dict) else {})}


def n_lines(path: Path) -> int:
    """That are not empty; the last may be cut off."""
    if not path.is_file():
        return 0
    return sum(bool(line.strip()) for line in read_file(path).splitlines())


def if_readable(read: Callable[[], T], otherwise: T) -> T:
    """Return what a function reads, or something else where a file is missing or damaged."""
    try:
        return read()
    except (OSError, ValueError):
        return otherwise


def n_weights(checkpoint: Path) -> int:
    """Of a checkpoint, by its header."""
    places = read_places(checkpoint)[0]
    return sum(math.prod(place.shape) for name, place in places.items() if name.startswith("model."))


def read_samples(path: Path) -> list[tuple[str, str]]:
    """Title and text of each sample."""
    text = read_file(path, MOST_SAMPLES).decode("utf-8", "replace")
    parts = ("\n" + text).split("\n--- ")[1:]
    return [(title, body.strip("\n")) for title, _, body in (part.partition("\n") for part in parts)]
