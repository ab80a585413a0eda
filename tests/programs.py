"""Programs of the command line: in this process, which takes half a second less than another one, or in another."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tricycle_cli.flags import run_main

ROOT = Path(__file__).resolve().parents[1]
PROGRESS_BAR = re.compile(r"\d+%\||[\d.]+\w*B? \[|(it|step|merges|B)/s")


def run_here(
    program: Callable[[], int | None], name: str, words: tuple, folder: Path = ROOT, said: str = "", **variables: str
) -> subprocess.CompletedProcess:
    """Run the function of a program as `run_main` does.

    Args:
        program: the function that the program hands to `run_main`.
        name: its first word, by which it calls itself in messages.
        words: the others.
        folder: where it runs.
        said: what it reads from its standard input.
        variables: of the environment.

    Returns:
        What `subprocess.run(..., text=True)` returns.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    status: int | str | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [name, *map(str, words)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode()), encoding="utf-8"))
        for variable, value in {"COLUMNS": "200", **variables}.items():
            patch.setenv(variable, value)
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                run_main(program)
            except SystemExit as end:
                status = end.code
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess([name, *words], status or 0, out, err)


def environment() -> dict[str, str]:
    """For programs on the CPU, whose results are the same each time."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **threads}


def call(*words, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run Python with some words, in a process of its own."""
    how = {"cwd": folder, "env": environment(), "capture_output": True, "encoding": "utf-8", "timeout": 300}
    return subprocess.run([sys.executable, *map(str, words)], **how)


def lines_said(stderr: str) -> list[str]:
    """What a program said besides its progress bars."""
    parts = [part.strip() for part in re.split(r"[\r\n]|\x1b\[A", stderr)]
    return [part for part in parts if part and not PROGRESS_BAR.search(part)]


def good(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout
