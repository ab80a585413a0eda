"""Long runs: measure that memory, open files and the run folder do not grow.

python -m tests.chaos.long                5,000 steps with estimates, samples and checkpoints, and 1,200 generations
python -m tests.chaos.long --steps 400 --generations 60

The reported slopes are linear fits of the measurements after the first fifth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .runs import TrainingRun, Workspace, finish

N_SAMPLES = 200  # measurements in a run; a single one has little effect on the slope
MAX_SLOPE = 1.0  # MB per thousand steps
# Runs in the measured process itself.
PRELUDE = """
from tests.chaos.long import record_training
record_training({path!r}, {every})
"""


@dataclass
class ResourceUsage:
    """Repeated measurements of the resources of a process.

    Attributes:
        at: the step, or the number of the generation.
        memory: resident, MB.
        files: the number of open files.
        objects: the number of objects that Python's garbage collector tracks.
        folder: size of the run folder, MB.
    """

    at: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    folder: list[float] = field(default_factory=list)

    def record(self, at: int, folder: Path | None = None) -> None:
        self.at.append(at)
        self.memory.append(resident_bytes() / 1e6)
        self.files.append(len(os.listdir("/proc/self/fd")))
        self.objects.append(len(gc.get_objects()))
        self.folder.append(0 if folder is None else folder_bytes(folder) / 1e6)

    def slope(self, values: list[float] | list[int]) -> float:
        """Return the slope per thousand steps of a line fit to the values after the first fifth."""
        first = len(self.at) // 5
        return float(np.polyfit(self.at[first:], values[first:], 1)[0]) * 1000

    @property
    def is_flat(self) -> bool:
        """Whether neither memory nor, after the first fifth, the number of open files grows."""
        return self.slope(self.memory) < MAX_SLOPE and len(set(self.files[len(self.files) // 5 :])) == 1


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes; files may be removed meanwhile."""
    total = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


def record_training(path: str, every: int) -> None:
    """Measure this process every `every` steps of its training, and write the measurements to a file."""
    from tricycle.training_state import TrainingState
    from tricycle_cli import updates

    usage = ResourceUsage()
    original, usual_save = updates.RunSession.log, TrainingState.save
    largest = [0]
    folder: list[Path] = []

    def log(session: updates.RunSession, loss: object, norm: object) -> None:
        original(session, loss, norm)
        if session.step % every == 0 and folder:
            usage.record(session.step, folder[0])
            Path(path).write_text(json.dumps([vars(usage), largest[0]]), encoding="utf-8")

    def save(state: TrainingState, place: Path, tokeniser: object, *memory: object) -> None:
        def fsync(handle: int) -> None:
            sync(handle)
            largest[0] = max(largest[0], folder_bytes(place.parent))

        folder[:] = [place.parent]
        sync, os.fsync = os.fsync, fsync
        try:
            usual_save(state, place, tokeniser, *memory)  # type: ignore[arg-type]
        finally:
            os.fsync = sync

    updates.RunSession.log, TrainingState.save = log, save  # type: ignore[assignment, method-assign]


def train_long(case: TrainingRun, n_steps: int) -> tuple[ResourceUsage, float]:
    """Train for `n_steps`; return the measurements, and the largest size of the run folder in MB.

    Raises:
        RuntimeError: the training failed.
    """
    path = case.folder / "usage.json"
    prelude = PRELUDE.format(path=str(path), every=max(1, n_steps // N_SAMPLES))
    words = [*case.start_args, "--steps", str(n_steps), "--eval-interval", "25", "--sample-interval", "50"]
    done = finish(case.start(words, prelude), timeout=3600)
    if done.status != 0:
        raise RuntimeError(f"a long run failed: {done.err[-2000:]}")
    values, largest = json.loads(path.read_text(encoding="utf-8"))
    return ResourceUsage(**values), largest / 1e6


def generate_long(case: TrainingRun, n: int) -> ResourceUsage:
    """Measure this process while it generates n texts with three decoding methods."""
    from tricycle.checkpoint import load_checkpoint
    from tricycle.decoding.batch import generate_batch
    from tricycle.decoding.prompt_lookup import generate_prompt_lookup
    from tricycle.generate import generate
    from tricycle.sampling import SamplingParams

    model = load_checkpoint(case.run_folder / "best.safetensors").model()
    usage = ResourceUsage()
    generator = np.random.default_rng(0)
    sampled = lambda seed: SamplingParams(temperature=0.8, seed=seed)
    writers: list[Callable[[list[int], int], object]] = [
        lambda prompt, seed: list(generate(model, prompt, 40, temperature=0)),
        lambda prompt, seed: list(generate_prompt_lookup(model, prompt, 40, sampled(seed))),
        lambda prompt, seed: generate_batch(model, [prompt, prompt[:1]], 20, sampled(seed)),
    ]
    for i in range(n):
        prompt = generator.integers(0, 250, int(generator.integers(1, 30))).tolist()
        writers[i % len(writers)](prompt, i)
        if i % max(1, n // N_SAMPLES) == 0:
            usage.record(i)
    return usage


def print_report(title: str, usage: ResourceUsage) -> None:
    memory, objects = usage.slope(usage.memory), usage.slope(usage.objects)
    files = sorted(set(usage.files[len(usage.files) // 5 :]))
    print(f"{title}: {usage.memory[0]:.1f} MB at the beginning, {usage.memory[-1]:.1f} MB at the end;", end=" ")
    print(f"{memory:+.3f} MB and {objects:+.0f} objects per thousand; {files} open files", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--generations", type=int, default=1200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="long-") as folder:
        case = Workspace(Path(folder)).new_run("long")
        usage, largest = train_long(case, arguments.steps)
        print_report(f"{arguments.steps} steps", usage)
        checkpoint = (case.run_folder / "last.safetensors").stat().st_size / 1e6
        sizes = {name: (case.run_folder / name).stat().st_size for name in ("metrics.jsonl", "samples.txt")}
        print(f"run folder: at most {largest:.2f} MB, with checkpoints of {checkpoint:.2f} MB; {sizes} bytes")
        generated = generate_long(case, arguments.generations)
        print_report(f"{arguments.generations} generations", generated)
    is_flat = usage.is_flat and generated.is_flat
    print("flat" if is_flat else "NOT FLAT")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
