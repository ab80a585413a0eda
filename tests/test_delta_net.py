"""Qwen3-Next against transformers' torch code, states against whole texts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers_families
from hf_checks import PROMPT, check_adapter, check_in_float64, check_tokens_and_export
from model_checks import cached_logits, check_generation, check_gradients, check_learning, randomize
from transformers_families import check_refused

from tricycle.models import GPT
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.state_spaces.delta_net import DeltaNetConfig
from tricycle.tokeniser import BPETokeniser
from tricycle_lab.attribution import attribute_logit
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.look.standalone import check_supported

SMALL: dict[str, Any] = {"vocab_size": 61, "embedding_dim": 24, "n_heads": 4, "n_key_heads": 2, "head_size": 8}
SMALL |= {"n_layers": 3, "attention_layers": (1,), "activation": "swish", "gated": True, "hidden_size": 20}
SMALL |= {"n_linear_heads": 4, "n_linear_key_heads": 2, "linear_head_size": 6, "linear_key_size": 5, "chunk_size": 8}
SMALL |= {"context_window": 128, "norm_unit_offset": True, "qk_norm": True, "qk_norm_gain": True}
TOKENS = np.random.default_rng(5).integers(0, 61, (2, 25))
TOKENISER = BPETokeniser(257)
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixture": {"n_experts": 5, "shared_size": 12},
}
each_model = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)


def small(**fields: Any) -> GPT:
    return randomize(GPT(DeltaNetConfig(**{**SMALL, **fields})))


@each_model
def test_states_give_the_logits_of_whole_texts(fields: dict[str, Any]) -> None:
    model = small(**fields)
    logits, caches = cached_logits(model, TOKENS)
    np.testing.assert_allclose(logits, model(TOKENS).array, rtol=1e-3, atol=1e-4)
    sizes = {name: array.shape for name, array in caches[0].last.items()}
    assert sizes == {"conv": (2, 3, 44), "state": (2, 4, 5, 6)}  # not longer than for one token


@pytest.mark.nightly_except(2)
@each_model
def test_batches_beams_drafts_and_single_texts_agree(fields: dict[str, Any]) -> None:
    check_generation(small(**fields), [PROMPT, [4], [5, 6, 7, 8]])


@pytest.mark.nightly_except(2)
@each_model
def test_it_learns(fields: dict[str, Any]) -> None:
    check_learning(GPT(DeltaNetConfig(**{**SMALL, **fields})))


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_activation_checkpointing_and_freeing_change_no_bit(precision: str) -> None:
    check_gradients(lambda: small(**MODELS["mixture"], precision=precision), TOKENS)


def test_the_model_viewer_shows_attention_and_states() -> None:
    model = small(**MODELS["mixture"], vocab_size=257)
    inspectable = InspectableStack(model, TOKENISER, "small")
    assert inspectable.n_heads == dict.fromkeys([f"blocks.{i}.attention" for i in range(3)], 4)
    trace = inspectable.run(PROMPT, Interventions())
    assert [layer.kind for layer in trace.attention_layers] == ["state", "self", "state"]
    state = trace.attention_layer("blocks.2.attention")
    v, decays, k, q, strengths = (x.array for x in state.args)
    expected = model.blocks[2].attention.scan.scan(v, decays, k, q, strengths)[0]
    factors = np.where(np.tri(len(PROMPT), dtype=bool), state.maps()[0], 0)
    np.testing.assert_allclose(np.einsum("hts,shp->thp", factors, v[0]), expected[0], rtol=1e-4, atol=1e-5)
    assert len(trace.head_statistics(0, 1)["layers"][0]["halfLife"]) == 4
    assert trace.attention_layer("blocks.1.attention").maps()[1].shape == (4, 7, 7)
    assert trace.attention_map("blocks.1.attention", 0) and trace.stream_statistics() and trace.logit_lens()
    ablated = inspectable.run(PROMPT, Interventions(ablated_heads=(("blocks.2.attention", 3),)))
    assert abs(ablated.stream["blocks.2"] - trace.stream["blocks.2"]).max() > 1e-3
    changed = inspectable.run([*PROMPT[:-1], 5], Interventions(), trace)
    np.testing.assert_allclose(changed.stream["blocks.2"][:6], trace.stream["blocks.2"][:6], rtol=1e-5, atol=1e-5)


def test_analyses_that_need_attention_in_all_blocks_refuse() -> None:
    with pytest.raises(ValueError, match="expected MultiHeadSelfAttention in all blocks, got GatedDeltaNet"):
        attribute_logit(small(), PROMPT, 5)
    with pytest.raises(ValueError, match="without a gate"):
        attribute_logit(small(attention_layers=(0, 1, 2)), PROMPT, 5)
    with pytest.raises(ValueError, match="HTML page: expected MultiHeadSelfAttention in all blocks, got"):
        check_supported(small(), None)


def test_a_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="a state cannot skip tokens"):
        small()(TOKENS, mask=np.ones(TOKENS.shape, bool))


# -------------------------------------------------------------------- against transformers
HF: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "max_position_embeddings": 128}
HF |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-3, "pad_token_id": None}
HF |= {"linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 5, "linear_value_head_dim": 7}
HF |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10}
HF |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CASES = {
    "three heads per key head": HF,
    "tied, biases, all defaults of layers": {
        **{name: value for name, value in HF.items() if name != "layer_types"},
        **{"num_hidden_layers": 4, "tie_word_embeddings": True, "attention_bias": True, "norm_topk_prob": False},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}


def new_hf_model(name: str) -> Any:
    eager = {"experts_implementation": "eager"}  # works in float64
    return transformers_families.new_hf_model("qwen3_next", CASES[name], **eager)


@pytest.mark.nightly_except(2)
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_float64(new_hf_model(name), TOKENS, tmp_path, monkeypatch)


@pytest.mark.nightly_except(1)
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_exports_agree(name: str, tmp_path: Path) -> None:
    check_tokens_and_export(new_hf_model(name), TOKENS, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
def test_adapters_have_the_names_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    targets = "q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"
    check_adapter(new_hf_model("three heads per key head"), targets, (TOKENS,), tmp_path)


REFUSED = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "dense layers": ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    "sparse step": ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    "no experts": ({"num_experts": 0}, "num_experts"),
    "heads": ({"linear_num_key_heads": 4}, "n_linear_key_heads"),
    "kind of a layer": ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    "number of layers": ({"layer_types": ["linear_attention"]}, "layer_types"),
    "layers": ({"num_hidden_layers": 100}, "num_hidden_layers"),
    "experts": ({"num_experts": 100}, "number of experts"),
    "kernel": ({"linear_conv_kernel_dim": 2**40}, "parameters"),
    "state": ({"linear_key_head_dim": 2**40}, "parameters"),
    "shared expert": ({"shared_expert_intermediate_size": 2**40}, "parameters"),
}


@pytest.mark.parametrize(("fields", "name"), REFUSED.values(), ids=REFUSED)
def test_unsupported_fields_are_refused(fields: dict[str, Any], name: str) -> None:
    check_refused({"model_type": "qwen3_next", **HF, **fields}, name)


def test_a_model_without_experts_has_no_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_experts"):
        export_folder(small(), None, tmp_path / "exported")
    with pytest.raises(ValueError, match="qwen3next: expected n_experts to be above 0"):
        export_gguf(small(), None, tmp_path / "model.gguf", "F32")
