"""Good files, damaged one after another, and what comes of reading them."""

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
from hostile.mutations import another_thing, damaged
from hostile.worker import Outcome, attempt

ANOTHER_THING = 0.06  # how often something else than a file stands in its place


@dataclass(frozen=True)
class Case:
    """One damaged file; its seed is all that it takes to make it again."""

    kind: str
    seed: int
    number: int
    target: str
    damage: str

    def __str__(self) -> str:
        return f"--seed {self.seed} --kind {self.kind!r} --one {self.number}: {self.target}, {self.damage}"


def good_files(root: Path) -> None:
    """Write them, in a process of its own: this one must not start threads before it forks."""
    code = f"from pathlib import Path; from hostile.kinds import make_all; make_all(Path({str(root)!r}))"
    tests = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, capture_output=True)


def tried(
    root: Path, seed: int, n_cases: int, only: str = "", one: int | None = None
) -> Iterator[tuple[Case, Outcome]]:
    """What comes of so many damaged files of each kind.

    Args:
        root: `good_files` wrote to its folder "good".
        only: the kind of this name.
        one: only the case of this number.
    """
    prepare()
    for kind in KINDS:
        if only in ("", kind.name):
            for number in range(n_cases) if one is None else [one]:
                yield tried_once(root, kind, seed, number)


def prepare() -> None:
    """What programs find around them."""
    os.environ.update(TRICYCLE_CACHE="cache", TOKENIZERS_PARALLELISM="false", COLUMNS="200", CUDA_VISIBLE_DEVICES="")
    os.environ.pop("TRICYCLE_DATA", None)
    import_all()


def tried_with(root: Path, name: str, damage: Callable[[Path], object] = lambda folder: None) -> Outcome:
    """What comes of the good files of a kind after something was done to their folder."""
    prepare()
    (kind,) = (kind for kind in KINDS if kind.name == name)
    folder = root / "case"
    shutil.copytree(root / "good" / kind.folder, folder, symlinks=True)
    try:
        damage(folder)
        size = max(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        return attempt(kind.read, folder, size, kind.network)
    finally:
        shutil.rmtree(folder)


def tried_once(root: Path, kind: Kind, seed: int, number: int) -> tuple[Case, Outcome]:
    rng = random.Random(f"{seed} {kind.name} {number}")
    folder = root / "case"
    shutil.copytree(root / "good" / kind.folder, folder, symlinks=True)
    try:
        target = rng.choice(kind.targets)
        path = folder / target
        size = sum(part.stat().st_size for part in folder.rglob("*") if part.is_file())
        if kind.things and rng.random() < ANOTHER_THING:
            damage = another_thing(path, rng)
        else:
            damage, content = damaged(path.read_bytes(), target, rng)
            path.write_bytes(content)
            size = max(size, len(content))
        return Case(kind.name, seed, number, target, damage), attempt(kind.read, folder, size, kind.network)
    finally:
        shutil.rmtree(folder)


def table(results: Iterable[tuple[Case, Outcome]]) -> str:
    """Outcomes by kind of file, in Markdown."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    most: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for case, outcome in results:
        counts[case.kind]["tried"] += 1
        counts[case.kind][outcome.kind if outcome.good else "bad"] += 1
        seconds, memory = most[case.kind]
        most[case.kind] = max(seconds, outcome.seconds), max(memory, outcome.memory)
    lines = ["| kind of file | tried | a model | one line | anything else | most seconds | most memory, MB |"]
    lines.append("|:---|---:|---:|---:|---:|---:|---:|")
    total: Counter[str] = Counter()
    for kind, count in counts.items():
        seconds, memory = most[kind]
        total += count
        lines.append(f"| {kind} | {_numbers(count)} | {seconds:.1f} | {memory / 1e6:.0f} |")
    seconds, memory = (max(pair[i] for pair in most.values()) for i in range(2))
    lines.append(f"| all | {_numbers(total)} | {seconds:.1f} | {memory / 1e6:.0f} |")
    return "\n".join(lines)


def _numbers(count: Counter[str]) -> str:
    return " | ".join(f"{count[name]:,}" for name in ("tried", "model", "refused", "bad"))
