"""Folders as `transformers` writes them: config.json, generation_config.json, weights in safetensors files."""

from __future__ import annotations

from pathlib import Path

from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.pretrained.stored_model import StoredModel, StoredTensor
from tricycle.system.files import read_json_object

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_folder(path: Path) -> StoredModel:
    """A model in Hugging Face's form; of the weights only the headers are read.

    Args:
        path: the folder, or its one file of weights.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: one is damaged.
    """
    folder = path.parent if path.is_file() else path
    fields = read_json_object(folder / CONFIG)
    generation = read_json_object(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    return StoredModel(path, fields, read_tensors(path)[0] if path.is_file() else _read_weights(folder), generation)


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
    places = read_json_object(index).get("weight_map")
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
