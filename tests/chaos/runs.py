"""Tiny training runs in separate processes, and bit-for-bit comparison of run folders.

workspace = Workspace(folder)
reference = workspace.new_run("reference")
assert reference.train().status == 0
case = workspace.new_run("killed")
process = case.start()
process.kill()
...
assert case.resume().status == 0
assert differences(case.run_folder, reference.run_folder) == []
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tricycle.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# About a second on one core, with every phase of a run, most of them several times.
TINY = (
    "--preset debug --steps 12 --eval-interval 4 --sample-interval 6 --accumulation-steps 2 --dropout 0.1 --data text"
).split()
WORDS = "the quick brown fox jumps over lazy dogs while seven small birds sing of rain".split()
TIMEOUT = 120.0  # seconds for one program
PROGRESS_BAR = re.compile(r"\d+%\||[\d.]+\w*B? \[|(it|step|merges|B)/s")

# The function that implements each phase of training.
PHASES = {
    "run": "tricycle_cli.train:main",
    "tokeniser training": "tricycle.tokeniser:BPETokeniser.train",
    "dataset building": "tricycle_datasets.corpus:Corpus._write",
    "update": "tricycle.training:compute_gradients",
    "evaluation": "tricycle_cli.text_task:evaluate",
    "sampling": "tricycle_cli.text_task:write_sample",
    "checkpoint": "tricycle.training_state:save_checkpoint",
    "final report": "tricycle_cli.text_task:TextTask.report",
    "final evaluation": "tricycle_cli.text_task:evaluate",
    "compression": "tricycle_cli.text_task:compressor_bits_per_byte",
    "plot": "tricycle_cli.text_task:plot_losses",
}

# The code of a process: a prelude that patches modules, and then the program as a user starts it.
PROGRAM = """
import os, signal, sys
sys.path.insert(0, {root!r})
sys.argv[0] = {name!r}
{prelude}
from tricycle_cli.flags import run_main
from tricycle_cli.{module} import main
run_main(main)
"""


def lines_without_progress_bars(stderr: str) -> list[str]:
    """Return the non-empty lines of the error output, without progress bars."""
    lines = [line.strip() for line in re.split(r"[\r\n]|\x1b\[A", stderr)]
    return [line for line in lines if line and not PROGRESS_BAR.search(line)]


def environment(**variables: str) -> dict[str, str]:
    """Return environment variables for reproducible programs: on the CPU, with one BLAS thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    common = {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **threads, **common, **variables}


@dataclass(frozen=True)
class Outcome:
    """The result of a program.

    Attributes:
        status: the exit status, negative for the signal that terminated it; None after a timeout.
    """

    status: int | None
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return lines_without_progress_bars(self.err)

    @property
    def failure(self) -> str:
        return f"status {self.status}: {' '.join(self.error_lines)[-400:]}"


@dataclass(frozen=True)
class TrainingRun:
    """A training run with its own cache and run folder.

    Attributes:
        folder: contains the cache and the run folder.
        text: the training text.
        flags: further flags of `train`.
        launcher: a command that starts the program, such as mpiexec with its flags.
        name, module: of the program.
        phases: the function that implements each phase.
    """

    folder: Path
    text: Path
    flags: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    name: ClassVar[str] = "train_smol_gpt.py"
    module: ClassVar[str] = "train"
    phases: ClassVar[dict[str, str]] = PHASES

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def start_args(self) -> list[str]:
        """The flags that start the run."""
        return [*TINY, "--files", str(self.text), "--run-folder", str(self.run_folder), *self.flags]

    @property
    def resume_args(self) -> list[str]:
        """The flags that resume the run, or start it if there is no run folder yet."""
        return ["--resume", str(self.run_folder)] if (self.run_folder / "config.json").is_file() else self.start_args

    def environment(self) -> dict[str, str]:
        return environment(TRICYCLE_CACHE=str(self.folder / "cache"))

    def start(
        self, words: Sequence[str] | None = None, prelude: str = "", **popen_options: Any
    ) -> subprocess.Popen[str]:
        """Start the program; `finish` waits for its exit.

        Args:
            words: its flags; `start_args` if None.
            prelude: Python code that runs first.
            popen_options: for `subprocess.Popen`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        program = PROGRAM.format(root=str(ROOT), name=self.name, module=self.module, prelude=prelude)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pipes |= {"encoding": "utf-8", "errors": "replace", "env": self.environment()}
        command = [*self.launcher, sys.executable, "-c", program, *(self.start_args if words is None else words)]
        return subprocess.Popen(command, cwd=ROOT, **{**pipes, **popen_options})

    def train(self, prelude: str = "") -> Outcome:
        """Start the run, wait for its exit, and return the outcome."""
        return finish(self.start(prelude=prelude))

    def resume(self, prelude: str = "") -> Outcome:
        """Resume the run, wait for its exit, and return the outcome."""
        return finish(self.start(self.resume_args, prelude))

    def remove(self) -> None:
        """Remove the folder of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Workspace:
    """A folder with a training text, and a folder for each run."""

    folder: Path

    def new_run(self, name: str, *flags: str) -> TrainingRun:
        text = self.folder / "text.txt"
        if not text.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(text)
        return TrainingRun(self.folder / name, text, flags)


@contextmanager
def temporary_workspace(folder: Path | None) -> Iterator[Workspace]:
    """Yield a workspace in a temporary folder, which is created in `folder` if given."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=folder) as name:
        yield Workspace(Path(name))


def new_parser(docstring: str | None, jobs: int) -> argparse.ArgumentParser:
    """Return a parser of the flags that the programs of tests/chaos share; `jobs` is the default of --jobs."""
    parser = argparse.ArgumentParser(description=(docstring or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=jobs, help="runs at the same time")
    parser.add_argument("--folder", type=Path, help="folder of the runs, such as one in memory")
    return parser


def write_text(path: Path, n_lines: int = 300) -> None:
    """Write lines of random words, about 45 bytes each."""
    generator = random.Random(0)
    lines = (" ".join(generator.choices(WORDS, k=9)) for _ in range(n_lines))
    path.write_text("".join(f"{line}.\n" for line in lines), encoding="utf-8")


def finish(process: subprocess.Popen[str], timeout: float = TIMEOUT) -> Outcome:
    """Wait for the exit of a program; kill it after a timeout, and return status None."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Outcome(None, out or "", err or "")
    return Outcome(process.returncode, out or "", err or "")


# -------------------------------------------------------------------- comparison of two runs
def differences(run: Path, other: Path) -> list[str]:
    """Return the differences of two finished run folders, without timings; empty if they are equal bit for bit."""
    names, others = (
        sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for folder in (run, other)
    )
    if names != others:
        return [f"files {names} and {others}"]
    compare = dict.fromkeys(("last.safetensors", "best.safetensors"), checkpoint_differences)
    compare["metrics.jsonl"] = metrics_differences
    return [found for name in names for found in compare.get(name, content_differences)(run / name, other / name)]


def checkpoint_differences(path: Path, other: Path) -> list[str]:
    """Return the differences in weights, moments, generators, data position and progress."""
    checkpoints = [load_checkpoint(file) for file in (path, other)]
    tensors, others = (checkpoint.tensors for checkpoint in checkpoints)
    if tensors.keys() != others.keys():
        return [f"{path.name}: tensors {sorted(tensors.keys() ^ others.keys())}"]
    differing = [name for name in tensors if tensors[name].tobytes() != others[name].tobytes()]
    abouts = [checkpoint.about for checkpoint in checkpoints]
    for about in abouts:
        del about["progress"]["seconds"]
    differing += [key for key in abouts[0].keys() | abouts[1].keys() if abouts[0].get(key) != abouts[1].get(key)]
    return [f"{path.name}: {name}" for name in sorted(differing)]


def metrics_differences(path: Path, other: Path) -> list[str]:
    """Return the differences of all metrics lines, without the speed."""
    both = []
    for file in (path, other):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        both.append([{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines])
    if both[0] == both[1]:
        return []
    differing = [(a, b) for a, b in zip(*both) if a != b]
    first = f"{differing[0][0]} and {differing[0][1]}" if differing else "one has fewer lines"
    return [f"{path.name}: {len(both[0])} and {len(both[1])} lines; {first}"]


def content_differences(path: Path, other: Path) -> list[str]:
    """Return the name of a file if its bytes differ."""
    return [] if path.read_bytes() == other.read_bytes() else [f"{path.name}: its content"]
