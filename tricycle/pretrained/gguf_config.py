"""Conversion of GGUF metadata to the fields of a config.json.

llama.cpp has constants for values that its files do not contain; these constants are the defaults here. What llama.cpp
always or never has in an architecture, such as biases or an output matrix, is not read from the tensors but stated
here, so that a file which llama.cpp rejects is also rejected by Tricycle.
(Sources: llama.cpp's `gguf-py/gguf/constants.py` for the keys, `src/models/` for the constants and tensors.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from tricycle.pretrained.config_fields import SIZE_FIELDS
from tricycle.pretrained.families.gemma import periodic_layer_types
from tricycle.pretrained.gguf_file import short_repr
from tricycle.pretrained.gguf_model_metadata import Fields, ModelMetadata, rope_scaling

# From size fields of `ModelConfig` to metadata keys.
SIZE_METADATA = {
    "context_window": "context_length",
    "embedding_dim": "embedding_length",
    "hidden_size": "feed_forward_length",
    "n_layers": "block_count",
    "n_heads": "attention.head_count",
}
WITH_FUSED_GATES = ("phi3", "modern-bert")  # whose ffn_up is the gate and the other output
POOLING_TYPES = {"mean": 1, "first": 2}  # from modes of `SentencePooling` to values of pooling_type
# Keys of mixtures whose other values are not supported, with the supported ones.
_EXPERT_METADATA: dict[str, tuple[Any, ...]] = {
    "expert_shared_count": (0,),
    "expert_weights_scale": (1.0, 0.0),
    "expert_gating_func": (1,),  # softmax over all experts
    "expert_group_count": (1, 0),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (1, 0),
    "attention.clamp_kqv": (0.0,),
}
# Keys of Gemma 3n, whose values are constants in llama.cpp, and fields of config.json with the same values.
GEMMA3N_METADATA: dict[str, tuple[Any, ...]] = {
    "altup.num_inputs": (4,),
    "altup.active_idx": (0,),
    "embedding_length_per_layer_input": (256,),
    "final_logit_softcapping": (30.0,),
}
_GEMMA3N_SIZES = {
    "altup_num_inputs": "altup.num_inputs",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA3N_OWN_KEYS = 20  # first layers with keys and values of their own
GEMMA3N_SPARSE_LAYERS = 10  # first layers in which 95% of the MLP's gates are set to 0
MODERN_BERT_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")  # llama.cpp approximates the first by the second
# Of norms of latents, and of keys of linear attention, in transformers; llama.cpp has the epsilon of the other norms.
FIXED_NORM_EPS = 1e-6


# -------------------------------------------------------------------- architectures
def _sizes(metadata: ModelMetadata, norm: str) -> Fields:
    """Return config.json's sizes and norm epsilon ("rms" or "layer") from metadata; ValueError if one is missing."""
    epsilon_key = {"rms": "layer_norm_rms_epsilon", "layer": "layer_norm_epsilon"}[norm]
    return {
        **{SIZE_FIELDS[name]: metadata.positive_int(key) for name, key in SIZE_METADATA.items()},
        "num_hidden_layers": metadata.n_layers(),
        f"{norm}_norm_eps": metadata.positive_float(f"attention.{epsilon_key}"),
    }


def _decoder(metadata: ModelMetadata, divisors: np.ndarray | None, norm: str) -> Fields:
    """Return `_sizes` and the other fields of most decoders: key heads, RoPE's base and scaling, and vocabulary."""
    return {
        **_sizes(metadata, norm),
        "num_key_value_heads": metadata.n_key_heads(),
        "rope_theta": metadata.positive_float("rope.freq_base", 10_000.0),
        **rope_scaling(metadata, divisors),
        **metadata.vocabulary_fields(),
    }


def _like_llama(
    metadata: ModelMetadata,
    divisors: np.ndarray | None,
    model_type: str,
    is_mixture: bool = False,
    has_head_dim: bool = True,
) -> Fields:
    """Return the fields that Llama-like models share; ValueError for partial RoPE, or experts unless `is_mixture`.

    Without `has_head_dim`, the size of heads is not a field, but width / heads.
    """
    if metadata.get("expert_count") and not is_mixture:
        raise metadata.error(
            f"is a mixture of {short_repr(metadata.get('expert_count'))} experts, which is not supported"
        )
    size = metadata.head_size()
    if metadata.rotary_size() != size:
        raise metadata.error(f"expected RoPE on all {size} channels of a head, got {metadata.rotary_size()}")
    fields = _decoder(metadata, divisors, "rms") | {"model_type": model_type, "hidden_act": "silu"}
    return fields | ({"head_dim": size} if has_head_dim else {})


def _expert_fields(metadata: ModelMetadata) -> Fields:
    """Return the numbers and the width of experts; ValueError for shared or grouped experts, or dense layers."""
    _check_values(metadata, _EXPERT_METADATA)
    width = metadata.positive_int(metadata.expert_width_key())
    return {
        "num_local_experts": metadata.positive_int("expert_count"),
        "num_experts_per_tok": metadata.positive_int("expert_used_count"),
        "intermediate_size": width,
        "moe_intermediate_size": width,
    }


def _check_values(metadata: ModelMetadata, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError if a key of `supported` has none of its values."""
    for key, values in supported.items():
        if metadata.get(key) not in (None, *values):
            expected = f"expected {metadata.architecture}.{key} to be missing or {values[0]}"
            raise metadata.error(f"{expected}, got {short_repr(metadata.get(key))}")


def _check_epsilon(metadata: ModelMetadata, normalized: str) -> None:
    """Raise ValueError unless the RMS epsilon is FIXED_NORM_EPS, that of the norms of what `normalized` names."""
    key = "attention.layer_norm_rms_epsilon"
    if metadata.positive_float(key) != FIXED_NORM_EPS:
        expected = f"expected {key} to be {FIXED_NORM_EPS}, that of norms of {normalized}"
        raise metadata.error(f"{expected}, got {metadata.get(key)}")


def _qwen3moe(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Qwen3-MoE's config.json fields, with normalized expert weights, as llama.cpp always normalizes them."""
    fields = _like_llama(metadata, divisors, "qwen3_moe", is_mixture=True) | _expert_fields(metadata)
    return fields | {"norm_topk_prob": True}


def _qwen3next(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Qwen3-Next's config.json fields: normalized expert weights, no biases, keys as wide as values."""
    _check_epsilon(metadata, "keys")
    n_heads, head_size, sizes = _mixers(metadata)
    if head_size != sizes["state_size"]:
        expected = f"{n_heads} heads of ssm.state_size, {sizes['state_size']} channels"
        raise metadata.error(f"expected qwen3next.ssm.inner_size to be that of {expected}, got {n_heads * head_size}")
    _check_values(metadata, {"attention.scale": (0.0,)})
    width = "expert_shared_feed_forward_length"
    return _decoder(metadata, divisors, "rms") | {
        "model_type": "qwen3_next",
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "attention_bias": False,
        "shared_expert_intermediate_size": metadata.positive_int(width, metadata.positive_int("feed_forward_length")),
        **_expert_fields(metadata),
        "head_dim": metadata.head_size(),
        "partial_rotary_factor": _rotary_fraction(metadata),
        "linear_num_value_heads": n_heads,
        "linear_num_key_heads": sizes["n_groups"],
        "linear_value_head_dim": head_size,
        "linear_key_head_dim": head_size,
        "linear_conv_kernel_dim": sizes["conv_kernel"],
        "layer_types": _linear_layers(metadata),
    }


def _linear_layers(metadata: ModelMetadata) -> list[str]:
    """Return layer_types by attention.recurrent_layers, else full_attention_interval (4); ValueError if invalid.

    llama.cpp ends the process if all layers are of one kind.
    """
    key, n_blocks = "attention.recurrent_layers", metadata.positive_int("block_count")
    is_linear = metadata.get(key)
    if is_linear is None:
        interval = metadata.positive_int("full_attention_interval", 4)
        is_linear = [bool((layer + 1) % interval) for layer in range(n_blocks)]
    if not isinstance(is_linear, list) or len(is_linear) != n_blocks or not all(kind in (0, 1) for kind in is_linear):
        expected = f"expected {metadata.architecture}.{key} to be {n_blocks} times true or false"
        raise metadata.error(f"{expected}, got {short_repr(is_linear)}")
    types = ["linear_attention" if kind else "full_attention" for kind in is_linear[: metadata.n_layers()]]
    if len({*types}) < 2:
        raise metadata.error("expected some layers with full attention and some with linear attention")
    return types


def _olmoe(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return OLMoE's config.json fields: all heads with keys, unnormalized expert weights, an untied output matrix."""
    fields = _like_llama(metadata, divisors, "olmoe", is_mixture=True, has_head_dim=False) | _expert_fields(metadata)
    fields |= {"norm_topk_prob": False, "num_key_value_heads": fields["num_attention_heads"]}
    return fields | {"tie_word_embeddings": False}


def _gpt_oss(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return gpt-oss's config.json fields: biases, an untied output matrix, the window; ValueError unless pattern 2."""
    window = "attention.sliding_window"
    if metadata.get(f"{window}_pattern") not in (None, 2):
        raise metadata.error(
            f"expected gpt-oss.{window}_pattern 2, got {short_repr(metadata.get(f'{window}_pattern'))}"
        )
    fields = _like_llama(metadata, divisors, "gpt_oss", is_mixture=True) | _expert_fields(metadata)
    fields |= {"attention_bias": True, "tie_word_embeddings": False}
    return {"rope_scaling": {"rope_type": "default"}, **fields, "sliding_window": metadata.positive_int(window)}


def _llama(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return config.json fields of Llama, or of Mixtral, Qwen 2 or Mistral, by experts, biases and window."""
    if metadata.n_experts():
        fields = _like_llama(metadata, divisors, "mixtral", is_mixture=True) | _expert_fields(metadata)
        return fields | {"sliding_window": metadata.optional_int("attention.sliding_window")}
    fields = _like_llama(metadata, divisors, "llama") | _biases(metadata)
    # Llama in transformers has biases in all attention matrices or in none.
    if fields["attention_bias"] and not metadata.has_tensor("blk.0.attn_output.bias"):
        return fields | {"model_type": "qwen2"}
    if window := metadata.optional_int("attention.sliding_window"):
        fields |= {"model_type": "mistral", "sliding_window": window}
    return fields


def _biases(metadata: ModelMetadata) -> Fields:
    """Return the config.json fields of Llama's biases, by the tensors of the first block."""
    tensors = {"mlp_bias": "blk.0.ffn_up.bias", "attention_bias": "blk.0.attn_q.bias"}
    return {name: metadata.has_tensor(tensor) for name, tensor in tensors.items()}


def _granite_factors(metadata: ModelMetadata, head_size: int) -> Fields:
    """Return the config.json fields of Granite's four factors, by default Llama's; `head_size` is that of attention."""
    return {
        "attention_multiplier": metadata.positive_float("attention.scale", head_size**-0.5),
        "embedding_multiplier": metadata.positive_float("embedding_scale", 1.0),
        "residual_multiplier": metadata.positive_float("residual_scale", 1.0),
        "logits_scaling": metadata.positive_float("logit_scale", 1.0),
    }


def _granite(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Granite's or Granite-MoE's config.json fields: Llama's, four factors with Llama's defaults, and biases."""
    is_mixture = metadata.architecture == "granitemoe"
    fields = _like_llama(metadata, divisors, metadata.architecture, is_mixture)
    fields |= _expert_fields(metadata) if is_mixture else {}
    return fields | _granite_factors(metadata, fields["head_dim"]) | _biases(metadata)


def _mixers(metadata: ModelMetadata) -> tuple[int, int, Fields]:
    """Return the heads and channels per head of Mamba layers, and their other sizes as in Mamba-2's config.json."""
    n_heads, inner = metadata.positive_int("ssm.time_step_rank"), metadata.positive_int("ssm.inner_size")
    if inner % n_heads:
        key = f"{metadata.architecture}.ssm.inner_size"
        raise metadata.error(f"expected {key} to be a multiple of the {n_heads} heads, got {inner}")
    keys = {"state_size": "state_size", "n_groups": "group_count", "conv_kernel": "conv_kernel"}
    sizes: Fields = {name: metadata.positive_int(f"ssm.{key}") for name, key in keys.items()}
    width = metadata.positive_int("embedding_length")
    return n_heads, inner // n_heads, {**sizes, "expand": inner // width}


def _mamba2(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return the fields of Mamba-2, which has biases of the convolution alone; ignore `divisors`."""
    n_heads, head_size, sizes = _mixers(metadata)
    return {
        "model_type": "mamba2",
        "hidden_act": "silu",
        "hidden_size": metadata.positive_int("embedding_length"),
        "num_hidden_layers": metadata.positive_int("block_count"),
        "num_heads": n_heads,
        "head_dim": head_size,
        **sizes,
        "layer_norm_epsilon": metadata.positive_float("attention.layer_norm_rms_epsilon"),
        "use_bias": False,
        "use_conv_bias": True,
        **metadata.vocabulary_fields(),
    }


def _granite_hybrid(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return the fields of Granite 4, whose Mamba layers have twice the width and biases of the convolution alone."""
    layers, n_layers = metadata.attention_layers(), metadata.positive_int("block_count")
    if not 0 < len(layers) < n_layers:
        raise metadata.error("expected some layers with attention and some without (attention.head_count_kv 0)")
    n_heads, head_size, sizes = _mixers(metadata)
    fields = _like_llama(metadata, divisors, "granitemoehybrid", is_mixture=True)
    expected = 2 * fields["hidden_size"]
    if n_heads * head_size != expected:
        key = f"{metadata.architecture}.ssm.inner_size"
        raise metadata.error(f"expected {key} to be twice the width, {expected}, got {n_heads * head_size}")
    if metadata.n_experts():
        fields |= _expert_fields(metadata)
        fields["shared_intermediate_size"] = metadata.positive_int("expert_shared_feed_forward_length")
    else:
        fields |= {"num_local_experts": 0, "shared_intermediate_size": fields["intermediate_size"]}
    mixers = {
        "n_heads": n_heads,
        "d_head": head_size,
        "d_state": sizes["state_size"],
        "n_groups": sizes["n_groups"],
        "d_conv": sizes["conv_kernel"],
        "expand": 2,
        "conv_bias": True,
        "proj_bias": False,
    }
    return fields | {
        **_granite_factors(metadata, fields["head_dim"]),
        **{f"mamba_{name}": value for name, value in mixers.items()},
        "attention_bias": any(metadata.has_tensor(f"blk.{layer}.attn_q.bias") for layer in layers),
        "position_embedding_type": "rope" if metadata.boolean("rope.scaling.finetuned", True) else "nope",
        "layer_types": ["attention" if layer in layers else "mamba" for layer in range(n_layers)],
    }


def _olmo2(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return OLMo 2's config.json fields, with an untied output matrix; ValueError for a window (OLMo 3).

    Files of OLMo 3, which has sliding windows, also have this architecture.
    """
    if metadata.get("attention.sliding_window"):
        raise metadata.error("has a sliding window, as OLMo 3, which is not supported")
    return _like_llama(metadata, divisors, "olmo2", has_head_dim=False) | {"tie_word_embeddings": False}


def _smollm3(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return SmolLM3's config.json fields: no window, no biases, and no RoPE in every fourth layer."""
    return _like_llama(metadata, divisors, "smollm3", has_head_dim=False) | {"no_rope_layer_interval": 4}


def _like_gemma(metadata: ModelMetadata, divisors: np.ndarray | None, model_type: str, n_layers_of_27b: int) -> Fields:
    """Return the fields that Gemma 2 and 3 share: Llama's, query_pre_attn_scalar (special for 27B), activation.

    Only the largest model, recognized by its number of layers, scales scores by (width / heads)**-0.5.
    """
    fields = _like_llama(metadata, divisors, model_type)
    is_27b = fields["num_hidden_layers"] == n_layers_of_27b
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"]
    return fields | {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Gemma 2's config.json fields: window (default 4096), soft-caps (default 50 and 30), tied embedding."""
    return _like_gemma(metadata, divisors, "gemma2", n_layers_of_27b=46) | {
        "tie_word_embeddings": True,
        "sliding_window": metadata.positive_int("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.positive_float("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.positive_float("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Gemma 3's config.json fields: window with its pattern (default 6), local RoPE base, final soft-cap.

    Without a window, all layers have full attention.
    """
    softcap, window = "final_logit_softcapping", metadata.optional_int("attention.sliding_window")
    return _like_gemma(metadata, divisors, "gemma3_text", n_layers_of_27b=62) | {
        "sliding_window": window,
        "sliding_window_pattern": metadata.positive_int("attention.sliding_window_pattern", 6) if window else 1,
        "rope_local_base_freq": metadata.positive_float("rope.freq_base_swa", 10_000.0),
        "rope_theta": metadata.positive_float("rope.freq_base", 1_000_000.0),
        "attn_logit_softcapping": None,
        softcap: metadata.positive_float(softcap) if metadata.get(softcap) else None,
    }


def _gemma3n(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Gemma 3n's config.json fields: the constants of llama.cpp, windows with their pattern (default 5), bases.

    llama.cpp ignores the keys of these constants, and a pattern that is a list; other values are rejected.
    """
    fields = _like_llama(metadata, divisors, "gemma3n_text")
    n_layers, key = fields["num_hidden_layers"], "attention.sliding_window_pattern"
    n_shared = max(0, n_layers - GEMMA3N_OWN_KEYS)
    is_sparse = [layer < GEMMA3N_SPARSE_LAYERS for layer in range(n_layers)]
    _check_values(metadata, {**GEMMA3N_METADATA, "attention.shared_kv_layers": (n_shared,)})
    period = 5 if isinstance(metadata.get(key), list) else metadata.positive_int(key, 5)
    types = periodic_layer_types(n_layers, period)
    if isinstance(metadata.get(key), list) and metadata.get(key) != [kind == "sliding_attention" for kind in types]:
        raise metadata.error(f"expected {metadata.architecture}.{key} to be that of full attention in each 5th layer")
    scales = metadata.get("activation_sparsity_scale")
    are_set = [isinstance(scale, float) and scale > 0 for scale in scales] if isinstance(scales, list) else None
    if scales is not None and are_set != is_sparse:
        expected = f"above 0 in the first {GEMMA3N_SPARSE_LAYERS} layers only"
        raise metadata.error(f"expected {metadata.architecture}.activation_sparsity_scale to be {expected}")
    # llama.cpp fails without a window, and shares the keys of layers 18 and 19 in any case.
    if period == 1 or (n_shared and GEMMA3N_OWN_KEYS % period):
        expected = f"above 1, and a divisor of {GEMMA3N_OWN_KEYS} in a model of more layers"
        raise metadata.error(f"expected {metadata.architecture}.{key} to be {expected}, got {period}")
    return fields | {
        **{name: GEMMA3N_METADATA[size][0] for name, size in _GEMMA3N_SIZES.items()},
        "laurel_rank": 64,
        "vocab_size_per_layer_input": metadata.shape("per_layer_token_embd")[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.positive_int("attention.sliding_window"),
        "layer_types": types,
        "rope_local_base_freq": metadata.positive_float("rope.freq_base_swa", 10_000.0),
        "num_kv_shared_layers": n_shared,
        "activation_sparsity_pattern": [0.95 if sparse else 0.0 for sparse in is_sparse],
    }


def _gpt2(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return the fields of GPT-2's config.json for GGUF metadata; ignore `divisors`."""
    return {
        "model_type": "gpt2",
        "n_embd": metadata.positive_int("embedding_length"),
        "n_layer": metadata.positive_int("block_count"),
        "n_head": metadata.positive_int("attention.head_count"),
        "n_positions": metadata.shape("position_embd")[0],
        "n_inner": metadata.positive_int("feed_forward_length"),
        "layer_norm_epsilon": metadata.positive_float("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **metadata.vocabulary_fields(),
    }


def _rotary_fraction(metadata: ModelMetadata) -> float:
    """Return the fraction f of a head's channels with RoPE, such that int(head_size * f) is exactly their number."""
    head_size, rotary_size = metadata.head_size(), metadata.rotary_size()
    fraction = rotary_size / head_size
    return fraction if int(head_size * fraction) == rotary_size else math.nextafter(fraction, 1)


def _neox(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return GPT-NeoX's config.json fields: partial RoPE, parallel residual (default true), an untied output matrix."""
    fields = _decoder(metadata, divisors, "layer")
    return fields | {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "rotary_emb_base": fields["rope_theta"],
        "rotary_pct": _rotary_fraction(metadata),
        "use_parallel_residual": metadata.boolean("use_parallel_residual", True),
        "tie_word_embeddings": False,
    }


def _phi2(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Phi's config.json fields: partial RoPE, key heads, an untied output matrix."""
    return _decoder(metadata, divisors, "layer") | {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "partial_rotary_factor": _rotary_fraction(metadata),
        "tie_word_embeddings": False,
    }


def _phi3(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Phi-3's config.json fields: partial RoPE with any scaling, key heads, any window."""
    return _decoder(metadata, divisors, "rms") | {
        "model_type": "phi3",
        "hidden_act": "silu",
        "partial_rotary_factor": _rotary_fraction(metadata),
        "sliding_window": metadata.optional_int("attention.sliding_window"),
    }


def _stablelm(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return StableLM's config.json fields: Phi's with SwiGLU, biases of Q, K, V if present, parallel without ffn_norm.

    llama.cpp also ignores the key use_parallel_residual, which some converted files state wrongly.
    """
    return _phi2(metadata, divisors) | {
        "model_type": "stablelm",
        "hidden_act": "silu",
        "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight"),
        "use_qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def _command_r(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Cohere's config.json fields: logit_scale (default 1), tied embedding; ValueError for partial RoPE."""
    if metadata.rotary_size() != metadata.head_size():
        raise metadata.error(f"expected RoPE on all {metadata.head_size()} channels, got {metadata.rotary_size()}")
    return _decoder(metadata, divisors, "layer") | {
        "model_type": "cohere",
        "hidden_act": "silu",
        "logit_scale": metadata.positive_float("logit_scale", 1.0),
        "tie_word_embeddings": True,
    }


def _falcon(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return Falcon's config.json fields, of the new architecture, one norm or two; ValueError for partial RoPE."""
    if metadata.rotary_size() != metadata.head_size():
        raise metadata.error(f"expected RoPE on all {metadata.head_size()} channels, got {metadata.rotary_size()}")
    fields = _decoder(metadata, divisors, "layer")
    return fields | {
        "model_type": "falcon",
        "ffn_hidden_size": fields["intermediate_size"],
        "layer_norm_epsilon": fields["layer_norm_eps"],
        "activation": "gelu",
        "bias": False,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if metadata.has_tensor("blk.0.attn_norm_2.weight") else 1,
        "num_kv_heads": fields["num_key_value_heads"],
    }


def _bert(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return the fields of BERT's config.json for GGUF metadata; ignore `divisors`."""
    sizes = {"vocab_size": "token_embd", "type_vocab_size": "token_types", "max_position_embeddings": "position_embd"}
    shapes = {name: metadata.shape(tensor)[0] for name, tensor in sizes.items()}
    return _sizes(metadata, "layer") | {"model_type": "bert", "hidden_act": "gelu", **shapes}


def _modern_bert(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return ModernBERT's config.json fields, without biases: window and its period (default 3), bases; no `divisors`.

    Without a window, all layers have full attention. RoPE applies to all channels.
    """
    fields, window = _sizes(metadata, "layer"), metadata.optional_int("attention.sliding_window")
    n_heads, activation = fields["num_attention_heads"], metadata.get("hidden_activation")
    _check_values(metadata, {"attention.causal": (False,), "rope.scaling.type": ("none",)})
    _check_values(metadata, {"attention.head_count_kv": (n_heads,)})
    sizes = {"attention.key_length", "attention.value_length", "rope.dimension_count"}
    _check_values(metadata, dict.fromkeys(sizes, (fields["hidden_size"] // n_heads,)))
    if activation not in (None, *MODERN_BERT_ACTIVATIONS):
        expected = f"expected modern-bert.hidden_activation {' or '.join(MODERN_BERT_ACTIVATIONS)}"
        raise metadata.error(f"{expected}, got {short_repr(activation)}")
    return fields | {
        "model_type": "modernbert",
        "vocab_size": metadata.shape("token_embd")[0],
        "norm_eps": fields["layer_norm_eps"],
        "hidden_activation": activation or "gelu",
        "local_attention": window or 128,
        "global_attn_every_n_layers": metadata.positive_int("attention.sliding_window_pattern", 3) if window else 1,
        "global_rope_theta": metadata.positive_float("rope.freq_base", 10_000.0),
        "local_rope_theta": metadata.positive_float("rope.freq_base_swa", 10_000.0),
    }


def _t5(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return the fields of T5, with one matrix for embedding and logits, or of its version 1.1; ignore `divisors`.

    llama.cpp does not multiply the logits of the former by a factor, as transformers does. This does not change which
    token has the largest one.
    """
    sizes = {
        "d_model": "embedding_length",
        "d_ff": "feed_forward_length",
        "num_heads": "attention.head_count",
        "num_layers": "block_count",
        "relative_attention_num_buckets": "attention.relative_buckets_count",
    }
    return {
        "model_type": "t5",
        "is_encoder_decoder": True,
        **{name: metadata.positive_int(size) for name, size in sizes.items()},
        "d_kv": metadata.head_size(),
        "num_decoder_layers": metadata.positive_int("decoder_block_count", metadata.positive_int("block_count")),
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": metadata.positive_float("attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if metadata.has_tensor("enc.blk.0.ffn_gate.weight") else "relu",
        "decoder_start_token_id": metadata.optional_int("decoder_start_token_id") or 0,
        **metadata.vocabulary_fields(),
    }


def _deepseek2(metadata: ModelMetadata, divisors: np.ndarray | None) -> Fields:
    """Return the fields of DeepSeek-V2, or of V3, whose router has sigmoids.

    In newer files, where the expansion of latents is two tensors, key_length and value_length are those of latents.
    """
    fields = _decoder(metadata, divisors, "rms")
    rope_type = fields.get("rope_scaling", {}).get("rope_type", "yarn")
    if rope_type != "yarn":  # llama.cpp would also multiply scores by a factor
        raise metadata.error(f"expected RoPE without scaling, or with yarn, got {rope_type}")
    _check_epsilon(metadata, "latents")
    rotary_size = metadata.positive_int("rope.dimension_count")
    ending = "_mla" if metadata.get("attention.key_length_mla") is not None else ""
    return fields | {
        **_deepseek_experts(metadata),
        "hidden_act": "silu",
        "attention_bias": False,
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": _query_rank(metadata),
        "kv_lora_rank": metadata.positive_int("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_size,
        "qk_nope_head_dim": metadata.positive_int(f"attention.key_length{ending}") - rotary_size,
        "v_head_dim": metadata.positive_int(f"attention.value_length{ending}"),
        "first_k_dense_replace": metadata.n_dense_layers(),
    }


def _query_rank(metadata: ModelMetadata) -> int | None:
    """Return the size of the latent of queries, or None; llama.cpp recognizes models without one by their sizes."""
    key, n_layers = "attention.q_lora_rank", metadata.positive_int("block_count")
    if n_layers in (26, 27) or (n_layers == 48 and metadata.shape("token_embd")[0] == 128_256):
        return None
    return metadata.positive_int(key) if metadata.get(key) != 0 else None


def _deepseek_experts(metadata: ModelMetadata) -> Fields:
    """Return the fields of the router and the experts; ValueError for groups where llama.cpp selects other ones."""
    gate = metadata.get("expert_gating_func")
    if gate not in (None, 0, 1, 2):
        raise metadata.error(f"expected expert_gating_func to be 1 (softmax) or 2 (sigmoid), got {short_repr(gate)}")
    n_experts, n_groups = metadata.positive_int("expert_count"), metadata.positive_int("expert_group_count", 1)
    if n_groups > 1 and (gate != 2 or n_experts < 2 * n_groups):  # groups have the score of their two best experts
        expected = "expected groups of two experts or more, with sigmoids (expert_gating_func 2)"
        raise metadata.error(f"{expected}, got {n_groups} groups of {n_experts} experts, expert_gating_func {gate}")
    scale = "expert_weights_scale"
    return {
        "model_type": "deepseek_v3" if gate == 2 else "deepseek_v2",
        "n_routed_experts": n_experts,
        "num_experts_per_tok": metadata.positive_int("expert_used_count"),
        "n_shared_experts": metadata.positive_int("expert_shared_count"),
        "moe_intermediate_size": metadata.positive_int("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.positive_float(scale) if metadata.get(scale) else 1.0,
        "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
        "n_group": n_groups,
        "topk_group": metadata.positive_int("expert_group_used_count", 1),
    }


# By `general.architecture`: functions of the metadata and of the values of rope_freqs.weight, if the file has it.
CONFIG_READERS: dict[str, Callable[[ModelMetadata, np.ndarray | None], Fields]] = {
    "llama": _llama,
    "granite": _granite,
    "granitemoe": _granite,
    "granitehybrid": _granite_hybrid,
    "mamba2": _mamba2,
    "qwen2": partial(_like_llama, model_type="qwen2", has_head_dim=False),
    "qwen3": partial(_like_llama, model_type="qwen3"),
    "qwen3moe": _qwen3moe,
    "qwen3next": _qwen3next,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gpt2": _gpt2,
    "gptneox": _neox,
    "phi2": _phi2,
    "phi3": _phi3,
    "stablelm": _stablelm,
    "command-r": _command_r,
    "falcon": _falcon,
    "bert": _bert,
    "modern-bert": _modern_bert,
    "t5": _t5,
    "deepseek2": _deepseek2,
}
