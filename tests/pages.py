"""The documentation pages, README.md and docs/, and their blocks of code and commands."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import shlex
import sys
import tomllib
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from tricycle_cli.inspect import TASKS as INSPECT_TASKS

ROOT = Path(__file__).resolve().parents[1]
STUB = re.compile(r"---\npage: (\S+)\n---\n\Z")  # shows a file outside docs: docs/_extensions/repository.py
PAGES = [ROOT / "README.md"] + sorted(
    path for path in (ROOT / "docs").rglob("*.md") if not STUB.match(path.read_text(encoding="utf-8"))
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

BLOCK = re.compile(
    r"^```(?P<kind>[^\n]*)\n(?P<fenced>.*?)^```$"  # a fence
    r"|(?<=\n\n)(?P<indented>(?:    [^\n]*\n|\n(?=    ))+)",  # lines that are indented by four
    re.MULTILINE | re.DOTALL,
)
DATA = ("text", "json", "toml", "yaml", "html", "{toctree}")  # languages of blocks that are not run
PROGRAMS = ("tricycle", "python", "pip", "pytest", "mpiexec", "sphinx-build")
OF_OTHERS = ("apt", "brew", "conda", "docker", "git", "curl", "export", "srun", "ssh")  # programs that are not checked
FLAGS_ONLY = re.compile(r"<!-- checked by flags: \S[^\n]*-->\n+\Z")


class Block(NamedTuple):
    """A code block of a page.

    Attributes:
        kind: its language; "" for an indented block.
        text: its lines.
        flags_only: whether a comment before the block says that its commands are not run, only their flags checked.
    """

    kind: str
    text: str
    flags_only: bool

    def commands(self) -> list[str]:
        """Return the commands: all lines of a `bash` block, or lines of other blocks that start with a program."""
        if self.kind not in ("bash", "", "text"):
            return []
        joined = re.sub(r"\\\n\s*", "", self.text)
        comment = r"\s+#.*$" if self.kind == "bash" else r"\s+#.*$|\s{2,}\S.*$"  # to the right of a command
        lines = [re.sub(comment, "", line.strip()) for line in joined.splitlines()]
        known = (*PROGRAMS, *OF_OTHERS)
        return [line for line in lines if line and (self.kind == "bash" or line.split()[0] in known)]


@functools.cache
def blocks_of(path: Path) -> tuple[Block, ...]:
    page = path.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(page):
        text = match["fenced"] if match["indented"] is None else re.sub(r"^    ", "", match["indented"], flags=re.M)
        found.append(Block(match["kind"] or "", text, bool(FLAGS_ONLY.search(page[: match.start()]))))
    assert page.count("```") == 2 * len(re.findall(r"^```[^\n]*\n.*?^```$", page, re.MULTILINE | re.DOTALL)), path
    return tuple(found)


def python_of(path: Path) -> list[str]:
    return [block.text for block in blocks_of(path) if block.kind == "python"]


def commands(flags_only: bool) -> list[str]:
    """Return the distinct commands of all pages, of blocks with the given `flags_only`."""
    found = {}
    for path in PAGES:
        for block in blocks_of(path):
            if block.flags_only == flags_only:
                found.update(dict.fromkeys(block.commands()))
    return list(found)


# -------------------------------------------------------------------- flags
def check_flags(command: str) -> None:
    """Check that the programs, files, extras and flags of a command exist; only `--help` is run."""
    for part in re.split(r" && | \| ", command):
        words = shlex.split(part)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words[0] == "mpiexec":
            words = words[words.index("python") :]
        if words[0] not in OF_OTHERS:
            _check_words(words)


def _check_words(words: list[str]) -> None:
    if words[0] == "pip":
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert set(extras.split(",")) <= set(EXTRAS), words
    elif words[0] in ("pytest", "sphinx-build") or words[:3] == ["python", "-m", "pytest"]:
        for word in words:
            assert not word.startswith(("tests/", "docs")) or (ROOT / word).exists(), words
    else:
        program, arguments = _program(words)
        help_text = _help(program)
        for argument in arguments:
            if argument.startswith("--"):
                flag = argument.split("=")[0]
                assert re.search(rf"(?<![\w-]){flag}(?![\w-])", help_text), f"{' '.join(program)} has no {flag}"


def _program(words: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the program (a module, with its subcommand) and its arguments."""
    if words[0] == "python" and words[1] == "-m":
        words = ["tricycle", *words[3:]] if words[2] == "tricycle" else words[2:]
    elif words[0] == "python":
        words = [words[1].removesuffix(".py"), *words[2:]]
    if words[0] != "tricycle":
        return (words[0],), words[1:]
    if len(words) == 1 or words[1].startswith("-"):
        return ("tricycle_cli.main",), words[1:]
    n_words = 3 if words[1] == "inspect" and words[2] in INSPECT_TASKS else 2
    return ("tricycle_cli.main", *words[1:n_words]), words[n_words:]


@functools.cache
def _help(program: tuple[str, ...]) -> str:
    module, *words = program
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        patch.syspath_prepend(str(ROOT))
        patch.setenv("COLUMNS", "200")
        with_config = module == "train_smol_gpt" or words in (["train"], ["distill"], ["sweep"])
        patch.setattr(sys, "argv", [module, *words, "--help-all" if with_config else "--help"])
        if module == "tricycle_cli.main":
            from tricycle_cli.main import main

            main()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # other tests have imported the module before
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    help_text = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert help_text, program
    return help_text
