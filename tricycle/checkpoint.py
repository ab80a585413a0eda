"""Checkpoints: weights, optimizer state and all other training state in one safetensors file.

The tensors are "model.<parameter>" and "optimiser.<moment>.<parameter>"; the rest is JSON in the file's metadata, with
a checksum. The file is written atomically, so a run may be interrupted at any time.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tricycle import devices
from tricycle.configs import GPTConfig
from tricycle.configs.size import min_n_weights
from tricycle.dataset import CausalLMDataset
from tricycle.models import GPT
from tricycle.optimisers import Optimiser, State
from tricycle.softmaxes import config_with_softmax
from tricycle.system.files import add_path_to_errors, atomic_write
from tricycle.system.memory import check_memory
from tricycle.system.safetensors_file import TensorInfo, read_header, write_header
from tricycle.tensor import Tensor
from tricycle.tokeniser import Tokeniser

FORMAT = 1
A_CHECKPOINT = "a complete checkpoint of Tricycle"
# The data types, as named by NumPy and by the safetensors format.
DTYPES = "<f8 <f4 <f2 <i8 <i4 <i2 |i1 <u8 <u4 <u2 |u1 |b1".split()
KINDS = dict(zip(DTYPES, "F64 F32 F16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split()))
PathLike = str | os.PathLike[str]


class NonFiniteCheckpointError(ValueError):
    """A tensor to be saved, or that was loaded, has NaN or infinity."""


def save_checkpoint(
    path: PathLike,
    model: GPT,
    tokeniser: Tokeniser | None = None,
    optimiser: Optimiser | None = None,
    dataset: CausalLMDataset | None = None,
    progress: dict[str, Any] | None = None,
    states: dict[Tensor, tuple[int, State]] | None = None,
) -> None:
    """Write or replace a file of weights, config and training state, atomically; ValueError if a number is not finite.

    Args:
        tokeniser: saved with the model, so that the file is sufficient for generation.
        optimiser, dataset, progress: the state for bit-exact resume.
        states: the gathered optimizer state, if it is sharded over several processes.

    Raises:
        NonFiniteCheckpointError: a weight or optimizer state is not finite; nothing is written.
        ValueError: the config cannot name the softmax variant of the blocks; nothing is written.
    """
    tensors = {f"model.{name}": array for name, array in model.state_dict().items()}
    for name, array in tensors.items():
        _check_finite("save_checkpoint: expected finite weights", name, array)
    about: dict[str, Any] = {
        "format": FORMAT,
        "config": config_with_softmax(model).to_dict(),
        "tokeniser": tokeniser.to_dict() if tokeniser is not None else None,
        "generator": model.generator.bit_generator.state,
        "progress": progress or {},
    }
    if optimiser is not None:
        n_updates: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            n_updates[name], moments = optimiser.state_of(parameter) if states is None else states[parameter]
            for moment, array in moments.items():
                key = f"optimiser.{moment}.{name}"
                tensors[key] = devices.to_cpu(array)
                _check_finite("save_checkpoint: expected finite moments", key, tensors[key])
        about["optimiser"] = {"n_steps": optimiser.n_steps, "n_updates": n_updates}
    if dataset is not None:
        about["dataset"] = dataset.state()
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    _write(path, tensors, json.dumps(about))


def _write(path: PathLike, tensors: dict[str, np.ndarray], about: str) -> None:
    """Write tensors, metadata and a checksum to a safetensors file, atomically; ValueError for unsupported dtypes."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each tensor is aligned
    layout = {}
    for name in names:
        array = tensors[name]
        if array.dtype.str not in KINDS:
            raise ValueError(f"save_checkpoint: expected numbers, {name} has the type {array.dtype}")
        layout[name] = (KINDS[array.dtype.str], array.shape)
    checksum = _checksum(about, tensors)
    with atomic_write(path) as file:
        write_header(file, layout, {"tricycle": about, "crc32": checksum})
        for name in names:
            file.write(_bytes_of(tensors[name]))


def _read(path: Path, infos: dict[str, TensorInfo], start: int) -> dict[str, np.ndarray]:
    """Return the tensors in a file from byte `start`, by name; ValueError for wrong sizes and unsupported dtypes."""
    size = path.stat().st_size - start
    n_bytes = sum(info.n_bytes for info in infos.values())
    if n_bytes != size:
        raise ValueError(f"its tensors have {n_bytes} bytes and the file {size} for them")
    dtypes = {kind: dtype for dtype, kind in KINDS.items()}
    tensors = {}
    with path.open("rb") as file:
        for name, info in infos.items():
            if info.dtype_name not in dtypes:
                raise ValueError(f"{name} is of the type {info.dtype_name}")
            tensors[name] = np.empty(info.shape, dtypes[info.dtype_name])
            file.seek(info.start)
            if file.readinto(_bytes_of(tensors[name])) != info.n_bytes:
                raise ValueError(f"the values of {name} are cut off")
    return tensors


def _checksum(about: str, tensors: dict[str, np.ndarray]) -> str:
    """Return the CRC-32 of the metadata and all tensors' names, dtypes, shapes and bytes, as 8 hexadecimal digits."""
    number = zlib.crc32(about.encode("utf-8"))
    for name in sorted(tensors):
        array = tensors[name]
        number = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), number)
        number = zlib.crc32(_bytes_of(array), number)
    return f"{number:08x}"


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def _check_finite(expected: str, name: str, array: np.ndarray) -> None:
    """Raise a NonFiniteCheckpointError that begins with `expected` if an array has NaN or infinity."""
    if not np.isfinite(array).all():
        raise NonFiniteCheckpointError(f"{expected}, {name} has NaN or infinity")


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file.

    Attributes:
        tensors: by name, see the module's docstring.
        about: the JSON metadata.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, np.ndarray]
    about: dict[str, Any]

    def model(self) -> GPT:
        """Make a model with the saved weights and generator state; ValueError if a weight is not finite or missing."""
        with wrap_content_errors(self.path, A_CHECKPOINT):
            prefix = "model."
            weights = {name.removeprefix(prefix): a for name, a in self.tensors.items() if name.startswith(prefix)}
            for name, array in weights.items():
                _check_finite("expected finite weights", name, array)
            model = build_model(self.config, weights)
            model.generator.bit_generator.state = self.about["generator"]
            return model

    def tokeniser(self) -> Tokeniser | None:
        """Make the saved tokenizer; return None if there is none; raise a ValueError if it is invalid."""
        # not at module level, because its package imports this module
        from tricycle.pretrained.tokenisers import tokeniser_from_dict

        with wrap_content_errors(self.path, A_CHECKPOINT):
            return tokeniser_from_dict(self.about["tokeniser"]) if self.about.get("tokeniser") else None

    def restore(self, model: GPT, optimiser: Optimiser, dataset: CausalLMDataset) -> dict[str, Any]:
        """Restore `optimiser` and `dataset` in place, not weights; return the saved progress; ValueError for a misfit.

        Raises:
            ValueError: something is missing or does not fit, or an optimizer state is not finite.
        """
        with wrap_content_errors(self.path, A_CHECKPOINT):
            about = self.about["optimiser"]
            optimiser.n_steps = int(about["n_steps"])
            for name, parameter in model.named_parameters():
                moments = {}
                for moment in optimiser.rule_of(parameter, name).state_shapes(parameter.shape):
                    key = f"optimiser.{moment}.{name}"
                    array = self.tensors[key]
                    _check_finite("expected finite moments", key, array)
                    moments[moment] = parameter.xp.asarray(array, np.promote_types(parameter.dtype, np.float32))
                optimiser.set_state(parameter, int(about["n_updates"][name]), moments)
            dataset.load_state(self.about["dataset"])
            return dict(self.about["progress"])


def build_model(config: GPTConfig, weights: dict[str, np.ndarray]) -> GPT:
    """Make a GPT with copies of the weights, by parameter name; raise a ValueError if they do not fit the config."""
    whole = next((name for name, array in weights.items() if array.dtype.kind in "biu"), None)
    if whole is not None:
        raise ValueError(f"expected weights in floating point, {whole} has {weights[whole].dtype}")
    n_numbers = sum(array.size for array in weights.values())
    least = min_n_weights(config)
    if least > n_numbers:  # before a crafted config allocates too much memory
        raise ValueError(f"expected at least {least} numbers in its weights, as its config says, got {n_numbers}")
    model = new_model(config, draw_weights=False)
    model.load_state_dict(weights)
    return model


def new_model(config: GPTConfig, draw_weights: bool = True) -> Any:
    """Make the model of a config: a `GPT`, or an encoder-decoder; `draw_weights`: see `GPT`."""
    return getattr(config, "new_model", partial(GPT, config))(draw_weights=draw_weights)


@contextmanager
def wrap_content_errors(path: Path, expected: str) -> Iterator[None]:
    """Raise FileNotFoundError if `path` is no file; turn errors in the block, but Memory-, OSError, into ValueErrors.

    The ValueError names the file and what was `expected`. MemoryError and OSError are not caused by the content, and
    stay unchanged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {expected}, there is no such file")
    try:
        with add_path_to_errors(path):
            yield
    except (MemoryError, OSError):
        raise
    except Exception as error:
        lacking = isinstance(error, KeyError)
        reason = f"it lacks {error.args[0]!r}" if lacking else " ".join(str(error).split()) or type(error).__name__
        reason = reason.removeprefix(f"{path}: ")
        raise ValueError(f"{path}: expected {expected}: {reason}") from None


def load_checkpoint(path: PathLike) -> Checkpoint:
    """Read a checkpoint, executing nothing; ValueError if damaged, MemoryError if too large, FileNotFoundError if none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is truncated, damaged, or not a checkpoint of Tricycle.
        MemoryError: the file does not fit into memory; nothing is read.
    """
    path = Path(path)
    if path.is_file():
        check_memory(path.stat().st_size, str(path))
    with wrap_content_errors(path, A_CHECKPOINT):
        infos, metadata, start = read_header(path)
        text = metadata.get("tricycle")
        if not isinstance(text, str):
            raise ValueError("it is a safetensors file without Tricycle's metadata")
        tensors = _read(path, infos, start)
        saved = metadata.get("crc32")  # missing in older files
        if saved is not None and (checksum := _checksum(text, tensors)) != saved:
            raise ValueError(f"its checksum is {checksum}, not {saved!r:.20} as when it was saved: bits of it changed")
        about = json.loads(text)
        if about["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {about['format']!r}")
        return Checkpoint(path, GPTConfig.from_dict(about["config"]), tensors, about)
