"""Small transformers models converted to GGUF like llama.cpp's converter, with the tables of the `gguf` package.

What the converter does to names comes from that package's own map; what it does to values is said here once more,
from its source, and not taken from what is tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers_families import FAMILIES, HF_SIZES, LLAMA3_SCALING, new_hf_model

RENAMED = {"gpt_neox": "gptneox", "phi": "phi2", "gemma3_text": "gemma3", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
RENAMED |= {"cohere": "command-r", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2"}
NOT_READ = ("mistral", "opt", "gptj")
KINDS = {name: family.model_type for name, family in FAMILIES.items() if family.model_type not in NOT_READ}
ARCHITECTURES = {name: RENAMED.get(kind, kind) for name, kind in KINDS.items()}
# From fields of a config to the keys that the converter writes for them.
KEYS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    **dict.fromkeys(("norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "attention.layer_norm_epsilon"),
    "num_key_value_heads": "attention.head_count_kv",
    **dict.fromkeys(("sliding_window", "local_attention"), "attention.sliding_window"),
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    **dict.fromkeys(("logits_scaling", "logit_scale"), "logit_scale"),
    **{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual")},
}
# What a file cannot say: llama.cpp knows it by heart.
KNOWN = {
    "Qwen2": {"use_sliding_window": False, "sliding_window": None},
    "GPT-2": {"n_inner": 96},
    "Qwen3-MoE": {"norm_topk_prob": True},
    "OLMoE": {"num_key_value_heads": 4},
    "Falcon, 40B": {"bias": False},
    "gpt-oss": {"tie_word_embeddings": False, "attention_bias": True},
    "SmolLM3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "OLMo 2": {"tie_word_embeddings": False},
    "Gemma 2": {"query_pre_attn_scalar": 8},
    "DeepSeek-V2": {
        **{"q_lora_rank": 9, "rms_norm_eps": 1e-6, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        "rope_parameters": FAMILIES["DeepSeek-V2"].hf_fields["rope_parameters"]
        | {"mscale": 0.5, "beta_slow": 1.0, "beta_fast": 32.0},
    },
    "DeepSeek-V3": {"rms_norm_eps": 1e-6, "attention_bias": False},
    "Gemma 3": {"query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
}


def new_model(name: str, **fields: Any) -> Any:
    """Return a transformers model with random weights, large enough that each part affects the logits."""
    return new_hf_model(FAMILIES[name].model_type, {**FAMILIES[name].hf_fields, **KNOWN.get(name, {}), **fields})


def new_bert() -> Any:
    """Return a small BERT without a pooler, as llama.cpp converts it."""
    import torch
    import transformers

    config = transformers.BertConfig(**HF_SIZES, num_attention_heads=3, intermediate_size=40)
    torch.manual_seed(3)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def new_modern_bert() -> Any:
    """Return a small ModernBERT with local and global layers."""
    import torch
    import transformers

    config = transformers.ModernBertConfig(  # whose default of pad_token_id is outside of the vocabulary
        **{**HF_SIZES, "num_hidden_layers": 4},
        num_attention_heads=3,
        intermediate_size=40,
        local_attention=6,
        pad_token_id=None,
    )
    torch.manual_seed(3)
    return transformers.ModernBertModel(config).eval()


ENCODERS = {"BERT": ("bert", new_bert), "ModernBERT": ("modern-bert", new_modern_bert)}


# -------------------------------------------------------------------- writing
def convert_tensors(architecture: str, model: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a model with llama.cpp's names and converted values."""
    config = model.config
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for full, values in stacked_experts(model.state_dict()).items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        renamed = full.replace("embed_out", "lm_head").replace("e_score_correction_bias", "e_score_correction.bias")
        name = names.get_name(renamed, try_suffixes=(".weight", ".bias"))
        assert name, full
        if config.model_type == "deepseek_v3" and name.endswith("attn_kv_b.weight"):  # which newer files have split
            size = config.qk_nope_head_dim
            by_head = values.numpy().reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            tensors[name.replace("kv_b", "k_b")] = by_head[:, :size].swapaxes(1, 2)
            tensors[name.replace("kv_b", "v_b")] = by_head[:, size:]
            continue
        tensors[name] = _convert_values(architecture, name, values.numpy(), config)
    return tensors


def stacked_experts(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors with those of gate and up separately, each of all experts (E, out, in)."""
    stacked = {}
    is_gpt_oss = any(full.endswith("gate_up_proj_bias") for full in state)  # (E, in, out), gates interleaved
    for full, values in state.items():
        full = full.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.").replace(
            "sinks", "sinks.weight"
        )
        layer, _, kind = full.replace("block_sparse_moe", "mlp").rpartition(".experts.")
        part, ending = kind.removesuffix("_bias"), "bias" if kind.endswith("_bias") else "weight"
        values = values.transpose(1, 2) if layer and is_gpt_oss and ending == "weight" else values
        if layer and part == "gate_up_proj":
            halves = (values[:, 0::2], values[:, 1::2]) if is_gpt_oss else values.chunk(2, dim=1)
            for part, half in zip(("gate_proj", "up_proj"), halves):
                stacked[f"{layer}.experts.{part}.{ending}"] = half
        else:
            stacked[f"{layer}.experts.{part}.{ending}" if layer else full] = values
    return stacked


def _convert_values(architecture: str, name: str, values: np.ndarray, config: Any) -> np.ndarray:
    n_heads = config.num_attention_heads
    layer = name.split(".")[-2]
    if architecture in ("llama", "smollm3", "granite", "granitemoe") and layer in ("attn_q", "attn_k"):
        n = n_heads if layer == "attn_q" else config.num_key_value_heads
        return values.reshape(n, 2, values.shape[0] // n // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if architecture == "gpt2" and values.ndim == 2 and layer in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return values.T
    if architecture == "falcon" and layer == "attn_qkv":
        n_groups = config.num_kv_heads if config.new_decoder_architecture else 1
        groups = values.reshape(n_groups, n_heads // n_groups + 2, config.hidden_size // n_heads, -1)
        parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
        return np.concatenate([part.reshape(-1, values.shape[-1]) for part in parts])
    if architecture == "gptneox" and layer == "attn_qkv":
        by_head = values.reshape(n_heads, 3, values.shape[0] // n_heads // 3, -1)
        return np.concatenate([by_head[:, i] for i in range(3)]).reshape(values.shape)
    return values


def write(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32"
) -> Path:
    """A file by the `gguf` package.

    Args:
        keys: without the architecture, which is put before them; a key with a colon before it stands as it is.
        kind: of matrices; vectors are F32, as the converter has them.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        full = key[1:] if key.startswith(":") else f"{architecture}.{key}"
        add = {bool: writer.add_bool, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add.get(type(value), writer.add_uint32)(full, value)
    for name, values in tensors.items():
        dtype = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        packed = gguf.quantize(np.ascontiguousarray(values, np.float32), dtype)
        writer.add_tensor(name, packed, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    """Return the metadata that the converter writes for a model."""
    hidden = config.intermediate_size if hasattr(config, "intermediate_size") else 4 * config.hidden_size
    keys = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": hidden,
        "attention.head_count": config.num_attention_heads,
    }
    keys |= {key: getattr(config, name) for name, key in KEYS.items() if getattr(config, name, None) is not None}
    if architecture == "modern-bert":
        for ending, kind in (("", "full_attention"), ("_swa", "sliding_attention")):
            keys[f"rope.freq_base{ending}"] = float(config.rope_parameters[kind]["rope_theta"])
    if architecture == "falcon":
        keys["attention.head_count_kv"] = config.num_kv_heads if config.new_decoder_architecture else 1
        keys["feed_forward_length"] = config.ffn_hidden_size
    if architecture not in ("gpt2", "bert", "modern-bert"):
        keys |= _rope_metadata(architecture, config)
    n_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if n_experts:
        keys |= {"expert_count": n_experts, "expert_used_count": config.num_experts_per_tok}
    if architecture == "qwen3moe":
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "gpt-oss":
        keys["expert_feed_forward_length"] = config.intermediate_size
    if architecture == "deepseek2":
        keys |= _deepseek_metadata(config)
    return keys


def _deepseek_metadata(config: Any) -> dict[str, Any]:
    """Return the metadata of latent attention and experts: of an older file for V2, of a newer one for V3."""
    rotary, latent = config.qk_rope_head_dim, config.kv_lora_rank
    is_new, sizes = config.model_type == "deepseek_v3", (config.qk_nope_head_dim + rotary, config.v_head_dim)
    keys: dict[str, Any] = {"rope.dimension_count": rotary, "attention.kv_lora_rank": latent}
    if config.q_lora_rank:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    keys |= dict(
        zip(("attention.key_length", "attention.value_length"), (latent + rotary, latent) if is_new else sizes)
    )
    if is_new:
        keys |= dict(zip(("attention.key_length_mla", "attention.value_length_mla"), sizes))
        keys |= {"attention.head_count_kv": 1, "expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
    if config.n_group > 1:
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.rope_parameters["rope_type"] == "yarn":
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return keys | {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
    }


def _rope_metadata(architecture: str, config: Any) -> dict[str, Any]:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    keys: dict[str, Any] = {}
    if architecture == "gemma3":
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        keys["attention.sliding_window_pattern"] = 3
        rope = rope["full_attention"]
    keys["rope.freq_base"] = float(rope["rope_theta"])
    keys["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    if size * config.num_attention_heads != config.hidden_size:
        keys |= {"attention.key_length": size, "attention.value_length": size}
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "longrope":
        window = config.original_max_position_embeddings
        keys["rope.scaling.original_context_length"] = window
        keys["rope.scaling.attn_factor"] = float((1 + np.log(rope["factor"]) / np.log(window)) ** 0.5)
    if rope["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow")}
    return keys


def llama3_divisors(size: int, base: float, scaling: dict[str, Any]) -> np.ndarray:
    """Return the tensor rope_freqs of the converter."""
    window = scaling["original_max_position_embeddings"]
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    divisors = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * base ** (i / size)
        if wavelength < window / high:
            divisors.append(1.0)
        elif wavelength > window / low:
            divisors.append(factor)
        else:
            smooth = (window / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def write_model(path: Path, name: str, model: Any, kind: str = "F32", keys: dict[str, Any] | None = None) -> Path:
    """Write a model to a GGUF file, and return the path."""
    architecture = ARCHITECTURES[name] if name in ARCHITECTURES else ENCODERS[name][0]
    tensors = convert_tensors(architecture, model)
    if name == "Phi-3":
        for part in ("short", "long"):
            factors = model.config.rope_parameters[f"{part}_factor"]
            tensors[f"rope_factors_{part}.weight"] = np.array(factors, np.float32)
    if name == "Llama 3":
        rope = model.config.rope_parameters
        assert rope["rope_type"] == LLAMA3_SCALING["rope_type"]
        tensors["rope_freqs.weight"] = llama3_divisors(model.config.head_dim, rope["rope_theta"], rope)
    return write(path, architecture, metadata_of(architecture, model.config) | (keys or {}), tensors, kind)
