"""Latent attention: cached and uncached results, what the cache stores, both ways to attend, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_checks import cached_logits, check_generation, randomize
from transformers_families import change_config, difference

from tricycle.latent_attention import LatentAttention, LatentConfig
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained import load
from tricycle.pretrained.adapters import new_adapter
from tricycle.pretrained.export import export_folder
from tricycle.tensor import no_grad
from tricycle.weights import quantize
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.look.interventions import Interventions

SMALL: dict[str, Any] = {"vocab_size": 61, "context_window": 128, "embedding_dim": 24, "n_heads": 4, "n_layers": 3}
SMALL |= {"head_size": 8, "rotary_size": 6, "value_size": 10, "latent_size": 14, "hidden_size": 40, "n_experts": 4}
SMALL |= {"n_active_experts": 2, "expert_size": 12, "n_shared_experts": 1}
TOKENS = np.random.default_rng(5).integers(0, 61, (2, 40))
STARTS = 2, 3, 30, 31  # of parts: up to 9 new tokens absorb, more expand
MODELS: dict[str, dict[str, Any]] = {
    "softmax router": {},
    "sigmoid router": {"sigmoid_router": True, "query_rank": 9, "n_groups": 2, "qkv_bias": True, "value_size": 11},
    "no experts, window": {"n_experts": 0, "window": 5, "softmax": "sink"},
}
each_model = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)


def small(**fields: Any) -> GPT:
    return randomize(GPT(LatentConfig(**{**SMALL, **fields})))


# -------------------------------------------------------------------- the cache
@each_model
def test_cached_logits_are_those_of_whole_texts(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ways = small(**fields), []

    def spy(way: str) -> Callable[..., Any]:
        attend = getattr(LatentAttention, f"_attend_{way}")

        def run(*args: Any) -> Any:
            ways.append(way)
            return attend(*args)

        return run

    for way in ("absorbed", "expanded"):
        monkeypatch.setattr(LatentAttention, f"_attend_{way}", spy(way))
    assert difference(cached_logits(model, TOKENS, STARTS)[0], model(TOKENS).array) < 3e-6
    assert ways[::3] == ["absorbed", "absorbed", "expanded", "absorbed", "absorbed"]


def test_cache_stores_latents_and_rotated_keys_alone() -> None:
    model = small()
    caches = model.new_caches()
    with no_grad():
        model(TOKENS, caches)
        latents, rotated = caches[0].append(np.zeros((2, 1, 1, 14), np.float32), np.zeros((2, 1, 1, 6), np.float32))
    assert latents.shape == (2, 41, 1, 14) and rotated.shape == (2, 41, 1, 6)  # not 4 heads of 14 + 10 channels


def test_caches_in_16_and_8_bits() -> None:
    model = small(n_experts=0)  # a rounding would select other experts for some tokens
    expected = model(TOKENS).array
    assert difference(cached_logits(model, TOKENS, STARTS, np.float16)[0], expected) < 3e-3
    assert difference(cached_logits(model, TOKENS, STARTS, np.int8)[0], expected) < 0.1


@pytest.mark.parametrize("change", ["quantized", "adapted"])
def test_layers_without_a_plain_matrix_expand(change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = small(n_experts=0)
    before = model(TOKENS).array
    if change == "quantized":
        quantize(model, "int8")
    else:
        export_folder(small(), None, tmp_path / "model")
        loaded = load(tmp_path / "model")
        model, before = loaded.model, loaded.model(TOKENS).array
        for low_rank in new_adapter(loaded).low_ranks.values():
            for up in low_rank.ups:
                up.array[...] = np.random.default_rng(6).normal(0, 0.1, up.shape)
    monkeypatch.setattr(LatentAttention, "_attend_absorbed", None)
    with no_grad():
        expected = model(TOKENS).array
    assert difference(expected, before) > 1e-3
    assert difference(cached_logits(model, TOKENS, STARTS)[0], expected) < (2e-2 if change == "quantized" else 3e-6)


@each_model
@pytest.mark.nightly_except(3)
def test_batches_beams_drafts_and_single_texts_agree(fields: dict[str, Any]) -> None:
    check_generation(small(**fields), [[3, 1, 4, 15, 9, 2, 6], [4], [5, 6, 7, 8]])


# -------------------------------------------------------------------- training and inspection
def test_updates_change_all_parameters_but_corrections() -> None:
    model = GPT(LatentConfig(**{**SMALL, **MODELS["sigmoid router"], "n_active_experts": 2}))
    before = {name: array.copy() for name, array in model.state_dict().items()}
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    model.update(AdamW(learning_rate=3e-3))
    equal = [name for name, array in model.state_dict().items() if np.array_equal(array, before[name])]
    assert equal == ["blocks.1.mlp.correction", "blocks.2.mlp.correction"]


def test_router_loss_is_added_if_the_first_layer_has_no_experts() -> None:
    losses = [small(router_loss=weight).loss(TOKENS[:, :-1], TOKENS[:, 1:]).item() for weight in (0.0, 1.0, 2.0)]
    assert losses[1] - losses[0] == pytest.approx(losses[2] - losses[1], rel=1e-4)
    assert losses[1] - losses[0] >= 1  # as of uniform routing


def test_layers_have_their_kinds_of_mlp() -> None:
    blocks = small(n_dense_layers=2).blocks
    assert [hasattr(block.mlp, "experts") for block in blocks] == [False, False, True]
    assert blocks[0].mlp.projection.from_size == 40 and blocks[2].mlp.experts[0].projection.from_size == 12


def test_viewer_does_not_take_keys_from_an_earlier_trace() -> None:
    model = InspectableStack(small(), SimpleNamespace(n_vocab=0), "model")
    earlier, longer = model.run([1, 2, 3, 4], Interventions()), [1, 2, 3, 4, 5]
    assert model.reusable_fraction(longer, Interventions(), earlier) == 0
    again, expected = (model.run(longer, Interventions(), trace).predictions for trace in (earlier, None))
    np.testing.assert_array_equal(again.log_probs, expected.log_probs)


# -------------------------------------------------------------------- files
def test_a_model_with_few_layers_of_experts_loads(tmp_path: Path) -> None:
    """The number of tensors limits the number of experts, but not in layers without them."""
    model = small(n_layers=7, n_dense_layers=6, n_experts=40)
    assert export_folder(model, None, tmp_path / "model") == "deepseek_v2"
    assert difference(load(tmp_path / "model").model(TOKENS).array, model(TOKENS).array) < 3e-6
    change_config(tmp_path / "model", n_routed_experts=10**6)
    with pytest.raises(ValueError, match="number of experts to be at most"):
        load(tmp_path / "model")


@pytest.mark.parametrize("fields", [{"window": 5}, {"score_scale": 0.3}, {"softmax": "softmax1"}], ids=str)
def test_what_no_family_computes_is_not_exported(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"deepseek_v2 does not support .*{next(iter(fields))}"):
        export_folder(small(**fields), None, tmp_path / "model")


# -------------------------------------------------------------------- configs
REFUSED = [
    ({"rotary_size": 5, "head_size": 7}, "rotary_size to be an even number above 0, got 5"),
    ({"latent_size": 0}, "latent_size to be at least 1, got 0"),
    ({"n_groups": 3}, "n_groups to be a divisor of n_experts, got 3"),
    ({"n_groups": 2, "n_active_groups": 3}, "n_active_groups to be from 1 to n_groups 2, got 3"),
    ({"n_groups": 4, "n_active_experts": 2}, "n_active_experts to be at most 1, got 2"),
    ({"yarn_mscale": 1.0}, "yarn_mscale to be 0 without yarn, got 1.0"),
    ({"sigmoid_router": True, "router_loss": 0.5}, "router_loss to be 0 with sigmoid_router, got 0.5"),
    ({"n_key_heads": 2}, "n_key_heads to be 0 or n_heads 4, got 2"),
    ({"positions": "learned"}, "positions to be rotary, got 'learned'"),
    ({"qk_norm": True}, "qk_norm to be unset in latent attention, got True"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_invalid_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentConfig(**{**SMALL, **fields})


def test_default_config_is_that_of_deepseek_v2_lite() -> None:
    """With the number of parameters that its authors state, 15.7 billion, and 0.6 KB of 8-bit cache in each layer."""
    config = LatentConfig()
    width, expert = config.embedding_dim, 3 * 2048 * config.expert_size
    mixtures = config.n_mixture_layers * ((config.n_experts + config.n_shared_experts) * expert + 64 * width)
    heads = width * 16 * 192 + width * 576 + 512 * 16 * 256 + 16 * 128 * width
    total = 2 * config.vocab_size * width + 27 * heads + 3 * width * config.hidden_size + mixtures
    assert total == pytest.approx(15.7e9, rel=5e-3)
