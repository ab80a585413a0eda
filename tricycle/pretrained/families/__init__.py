"""Families of models, by what config.json calls them, and the way from files to a model."""

from __future__ import annotations

import math
from typing import Any

from tricycle.configs.size import min_n_weights
from tricycle.kernels.quantized import DTYPE_NAMES
from tricycle.layers import Layer
from tricycle.pretrained.families.bert import BERT, ROBERTA
from tricycle.pretrained.families.family import Family, fill
from tricycle.pretrained.families.gemma import GEMMA2, GEMMA3
from tricycle.pretrained.families.gpt2 import GPT2
from tricycle.pretrained.families.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from tricycle.pretrained.families.neox import NEOX
from tricycle.pretrained.families.opt import OPT
from tricycle.pretrained.families.phi import PHI
from tricycle.pretrained.fields import Fields, wrong
from tricycle.pretrained.source import Source, StoredTensor, error_prefix
from tricycle.system.memory import check_memory, free_memory, gigabytes

ALL: list[Family] = [LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GPT2, NEOX, OPT, GEMMA2, GEMMA3, PHI, BERT, ROBERTA]
FAMILIES: dict[str, Family] = {model_type: family for family in ALL for model_type in family.model_types}
Q8_0_BYTES = 34 / 32  # a number, with its share of its block's scale
KINDS_OF_WEIGHTS = ("float32", "stored", *DTYPE_NAMES)


def build(source: Source, weights: str = "float32") -> Layer:
    """The model that lies in files.

    Args:
        weights: as of `pretrained.load`.

    Raises:
        ValueError: a family or a field that is not known, weights that are not those of the config; in one line.
        MemoryError: they do not fit; says how much they need, and kept in which other way they would fit. Nothing of
            them has been read then.
    """
    with error_prefix(f"{source.path}: "):
        family = family_of(source)
        config = config_of(family, source)
        _check_memory(config, source, weights)
        model = family.new_model(config)
        fill(model, family, source, weights)
    return model.eval()


def family_of(source: Source) -> Family:
    """Return the family of its model_type; raise ValueError where there is none."""
    model_type = source.fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise wrong("model_type", f"one of {', '.join(FAMILIES)}", model_type)
    return FAMILIES[model_type]


def config_of(family: Family, source: Source) -> Any:
    """Their fields as ours, once it is clear that the weights are there for them.

    Raises:
        ValueError: a field that is wrong or not known here, or that asks for more weights than there are.
    """
    fields = Fields(source.fields)
    if fields.get("quantization_config") is not None:
        raise ValueError("expected weights of 16 or 32 bits, got quantization_config")
    for place in ("num_hidden_layers", "n_layer"):
        n_layers = Fields(fields.section("text_config")).get(place, fields.get(place, 1))
        if isinstance(n_layers, int) and n_layers > len(source.tensors):  # seen before anything is made for each layer
            raise wrong(place, f"at most {len(source.tensors)}, as many as there are tensors", n_layers)
    config = family.to_config(fields)
    least = min_n_weights(config)
    n_numbers = sum(math.prod(tensor.shape) for tensor in source.tensors.values())
    if least > 2 * n_numbers + 2**24:  # a crafted config may ask for more memory than there is; others are told more
        raise ValueError(f"the config asks for at least {least:,} numbers, the tensors have {n_numbers:,}")
    return config


# -------------------------------------------------------------------- memory
def _check_memory(config: Any, source: Source, weights: str) -> None:
    """Raise MemoryError, as of `build`, where a model does not fit."""
    free, needed = free_memory(), memory_for(config, source, weights)
    if free is None or needed <= free:
        return
    smaller = {kind: memory_for(config, source, kind) for kind in ("bfloat16", "int8", "stored")}
    fitting = [f"--weights {kind} ({gigabytes(size)})" for kind, size in smaller.items() if size <= free]
    least = min(smaller, key=lambda kind: smaller[kind])
    otherwise = f"the least, --weights {least}, needs {gigabytes(smaller[least])}"
    advice = f"{' or '.join(fitting)} would fit" if fitting else otherwise
    check_memory(needed, f"{source.path}: the model in --weights {weights}", advice)


def memory_for(config: Any, source: Source, weights: str) -> int:
    """How many bytes it takes at least to load a model, its weights being kept as `pretrained.load` says."""
    tensors = [
        tensor
        for name, tensor in source.tensors.items()
        if len(tensor.shape) > 0 and not (name.endswith("lm_head.weight") and getattr(config, "tied", False))
    ]
    kept, most = 0, 0
    for tensor in tensors:
        n_numbers, each = math.prod(tensor.shape), _bytes_a_number(tensor, weights)
        # blocks become float32 numbers when they are read, and int8 is made of such
        more = 0 if each == Q8_0_BYTES else 4 * (tensor.kind not in ("F32", "F16", "BF16")) + 4 * (each == 1)
        kept += int(n_numbers * each)
        most = max(most, int(n_numbers * (each + more)))
    return max(kept, most)  # the largest is made first, when there is nothing else


def _bytes_a_number(tensor: StoredTensor, weights: str) -> float:
    if len(tensor.shape) < 2 or weights == "float32":
        return 4
    if weights == "stored":
        return {"F16": 2, "BF16": 2, "Q8_0": Q8_0_BYTES}.get(tensor.kind, 4)
    if weights == "int8":
        return Q8_0_BYTES if tensor.blocks else 1
    return 2
