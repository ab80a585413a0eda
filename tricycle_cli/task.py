"""The base class of training tasks, and functions for run folders that tasks share.

A session (`tricycle_cli/session.py`) runs a task. The commands `train`, `finetune` and `distill` each have a subclass
of `Task` and a dataclass of their flags.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tricycle.configs import GPTConfig
from tricycle.configs.size import min_n_weights
from tricycle.distributed.processes import ProcessGroup
from tricycle.system.files import atomic_write, read_json_object
from tricycle.training_state import TrainingState
from tricycle_cli.flags import ALIASES, VALUE_ALIASES
from tricycle_cli.run import Run

SCRIPTS = {"train": "python train_smol_gpt.py", "generate": "python inference.py"}


class Task:
    """The data, the model and the evaluation of a run; base class for `train`, `finetune` and `distill`.

    Attributes:
        command: the subcommand of `tricycle` that starts and resumes such runs.
        learning_rate_flag: the flag of the learning rate.
        arguments: the flags of the command line or of the resumed run, with `on_nan`, `on_full_disk` and `track`.
        folder: the run folder; None for a new one in runs/.
        patience: evaluations in a row without a lower loss that stop training; 0 for no early stopping.
    """

    command: ClassVar[str] = ""
    learning_rate_flag: ClassVar[str] = "--max-learning-rate"
    patience = 0

    def __init__(self, arguments: Any, folder: Path | None = None) -> None:
        self.arguments = arguments
        self.folder = folder

    # -------------------------------------------------------------------- before training
    @property
    def name(self) -> str:
        """Return the first part of a new run folder's name, before date and time; subclasses implement it."""
        raise NotImplementedError

    def claim_folder(self, folder: Path, processes: ProcessGroup) -> None:
        """Check that a new run can use the folder, or read a resumed run's settings; NotImplementedError here.

        Raises:
            ValueError, FileNotFoundError: the folder contains another run, or no run of this command.
        """
        raise NotImplementedError

    def prepare(self, run: Run) -> TrainingState:
        """Load data, model or checkpoint, write the folder's first files, return the state; NotImplementedError here.

        Raises:
            ValueError: the folder's files contradict each other, the data or the model.
        """
        raise NotImplementedError

    def tracked_settings(self, state: TrainingState) -> dict[str, Any]:
        """Return the settings that trackers record, by name: here the fields of the config."""
        return state.config.to_dict()

    def memory_advice(self, config: GPTConfig, on_gpu: bool) -> str:
        """Return text that names the flags to change for less memory, with present values, for a MemoryError."""
        advice = f"lower --batch-size (now {config.batch_size}; raise --accumulation-steps to compensate)"
        advice += f" or --context-window (now {config.context_window})"
        advice += f", or use a smaller model (now {min_n_weights(config):,} weights)"
        if on_gpu and config.precision in ("float32", "tf32"):
            advice += ", or use --precision bfloat16"
        return advice

    # -------------------------------------------------------------------- while it trains
    def measure(self, state: TrainingState) -> dict[str, float]:
        """Return "held_out_loss", which training minimizes, and other held-out metrics; subclasses implement it."""
        raise NotImplementedError

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Format the results of `measure` as "1.2345 nats/token, 0.678 bits/byte"; a missing metric is "nan"."""
        loss, bits = (metrics.get(name, math.nan) for name in ("held_out_loss", "bits_per_byte"))
        return f"{loss:.4f} nats/token, {bits:.3f} bits/byte"

    def sample(self, state: TrainingState, run: Run) -> None:
        """Print samples and append them to samples.txt, every `sample_interval` updates; by default do nothing."""

    def closing_seconds(self, seconds_per_batch: float, config: GPTConfig) -> float:
        """Estimate the seconds of `report`, from the seconds of a forward pass of one batch; by default 0."""
        return 0.0

    # -------------------------------------------------------------------- afterwards
    def report(self, state: TrainingState, run: Run) -> None:
        """Print final metrics, plot the loss curve, print commands that use the result; subclasses implement it."""
        raise NotImplementedError


def command_name(name: str, current: str) -> str:
    """Return the command line of the command `name`, in the form in which the user started the command `current`.

    For `python train_smol_gpt.py` this is a script's command line, else `tricycle NAME`.
    """
    program = sys.argv[0].removesuffix(f" {current}")
    if program != sys.argv[0]:
        return f"{program} {name}"
    return SCRIPTS.get(name, f"tricycle {name}") if current == "train" else f"tricycle {name}"


def contains_run(folder: Path) -> bool:
    """Return whether a folder has a run to resume: config.json and data.json, or last.safetensors."""
    is_described = (folder / "config.json").exists() and (folder / "data.json").exists()
    return is_described or (folder / "last.safetensors").exists()


def claim_new_folder(folder: Path) -> None:
    """Raise ValueError if the folder has a run, even with no checkpoint; else delete a config.json left alone there."""
    if contains_run(folder):
        raise ValueError(f"{folder} contains a run already: continue it with --resume, or use another --run-folder")
    (folder / "config.json").unlink(missing_ok=True)  # without data.json


def check_command(folder: Path, data: Mapping[str, Any], command: str) -> None:
    """Raise ValueError if `data`, the content of the folder's data.json, is of a run of another command."""
    started_by = data.get("command", "finetune" if "arguments" in data else "train")
    if started_by != command:
        raise ValueError(f"{folder}: expected a run of `tricycle {command}`, got one of {started_by!r}")


def present_flags(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an older run folder's flags with their present names and values; other flags are unchanged."""
    flags = {"--" + name.replace("_", "-"): value for name, value in stored.items()}
    present = {ALIASES.get(flag, flag): value for flag, value in flags.items()}
    return {
        flag.removeprefix("--").replace("-", "_"): VALUE_ALIASES.get((flag, str(value)), value)
        for flag, value in present.items()
    }


def read_stored_flags(path: Path, key: str, defaults: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the flags at `key` of a JSON file, renaming old ones; ValueError if missing, unknown or mistyped."""
    stored: Any = read_json_object(path).get(key)
    stored = present_flags(stored) if isinstance(stored, dict) else stored
    if not isinstance(stored, dict) or set(stored) - set(names):
        raise ValueError(f"{path}: expected {key} with the flags of a run, got {reprlib.repr(stored)}")
    for name, value in stored.items():
        default = getattr(defaults, name)
        if isinstance(default, tuple):
            fits = isinstance(value, list) and all(isinstance(part, str) for part in value)
        elif isinstance(default, float):
            fits = type(value) in (int, float)
        else:
            fits = type(value) is type(default)
        if not fits:
            raise ValueError(f"{path}: expected {name} to be like {default!r}, got {reprlib.repr(value)}")
    return stored


def write_run_description(folder: Path, config: GPTConfig, description: Mapping[str, Any], tokeniser: Any) -> None:
    """Write data.json (`description`), config.json and tokeniser.json to a run folder, replacing existing ones."""
    for name, content in {"data": description, "config": config.to_dict()}.items():  # config.json is the last
        with atomic_write(folder / f"{name}.json", text=True) as file:
            json.dump(content, file, indent=2)
    tokeniser.save(folder / "tokeniser.json")
