"""Small models of many families: configs of transformers with the equivalent `ModelConfig`."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from tricycle.configs import ModelConfig
from tricycle.latent_attention import LatentConfig
from tricycle.pretrained import load
from tricycle.pretrained.families import build_model
from tricycle.pretrained.hf_folder import WEIGHTS
from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.pretrained.stored_model import StoredModel, StoredTensor

VOCABULARY = 61
LONGEST = 32  # tokens
N_LAYERS = 2


# -------------------------------------------------------------------- families
@dataclass(frozen=True)
class Family:
    """A small model of a family.

    Attributes:
        model_type: the name of the family in transformers.
        hf_fields: fields of the config in transformers.
        config: the equivalent config; reading `hf_fields` must give it.
    """

    model_type: str
    hf_fields: dict[str, Any]
    config: ModelConfig


HF_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": N_LAYERS,
    "max_position_embeddings": LONGEST,
}
LIKE_LLAMA = {"norm": "rms_norm", "positions": "rotary", "activation": "swish", "gated": True, "bias": False}
TRICYCLE_SIZES = {"vocab_size": VOCABULARY, "context_window": LONGEST, "embedding_dim": 24, "n_layers": N_LAYERS}


def hf_llama_fields(**fields: Any) -> dict[str, Any]:
    """Return config fields in transformers of the Llama family."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-5}
    # a padding token's embedding would get no gradient
    tokens = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    return {**HF_SIZES, **heads, **tokens, **fields}


def llama_config(**fields: Any) -> ModelConfig:
    """Return the equivalent `ModelConfig`."""
    heads = {"n_heads": 4, "n_key_heads": 2, "hidden_size": 40, "norm_eps": 1e-5}
    return ModelConfig(**{**TRICYCLE_SIZES, **LIKE_LLAMA, **heads, **fields})


def llama(rope: dict[str, Any], **rotary: Any) -> Family:
    """Return a Llama with the attention heads of SmolLM2."""
    heads = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    hf_fields = hf_llama_fields(**heads, rope_parameters={"rope_theta": 100_000.0, **rope}, max_position_embeddings=512)
    config = llama_config(
        context_window=512, embedding_dim=36, n_heads=9, n_key_heads=3, head_size=64, rotary_base=100_000.0, **rotary
    )
    return Family("llama", hf_fields, config)


def default_rope(theta: float, **fields: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **fields}


def hf_gemma_fields(**fields: Any) -> dict[str, Any]:
    return hf_llama_fields(head_dim=8, rms_norm_eps=1e-3, query_pre_attn_scalar=11, sliding_window=5, **fields)


def gemma_config(**fields: Any) -> ModelConfig:
    """Return the `ModelConfig` fields that Gemma 2 and 3 share."""
    norms = {"norm_eps": 1e-3, "norm_unit_offset": True, "norm_placement": "both"}
    common = {"head_size": 8, "activation": "gelu", "window": 5, "score_scale": 11**-0.5, "embedding_scale": 24**0.5}
    return llama_config(**norms, **common, **fields)


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": default_rope(10_000.0),
}


def gemma3() -> Family:
    """Return a Gemma 3: norms of queries and keys; every third layer has full attention, and scaled RoPE."""
    hf_fields = hf_gemma_fields(num_hidden_layers=3, sliding_window_pattern=3, rope_parameters=GEMMA3_ROPE)
    rotary = {"rotary_base": 1_000_000.0, "rotary_local_base": 10_000.0, "rotary_scaling": "linear"}
    norms = {"qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": 1e-3}
    config = gemma_config(n_layers=3, full_layers=(2,), rotary_factor=8.0, **rotary, **norms)
    return Family("gemma3_text", hf_fields, config)


def neox(parallel: bool) -> Family:
    """Return a GPT-NeoX, the architecture of Pythia."""
    hf_fields = HF_SIZES | {
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_attention_heads": 3,
        "layer_norm_eps": 1e-3,
        "use_parallel_residual": parallel,
        "rope_parameters": default_rope(1000.0, partial_rotary_factor=0.25),
    }
    sizes = {**TRICYCLE_SIZES, "embedding_dim": 48, "hidden_size": 56, "n_heads": 3}
    rotary = {"positions": "rotary", "rotary_base": 1000.0, "rotary_fraction": 0.25}
    config = ModelConfig(**sizes, **rotary, norm_eps=1e-3, parallel=parallel, activation="gelu_exact", tied=False)
    return Family("gpt_neox", hf_fields, config)


def opt(before: bool, embedding_size: int = 0) -> Family:
    """Return an OPT; OPT-350M has post-norms and narrow embeddings."""
    heads = {"ffn_dim": 40, "num_attention_heads": 3, "pad_token_id": None}
    hf_fields = HF_SIZES | heads | {"do_layer_norm_before": before, "word_embed_proj_dim": embedding_size or 24}
    sizes = {**TRICYCLE_SIZES, "hidden_size": 40, "n_heads": 3, "embedding_size": embedding_size}
    norms = {"norm_placement": "before" if before else "after"}
    return Family("opt", hf_fields, ModelConfig(**sizes, **norms, activation="relu", position_offset=2))


def phi() -> Family:
    """Return a Phi: attention and MLP in parallel, after one norm."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "layer_norm_eps": 1e-3, "tie_word_embeddings": False}
    hf_fields = hf_llama_fields(**heads, rope_parameters=default_rope(10_000.0, partial_rotary_factor=0.5))
    del hf_fields["rms_norm_eps"]
    sizes = {**TRICYCLE_SIZES, "hidden_size": 40, "n_heads": 3}
    norms = {"norm_eps": 1e-3, "parallel": True, "shared_norm": True}
    rotary = {"positions": "rotary", "rotary_fraction": 0.5}
    return Family("phi", hf_fields, ModelConfig(**sizes, **norms, **rotary, tied=False, head_bias=True))


def stablelm(parallel: bool = False) -> Family:
    """Return a StableLM: layer norms, and linear layers without biases."""
    rope = default_rope(10_000.0, partial_rotary_factor=0.5)
    layer = {"layer_norm_eps": 1e-3, "use_parallel_residual": parallel, "hidden_size": 32}
    hf_fields = hf_llama_fields(**layer, tie_word_embeddings=False, rope_parameters=rope)
    del hf_fields["rms_norm_eps"]
    biases = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
    sizes = {**TRICYCLE_SIZES, "embedding_dim": 32, "n_heads": 4, "n_key_heads": 2, "hidden_size": 40}
    rotary = {"positions": "rotary", "rotary_fraction": 0.5}
    layer = {"norm_eps": 1e-3, "parallel": parallel, "shared_norm": parallel, "activation": "swish", "gated": True}
    return Family("stablelm", hf_fields, ModelConfig(**sizes, **layer, **biases, **rotary, tied=False))


def phi3(original_window: int) -> Family:
    """Return a Phi-3: fused matrices, and other frequencies in texts that are longer than the original window."""
    divisors = {"short_factor": [1.0, 1.1, 1.5], "long_factor": [1.0, 2.0, 6.0]}
    rope = {**default_rope(10_000.0, partial_rotary_factor=0.75), "rope_type": "longrope", **divisors, "factor": 8.0}
    sizes = {"hidden_size": 32, ORIGINAL_WINDOW: original_window}
    hf_fields = hf_llama_fields(**sizes, sliding_window=9, rope_parameters=rope)
    scaling = {"rotary_scaling": "longrope", "rotary_original_window": original_window, "rotary_fraction": 0.75}
    scaling["rotary_attention_factor"] = (1 + np.log(8) / np.log(original_window)) ** 0.5
    scaling["rotary_divisors"] = (1.0, 1.1, 1.5, 1.0, 2.0, 6.0)
    return Family("phi3", hf_fields, llama_config(embedding_dim=32, window=9, **scaling))


ORIGINAL_WINDOW = "original_max_position_embeddings"


def falcon(hf_fields: dict[str, Any], **fields: Any) -> Family:
    """Return a Falcon: parallel blocks, with one norm or two, and few key heads."""
    heads = {"num_attention_heads": 4, "layer_norm_epsilon": 1e-3, "ffn_hidden_size": 40, "hidden_size": 32}
    rope = {"rope_parameters": default_rope(100.0)}
    sizes = {**TRICYCLE_SIZES, "embedding_dim": 32, "n_heads": 4, "hidden_size": 40, "norm_eps": 1e-3}
    biases = {} if fields.pop("bias", False) else dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False)
    rotary = {"positions": "rotary", "rotary_base": 100.0, "activation": "gelu_exact", "parallel": True}
    return Family(
        "falcon", {**HF_SIZES, **heads, **rope, **hf_fields}, ModelConfig(**sizes, **rotary, **biases, **fields)
    )


def deepseek(model_type: str, hf_fields: dict[str, Any], **fields: Any) -> Family:
    """Return a DeepSeek: latent attention, a first layer without experts, shared experts, and groups of experts."""
    sizes = {"kv_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 10}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 2}
    layers = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_hidden_layers": 3}
    common = hf_llama_fields(**sizes, **experts, **layers, n_group=3, topk_group=2, routed_scaling_factor=1.5)
    config = {**TRICYCLE_SIZES, "n_heads": 4, "hidden_size": 40, "norm_eps": 1e-5, "n_layers": 3, "tied": True}
    config |= {"latent_size": 14, "rotary_size": 6, "head_size": 8, "value_size": 10, "n_dense_layers": 1}
    config |= {"n_experts": 6, "n_active_experts": 3, "expert_size": 12, "n_shared_experts": 2, "expert_scale": 1.5}
    config |= {"n_groups": 3, "n_active_groups": 2}
    return Family(model_type, {**common, **hf_fields}, LatentConfig(**{**config, **fields}))


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_slow": 0.05, "beta_fast": 0.25}
YARN_ROTARY = {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_window": 8}
YARN_ROTARY |= {"rotary_low_frequency": 0.05, "rotary_high_frequency": 0.25}
YARN_ROTARY |= {"rotary_attention_factor": 1 + 0.1 * np.log(4.0)}
LLAMA3_ROTARY = {"rotary_factor": 8.0, "rotary_low_frequency": 1.5, "rotary_high_frequency": 5.0}
EXPERTS = {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.25, "rms_norm_eps": 1e-2}
EXPERTS_CONFIG = {
    "n_experts": 6,
    "n_active_experts": 3,
    "router_loss": 0.25,
    "normalize_experts": False,
    "norm_eps": 1e-2,
}
MULTIPLIERS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.25, "attention_multiplier": 0.2}
MULTIPLIERS |= {"logits_scaling": 8.0}
SCALES = {"embedding_scale": 6.0, "residual_scale": 0.25, "score_scale": 0.2, "logit_scale": 0.125}
QWEN2_LAYERS = {"num_hidden_layers": 3, "max_window_layers": 2, "use_sliding_window": True, "sliding_window": 5}
QK_NORM = {"qk_norm": True, "qk_norm_gain": True}
GPT2_SIZES = {"vocab_size": VOCABULARY, "n_positions": LONGEST, "n_embd": 24, "n_layer": N_LAYERS, "n_head": 3}
COHERE_FIELDS = hf_llama_fields(hidden_size=32)
del COHERE_FIELDS["rms_norm_eps"]
GPTJ_SIZES = {**HF_SIZES, "num_attention_heads": 3}
FAMILIES: dict[str, Family] = {
    "Llama": llama({"rope_type": "default"}),
    "Llama 3": llama(LLAMA3_SCALING, rotary_scaling="llama3", rotary_original_window=64, **LLAMA3_ROTARY),
    "Llama, linear": llama({"rope_type": "linear", "factor": 4.0}, rotary_scaling="linear", rotary_factor=4.0),
    "Qwen2, YaRN": Family(
        "qwen2",
        hf_llama_fields(rope_parameters=default_rope(100.0) | YARN, use_sliding_window=False),
        llama_config(qkv_bias=True, rotary_base=100.0, **YARN_ROTARY),
    ),
    # a sliding window in every layer
    "Mistral": Family(
        "mistral",
        hf_llama_fields(
            sliding_window=7, rope_parameters=default_rope(1e6), tie_word_embeddings=False, rms_norm_eps=1e-4
        ),
        llama_config(window=7, rotary_base=1e6, tied=False, norm_eps=1e-4),
    ),
    # biases of queries, keys and values only; a sliding window in the second half of the layers
    "Qwen2": Family(
        "qwen2",
        hf_llama_fields(**QWEN2_LAYERS, rope_parameters=default_rope(10_000.0)),
        llama_config(n_layers=3, window=5, full_layers=(0, 1), qkv_bias=True),
    ),
    # norms of queries and keys, and more channels of all heads than of the model
    "Qwen3": Family(
        "qwen3",
        hf_llama_fields(head_dim=16, rms_norm_eps=1e-2, rope_parameters=default_rope(1e6)),
        llama_config(head_size=16, norm_eps=1e-2, rotary_base=1e6, qk_norm_eps=1e-2, **QK_NORM),
    ),
    # norms after attention and MLP, and of queries and keys over all heads together
    "OLMo 2": Family(
        "olmo2",
        hf_llama_fields(rope_parameters=default_rope(500_000.0)),
        llama_config(
            rotary_base=500_000.0, norm_placement="output", qk_norm_eps=1e-5, qk_norm_per_head=False, **QK_NORM
        ),
    ),
    # mixtures of experts, whose weights have the sum 1
    "Mixtral": Family(
        "mixtral",
        hf_llama_fields(**EXPERTS, num_local_experts=6, sliding_window=7, rope_parameters=default_rope(1e6)),
        llama_config(**{**EXPERTS_CONFIG, "normalize_experts": True}, window=7, rotary_base=1e6),
    ),
    # and those whose weights may have another sum
    "Qwen3-MoE": Family(
        "qwen3_moe",
        hf_llama_fields(
            **EXPERTS, num_experts=6, moe_intermediate_size=12, head_dim=16, rope_parameters=default_rope(1e6)
        ),
        llama_config(**EXPERTS_CONFIG, **QK_NORM, qk_norm_eps=1e-2, hidden_size=12, head_size=16, rotary_base=1e6),
    ),
    "OLMoE": Family(
        "olmoe",
        hf_llama_fields(**EXPERTS, num_experts=6, tie_word_embeddings=False, rope_parameters=default_rope(1e4)),
        llama_config(**EXPERTS_CONFIG, **QK_NORM, qk_norm_eps=1e-2, qk_norm_per_head=False, tied=False),
    ),
    # factors of embeddings, residuals, scores and logits
    "Granite": Family(
        "granite",
        hf_llama_fields(**MULTIPLIERS, rope_parameters=default_rope(1e4), mlp_bias=True),
        llama_config(**SCALES, mlp_bias=True),
    ),
    "Granite-MoE": Family(
        "granitemoe",
        hf_llama_fields(**MULTIPLIERS, **EXPERTS, num_local_experts=6, rope_parameters=default_rope(1e4)),
        llama_config(**EXPERTS_CONFIG | SCALES | {"normalize_experts": True}),
    ),
    # attention sinks, a window in every other layer, biases of the router and the experts
    "gpt-oss": Family(
        "gpt_oss",
        hf_llama_fields(
            **EXPERTS, num_local_experts=4, head_dim=8, sliding_window=5, rope_parameters=default_rope(100.0) | YARN
        ),
        llama_config(
            **EXPERTS_CONFIG | {"normalize_experts": True, "router_bias": True, "n_experts": 4},
            **YARN_ROTARY | {"rotary_base": 100.0},
            **{"activation": "clamped_swiglu", "softmax": "sink", "window": 5, "full_layers": (1,), "head_size": 8},
            gated=False,  # by the activation
            bias=True,
        ),
    ),
    # norms before and after, soft-caps of scores and logits, and a window in every other layer
    "Gemma 2": Family(
        "gemma2",
        hf_gemma_fields(
            attn_logit_softcapping=1.5, final_logit_softcapping=2.5, rope_parameters=default_rope(10_000.0)
        ),
        gemma_config(full_layers=(1,), score_cap=1.5, logit_cap=2.5),
    ),
    "Gemma 3": gemma3(),
    "Pythia": neox(parallel=True),
    "GPT-NeoX, one after the other": neox(parallel=False),
    "OPT": opt(before=True),
    "OPT-350m": opt(before=False, embedding_size=16),
    "GPT-2": Family(
        "gpt2", {**GPT2_SIZES, "bos_token_id": 1, "eos_token_id": 2}, ModelConfig(**TRICYCLE_SIZES, n_heads=3)
    ),
    "Phi": phi(),
    "Phi-3": phi3(24),
    "StableLM": stablelm(),
    # no RoPE in the second layer
    "SmolLM3": Family(
        "smollm3",
        hf_llama_fields(no_rope_layers=[1, 0], num_key_value_heads=1, rope_parameters=default_rope(1e5)),
        llama_config(unrotated_layers=(1,), n_key_heads=1, rotary_base=1e5),
    ),
    # layer norms without biases, one for both parts of a block
    "Cohere": Family(
        "cohere",
        {**COHERE_FIELDS, "logit_scale": 0.3, "layer_norm_eps": 1e-3, "rope_parameters": default_rope(100.0)},
        llama_config(
            **{"norm": "layer_norm", "norm_eps": 1e-3, "embedding_dim": 32, "parallel": True, "shared_norm": True},
            logit_scale=0.3,
            rotary_base=100.0,
        ),
    ),
    "Falcon": falcon({"multi_query": True}, n_key_heads=1, shared_norm=True),
    "Falcon, 40B": falcon(
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}, n_key_heads=2, bias=True
    ),
    # RoPE on neighboring channels
    "GPT-J": Family(
        "gptj",
        {**GPTJ_SIZES, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-3},
        ModelConfig(
            **{**TRICYCLE_SIZES, "n_heads": 3, "positions": "rotary", "rotary_fraction": 0.5, "norm_eps": 1e-3},
            **{"parallel": True, "shared_norm": True, "qkv_bias": False, "output_bias": False},
            **{"tied": False, "head_bias": True},
        ),
    ),
    "StableLM, parallel": stablelm(parallel=True),
    # a softmax router, queries without a latent, YaRN with a factor of all scores
    "DeepSeek-V2": deepseek(
        "deepseek_v2",
        {
            **{"q_lora_rank": None, "topk_method": "group_limited_greedy"},
            "rope_parameters": default_rope(100.0) | YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
        },
        **YARN_ROTARY | {"rotary_attention_factor": (1 + 0.07 * np.log(4.0)) / (1 + 0.05 * np.log(4.0))},
        rotary_base=100.0,
        yarn_mscale=0.5,
    ),
    # a sigmoid router with a correction, queries with a latent
    "DeepSeek-V3": deepseek(
        "deepseek_v3",
        {"q_lora_rank": 9, "rope_parameters": default_rope(100.0), "attention_bias": True},
        **{"query_rank": 9, "rotary_base": 100.0, "sigmoid_router": True, "normalize_experts": True},
        **{"qkv_bias": True, "output_bias": True},
    ),
}

SMOLLM2 = {**FAMILIES["Llama"].hf_fields, "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536}
SMOLLM2 |= {"num_hidden_layers": 30, "max_position_embeddings": 2048}


# -------------------------------------------------------------------- models, weights and differences
def new_hf_model(model_type: str, hf_fields: dict[str, Any], lively: bool = True, **options: Any) -> Any:
    """Return a transformers model with random weights, which never ends a text.

    Args:
        lively: whether weights are large enough that each part affects the logits.
        options: of `from_config`, besides eager attention.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **hf_fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options).float().eval()
    randomize_weights(model, lively)
    model.generation_config.eos_token_id = None
    return model


def read(hf_model: Any, part: str = "data") -> Any:
    """Return our model, as read from files of hf_model; with part="grad", its gradients are the weights."""
    if part == "grad":
        original, hf_model = hf_model, deepcopy(hf_model)
        for parameter, copy in zip(original.parameters(), hf_model.parameters(), strict=True):
            copy.data = 0 * copy.data if parameter.grad is None else parameter.grad
        for _, correction in corrections(hf_model):
            correction.zero_()
    with TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        return load(folder).model


def checkpoint_arrays(hf_model: Any) -> dict[str, np.ndarray]:
    """Return the tensors that a model is saved as, by name."""
    with TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        tensors = read_tensors(Path(folder, WEIGHTS))[0]
        return {name: np.array(tensor.read()) for name, tensor in tensors.items()}


def corrections(hf_model: Any) -> list[tuple[str, Any]]:
    """Return the names and values of the corrections of routers, which are no parameters in transformers."""
    return [(name, buffer) for name, buffer in hf_model.named_buffers() if name.endswith("correction_bias")]


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's config.json, and remove those that are None."""
    path = folder / "config.json"
    hf_fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in hf_fields.items() if value is not None}))


def check_refused(hf_fields: dict[str, Any], message: str, n_tensors: int = 90) -> None:
    """Check that a model of these fields, with any tensors, is refused with a message that matches the pattern."""
    tensors = {str(i): StoredTensor((4, 4), "F32", lambda: np.zeros((4, 4))) for i in range(n_tensors)}
    with pytest.raises(ValueError, match=message):
        build_model(StoredModel(Path("memory"), hf_fields, tensors))


def hf_logits(hf_model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return hf_model(torch.tensor(tokens)).logits.numpy()


def randomize_weights(hf_model: Any, lively: bool = True) -> None:
    """Draw random weights of a transformers model; if `lively`, large enough that each part affects the logits."""
    import torch

    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in hf_model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:  # gains and biases, moved off 0 and 1 to count
                p += 0.2 * noise
            elif lively and not re.search("embed|wte|wpe", name):  # embeddings stay small: so the eps of a norm counts
                p.copy_(noise * p.shape[-1] ** -0.5)
        for _, correction in corrections(hf_model):  # small, so that each expert is selected for some token
            correction += 0.1 * torch.randn(correction.shape, generator=generator)


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest element."""
    assert actual.shape == expected.shape
    largest = np.abs(expected).max()
    assert largest > 0
    return float(np.abs(actual - expected).max() / largest)
