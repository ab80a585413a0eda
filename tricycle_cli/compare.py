"""Read run folders and compare them on one page, for `tricycle look runs/a runs/b`."""

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
from tricycle.system.safetensors_file import read_header
from tricycle_cli.run import read_metrics
from tricycle_cli.task import present_flags
from tricycle_lab.look.page import render_page
from tricycle_lab.look.runs import RunData, compare_runs, short_hash
from tricycle_lab.look.server import StaticPage

T = TypeVar("T")
MAX_RUNS = 30
MAX_SAMPLES_BYTES = 2**24  # of samples.txt
MAX_TOKENISER_BYTES = 2**28


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle look` with several run folders."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN-FOLDER ...")]
    """two or more run folders"""
    out: Path | None = None
    """write one self-contained HTML file in place of serving the page"""
    port: int = 0
    """the port of the page on this machine; 0 for any free port"""
    browser: bool = True
    """open the page in a browser"""


def are_runs(words: Sequence[str]) -> bool:
    """Return whether words but --out, --port, --browser are run folders, 2 or more; ValueError if some of 3 or more."""
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
        odd = places[runs.index(False)]
        raise ValueError(f"{odd}: expected a run folder like the others, got one without config.json")
    return all(runs)


def is_run(folder: Path) -> bool:
    """Return whether a folder contains config.json and data.json, as run folders do."""
    return read_or_default(lambda: (folder / "config.json").is_file() and (folder / "data.json").is_file(), False)


class Runs(StaticPage):
    """The comparison page of several runs, rendered again from the folders for each request."""

    def __init__(self, folders: Sequence[Path]) -> None:
        if len(folders) > MAX_RUNS:
            raise ValueError(f"expected at most {MAX_RUNS} run folders, got {len(folders)}")
        self.folders = folders
        self.page()  # an unreadable folder is an error of the command, not of the page

    def page(self) -> str:
        """Read the runs, and return the HTML page that compares them; ValueError if a config.json cannot be read."""
        names = short_names(self.folders)
        read = [read_run(folder, name) for folder, name in zip(self.folders, names)]
        return render_page("runs", f"{len(read)} runs", compare_runs(read))


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the fewest last parts of the paths that make names differ; if folders repeat, all full paths, numbered."""
    places = [folder.resolve() for folder in folders]
    for n_parts in range(1, 1 + max(len(place.parts) for place in places)):
        names = [Path(*place.parts[-n_parts:]).as_posix() for place in places]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]  # the same folder twice


def read_run(folder: Path, name: str) -> RunData:
    """Read a run folder as `RunData` called `name`; only config.json is required (FileNotFoundError, ValueError)."""
    config = GPTConfig.from_dict(read_json_object(folder / "config.json"))
    data: dict[str, Any] = read_or_default(lambda: read_json_object(folder / "data.json"), {})
    is_finetuning = "arguments" in data  # its rows have different lengths
    path = folder / "metrics.jsonl"
    metrics = read_metrics(path)
    n_lines = sum(bool(line.strip()) for line in read_file(path).splitlines()) if path.is_file() else 0
    tokeniser = folder / "tokeniser.json"
    return RunData(
        name,
        run_settings(config, data),
        metrics,
        n_damaged=n_lines - len(metrics),
        n_parameters=read_or_default(lambda: count_weights(folder / "last.safetensors"), 0),
        tokeniser_hash=read_or_default(lambda: short_hash(read_file(tokeniser, MAX_TOKENISER_BYTES)), ""),
        text_hash=str(data.get("corpus", "")),
        tokens_per_step=0 if is_finetuning else config.batch_size * config.context_window * config.accumulation_steps,
        samples=read_or_default(lambda: read_samples(folder / "samples.txt"), []),
    )


def run_settings(config: GPTConfig, data: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings by name: four of data.json, then config and fine-tuning flags; later ones override."""
    names = ("data", "tokeniser", "init_from", "on_nan")
    settings: dict[str, Any] = {name: data[name] for name in names if name in data}
    flags = data.get("arguments")
    return {**settings, **config.to_dict(), **(present_flags(flags) if isinstance(flags, dict) else {})}


def read_or_default(read: Callable[[], T], default: T) -> T:
    """Return `read()`, or `default` if it raises OSError or ValueError, as for a missing or damaged file."""
    try:
        return read()
    except (OSError, ValueError):
        return default


def count_weights(checkpoint: Path) -> int:
    """Return the number of elements of all model weights in a checkpoint; only its header is read."""
    header = read_header(checkpoint)[0]
    return sum(math.prod(info.shape) for name, info in header.items() if name.startswith("model."))


def read_samples(path: Path) -> list[tuple[str, str]]:
    """Return (title, text) of each sample in samples.txt, in the order of the file."""
    text = read_file(path, MAX_SAMPLES_BYTES).decode("utf-8", "replace")
    parts = ("\n" + text).split("\n--- ")[1:]
    return [(title, body.strip("\n")) for title, _, body in (part.partition("\n") for part in parts)]
