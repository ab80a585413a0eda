"""The entry point of `tricycle` and `python -m tricycle`, which runs the subcommand of the command line."""

from __future__ import annotations

import importlib
import sys

import tricycle
from tricycle_cli.flags import fail, one_line_errors, run_main

COMMANDS = {
    "train": "train a GPT on text",
    "finetune": "fine-tune a pretrained model, with LoRA or all weights",
    "distill": "distill a pretrained teacher into a smaller model",
    "sweep": "search hyperparameters, with a training run for each trial",
    "generate": "generate text with a model",
    "chat": "chat with a model in the terminal",
    "serve": "serve a model over HTTP with OpenAI's API and a chat page",
    "evaluate": "compute a model's loss on texts, in bits per byte",
    "export": "export a model in Hugging Face format or as a GGUF file",
    "look": "inspect a model, or compare runs, in the browser",
    "inspect": "attribute a logit, patch activations or score heads of a model",
    "bench": "compare a custom softmax with the built-in ones",
    "machine": "report hardware, libraries and kernel providers",
}
PROGRAM = "tricycle"
MODULE = "python -m tricycle"


def main(program: str = PROGRAM) -> None:
    """Run the subcommand that sys.argv names, and exit, or print help; `python -m tricycle` alone runs `machine`."""
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
        from tricycle_cli.completion import script

        run_main(lambda: print(script(" ".join(words[1:]), COMMANDS), end=""))
    sys.argv = [program, *words[1:]]
    if words[0] not in COMMANDS:
        fail(f"expected a command, one of {', '.join(COMMANDS)}, got {words[0]!r}", status=2)
    sys.argv[0] = f"{program} {words[0]}"
    with one_line_errors():
        # imported here, so that a command does not wait for the imports of other commands
        sys.exit(importlib.import_module(f"tricycle_cli.{words[0]}").main())


def overview(program: str) -> str:
    """Return the help text of `tricycle`: a line for each command."""
    about = "Train GPTs from scratch, and run pretrained models."
    lines = [f"usage: {program} COMMAND ...", "", about, "", "commands:"]
    lines += [f"  {name:<10}{help}" for name, help in COMMANDS.items()]
    options = {
        "COMMAND --help": "show the flags of a command",
        "--version": "show the version",
        "--print-completion SHELL": "print a completion script for bash, zsh or fish",
    }
    lines += ["", "options:", *(f"  {name:<26}{help}" for name, help in options.items())]
    return "\n".join(lines)
