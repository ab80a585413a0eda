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


class Installation:
    """A virtual environment with only the archive and its dependencies, and a working folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "work"
        self.folder.mkdir()
        venv = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        self.programs = venv / ("Scripts" if os.name == "nt" else "bin")
        excluded = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRICYCLE_DATA")
        self.environment = {name: value for name, value in os.environ.items() if name not in excluded}
        self.environment |= {"TRICYCLE_CACHE": str(folder / "cache"), "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""}

    def install(self, requirement: str) -> None:
        """Install a package into the environment with pip; raise SystemExit if this fails."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement)

    def run(self, program: str, *args: str, stdin: str = "", status: int = 0) -> str:
        """Run a program; return stdout, or stderr if `status` is not 0; SystemExit unless it exits with `status`.

        Raises:
            SystemExit: the exit status is not `status`.
        """
        command = [str(self.programs / program), *args]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=1800,
        )
        if done.returncode != status or "Traceback" in done.stderr:
            raise SystemExit(
                f"smoke: {program} {' '.join(args)} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout if status == 0 else done.stderr

    def tricycle(self, *args: str, stdin: str = "", status: int = 0) -> str:
        """Run the command `tricycle`; return stdout, or stderr if `status` is not 0; SystemExit as for `run`."""
        return self.run("tricycle", *args, stdin=stdin, status=status)


def main() -> None:
    """Run the smoke test for an archive, or for all archives in a folder; raise SystemExit at the first failure."""
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
    """Install an archive and run the checks, with `briefly` only training, version and files; SystemExit on failure."""
    start = time.monotonic()
    installation = Installation(folder)
    installation.install(str(archive))
    ready = time.monotonic()
    check_training(installation)
    trained = time.monotonic()
    print(f"smoke: {ready - start:.1f} s to install, {trained - ready:.1f} s to train", flush=True)
    check_version(installation)
    check_package_files(installation)
    if not briefly:
        check_run_commands(installation)
        check_completion(installation)
        installation.install(f"{archive}[pretrained]")
        check_chat(installation)
    print(f"smoke: {archive.name} passed ({time.monotonic() - start:.0f} s)", flush=True)


def check_training(installation: Installation) -> None:
    """Train a tiny model for five steps into the folder run, and check its files; raise SystemExit on failure."""
    (installation.folder / "text.txt").write_text(TEXT * 300, encoding="utf-8")
    output = installation.tricycle("train", *TINY, "--files", "text.txt", "--steps", "5", "--run-folder", "run")
    expect("tricycle generate run" in output, "the command that generates", output)
    lines = (installation.folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    expect(json.loads(lines[-1])["step"] == 5, "five steps", lines)
    expect((installation.folder / "run" / "loss.svg").stat().st_size > 1000, "a picture of the loss", "none")


def check_version(installation: Installation) -> None:
    """Raise SystemExit unless command, package (in site-packages) and metadata have the same version."""
    program = (
        "import importlib.metadata, tricycle; "
        "print(tricycle.__version__, importlib.metadata.version('tricycle-gpt'), tricycle.__file__)"
    )
    package_version, metadata_version, path = installation.run("python", "-c", program).split(maxsplit=2)
    output = installation.tricycle("--version").split()
    is_equal = output == ["tricycle", package_version] and package_version == metadata_version
    expect(is_equal, "one version", (output, metadata_version))
    expect("site-packages" in path, "a package in the environment", path)


def check_package_files(installation: Installation) -> None:
    """Raise SystemExit unless the package contains py.typed, web pages, CUDA sources, and faster kernels."""
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
    output = installation.run("python", "-c", program).split()
    expect(output == ["True"] * 5, "py.typed, .cu, pages of look and serve, and faster kernels", output)


def check_run_commands(installation: Installation) -> None:
    """Run generate, look, evaluate, and chat, which must refuse a model without template; SystemExit on failure."""
    output = installation.tricycle("generate", "run", "To be", "--length", "5", "--seed", "1")
    expect(output.startswith("To be") or len(output) > 1, "a text", output)
    installation.tricycle("look", "run", "To be", "--out", "page.html")
    page = (installation.folder / "page.html").read_text(encoding="utf-8")
    expect("<script" in page and len(page) > 10_000, "a page", page[:200])
    output = installation.tricycle("evaluate", "run", "text.txt")
    expect(re.search(r"\d\.\d+", output) is not None, "a loss", output)
    output = installation.tricycle("chat", "run", stdin="hello\n", status=1)
    expect("chat template" in output and len(output.splitlines()) == 1, "one line about templates", output)
    expect("machine" in installation.tricycle("--help"), "the commands", "")


def check_completion(installation: Installation) -> None:
    """Check completion: zsh and fish scripts, and a run in bash (if found, not on Windows); SystemExit on failure."""
    for shell in ("zsh", "fish"):
        expect("laptop" in installation.tricycle("--print-completion", shell), f"presets for {shell}", "")
    bash = shutil.which("bash")
    if bash is None or os.name == "nt":
        return
    (installation.folder / "tricycle.bash").write_text(
        installation.tricycle("--print-completion", "bash"), encoding="utf-8"
    )
    command = (
        "source ./tricycle.bash; COMP_WORDS=(tricycle train --preset la); COMP_CWORD=3; _tricycle; "
        'complete -p tricycle && echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run([bash, "-c", command], cwd=installation.folder, capture_output=True, text=True)
    expect("-F _tricycle" in done.stdout and done.stdout.split()[-1] == "laptop", "laptop", done)


def check_chat(installation: Installation) -> None:
    """Train and export a tiny model, add a chat template, and check the command chat on it; SystemExit on failure.

    The format of the export is Hugging Face's.
    """
    words = ("--tokeniser", "portable", "--files", "text.txt", "--steps", "2", "--run-folder", "portable")
    installation.tricycle("train", *TINY, *words)
    installation.tricycle("export", "portable", "model")
    (installation.folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    output = installation.tricycle("chat", "model", "--length", "5", stdin="hello\nand again\n")
    expect(output.strip() != "", "an answer", output)


def expect(condition: bool, expected: str, got: object) -> None:
    """Raise SystemExit with a message of the expected and the actual value if a condition is false.

    Raises:
        SystemExit: the condition is false.
    """
    if not condition:
        raise SystemExit(f"smoke: expected {expected}, got {got}")


if __name__ == "__main__":
    main()
