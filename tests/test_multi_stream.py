"""Decoders with several residual streams: each part against NumPy, caches against whole texts, training, refusals."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_checks import cached_logits, check_generation, check_gradients, check_learning, randomize
from transformers_families import difference

from tricycle.activation import GeLU
from tricycle.finetuning.lora import LoRAConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.multi_stream.altup import AltUp, StreamProjections, match_magnitude
from tricycle.multi_stream.decoder import MultiStreamConfig
from tricycle.multi_stream.laurel import LowRankResidual
from tricycle.multi_stream.per_layer import PerLayerGate, PerLayerInputs
from tricycle.multi_stream.shared_keys import SharedKeyAttention
from tricycle.multi_stream.sparsity import GaussianTopK
from tricycle.pretrained import load
from tricycle.pretrained.adapters import new_adapter
from tricycle.pretrained.export import export_folder
from tricycle.tensor import Tensor, no_grad
from tricycle.weights import quantize
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.steering import steer

SMALL: dict[str, Any] = {"vocab_size": 61, "context_window": 128, "embedding_dim": 24, "n_heads": 4, "n_key_heads": 2}
SMALL |= {"head_size": 8, "n_layers": 6, "hidden_size": 40, "window": 5, "full_layers": (1, 3, 5), "n_streams": 3}
SMALL |= {"residual_rank": 4, "per_layer_size": 6, "per_layer_rows": 50, "n_shared_layers": 3, "logit_cap": 3.0}
SMALL |= {"sparsity": (0.7, 0.5, 0.0, 0.0, 0.0, 0.0), "embedding_scale": 24**0.5}
TOKENS = np.random.default_rng(5).integers(0, 61, (2, 25))
PROMPT = [3, 1, 4, 15, 9, 2, 6]
MODELS: dict[str, dict[str, Any]] = {
    "shared keys, sparse": {},
    "own keys, hidden sizes": {"n_shared_layers": 0, "sparsity": (), "hidden_sizes": (40, 30, 20, 40, 8, 40)},
    "two streams, full attention": {"n_streams": 2, "window": 0, "full_layers": (), "qkv_bias": True},
}
each_model = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
draw = np.random.default_rng(3).standard_normal


def small(**fields: Any) -> GPT:
    """Return a model with random weights, large enough that each part affects the logits."""
    return randomize(GPT(config(**fields)))


def config(**fields: Any) -> MultiStreamConfig:
    return MultiStreamConfig(**{**SMALL, **fields})


def rms_norm(x: np.ndarray, layer: Any) -> np.ndarray:
    """Return the RMS norm of x by its definition."""
    gain = 1 if layer.gain is None else layer.gain.array
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.eps) * gain


# -------------------------------------------------------------------- the parts by their definitions
def test_altup_predicts_and_corrects_each_token() -> None:
    altup, streams, computed = randomize(AltUp(6, 3, 1e-3)), draw((2, 4, 3, 6)), draw((2, 4, 6))
    route = lambda x: np.tanh(rms_norm(x, altup.router_norm) / 6 @ altup.router.weights.array)
    predicted, corrected = altup.predict(Tensor(streams)), altup.correct(Tensor(streams), Tensor(computed))
    for b, t in np.ndindex(2, 4):
        weights = (route(streams[b, t, 0]) @ altup.prediction.weights.array).reshape(3, 3)
        np.testing.assert_allclose(predicted.array[b, t], streams[b, t] + weights @ streams[b, t], rtol=1e-5, atol=1e-5)
        gains = 1 + route(computed[b, t]) @ altup.correction.weights.array
        expected = streams[b, t] + np.outer(gains, computed[b, t] - streams[b, t, 0])
        np.testing.assert_allclose(corrected.array[b, t], expected, rtol=1e-5, atol=1e-5)


def test_new_altup_passes_on_the_streams_and_the_result() -> None:
    """With weights of 0, predictions are the input, and each stream gets the whole difference."""
    altup, streams, computed = AltUp(6, 3, 1e-3), draw((1, 2, 3, 6)), draw((1, 2, 6))
    for parameter in (altup.prediction.weights, altup.correction.weights):
        parameter.array[...] = 0
    np.testing.assert_array_equal(altup.predict(Tensor(streams)).array, streams)
    corrected = altup.correct(Tensor(streams), Tensor(computed)).array
    np.testing.assert_allclose(corrected[:, :, 0], computed)
    np.testing.assert_allclose(corrected[:, :, 1] - streams[:, :, 1], computed - streams[:, :, 0])


def test_streams_have_the_magnitude_of_the_embeddings() -> None:
    layer, x = randomize(StreamProjections(6, 3)), draw((2, 4, 6)) * 5
    streams = layer.expand(Tensor(x)).array.reshape(2, 4, 3, 6)
    np.testing.assert_array_equal(streams[:, :, 0], x)
    np.testing.assert_allclose((streams**2).mean(-1), (x**2).mean(-1)[..., None].repeat(3, -1), rtol=1e-5)
    projected = x @ layer.inputs[1].weights.array
    cosine = (streams[:, :, 2] * projected).sum(-1) / np.linalg.norm(streams[:, :, 2], axis=-1)
    np.testing.assert_allclose(cosine, np.linalg.norm(projected, axis=-1), rtol=1e-5)
    merged = layer.merge(Tensor(streams)).array
    others = [match_magnitude(layer.outputs[i](Tensor(streams[:, :, i + 1])), Tensor(x)).array for i in range(2)]
    np.testing.assert_allclose(merged, (x + others[0] + others[1]) / 3, rtol=1e-5)
    tiny = match_magnitude(Tensor(np.full((1, 6), 1e-4)), Tensor(np.ones((1, 6)))).array
    np.testing.assert_allclose(tiny, 1e-4 / 1e-5**0.5)


def test_low_rank_residual() -> None:
    layer, x = randomize(LowRankResidual(6, 2, 1e-3)), draw((3, 6))
    added = rms_norm(x @ layer.down.weights.array @ layer.projection.weights.array, layer.norm)
    np.testing.assert_allclose(layer(Tensor(x)).array, x + added, rtol=1e-5, atol=1e-6)


def test_per_layer_inputs_of_known_and_unknown_tokens() -> None:
    layer, x, tokens = randomize(PerLayerInputs(5, 6, 3, 4, 1e-3)), draw((2, 6)), np.array([4, 7])
    projected = rms_norm((x @ layer.projection.weights.array / 6**0.5).reshape(2, 3, 4), layer.norm)
    rows = layer.embedding.weights.array[[4, 0]].reshape(2, 3, 4)  # a token without a row has that of token 0
    expected = (projected + 2 * rows) / 2**0.5
    np.testing.assert_allclose(layer(Tensor(tokens), Tensor(x)).array, expected.reshape(2, 12), rtol=1e-5, atol=1e-6)


def test_per_layer_gate() -> None:
    layer, x, own = randomize(PerLayerGate(6, 4, "gelu", 1e-3)), draw((2, 6)), draw((2, 4))
    gate = GeLU()(Tensor(x * layer.scale.array @ layer.gate.weights.array)).array
    expected = rms_norm(gate * own @ layer.projection.weights.array, layer.norm)
    np.testing.assert_allclose(layer(Tensor(x), Tensor(own)).array, expected, rtol=1e-5, atol=1e-6)


def test_sparsity_is_the_fraction_of_normal_values_below_the_threshold() -> None:
    values, gate = draw((4, 10_000)), draw((4, 10_000)) * 3 + 2
    out = GaussianTopK(0.95, GeLU())(Tensor(np.concatenate([values, gate], axis=1))).array
    assert (out == 0).mean() == pytest.approx(0.95, abs=0.005)
    threshold = gate.mean(1, keepdims=True) + NormalDist().inv_cdf(0.95) * gate.std(1, keepdims=True)
    expected = values * GeLU()(Tensor(np.maximum(gate - threshold, 0))).array
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-12)


def test_gradients_of_constant_rows_are_finite() -> None:
    """The root of their variance or of their mean square has no derivative at 0."""
    x = Tensor(np.ones((2, 8)))
    zeros = Tensor(np.zeros((2, 8)))
    (GaussianTopK(0.5, GeLU())(x) + match_magnitude(x, zeros)[:, :4]).backward()
    assert x.grad is not None and zeros.grad is not None
    assert np.isfinite(x.grad.array).all() and np.isfinite(zeros.grad.array).all()


def test_layers_share_keys_of_the_last_layer_with_the_same_window() -> None:
    model = small()
    assert [model.config.source(layer) for layer in range(6)] == [0, 1, 2, 1, 2, 1]
    assert model.config.sources == [1, 2]
    names = [name for name, _ in model.named_parameters() if "key_value" in name or "key_norm" in name]
    assert {name.split(".")[1] for name in names} == {"0", "1", "2"}
    attention: Any = randomize(SharedKeyAttention(model.config, 0))
    assert SharedKeyAttention(model.config, 3, False).key_value is None
    kv = attention.project_kv(Tensor(draw((2, 3, 24))))
    assert kv.shape == (2, 3, 32)
    np.testing.assert_allclose((kv.array[..., 16:].reshape(2, 3, 2, 8) ** 2).mean(-1), 1, rtol=1e-3)  # values


# -------------------------------------------------------------------- models
@each_model
def test_cached_logits_are_those_of_whole_texts(fields: dict[str, Any]) -> None:
    model = small(**fields)
    whole = model(TOKENS).array
    assert difference(cached_logits(model, TOKENS)[0], whole) < 2e-5
    assert difference(model(TOKENS[0]).array, whole[0]) < 2e-5  # without a batch axis


def test_long_prompts_beyond_the_windows_are_the_same() -> None:
    model, tokens = small(context_window=700), np.random.default_rng(6).integers(0, 61, (1, 640))
    logits, caches = cached_logits(model, tokens, (600, 601))
    assert difference(logits, model(tokens).array) < 2e-5
    assert caches[0].keys.shape[1] < 300  # the sliding window drops older ones


@pytest.mark.nightly_except(3)
@each_model
def test_batches_beams_drafts_and_single_texts_agree(fields: dict[str, Any]) -> None:
    check_generation(small(**fields), [PROMPT, [4], [5, 6, 7, 8]])


@pytest.mark.nightly_except(3)
@pytest.mark.slow
@each_model
def test_it_learns(fields: dict[str, Any]) -> None:
    check_learning(GPT(config(**fields)))


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_activation_checkpointing_and_freeing_change_no_bit(precision: str) -> None:
    """Keys and values of a block reach later blocks through its result alone."""
    check_gradients(lambda: small(precision=precision), TOKENS)


def test_bfloat16_and_int8_are_close_to_float32() -> None:
    expected = small()(TOKENS).array
    logits = small().use_precision("bfloat16")(TOKENS)
    assert difference(logits.array, expected) < 0.2
    CrossEntropy()(TOKENS, logits).backward()
    model = small()
    quantize(model, "int8")
    with no_grad():
        assert difference(model(TOKENS).array, expected) < 0.2


CHANGES: list[dict[str, Any]] = [{"sparsity": ()}, {"window": 6}, {"full_layers": (1, 3)}, {"score_scale": 0.5}]
CHANGES += [{"logit_cap": 0.0}, {"embedding_scale": 1.0}, {"rotary_base": 100.0}, {"rotary_local_base": 100.0}]
CHANGES += [{"norm_eps": 0.1}, {"qk_norm_eps": 0.1}, {"activation": "swish"}, {"score_cap": 1.0}]
CHANGES += [{"softmax": "softmax1"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_each_field_changes_the_logits(change: dict[str, Any]) -> None:
    assert difference(small(**change)(TOKENS).array, small()(TOKENS).array) > 1e-4


def test_a_mask_hides_tokens() -> None:
    model, mask = small(), np.ones((2, 25), bool)
    mask[:, 0] = False
    with no_grad():
        masked, whole = model(TOKENS, mask=mask).array, model(TOKENS).array
    assert difference(masked[:, 3:], whole[:, 3:]) > 1e-2


def test_adapters_attach_to_layers_in_lists(tmp_path: Path) -> None:
    export_folder(small(), None, tmp_path / "model")
    loaded = load(tmp_path / "model")
    before, layer = loaded.model(TOKENS).array, loaded.model.streams.projections.inputs[1]
    adapter = new_adapter(loaded, LoRAConfig(rank=2, targets=("altup_projections.1",)))
    assert list(adapter.low_ranks) == ["streams.projections.inputs.1"]
    adapter.low_ranks["streams.projections.inputs.1"].ups[0].array[...] = 0.5
    assert difference(loaded.model(TOKENS).array, before) > 1e-3
    adapter.detach()
    assert loaded.model.streams.projections.inputs[1].weights is layer.weights
    np.testing.assert_array_equal(loaded.model(TOKENS).array, before)


# -------------------------------------------------------------------- inspection
def test_the_model_viewer_shows_attention_of_all_layers() -> None:
    inspectable = InspectableStack(small(), SimpleNamespace(n_vocab=0), "model")
    assert inspectable.n_heads == {f"blocks.{layer}.attention": 4 for layer in range(6)}
    trace = inspectable.run(PROMPT, Interventions())
    assert trace.attention_layer("blocks.5.attention").maps()[1].shape == (4, 7, 7)
    norms = [statistics["norms"] for statistics in trace.stream_statistics()]
    expected = [np.linalg.norm(x[:, :72], axis=1) for x in trace.stream.values()]  # without keys and later inputs
    np.testing.assert_allclose(norms, expected, rtol=1e-3)
    predictions = trace.top_predictions(6)
    assert predictions["top"][0]["id"] == trace.predictions.top_tokens[6]
    assert predictions["lens"][-1]["top"] == predictions["top"][:3] and len(predictions["lens"]) == 7
    changed = inspectable.run([*PROMPT[:-1], 5], Interventions(), trace)
    np.testing.assert_allclose(changed.stream["blocks.2"][:6], trace.stream["blocks.2"][:6], rtol=1e-5, atol=1e-5)
    expected = inspectable.run([*PROMPT[:-1], 5], Interventions()).predictions
    np.testing.assert_array_equal(changed.predictions.log_probs, expected.log_probs)


def test_an_ablated_block_passes_on_its_streams_and_computes_keys_for_later_ones() -> None:
    inspectable = InspectableStack(small(), SimpleNamespace(n_vocab=0), "model")
    trace = inspectable.run(PROMPT, Interventions())
    skipped = inspectable.run(PROMPT, Interventions(ablated_layers=("blocks.2",)))
    streams, rest = np.split(skipped.stream["blocks.2"], [72], axis=1)
    np.testing.assert_allclose(streams, trace.stream["blocks.1"][:, :72], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rest, trace.stream["blocks.2"][:, 72:], rtol=1e-5, atol=1e-5)
    assert abs(skipped.predictions.log_probs - trace.predictions.log_probs)[:-1].max() > 1e-3


def test_analyses_of_one_residual_stream_refuse() -> None:
    with pytest.raises(ValueError, match="steer: expected MultiHeadSelfAttention in all blocks, got SharedKeyAtt"):
        steer(small(), {0: np.zeros(24)})


# -------------------------------------------------------------------- what is refused
def test_a_block_refuses_another_width() -> None:
    with pytest.raises(ValueError, match=r"MultiStreamBlock: .*108 channels .*\(1, 2, 24\)"):
        small().blocks[0](np.zeros((1, 2, 24), np.float32))


REFUSED = [
    ({"n_shared_layers": 6}, "n_shared_layers to be from 0 to 5, got 6"),
    ({"full_layers": (5,)}, "n_shared_layers to be fewer, as a shared layer's window has no earlier layer, got 3"),
    ({"sparsity": (0.5,)}, r"sparsity to be empty or 6 numbers, got \(0.5,\)"),
    ({"sparsity": (1.0,) * 6}, "sparsity to be numbers from 0 to below 1"),
    ({"hidden_sizes": (3,)}, "hidden_sizes to be empty or 6 whole numbers"),
    ({"hidden_sizes": (0,) * 6}, "hidden_sizes to be whole numbers of at least 1"),
    ({"n_streams": 0}, "n_streams to be at least 1, got 0"),
    ({"activation": "swiglu"}, "activation to be one without a gate, got 'swiglu'"),
    ({"norm_placement": "before"}, "norm_placement to be both with several streams"),
    ({"positions": "learned", "qk_norm": False, "qk_norm_gain": False}, "positions to be rotary"),
    ({"qk_norm": False, "qk_norm_gain": False}, "qk_norm to be True with several streams"),
    ({"n_experts": 4}, "n_experts to be unset with several streams, got 4"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_invalid_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)
