"""Cases: valid files of which one is damaged, and the outcome of loading them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hostile.kinds import KINDS, Kind, import_all
from hostile.mutations import mutate, replace_file
from hostile.worker import Outcome, attempt

REPLACEMENT_PROBABILITY = 0.06  # of replacing the file by a folder, link, pipe and so on


@dataclass(frozen=True)
class Case:
    """A damaged file, which the kind, seed and number reproduce."""

    kind: str
    seed: int
    number: int
    target: str
    damage: str

    def __str__(self) -> str:
        return f"--seed {self.seed} --kind {self.kind!r} --one {self.number}: {self.target}, {self.damage}"


def write_valid_files(root: Path) -> None:
    """Write the valid files in a separate process, because this process must not start threads before it forks."""
    code = f"from pathlib import Path; from hostile.kinds import write_all_files; write_all_files(Path({str(root)!r}))"
    tests = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, capture_output=True)


def run_cases(
    root: Path, seed: int, n_cases: int, only: str = "", one: int | None = None
) -> Iterator[tuple[Case, Outcome]]:
    """Yield the outcomes of `n_cases` damaged files of each kind.

    Args:
        root: has a folder "good", written by `write_valid_files`.
        only: the name of a kind; "" for all.
        one: the number of a single case; None for all.
    """
    set_environment()
    for kind in KINDS:
        if only in ("", kind.name):
            for number in range(n_cases) if one is None else [one]:
                yield run_case(root, kind, seed, number)


def set_environment() -> None:
    """Set the environment variables of the programs, and import their modules."""
    os.environ.update(TRICYCLE_CACHE="cache", TOKENIZERS_PARALLELISM="false", COLUMNS="200", CUDA_VISIBLE_DEVICES="")
    os.environ.pop("TRICYCLE_DATA", None)
    import_all()


def run_with_damage(root: Path, name: str, damage: Callable[[Path], object] = lambda folder: None) -> Outcome:
    """Load the valid files of a kind after a function has changed their folder, and return the outcome."""
    set_environment()
    (kind,) = (kind for kind in KINDS if kind.name == name)
    folder = root / "case"
    shutil.copytree(root / "good" / kind.folder, folder, symlinks=True)
    try:
        damage(folder)
        size = max(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        return attempt(kind.load, folder, size, kind.network)
    finally:
        shutil.rmtree(folder)


def run_case(root: Path, kind: Kind, seed: int, number: int) -> tuple[Case, Outcome]:
    rng = random.Random(f"{seed} {kind.name} {number}")
    folder = root / "case"
    shutil.copytree(root / "good" / kind.folder, folder, symlinks=True)
    try:
        target = rng.choice(kind.targets)
        path = folder / target
        size = sum(part.stat().st_size for part in folder.rglob("*") if part.is_file())
        if kind.replaceable and rng.random() < REPLACEMENT_PROBABILITY:
            damage = replace_file(path, rng)
        else:
            damage, content = mutate(path.read_bytes(), target, rng)
            path.write_bytes(content)
            size = max(size, len(content))
        return Case(kind.name, seed, number, target, damage), attempt(kind.load, folder, size, kind.network)
    finally:
        shutil.rmtree(folder)


def table(results: Iterable[tuple[Case, Outcome]]) -> str:
    """Return a Markdown table of the outcomes by kind of file."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    most: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for case, outcome in results:
        counts[case.kind]["tried"] += 1
        counts[case.kind][outcome.kind if outcome.is_acceptable else "bad"] += 1
        seconds, memory = most[case.kind]
        most[case.kind] = max(seconds, outcome.seconds), max(memory, outcome.memory)
    lines = ["| kind of file | cases | loaded | rejected | failed | max. seconds | max. memory, MB |"]
    lines.append("|:---|---:|---:|---:|---:|---:|---:|")
    total: Counter[str] = Counter()
    for kind, count in counts.items():
        seconds, memory = most[kind]
        total += count
        lines.append(f"| {kind} | {_count_cells(count)} | {seconds:.1f} | {memory / 1e6:.0f} |")
    seconds, memory = (max(pair[i] for pair in most.values()) for i in range(2))
    lines.append(f"| all | {_count_cells(total)} | {seconds:.1f} | {memory / 1e6:.0f} |")
    return "\n".join(lines)


def _count_cells(count: Counter[str]) -> str:
    return " | ".join(f"{count[name]:,}" for name in ("tried", "model", "refused", "bad"))
