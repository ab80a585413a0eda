"""Conversion of a config to metadata of a GGUF file, the inverse of `gguf_config`.

`match_architecture` reads what it would write with the functions of `gguf_config`. A field that an architecture of
llama.cpp cannot express has another value in the result, so such a config is rejected, and this module does not list
what llama.cpp supports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.configs.model import ModelConfig
from tricycle.latent_attention import LatentConfig
from tricycle.multi_stream.decoder import MultiStreamConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import (
    activation_name,
    field_error,
    rotary_scaling_fields,
    size_fields,
)
from tricycle.pretrained.export import match_family
from tricycle.pretrained.families import FAMILIES
from tricycle.pretrained.families.family import Family
from tricycle.pretrained.families.stacks import Stack
from tricycle.pretrained.gguf_config import (
    CONFIG_READERS,
    GEMMA3N_METADATA,
    GEMMA3N_OWN_KEYS,
    MODERN_BERT_ACTIVATIONS,
    SIZE_METADATA,
)
from tricycle.pretrained.gguf_file import GGUFFile, GGUFTensorInfo
from tricycle.pretrained.gguf_model_metadata import (
    WITH_ROPE_DIVISORS,
    ModelMetadata,
    llama3_divisors,
    yarn_attention_factor,
)
from tricycle.pretrained.gguf_names import TENSOR_MAPPINGS

Metadata = dict[str, Any]
MIN_SPARSE_WIDTH = 2**13  # of the MLPs of Gemma 3n E2B
_FLOAT32_ROUNDING = 2.0**-23  # relative: metadata have floats of 32 bits


def match_architecture(config: ModelConfig) -> tuple[str, Family, ModelConfig]:
    """Return a config's llama.cpp architecture, family, and config (maybe with more biases, gains); ValueError if none.

    The latter config may have additional biases and gains, as in `export.match_family`. The family has the names of
    tensors in transformers that `gguf_names.TENSOR_MAPPINGS` converts.

    Raises:
        ValueError: no architecture computes the same; names the unsupported fields of the closest one.
    """
    families = [_as_family(name, family) for name in METADATA_WRITERS for family in TENSOR_MAPPINGS[name].families]
    family, _, converted = match_family(config, families, _FLOAT32_ROUNDING)
    return family.model_types[0], family, converted


def architecture_metadata(architecture: str, config: ModelConfig) -> Metadata:
    """Return the metadata of an architecture, with its name as the prefix of the keys.

    Args:
        config: a result of `match_architecture`, where fields that may be integers or floats are floats.
    """
    values = size_fields(config, **SIZE_METADATA) | METADATA_WRITERS[architecture](config)
    return {f"{architecture}.{name}": value for name, value in values.items()}


def rope_divisors(config: ModelConfig) -> np.ndarray | None:
    """Return float32 RoPE divisors: (head_size / 2,) for Llama 3's scaling, (2, pairs) for LongRoPE, None for others.

    The two rows for LongRoPE are for short and for long texts.
    """
    if config.positions == "rotary" and config.rotary_scaling == "longrope":
        return np.reshape(np.array(config.rotary_divisors, np.float32), (2, -1))
    if config.positions != "rotary" or config.rotary_scaling != "llama3":
        return None
    n_pairs = config.channels_per_head // 2
    frequencies = config.rotary_base ** (-np.arange(n_pairs, dtype=np.float64) / n_pairs)
    bounds = config.rotary_low_frequency, config.rotary_high_frequency
    divisors = llama3_divisors(frequencies, config.rotary_factor, config.rotary_original_window, *bounds)
    return divisors.astype(np.float32)


# -------------------------------------------------------------------- reading what would be written
def _as_family(architecture: str, family: Family) -> Family:
    """Return a copy of the family whose fields are only those that a GGUF file of the architecture can hold.

    The matrices of all experts are one tensor, as are others that are numbered outside of blocks. A family without
    names of an MLP has experts in all of its models.
    """
    family = replace(family, **TENSOR_MAPPINGS[architecture].family_changes)
    layers = [name for names in family.names.values() for name in names if ".M." in name or name.endswith(".N")]
    stacks = {f"{name}.{kind}": Stack(f"{name}.{kind}") for name in layers for kind in ("weight", "bias")}
    has_experts = any(".M." in name for name in layers)
    kinds = {has_experts, has_experts and "blocks.N.mlp.up" not in family.names}  # with experts, or without
    return replace(
        family,
        model_types=(architecture,),
        to_fields=partial(_read_back, architecture),
        to_config=lambda fields: FAMILIES[fields.get("model_type")].to_config(fields),
        stacks=stacks,
        applies_to=lambda fields: family.applies_to(fields) and ("num_experts_per_tok" in fields) in kinds,
    )


def _read_back(architecture: str, config: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields that reading a GGUF file of a config would give; ValueError if not valid."""
    tensors = {name: GGUFTensorInfo(name, "F32", shape, 0, 0) for name, shape in _described_tensors(config).items()}
    file = GGUFFile(Path("metadata"), architecture_metadata(architecture, config), tensors)
    divisors = rope_divisors(config) if architecture in WITH_ROPE_DIVISORS else None
    fields = CONFIG_READERS[architecture](ModelMetadata(file, architecture), divisors)
    if divisors is not None:  # several scalings have these divisors, and the reader chooses one of them
        fields["rope_scaling"] = rotary_scaling_fields(config)
    return fields


def _described_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of those tensors that `gguf_config` reads fields from, by name, for a config."""
    width = config.embedding_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, width)}
    if not config.tied:
        shapes["output.weight"] = (config.vocab_size, width)
    if config.positions == "learned":
        shapes["position_embd.weight"] = (config.context_window, width)
    if isinstance(config, EncoderConfig) and config.token_types:
        shapes["token_types.weight"] = (config.token_types, width)
    if isinstance(config, EncoderDecoderConfig) and config.is_gated:
        shapes["enc.blk.0.ffn_gate.weight"] = (config.mlp_width, width)
    if isinstance(config, MultiStreamConfig):
        shapes["per_layer_token_embd.weight"] = (config.per_layer_rows, config.n_layers * config.per_layer_size)
    if config.parallel and not config.shared_norm:
        shapes["blk.0.attn_norm_2.weight"] = (width,)
    if not config.shared_norm:
        shapes["blk.0.ffn_norm.weight"] = (width,)
    has_output_bias = has_bias(config, "output")
    layer = min(getattr(config, "attention_layers", ()), default=0)
    # An architecture with biases of the output matrix also has those of queries, keys and values.
    if has_bias(config, "qkv") or has_output_bias:
        shapes[f"blk.{layer}.attn_q.bias"] = (config.n_heads * config.channels_per_head,)
    if has_output_bias:
        shapes[f"blk.{layer}.attn_output.bias"] = (width,)
    if has_bias(config, "mlp"):
        shapes["blk.0.ffn_up.bias"] = (config.mlp_width,)
    return shapes


# -------------------------------------------------------------------- architectures
def _rope(config: ModelConfig) -> Metadata:
    """Return the metadata of rotary positions: channels, base, and of linear scaling, YaRN or LongRoPE, if set.

    The bounds of YaRN are not written, as llama.cpp always has 1 and 32 in these architectures.
    """
    metadata: Metadata = {
        "rope.dimension_count": int(config.channels_per_head * config.rotary_fraction),
        "rope.freq_base": config.rotary_base,
    }
    if config.rotary_scaling == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rotary_factor}
    if config.rotary_scaling == "longrope":
        metadata["rope.scaling.original_context_length"] = config.rotary_original_window
        metadata["rope.scaling.attn_factor"] = config.rotary_attention_factor
    if config.rotary_scaling == "yarn":
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": config.rotary_factor,
            "rope.scaling.original_context_length": config.rotary_original_window,
            "rope.scaling.attn_factor": config.rotary_attention_factor / yarn_attention_factor(config.rotary_factor),
        }
    return metadata


def _experts(config: ModelConfig) -> Metadata:
    """Return the metadata of experts: their number, active ones and width; {} without experts."""
    if not config.n_experts:
        return {}
    return {
        "expert_count": config.n_experts,
        "expert_used_count": config.n_active_experts,
        "expert_feed_forward_length": config.mlp_width,
    }


def _like_llama(config: ModelConfig) -> Metadata:
    """Return metadata of llama, qwen, olmo2, mixtures: key heads, RMS epsilon, RoPE, experts, unusual head sizes."""
    head_size = config.channels_per_head
    metadata: Metadata = {
        **_experts(config),
        "attention.head_count_kv": config.key_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        **_rope(config),
        # These architectures rotate all channels.
        "rope.dimension_count": head_size,
    }
    if head_size * config.n_heads != config.embedding_dim:
        metadata |= {"attention.key_length": head_size, "attention.value_length": head_size}
    return metadata


def _granite(config: ModelConfig) -> Metadata:
    """Return Llama's metadata and Granite's factors of scores, embedding, residuals and logits (inverse)."""
    return _like_llama(config) | {
        "attention.scale": config.score_scale or config.channels_per_head**-0.5,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
    }


def _mixers(config: Any) -> Metadata:
    """Return the metadata of Mamba layers."""
    return {
        "ssm.conv_kernel": config.conv_width,
        "ssm.inner_size": config.inner_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.mamba_heads,
        "ssm.group_count": config.n_groups,
    }


def _mamba2(config: ModelConfig) -> Metadata:
    """Return what Mamba-2 adds to the size metadata: norm epsilon, SSM sizes, and 0 for heads and MLP width."""
    sizes = {"feed_forward_length": 0, "attention.head_count": 0}
    return {**sizes, "attention.layer_norm_rms_epsilon": config.norm_eps, **_mixers(config)}


def _granite_hybrid(config: Any) -> Metadata:
    """Return the metadata of Granite 4: 0 key heads in Mamba layers, and whether attention has RoPE."""
    metadata = _granite(config) | _mixers(config)
    if config.n_experts:
        metadata["expert_shared_feed_forward_length"] = config.shared_size
    has_attention = [layer in config.attention_layers for layer in range(config.n_layers)]
    metadata["attention.head_count_kv"] = [config.key_heads * present for present in has_attention]
    return metadata | {"rope.scaling.finetuned": config.positions == "rotary"}


def _qwen3next(config: Any) -> Metadata:
    """Return Phi-3's metadata, sizes of linear attention, interval or list of layers; ValueError without experts."""
    if not config.n_experts:
        raise field_error("n_experts", "above 0", 0)
    layers = sorted({*config.attention_layers})
    interval = min(layers, default=config.n_layers) + 1
    metadata = _phi3(config) | {
        "ssm.conv_kernel": config.conv_width,
        "ssm.inner_size": config.inner_size,
        "ssm.state_size": config.linear_key_size,
        "ssm.time_step_rank": config.n_linear_heads,
        "ssm.group_count": config.n_linear_key_heads,
    }
    if config.shared_size:
        metadata["expert_shared_feed_forward_length"] = config.shared_size
    if layers == [*range(interval - 1, config.n_layers, interval)]:
        return metadata | {"full_attention_interval": interval}
    is_linear = [layer not in layers for layer in range(config.n_layers)]
    return metadata | {"attention.recurrent_layers": is_linear}


def _gemma2(config: ModelConfig) -> Metadata:
    """Return Llama's metadata, and those of the soft caps and the window that are set."""
    caps = {"attn_logit_softcapping": config.score_cap, "final_logit_softcapping": config.logit_cap}
    windows = {"attention.sliding_window": config.window}
    return {**_like_llama(config), **{name: value for name, value in {**caps, **windows}.items() if value}}


def _gemma3(config: ModelConfig) -> Metadata:
    """Return Gemma 2's metadata without the score cap; with a window, its pattern and the local RoPE base."""
    full_layers = [layer for layer in range(config.n_layers) if config.window_size(layer) is None]
    metadata = _gemma2(config)
    metadata.pop("attn_logit_softcapping", None)
    if len(full_layers) == config.n_layers:
        metadata.pop("attention.sliding_window", None)
        return metadata
    return metadata | {
        "attention.sliding_window_pattern": 1 + (full_layers[0] if full_layers else config.n_layers),
        "rope.freq_base_swa": config.rotary_local_base or config.rotary_base,
    }


def _gemma3n(config: MultiStreamConfig) -> Metadata:
    """Return Gemma 3's metadata, with a window also if no layer uses it; ValueError for narrow MLPs.

    For the variance of an MLP's F gates, by which the smaller gates are set to 0, transformers divides by F, and
    llama.cpp by F - 1. Its deviation is larger by 1 / (2 F), a relative 6e-5 in the smallest published model.
    """
    if config.mlp_width < MIN_SPARSE_WIDTH:
        expected = f"at least {MIN_SPARSE_WIDTH}, as llama.cpp computes another variance of the gates of an MLP"
        raise field_error("hidden_size", expected, config.mlp_width)
    window = {"attention.sliding_window": config.context_window, "attention.sliding_window_pattern": 1}
    constants = {key: values[0] for key, values in GEMMA3N_METADATA.items()}
    return {
        **window,
        **_gemma3(config),
        **constants,
        "attention.shared_kv_layers": max(0, config.n_layers - GEMMA3N_OWN_KEYS),
    }


def _gpt_oss(config: ModelConfig) -> Metadata:
    """Return Llama's metadata and the sliding window, by default the context window."""
    return _like_llama(config) | {"attention.sliding_window": config.window or config.context_window}


def _layer_norm(config: ModelConfig) -> Metadata:
    """Return the metadata of layer norm: its epsilon."""
    return {"attention.layer_norm_epsilon": config.norm_eps}


def _neox(config: ModelConfig) -> Metadata:
    """Return GPT-NeoX's metadata: norm epsilon, RoPE, and whether attention and MLP are parallel."""
    return {**_layer_norm(config), **_rope(config), "use_parallel_residual": config.parallel}


def _phi2(config: ModelConfig) -> Metadata:
    """Return Phi-2's metadata: norm epsilon, RoPE, and the number of key heads."""
    return {**_layer_norm(config), **_rope(config), "attention.head_count_kv": config.key_heads}


def _phi3(config: ModelConfig) -> Metadata:
    """Return Llama's metadata, with RoPE on a fraction of the channels."""
    return _like_llama(config) | _rope(config)


def _command_r(config: ModelConfig) -> Metadata:
    """Return Command R's metadata: norm epsilon, RoPE, key heads, and the logit scale."""
    return _phi2(config) | {"logit_scale": config.logit_scale}


def _bert(config: ModelConfig) -> Metadata:
    """Return BERT's metadata: norm epsilon, and attention that is not causal."""
    return {**_layer_norm(config), "attention.causal": False}


def _modern_bert(config: EncoderConfig) -> Metadata:
    """Return BERT's metadata, the activation, RoPE's bases, and any window with the period of layers without it."""
    full_layers = [layer for layer in range(config.n_layers) if config.window_size(layer) is None]
    activation = activation_name(config.activation)
    metadata = _bert(config) | {
        **({"hidden_activation": activation} if activation in MODERN_BERT_ACTIVATIONS else {}),
        "rope.scaling.type": "none",
        "rope.freq_base": config.rotary_base,
        "rope.freq_base_swa": config.rotary_local_base or config.rotary_base,
    }
    if len(full_layers) < config.n_layers:
        metadata["attention.sliding_window"] = config.window
        metadata["attention.sliding_window_pattern"] = [*full_layers, config.n_layers, config.n_layers][1]
    return metadata


def _t5(config: EncoderDecoderConfig) -> Metadata:
    """Return T5's metadata; ValueError for tied embeddings and deeper decoders, with which llama.cpp fails.

    llama-cpp-python 0.3.36 does not load a decoder that has more layers than its encoder.
    """
    if config.tied:
        expected = f"False, as llama.cpp does not multiply the logits of tied embeddings by {config.output_scale:.3g}"
        raise field_error("tied", expected, True)
    n_decoder_layers = config.n_decoder_layers or config.n_layers
    if n_decoder_layers > config.n_layers:
        raise field_error("n_decoder_layers", f"at most n_layers, {config.n_layers}", n_decoder_layers)
    return {
        "context_length": 512,  # of all T5 in transformers; llama.cpp allocates memory for sources of this length
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.channels_per_head,
        "attention.value_length": config.channels_per_head,
        "attention.relative_buckets_count": config.relative_buckets,
        "decoder_block_count": n_decoder_layers,
        "decoder_start_token_id": config.start_token,
    }


def _deepseek2(config: LatentConfig) -> Metadata:
    """Return the metadata of newer files, in which each token has one key, of its latent and its rotated channels.

    A query rank of 0 is written, because llama.cpp expects the key unless it recognizes a model without one.
    """
    metadata: Metadata = {
        **_experts(config),
        **_rope(config),
        "rope.dimension_count": config.rotary_size,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.query_rank,
        "attention.kv_lora_rank": config.latent_size,
        "attention.key_length": config.latent_size + config.rotary_size,
        "attention.value_length": config.latent_size,
        "attention.key_length_mla": config.channels_per_head,
        "attention.value_length_mla": config.value_size,
        "leading_dense_block_count": config.n_dense_layers,
        "expert_feed_forward_length": config.expert_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.expert_scale,
        "expert_weights_norm": config.normalize_experts,
        "expert_gating_func": 2 if config.sigmoid_router else 1,
    }
    if config.n_active_groups < config.n_groups:
        metadata |= {"expert_group_count": config.n_groups, "expert_group_used_count": config.n_active_groups}
    if config.rotary_scaling == "yarn":
        metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * config.yarn_mscale
        metadata["rope.scaling.attn_factor"] = config.rotary_attention_factor
    return metadata


# By `general.architecture`: functions that return metadata without prefix. Of two architectures that compute a config,
# the first is written: llama can also have the biases of qwen2.
METADATA_WRITERS: dict[str, Callable[[Any], Metadata]] = {
    "qwen2": _like_llama,
    "llama": _like_llama,
    "smollm3": _like_llama,
    "olmo2": _like_llama,
    "qwen3": _like_llama,
    "qwen3moe": _like_llama,
    "qwen3next": _qwen3next,
    "olmoe": _like_llama,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granite,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "mamba2": _mamba2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gpt2": _layer_norm,
    "gptneox": _neox,
    "phi2": _phi2,
    "phi3": _phi3,
    "stablelm": _phi2,
    "command-r": _command_r,
    "falcon": _phi2,
    "bert": _bert,
    "modern-bert": _modern_bert,
    "t5": _t5,
    "deepseek2": _deepseek2,
}
