"""Models in llama.cpp's files: GGUF, of whole numbers of few bits in blocks, or of floats."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tricycle.pretrained.gguf_fields import FIELDS, Fields, Keys
from tricycle.pretrained.gguf_file import Entry, GGUFFile, read_file, shown
from tricycle.pretrained.gguf_names import LAYOUTS, Change, Heads, Layout
from tricycle.pretrained.source import Source, StoredTensor

_BLOCK = re.compile(r"^blk\.(0|[1-9][0-9]{0,8})\.")
_DIVISORS = "rope_freqs.weight"  # of the frequencies of rotary positions
# What a config.json knows as other fields, or not at all.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class GGUFSource(Source):
    """A model in a GGUF file.

    Attributes:
        metadata: every key and value of the file, the tokeniser's among them.
    """

    metadata: dict[str, Any] | None = None


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Every key of a GGUF file with its value as a plain one of Python.

    Raises:
        OSError, ValueError: as `read_gguf`, but for what has to do with the model.
    """
    return read_file(path).metadata


def read_gguf(path: str | os.PathLike[str]) -> GGUFSource:
    """A model in a GGUF file, with fields, names and values as in Hugging Face's form.

    Its numbers are read, and turned into float32 where they lie in blocks, when they are asked for.

    Raises:
        OSError: no such file, or none that may be read.
        ValueError: no GGUF file, a damaged one, an architecture, type or scaling that is not known here, keys and
            tensors that contradict each other.
    """
    file = read_file(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise ValueError(f"{file.path}: expected general.architecture to be one of {known}, got {shown(architecture)}")
    keys = Keys(file, architecture)
    _check_whole(file, keys)
    divisors = file.read(file.tensors[_DIVISORS]) if _DIVISORS in file.tensors else None
    fields = FIELDS[architecture](keys, divisors) | keys.special_tokens()
    heads = Heads(
        keys.whole("attention.head_count"),
        keys.whole("attention.head_count_kv", keys.whole("attention.head_count")),
        keys.head_size(),
    )
    tensors = _Translation(file, keys, LAYOUTS[architecture], heads).tensors()
    output, embedding = file.tensors.get("output.weight"), file.tensors["token_embd.weight"]
    alike = output and (output.kind, output.shape) == (embedding.kind, embedding.shape)
    if architecture == "gpt2" and output and alike and np.array_equal(file.read(output), file.read(embedding)):
        fields["tie_word_embeddings"] = True  # converters used to write GPT-2's embedding twice
        del tensors["lm_head.weight"]
    return GGUFSource(file.path, fields, tensors, _generation(file.metadata, fields), file.metadata)


def _check_whole(file: GGUFFile, keys: Keys) -> None:
    """One whole model, of the sizes that its tensors have: no key asks for more memory than the file fills."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise keys.error(f"expected a model, got general.type {shown(kind)}")
    parts = file.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise keys.error(f"is one of {shown(parts)} files of a model: join them first (llama-gguf-split --merge)")
    numbers = [int(match[1]) for name in file.tensors if (match := _BLOCK.match(name))]
    n_blocks = 1 + max(numbers, default=-1)
    sizes = {
        "block_count": n_blocks,
        "embedding_length": keys.shape("token_embd")[1],
        "feed_forward_length": keys.shape("blk.0.ffn_up")[0],
    }
    for key, size in sizes.items():
        if keys.whole(key) != size:
            raise keys.error(f"{keys.architecture}.{key} is {keys.whole(key)}, but its tensors are of {size}")


@dataclass(frozen=True)
class _Translation:
    """Of a file's tensors into Hugging Face's names and values."""

    file: GGUFFile
    keys: Keys
    layout: Layout
    heads: Heads

    def tensors(self) -> dict[str, StoredTensor]:
        """All of them but what the fields say already."""
        tensors: dict[str, StoredTensor] = {}
        for name, entry in self.file.tensors.items():
            if name == _DIVISORS:
                continue
            for full, tensor in self._translated(name, entry):
                if full in tensors:
                    raise self.keys.error(f"tensor {shown(name)} is a second {shown(full)}")
                tensors[full] = tensor
        return tensors

    def _translated(self, name: str, entry: Entry) -> list[tuple[str, StoredTensor]]:
        layer, _, suffix = name.rpartition(".")
        match = _BLOCK.match(name)
        general = f"blk.N.{layer[match.end() :]}" if match else layer
        theirs = self.layout.names.get(general)
        if theirs is None or suffix not in ("weight", "bias"):
            raise self.keys.error(f"tensor {shown(name)} has no place in a model of the kind {self.keys.architecture}")
        number = match[1] if match else ""
        full = [f"{one.replace('.N.', f'.{number}.')}.{suffix}" for one in theirs]
        change = self.layout.changes.get(general, Change())
        if len(full) == 1:
            return [(full[0], self._stored(entry, slice(None), entry.shape, change))]
        if entry.shape[0] != sum(self.heads.rows):
            raise self.keys.error(f"expected {sum(self.heads.rows)} rows of tensor {shown(name)}, got {entry.shape[0]}")
        parts, start = [], 0
        for one, n_rows in zip(full, self.heads.rows):
            rows, start = slice(start, start + n_rows), start + n_rows
            parts.append((one, self._stored(entry, rows, (n_rows, *entry.shape[1:]), change)))
        return parts

    def _stored(self, entry: Entry, rows: slice, shape: tuple[int, ...], change: Change) -> StoredTensor:
        heads = self.heads
        # that the values can be put in another order is checked now, and not when they are read
        if change.rows and (entry.shape[0] != change.rows(heads) or heads.size % 2):
            said = f"{heads.n_heads} heads of queries, {heads.n_key_heads} of keys, of {heads.size} channels"
            raise self.keys.error(f"tensor {shown(entry.name)} of shape {entry.shape} does not fit {said}")

        def read() -> np.ndarray:
            return change.back(self.file.read(entry, rows), heads)

        def blocks() -> tuple[np.ndarray, np.ndarray]:
            values, scales = self.file.read_blocks(entry, rows)
            return (values, scales) if change.transposes else (change.back(values, heads), change.back(scales, heads))

        new_shape = shape[::-1] if change.transposes else shape
        return StoredTensor(new_shape, entry.kind, read, blocks if entry.kind == "Q8_0" and len(shape) == 2 else None)


def _generation(metadata: dict[str, Any], fields: Fields) -> Fields:
    """As in a generation_config.json: which tokens end an answer, and how to draw tokens where a file says it."""
    generation: Fields = {}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    stop = [end for end in ends if isinstance(end, int) and 0 <= end < fields["vocab_size"]]
    if stop:
        generation["eos_token_id"] = list(dict.fromkeys(stop))
    for key, name in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            generation[name] = value
    if "temperature" in generation:
        generation["do_sample"] = generation["temperature"] > 0
    return generation
