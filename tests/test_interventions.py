"""Interventions of a probe equal the same changes of the weights, in results and gradients, and are undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tables import bad_input
from test_models import TINY, lively
from test_probe import IDS, hooked_layers

from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.generate import generate
from tricycle.gradcheck import gradcheck
from tricycle.layers import Dense, Layer, Sequential
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.sequences.recurrent import GRU
from tricycle.sequences.seq2seq import Transformer
from tricycle.softmaxes import SOFTMAXES
from tricycle.tensor import Tensor, no_grad, to_tensor
from tricycle_lab.probe import Probe

HEAD_SIZE = TINY.embedding_dim // TINY.n_heads


def remove_head(model: GPT, layer: int, head: int) -> None:
    rows = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
    model.blocks[layer].attention.projection.weights.array[rows] = 0


def set_to_zero(layer: Layer) -> None:
    for parameter in layer.parameters():
        parameter.array[...] = 0


def scale_queries(model: GPT, factor: float) -> None:
    for block in model.blocks:
        qkv = block.attention.qkv
        qkv.weights.array[:, : TINY.embedding_dim] *= factor
        qkv.bias.array[: TINY.embedding_dim] *= factor


CASES: dict[str, tuple[Callable[[Probe], Any], Callable[[GPT], Any]]] = {
    "a head": (lambda p: p.ablate("blocks.1.attention", heads=1), lambda m: remove_head(m, 1, 1)),
    "a head and none of another layer": (
        lambda p: (p.ablate("blocks.1.attention", heads=1), p.ablate("blocks.0.attention", heads=[])),
        lambda m: remove_head(m, 1, 1),
    ),
    "all heads one by one": (
        lambda p: [p.ablate("blocks.0.attention", heads=head) for head in range(TINY.n_heads)],
        lambda m: [remove_head(m, 0, head) for head in range(TINY.n_heads)],
    ),
    "a head of every layer": (
        lambda p: p.ablate("*.attention", heads=-1),
        lambda m: [remove_head(m, layer, TINY.n_heads - 1) for layer in range(2)],
    ),
    "attention": (lambda p: p.ablate("blocks.1.attention"), lambda m: set_to_zero(m.blocks[1].attention.projection)),
    "an MLP": (lambda p: p.ablate("blocks.0.mlp"), lambda m: set_to_zero(m.blocks[0].mlp.projection)),
    "a block": (lambda p: p.ablate("blocks.0"), lambda m: m.blocks.pop(0)),
    "a temperature": (lambda p: p.change_softmax(temperature=0.5), lambda m: scale_queries(m, 2)),
    "two temperatures": (
        lambda p: (p.change_softmax(temperature=2), p.change_softmax(temperature=0.25)),
        lambda m: scale_queries(m, 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_interventions_equal_edited_weights(case: str) -> None:
    change, change_weights = CASES[case]
    model, edited = lively(TINY), lively(TINY)
    unchanged = model(IDS).array
    before = model.state_dict()
    change_weights(edited)
    with Probe(model) as probe:
        change(probe)
        logits = model(IDS)
        loss = model.loss(IDS[:, :-1], IDS[:, 1:])
    expected = edited(IDS)
    np.testing.assert_allclose(logits.array, expected.array, rtol=1e-4, atol=1e-5)
    assert abs(logits.array - unchanged).max() > 1e-3
    assert loss.item() == pytest.approx(edited.loss(IDS[:, :-1], IDS[:, 1:]).item(), rel=1e-5)
    assert not hooked_layers(model)
    np.testing.assert_array_equal(model(IDS).array, unchanged)
    assert all((array == before[name]).all() for name, array in model.state_dict().items())
    logits.backward()  # after the probe, too
    expected.backward()
    grad, expected_grad = (one.token_embedding.weights.grad.array for one in (model, edited))
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-3, atol=1e-4)


def test_ablated_parts_receive_no_gradient() -> None:
    model = lively(TINY)
    with Probe(model) as probe, probe.ablate("blocks.0.mlp"):
        probe.ablate("blocks.1.attention", heads=0)
        model(IDS).backward()
    for parameter in model.blocks[0].mlp.parameters():
        assert parameter.grad is None or not parameter.grad.array.any()
    rows = model.blocks[1].attention.projection.weights.grad.array
    assert not rows[:HEAD_SIZE].any()
    assert rows[HEAD_SIZE:].any()


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_change_softmax_replaces_softmax_and_scales_scores(softmax: str, cap: float) -> None:
    config = replace(TINY, score_cap=cap)
    model, other = lively(config), lively(config)
    other.use_softmax(softmax)
    with Probe(model) as probe, Probe(other) as other_probe, no_grad():
        with probe.change_softmax(softmax=softmax):
            np.testing.assert_allclose(model(IDS).array, other(IDS).array, rtol=1e-5, atol=1e-6)
            for name, weights in other_probe.weights.items():
                np.testing.assert_allclose(probe.weights[name], weights, rtol=1e-5, atol=1e-6)
        scores = {name: array.copy() for name, array in probe.scores.items()}
        with probe.change_softmax("blocks.0.attention", softmax, temperature=4):
            model(IDS)
        first = "blocks.0.attention"
        np.testing.assert_allclose(probe.scores[first], scores[first] / 4, rtol=1e-5, atol=1e-6)
    assert model.config.softmax == "softmax"
    assert model.blocks[0].attention.attention.softmax.name == "softmax"
    assert model.blocks[0].attention.softmax_scales is None


def test_ablation_at_positions_leaves_other_positions_unchanged() -> None:
    model = lively(TINY)
    with Probe(model, "*") as probe, no_grad():
        model(IDS)
        plain = dict(probe.activations)
        with probe.ablate("blocks.0.mlp", positions=[4, -1]):
            model(IDS)
            assert not probe.activations["blocks.0.mlp"][:, [4, 12]].any()
            off = probe.activations["blocks.0"]
        others = [position for position in range(13) if position not in (4, 12)]
        np.testing.assert_array_equal(off[:, others], plain["blocks.0"][:, others])
        expected = plain["blocks.0"] - plain["blocks.0.mlp"]
        np.testing.assert_allclose(off[:, [4, 12]], expected[:, [4, 12]], rtol=1e-4, atol=1e-5)
        with probe.ablate("blocks.1", positions=2):
            model(IDS)
        np.testing.assert_array_equal(probe.activations["blocks.1"][:, 2], plain["blocks.0"][:, 2])
        np.testing.assert_array_equal(probe.activations["blocks.1"][:, 3:], plain["blocks.1"][:, 3:])
        with probe.ablate("blocks.1.attention", heads=0, positions=2):
            one = model(IDS).array
        with probe.ablate("blocks.1.attention", heads=0):
            all_positions = model(IDS).array
    np.testing.assert_allclose(one[:, 2], all_positions[:, 2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one[:, 3:], plain[""][:, 3:], rtol=1e-5, atol=1e-6)


def test_patched_activations_give_the_logits_of_their_source() -> None:
    model = lively(TINY)
    other = (IDS + 1) % TINY.vocab_size
    with Probe(model, "blocks.0", "") as probe, no_grad():
        other_logits = model(other).array
        stream = probe.activations["blocks.0"]
        logits = model(IDS).array
        with probe.replace("blocks.0", stream):
            np.testing.assert_allclose(model(IDS).array, other_logits, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(probe.activations["blocks.0"], stream)
        with probe.replace("blocks.0", stream, positions=range(5, 13)):
            patched = model(IDS).array
    np.testing.assert_array_equal(patched[:, :5], logits[:, :5])
    assert abs(patched[:, 5:] - logits[:, 5:]).max() > 1e-3


def test_replacement_functions_apply_in_order_of_registration() -> None:
    model = lively(TINY)
    with Probe(model, "blocks.0", "blocks.0.attention") as probe, no_grad():
        model(IDS)
        x = probe.activations["blocks.0"]
        probe.replace("blocks.0", lambda out: out * 2)
        inner = probe.replace("blocks.0", lambda out: out + 1)
        model(IDS)
        np.testing.assert_allclose(probe.activations["blocks.0"], 2 * x + 1, rtol=1e-5, atol=1e-6)
        inner.close()
        inner.close()
        model(IDS)
        np.testing.assert_allclose(probe.activations["blocks.0"], 2 * x, rtol=1e-5, atol=1e-6)
        with probe.replace("blocks.0.attention", lambda out: out.mean(axis=(0, 1), keepdims=True), heads=[0, 1]):
            model(IDS)


def test_gradients_flow_into_a_replacement(rng: np.random.Generator) -> None:
    layer = Sequential(Dense(4, 5, generator=0), Dense(5, 3, generator=1))

    def patched(x: Tensor, value: Tensor) -> Tensor:
        with Probe(layer) as probe, probe.replace("steps.0", value, positions=[0, 2]):
            return layer(x)

    for parameter in layer.parameters():
        parameter.array = parameter.array.astype(np.float64)
    gradcheck(patched, rng.standard_normal((2, 3, 4)), rng.standard_normal((3, 5)))


def test_generation_applies_interventions() -> None:
    """The faster decoding path is not used while a hook is active."""
    model, other = lively(TINY), lively(TINY)
    set_to_zero(other.blocks[0].mlp.projection)
    plain = list(generate(model, [1, 2, 3], 8, temperature=0))
    expected = list(generate(other, [1, 2, 3], 8, temperature=0))
    with Probe(model, "norm") as probe, probe.ablate("blocks.0.mlp"):
        assert list(generate(model, [1, 2, 3], 8, temperature=0)) == expected
    assert list(generate(model, [1, 2, 3], 8, temperature=0)) == plain
    assert plain != expected


def test_chunked_loss_applies_interventions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tricycle.models.n_logit_rows", lambda *_: 2)
    model = lively(TINY)
    with Probe(model, "blocks.0") as probe, no_grad():
        probe.replace("norm", 0.0, positions=0)
        loss = model.loss(IDS[:, :-1], IDS[:, 1:])
        expected = CrossEntropy()(IDS[:, 1:], model(IDS[:, :-1]))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_interventions_apply_to_cross_attention(rng: np.random.Generator) -> None:
    model = Transformer(9, 9, 8, 2, 2, 16, dropout=0.0, generator=0).eval()
    source, target = rng.integers(0, 9, (1, 6)), rng.integers(0, 9, (1, 4))
    with Probe(model) as probe, no_grad():
        plain = model(source, target).array
        assert probe.weights["decoder.blocks.0.cross"].shape == (1, 2, 4, 6)
        with probe.ablate("decoder.blocks.*.cross", heads=[0, 1]):
            ablated = model(source, target).array
            other_source = model((source + 1) % 9, target).array
            np.testing.assert_array_equal(ablated, other_source)
        with probe.change_softmax("decoder.blocks.*.cross", temperature=1e6):
            model(source, target)
            np.testing.assert_allclose(probe.weights["decoder.blocks.1.cross"], 1 / 6, rtol=1e-3)
    assert abs(plain - ablated).max() > 1e-4


def test_an_error_removes_all_interventions() -> None:
    model = lively(TINY)
    with pytest.raises(ValueError, match="-13 to 12, got 13"), Probe(model) as probe:
        probe.change_softmax(temperature=2)
        probe.ablate("blocks.0", positions=13)
        model(IDS)
    assert not hooked_layers(model)
    with pytest.raises(RuntimeError, match=r"Probe\.ablate: .*active"):
        probe.ablate("blocks.0")


def invalid(act: Callable[[Probe], Any], message: str) -> tuple[Callable[[], None], str]:
    """Return a call that runs a model with an invalid intervention, and the pattern of its error."""

    def run() -> None:
        model = lively(TINY)
        with Probe(model, "*") as probe:
            act(probe)
            model(IDS)

    return run, message


def replace_recurrent_output() -> None:
    model = Sequential(GRU(3, 4, generator=0))
    with Probe(model, "steps.0") as probe:
        probe.replace("steps.0", 0.0)
        model(np.ones((1, 2, 3)))


LARGER = (2, 3, 13, TINY.embedding_dim)

test_bad_input = bad_input(
    {
        "unknown layer": invalid(lambda p: p.ablate("blocks.7.mlp"), r"Probe\.ablate: .*'blocks\.7\.mlp'"),
        "a value of another shape": invalid(lambda p: p.replace("blocks.0", np.ones(5)), "Probe.replace: .*a value"),
        "a value that is larger": invalid(lambda p: p.replace("blocks.0", np.ones(LARGER)), "Probe.replace: .*a value"),
        "a function without a result": invalid(lambda p: p.replace("blocks.0", lambda out: None), "a value, got None"),
        "invalid value": invalid(lambda p: p.replace("blocks.0", "x"), "Probe.replace: .*Tensor.*array"),
        "unknown head": invalid(lambda p: p.ablate("blocks.0.attention", heads=99), "Probe.ablate: .*heads from"),
        "fractional head": invalid(lambda p: p.ablate("blocks.0.attention", heads=0.5), "Probe.ablate: .*heads as"),
        "heads of an MLP": invalid(lambda p: p.ablate("blocks.0.mlp", heads=0), "Probe.ablate: .*a layer with"),
        "a temperature of 0": invalid(lambda p: p.change_softmax(temperature=0), "change_softmax: .*above 0,"),
        "weights of an MLP": invalid(lambda p: p.change_softmax("blocks.0.mlp", temperature=2), "expected layers"),
        "an unknown softmax": invalid(lambda p: p.change_softmax(softmax="hard"), "softmax: expected one of"),
        "several results": (replace_recurrent_output, "Probe.replace: .*Tensor.*tuple"),
    }
)


def test_activation_checkpointing_is_rejected() -> None:
    model = lively(TINY)
    model.recompute = checkpoint_activations
    with Probe(model) as probe, pytest.raises(ValueError, match="activation checkpointing"):
        probe.ablate("blocks.0")
    assert not hooked_layers(model)
    assert to_tensor(model(IDS)).shape == (3, 13, TINY.vocab_size)
