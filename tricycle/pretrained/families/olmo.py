"""OLMo 2: Llama with norms on the outputs of a block's parts, and of all heads' queries and keys (OLMo et al. 2024)."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.families.family import Family, Names
from tricycle.pretrained.families.llama import LLAMA_NAMES, PREFIXES, common, common_fields, whole_share
from tricycle.pretrained.fields import Fields
from tricycle.pretrained.same import has_bias

NAMES: Names = {
    **LLAMA_NAMES,
    "blocks.N.attention_norm": ["model.layers.N.post_attention_layernorm"],
    "blocks.N.mlp_norm": ["model.layers.N.post_feedforward_layernorm"],
}


def from_olmo2(fields: Fields) -> ModelConfig:
    ours = common(Fields({"vocab_size": 50_304, "rms_norm_eps": 1e-5, **fields.values}))
    norms = {"qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": ours["norm_eps"], "qk_norm_per_head": False}
    bias = fields.flag("attention_bias", False)
    return ModelConfig(**ours, **norms, norm_placement="output", qkv_bias=bias, output_bias=bias)


def to_olmo2(config: ModelConfig) -> dict[str, Any]:
    whole_share(config)
    return {**common_fields(config), "attention_bias": has_bias(config, "qkv") or has_bias(config, "output")}


OLMO2 = Family(("olmo2",), "Olmo2ForCausalLM", from_olmo2, to_olmo2, NAMES, PREFIXES)
