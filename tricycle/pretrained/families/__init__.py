"""Model families by the model_type of config.json, and the construction of models from files.

`tricycle.pretrained.load` calls `build_model`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.size import min_n_weights
from tricycle.kernels.quantized import DTYPE_NAMES
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS
from tricycle.layers import Layer
from tricycle.pretrained.config_fields import ConfigFields, field_error
from tricycle.pretrained.families.bart import BART, MARIAN
from tricycle.pretrained.families.bert import BERT, ROBERTA
from tricycle.pretrained.families.cohere import COHERE
from tricycle.pretrained.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from tricycle.pretrained.families.falcon import FALCON, FALCON_TWO_NORMS
from tricycle.pretrained.families.family import Family, canonicalize_names, keeps_blocks, load_weights, new_model
from tricycle.pretrained.families.gemma import GEMMA2, GEMMA3
from tricycle.pretrained.families.gemma3n import GEMMA3N
from tricycle.pretrained.families.gpt2 import GPT2
from tricycle.pretrained.families.gpt_oss import GPT_OSS
from tricycle.pretrained.families.gptj import GPTJ
from tricycle.pretrained.families.granite import GRANITE, GRANITE_MOE
from tricycle.pretrained.families.granite_hybrid import GRANITE_HYBRID
from tricycle.pretrained.families.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from tricycle.pretrained.families.mamba2 import MAMBA2
from tricycle.pretrained.families.mixtures import MIXTRAL, OLMOE, QWEN3_MOE
from tricycle.pretrained.families.modernbert import MODERNBERT
from tricycle.pretrained.families.neox import NEOX
from tricycle.pretrained.families.opt import OPT
from tricycle.pretrained.families.phi import PHI
from tricycle.pretrained.families.phi3 import PHI3
from tricycle.pretrained.families.qwen3_next import QWEN3_NEXT
from tricycle.pretrained.families.smollm3 import SMOLLM3
from tricycle.pretrained.families.stablelm import STABLELM
from tricycle.pretrained.families.stacks import unstack
from tricycle.pretrained.families.t5 import T5, T5_GATED
from tricycle.pretrained.stored_model import StoredModel, StoredTensor, error_prefix
from tricycle.system.memory import available_memory, check_memory, format_gigabytes

ALL_FAMILIES: list[Family] = [
    *(LLAMA, MISTRAL, QWEN2, OLMO2, QWEN3, GPT2, NEOX, OPT, GEMMA2, GEMMA3, GEMMA3N, PHI, PHI3, STABLELM, SMOLLM3),
    *(GRANITE, COHERE, FALCON, FALCON_TWO_NORMS, GPTJ),
    *(MIXTRAL, QWEN3_MOE, OLMOE, GRANITE_MOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3),
    *(BERT, ROBERTA, MODERNBERT),
    *(T5, T5_GATED, BART, MARIAN),
    *(MAMBA2, QWEN3_NEXT, GRANITE_HYBRID),
]
FAMILIES: dict[str, Family] = {model_type: family for family in ALL_FAMILIES for model_type in family.model_types}
WEIGHT_FORMATS = ("float32", "auto", "stored", "exact", *DTYPE_NAMES)


def build_model(source: StoredModel, weights: str = "float32") -> Layer:
    """Build the model of files, load weights, dropout off; ValueError if unsupported, MemoryError if it does not fit.

    Args:
        weights: as of `pretrained.load`, but not "auto".

    Raises:
        ValueError: the family or a field is not supported, or the tensors differ from those of the config.
        MemoryError: the model does not fit into memory; names the required memory and the formats that would fit.
            This is checked before any tensor is read.
    """
    with error_prefix(f"{source.path}: "):
        family = find_family(source)
        if family.stacks:
            source = replace(source, tensors=unstack(family.stacks, canonicalize_names(family, source.tensors)))
        config = read_config(family, source)
        _check_memory(config, source, weights)
        model = new_model(config)
        load_weights(model, family, source, weights)
    return model.eval()


def find_family(source: StoredModel) -> Family:
    """Return the family of a source's model_type, with its `family_changes`; ValueError if it is not supported."""
    model_type = source.fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise field_error("model_type", f"one of {', '.join(FAMILIES)}", model_type)
    families = [family for family in ALL_FAMILIES if model_type in family.model_types]
    found = next((family for family in families if family.applies_to(source.fields)), families[0])
    return replace(found, **source.family_changes)


def read_config(family: Family, source: StoredModel) -> Any:
    """Convert source.fields to a family's config; ValueError if unsupported or too large for the tensors.

    Raises:
        ValueError: a field is invalid or not supported, or the config needs more weights than the files contain.
    """
    fields = ConfigFields(source.fields)
    is_mxfp4 = family.stacks and fields.section("quantization_config").get("quant_method") == "mxfp4"
    if fields.get("quantization_config") is not None and not is_mxfp4:
        raise ValueError("expected weights of 16 or 32 bits, got quantization_config")
    text_fields = ConfigFields({**fields.values, **fields.section("text_config")})
    if family.config_class is not EncoderConfig:
        text_fields.require("is_causal", True)
    for place in ("num_hidden_layers", "n_layer"):
        n_layers = text_fields.get(place, 1)
        if isinstance(n_layers, int) and n_layers > len(source.tensors):
            # checked here, before anything is allocated for each layer
            raise field_error(place, f"at most {len(source.tensors)}, the number of tensors", n_layers)
    config = family.to_config(fields)
    n_mixtures = getattr(config, "n_mixture_layers", config.n_layers)
    if n_mixtures * config.n_experts > len(source.tensors):  # each expert has more than one
        raise field_error("the number of experts", f"at most {len(source.tensors)} in all layers", config.n_experts)
    minimum = min_n_weights(config)
    n_elements = sum(math.prod(tensor.shape) for tensor in source.tensors.values())
    if minimum > 2 * n_elements + 2**24:
        # A malicious config could exhaust the memory. Smaller differences are reported in detail by `load_weights`.
        raise ValueError(f"the config asks for at least {minimum:,} parameters, the tensors have {n_elements:,}")
    return config


# -------------------------------------------------------------------- memory
def _check_memory(config: Any, source: StoredModel, weights: str) -> None:
    """Raise MemoryError, as described at `build_model`, if a model does not fit into the free memory."""
    free, needed = available_memory(), required_memory(config, source, weights)
    if free is None or needed <= free:
        return
    smaller = {kind: required_memory(config, source, kind) for kind in ("bfloat16", "int8", "stored")}
    fitting = [f"--weights {kind} ({format_gigabytes(size)})" for kind, size in smaller.items() if size <= free]
    minimum = min(smaller, key=lambda kind: smaller[kind])
    otherwise = f"the smallest, --weights {minimum}, needs {format_gigabytes(smaller[minimum])}"
    advice = f"{' or '.join(fitting)} would fit" if fitting else otherwise
    check_memory(needed, f"{source.path}: the model in --weights {weights}", advice)


def required_memory(config: Any, source: StoredModel, weights: str) -> int:
    """Return the least bytes to load a model as `weights`: all tensors, or the largest with copies if that is more."""
    tensors = [
        tensor
        for name, tensor in source.tensors.items()
        if len(tensor.shape) > 0 and not (name.endswith("lm_head.weight") and getattr(config, "tied", False))
    ]
    total, peak = 0, 0
    for tensor in tensors:
        n_elements, element_bytes = math.prod(tensor.shape), _bytes_per_element(tensor, weights)
        temporary_bytes = 0
        if tensor.dtype_name not in BLOCK_FORMATS or element_bytes in (1, 2, 4):
            # Blocks are converted to float32 when they are read, and int8 is computed from float32.
            temporary_bytes = 4 * (tensor.dtype_name not in ("F32", "F16", "BF16")) + 4 * (element_bytes == 1)
        total += int(n_elements * element_bytes)
        peak = max(peak, int(n_elements * (element_bytes + temporary_bytes)))
    return max(total, peak)  # the largest is loaded first, into empty memory


def _bytes_per_element(tensor: StoredTensor, weights: str) -> float:
    """Return the bytes of an element in memory in the format `weights`, fractional for quantized blocks."""
    if len(tensor.shape) < 2 or weights == "float32":
        return 4
    if tensor.read_blocks and keeps_blocks(weights, {tensor.dtype_name}):
        block = BLOCK_FORMATS[tensor.dtype_name]
        return block.n_bytes / block.n_values
    if weights in ("stored", "exact"):
        return {"F16": 2, "BF16": 2}.get(tensor.dtype_name, 4)
    return 1 if weights == "int8" else 2
