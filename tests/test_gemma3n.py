"""Gemma 3n's text model against transformers, folders of both layouts, adapters, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers_families
from hf_checks import check_adapter, check_in_float64, check_tokens_and_export
from transformers_families import check_refused, difference, hf_logits

from tricycle.configs.size import min_n_weights
from tricycle.models import GPT
from tricycle.multi_stream.decoder import MultiStreamConfig
from tricycle.pretrained import load
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.families import FAMILIES
from tricycle.pretrained.gguf_writer import export_gguf

HF: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6}
HF |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
HF |= {"rms_norm_eps": 1e-3, "pad_token_id": None, "sliding_window": 5, "vocab_size_per_layer_input": 50}
HF |= {"hidden_size_per_layer_input": 6, "altup_num_inputs": 3, "laurel_rank": 4, "num_kv_shared_layers": 3}
HF |= {"activation_sparsity_pattern": [0.7, 0.5, 0.0, 0.0, 0.9, 0.0], "final_logit_softcapping": 3.0}
HF |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
ROPE = {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
ROPE["sliding_attention"] = {"rope_type": "default", "rope_theta": 100.0}
DEFAULT = {name: value for name, value in HF.items() if name not in ("layer_types", "activation_sparsity_pattern")}
CASES: dict[str, dict[str, Any]] = {
    "shared keys, sparse": HF,
    "biases, own keys, hidden sizes": {
        **HF,
        **{"num_kv_shared_layers": 0, "attention_bias": True, "tie_word_embeddings": False, "altup_num_inputs": 2},
        **{"intermediate_size": [40, 30, 20, 40, 8, 40], "final_logit_softcapping": 50.0, "rope_parameters": ROPE},
        **{"hidden_activation": "silu", "num_key_value_heads": 1, "vocab_size_per_layer_input": 61},
    },
    "default layers": {**DEFAULT, "num_hidden_layers": 11, "num_kv_shared_layers": 5, "altup_num_inputs": 4},
}
each_case = pytest.mark.parametrize("name", CASES)
TOKENS = np.random.default_rng(5).integers(0, 61, (2, 25))


def new_hf_model(name: str) -> Any:
    return transformers_families.new_hf_model("gemma3n_text", CASES[name])


@pytest.mark.nightly_except(3)
@pytest.mark.usefixtures("one_torch_thread")
@each_case
def test_logits_and_gradients_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_float64(new_hf_model(name), TOKENS, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@each_case
def test_tokens_and_exports_agree(name: str, tmp_path: Path) -> None:
    hf_model = new_hf_model(name)
    check_tokens_and_export(hf_model, TOKENS, tmp_path)
    assert difference(load(tmp_path / "exported").model(TOKENS).array, hf_logits(hf_model, TOKENS)) < 2e-5
    theirs = type(hf_model).from_pretrained(tmp_path / "exported")
    assert difference(hf_logits(theirs, TOKENS), hf_logits(hf_model, TOKENS)) < 2e-5


@pytest.mark.usefixtures("one_torch_thread")
def test_the_multimodal_layout_loads(tmp_path: Path) -> None:
    """Its files also have the other models, and matrices of keys in the layers that share those of earlier ones."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    hf_model = new_hf_model("shared keys, sparse")
    hf_model.save_pretrained(tmp_path)
    text_config = json.loads((tmp_path / "config.json").read_text())
    prefix = "model.language_model."
    tensors = {prefix + name.removeprefix("model."): p.detach() for name, p in hf_model.named_parameters()}
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"{prefix}layers.5.self_attn.{part}.weight"] = torch.zeros(3)
    for part in ("vision_tower.timm_model.x", "audio_tower.conformer.x", "embed_vision.x", "embed_audio.x"):
        tensors[f"model.{part}.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": text_config}))
    assert difference(load(tmp_path).model(TOKENS).array, hf_logits(hf_model, TOKENS)) < 2e-5
    del tensors[f"{prefix}layers.0.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing model.layers.0.self_attn.k_proj.weight"):
        load(tmp_path)


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "linear_left", "per_layer_input_gate"]
TARGETS += ["per_layer_model_projection", "altup_projections.1", "modality_router"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("targets", [TARGETS, ["all-linear"]], ids=["some layers", "all layers"])
def test_adapters_have_the_names_of_peft(targets: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    check_adapter(new_hf_model("shared keys, sparse"), tuple(targets), (TOKENS,), tmp_path)


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf_config = transformers.AutoConfig.for_model("gemma3n_text")
    to_config = FAMILIES["gemma3n_text"].to_config
    converted = to_config(ConfigFields(hf_config.to_dict()))
    minimal = {"model_type": "gemma3n_text"}, {"model_type": "gemma3n", "text_config": {}}
    for config in (MultiStreamConfig(), *(to_config(ConfigFields(fields)) for fields in minimal)):
        assert differing_fields(config, converted) == []
    with torch.device("meta"):
        n_weights = transformers.Gemma3nForCausalLM(hf_config).num_parameters()
    assert 0.97 * n_weights < min_n_weights(converted) < n_weights


@pytest.mark.parametrize("fields", [{"residual_rank": 5}, {"sparsity": (0.5,) * 6}, {"window": 0}], ids=str)
def test_configs_that_differ_are_not_equivalent(fields: dict[str, Any]) -> None:
    config = FAMILIES["gemma3n_text"].to_config(ConfigFields(HF))
    assert set(fields) <= set(differing_fields(config, MultiStreamConfig(**{**vars(config), **fields})))


REFUSED = {
    "active stream": ({"altup_active_idx": 1}, "altup_active_idx"),
    "scale": ({"altup_correct_scale": False}, "altup_correct_scale"),
    "kind of a layer": ({"layer_types": ["linear_attention"] * 6}, "layer_types"),
    "no earlier layer": ({"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, "n_shared_layers"),
    "shared layers": ({"num_kv_shared_layers": 6}, "n_shared_layers"),
    "no number of shared layers": ({"num_kv_shared_layers": None}, "num_kv_shared_layers"),
    "sparsity": ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern"),
    "sparsity above 1": ({"activation_sparsity_pattern": [1.5] * 6}, "sparsity"),
    "hidden sizes": ({"intermediate_size": [40] * 5}, "intermediate_size"),
    "hidden size": ({"intermediate_size": None}, "intermediate_size"),
    "partial RoPE": ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
    "layers": ({"num_hidden_layers": 100, "layer_types": None}, "num_hidden_layers"),
    "streams": ({"altup_num_inputs": 2**20}, "parameters"),
    "rows": ({"vocab_size_per_layer_input": 2**40}, "parameters"),
    "text": ({"model_type": "gemma3n"}, "text_config"),
}


@pytest.mark.parametrize(("fields", "name"), REFUSED.values(), ids=REFUSED)
def test_unsupported_fields_are_refused(fields: dict[str, Any], name: str) -> None:
    check_refused({"model_type": "gemma3n_text", **HF, **fields}, name)


def test_what_no_file_represents_is_not_exported(tmp_path: Path) -> None:
    config = FAMILIES["gemma3n_text"].to_config(ConfigFields(HF))
    for field, message in (("logit_cap", "logit_cap to be above 0, got 0"), ("score_scale", "not support score_scale")):
        model = GPT(MultiStreamConfig(**{**vars(config), field: {"logit_cap": 0.0}.get(field, 0.5)}))
        with pytest.raises(ValueError, match=f"gemma3n_text.* {message}"):
            export_folder(model, None, tmp_path / "exported")
    with pytest.raises(ValueError, match="gemma3n: expected hidden_size to be at least 8192"):
        export_gguf(model, None, tmp_path / "model.gguf", "F32")
