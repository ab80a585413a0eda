"""What a run trains: the base class of the tasks that a session runs (`tricycle_cli/session.py`).

`tricycle train`, `finetune` and `distill` each are a subclass and the dataclass of their command line.
"""

from __future__ import annotations

import json
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
from tricycle_cli.run import Run

SCRIPTS = {"train": "python train_smol_gpt.py", "generate": "python inference.py"}


class Task:
    """The data, the model and the evaluation of a run.

    Attributes:
        command: the subcommand of `tricycle` that begins and resumes such runs.
        learning_rate_flag: the flag of the learning rate.
        arguments: of the command line, or of the run that is resumed: with `on_nan`, `on_full_disk` and `track`.
        folder: the run folder; None for a new one in runs/.
        patience: evaluations in a row without a lower loss that end training; 0 for any number.
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
        """The first part of the name of a new run folder."""
        raise NotImplementedError

    def claim(self, folder: Path, processes: ProcessGroup) -> None:
        """Refuse a folder that holds another run; or read the settings of the run that is resumed, under its lock.

        Raises:
            ValueError, FileNotFoundError: the folder is not of such a run.
        """
        raise NotImplementedError

    def prepare(self, run: Run) -> TrainingState:
        """Read the data and the model, from the last checkpoint if there is one, and write the folder's first files.

        Raises:
            ValueError: the folder's files contradict each other, the data or the model.
        """
        raise NotImplementedError

    def facts(self, state: TrainingState) -> dict[str, Any]:
        """Return what trackers record as the run's settings."""
        return state.config.to_dict()

    def memory_advice(self, config: GPTConfig, on_gpu: bool) -> str:
        """Return which settings need less memory."""
        advice = f"lower --batch-size (now {config.batch_size}; --accumulation-steps makes up for it)"
        advice += f" or --context-window (now {config.context_window})"
        advice += f", or make the model smaller: it has {min_n_weights(config):,} weights"
        if on_gpu and config.precision in ("float32", "tf32"):
            advice += ", or take --precision bfloat16"
        return advice

    # -------------------------------------------------------------------- while it trains
    def measure(self, state: TrainingState) -> dict[str, float]:
        """Evaluate the model on held-out data: "held_out_loss", which is to fall, and further figures."""
        raise NotImplementedError

    def figures_text(self, figures: Mapping[str, float]) -> str:
        """Return the figures of `measure` as words."""
        raise NotImplementedError

    def sample(self, state: TrainingState, run: Run) -> None:
        """Print samples and add them to samples.txt; called every `sample_interval` updates."""

    def closing_seconds(self, seconds_per_batch: float, config: GPTConfig) -> float:
        """Estimate how long `report` takes, from the seconds of a forward pass of a batch."""
        return 0.0

    # -------------------------------------------------------------------- afterwards
    def report(self, state: TrainingState, run: Run) -> None:
        """Print the final figures, draw the loss curve, and print how to use the result."""
        raise NotImplementedError


def command_name(name: str, own: str) -> str:
    """Return how a command is started by a user who started `own` as this process was."""
    program = sys.argv[0].removesuffix(f" {own}")
    if program != sys.argv[0]:
        return f"{program} {name}"
    return SCRIPTS.get(name, f"tricycle {name}") if own == "train" else f"tricycle {name}"


def contains_run(folder: Path) -> bool:
    """Return whether there is a run to resume: a folder that has not got so far is begun anew."""
    begun = (folder / "config.json").exists() and (folder / "data.json").exists()
    return begun or (folder / "last.safetensors").exists()


def claim_new_folder(folder: Path) -> None:
    """
    Raises:
        ValueError: the folder holds a run.
    """
    if contains_run(folder):
        raise ValueError(f"{folder} holds a run already: continue it with --resume, or name another --run-folder")
    (folder / "config.json").unlink(missing_ok=True)  # of a run that was hardly begun


def read_stored_flags(path: Path, key: str, usual: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the flags that data.json stores under a key; each has the type of its default.

    Raises:
        ValueError: another content.
    """
    stored: Any = read_json_object(path).get(key)
    if not isinstance(stored, dict) or set(stored) - set(names):
        raise ValueError(f"{path}: expected {key} with the flags of a run, got {reprlib.repr(stored)}")
    for name, value in stored.items():
        default = getattr(usual, name)
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
    """Write the files that describe a run."""
    for name, content in {"data": description, "config": config.to_dict()}.items():  # config.json stands for both
        with atomic_write(folder / f"{name}.json", text=True) as file:
            json.dump(content, file, indent=2)
    tokeniser.save(folder / "tokeniser.json")
