"""Families of models against transformers: configs, logits, gradients, tokens and training; folders of all kinds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_checks import check_in_float64, check_tokens
from model_checks import cached_logits
from transformers_families import FAMILIES as SMALL
from transformers_families import (
    GEMMA3_ROPE,
    LLAMA3_SCALING,
    MULTIPLIERS,
    SMOLLM2,
    VOCABULARY,
    Family,
    change_config,
    default_rope,
    difference,
    hf_gemma_fields,
    hf_llama_fields,
    hf_logits,
    new_hf_model,
    phi3,
    read,
)

from tricycle.configs import ModelConfig
from tricycle.latent_attention import LatentConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained import load
from tricycle.pretrained.config_equivalence import IGNORED_FIELDS, differing_fields
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families import FAMILIES
from tricycle_lab.probe import Probe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.usefixtures("one_torch_thread")
AGREED = 3e-6
LLAMA = hf_llama_fields(max_position_embeddings=128, tie_word_embeddings=False)
GEMMA = hf_gemma_fields(max_position_embeddings=128)
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
NEOX, OPT, GPT2, PHI = (SMALL[name].hf_fields for name in ("Pythia", "OPT", "GPT-2", "Phi"))
FALCON, GPTJ = (SMALL[name].hf_fields for name in ("Falcon", "GPT-J"))
DEEPSEEK = SMALL["DeepSeek-V3"].hf_fields
NEW_FALCON = {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}


def rope(kind: str = "default", **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {**default_rope(5000.0), "rope_type": kind, **values}}


LINEAR = rope("linear", factor=2.0)
# model_type and fields; every name says what is tried
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (family.model_type, family.hf_fields) for name, family in SMALL.items()},
    "llama, one key head": ("llama", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, all heads": ("llama", {**LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama, heads of 14": ("llama", {**LLAMA, "head_dim": 14, "hidden_size": 20}),
    "llama, biases": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "mistral, no window": ("mistral", {**LLAMA, "sliding_window": None, "tie_word_embeddings": True}),
    "mistral, no word of a window": ("mistral", {**LLAMA, "head_dim": 10}),
    "qwen2": ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2, layer types": ("qwen2", {**LLAMA, **WINDOW, **LINEAR, "num_hidden_layers": 3, "layer_types": SLIDING}),
    "qwen3, usual heads": ("qwen3", {**LLAMA, "rms_norm_eps": 1e-2, "attention_bias": True}),
    "qwen3, llama3": ("qwen3", {**LLAMA, "head_dim": 6, "rope_parameters": default_rope(5000.0) | LLAMA3_SCALING}),
    "llama, YaRN": ("llama", {**LLAMA, **rope("yarn", factor=8.0, original_max_position_embeddings=16)}),
    "llama, YaRN, other factors": (
        "llama",
        {**LLAMA, **rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.4, truncate=False)},
    ),
    "olmo2, all heads": ("olmo2", {**LLAMA, "num_key_value_heads": 4, "attention_bias": True, **rope()}),
    "mixtral, usual": ("mixtral", {**LLAMA, "num_local_experts": 4, "head_dim": 10}),
    "qwen3_moe, window": (
        "qwen3_moe",
        {
            **LLAMA,
            **WINDOW,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    "olmoe, all heads": (
        "olmoe",
        {
            **LLAMA,
            "num_key_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    "granite, all heads": ("granite", {**LLAMA, **MULTIPLIERS, "num_key_value_heads": 4, "attention_bias": True}),
    "granitemoe, all heads": (
        "granitemoe",
        {
            **LLAMA,
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "attention_bias": True,
            "attention_multiplier": 0.3,
        },
    ),
    "gpt_oss, usual RoPE": (
        "gpt_oss",
        {
            **LLAMA,
            **rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=8),
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 9,
        },
    ),
    "gemma2, no caps": ("gemma2", {**GEMMA, **NO_CAPS, "attention_bias": True}),
    "gemma2, usual": ("gemma2", {**GEMMA, "head_dim": 12, "tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0}),
    "neox, all turns": (
        "gpt_neox",
        {**NEOX, "attention_bias": False, "hidden_act": "gelu_new", **rope(partial_rotary_factor=1.0)},
    ),
    "neox, tied": ("gpt_neox", {**NEOX, "tie_word_embeddings": True, **LINEAR}),
    "opt, norms before, narrow": ("opt", {**OPT, "word_embed_proj_dim": 10, "activation_function": "gelu"}),
    "opt, no biases": ("opt", {**OPT, "enable_bias": False, "do_layer_norm_before": False}),
    "gpt2, untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 50, "activation_function": "relu"}),
    "gpt2, unscaled": ("gpt2", {**GPT2, "scale_attn_weights": False, "n_head": 4, "layer_norm_epsilon": 1e-3}),
    "smollm3, windows": (
        "smollm3",
        {
            **LLAMA,
            **WINDOW,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layer_interval": 2,
        },
    ),
    "stablelm, usual": ("stablelm", {**LLAMA, "use_qkv_bias": True, "hidden_size": 32, "hidden_act": "gelu"}),
    "phi3, a short text that becomes long": ("phi3", phi3(40).hf_fields),
    "phi3, usual": ("phi3", {**LLAMA, "num_key_value_heads": 4, "sliding_window": None}),
    "cohere, biases": (
        "cohere",
        {**LLAMA, "hidden_size": 32, "attention_bias": True, "num_key_value_heads": 4, "hidden_act": "gelu"},
    ),
    "falcon, one after the other": ("falcon", {**FALCON, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon, 11B": ("falcon", {**FALCON, **NEW_FALCON, "num_kv_heads": 4, "tie_word_embeddings": False}),
    "gptj, all channels": ("gptj", {**GPTJ, "rotary_dim": 8, "n_inner": 50, "activation_function": "relu"}),
    "deepseek_v2, greedy": (
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "greedy", "q_lora_rank": 5, "first_k_dense_replace": 0, "attention_bias": True},
    ),
    "deepseek_v3, few dense layers": (
        "deepseek_v3",
        {
            **{**DEEPSEEK, **rope("yarn", factor=8.0, mscale=1.0, mscale_all_dim=1.0)},
            **{"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "v_head_dim": 4},
            **{"first_k_dense_replace": 2, "n_shared_experts": 1, "tie_word_embeddings": False},
        },
    ),
    "phi, grouped heads": (
        "phi",
        {**PHI, "num_attention_heads": 4, "num_key_value_heads": 2, **rope(partial_rotary_factor=0.7)},
    ),
}
# Cases in which rounding changes some gradients by more, in transformers by up to 2.2e-5.
ROUNDED = ("llama, YaRN", "qwen3, llama3", "olmo2, all heads")
each_family = pytest.mark.parametrize("family", SMALL.values(), ids=SMALL)


def new_case(name: str, **changes: Any) -> Any:
    """Return a model of transformers with room for 71 tokens."""
    model_type, hf_fields = CASES[name]
    window = {"n_positions" if model_type == "gpt2" else "max_position_embeddings": 128}
    return new_hf_model(model_type, {**hf_fields, **window, **changes})


def some_tokens(n_batches: int = 1, vocab_size: int = VOCABULARY, batch: int = 3) -> np.ndarray:
    """Return (n_batches, B, 25) ids: text in which each token often decides the next."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, vocab_size, (n_batches, batch, 25))
    for t in range(1, tokens.shape[-1]):
        follows = generator.random((n_batches, batch)) < 0.8
        tokens[..., t] = np.where(follows, (7 * tokens[..., t - 1] + 3) % vocab_size, tokens[..., t])
    return tokens


TOKENS = some_tokens()[0]


def assert_equal_logits(folder: Path, hf_model: Any) -> None:
    """Load the folder, and compare the logits with those of the model that was saved there."""
    assert difference(load(folder).model(TOKENS).array, hf_logits(hf_model, TOKENS)) < AGREED


# -------------------------------------------------------------------- logits, gradients and tokens
@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_tokens_agree(name: str, tmp_path: Path) -> None:
    hf_model = new_case(name)
    hf_model.save_pretrained(tmp_path)
    model = load(tmp_path).model
    assert difference(model(TOKENS).array, hf_logits(hf_model, TOKENS)) < AGREED
    by, where = compare_gradients(model, hf_model, TOKENS)
    assert by < (5e-5 if name in ROUNDED else 2 * AGREED), where
    check_tokens(model, hf_model)


@pytest.mark.parametrize("name", ROUNDED)
def test_gradients_agree_in_float64(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_float64(new_case(name), TOKENS, tmp_path, monkeypatch)


@each_family
def test_cached_logits_are_those_of_the_whole_text(family: Family) -> None:
    model = read(new_hf_model(family.model_type, family.hf_fields))
    tokens = TOKENS[:, :24]
    assert difference(cached_logits(model, tokens, (7, 8, 9))[0], model(tokens).array) < AGREED


def both_losses(model: GPT, hf_model: Any, tokens: np.ndarray) -> tuple[Any, Any]:
    """Return the losses of the next tokens, after the backward passes of both."""
    loss = CrossEntropy()(tokens[:, 1:], model(tokens[:, :-1]))
    logits = hf_model(torch.from_numpy(tokens[:, :-1].copy())).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(tokens[:, 1:].copy()).flatten())
    loss.backward()
    expected.backward()
    return loss.item(), expected.item()


def compare_gradients(model: GPT, hf_model: Any, tokens: np.ndarray) -> tuple[float, str]:
    """Return the worst difference of the gradients of one loss, and where it is."""
    loss, expected = both_losses(model, hf_model, tokens)
    assert loss == pytest.approx(expected, rel=1e-5)
    grads = read(hf_model, "grad").state_dict()
    assert set(grads) == {name for name, _ in model.named_parameters()}
    ours = {name: p.grad.array for name, p in model.named_parameters()}
    for name in [name for name in ours if name.endswith(".correction")]:
        assert not ours.pop(name).any()  # it only selects experts
    return max((difference(grad, grads[name]), name) for name, grad in ours.items())


# -------------------------------------------------------------------- the small models of other tests
@each_family
def test_converted_configs_are_equivalent(family: Family) -> None:
    written = transformers.AutoConfig.for_model(family.model_type, **family.hf_fields).to_dict()
    assert differing_fields(family.config, FAMILIES[family.model_type].to_config(ConfigFields(written))) == []


@each_family
def test_each_config_field_changes_the_logits(family: Family) -> None:
    """Otherwise equal logits would not test every field."""
    model = read(new_hf_model(family.model_type, family.hf_fields))
    expected = model(TOKENS).array
    without_effect = []
    for name in telling_fields(family.config):
        try:
            other = GPT(replace(family.config, **{name: getattr(type(family.config)(), name)}))
            other.load_state_dict(model.state_dict())
        except ValueError:  # another shape: seen before anything is computed
            continue
        if difference(other(TOKENS).array, expected) < 5 * AGREED:
            without_effect.append(name)
    assert without_effect == []


def telling_fields(config: ModelConfig) -> Iterable[str]:
    """Return those that are not at their defaults, but for the sizes that every model has."""
    default = type(config)()
    changed = [field.name for field in fields(config) if getattr(config, field.name) != getattr(default, field.name)]
    return [name for name in changed if name not in ("vocab_size", "context_window", "n_layers", *IGNORED_FIELDS)]


@each_family
def test_probe_records_attention_weights_within_the_window(family: Family) -> None:
    config = family.config
    batch, n_tokens = TOKENS.shape
    model = read(new_hf_model(family.model_type, family.hf_fields))
    with Probe(model) as probe:
        model(TOKENS)
    for layer in range(config.n_layers):
        weights = probe.weights[f"blocks.{layer}.attention"]
        assert weights.shape == (batch, config.n_heads, n_tokens, n_tokens)
        totals = weights.sum(axis=-1)
        assert (totals < 1).all() if config.softmax == "sink" else np.allclose(totals, 1, rtol=1e-5)
        age = np.subtract.outer(np.arange(n_tokens), np.arange(n_tokens))
        visible = (age >= 0) & (age < (config.window_size(layer) or n_tokens))
        assert np.array_equal((weights > 0).any(axis=(0, 1)), visible)
        assert probe.activations[f"blocks.{layer}"].shape == (batch, n_tokens, config.embedding_dim)


@each_family
def test_bfloat16_logits_are_close_to_float32(family: Family) -> None:
    model = read(new_hf_model(family.model_type, family.hf_fields))
    expected = model(TOKENS).array
    logits = model.use_precision("bfloat16")(TOKENS)
    errors = np.abs(logits.array - expected).max(axis=-1) / np.abs(expected).max()
    # a rounding may select another expert for a few tokens, whose results then differ
    assert np.quantile(errors, 0.9 if family.config.n_experts else 1) < 0.1
    CrossEntropy()(TOKENS, logits).backward()
    assert all(p.grad.shape == p.shape and p.grad.dtype == np.float32 for p in model.parameters())


# -------------------------------------------------------------------- other spellings of the same
GEMMA3_BASES = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
LINEAR_4 = {"type": "linear", "factor": 4.0}
OLD = {"rope_parameters": None, "dtype": None, "torch_dtype": "float32"}
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, theta": ("Llama", {"rope_theta": 100_000.0}),
    "llama, linear, type": ("Llama, linear", {"rope_theta": 100_000.0, "rope_scaling": LINEAR_4}),
    "llama, llama3": ("Llama 3", {"rope_theta": 100_000.0, "rope_scaling": LLAMA3_SCALING}),
    "neox": ("Pythia", {"rotary_emb_base": 1000, "rotary_pct": 0.25}),
    "neox, fields of others": ("Pythia", {"rotary_emb_base": 1000, "rope_theta": 5.0, "partial_rotary_factor": 0.5}),
    "phi": ("Phi", {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),
    "gemma3": ("Gemma 3", {**GEMMA3_BASES, "rope_scaling": GEMMA3_ROPE["full_attention"]}),
    "gemma3, RoPE without types": ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "gemma3, pattern": ("gemma3", {**GEMMA3_BASES, "layer_types": None, "_sliding_window_pattern": None}),
    "qwen2, no layer types": ("Qwen2", {"layer_types": None, "rope_theta": 10_000.0}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_config_fields_of_transformers_4(spelling: str, tmp_path: Path) -> None:
    name, hf_fields = SPELLINGS[spelling]
    hf_model = new_case(name)
    hf_model.save_pretrained(tmp_path)
    change_config(tmp_path, **{**OLD, **hf_fields})
    assert_equal_logits(tmp_path, hf_model)


def test_absent_fields_have_the_defaults_of_their_class() -> None:
    """What a class's own default config says is what an empty config.json means."""
    kinds = [kind for kind, family in FAMILIES.items() if family.config_class in (ModelConfig, LatentConfig)]
    assert len(kinds) > 10
    for kind in kinds:
        required = {"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}  # it has no default
        written = transformers.AutoConfig.for_model(kind, **required).to_dict()
        minimal = {"model_type": kind, **required, **({"text_config": {}} if kind == "gemma3" else {})}
        bare, full = (FAMILIES[kind].to_config(ConfigFields(values)) for values in (minimal, written))
        assert differing_fields(bare, full) == [], kind


def test_text_part_of_an_image_model_loads(tmp_path: Path) -> None:
    hf_model = new_case("Gemma 3")
    hf_model.save_pretrained(tmp_path)
    text_config = json.loads((tmp_path / "config.json").read_text())
    del text_config["model_type"]
    for prefix in ("language_model.model.", "model.language_model."):
        folder = tmp_path / prefix.strip(".")
        folder.mkdir()
        tensors = {prefix + name.removeprefix("model."): p.detach() for name, p in hf_model.named_parameters()}
        tensors["vision_tower.encoder.weight"] = torch.zeros(3)
        tensors["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3)
        safetensors.save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text_config}))
        assert_equal_logits(folder, hf_model)


# -------------------------------------------------------------------- other files of the same
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "OPT-350m", "Pythia"])
def test_folder_without_head_loads(name: str, tmp_path: Path) -> None:
    """As AutoModel writes it: names without the first part."""
    hf_model = new_case(name, tie_word_embeddings=True)
    hf_model.base_model.save_pretrained(tmp_path)
    assert_equal_logits(tmp_path, hf_model)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Pythia"])
def test_many_files(name: str, tmp_path: Path) -> None:
    hf_model = new_case(name)
    hf_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equal_logits(tmp_path, hf_model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Pythia", "OPT-350m", "Gemma 2"])
def test_files_of_16_bits(name: str, dtype: str, tmp_path: Path) -> None:
    """The values are those of the file; kept in 16 bits they give the same."""
    new_case(name).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal_logits(tmp_path, hf_model)
    stored = load(tmp_path, weights="stored").model
    agreed = 2e-5 if dtype == "bfloat16" else AGREED  # bfloat16 products use the first 16 bits of each number of x
    assert difference(stored(TOKENS).array, hf_logits(hf_model, TOKENS)) < agreed
    for parameter_name, parameter in stored.named_parameters():
        is_matrix = parameter.ndim == 2 and "position" not in parameter_name
        assert parameter.dtype == (dtype if is_matrix else "float32"), parameter_name
        assert parameter.requires_grad != is_matrix


# -------------------------------------------------------------------- a whole model
@pytest.mark.nightly  # it takes minutes
def test_smollm2_logits_gradients_and_training_agree(capsys: pytest.CaptureFixture) -> None:
    """Compare logits, gradients and twenty training steps at full size."""
    torch.set_num_threads(os.cpu_count() or 1)
    hf_model = new_hf_model("llama", SMOLLM2, lively=False)
    model = read(hf_model)
    assert model.n_parameters == 134_515_008
    batches = some_tokens(20, SMOLLM2["vocab_size"], batch=1)
    by_logits = difference(model(batches[0]).array, hf_logits(hf_model, batches[0]))
    by_gradients, where = compare_gradients(model, hf_model, batches[0])
    model.zero_grad()
    losses = np.array(train_both(model, hf_model, batches, 1e-4))
    by_losses = np.abs(np.subtract(*losses.T)).max()
    expected = read(hf_model).state_dict()
    by_weights = max(np.abs(array - expected[name]).max() for name, array in model.state_dict().items())
    with capsys.disabled():
        print(f"\nlogits {by_logits:.1e}, gradients {by_gradients:.1e} ({where}), relative to the largest")
        print(f"losses {by_losses:.1e}, weights {by_weights:.1e}; loss {losses[0, 0]:.3f} to {losses[-1, 0]:.3f}")
    assert by_logits < 1e-4 and by_gradients < 1e-4
    assert by_losses < 1e-3 and by_weights < 1e-3


def train_both(model: GPT, hf_model: Any, batches: np.ndarray, learning_rate: float) -> list[tuple[float, float]]:
    """Update both by AdamW for each batch, with decay on the same parameters; return the losses of both."""
    optimiser = AdamW(learning_rate, (0.9, 0.95), weight_decay=0.1, decays=lambda p: p.ndim > 1)
    groups = [
        {"params": [p for p in hf_model.parameters() if (p.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    hf_optimiser = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for tokens in batches:
        hf_optimiser.zero_grad()
        losses.append(both_losses(model, hf_model, tokens))
        model.update(optimiser)
        hf_optimiser.step()
    return losses
