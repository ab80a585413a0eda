"""DeepSeek-V2 and DeepSeek-V3 (DeepSeek-AI 2024): latent attention, shared experts, and experts in groups.

The models differ in the router: V2 has a softmax, V3 sigmoids with a correction. Checkpoints rotate channels 2i, 2i + 1
together, and have RoPE on the last channels of each query head, and of the joint projection to latents and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tricycle.latent_attention import LatentConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, field_error
from tricycle.pretrained.families.family import Family, TensorNames
from tricycle.pretrained.families.llama import attention_biases, check_heads_divide_width, common_config, common_fields
from tricycle.pretrained.families.mixtures import NAMES as MIXTURE_NAMES
from tricycle.pretrained.stored_model import StoredTensor

ATTENTION, MLP = "model.layers.N.self_attn", "model.layers.N.mlp"
NAMES: TensorNames = {
    **{name: theirs for name, theirs in MIXTURE_NAMES.items() if ".qkv" not in name and "key_norm" not in name},
    "blocks.N.attention.query": [f"{ATTENTION}.q_proj"],
    "blocks.N.attention.query_latent": [f"{ATTENTION}.q_a_proj"],
    "blocks.N.attention.query_norm": [f"{ATTENTION}.q_a_layernorm"],
    "blocks.N.attention.query_expansion": [f"{ATTENTION}.q_b_proj"],
    "blocks.N.attention.latent": [f"{ATTENTION}.kv_a_proj_with_mqa"],
    "blocks.N.attention.latent_norm": [f"{ATTENTION}.kv_a_layernorm"],
    "blocks.N.attention.expansion": [f"{ATTENTION}.kv_b_proj"],
    "blocks.N.mlp.up": [f"{MLP}.up_proj", f"{MLP}.gate_proj"],
    "blocks.N.mlp.projection": [f"{MLP}.down_proj"],
    "blocks.N.mlp.shared.up": [f"{MLP}.shared_experts.up_proj", f"{MLP}.shared_experts.gate_proj"],
    "blocks.N.mlp.shared.projection": [f"{MLP}.shared_experts.down_proj"],
    "blocks.N.mlp.correction": [f"{MLP}.gate.e_score_correction_bias"],
}
DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
V2_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    **{"vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    **{"n_shared_experts": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407, "first_k_dense_replace": 0},
    **{"norm_topk_prob": False, "routed_scaling_factor": 1.0},
}
V3_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    **{"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "max_position_embeddings": 4096},
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
}
EXPERT_SIZES = {
    "n_experts": "n_routed_experts",
    "n_active_experts": "num_experts_per_tok",
    "n_shared_experts": "n_shared_experts",
    "expert_size": "moe_intermediate_size",
}
ATTENTION_SIZES = {
    "latent_size": "kv_lora_rank",
    "rotary_size": "qk_rope_head_dim",
    "head_size": "qk_nope_head_dim",
    "value_size": "v_head_dim",
}


# -------------------------------------------------------------------- from config.json
def common_latent(fields: ConfigFields) -> dict[str, Any]:
    """Convert all config.json fields that V2 and V3 share to `LatentConfig`'s; ValueError if missing or unsupported."""
    for name, value in (("moe_layer_freq", 1), ("mlp_bias", False), ("rope_interleave", True)):
        fields.require(name, value)
    common = common_config(fields)
    if common["n_key_heads"] != common["n_heads"]:
        raise field_error("num_key_value_heads", f"num_attention_heads {common['n_heads']}", common["n_key_heads"])
    n_dense = fields.get("first_k_dense_replace")
    if not isinstance(n_dense, int) or isinstance(n_dense, bool) or n_dense < 0:
        raise field_error("first_k_dense_replace", "a whole number of 0 or more", n_dense)
    section = fields.section("rope_scaling") or fields.section("rope_parameters")
    mscale = ConfigFields({"mscale_all_dim": section.get("mscale_all_dim") or None})
    return {
        **common,
        **{ours: fields.positive_int(name) for ours, name in (ATTENTION_SIZES | EXPERT_SIZES).items()},
        "query_rank": fields.optional_positive_int("q_lora_rank") or 0,
        "yarn_mscale": mscale.optional_positive_float("mscale_all_dim", None) or 0.0,
        "n_dense_layers": min(n_dense, common["n_layers"]),
        "normalize_experts": fields.boolean("norm_topk_prob", False),
        "expert_scale": fields.positive_float("routed_scaling_factor"),
        **attention_biases(fields),
    }


def from_v2(fields: ConfigFields) -> LatentConfig:
    """Convert a DeepSeek-V2 config.json to a `LatentConfig`; missing fields get defaults, unsupported ones ValueError.

    As in `transformers`, weights of experts are never normalized.
    """
    fields = ConfigFields({**V2_DEFAULTS, **fields.values})
    fields.require("norm_topk_prob", False)
    fields.require("scoring_func", "softmax")
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise field_error("topk_method", "greedy or group_limited_greedy", method)
    return LatentConfig(**common_latent(fields), **(expert_groups(fields) if method != "greedy" else {}))


def from_v3(fields: ConfigFields) -> LatentConfig:
    """Convert a DeepSeek-V3 config.json to a `LatentConfig`, missing fields by default; ValueError if unsupported."""
    fields = ConfigFields({**V3_DEFAULTS, **fields.values})
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    return LatentConfig(**common_latent(fields), **expert_groups(fields), sigmoid_router=True)


def expert_groups(fields: ConfigFields) -> dict[str, Any]:
    """Return the `LatentConfig` fields of groups of experts; ValueError for missing or invalid ones."""
    return {"n_groups": fields.positive_int("n_group"), "n_active_groups": fields.positive_int("topk_group")}


# -------------------------------------------------------------------- to config.json
def to_v3(config: LatentConfig) -> dict[str, Any]:
    """Convert a `LatentConfig` to the fields of a DeepSeek-V3 config.json, which V2 shares, without model_type."""
    fields = {
        **common_fields(config),
        **{name: getattr(config, ours) for ours, name in (ATTENTION_SIZES | EXPERT_SIZES).items()},
        "head_dim": config.rotary_size,
        "q_lora_rank": config.query_rank or None,
        "first_k_dense_replace": config.n_dense_layers,
        "norm_topk_prob": config.normalize_experts,
        "routed_scaling_factor": config.expert_scale,
        "n_group": config.n_groups,
        "topk_group": config.n_active_groups,
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }
    if config.yarn_mscale:
        fields["rope_scaling"] = {**fields["rope_scaling"], "mscale_all_dim": config.yarn_mscale}
    return fields


def to_v2(config: LatentConfig) -> dict[str, Any]:
    """Convert a `LatentConfig` to DeepSeek-V2's config.json, no model_type; ValueError if heads do not divide width."""
    check_heads_divide_width(config)
    method = "greedy" if config.n_groups == config.n_active_groups == 1 else "group_limited_greedy"
    return {**to_v3(config), "topk_method": method}


# -------------------------------------------------------------------- tensors
def pairs_of_queries(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of queries (H (D + R), ...); theirs rotates neighbors in a head's last R channels."""
    return _last_pairs(config, *(x.reshape(config.n_heads, -1, *x.shape[1:]) for x in (ours, theirs)))


def pairs_of_keys(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of latents and keys (L + R, ...); theirs rotates neighbors in the last R channels."""
    return _last_pairs(config, ours[None], theirs[None])


def _last_pairs(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield 3 pairs of views (H, C + R, ...): the first C channels; the halves of R in ours, 0::2, 1::2 in theirs."""
    n_other, half = ours.shape[1] - config.rotary_size, config.rotary_size // 2
    yield ours[:, :n_other], theirs[:, :n_other]
    yield ours[:, n_other : n_other + half], theirs[:, n_other::2]
    yield ours[:, n_other + half :], theirs[:, n_other + 1 :: 2]


def split_expansion(config: LatentConfig, expansion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of an expansion (H (D + E), L) for keys, (H, L, D), and for values, (H, E, L), as in llama.cpp.

    llama.cpp always absorbs it (`tricycle.latent_attention`), and multiplies queries by the first part.
    """
    by_head = expansion.reshape(config.n_heads, -1, expansion.shape[-1])
    return by_head[:, : config.head_size].swapaxes(1, 2), by_head[:, config.head_size :]


def join_expansion(to_keys: StoredTensor, to_values: StoredTensor) -> StoredTensor:
    """Return the expansion of which `split_expansion` returns the parts, read on request; ValueError for other shapes.

    Quantized parts are read as float32, because the rows of the first one are columns of the result.
    """
    shapes = to_keys.shape, to_values.shape
    if len(shapes[0]) != 3 or len(shapes[1]) != 3 or shapes[0][:2] != (shapes[1][0], shapes[1][2]):
        raise ValueError(f"expected matrices of all heads, of shapes (H, L, D) and (H, E, L), got {shapes}")
    (n_heads, latent_size, key_size), value_size = shapes[0], shapes[1][1]
    shape = n_heads * (key_size + value_size), latent_size

    def read() -> np.ndarray:
        return np.concatenate([to_keys.read().swapaxes(1, 2), to_values.read()], axis=1).reshape(shape)

    return StoredTensor(shape, to_keys.dtype_name, read)


LAYOUTS = {"q_proj": pairs_of_queries, "q_b_proj": pairs_of_queries, "kv_a_proj_with_mqa": pairs_of_keys}
DEEPSEEK_V2 = Family(
    ("deepseek_v2",),
    "DeepseekV2ForCausalLM",
    from_v2,
    to_v2,
    NAMES,
    layouts=LAYOUTS,
    config_class=LatentConfig,
    models="DeepSeek-V2",
)
DEEPSEEK_V3 = Family(
    ("deepseek_v3",),
    "DeepseekV3ForCausalLM",
    from_v3,
    to_v3,
    NAMES,
    ignored=r"model\.layers\.61\.",  # predicts a further token in training
    layouts=LAYOUTS,
    config_class=LatentConfig,
    models="V3 (`tricycle/latent_attention.py:LatentAttention`)",
)
