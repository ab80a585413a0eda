"""Direct logit attribution: contributions add up to the logit, and each equals what its part adds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tables import bad_input
from test_models import FAMILIES, GEMMA, KINDS, PARALLEL, TINY, lively

from tricycle.configs.mamba import MambaConfig
from tricycle.finetuning.lora import Adapter, LoRAConfig, LoRATarget, LowRankUpdate
from tricycle.models import GPT
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tensor import no_grad
from tricycle.weights import quantize
from tricycle_lab.attribution import attribute_logit
from tricycle_lab.probe import Probe

TOKENS = np.random.default_rng(2).integers(0, TINY.vocab_size, 9).tolist()
CONFIGS = {
    **KINDS,
    **{name: config for name, config in FAMILIES.items() if config.norm_placement == "before"},
    "parallel": PARALLEL,
    "unit offset": replace(TINY, norm="rms_norm", norm_unit_offset=True, bias=False, embedding_scale=3.0),
    "head bias": replace(TINY, tied=False, head_bias=True),
    "residual scale": replace(TINY, residual_scale=0.5),
    "experts": replace(TINY, n_experts=4, n_active_experts=2, bias=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_contributions_sum_to_the_logit(name: str) -> None:
    model = lively(CONFIGS[name]).eval()
    with no_grad():
        logits = model(np.array(TOKENS)).array
    for token, other, position in ((3, None, -1), (3, 5, 4)):
        result = attribute_logit(model, TOKENS, token, other, position)
        expected = logits[position, token] - (0 if other is None else logits[position, other])
        assert result.heads.shape == (model.config.n_layers, model.config.n_heads)
        np.testing.assert_allclose(result.logit, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(result.total, expected, rtol=0, atol=1e-4)
        assert min(abs(result.embedding), *np.abs(result.heads).ravel(), *np.abs(result.mlps)) > 1e-6


def test_a_contribution_of_the_last_layer_is_that_of_its_output() -> None:
    """Without the last MLP, the stream changes by exactly its output; the scale of the norm stays the old one."""
    model = lively(replace(TINY, norm="rms_norm", bias=False)).eval()
    result = attribute_logit(model, TOKENS, 3)
    with Probe(model, "blocks.*", "blocks.1.mlp") as probe, no_grad():
        model(np.array([TOKENS]))
        with probe.ablate("blocks.1.mlp"):
            ablated = model(np.array([TOKENS])).array[0, -1, 3]
            without = probe.activations["blocks.1"][0, -1].astype(float)
        model(np.array([TOKENS]))
        stream = probe.activations["blocks.1"][0, -1].astype(float)
    rms, rms_without = (np.sqrt((x**2).mean() + model.norm.eps) for x in (stream, without))
    assert result.logit - result.mlps[1] == pytest.approx(ablated * rms_without / rms, abs=1e-4)


def test_heads_of_an_adapted_projection() -> None:
    """The layer projects the heads, so a LoRA adapter counts."""
    model = lively(TINY).eval()
    before = attribute_logit(model, TOKENS, 3)
    update = LowRankUpdate(8, 8, [LoRATarget("o_proj", 0, 8, 2, 1.0)], 0.0, np.random.default_rng(0))
    for parameter in update.parameters():
        parameter.array[...] = np.random.default_rng(1).standard_normal(parameter.shape)
    adapter = Adapter(model, {"blocks.0.attention.projection": update}, LoRAConfig(rank=2)).attach()
    adapted = attribute_logit(model, TOKENS, 3)
    assert abs(adapted.heads - before.heads)[0].max() > 1e-3
    assert adapted.total == pytest.approx(adapted.logit, abs=1e-4)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in adapter.parameters())


def test_quantized_weights() -> None:
    model = quantize(lively(replace(TINY, embedding_dim=64, n_heads=4)).eval(), "float16")
    result = attribute_logit(model, TOKENS, 3, 5)
    assert result.total == pytest.approx(result.logit, abs=1e-2)


def test_model_is_unchanged() -> None:
    model = lively(replace(TINY, dropout=0.5))
    learned = [p.requires_grad for p in model.parameters()]
    first = attribute_logit(model, TOKENS, 1)
    assert attribute_logit(model, TOKENS, 1).logit == first.logit
    assert model.training and [p.requires_grad for p in model.parameters()] == learned
    assert all(p.grad is None for p in model.parameters()) and model.norm is not None


test_invalid_arguments = bad_input(
    {
        "post-norm": (
            lambda: attribute_logit(GPT(replace(TINY, norm_placement="after")), TOKENS, 1),
            "pre-norm.*after",
        ),
        "both": (lambda: attribute_logit(GPT(GEMMA), TOKENS, 1), 'pre-norm.*"both"'),
        "capped": (lambda: attribute_logit(GPT(replace(TINY, logit_cap=5.0)), TOKENS, 1), "soft-capping.*5.0"),
        "no attention": (
            lambda: attribute_logit(GPT(MambaConfig(vocab_size=11, embedding_dim=8, n_layers=1)), TOKENS, 1),
            "expected MultiHeadSelfAttention in all blocks, got MambaBlock",
        ),
        "no decoder": (lambda: attribute_logit(TextEncoder, TOKENS, 1), "decoder"),
        "token": (lambda: attribute_logit(GPT(TINY), TOKENS, 11), "ids from 0 to 10"),
        "other": (lambda: attribute_logit(GPT(TINY), TOKENS, 1, -1), "ids from 0 to 10"),
        "no tokens": (lambda: attribute_logit(GPT(TINY), [], 1), "at least one token"),
        "position": (lambda: attribute_logit(GPT(TINY), TOKENS, 1, position=9), "a position of 9 tokens, got 9"),
    }
)
