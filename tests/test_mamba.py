"""Mamba-2 and Granite 4 against transformers' torch code, states against whole texts, hybrids, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers_families
from hf_checks import PROMPT, check_adapter, check_in_float64, check_tokens_and_export
from model_checks import cached_logits, check_generation, check_learning, randomize
from test_look import TEXT, TOKENISER, assert_close_traces
from transformers_families import check_refused, difference, hf_llama_fields

from tricycle.configs.mamba import MambaConfig
from tricycle.configs.presets import HybridConfig
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.export import export_folder
from tricycle.weights import set_memory_order
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.look.page import collect_static_data
from tricycle_lab.look.trace import Trace

SMALL: dict[str, Any] = {"vocab_size": 61, "embedding_dim": 24, "n_heads": 4, "head_size": 12, "n_layers": 2}
SMALL |= {"state_size": 10, "n_groups": 2, "chunk_size": 8, "context_window": 128}
TOKENS = np.random.default_rng(5).integers(0, 61, (2, 25))


def small(**fields: Any) -> GPT:
    return randomize(GPT(MambaConfig(**{**SMALL, **fields})))


MODELS: dict[str, dict[str, Any]] = {
    "Mamba-2": {},
    "hybrid": {"n_layers": 3, "attention_layers": (1,), "positions": "rotary", "hidden_size": 40, "conv_bias": False},
    "hybrid with experts": {
        **{"n_layers": 3, "attention_layers": (1,), "hidden_size": 20, "n_mamba_heads": 4, "mamba_head_size": 12},
        **{"n_heads": 2, "n_experts": 4, "shared_size": 40, "mamba_mlp": True, "residual_scale": 0.7},
    },
}
each_model = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)


@each_model
def test_states_give_the_logits_of_whole_texts(fields: dict[str, Any]) -> None:
    model = small(**fields)
    logits, caches = cached_logits(model, TOKENS)
    np.testing.assert_allclose(logits, model(TOKENS).array, rtol=1e-3, atol=1e-4)
    sizes = {name: array.shape for name, array in caches[0].last.items()}
    assert sizes == {"conv": (2, 3, 88), "state": (2, 4, 10, 12)}  # not longer than for one token


@each_model
def test_batches_beams_drafts_and_single_texts_agree(fields: dict[str, Any]) -> None:
    check_generation(small(**fields), [PROMPT, [4], [5, 6, 7, 8]])


@pytest.mark.nightly_except(9)
@each_model
def test_it_learns(fields: dict[str, Any]) -> None:
    check_learning(GPT(MambaConfig(**{**SMALL, **fields})))


def test_residual_scale_multiplies_the_outputs_of_mixers() -> None:
    scaled, same = small(residual_scale=0.5), small()
    for block in same.blocks:
        block.mixer.projection.weights.array[...] *= 0.5
    np.testing.assert_allclose(scaled(TOKENS).array, same(TOKENS).array, rtol=1e-5, atol=1e-5)


def test_a_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="a state cannot skip tokens"):
        small()(TOKENS, mask=np.ones(TOKENS.shape, bool))


def test_fields_that_mamba_layers_lack_are_refused() -> None:
    for name, value in (("key_shift", True), ("norm_placement", "after"), ("norm_placement", "both")):
        with pytest.raises(ValueError, match=f"expected {name} to be"):
            small(**{name: value})
    small(parallel=True)
    with pytest.raises(ValueError, match="expected parallel to be False with mamba_mlp"):
        small(parallel=True, mamba_mlp=True)


# -------------------------------------------------------------------- against transformers
HF: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_heads": 4, "head_dim": 12, "num_hidden_layers": 2}
HF |= {"state_size": 10, "n_groups": 2, "chunk_size": 8, "pad_token_id": None, "layer_norm_epsilon": 1e-3}
GRANITE = hf_llama_fields(hidden_size=24, intermediate_size=20, max_position_embeddings=128, rms_norm_eps=1e-3)
GRANITE |= {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 10, "mamba_n_groups": 2, "mamba_chunk_size": 8}
GRANITE |= {"shared_intermediate_size": 40, "embedding_multiplier": 6.0, "residual_multiplier": 0.7}
GRANITE |= {"attention_multiplier": 0.4, "logits_scaling": 3.0, "num_hidden_layers": 3}
GRANITE |= {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two groups": ("mamba2", HF),
    "tied, biases": (
        "mamba2",
        {
            **HF,
            **{"n_groups": 1, "head_dim": 8, "num_heads": 9, "expand": 3, "use_bias": True, "use_conv_bias": False},
            **{"tie_word_embeddings": True, "conv_kernel": 3, "num_hidden_layers": 3},
        },
    ),
    "Granite 4": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0}),
    "Granite 4, experts": (
        "granitemoehybrid",
        {
            **GRANITE,
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "tie_word_embeddings": False, "mamba_d_conv": 3},
            **{"position_embedding_type": "rope", "rope_theta": 100.0, "mamba_conv_bias": False},
            **{"attention_bias": True, "mamba_proj_bias": True, "layer_types": ["attention", "mamba", "mamba"]},
        },
    ),
}


def new_hf_model(name: str) -> Any:
    """Return a transformers model with random weights, large enough that each part affects the logits."""
    eager = {"experts_implementation": "eager"}  # works in float64
    return transformers_families.new_hf_model(*CASES[name], **eager)


@pytest.mark.nightly_except(3)
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_float64(new_hf_model(name), TOKENS, tmp_path, monkeypatch)


@pytest.mark.nightly_except(3)
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_exports_agree(name: str, tmp_path: Path) -> None:
    check_tokens_and_export(new_hf_model(name), TOKENS, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("two groups", ("in_proj",)),  # PEFT rejects out_proj of Mamba-2
        ("tied, biases", ("in_proj",)),
        ("Granite 4", ("in_proj", "out_proj", "q_proj", "o_proj", "input_linear", "output_linear")),
    ],
)
def test_adapters_have_the_names_of_peft(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    check_adapter(new_hf_model(name), targets, (TOKENS,), tmp_path)


GRANITE_SIZES = {**GRANITE, "num_local_experts": 0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
    "limits": ("mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    "expansion": ("mamba2", {"expand": 3}, "expand"),
    "groups": ("mamba2", {"n_groups": 3}, "n_groups"),
    "layers": ("mamba2", {"num_hidden_layers": 10}, "num_hidden_layers"),
    "state": ("mamba2", {"state_size": 2**40}, "parameters"),
    "kernel": ("mamba2", {"conv_kernel": 2**40}, "parameters"),
    "Granite 4, activation": ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act"),
    "Granite 4, limits": ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    "Granite 4, positions": ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    "Granite 4, layer": ("granitemoehybrid", {"layer_types": ["mamba", "attention", "conv"]}, "layer_types"),
    "Granite 4, layers": ("granitemoehybrid", {"layer_types": None, "layers_block_type": ["mamba"]}, "layers_block"),
    "Granite 4, heads": ("granitemoehybrid", {"mamba_d_head": 8}, "mamba_d_head"),
    "Granite 4, norm": ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function"),
    "Granite 4, shared MLP": ("granitemoehybrid", {"shared_intermediate_size": 0}, "shared_intermediate_size"),
    "Granite 4, MLP": ("granitemoehybrid", {"shared_intermediate_size": 2**40}, "parameters"),
    "Granite 4, experts": ("granitemoehybrid", {"num_local_experts": 2**40}, "experts"),
}


@pytest.mark.parametrize(("model_type", "fields", "name"), REFUSED.values(), ids=REFUSED)
def test_unsupported_fields_are_refused(model_type: str, fields: dict[str, Any], name: str) -> None:
    common = HF if model_type == "mamba2" else GRANITE_SIZES
    check_refused({"model_type": model_type, **common, **fields}, name, n_tensors=9)


def test_hybrids_of_other_blocks_have_no_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mamba2.*attention_layers"):
        export_folder(small(**MODELS["hybrid"]), None, tmp_path / "exported")
    plain = {"mamba_mlp": True, "hidden_size": 40, "gated": True, "activation": "swish", "attention_layers": (1,)}
    plain |= {"head_size": 0, "mamba_head_size": 12}
    assert export_folder(small(**plain), None, tmp_path / "granite") == "granitemoehybrid"
    changes: dict[str, Any]
    for changes in ({"score_cap": 3.0}, {"n_experts": 4}):
        with pytest.raises(ValueError, match="no family" if "n_experts" in changes else next(iter(changes))):
            export_folder(small(**plain | changes), None, tmp_path / "other")


def test_preset_is_exported_with_mlps_of_zero(tmp_path: Path) -> None:
    """Granite 4 has an MLP in each layer; those of Mamba layers are written with weights of 0."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = replace(HybridConfig(), vocab_size=61, n_layers=3, attention_layers=(1,), hidden_size=40)
    assert config.n_heads * config.channels_per_head != config.embedding_dim
    model, generator = GPT(config).eval(), np.random.default_rng(4)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.array[...] = generator.normal(0, parameter.shape[0] ** -0.5, parameter.shape)
    assert export_folder(model, None, tmp_path / "granite") == "granitemoehybrid"
    expected = set_memory_order(model, "F")(TOKENS).array  # as in loaded models
    np.testing.assert_array_equal(load(tmp_path / "granite").model(TOKENS).array, expected)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "granite").eval()
    with torch.no_grad():
        assert difference(expected, hf_model(torch.from_numpy(TOKENS)).logits.numpy()) < 3e-6


def test_unequal_configs_of_hybrids_differ() -> None:
    config = MambaConfig(**{**SMALL, "mamba_mlp": True, "attention_layers": (1,)})
    assert differing_fields(config, replace(config, n_mamba_heads=4, mamba_head_size=12, chunk_size=4)) == []
    for changes in ({"n_mamba_heads": 8}, {"mamba_head_size": 6}, {"mamba_mlp": False}, {"bias": True}):
        changed = replace(config, qkv_bias=False, output_bias=False, mlp_bias=False, **changes)
        assert differing_fields(config, changed) == list(changes)


# -------------------------------------------------------------------- in the model viewer
def new_inspectable(name: str) -> InspectableStack:
    return InspectableStack(small(**MODELS[name] | {"vocab_size": TOKENISER.n_vocab}), TOKENISER, name)


def trace_of(inspectable: InspectableStack, earlier: Trace | None = None, **interventions: Any) -> Trace:
    return inspectable.run(inspectable.encode_input(TEXT), Interventions(**interventions), earlier)


@pytest.mark.parametrize("name", MODELS)
def test_maps_of_mixers_are_the_factors_of_earlier_tokens(name: str) -> None:
    inspectable = new_inspectable(name)
    trace = trace_of(inspectable)
    mixer, layer = inspectable.model.blocks[0].mixer, trace.attention_layer("blocks.0.mixer")
    normal = inspectable.model.blocks[0].norm(trace.stream["embedding"])
    steps = np.logaddexp(0, mixer.input(normal).array[:, -4:].astype(np.float64) + mixer.step_bias.array)  # (T, H)
    scaled_values, _, keys, queries = (tensor.array for tensor in layer.args)
    values = scaled_values[0] / steps[..., None]
    scores, weights = layer.maps()
    factors = np.where(scores > -np.inf, scores, 0)
    results = mixer.scan(*layer.args).array[0]
    np.testing.assert_allclose(np.einsum("hts,shp->thp", factors, values), results, rtol=1e-3, atol=1e-5)
    kept = np.exp(-steps * np.exp(mixer.log_rates.array))
    first = (queries[0, 3, 1] @ keys[0, 1, 1]) * kept[2:4, 2].prod() * steps[1, 2]  # head 2 is in the second group
    assert scores[2, 3, 1] == pytest.approx(first, rel=1e-3)
    assert (scores[:, *np.triu_indices(len(trace.ids), 1)] == -np.inf).all()
    np.testing.assert_allclose(weights, abs(factors) / abs(factors).sum(axis=-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(trace.attention_map(layer.name, 3)["kept"], kept[:, 3], atol=1e-4)
    half_lives = trace.head_statistics(0, 1)["layers"][0]["halfLife"]
    np.testing.assert_allclose(half_lives, np.log(2) / -np.log(kept).mean(axis=0), rtol=1e-3)


def test_pages_of_hybrids_list_mixers_and_attention() -> None:
    inspectable = new_inspectable("hybrid")
    data = collect_static_data(inspectable, trace_of(inspectable))
    assert json.loads(json.dumps(data, allow_nan=False))["trace"]["attentionLayers"] == [
        {"name": "blocks.0.mixer", "kind": "state", "nHeads": 4},
        {"name": "blocks.1.attention", "kind": "self", "nHeads": 4},
        {"name": "blocks.2.mixer", "kind": "state", "nHeads": 4},
    ]
    assert [len(layer.get("halfLife", ())) for layer in data["headStatistics"]] == [4, 0, 4]
    assert data["attentionMaps"]["blocks.1.attention"][0]["kept"] is None


@pytest.mark.parametrize("name", MODELS)
def test_ablations_of_mixers_and_their_heads(name: str) -> None:
    inspectable = new_inspectable(name)
    before = trace_of(inspectable)
    skipped = trace_of(inspectable, ablated_layers=("blocks.0",))
    np.testing.assert_array_equal(skipped.stream["blocks.0"], before.stream["embedding"])
    without = trace_of(inspectable, ablated_layers=("blocks.0.mixer", "blocks.0.mlp")[: 1 + ("experts" in name)])
    np.testing.assert_allclose(without.stream["blocks.0"], before.stream["embedding"], atol=1e-6)
    changes = {"ablated_heads": (("blocks.0.mixer", 1),)}
    ablated = trace_of(inspectable, **changes)
    assert not np.allclose(ablated.stream["blocks.0"], before.stream["blocks.0"], atol=1e-3)
    assert_close_traces(trace_of(inspectable, trace_of(inspectable), **changes), trace_of(inspectable, **changes))
    last = f"blocks.{len(inspectable.model.blocks) - 1}.mixer"
    changes = {"ablated_heads": ((last, 0),)}  # earlier blocks are reused
    assert_close_traces(trace_of(inspectable, trace_of(inspectable), **changes), trace_of(inspectable, **changes))
