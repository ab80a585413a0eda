"""Probes record what the model computed and remove their hooks; statistics equal closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import fake_device
import numpy as np
import pytest
from packed_attention import apply_rope
from tables import bad_input
from test_models import TINY, lively

from tricycle import devices
from tricycle.blocks import MultiHeadSelfAttention
from tricycle.evaluation import evaluate
from tricycle.generate import generate
from tricycle.layers import Dense, Layer, Sequential
from tricycle.models import GPT
from tricycle.sequences.cross_attention import MultiHeadAttention
from tricycle.softmaxes import SOFTMAXES, BlockSoftmax
from tricycle.tensor import Tensor, no_grad, to_tensor
from tricycle_lab.probe import (
    Probe,
    entropy,
    excess_kurtosis,
    perplexity,
    spikiness,
    top_k_weight,
    unassigned_weight,
    weight_kurtosis,
)

IDS = np.random.default_rng(3).integers(0, TINY.vocab_size, (3, 13))
ATTENTION = ["blocks.0.attention", "blocks.1.attention"]


def attributes(model: Layer) -> list[tuple[str, list[str], list[str]]]:
    """The attributes of all layers and of the attention in them."""
    return [
        (name, sorted(vars(layer)), sorted(vars(getattr(layer, "attention", model))))
        for name, layer in model.named_layers()
    ]


def hooked_layers(model: Layer) -> list[str]:
    """The names of the layers that have a hook, or whose attention has one."""
    return [name for name, *own in attributes(model) if any("forward" in names for names in own)]


def plain_scores(qkv: np.ndarray, n_heads: int) -> np.ndarray:
    """Causal scores (B, H, T, T) in float64, one head at a time."""
    q, k, _ = np.split(qkv.astype(np.float64), 3, axis=-1)
    size = q.shape[-1] // n_heads
    parts = [slice(head * size, (head + 1) * size) for head in range(n_heads)]
    scores = np.stack([q[..., part] @ k[..., part].swapaxes(1, 2) / math.sqrt(size) for part in parts], axis=1)
    return np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)


def plain_weights(scores: np.ndarray, name: str) -> np.ndarray:
    exponentials = np.exp(scores)
    if name == "blocks":  # two blocks of half the context window, scales of 1 until trained
        half = TINY.context_window // 2
        parts = [exponentials[..., :half], exponentials[..., half:]]
        sums = [part.sum(axis=-1, keepdims=True) for part in parts]
        return np.concatenate([part / np.where(total > 0, total, 1) for part, total in zip(parts, sums)], axis=-1)
    return exponentials / (exponentials.sum(axis=-1, keepdims=True) + (name == "softmax1"))


# -------------------------------------------------------------------- what is recorded
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("softmax", ["softmax", "softmax1", "blocks"])
def test_weights_and_scores_are_those_of_the_formula(softmax: str, positions: str) -> None:
    model = GPT(replace(TINY, softmax=softmax, positions=positions))
    with Probe(model, "*.attention", "*.attention.qkv") as probe, no_grad():
        model(IDS)
    assert list(probe.weights) == list(probe.scores) == ATTENTION
    for name in ATTENTION:
        qkv = to_tensor(probe.activations[f"{name}.qkv"])
        if positions == "rotary":
            qkv = apply_rope(qkv, TINY.n_heads)
        scores = plain_scores(qkv.array, TINY.n_heads)
        assert probe.scores[name].shape == (3, TINY.n_heads, 13, 13)
        np.testing.assert_allclose(probe.scores[name], scores, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(probe.weights[name], plain_weights(scores, softmax), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_the_weights_explain_the_output(softmax: str) -> None:
    """The weighted sum of the values, projected, is the layer's output."""
    model = lively(replace(TINY, softmax=softmax))
    with Probe(model, "blocks.1.attention*") as probe:
        model(IDS)
    weights, qkv = probe.weights["blocks.1.attention"], probe.activations["blocks.1.attention.qkv"]
    values = np.split(qkv, 3, axis=-1)[2].reshape(3, 13, TINY.n_heads, -1)
    mixed = np.einsum("bhts,bshd->bthd", weights, values).reshape(3, 13, -1)
    projected = model.blocks[1].attention.projection(mixed).array
    np.testing.assert_allclose(projected, probe.activations["blocks.1.attention"], rtol=1e-3, atol=1e-4)
    sums = weights.sum(axis=-1)
    if softmax in ("softmax", "adaptive"):
        np.testing.assert_allclose(sums, 1, rtol=1e-5)
    elif softmax == "softmax1":
        assert (sums < 1).all()
    assert not weights[..., ~np.tri(13, dtype=bool)].any()


def test_recording_does_not_change_results_and_gradients() -> None:
    model, again = lively(TINY), lively(TINY)
    with Probe(model):
        logits = model(IDS)
        logits.backward()
    plain = again(IDS)
    plain.backward()
    np.testing.assert_array_equal(logits.array, plain.array)
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters()):
        np.testing.assert_array_equal(one.grad.array, other.grad.array, err_msg=name)


def test_patterns_choose_layers_by_name() -> None:
    model = lively(TINY)
    with Probe(model) as probe, no_grad():
        model(IDS)
    assert sorted(probe.activations) == sorted([*ATTENTION, "blocks.0", "blocks.1"])  # also items of lists
    assert sorted(probe.weights) == ATTENTION
    with Probe(model, "blocks.1.mlp", "norm", "") as probe, no_grad():
        logits = model(IDS)
    assert sorted(probe.activations) == ["", "blocks.1.mlp", "norm"]
    assert not probe.weights
    assert probe.activations[""] is logits.array
    x = model.norm(model.blocks[1](model.blocks[0](model.token_embedding(IDS) + model.position_embedding.weights[:13])))
    np.testing.assert_allclose(probe.activations["norm"], x.array, rtol=1e-5, atol=1e-6)


def test_the_latest_call_counts_and_shapes_may_change() -> None:
    model = lively(TINY)
    with Probe(model, "*.attention") as probe, no_grad():
        model(IDS)
        model(IDS[0, :5])
        assert probe.weights[ATTENTION[0]].shape == (1, TINY.n_heads, 5, 5)
        first = probe.weights[ATTENTION[0]]
    with probe, no_grad():  # and a probe may be used again
        model(IDS)
    assert probe.weights[ATTENTION[0]] is not first
    np.testing.assert_allclose(probe.weights[ATTENTION[0]][:1, :, :5, :5], first, rtol=1e-4, atol=1e-6)


def test_dropout_is_recorded_in_training_only() -> None:
    model = lively(replace(TINY, dropout=0.5))
    with Probe(model, "blocks.0.attention*") as probe:
        model(IDS)
        assert 0.3 < (probe.activations["blocks.0.attention"] == 0).mean() < 0.7
        np.testing.assert_allclose(probe.weights["blocks.0.attention"].sum(axis=-1), 1, rtol=1e-5)
        with model.evaluating():
            model(IDS)
            assert (probe.activations["blocks.0.attention"] != 0).all()
    assert model.training


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_generation_with_caches(softmax: str) -> None:
    """The rows of new tokens equal those of the forward pass over the complete text."""
    model = lively(replace(TINY, softmax=softmax))
    with Probe(model, "*.attention") as whole, no_grad():
        model(IDS)
    caches = model.new_caches()
    with Probe(model, "*.attention") as probe, no_grad():
        for first, last in ((0, 6), (6, 7), (7, 8), (8, 13)):
            model(IDS[:, first:last], caches)
            for name in ATTENTION:
                assert probe.weights[name].shape == (3, TINY.n_heads, last - first, last)
                for actual, expected in ((probe.weights, whole.weights), (probe.scores, whole.scores)):
                    part = expected[name][:, :, first:last, :last]
                    np.testing.assert_allclose(actual[name], part, rtol=1e-3, atol=1e-5)
        drawn = list(generate(model, [1, 2, 3], 5, temperature=0))
    assert drawn == list(generate(model, [1, 2, 3], 5, temperature=0))


def test_cross_attention(rng: np.random.Generator) -> None:
    for softmax in ("softmax", BlockSoftmax(2)):
        layer = MultiHeadAttention(8, 2, softmax=softmax, context_window=9, generator=0)
        query, key = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (4, 9))
        with Probe(layer, "", "query", "key", "value") as probe:
            out = layer(query, key)
        q, k, v = (probe.activations[name].reshape(2, -1, 2, 4) for name in ("query", "key", "value"))
        np.testing.assert_allclose(probe.scores[""], np.einsum("bthd,bshd->bhts", q, k) / 2, rtol=1e-4, atol=1e-5)
        mixed = np.einsum("bhts,bshd->bthd", probe.weights[""], v).reshape(2, 4, 8)
        np.testing.assert_allclose(layer.projection(mixed).array, out.array, rtol=1e-4, atol=1e-5)


def test_an_attention_layer_alone_and_in_a_sequence(rng: np.random.Generator) -> None:
    layer = MultiHeadSelfAttention(8, 2, 16, generator=0)
    with Probe(layer) as probe:
        layer(rng.standard_normal((5, 8)))
    assert probe.weights[""].shape == (1, 2, 5, 5)
    assert probe.activations[""].shape == (5, 8)
    with Probe(Sequential(layer, layer, Dense(8, 3))) as probe:
        assert list(probe._layers) == ["steps.0", "steps.2"]


# -------------------------------------------------------------------- removal of hooks
@pytest.mark.parametrize("case", ["well", "in the block", "in a layer", "on entering a second probe"])
def test_probe_restores_the_model(case: str) -> None:
    model = lively(TINY)
    before, state = attributes(model), model.state_dict()
    with ExitStack() as ends:
        if case != "well":
            ends.enter_context(pytest.raises((KeyError, ValueError)))
        with Probe(model, "*"):
            assert attributes(model) != before
            assert [name for name, _ in model.named_layers()] == [name for name, *_ in before]
            assert model.state_dict().keys() == state.keys()
            if case == "in the block":
                raise KeyError("here")
            if case == "in a layer":
                model(np.full((1, 3), TINY.vocab_size))
            if case == "on entering a second probe":
                Probe(model, "nowhere")
            model(IDS)
    assert attributes(model) == before
    assert not hooked_layers(model)


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_probes_nest_and_end_in_any_order(order: str) -> None:
    model = lively(TINY)
    before, plain = attributes(model), model(IDS).array
    first, second = Probe(model, "*.attention"), Probe(model, "blocks.0.*")
    first.__enter__()
    second.__enter__()
    first.ablate("blocks.0.mlp")
    second.change_softmax(temperature=3)
    model(IDS)
    np.testing.assert_array_equal(first.weights[ATTENTION[0]], second.weights[ATTENTION[0]])
    assert list(first.weights) == ATTENTION
    assert list(second.weights) == ATTENTION[:1]
    ending, staying = (second, first) if order == "inner first" else (first, second)
    ending.__exit__()
    old = ending.weights[ATTENTION[0]]
    model(IDS[:, :4])
    assert ending.weights[ATTENTION[0]] is old
    assert staying.weights[ATTENTION[0]].shape[-1] == 4
    assert abs(model(IDS).array - plain).max() > 1e-4
    staying.__exit__()
    np.testing.assert_array_equal(model(IDS).array, plain)
    with staying, staying:  # also entered twice
        model(IDS)
    assert attributes(model) == before


def test_probe_restores_an_instance_forward() -> None:
    layer = Dense(2, 2, generator=0)
    layer.forward = replacement = lambda x: Tensor(np.ones(3))  # type: ignore[method-assign]
    with Probe(layer, "") as probe:
        layer([1, 2])
    assert vars(layer)["forward"] is replacement
    assert probe.activations[""].tolist() == [1, 1, 1]


def test_softmax_changed_during_a_probe_is_kept() -> None:
    model = lively(TINY)
    with Probe(model), no_grad():
        model.use_softmax("softmax1")
        model(IDS)
    assert model.blocks[0].attention.attention.softmax.name == "softmax1"
    assert not hooked_layers(model)


# -------------------------------------------------------------------- statistics
def test_excess_kurtosis_has_its_known_values(rng: np.random.Generator) -> None:
    assert excess_kurtosis(np.array([-1, 1])) == pytest.approx(-2)
    assert excess_kurtosis(np.array([0, 0, 0, 1.0])) == pytest.approx(1 / (3 / 16) - 6, rel=1e-9)  # Bernoulli(1/4)
    for name, expected in {"normal": 0, "uniform": -1.2, "laplace": 3, "logistic": 1.2}.items():
        assert excess_kurtosis(getattr(rng, name)(size=(400, 1000))) == pytest.approx(expected, abs=0.15), name
    x = rng.standard_normal((7, 9))
    expected = np.mean((x - x.mean()) ** 4) / np.var(x) ** 2 - 3
    for changed in (x, 5 - 1e150 * x, 1e-150 * x, np.asfortranarray(x)):
        assert excess_kurtosis(changed) == pytest.approx(expected, rel=1e-9)
    large = 1000 + rng.standard_normal(200_000).astype(np.float32)
    assert excess_kurtosis(large) == pytest.approx(excess_kurtosis(large.astype(np.float64)), rel=1e-12)
    for undefined in ([0.1] * 7, [3], [1, np.nan], [1, 2, -np.inf]):
        assert math.isnan(excess_kurtosis(np.array(undefined)))


def test_entropy_in_closed_form() -> None:
    uniform, one = np.full((2, 3, 8), 1 / 8, np.float32), np.eye(4)
    np.testing.assert_allclose(entropy(uniform), np.full((2, 3), math.log(8)), rtol=1e-6)
    assert entropy(one).tolist() == [0, 0, 0, 0]
    assert not np.signbit(entropy(one)).any()
    assert float(entropy(np.array([0.5, 0.25, 0.25, 0]))) == pytest.approx(1.5 * math.log(2))
    assert float(entropy(np.array([0.25, 0.25]))) == pytest.approx(math.log(2))  # rows are not normalized
    assert entropy(np.zeros((2, 5))).tolist() == [0, 0]
    assert entropy(uniform).dtype == np.float64


def test_top_k_weight_and_unassigned_weight() -> None:
    rows = np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0, 0, 0.25]])
    for k, expected in ((1, [0.4, 0.25]), (2, [0.7, 0.5]), (4, [1, 0.5]), (9, [1, 0.5])):
        np.testing.assert_allclose(top_k_weight(rows, k), expected)
    np.testing.assert_allclose(unassigned_weight(rows), [0, 0.5], atol=1e-12)
    assert rows[0].tolist() == [0.1, 0.4, 0.2, 0.3]


def causal_uniform(n_rows: int, n_keys: int) -> np.ndarray:
    visible = np.tri(n_rows, n_keys, n_keys - n_rows)
    return visible / visible.sum(axis=-1, keepdims=True)


def test_spikiness_is_0_for_uniform_rows_and_1_for_single_keys() -> None:
    for n_rows, n_keys in ((6, 6), (2, 6), (1, 5)):
        found = spikiness(np.stack([causal_uniform(n_rows, n_keys)] * 2))
        assert np.isnan(found).sum() == (2 if n_rows == n_keys else 0)  # the first row sees itself alone
        np.testing.assert_allclose(found[~np.isnan(found)], 0, atol=1e-12)
    np.testing.assert_allclose(spikiness(np.eye(5))[1:], 1)
    assert float(spikiness(np.full(7, 1 / 7))) == pytest.approx(0, abs=1e-12)
    half = np.array([[0.5, 0.5, 0, 0]])
    assert spikiness(half).tolist() == pytest.approx([0.5])
    assert spikiness(half, 2).tolist() == pytest.approx([0])
    assert spikiness(np.full((2, 3, 4), 0.25), 4) == pytest.approx(np.zeros((2, 3)), abs=1e-12)
    many = spikiness(np.full((2, 4), 0.25), np.array([4, 16]))
    np.testing.assert_allclose(many, [0, 0.5], atol=1e-12)
    assert spikiness(half / 10).tolist() == pytest.approx([0.5])  # rows are normalized
    assert np.isnan(spikiness(np.zeros((1, 4)))).all()


def test_the_device_computes_the_numbers(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(devices.ARRAY_MODULES, fake_device.FakeArray, fake_device.fake_module)
    weights = causal_uniform(5, 5) ** 2
    there = fake_device.FakeArray(weights)
    functions: list[Callable] = [entropy, unassigned_weight, lambda w: top_k_weight(w, 2), spikiness]
    for function in functions:
        np.testing.assert_allclose(function(there).host_array, function(weights))
    x = rng.standard_normal((4, 5)).astype(np.float32)
    assert excess_kurtosis(fake_device.FakeArray(x)) == excess_kurtosis(x)


def test_weight_kurtosis_names_the_matrices() -> None:
    model = lively(replace(TINY, softmax="blocks"))
    model.token_embedding.weights.array[0, 0] = 1000
    found = weight_kurtosis(model)
    assert list(found) == [name for name, p in model.named_parameters() if p.ndim == 2]
    assert found["token_embedding.weights"] > 80 > found["blocks.0.mlp.up.weights"]


def test_perplexity_is_that_of_the_loss() -> None:
    model, tokens = lively(TINY), np.resize(IDS, 200)
    found = perplexity(model, tokens, n_bytes=500, batch_size=4)
    loss, n_tokens = evaluate(model, tokens, 4)
    assert (found.loss, n_tokens) == (loss, 199)
    assert found.perplexity == pytest.approx(math.exp(loss))
    assert found.bits_per_byte == pytest.approx(loss * 199 / math.log(2) / 500)
    assert perplexity(model, tokens, 500, stride=5).loss != loss
    assert perplexity(model, tokens, 500, n_batches=1, batch_size=2).loss != loss
    uniform = GPT(TINY)
    for parameter in uniform.parameters():
        parameter.array[...] = 0
    assert perplexity(uniform, tokens, 500).perplexity == pytest.approx(TINY.vocab_size)


# -------------------------------------------------------------------- invalid arguments
LAYER = Sequential(Dense(2, 2), Dense(2, 2))

test_bad_input = bad_input(
    {
        "a pattern without a match": (lambda: Probe(LAYER, "steps.0", "blocks.*"), r"Probe: .*'blocks\.\*'"),
        "no default layers": (lambda: Probe(Dense(2, 2)), "Probe: .*patterns.*no attention"),
        "kurtosis of an empty array": (lambda: excess_kurtosis(np.ones((0, 3))), "excess_kurtosis: .*at least one"),
        "a number": (lambda: entropy(np.array(1.0)), "entropy: .*at least one key"),
        "no key": (lambda: unassigned_weight(np.ones((3, 0))), "unassigned_weight: .*at least one key"),
        "the 0 largest": (lambda: top_k_weight(np.ones(3), 0), "top_k_weight: .* k .*above 0"),
        "not causal": (lambda: spikiness(np.full((2, 2), 0.5)), "spikiness: .*causal"),
        "more queries than keys": (lambda: spikiness(np.full((4, 2), 0.5)), "spikiness: .*causal"),
        "no byte": (lambda: perplexity(GPT(TINY), [1, 2, 3], 0), "perplexity: .*n_bytes.*whole number"),
        "one token": (lambda: perplexity(GPT(TINY), [1], 5), "evaluate: .*at least 2 tokens.*got 1"),
    }
)
