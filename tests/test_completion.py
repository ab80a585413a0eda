"""What shells offer at the tabulator key: asked of the shells themselves."""

import contextlib
import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import one_line, run_here

from tricycle_cli.completion import SHELLS, flags_of, script
from tricycle_cli.inspect import TASKS as INSPECT_TASKS
from tricycle_cli.main import COMMANDS, main

tyro = pytest.importorskip("tyro")
COMMAND_WORDS = [*COMMANDS, "--help", "--print-completion", "--version"]
HELP_FLAG = re.compile(r"--[a-z][\w-]*")


NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None or sys.platform == "win32", reason="needs bash")
NEEDS_ZSH = pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")


def run(*words, **options) -> str:
    """Run a program, which must write no errors; return its output."""
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / f"tricycle.{shell}").write_text(script(shell, COMMANDS), encoding="utf-8")
    return folder


# What is typed, and what it may become.
CASES = {
    "tricycle ": COMMAND_WORDS,
    "tricycle ex": ["export"],
    "tricycle train --preset la": ["laptop"],
    "tricycle export smollm2 --type Q4_K": ["Q4_K_M", "Q4_K_S"],
    "tricycle export runs/a --ht": ["--html"],
    "tricycle train --on-nan ": ["stop", "skip", "rollback"],
    "tricycle train --shard": ["--shard-optimiser"],
    "tricycle train --resu": ["--resume"],
    "tricycle chat smollm2 --overflow ": ["truncate", "error"],
    "tricycle generate runs/a --no-st": ["--no-stop"],
    "tricycle chat --json": ["--json-schema"],
    "tricycle generate runs/a --reg": ["--regex"],
    "tricycle inspect smollm2 --est": ["--estimate"],
    "tricycle inspect smollm2 --by-": ["--by-position"],
    "tricycle inspect features a --kind ": ["topk", "jumprelu"],
    "tricycle generate runs/a --stee": ["--steer"],
    "tricycle --print-completion ": list(SHELLS),
    "tricycle nonsense --preset la": [],
}


@pytest.fixture
def help_text(monkeypatch, capsys):
    """Return a function that returns the help of a command line."""

    def read(*words: str, columns: int = 200) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["tricycle", *words])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().out

    return read


@pytest.mark.parametrize("command", COMMANDS)
def test_completed_flags_equal_the_flags_of_the_help(command, help_text):
    """Completion offers no more and no fewer flags than the help lists, and each has a help text."""
    text = help_text(command, "--help-all" if command in ("train", "distill", "sweep") else "--help")
    others = [("--resume", "runs/x")] if command in ("train", "distill") else []
    others += [(task,) for task in INSPECT_TASKS] if command == "inspect" else []
    texts = [text, *(help_text(command, *words, "--help") for words in others)]
    first_columns = [line.strip("│ ").split("  ")[0] for line in "".join(texts).splitlines()]
    in_help = {flag for column in first_columns if column.startswith("-") for flag in HELP_FLAG.findall(column)}
    assert {flag.name for flag in flags_of(command)} - {"--help-all"} == in_help - {"--help-all"}
    assert command != "machine" or in_help == {"--help", "--kernels", "--no-kernels", "--speed", "--no-speed"}
    entries = re.split(r"\n  (?=-)", text)[1:]
    helps = [re.sub(r"--?[a-z][\w-]*|\{[^}]*\}|[A-Z]{2,}|\(default.*", "", entry, flags=re.DOTALL) for entry in entries]
    assert [entry for entry, help in zip(entries, helps) if not re.search("[a-z]{3}", help)] == []
    assert 5 < len(help_text(command, "--help", columns=100).splitlines()) <= 100


def bash_offers(line: str, path: Path) -> list[str]:
    """Return the completions of the bash function for a command line."""
    program = """
source "$1"
COMP_LINE=$2
read -ra COMP_WORDS <<< "$2"
case "$2" in *" ") COMP_WORDS+=("") ;; esac
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_tricycle
[ "${#COMPREPLY[@]}" -eq 0 ] || printf '%s\\n' "${COMPREPLY[@]}"
"""
    return run("bash", "-u", "-c", program, "bash", path, line).split()


@NEEDS_BASH
@pytest.mark.parametrize("line", CASES)
def test_bash_completes_each_line(scripts, line):
    assert sorted(bash_offers(line, scripts / "tricycle.bash")) == sorted(CASES[line])


@NEEDS_BASH
def test_bash_registers_the_function_and_completes_after_an_equals_sign(scripts):
    path = scripts / "tricycle.bash"
    assert "-F _tricycle tricycle" in run("bash", "-c", f'source "{path}"; complete -p tricycle')
    # bash cuts words at "="
    assert bash_offers("tricycle train --preset = la", path) == ["laptop"]
    assert bash_offers("tricycle train --on-nan =", path) == ["stop", "skip", "rollback"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize("line", CASES)
def test_fish_completes_each_line(scripts, line, tmp_path):
    """Without a dash fish offers no flags; it offers files where an argument may be a file name."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    program = f'source "{scripts / "tricycle.fish"}"; complete -C "{line}"'
    output = run("fish", "-c", program, env=environment, cwd=tmp_path)
    offered = {entry.split("\t")[0] for entry in output.splitlines()}
    assert offered == {word for word in CASES[line] if "-" in line.split()[-1] or not word.startswith("--")}


def zsh_offers(line: str, path: Path) -> str:
    """What `_tricycle` hands to zsh for a line: the words of `compadd` and `_describe`, and whether files."""
    program = """
autoload -U compinit; compinit -u -D
source "$1"
[[ ${_comps[tricycle]} == _tricycle ]] || exit 3
compadd() {
    shift
    print -rl -- "${(M)@:#$PREFIX*}"
}
_describe() { compadd -- "${(@)${(@P)2}%%:*}" }
_files() { : }
words=("${(@s: :)2}")
CURRENT=${#words}
PREFIX=${words[CURRENT]}
_tricycle
"""
    return run("zsh", "-f", "-c", program, "zsh", path, line)


@pytest.mark.nightly_except(10)
@NEEDS_ZSH
@pytest.mark.parametrize("line", CASES)
def test_zsh_completes_each_line(scripts, line):
    assert sorted(zsh_offers(line, scripts / "tricycle.zsh").split()) == sorted(CASES[line])


@pytest.mark.slow
@NEEDS_ZSH
def test_zsh_completes_a_partial_word(scripts):
    """Press the key in an interactive shell with a terminal."""
    import pty

    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": ""})
    try:
        path = scripts / "tricycle.zsh"
        os.write(terminal, f"autoload -U compinit; compinit -u -D; source '{path}'; print rea''dy\n".encode())
        read_until(terminal, b"ready")
        os.write(terminal, b"tricycle train --preset lapt\t")
        read_until(terminal, b"lapt" + b"op")
    finally:
        with contextlib.suppress(OSError):
            os.write(terminal, b"\x15exit\n")
        os.close(terminal)
        os.waitpid(process, 0)


def read_until(terminal: int, expected: bytes) -> None:
    """Read until a text is written; AssertionError if nothing is written for a minute."""
    text = b""
    while expected not in text:
        assert select.select([terminal], [], [], 60)[0], text
        text += os.read(terminal, 4096)


def test_print_completion_and_unknown_shells():
    assert run(sys.executable, "-m", "tricycle", "--print-completion", "bash") == script("bash", COMMANDS)
    for words in (["tcsh"], []):
        done = run_here(main, "tricycle", ("--print-completion", *words))
        one_line(done, "--print-completion.*bash, zsh, fish")
