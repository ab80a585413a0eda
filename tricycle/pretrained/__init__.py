"""Other people's models: their files, tokenisers and settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tricycle.pretrained.families import DTYPES, build
from tricycle.pretrained.folder import read_folder
from tricycle.pretrained.settings import GenerationSettings
from tricycle.pretrained.source import Source


@dataclass
class Pretrained:
    """A model with all that belongs to it.

    Attributes:
        model: a `GPT`, or an encoder.
        tokeniser: `encode(text) -> list[int]`, `decode(ids) -> str`, `chat(messages) -> list[int]`; None where there
            is none in the files.
        generation: how its makers would have it write.
        source: what the files say; None for a model of Tricycle's own.
    """

    model: Any
    tokeniser: Any
    generation: GenerationSettings
    source: Source | None = None


def load(path_or_name: str | os.PathLike[str], dtype: str = "float32") -> Pretrained:
    """A model that somebody has trained.

    Args:
        path_or_name: a folder in Hugging Face's form.
        dtype: "float32"; or "stored", which keeps large weights that are stored in 16 bits as they are, until a product
            needs them: half the memory, and slower. They are frozen.

    Raises:
        FileNotFoundError: nothing there, or a part is missing.
        ValueError: one line about what is wrong with the files.
    """
    if dtype not in DTYPES:
        raise ValueError(f"load: expected dtype to be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = read_folder(Path(path_or_name))
    model = build(source, dtype)
    return Pretrained(model, None, GenerationSettings.from_fields(source.generation, source.fields), source)
