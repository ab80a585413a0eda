"""Folders as `transformers` writes them: config.json, generation_config.json, weights in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tricycle.pretrained.source import Source, StoredTensor
from tricycle.pretrained.tensor_files import read_tensors

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_JSON = 64_000_000  # bytes


def read_folder(path: Path) -> Source:
    """A model in Hugging Face's form; of the weights only the headers are read.

    Args:
        path: the folder, or its one file of weights.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: one is damaged.
    """
    folder = path.parent if path.is_file() else path
    fields = read_json(folder / CONFIG)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    tensors = read_tensors(path)[0] if path.is_file() else _read_weights(folder)
    return Source(path, fields, tensors, generation)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, no object, or larger than such a file can be.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise ValueError(f"{path}: expected at most {LARGEST_JSON} bytes, got {size}")
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON: {str(error) or type(error).__name__}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _read_weights(folder: Path) -> dict[str, StoredTensor]:
    if (folder / WEIGHTS).is_file():
        return read_tensors(folder / WEIGHTS)[0]
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder}: pytorch_model.bin is a pickle, which can run anything when it is read; where you trust it, "
            "write it anew with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise FileNotFoundError(f"{folder}: expected {WEIGHTS} or {INDEX}, there is neither")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of several files, which the index names."""
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{index}: expected weight_map to be an object of tensors and their files")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or "\\" in file:
            raise ValueError(f"{index}: expected the names of files beside it, got {file!r:.80}")
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file}: this part of the weights is missing; {INDEX} names it")
        shard, _ = read_tensors(folder / file)
        twice = sorted(set(shard) & set(tensors))
        if twice:
            raise ValueError(f"{folder / file}: {twice[0]} is in another part too")
        tensors |= shard
    absent = sorted(name for name, file in places.items() if name not in tensors)
    if absent:
        raise ValueError(f"{index}: {absent[0]} is in none of the files")
    return tensors
