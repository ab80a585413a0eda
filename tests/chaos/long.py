"""Long runs: memory, open files and the run folder stay as they are.

python -m tests.chaos.long                5,000 steps with estimates, samples and checkpoints, and 1,200 generations
python -m tests.chaos.long --steps 400 --generations 60

The figures are a straight line's slope through what was measured after the first fifth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .runs import Bench, Case, finish

MEASURED = 200  # times in a run, so that a single one counts for little
MOST_SLOPE = 1.0  # MB a thousand steps
# Within the run itself: what it measures is its own.
PRELUDE = """
from tests.chaos.long import watch_training
watch_training({path!r}, {every})
"""


@dataclass
class Measures:
    """What a process takes, measured again and again.

    Attributes:
        at: the step, or the number of the generation.
        memory: resident, MB.
        files: open ones.
        objects: that Python's collector knows.
        folder: what the run folder takes, MB.
    """

    at: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    folder: list[float] = field(default_factory=list)

    def take(self, at: int, folder: Path | None = None) -> None:
        self.at.append(at)
        self.memory.append(resident() / 1e6)
        self.files.append(len(os.listdir("/proc/self/fd")))
        self.objects.append(len(gc.get_objects()))
        self.folder.append(0 if folder is None else size_of(folder) / 1e6)

    def slope(self, values: list[float] | list[int]) -> float:
        """Of a line through the values after the first fifth, for a thousand steps."""
        first = len(self.at) // 5
        return float(np.polyfit(self.at[first:], values[first:], 1)[0]) * 1000


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, some of which may be going."""
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def watch_training(path: str, every: int) -> None:
    """Measure this process every so many steps of its training, and write the measures to a file."""
    from tricycle.training_state import TrainingState
    from tricycle_cli import updates

    measures = Measures()
    usual, usual_save = updates.RunSession.log, TrainingState.save
    largest = [0]
    folder: list[Path] = []

    def log(session: updates.RunSession, loss: object, norm: object) -> None:
        usual(session, loss, norm)
        if session.step % every == 0 and folder:
            measures.take(session.step, folder[0])
            Path(path).write_text(json.dumps([vars(measures), largest[0]]), encoding="utf-8")

    def save(state: TrainingState, place: Path, tokeniser: object, *memory: object) -> None:
        folder[:] = [place.parent]
        sync, os.fsync = os.fsync, lambda handle: (sync(handle), largest.__setitem__(0, _larger(largest[0], folder[0])))
        try:
            usual_save(state, place, tokeniser, *memory)  # type: ignore[arg-type]
        finally:
            os.fsync = sync

    updates.RunSession.log, TrainingState.save = log, save  # type: ignore[assignment, method-assign]


def _larger(size: int, folder: Path) -> int:
    return max(size, size_of(folder))


def train_long(case: Case, n_steps: int) -> tuple[Measures, float]:
    """Train for so many steps; what was measured, and the most that the run folder took, in MB.

    Raises:
        RuntimeError: the training failed.
    """
    path = case.folder / "measures.json"
    prelude = PRELUDE.format(path=str(path), every=max(1, n_steps // MEASURED))
    words = [*case.words, "--steps", str(n_steps), "--eval-interval", "25", "--sample-interval", "50"]
    done = finish(case.start(words, prelude), timeout=3600)
    if done.status != 0:
        raise RuntimeError(f"a long run failed: {done.err[-2000:]}")
    values, largest = json.loads(path.read_text(encoding="utf-8"))
    return Measures(**values), largest / 1e6


def generate_long(case: Case, n: int) -> Measures:
    """Measure this process while it writes so many texts, one by one, many at once and the likeliest."""
    from tricycle.checkpoint import load_checkpoint
    from tricycle.decoding.batch import generate_batch
    from tricycle.decoding.prompt_lookup import generate_prompt_lookup
    from tricycle.generate import generate
    from tricycle.sampling import SamplingParams

    checkpoint = load_checkpoint(case.run / "best.safetensors")
    model = checkpoint.model()
    measures = Measures()
    generator = np.random.default_rng(0)
    writers: list[Callable[[list[int], int], object]] = [
        lambda prompt, seed: list(generate(model, prompt, 40, temperature=0)),
        lambda prompt, seed: list(
            generate_prompt_lookup(model, prompt, 40, SamplingParams(temperature=0.8, seed=seed))
        ),
        lambda prompt, seed: generate_batch(
            model, [prompt, prompt[:1]], 20, SamplingParams(temperature=1.0, seed=seed)
        ),
    ]
    for i in range(n):
        prompt = generator.integers(0, 250, int(generator.integers(1, 30))).tolist()
        writers[i % len(writers)](prompt, i)
        if i % max(1, n // MEASURED) == 0:
            measures.take(i)
    return measures


def report(title: str, measures: Measures) -> bool:
    """Print what was measured; whether all is flat."""
    memory, objects = measures.slope(measures.memory), measures.slope(measures.objects)
    files = sorted(set(measures.files[len(measures.files) // 5 :]))
    print(f"{title}: {measures.memory[0]:.1f} MB at the beginning, {measures.memory[-1]:.1f} MB at the end;", end=" ")
    print(f"{memory:+.3f} MB and {objects:+.0f} objects a thousand; {files} open files", flush=True)
    return memory < MOST_SLOPE and len(files) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--generations", type=int, default=1200)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="long-"))
    try:
        case = Bench(folder).case("long")
        measures, largest = train_long(case, arguments.steps)
        fine = report(f"{arguments.steps} steps", measures)
        checkpoint = (case.run / "last.safetensors").stat().st_size / 1e6
        sizes = {name: (case.run / name).stat().st_size for name in ("metrics.jsonl", "samples.txt")}
        print(f"run folder: at most {largest:.2f} MB, with checkpoints of {checkpoint:.2f} MB; {sizes} bytes")
        fine = report(f"{arguments.generations} generations", generate_long(case, arguments.generations)) and fine
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("flat" if fine else "NOT FLAT")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
