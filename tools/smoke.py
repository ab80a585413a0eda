"""Smoke test of release archives: install each into a new virtual environment, and run the commands there.

    python -m tools.smoke dist

Only Python's standard library is needed. The command prints how long the installation and the first training took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXT = "To be, or not to be, that is the question.\n"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TINY = ("--preset", "debug", "--data", "text", "--device", "cpu")


class Installed:
    """A virtual environment with only the archive and its dependencies, and a working folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "work"
        self.folder.mkdir()
        environment = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        self.programs = environment / ("Scripts" if os.name == "nt" else "bin")
        unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRICYCLE_DATA")
        self.variables = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.variables |= {"TRICYCLE_CACHE": str(folder / "cache"), "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""}

    def install(self, what: str) -> None:
        """Install a package with pip."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what)

    def run(self, program: str, *words: str, typed: str = "", status: int = 0) -> str:
        """Run a program of the environment, and return its standard output; standard error if `status` is not 0.

        Raises:
            SystemExit: the exit status is not `status`.
        """
        command = [str(self.programs / program), *words]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.variables,
            input=typed,
            capture_output=True,
            encoding="utf-8",
            timeout=1800,
        )
        if done.returncode != status or "Traceback" in done.stderr:
            raise SystemExit(f"smoke: {program} {' '.join(words)} gave {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout if status == 0 else done.stderr

    def tricycle(self, *words: str, typed: str = "", status: int = 0) -> str:
        """Run the command `tricycle`, and return its output."""
        return self.run("tricycle", *words, typed=typed, status=status)


def main() -> None:
    """Run the smoke test for an archive, or for all archives in a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="a wheel, a source archive, or a folder with both")
    path = parser.parse_args().archive.resolve(strict=True)
    archives = sorted(path.glob("tricycle_gpt-*")) if path.is_dir() else [path]
    expect(bool(archives), f"archives in {path}", "none")
    wheels = [archive for archive in archives if archive.suffix == ".whl"]
    for archive in archives:
        # the source archive installs the same files as its wheel, so a shorter test is enough
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            check_archive(archive, Path(folder), briefly=bool(wheels) and archive not in wheels)


def check_archive(archive: Path, folder: Path, briefly: bool) -> None:
    """Install an archive, and run the checks; with `briefly` only training, version and package files."""
    began = time.monotonic()
    installed = Installed(folder)
    installed.install(str(archive))
    ready = time.monotonic()
    check_training(installed)
    trained = time.monotonic()
    print(f"smoke: {ready - began:.1f} s to install, {trained - ready:.1f} s to train", flush=True)
    check_version(installed)
    check_package_files(installed)
    if not briefly:
        check_run_commands(installed)
        check_completion(installed)
        installed.install(f"{archive}[pretrained]")
        check_chat(installed)
    print(f"smoke: {archive.name} passed ({time.monotonic() - began:.0f} s)", flush=True)


def check_training(installed: Installed) -> None:
    """Train a tiny model for five steps, and check the run folder."""
    (installed.folder / "text.txt").write_text(TEXT * 300, encoding="utf-8")
    said = installed.tricycle("train", *TINY, "--files", "text.txt", "--steps", "5", "--run-folder", "run")
    expect("tricycle generate run" in said, "the command that generates", said)
    lines = (installed.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    expect(json.loads(lines[-1])["step"] == 5, "five steps", lines)
    expect((installed.folder / "run" / "loss.svg").stat().st_size > 1000, "a picture of the loss", "none")


def check_version(installed: Installed) -> None:
    """Check that the command, the package and its metadata have the same version."""
    program = (
        "import importlib.metadata, tricycle; "
        "print(tricycle.__version__, importlib.metadata.version('tricycle-gpt'), tricycle.__file__)"
    )
    of_package, of_metadata, place = installed.run("python", "-c", program).split(maxsplit=2)
    said = installed.tricycle("--version").split()
    expect(said == ["tricycle", of_package] and of_package == of_metadata, "one version", (said, of_metadata))
    expect("site-packages" in place, "a package in the environment", place)


def check_package_files(installed: Installed) -> None:
    """Check that the package contains its other files: py.typed, web pages, and CUDA sources."""
    program = """
from importlib.resources import files
print(files("tricycle").joinpath("py.typed").is_file())
print(any(path.name.endswith(".cu") for path in files("tricycle_accelerators").joinpath("cuda").iterdir()))
print({path.name.rsplit(".")[-1] for path in files("tricycle_lab").joinpath("look").iterdir()} >= {"html", "css", "js"})
print(len(list(files("tricycle_serve").joinpath("pages").iterdir())) > 2)
from tricycle.kernels import KERNELS
from tricycle.tensor import to_tensor
from tricycle.functions import Softmax
import numpy
Softmax()(to_tensor([[1, 2]]))
print(any(kernel.registered.get(numpy.ndarray) for kernel in KERNELS.values()))
"""
    said = installed.run("python", "-c", program).split()
    expect(said == ["True"] * 5, "py.typed, .cu, pages of look and serve, and faster kernels", said)


def check_run_commands(installed: Installed) -> None:
    """Check the commands generate, look, evaluate and chat on a run folder."""
    said = installed.tricycle("generate", "run", "To be", "--length", "5", "--seed", "1")
    expect(said.startswith("To be") or len(said) > 1, "a text", said)
    installed.tricycle("look", "run", "To be", "--out", "page.html")
    page = (installed.folder / "page.html").read_text(encoding="utf-8")
    expect("<script" in page and len(page) > 10_000, "a page", page[:200])
    said = installed.tricycle("evaluate", "run", "text.txt")
    expect(re.search(r"\d\.\d+", said) is not None, "a loss", said)
    said = installed.tricycle("chat", "run", typed="hello\n", status=1)
    expect("chat template" in said and len(said.splitlines()) == 1, "one line about templates", said)
    expect("machine" in installed.tricycle("--help"), "the commands", "")


def check_completion(installed: Installed) -> None:
    """Check shell completion: run it in bash; only write the scripts for zsh and fish."""
    for shell in ("zsh", "fish"):
        expect("laptop" in installed.tricycle("--print-completion", shell), f"presets for {shell}", "")
    bash = shutil.which("bash")
    if bash is None or os.name == "nt":
        return
    (installed.folder / "tricycle.bash").write_text(installed.tricycle("--print-completion", "bash"), encoding="utf-8")
    asked = (
        "source ./tricycle.bash; COMP_WORDS=(tricycle train --preset la); COMP_CWORD=3; _tricycle; "
        'complete -p tricycle && echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run([bash, "-c", asked], cwd=installed.folder, capture_output=True, text=True)
    expect("-F _tricycle" in done.stdout and done.stdout.split()[-1] == "laptop", "laptop", done)


def check_chat(installed: Installed) -> None:
    """Check the command chat on a model exported to Hugging Face's format with a chat template."""
    words = ("--tokeniser", "portable", "--files", "text.txt", "--steps", "2", "--run-folder", "portable")
    installed.tricycle("train", *TINY, *words)
    installed.tricycle("export", "portable", "model")
    (installed.folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    said = installed.tricycle("chat", "model", "--length", "5", typed="hello\nand again\n")
    expect(said.strip() != "", "an answer", said)


def expect(condition: bool, wanted: str, came: object) -> None:
    """Exit with an error message if a condition is false.

    Raises:
        SystemExit: the condition is false.
    """
    if not condition:
        raise SystemExit(f"smoke: expected {wanted}, got {came}")


if __name__ == "__main__":
    main()
