"""Reader of model folders of transformers: config.json, generation_config.json and safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.pretrained.stored_model import StoredModel, StoredTensor
from tricycle.system.files import read_json_object

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_folder(path: Path) -> StoredModel:
    """Open a Hugging Face folder or weights file as a StoredModel: config, generation settings, tensors read on use.

    Args:
        path: the folder, or its single file of weights.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged.
    """
    folder = path.parent if path.is_file() else path
    fields = read_json_object(folder / CONFIG)
    generation = read_optional_json(folder / GENERATION)
    return StoredModel(path, fields, read_tensors(path)[0] if path.is_file() else _read_weights(folder), generation)


def read_optional_json(path: Path, *limits: int) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no file; `limits` as of `read_json_object`."""
    return read_json_object(path, *limits) if path.is_file() else {}


def _read_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return a folder's tensors, from one file or shards; ValueError for pickles, FileNotFoundError for none."""
    if (folder / WEIGHTS).is_file():
        return read_tensors(folder / WEIGHTS)[0]
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder}: pytorch_model.bin is a pickle, which can run any code when it is read; if you trust it, "
            "convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise FileNotFoundError(f"{folder}: expected {WEIGHTS} or {INDEX}, found neither")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files that the index names; ValueError if they disagree, else FileNotFoundError."""
    index = folder / INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: expected weight_map to be an object of tensor names and file names")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or "\\" in file:
            raise ValueError(f"{index}: expected names of files in the same folder, got {file!r:.80}")
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file}: this file of weights is missing; {INDEX} names it")
        shard, _ = read_tensors(folder / file)
        duplicates = sorted(set(shard) & set(tensors))
        if duplicates:
            raise ValueError(f"{folder / file}: {duplicates[0]} is also in another file")
        tensors |= shard
    missing = sorted(name for name in weight_map if name not in tensors)
    if missing:
        raise ValueError(f"{index}: {missing[0]} is in none of the files")
    return tensors
