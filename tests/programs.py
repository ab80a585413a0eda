"""Helpers that run programs of the command line, in this process (half a second faster) or in a new one."""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.runs import environment, lines_without_progress_bars

from tricycle_cli.flags import run_main

ROOT = Path(__file__).resolve().parents[1]


def run_here(
    program: Callable[[], int | None],
    name: str,
    arguments: tuple,
    folder: Path = ROOT,
    stdin: str = "",
    **variables: str,
) -> subprocess.CompletedProcess:
    """Run the main function of a program in this process, through `run_main`.

    Args:
        name: of the program, for its messages.
        arguments: of its command line.
        folder: working directory.
        stdin: text of its standard input.
        variables: environment variables.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    status: int | str | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        for variable, value in {"COLUMNS": "200", **variables}.items():
            patch.setenv(variable, value)
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                run_main(program)
            except SystemExit as exit_error:
                status = exit_error.code
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess([name, *arguments], status or 0, out, err)


def call(*arguments, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """Run Python with the given arguments in a new process."""
    options = {"cwd": folder, "env": environment(), "capture_output": True, "encoding": "utf-8", "timeout": 300}
    return subprocess.run([sys.executable, *map(str, arguments)], **options)


def one_line(done: subprocess.CompletedProcess, pattern: str) -> None:
    """Check that a program has failed with one line on stderr, besides progress bars, which the pattern matches."""
    assert done.returncode not in (0, None), done.stdout
    assert len(lines := lines_without_progress_bars(done.stderr)) == 1, done.stderr
    assert re.search(pattern, lines[0]), lines[0]
    assert lines[0].startswith(("tricycle", "python -m tricycle", "train_smol_gpt.py: ", "inference.py: ")), lines[0]


def metrics_of(run_folder: Path) -> list[dict]:
    """Return all lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def good(done: subprocess.CompletedProcess) -> str:
    """Check that a program has succeeded without a traceback, and return its standard output."""
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout
