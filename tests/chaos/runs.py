"""Tiny runs of training, each a program of its own, and the comparison of two of them bit for bit.

bench = Bench(folder)
whole = bench.case("whole")
assert whole.train().status == 0
case = bench.case("killed")
process = case.start()
process.kill()
...
assert case.resume().status == 0
assert differences(case.run, whole.run) == []
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors.numpy import load_file

from tricycle.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# A second or so on one core: every phase of a run, and most of them more than once.
TINY = shlex.split(
    "--preset debug --steps 12 --eval-interval 4 --sample-interval 6 --accumulation-steps 2 --dropout 0.1 --data text"
)
WORDS = "the quick brown fox jumps over lazy dogs while seven small birds sing of rain".split()
TIMEOUT = 120.0  # seconds for one program; one that hangs is a failure
PROGRESS_BAR = re.compile(r"\d+%\||[\d.]+\w*B? \[|(it|step|merges|B)/s")

# The function that a phase of training is.
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

# What a program is: a few lines that change what it uses, and then the program as a user starts it.
PROGRAM = """
import os, signal, sys
sys.path.insert(0, {root!r})
sys.argv[0] = {name!r}
{prelude}
from tricycle_cli.flags import run_main
from tricycle_cli.{module} import main
run_main(main)
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        status: its exit status, negative for the signal that ended it; None where it had to be ended.
    """

    status: int | None
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        """Lines on its standard error, without progress bars."""
        parts = [part.strip() for part in re.split(r"[\r\n]|\x1b\[A", self.err)]
        return [part for part in parts if part and not PROGRESS_BAR.search(part)]


@dataclass(frozen=True)
class Case:
    """One run: its own cache and its own run folder.

    Attributes:
        folder: holds both.
        text: what it trains on.
        flags: further ones, for `train`.
        launcher: what starts the program, where something does, such as mpiexec and its flags.
        name, module: of the program.
        phases: the function that each is.
    """

    folder: Path
    text: Path
    flags: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    name: ClassVar[str] = "train_smol_gpt.py"
    module: ClassVar[str] = "train"
    phases: ClassVar[dict[str, str]] = PHASES

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def words(self) -> list[str]:
        """The flags that begin the run."""
        return [*TINY, "--files", str(self.text), "--run-folder", str(self.run), *self.flags]

    @property
    def resuming(self) -> list[str]:
        """The flags that go on with it; it begins where nothing was left to go on with."""
        return ["--resume", str(self.run)] if (self.run / "config.json").is_file() else self.words

    def environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        quiet = {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "TRICYCLE_CACHE": str(self.folder / "cache")}
        return {**os.environ, **threads, **quiet}

    def start(self, words: Sequence[str] | None = None, prelude: str = "", **how: Any) -> subprocess.Popen[str]:
        """Begin a program; `finish` waits for it.

        Args:
            words: its flags; those that begin the run if None.
            prelude: lines of Python that run before it.
            how: for `subprocess.Popen`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        program = PROGRAM.format(root=str(ROOT), name=self.name, module=self.module, prelude=prelude)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pipes |= {"encoding": "utf-8", "errors": "replace", "env": self.environment()}
        command = [*self.launcher, sys.executable, "-c", program, *(self.words if words is None else words)]
        return subprocess.Popen(command, cwd=ROOT, **{**pipes, **how})

    def train(self, prelude: str = "") -> Outcome:
        """Begin the run and wait for its end."""
        return finish(self.start(prelude=prelude))

    def resume(self, prelude: str = "") -> Outcome:
        """Go on with it and wait for its end."""
        return finish(self.start(self.resuming, prelude))

    def forget(self) -> None:
        """Remove all that it left."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Bench:
    """A folder with a text, and a folder for each case."""

    folder: Path

    def case(self, name: str, *flags: str) -> Case:
        text = self.folder / "text.txt"
        if not text.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(text)
        return Case(self.folder / name, text, flags)


@contextmanager
def temporary_bench(folder: Path | None) -> Iterator[Bench]:
    """In a folder that is gone afterwards; within another one, where this is named."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=folder) as name:
        yield Bench(Path(name))


def parser_of(docstring: str | None, jobs: int) -> argparse.ArgumentParser:
    """What each of these programs asks; `jobs` unless others are named."""
    parser = argparse.ArgumentParser(description=(docstring or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=jobs, help="runs at the same time")
    parser.add_argument("--folder", type=Path, help="where runs are; one in memory leaves a slow disk out of the times")
    return parser


def write_text(path: Path, n_lines: int = 300, seed: int = 0) -> None:
    """Words in random order, about 45 bytes a line."""
    generator = random.Random(seed)
    lines = (" ".join(generator.choices(WORDS, k=9)) for _ in range(n_lines))
    path.write_text("".join(f"{line}.\n" for line in lines), encoding="utf-8")


def finish(process: subprocess.Popen[str], timeout: float = TIMEOUT) -> Outcome:
    """Wait for a program; one that takes too long is ended, and its status is None."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Outcome(None, out or "", err or "")
    return Outcome(process.returncode, out or "", err or "")


# -------------------------------------------------------------------- two runs
def differences(run: Path, other: Path) -> list[str]:
    """In what two finished run folders differ, timings apart; nothing where they are equal bit for bit."""
    names, others = (
        sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for folder in (run, other)
    )
    if names != others:
        return [f"files {names} and {others}"]
    parts = {
        "last.safetensors": checkpoint_differences,
        "best.safetensors": checkpoint_differences,
        "metrics.jsonl": metrics_differences,
    }
    return [
        difference for name in names for difference in parts.get(name, content_differences)(run / name, other / name)
    ]


def checkpoint_differences(path: Path, other: Path) -> list[str]:
    """Weights, moments, generators, position and progress."""
    tensors, others = load_file(path), load_file(other)
    if tensors.keys() != others.keys():
        return [f"{path.name}: tensors {sorted(tensors.keys() ^ others.keys())}"]
    differing = [name for name in tensors if tensors[name].tobytes() != others[name].tobytes()]
    abouts = [load_checkpoint(file).about for file in (path, other)]
    for about in abouts:
        del about["progress"]["seconds"]
    differing += [key for key in abouts[0].keys() | abouts[1].keys() if abouts[0].get(key) != abouts[1].get(key)]
    return [f"{path.name}: {name}" for name in sorted(differing)]


def metrics_differences(path: Path, other: Path) -> list[str]:
    """All lines, without the speed."""
    both = []
    for file in (path, other):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        both.append([{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines])
    if both[0] == both[1]:
        return []
    differing = [(a, b) for a, b in zip(*both) if a != b]
    first = f"{differing[0][0]} and {differing[0][1]}" if differing else "one ends sooner"
    return [f"{path.name}: {len(both[0])} and {len(both[1])} lines; {first}"]


def content_differences(path: Path, other: Path) -> list[str]:
    """Bytes."""
    return [] if path.read_bytes() == other.read_bytes() else [f"{path.name}: its content"]
