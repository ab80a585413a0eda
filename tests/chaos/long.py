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
import shutil
import sys
import tempfile
from collections.abc import Callable
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


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes; files may be removed meanwhile."""
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
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
        folder[:] = [place.parent]
        sync, os.fsync = (
            os.fsync,
            lambda handle: (sync(handle), largest.__setitem__(0, _max_folder_bytes(largest[0], folder[0]))),
        )
        try:
            usual_save(state, place, tokeniser, *memory)  # type: ignore[arg-type]
        finally:
            os.fsync = sync

    updates.RunSession.log, TrainingState.save = log, save  # type: ignore[assignment, method-assign]


def _max_folder_bytes(size: int, folder: Path) -> int:
    return max(size, folder_bytes(folder))


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

    checkpoint = load_checkpoint(case.run_folder / "best.safetensors")
    model = checkpoint.model()
    usage = ResourceUsage()
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
        if i % max(1, n // N_SAMPLES) == 0:
            usage.record(i)
    return usage


def print_report(title: str, usage: ResourceUsage) -> bool:
    """Print the measurements, and return whether neither memory nor the number of open files grows."""
    memory, objects = usage.slope(usage.memory), usage.slope(usage.objects)
    files = sorted(set(usage.files[len(usage.files) // 5 :]))
    print(f"{title}: {usage.memory[0]:.1f} MB at the beginning, {usage.memory[-1]:.1f} MB at the end;", end=" ")
    print(f"{memory:+.3f} MB and {objects:+.0f} objects per thousand; {files} open files", flush=True)
    return memory < MAX_SLOPE and len(files) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--generations", type=int, default=1200)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="long-"))
    try:
        case = Workspace(folder).new_run("long")
        usage, largest = train_long(case, arguments.steps)
        is_flat = print_report(f"{arguments.steps} steps", usage)
        checkpoint = (case.run_folder / "last.safetensors").stat().st_size / 1e6
        sizes = {name: (case.run_folder / name).stat().st_size for name in ("metrics.jsonl", "samples.txt")}
        print(f"run folder: at most {largest:.2f} MB, with checkpoints of {checkpoint:.2f} MB; {sizes} bytes")
        is_flat = (
            print_report(f"{arguments.generations} generations", generate_long(case, arguments.generations)) and is_flat
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("flat" if is_flat else "NOT FLAT")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
