"""Checkpoints: weights, moments and everything else that training is made of, in one safetensors file.

The tensors are "model.<parameter>" and "optimiser.<moment>.<parameter>"; the rest is JSON in the file's
metadata. One file, written whole or not at all, so a run can be cut off at any moment.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tricycle import devices
from tricycle.configs import GPTConfig
from tricycle.dataset import CausalLMDataset
from tricycle.files import atomic_write
from tricycle.models import GPT, least_numbers
from tricycle.optimisers import Optimiser
from tricycle.tokeniser import Tokeniser

FORMAT = 1
A_CHECKPOINT = "a whole checkpoint of Tricycle"
PathLike = str | os.PathLike[str]


def save_checkpoint(
    path: PathLike,
    model: GPT,
    tokeniser: Tokeniser | None = None,
    optimiser: Optimiser | None = None,
    dataset: CausalLMDataset | None = None,
    progress: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint. A file of that name is replaced only by a whole one.

    Args:
        tokeniser: goes along, so that the model can be used without its run.
        optimiser, dataset, progress: what training needs to go on as if it had not stopped.

    Raises:
        ValueError: a weight or a moment is not finite; nothing is written then.
    """
    from safetensors.numpy import save

    tensors = {f"model.{name}": array for name, array in model.state_dict().items()}
    for name, array in tensors.items():
        _check_finite("save_checkpoint: expected finite weights", name, array)
    about: dict[str, Any] = {
        "format": FORMAT,
        "config": model.config.to_dict(),
        "tokeniser": tokeniser.to_dict() if tokeniser is not None else None,
        "generator": model.generator.bit_generator.state,
        "progress": progress or {},
    }
    if optimiser is not None:
        n_updates: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            n_updates[name], moments = optimiser.memory_of(parameter)
            for moment, array in moments.items():
                key = f"optimiser.{moment}.{name}"
                tensors[key] = devices.to_cpu(array)
                _check_finite("save_checkpoint: expected finite moments", key, tensors[key])
        about["optimiser"] = {"n_steps": optimiser.n_steps, "n_updates": n_updates}
    if dataset is not None:
        about["dataset"] = dataset.state()
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    content = save(tensors, {"tricycle": json.dumps(about)})
    with atomic_write(path) as file:
        file.write(content)


def _check_finite(wanted: str, name: str, array: np.ndarray) -> None:
    """
    Raises:
        ValueError: begins with what was wanted.
    """
    if not np.isfinite(array).all():
        raise ValueError(f"{wanted}, {name} has NaN or infinity")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        tensors: by name, as this module's docstring says.
        about: the JSON beside them.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, np.ndarray]
    about: dict[str, Any]

    def model(self) -> GPT:
        """The model, its dropout generator where it stood."""
        with expecting(self.path, A_CHECKPOINT):
            prefix = "model."
            weights = {name.removeprefix(prefix): a for name, a in self.tensors.items() if name.startswith(prefix)}
            model = build_model(self.config, weights)
            model.generator.bit_generator.state = self.about["generator"]
            return model

    def tokeniser(self) -> Tokeniser | None:
        """The tokeniser that went along, if one did: our own, or another."""
        # not above: to import it makes Python import its whole package, and that imports this file
        from tricycle.pretrained.tokenisers import tokeniser_from_dict

        with expecting(self.path, A_CHECKPOINT):
            return tokeniser_from_dict(self.about["tokeniser"]) if self.about.get("tokeniser") else None

    def restore(self, model: GPT, optimiser: Optimiser, dataset: CausalLMDataset) -> dict[str, Any]:
        """Put the optimiser and the dataset where they stood; returns the progress.

        Raises:
            ValueError: something is missing or does not fit, or a moment is not finite.
        """
        with expecting(self.path, A_CHECKPOINT):
            about = self.about["optimiser"]
            optimiser.n_steps = int(about["n_steps"])
            for name, parameter in model.named_parameters():
                moments = {}
                for moment in optimiser.rule_of(parameter, name).state_names:
                    key = f"optimiser.{moment}.{name}"
                    array = self.tensors[key]
                    _check_finite("expected finite moments", key, array)
                    moments[moment] = parameter.xp.asarray(array, dtype=parameter.dtype)
                optimiser.remember(parameter, int(about["n_updates"][name]), moments)
            dataset.load_state(self.about["dataset"])
            return dict(self.about["progress"])


def build_model(config: GPTConfig, weights: dict[str, np.ndarray]) -> GPT:
    """A model with these weights.

    Raises:
        ValueError: the weights are not those of the config.
    """
    n_numbers = sum(array.size for array in weights.values())
    least = least_numbers(config)
    if least > n_numbers:  # seen before a crafted config asks for more memory than there is
        raise ValueError(f"expected at least {least} numbers in its weights, as its config says, got {n_numbers}")
    model = GPT(config, draw_weights=False)
    model.load_state_dict(weights)
    return model


@contextmanager
def expecting(path: Path, what: str) -> Iterator[None]:
    """Turn the errors of odd content, which can be any, into one line that names the file.

    Too little memory says nothing about the content: it stays what it is.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {what}, there is no such file")
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            raise
        lacking = isinstance(error, KeyError)
        reason = f"it lacks {error.args[0]!r}" if lacking else " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: expected {what}: {reason}") from None


def load_checkpoint(path: PathLike) -> Checkpoint:
    """Read a checkpoint. Nothing in the file is executed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is cut off, damaged or no checkpoint of Tricycle.
    """
    from safetensors import safe_open

    path = Path(path)
    with expecting(path, A_CHECKPOINT):
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("tricycle")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator here)
        if text is None:
            raise ValueError("it is a safetensors file without Tricycle's metadata")
        about = json.loads(text)
        if about["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {about['format']!r}")
        return Checkpoint(path, GPTConfig.from_dict(about["config"]), tensors, about)
