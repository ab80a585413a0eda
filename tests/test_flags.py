"""Command-line flags from dataclasses: values, and one-line errors."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest

from tricycle_cli.flags import parse, run_main
from tricycle_cli.task import present_flags


class PanicException(BaseException):
    """An exception like the panics of Rust libraries."""


@dataclass(frozen=True)
class Inner:
    """Numbers."""

    size: int = 3
    """how large"""
    rate: float = 0.5
    """how fast"""
    on: bool = True
    """whether"""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Inner: expected size to be at least 1, got {self.size}")


@dataclass(frozen=True)
class Outer:
    """Everything."""

    kind: Literal["red", "green"] = "red"
    """which"""
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Needs:
    """Has no default."""

    source: str


@dataclass(frozen=True)
class Many:
    """Takes several values."""

    file_names: tuple[str, ...] = ()
    tracks: tuple[str, ...] | None = None


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setenv("TRICYCLE_TUNE_HOST", "0")  # of the process of these tests
    monkeypatch.setattr(sys, "argv", ["some/folder/program.py", "--size", "7"])


@dataclass(frozen=True)
class Renamed:
    """Flags with deprecated names and values."""

    kv_cache_dtype: str = "auto"
    truncate_answers: bool = False
    overflow: Literal["truncate", "error"] = "truncate"
    names: str = ""
    allowed_hosts: str = ""
    optimiser: str = "adamw"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", Outer()),
        ("--size 5 --kind green", Outer("green", Inner(5))),
        ("--rate=1e-3", Outer(inner=Inner(rate=1e-3))),
        ("--no-on", Outer(inner=Inner(on=False))),
        ("--on", Outer()),
        ("--cache float16", Renamed("float16")),
        ("--cache=float16", Renamed("float16")),
        ("--cut-answers", Renamed(truncate_answers=True)),
        ("--cut_answers --no-cut-answers", Renamed()),
        ("--overflow refuse", Renamed(overflow="error")),
        ("--past-window=refuse", Renamed(overflow="error")),
        ("--names refuse", Renamed(names="refuse")),
        ("--optimizer adafactor", Renamed(optimiser="adafactor")),
        ("--size 3 --size=5", Outer(inner=Inner(5))),
        ("--file-names a b --tracks", Many(("a", "b"), ())),
    ],
)
def test_flag_values_and_deprecated_names_are_parsed(words, expected):
    """An alias does not replace a flag that a command has by that name."""
    assert parse(type(expected), args=words.split()) == expected


def test_parse_reads_the_command_line_and_fills_in_defaults():
    assert parse(Outer) == Outer(inner=Inner(7))
    assert parse(Outer, default=Outer("green", Inner(2, 0.25))) == Outer("green", Inner(7, 0.25))


def test_flags_of_older_run_folders_get_their_present_names():
    stored = {"cut_answers": True, "method": "all", "loss": "dpo", "targets": ["q_proj"]}
    present = {"truncate_answers": True, "method": "full", "loss": "dpo", "targets": ["q_proj"]}
    assert present_flags(stored) == present == present_flags(present)


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (Outer, ["--sise", "4"], "--sise"),
        (Outer, ["surplus"], "surplus"),
        (Outer, ["--size", "many"], "--size: .*'many'"),
        (Outer, ["--size"], "--size"),
        (Outer, ["--size", "1.5"], "1.5"),
        (Outer, ["--rate", "fast"], "fast"),
        (Outer, ["--kind", "blue"], "'red', 'green'"),
        (Outer, ["--size", "0"], "size.*at least 1.*got 0"),
        (Needs, [], "source"),
        (Many, ["--file-names", "a", "--file-names", "b"], "--file-names once.* 2 times"),
        (Many, ["--file_names=a", "--tracks", "c", "--file-names", "b"], "--file-names once.* 2 times"),
        (Many, ["--tracks", "--tracks", "a"], "--tracks once.* 2 times"),
    ],
)
def test_errors_are_one_line_and_status_2(kind, words, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(kind, args=words)
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("program.py: ")
    assert re.search(message, err)


def test_help_shows_descriptions_and_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as leaving:
        parse(Outer, args=["--help"], description="What this is.\n\n    python -m a\n    python -m b --quick\n")
    assert leaving.value.code in (0, None)
    out, err = capsys.readouterr()
    assert err == ""
    assert "What this is.\n\n    python -m a\n    python -m b --quick\n\n" in out
    for expected in ("how large (default: 3)", "how fast (default: 0.5)", "(default: red)"):
        assert expected in out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("two\n  lines"), 1, "two lines"),
        (FileNotFoundError("no such file"), 1, "no such file"),
        (ZeroDivisionError("division by zero"), 1, "division by zero"),
        (MemoryError("Unable to allocate"), 1, "Unable to allocate"),
        (RuntimeError("no GPU"), 1, "no GPU"),
        (ImportError("pip install it"), 1, "pip install it"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PanicException("retry-limit-in-match\nover"), 1, ".*retry-limit-in-match over"),
        (UnicodeEncodeError("utf-8", "runs/a\udcff/b", 6, 7, "-"), 1, r".*UTF-8.*0xff: 'runs/a\\udcff/b'"),
    ],
)
def test_run_main_turns_errors_into_one_line(error, status, message, capsys, monkeypatch):
    def main():
        raise error

    with pytest.raises(SystemExit) as leaving:
        run_main(main)
    assert leaving.value.code == status
    assert re.fullmatch(rf"program\.py: {message}\n", capsys.readouterr().err)
    if isinstance(error, (ValueError, PanicException)) and not isinstance(error, UnicodeEncodeError):
        monkeypatch.setenv("TRICYCLE_TRACEBACK", "1")
        with pytest.raises(type(error)):
            run_main(main)


def test_run_main_keeps_the_traceback_of_bugs():
    with pytest.raises(KeyError):
        run_main(lambda: {}["missing"])


@pytest.mark.parametrize("status", [0, None, 4])
def test_run_main_exits_with_the_status_of_main(status, capsys):
    with pytest.raises(SystemExit) as leaving:
        run_main(lambda: status)
    assert leaving.value.code == status
    assert capsys.readouterr() == ("", "")


def test_non_ascii_samples_on_an_ascii_terminal():
    program = "from tricycle_cli.flags import run_main; run_main(lambda: print('caf\\u00e9 \\ufffd'))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [b"caf?", b"?"])


@pytest.mark.skipif(os.name != "posix", reason="Windows says it otherwise")
def test_run_main_exits_silently_on_a_closed_pipe():
    code = "from tricycle_cli.flags import run_main; run_main(lambda: [print(i, flush=True) for i in range(99999)])"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout and program.stdout.readline() == b"0\n"
    program.stdout.close()
    assert program.stderr.read() == b""
    assert program.wait(timeout=60) == 1
