"""Models in Hugging Face's form, for `transformers` and all that reads what it writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.bpe import END_OF_TEXT
from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.model import ModelConfig
from tricycle.finetuning.lora import AdaptedDense
from tricycle.models import GPT, BlockStack
from tricycle.pretrained.config_equivalence import differing_fields, effective_fields
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families import ALL_FAMILIES
from tricycle.pretrained.families.bert import uninitialized_encoder
from tricycle.pretrained.families.family import Family, TensorMapping, to_hf_tensors, uninitialized_gpt
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.hf_folder import CONFIG, GENERATION, WEIGHTS
from tricycle.pretrained.safetensors_weights import write_tensors
from tricycle.pretrained.stored_model import error_prefix
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.pretrained.tokenizer_json import SPLIT_PATTERNS, to_tokenizer_json
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.system.files import atomic_write
from tricycle.tokeniser import BPETokeniser

KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# A family that always has these is told that they do nothing: biases of 0, gains of 1.
NEUTRAL = ("bias", "qkv_bias", "output_bias", "mlp_bias", "head_bias", "qk_norm_gain")
MOST_SUPPRESSED = 10_000  # ids without a token that generation_config.json lists


# -------------------------------------------------------------------- which family
def family_of_config(config: ModelConfig, avoided: str = "") -> tuple[Family, dict[str, Any], ModelConfig]:
    """The family of `transformers` that computes what this config does, its fields, and what these mean.

    The config that comes back may have more biases and gains, which then do nothing; the family with the fewest is
    taken.

    Args:
        avoided: a model_type that is not to be taken.

    Raises:
        ValueError: there is none; names the fields that are in the way.
    """
    with error_prefix("no family of transformers computes what this model does; "):
        return best_of(config, [family for family in ALL_FAMILIES if family.model_types[0] != avoided])


def best_of(config: ModelConfig, families: Iterable[Family]) -> tuple[Family, dict[str, Any], ModelConfig]:
    """The same among some families.

    Raises:
        ValueError: there is none; names what is in the way of the nearest.
    """
    fitting: list[tuple[int, Family, dict[str, Any], ModelConfig]] = []
    nearest: tuple[int, str] = (10**6, "")
    if config.activation == "swiglu":  # the same in their words
        config = replace(config, activation="swish", gated=True, hidden_size=config.mlp_width)
    new_model = uninitialized_encoder if isinstance(config, EncoderConfig) else uninitialized_gpt
    for family in families:
        kind = family.model_types[0]
        if family.new_model is not new_model:
            continue
        try:
            fields = {"model_type": kind, **family.to_fields(config)}
            back = family.to_config(ConfigFields(fields))
        except ValueError as error:  # it says itself what it cannot say
            nearest = min(nearest, (99, f"{kind}: {error}"))
            continue
        differences = differing_fields(config, back)
        ours, theirs = effective_fields(config), effective_fields(back)
        neutral = {name for name in NEUTRAL if not ours[name] and theirs[name]}
        in_the_way = [name for name in differences if name not in neutral]
        if not in_the_way:
            fitting.append((len(differences), family, fields, back))
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in in_the_way)
        nearest = min(nearest, (len(in_the_way), f"in the way of {kind}: {values}"))
    if not fitting:
        raise ValueError(nearest[1])
    return min(fitting, key=lambda fit: fit[0])[1:]


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
    """Write a model so that `transformers` loads it: config.json, model.safetensors, generation_config.json, the
    tokeniser's files and a README.md. The folder is there whole or not at all.

    Args:
        model: a `GPT` or a `TextEncoder`.
        tokeniser: our own or another; None leaves its files out.
        folder: a new or an empty one.
        card: what was measured, and whatever else is to stand in the README's table: names and values.
        generation: how the model is to write.
        dtype: of the weights in the file: float32, float16 or bfloat16.

    Returns:
        the family's model_type.

    Raises:
        FileExistsError: there is something in the folder.
        ValueError: no family can express the config (names the fields), a weight is not finite, or a tokeniser with
            more tokens than the model.
    """
    if not isinstance(model, (GPT, TextEncoder)):
        raise ValueError(f"export: expected a GPT or a TextEncoder, got {type(model).__name__}")
    if any(isinstance(layer, AdaptedDense) for layer in model.layers()):
        raise ValueError("export: expected a model without an adapter on it: merge() it, or detach()")
    if dtype not in KINDS:
        raise ValueError(f"export: expected dtype to be one of {', '.join(KINDS)}, got {dtype!r}")
    n_known = model.config.vocab_size
    if tokeniser is not None and tokeniser.n_vocab > n_known:
        raise ValueError(f"export: expected a tokeniser of at most {n_known} tokens, got {tokeniser.n_vocab}")
    document, avoided = _tokenizer_document(tokeniser)
    family, fields, back = family_of_config(model.config, avoided)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder}: expected a folder that is new or empty")
    special = _special_ids(tokeniser)
    files = {CONFIG: {"architectures": [family.architecture], **fields, **special, "torch_dtype": dtype}}
    texts = {"README.md": model_card(folder.name, model, fields["model_type"], card or {})}
    if isinstance(model, GPT):
        files[GENERATION] = _generation_fields(generation, special, tokeniser, n_known)
    if document is not None:
        files["tokenizer_config.json"] = _tokeniser_fields(tokeniser, model.config)
        texts["tokenizer.json"] = document
    with _whole_folder(folder) as place:
        for name, values in files.items():
            write_json(place / name, values)
        with atomic_write(place / WEIGHTS) as file:
            write_tensors(file, *weights_of(model, family, back), KINDS[dtype])
        for name, text in texts.items():
            with atomic_write(place / name, text=True) as file:
                file.write(text)
    return str(fields["model_type"])


@contextlib.contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A folder beside it that takes its name once the block has ended well, and is gone where it has not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.with_name(f".{folder.name}.{os.getpid()}-{threading.get_ident()}.part")
    place.mkdir()
    try:
        yield place
        if folder.exists():
            folder.rmdir()
        place.rename(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file as people read it, whole or not at all."""
    with atomic_write(path, text=True) as file:
        json.dump(values, file, indent=2, ensure_ascii=False)
        file.write("\n")


# -------------------------------------------------------------------- weights
def weights_of(
    model: BlockStack, family: Family, config: ModelConfig
) -> tuple[dict[str, tuple[int, ...]], Iterator[tuple[str, np.ndarray]]]:
    """The shapes of a model's tensors by a family's names, and the values, one tensor after another in that order.

    Args:
        config: as `best_of` gives it: what the model has not got of it is written as biases of 0 and gains of 1.

    Raises:
        ValueError: a weight is not finite; when its turn comes.
    """
    # Parameters that the model lacks come from here: biases of 0 and gains of 1.
    mapping = TensorMapping(family, family.new_model(config))
    own = dict(model.named_parameters())
    shapes = {hf_tensor.name: hf_tensor.shape for name in mapping.parameters for hf_tensor in mapping.hf_tensors(name)}

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, parameter in mapping.parameters.items():
            array = own.get(name, parameter).numpy()
            if not np.isfinite(array).all():
                raise ValueError(f"export: expected finite weights, {name} has NaN or infinity")
            yield from to_hf_tensors(mapping, name, array)

    return shapes, arrays()


# -------------------------------------------------------------------- how it writes
def _special_ids(tokeniser: Any) -> dict[str, Any]:
    """What config.json says of the ends of texts."""
    bos, eos = None, None
    if isinstance(tokeniser, PretrainedTokeniser):
        bos, eos = tokeniser.bos, tokeniser.eos
    elif isinstance(tokeniser, BPETokeniser):
        bos = eos = tokeniser.special_tokens.get(END_OF_TEXT)
    return {"bos_token_id": bos, "eos_token_id": eos}


def _generation_fields(
    settings: GenerationSettings | None, special: dict[str, Any], tokeniser: Any, n_known: int
) -> dict[str, Any]:
    """The fields of generation_config.json; ids that stand for no token are never to be drawn."""
    fields = {name: value for name, value in special.items() if value is not None}
    if settings is not None:
        names = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        usual = GenerationSettings()
        fields |= {name: getattr(settings, name) for name in names if getattr(settings, name) != getattr(usual, name)}
        stop = list(settings.stop_tokens)
        if stop:
            fields["eos_token_id"] = stop[0] if len(stop) == 1 else stop
    n_unknown = n_known - tokeniser.n_vocab if tokeniser is not None else 0
    if 0 < n_unknown <= MOST_SUPPRESSED:
        fields["suppress_tokens"] = list(range(tokeniser.n_vocab, n_known))
    return fields


# -------------------------------------------------------------------- its tokeniser
def _tokenizer_document(tokeniser: Any) -> tuple[str | None, str]:
    """Return its tokenizer.json, and a model_type with which `transformers` 5 would not read it: that makes a tokeniser
    of Qwen's kind of whatever is beside a model of type qwen2.
    """
    if tokeniser is None:
        return None, ""
    is_other = isinstance(tokeniser, PretrainedTokeniser)
    document: str = tokeniser.to_tokenizer_json() if is_other else to_tokenizer_json(tokeniser)
    cuts = json.dumps(json.loads(document).get("pre_tokenizer"))
    return document, "" if json.dumps(SPLIT_PATTERNS["qwen"]) in cuts else "qwen2"


def _tokeniser_fields(tokeniser: Any, config: ModelConfig) -> dict[str, Any]:
    """Of tokenizer_config.json."""
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


# -------------------------------------------------------------------- its card
def model_card(title: str, model: BlockStack, model_type: str, card: Mapping[str, Any]) -> str:
    """A README.md about a model: what it is, what was measured, how it is used.

    Args:
        card: further names and values of its table.
    """
    config = model.config
    rows: dict[str, Any] = {
        "parameters": f"{model.n_parameters:,}",
        "kind": model_type,
        "layers": config.n_layers,
        "width": config.embedding_dim,
        "heads": f"{config.n_heads}, {config.key_heads} of keys and values",
        "tokens it knows": f"{config.vocab_size:,}",
        "context": f"{config.context_window:,} tokens",
        **card,
    }
    writes = isinstance(model, GPT)
    auto = "AutoModelForCausalLM" if writes else "AutoModel"
    table = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if writes else "feature-extraction"}
tags:
- tricycle
---
# {_cell(title)}

Written by Tricycle, which trains and runs models on NumPy and CuPy.

| | |
|:---|:---|
{table}

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{_cell(title)}")
tokeniser = AutoTokenizer.from_pretrained("{_cell(title)}")
```
"""


def _cell(value: Any) -> str:
    """A value in one cell of a table."""
    text = f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return " ".join(text.replace("|", "\\|").replace('"', "'").split())
