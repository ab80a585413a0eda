"""The command `tricycle`, and `python -m tricycle`: which of its parts is meant."""

from __future__ import annotations

import importlib
import sys

import tricycle
from tricycle_cli.flags import fail, one_line_errors, run_main

COMMANDS = {
    "train": "train a GPT on text, from the first token to samples",
    "finetune": "teach a model that somebody has trained, by LoRA or all its weights",
    "distill": "train a small model to predict as a larger one does",
    "sweep": "look for good settings of a training, a run each",
    "generate": "continue a text with a model",
    "chat": "talk with a model",
    "serve": "offer a model to OpenAI's clients, and a page to talk with it",
    "evaluate": "how well a model predicts texts, in bits a byte",
    "export": "write a model in Hugging Face's form, or as a GGUF file",
    "look": "see inside a model, in a browser",
    "bench": "compare a softmax of your own with the built-in ones",
    "machine": "what this machine offers, and what is in use",
}
PROGRAM = "tricycle"
MODULE = "python -m tricycle"


def main(program: str = PROGRAM) -> None:
    """Run the command that the words of the command line name.

    `python -m tricycle` without any is `tricycle machine`.
    """
    words = sys.argv[1:]
    if not words and program == MODULE:
        words = ["machine"]
    if not words or words[0] in ("--help", "-h", "help"):
        print(overview(program))
        return
    if words[0] in ("--version", "-V"):
        print(f"tricycle {tricycle.__version__}")
        return
    if words[0] == "--print-completion":
        run_main(print_completion)
    sys.argv = [program, *words[1:]]
    if words[0] not in COMMANDS:
        fail(f"expected a command, one of {', '.join(COMMANDS)}, got {words[0]!r}", status=2)
    sys.argv[0] = f"{program} {words[0]}"
    with one_line_errors():
        # imported when it is needed: a command should not wait for what another one needs
        sys.exit(importlib.import_module(f"tricycle_cli.{words[0]}").main())


def print_completion() -> None:
    """Print what teaches a shell to complete `tricycle`."""
    from tricycle_cli.completion import script

    sys.stdout.write(script(" ".join(sys.argv[2:]), COMMANDS))


def overview(program: str) -> str:
    """All commands."""
    lines = [f"usage: {program} COMMAND ...", "", "Train GPTs from scratch, and use those of others.", ""]
    lines += [f"  {name:<10}{said}" for name, said in COMMANDS.items()]
    lines += ["", f"`{program} COMMAND --help` says what a command takes; --version, which one this is;"]
    return "\n".join(
        [*lines, "--print-completion bash (or zsh, fish), what that shell is to offer at the tabulator key."]
    )
