"""Export of models to folders in Hugging Face format, which `transformers` loads."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.bpe import END_OF_TEXT
from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.model import ModelConfig
from tricycle.finetuning.lora import AdaptedDense
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.pretrained.config_equivalence import differing_fields, effective_fields
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families import ALL_FAMILIES
from tricycle.pretrained.families.family import Family, TensorMapping, new_model, to_hf_tensors
from tricycle.pretrained.families.stacks import stacked_arrays, stacked_shapes
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.hf_folder import CONFIG, GENERATION, WEIGHTS
from tricycle.pretrained.safetensors_weights import write_tensors
from tricycle.pretrained.stored_model import error_prefix
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.pretrained.tokenizer_json import SPLIT_PATTERNS, to_tokenizer_json
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.softmaxes import config_with_softmax
from tricycle.system.files import atomic_write
from tricycle.tokeniser import BPETokeniser

TENSOR_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# A family may require these although the model lacks them: they are written as biases and MLPs of 0 and gains of 1.
NEUTRAL_FIELDS = ("bias", "qkv_bias", "output_bias", "mlp_bias", "head_bias", "conv_bias", "qk_norm_gain", "mamba_mlp")
UNRELATED = 7  # with as many unsupported fields, a family is farther than one that rejects a value
MAX_SUPPRESSED = 10_000  # ids without a token in generation_config.json


# -------------------------------------------------------------------- family
def find_export_family(config: ModelConfig, excluded: str = "") -> tuple[Family, dict[str, Any], ModelConfig]:
    """Return the `transformers` family that computes a config, its config.json fields, and their config.

    The latter config may have additional biases and gains, which are exported as 0 and 1. The family with the fewest
    of these is returned.

    Args:
        excluded: a model_type that is not returned.

    Raises:
        ValueError: no family computes the same; names the unsupported fields.
    """
    with error_prefix("no family of transformers computes what this model does; "):
        return match_family(config, [family for family in ALL_FAMILIES if family.model_types[0] != excluded])


def match_family(
    config: ModelConfig, families: Iterable[Family], tolerance: float = 1e-12
) -> tuple[Family, dict[str, Any], ModelConfig]:
    """Return the family that computes a config with the fewest additions, its fields, and config; else ValueError.

    Args:
        tolerance: the largest relative difference of floats that count as equal.

    Raises:
        ValueError: no family computes the same; names the unsupported fields of the closest one.
    """
    candidates: list[tuple[int, Family, dict[str, Any], ModelConfig]] = []
    nearest: tuple[int, int, str] = (10**6, 0, f"no family has a {type(config).__name__}")
    order = [family.architecture for family in ALL_FAMILIES]  # of equally close families, the first is named
    if config.activation == "swiglu":  # as Hugging Face's families express it
        config = replace(config, activation="swish", gated=True, hidden_size=config.mlp_width)
    classes = {family.config_class for family in ALL_FAMILIES}
    config_class = next(kind for kind in type(config).__mro__ if kind in classes)
    for family in families:
        kind, rank = family.model_types[0], order.index(family.architecture)
        if family.config_class is not config_class:
            continue
        try:
            fields = {"model_type": kind, **family.to_fields(config)}
            converted = family.to_config(ConfigFields(fields))
        except ValueError as error:  # its message names the unsupported field
            nearest = min(nearest, (UNRELATED, rank, f"{kind}: {error}"))
            continue
        if not family.applies_to(fields):
            continue
        differences = differing_fields(config, converted, tolerance)
        ours, theirs = effective_fields(config), effective_fields(converted)
        neutral = {name for name in NEUTRAL_FIELDS if not ours.get(name) and theirs.get(name)}
        unsupported = [name for name in differences if name not in neutral]
        if not unsupported:
            candidates.append((len(differences), family, fields, converted))
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in unsupported)
        nearest = min(nearest, (len(unsupported), rank, f"{kind} does not support {values}"))
    if not candidates:
        raise ValueError(nearest[2])
    return min(candidates, key=lambda candidate: candidate[0])[1:]


# -------------------------------------------------------------------- the folder
def export_folder(
    model: Any,
    tokeniser: Any,
    folder: str | os.PathLike[str],
    card: Mapping[str, Any] | None = None,
    *,
    generation: GenerationSettings | None = None,
    dtype: str = "float32",
) -> str:
    """Export a model and tokenizer (or None) to a Hugging Face folder; FileExistsError if not empty; return model_type.

    The folder with config, weights, generation settings, tokenizer and README.md is created atomically.

    Args:
        model: a `GPT`, a `TextEncoder` or an `EncoderDecoderTransformer`.
        tokeniser: a `BPETokeniser` or `PretrainedTokeniser`; None exports no tokenizer.
        folder: a new or empty folder.
        card: further names and values of the table in README.md, such as evaluation results.
        generation: the settings for generation_config.json.
        dtype: the dtype of the weights in the file: float32, float16 or bfloat16.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: no family supports the config (names the fields), a weight is not finite, or the tokenizer has more
            tokens than the model.
    """
    check_exportable(model, "export")
    if dtype not in TENSOR_DTYPES:
        raise ValueError(f"export: expected dtype to be one of {', '.join(TENSOR_DTYPES)}, got {dtype!r}")
    vocab_size = model.config.vocab_size
    if tokeniser is not None and tokeniser.n_vocab > vocab_size:
        raise ValueError(f"export: expected a tokenizer of at most {vocab_size} tokens, got {tokeniser.n_vocab}")
    document, excluded = _tokenizer_document(tokeniser)
    family, fields, converted = find_export_family(config_with_softmax(model), excluded)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder}: expected a folder that is new or empty")
    special = _special_token_ids(tokeniser)
    files = {CONFIG: {"architectures": [family.architecture], **fields, **special, "torch_dtype": dtype}}
    texts = {"README.md": model_card(folder.name, model, fields["model_type"], card or {})}
    if not isinstance(model, TextEncoder):
        files[GENERATION] = _generation_fields(generation, special, tokeniser, vocab_size)
    if document is not None:
        files["tokenizer_config.json"] = _tokenizer_config_fields(tokeniser, model.config)
        texts["tokenizer.json"] = document
    with _atomic_folder(folder) as temporary:
        for name, values in files.items():
            write_json(temporary / name, values)
        with atomic_write(temporary / WEIGHTS) as file:
            write_tensors(file, *export_tensors(model, family, converted), TENSOR_DTYPES[dtype])
        for name, text in texts.items():
            with atomic_write(temporary / name, text=True) as file:
                file.write(text)
    return str(fields["model_type"])


def check_exportable(model: Any, name: str) -> None:
    """Raise ValueError for another model than the three classes, or an attached adapter; `name` begins the message."""
    if not isinstance(model, (GPT, TextEncoder, EncoderDecoderTransformer)):
        kinds = "GPT, TextEncoder or EncoderDecoderTransformer"
        raise ValueError(f"{name}: expected a {kinds}, got {type(model).__name__}")
    if any(isinstance(layer, AdaptedDense) for layer in model.layers()):
        raise ValueError(f"{name}: expected a model without an adapter: merge() or detach() it first")


@contextlib.contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a block a temporary folder; rename it to `folder` (missing or empty), or remove it after an exception."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}-{threading.get_ident()}.part")
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a dict atomically to an indented JSON file; replace an existing one."""
    with atomic_write(path, text=True) as file:
        json.dump(values, file, indent=2, ensure_ascii=False)
        file.write("\n")


# -------------------------------------------------------------------- weights
def export_tensors(
    model: Layer, family: Family, config: ModelConfig
) -> tuple[dict[str, tuple[int, ...]], Iterator[tuple[str, np.ndarray]]]:
    """Return shapes by Hugging Face name, and a lazy iterator of (name, values) in order; ValueError if not finite.

    Args:
        config: a result of `match_family`; biases and gains that the model lacks are exported as 0 and 1.

    Raises:
        ValueError: raised by the iterator, if a weight is not finite.
    """
    # Parameters that the model lacks come from here: biases of 0 and gains of 1.
    mapping = TensorMapping(family, new_model(config))
    parameters = dict(model.named_parameters())
    shapes = {hf_tensor.name: hf_tensor.shape for name in mapping.parameters for hf_tensor in mapping.hf_tensors(name)}

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, parameter in mapping.parameters.items():
            array = parameters.get(name, parameter).numpy()
            if not np.isfinite(array).all():
                raise ValueError(f"export: expected finite weights, {name} has NaN or infinity")
            yield from to_hf_tensors(mapping, name, array)

    shapes = stacked_shapes(family.stacks, shapes)
    return shapes, stacked_arrays(family.stacks, arrays(), shapes)


# -------------------------------------------------------------------- generation settings
def _special_token_ids(tokeniser: Any) -> dict[str, Any]:
    """Return {bos_token_id, eos_token_id} for config.json, None where the tokenizer has none."""
    bos, eos = None, None
    if isinstance(tokeniser, PretrainedTokeniser):
        bos, eos = tokeniser.bos, tokeniser.eos
    elif isinstance(tokeniser, BPETokeniser):
        bos = eos = tokeniser.special_tokens.get(END_OF_TEXT)
    return {"bos_token_id": bos, "eos_token_id": eos}


def _generation_fields(
    settings: GenerationSettings | None, special: dict[str, Any], tokeniser: Any, vocab_size: int
) -> dict[str, Any]:
    """Return generation_config.json's fields: ids, non-default settings; suppress_tokens: unused ids if few."""
    fields = {name: value for name, value in special.items() if value is not None}
    if settings is not None:
        defaults = asdict(GenerationSettings())
        fields |= {name: value for name, value in asdict(settings).items() if value != defaults[name]}
        if stop := list(fields.pop("stop_tokens", ())):
            fields["eos_token_id"] = stop[0] if len(stop) == 1 else stop
    n_unused = vocab_size - tokeniser.n_vocab if tokeniser is not None else 0
    if 0 < n_unused <= MAX_SUPPRESSED:
        fields["suppress_tokens"] = list(range(tokeniser.n_vocab, vocab_size))
    return fields


# -------------------------------------------------------------------- tokenizer
def _tokenizer_document(tokeniser: Any) -> tuple[str | None, str]:
    """Return tokenizer.json's text and the model_type to avoid: "qwen2", or "" if it splits as Qwen or is None.

    For models of type qwen2, `transformers` 5 ignores the pre-tokenizer of the document and uses Qwen's.
    """
    if tokeniser is None:
        return None, ""
    is_pretrained = isinstance(tokeniser, PretrainedTokeniser)
    document: str = tokeniser.to_tokenizer_json() if is_pretrained else to_tokenizer_json(tokeniser)
    pre_tokenizer = json.dumps(json.loads(document).get("pre_tokenizer"))
    return document, "" if json.dumps(SPLIT_PATTERNS["qwen"]) in pre_tokenizer else "qwen2"


def _tokenizer_config_fields(tokeniser: Any, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json: class, window, names of special tokens and any chat templates."""
    special: dict[str, str] = {}
    templates: dict[str, str] = {}
    if isinstance(tokeniser, PretrainedTokeniser):
        special, templates = tokeniser.special, tokeniser.chat_templates
    elif END_OF_TEXT in tokeniser.special_tokens:
        special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_window,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if isinstance(config, EncoderConfig) and config.token_types > 1:
        fields["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if list(templates) == ["default"]:
        fields["chat_template"] = templates["default"]
    elif templates:
        fields["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return fields


# -------------------------------------------------------------------- model card
def model_card(title: str, model: Any, model_type: str, card: Mapping[str, Any]) -> str:
    """Return the text of a README.md: YAML header, table of sizes and of `card`, and code that loads the model.

    Args:
        card: further names and values of the table.
    """
    config = model.config
    rows: dict[str, Any] = {
        "parameters": f"{model.n_parameters:,}",
        "architecture": model_type,
        "layers": config.n_layers,
        "width": config.embedding_dim,
        "attention heads": config.n_heads,
        "key-value heads": config.key_heads,
        "vocabulary size": f"{config.vocab_size:,}",
        "context window": f"{config.context_window:,} tokens",
        **card,
    }
    kinds: dict[type, tuple[str, str]] = {TextEncoder: ("AutoModel", "feature-extraction")}
    kinds[EncoderDecoderTransformer] = ("AutoModelForSeq2SeqLM", "text2text-generation")
    auto_class, pipeline = kinds.get(type(model), ("AutoModelForCausalLM", "text-generation"))
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- tricycle
---
# {_cell(title)}

Exported by Tricycle, a deep-learning library on NumPy and CuPy.

| | |
|:---|:---|
{table}

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{_cell(title)}")
tokenizer = AutoTokenizer.from_pretrained("{_cell(title)}")
```
"""


def _cell(value: Any) -> str:
    """Format a value as a cell of a Markdown table, floats with 4 digits, | escaped, double quotes made single."""
    text = f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return " ".join(text.replace("|", "\\|").replace('"', "'").split())
