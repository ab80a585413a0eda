"""The model viewer: its data equals what the model computes, and its server rejects requests without the token."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tables import bad_input
from test_models import TINY, lively
from tiny_models import tiny_tokeniser

from tricycle.checkpoint import save_checkpoint
from tricycle.configs.encoder import EncoderConfig
from tricycle.decoding.encoder_decoder import generate_target
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.families.t5 import T5
from tricycle.sequences.attentions import AdditiveAttention
from tricycle.sequences.seq2seq import EncoderDecoderTransformer, Seq2Seq, Seq2SeqAttention, Transformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tensor import no_grad
from tricycle.tokeniser import BPETokeniser
from tricycle.weights import quantize
from tricycle_cli import look
from tricycle_lab.look.inspectable import InspectableEncoderDecoder, InspectableModel, InspectableStack
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.look.page import collect_static_data, render_page
from tricycle_lab.look.server import MAX_REQUEST_BYTES, LookServer, ViewerService
from tricycle_lab.look.trace import Trace
from tricycle_lab.probe import Probe, entropy, excess_kurtosis

SPECIAL = ("<|endoftext|>", "<begin>", "<end>")
TOKENISER = BPETokeniser(264, SPECIAL).train("the cat and the dog and the cat ", progress=False)
TEXT = "the cat\nand <b> é"
CONFIG = replace(TINY, vocab_size=TOKENISER.n_vocab, context_window=40, n_layers=3)
KINDS = {
    "gpt2": CONFIG,
    "rotary, few key heads, cap": replace(CONFIG, positions="rotary", n_key_heads=1, score_cap=2.0, bias=False),
    "softmax1, window": replace(CONFIG, softmax="softmax1", window=4, full_layers=(1,)),
    "blocks": replace(CONFIG, softmax="blocks"),
    "sink": replace(CONFIG, softmax="sink"),
    "parallel, untied": replace(CONFIG, parallel=True, tied=False, logit_cap=3.0),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def new_inspectable(config: Any = CONFIG) -> InspectableStack:
    return InspectableStack(lively(config), TOKENISER, "tiny")


def run(model: InspectableModel, text: str = TEXT, **interventions: Any) -> Trace:
    return model.run(model.encode_input(text), Interventions(**interventions))


def next_token_logs(logits: np.ndarray, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities (T, V), and those of the actual next tokens (T - 1,)."""
    logits = logits.astype(np.float64)
    logs = logits - np.logaddexp.reduce(logits, axis=-1)[..., None]
    return logs, logs[np.arange(len(logs) - 1), ids[1:]]


def assert_close_traces(trace: Trace, expected: Trace) -> None:
    for name, x in expected.stream.items():
        np.testing.assert_allclose(trace.stream[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    for layer, expected_layer in zip(trace.attention_layers, expected.attention_layers, strict=True):
        np.testing.assert_allclose(layer.maps(), expected_layer.maps(), rtol=1e-3, atol=1e-5)
    for name, numbers in vars(expected.predictions).items():
        np.testing.assert_allclose(vars(trace.predictions)[name], numbers, atol=2e-4, err_msg=name)


def unpack(text: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


# -------------------------------------------------------------------- data of the page
@each_kind
def test_predictions_match_the_logits(kind: str) -> None:
    inspectable = new_inspectable(KINDS[kind])
    trace = run(inspectable)
    assert "".join(trace.texts[1:]).replace("�", "") == TEXT.replace("é", "")
    logs, actual = next_token_logs(inspectable.model(np.array(trace.ids)).array, trace.ids)
    view = trace.summary()["predictions"]
    np.testing.assert_allclose(view["logProbs"][:-1], actual, atol=2e-4)
    assert view["ranks"][:-1] == (logs[:-1] > actual[:, None]).sum(axis=-1).tolist()
    assert trace.predictions.top_tokens.tolist() == logs.argmax(axis=-1).tolist()
    np.testing.assert_allclose(view["topProbs"], np.exp(logs.max(axis=-1)), atol=2e-5)
    np.testing.assert_allclose(view["entropy"], -(np.exp(logs) * logs).sum(axis=-1), atol=1e-3)


@each_kind
def test_attention_maps_match_a_probe(kind: str) -> None:
    inspectable = new_inspectable(KINDS[kind])
    trace = run(inspectable)
    with Probe(inspectable.model, "*") as probe, no_grad():
        inspectable.model(np.array([trace.ids]))
    assert [layer.name for layer in trace.attention_layers] == list(probe.weights)
    for name, weights in probe.weights.items():
        for head in range(2):
            attention_map = trace.attention_map(name, head)
            deflated = trace.attention_map(name, head, deflate=True)
            assert zlib.decompress(base64.b64decode(deflated["weights"])) == base64.b64decode(attention_map["weights"])
            scores = probe.scores[name][0, head]
            decoded = (unpack(attention_map["weights"], attention_map["shape"]) / 255) ** 2
            np.testing.assert_allclose(decoded, np.clip(weights[0, head], 0, 1), atol=1 / 255)
            levels = unpack(attention_map["scores"], attention_map["shape"])
            assert ((levels == 0) == (scores == -np.inf)).all()
            visible = levels > 0
            step = (attention_map["maxScore"] - attention_map["minScore"]) / 254
            decoded_scores = attention_map["minScore"] + (levels[visible] - 1.0) * step
            tolerance = 0.51 * step + 1e-3 * abs(scores[visible]).max()
            np.testing.assert_allclose(decoded_scores, scores[visible], atol=tolerance)
            np.testing.assert_allclose(attention_map["entropy"], entropy(weights[0, head]), atol=0.006)
            assert attention_map["scoreKurtosis"] == pytest.approx(excess_kurtosis(scores[visible]), rel=1e-3, abs=1e-3)
    statistics = trace.stream_statistics()
    assert [state["name"] for state in statistics] == ["embedding", *(f"blocks.{i}" for i in range(3))]
    last = probe.activations["blocks.2"][0]
    np.testing.assert_allclose(statistics[-1]["norms"], np.linalg.norm(last, axis=-1), rtol=1e-3)
    largest = statistics[-1]["outliers"][0]
    assert abs(last).max() == pytest.approx(abs(largest["value"]), rel=1e-3)
    assert last[largest["position"], largest["channel"]] == pytest.approx(largest["value"], rel=1e-3)
    layers = trace.head_statistics(1, 3)["layers"]
    assert [layer["name"] for layer in layers] == ["blocks.1.attention", "blocks.2.attention"]


def test_a_trace_stores_the_maps_of_one_layer() -> None:
    trace = run(new_inspectable())
    for layer in trace.attention_layers:
        trace.attention_map(layer.name, 1)
        assert [other for other in trace.attention_layers if other.cached_maps] == [layer]


def test_last_layer_of_the_logit_lens_is_the_prediction() -> None:
    trace = run(new_inspectable())
    lens = trace.logit_lens()
    assert lens["tokens"][-1] == trace.predictions.top_tokens.tolist()
    for position in (0, 4, len(trace.ids) - 1):
        predictions = trace.top_predictions(position)
        assert predictions["top"][0]["id"] == trace.predictions.top_tokens[position]
        probs = [prediction["prob"] for prediction in predictions["top"]]
        assert len(probs) == 10 and probs == sorted(probs, reverse=True)
        assert [layer["top"][0]["id"] for layer in predictions["lens"]] == [row[position] for row in lens["tokens"]]
        assert ("rank" in predictions["lens"][0]) == (position + 1 < len(trace.ids))


def test_routing_matches_the_routers_with_and_without_reuse() -> None:
    config = replace(CONFIG, n_experts=5, n_active_experts=2, router_bias=True)
    inspectable = new_inspectable(config)
    trace = run(inspectable)
    assert list(trace.routing) == [f"blocks.{i}.mlp" for i in range(3)]
    with Probe(inspectable.model, "*.router") as probe, no_grad():
        inspectable.model(np.array([trace.ids]))
    logits = probe.activations["blocks.1.mlp.router"]
    scores = np.exp(logits) * (logits >= np.sort(logits)[:, -2:-1])  # of the two selected experts
    expected = scores / scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(trace.routing["blocks.1.mlp"], expected, rtol=1e-3, atol=1e-5)
    router_map = trace.router_map("blocks.1.mlp")
    decoded = unpack(router_map["weights"], router_map["shape"]) / 255 * router_map["max"]
    np.testing.assert_allclose(decoded, expected.T, atol=router_map["max"] / 255)
    mixture = trace.summary()["mixtures"][1]
    assert (mixture["name"], mixture["nActive"]) == ("blocks.1.mlp", 2)
    np.testing.assert_allclose(mixture["load"], (expected > 0).mean(axis=0) / 2, atol=1e-4)
    json.dumps(collect_static_data(inspectable, trace), allow_nan=False)
    off = Interventions(ablated_layers=("blocks.1.attention",))
    for ids, interventions in ((trace.ids, off), ([*trace.ids[:-2], 5], Interventions())):
        changed, fresh = inspectable.run(ids, interventions, trace), inspectable.run(ids, interventions)
        assert list(changed.routing) == list(fresh.routing)
        for name, weights in fresh.routing.items():
            np.testing.assert_allclose(changed.routing[name], weights, rtol=1e-3, atol=1e-5)


def test_weight_on_no_key_is_that_of_the_sink() -> None:
    inspectable = new_inspectable(KINDS["sink"])
    for block in inspectable.model.blocks:
        block.attention.softmax_scales.array[...] = [30.0, -30.0]  # the first head attends to the sink alone
    for layer in run(inspectable).head_statistics(0, 3)["layers"]:
        assert layer["unassigned"] == pytest.approx([1, 0], abs=1e-3)
    layers = run(new_inspectable()).head_statistics(0, 3)["layers"]
    assert all(layer["unassigned"] == pytest.approx([0, 0], abs=1e-3) for layer in layers)


INTERVENTIONS = {
    "none": {},
    "a head of the last layer": {"ablated_heads": (("blocks.2.attention", 1),)},
    "an MLP": {"ablated_layers": ("blocks.1.mlp",)},
    "a layer": {"ablated_layers": ("blocks.1",)},
    "the first attention": {"ablated_layers": ("blocks.0.attention",)},
    "a softmax": {"softmax": "softmax1"},
    "a temperature, and heads": {"temperature": 2.0, "ablated_heads": tuple(("blocks.1.attention", i) for i in (0, 1))},
}


@pytest.mark.parametrize("case", INTERVENTIONS)
@pytest.mark.parametrize("kind", ["gpt2", "rotary, few key heads, cap", "parallel, untied"])
def test_interventions_match_a_probe_with_and_without_reuse(kind: str, case: str) -> None:
    inspectable = new_inspectable(KINDS[kind])
    before = run(inspectable)
    interventions = Interventions(**INTERVENTIONS[case])
    changed = inspectable.run(before.ids, interventions, before)
    fresh = inspectable.run(before.ids, interventions)
    with Probe(inspectable.model, "") as probe, no_grad():
        interventions.apply(probe)
        _, actual = next_token_logs(inspectable.model(np.array(before.ids)).array, before.ids)
    np.testing.assert_allclose(fresh.predictions.log_probs[:-1], actual, atol=2e-4)
    assert list(changed.stream) == list(fresh.stream) == list(before.stream)
    assert_close_traces(changed, fresh)
    np.testing.assert_array_equal(run(inspectable).predictions.log_probs, before.predictions.log_probs)


def test_blocks_before_an_intervention_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    inspectable = new_inspectable()
    before = run(inspectable)
    monkeypatch.setattr(inspectable.model.blocks[0], "forward", None)
    monkeypatch.setattr(inspectable.model, "forward", None)
    with pytest.raises(TypeError):
        inspectable.run(before.ids, Interventions(ablated_layers=("blocks.0.mlp",)), before)
    inspectable.run(before.ids, Interventions(ablated_layers=("blocks.1.mlp",)), before)


# an edit of tokens, and the number of the first n positions that are reusable
EDITS: dict[str, tuple[Any, Any]] = {
    "a token": (lambda ids: [*ids[:4], 7, *ids[5:]], lambda n: 4),
    "several for one": (lambda ids: [*ids[:3], 7, 8, 9, *ids[4:]], lambda n: 3),
    "the first": (lambda ids: [7, *ids[1:]], lambda n: 0),
    "the last": (lambda ids: [*ids[:-1], 7], lambda n: n - 1),
    "one more": (lambda ids: [*ids, 7], lambda n: n),
    "fewer": (lambda ids: ids[:5], lambda n: 4),
}


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("case", EDITS)
@each_kind
def test_positions_before_an_edit_are_reused(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inspectable = new_inspectable(KINDS[kind])
    interventions = Interventions(ablated_heads=(("blocks.1.attention", 0),), temperature=0.5)
    before = inspectable.run(inspectable.encode_input(TEXT), interventions)
    ids, n_reusable = EDITS[case][0](before.ids), EDITS[case][1](len(before.ids))
    fresh = inspectable.run(ids, interventions)
    with monkeypatch.context() as patch:
        hidden_states = Mock(wraps=inspectable.model.hidden_states)
        patch.setattr(inspectable.model, "hidden_states", hidden_states)
        trace = inspectable.run(ids, interventions, before)
    assert [call.args[0].shape[-1] for call in hidden_states.call_args_list] == [len(ids) - n_reusable]
    again = inspectable.run(ids, interventions, inspectable.run(before.ids, interventions, trace))
    for other in (trace, again):
        assert other.ids == ids
        assert_close_traces(other, fresh)


@pytest.mark.parametrize("kind", ["decoder", "transformer", "additive, before"])
def test_one_token_text_gives_one_prediction_and_valid_json(kind: str) -> None:
    inspectable = new_inspectable() if kind == "decoder" else new_encoder_decoder(encoder_decoders()[kind])
    trace = inspectable.run(inspectable.encode_input("a =>")[:1], Interventions())
    assert len(trace.summary()["predictions"]["logProbs"]) == 1
    json.dumps(collect_static_data(inspectable, trace), allow_nan=False)


@pytest.mark.parametrize("shift", ["token_shift", "key_shift"])
def test_shifted_tokens_prevent_reuse(shift: str) -> None:
    inspectable = new_inspectable(replace(CONFIG, **{shift: True}))
    before = run(inspectable)
    ids = [*before.ids[:-1], 7]
    assert inspectable.reusable_fraction(ids, Interventions(), before) == 0
    trace, fresh = inspectable.run(ids, Interventions(), before), inspectable.run(ids, Interventions())
    np.testing.assert_array_equal(trace.predictions.log_probs, fresh.predictions.log_probs)


def test_a_second_intervention_reuses_the_first_trace() -> None:
    inspectable = new_inspectable()
    first = Interventions(ablated_layers=("blocks.1.mlp",), temperature=2.0)
    both = replace(first, ablated_heads=(("blocks.2.attention", 1),))
    ids = inspectable.encode_input(TEXT)
    before = inspectable.run(ids, first)
    assert inspectable.reusable_fraction(ids, both, before) == pytest.approx(2 / 3)
    assert inspectable.reusable_fraction(ids, both, inspectable.run(ids, Interventions())) == 0
    assert inspectable.reusable_fraction(ids, first, before) == 1
    assert_close_traces(inspectable.run(ids, both, before), inspectable.run(ids, both))
    assert_close_traces(inspectable.run(ids, replace(first, ablated_layers=("blocks.1.mlp",) * 2), before), before)


ENCODER = EncoderConfig(vocab_size=300, context_window=40, embedding_dim=8, n_heads=2, n_layers=2)


def test_flags_for_models_that_generate_text_are_rejected_with_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(model=TextEncoder(ENCODER), tokeniser=TOKENISER)
    monkeypatch.setattr(look, "load_file", lambda *args: loaded)
    for flag, value in (("--softmax", "softmax1"), ("--adapter", "a"), ("--tokeniser", "a")):
        with pytest.raises(ValueError, match=f"{flag}: expected a model that generates text, got the encoder"):
            look.main(["encoder", flag, value, "--no-browser"])


def test_an_encoder_has_attention_and_no_predictions() -> None:
    inspectable = InspectableStack(TextEncoder(ENCODER), TOKENISER, "encoder")
    trace = run(inspectable)
    assert inspectable.describe()["kind"] == "encoder"
    assert trace.summary()["predictions"] is None
    assert trace.top_predictions(1)["top"] == []
    assert trace.logit_lens()["tokens"] == []
    attention_map = trace.attention_map("blocks.1.attention", 0)
    assert (unpack(attention_map["scores"], attention_map["shape"]) > 0).all()  # all keys are visible
    json.dumps(collect_static_data(inspectable, trace), allow_nan=False)
    other = inspectable.run(trace.ids, Interventions(ablated_layers=("blocks.1.mlp",)), trace)
    assert abs(other.stream["blocks.1"] - trace.stream["blocks.1"]).max() > 0


# -------------------------------------------------------------------- encoder-decoders
def encoder_decoders() -> dict[str, Any]:
    n = TOKENISER.n_vocab

    def recurrent(before: bool) -> Seq2SeqAttention:
        attention = AdditiveAttention(6, 12, 6, generator=0)
        return Seq2SeqAttention(attention, n, n, 6, 6, attend_before_step=before, generator=1)

    return {
        "transformer": Transformer(n, n, 8, 2, 2, 64, generator=0),
        "norm first, tied": Transformer(n, n, 8, 2, 2, 64, norm_first=True, tied=True, generator=0),
        "additive, before": recurrent(True),
        "additive, after": recurrent(False),
    }


def new_encoder_decoder(model: Any) -> InspectableEncoderDecoder:
    begin, end = (TOKENISER.special_tokens[name] for name in SPECIAL[1:])
    return InspectableEncoderDecoder(model, TOKENISER.encode, lambda i: TOKENISER.decode([i]), begin, [end])


def new_transformer() -> InspectableEncoderDecoder:
    return new_encoder_decoder(encoder_decoders()["transformer"])


@pytest.mark.parametrize("kind", encoder_decoders())
def test_encoder_decoder_trace_matches_the_model(kind: str) -> None:
    model = encoder_decoders()[kind]
    inspectable = new_encoder_decoder(model)
    trace = run(inspectable, "the cat => and the dog")
    assert "".join(trace.source_texts) == "the cat"
    assert "".join(trace.texts) == "<begin>and the dog"
    with model.evaluating():
        logits = model(np.array([inspectable.source_ids]), np.array([trace.ids])).array[0]
    logs, actual = next_token_logs(logits, trace.ids)
    np.testing.assert_allclose(trace.summary()["predictions"]["logProbs"][:-1], actual, atol=2e-4)
    cross = [layer for layer in trace.attention_layers if layer.kind == "cross"]
    assert cross
    for layer in cross:
        assert layer.maps()[1].shape == (layer.n_heads, len(trace.ids), len(trace.source_texts))
        np.testing.assert_allclose(layer.maps()[1].sum(axis=-1), 1, rtol=1e-4)
    if trace.stream:
        assert trace.logit_lens()["tokens"][-1] == logs.argmax(axis=-1).tolist()
        off = Interventions(ablated_layers=("decoder.blocks.0.cross",), ablated_heads=(("decoder.blocks.1.cross", 0),))
        assert abs(inspectable.run(trace.ids, off, trace).predictions.log_probs - trace.predictions.log_probs).max() > 0
    else:
        assert trace.top_predictions(2)["top"][0]["id"] == logs[2].argmax()
    json.dumps(collect_static_data(inspectable, trace), allow_nan=False)
    flat = inspectable.run(trace.ids, Interventions(temperature=1000.0))
    np.testing.assert_allclose(flat.attention_layers[-1].maps()[1], 1 / len(trace.source_texts), rtol=0.02)
    other = inspectable.run(trace.ids, Interventions(softmax="softmax1"))
    assert (other.attention_layers[-1].maps()[1].sum(axis=-1) < 0.999).all()
    again = inspectable.run(trace.ids, Interventions())
    np.testing.assert_array_equal(again.predictions.log_probs, trace.predictions.log_probs)


def test_pretrained_encoder_decoder_is_traced_from_its_folder(tmp_path: Path) -> None:
    tokeniser = tiny_tokeniser(None)
    fields = {"vocab_size": tokeniser.n_vocab, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    config = T5.to_config(ConfigFields({**fields, "decoder_start_token_id": 1, "eos_token_id": 2}))
    model, generator = EncoderDecoderTransformer(config).eval(), np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.array[...] += generator.normal(0, 0.3, parameter.shape)
    assert export_folder(model, tokeniser, tmp_path / "t5") == "t5"
    inspectable = look.load_inspectable(look.Arguments(source=str(tmp_path / "t5")), str(tmp_path / "t5"))
    trace = run(inspectable, "the quick brown")
    assert "".join(trace.source_texts) == "the quick brown" and trace.texts[0] == "<begin>"
    sampling = PenalizedSamplingParams(0.0, stop_tokens=[2], n_vocab=tokeniser.n_vocab)
    expected = list(generate_target(model, inspectable.source_ids, 2 * len(trace.source_ids) + 10, sampling))
    assert trace.ids == [1, *(token for token in expected if token != 2)] and len(trace.ids) > 3
    given = run(inspectable, "the quick => fox")
    assert "".join(given.texts) == "<begin>fox"
    with model.evaluating():
        logits = model(np.array([inspectable.source_ids]), np.array([given.ids])).array[0]
    _, actual = next_token_logs(logits, given.ids)
    np.testing.assert_allclose(given.predictions.log_probs[:-1], actual, atol=2e-4)
    json.dumps(collect_static_data(inspectable, given), allow_nan=False)
    with pytest.raises(ValueError, match="at least one character"):
        inspectable.encode_input(" => fox")
    with pytest.raises(ValueError, match="--lens: expected a decoder"):
        look.load_inspectable(look.Arguments(lens=tmp_path / "lens"), str(tmp_path / "t5"))


def test_unsupported_interventions_on_a_recurrent_model_raise() -> None:
    inspectable = new_encoder_decoder(encoder_decoders()["additive, after"])
    ids = inspectable.encode_input("the cat => and")
    for interventions in (Interventions(ablated_heads=(("attention", 0),)), Interventions(softmax="blocks")):
        with pytest.raises(ValueError, match="interventions: expected a"):
            inspectable.run(ids, interventions)


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_quantized_model_can_be_traced_and_reused(weights: str) -> None:
    pytest.importorskip("ml_dtypes")
    model = lively(CONFIG).eval()
    quantize(model, weights)
    model.use_precision("bfloat16" if weights == "bfloat16" else "float32")
    inspectable = InspectableStack(model, TOKENISER, "small")
    trace = run(inspectable)
    json.dumps(collect_static_data(inspectable, trace), allow_nan=False)
    other = inspectable.run(trace.ids, Interventions(ablated_layers=("blocks.2.mlp",)), trace)
    fresh = inspectable.run(trace.ids, Interventions(ablated_layers=("blocks.2.mlp",)))
    np.testing.assert_allclose(other.predictions.log_probs[:-1], fresh.predictions.log_probs[:-1], atol=0.1)


def test_missing_target_is_generated() -> None:
    inspectable = new_transformer()
    ids = inspectable.encode_input("the cat")
    assert ids[0] == inspectable.begin
    assert 1 <= len(ids) <= 2 * len(inspectable.source_ids) + 11


def test_a_changed_run_has_the_source_of_its_trace() -> None:
    service = ViewerService([new_transformer()], TEXT)
    view = service.respond("run", {"text": "the cat => and"})
    with pytest.raises(ValueError, match="source"):
        service.respond("run", {"text": "z" * 129})
    changed = {"ids": view["ids"], "trace": view["trace"], "interventions": {"temperature": 2}}
    assert service.respond("run", changed)["sourceTokens"] == view["sourceTokens"]


# -------------------------------------------------------------------- invalid input
INSPECTABLE = new_inspectable()


def interventions_from(**fields: Any) -> Interventions:
    return Interventions.from_json(fields, INSPECTABLE.ablatable, INSPECTABLE.n_heads)


LAYERS = "interventions: .*ablatedLayers.*list"
PAIRS = "interventions: .*ablatedHeads.*pairs"
TEMPERATURE = r"interventions: .*temperature.*0\.001 to 1000"

test_bad_input = bad_input(
    {
        "no text": (lambda: INSPECTABLE.encode_input(""), "at least one character"),
        "too long": (lambda: INSPECTABLE.encode_input("z" * 40), "1 to 40 tokens.*got 41"),
        "an unknown token": (lambda: INSPECTABLE.check_ids([0, 999]), f"tokens from 0 to {TOKENISER.n_vocab - 1}"),
        "no position": (lambda: INSPECTABLE.replace_token([1, 2], 2, "a"), "position.*0 to 1.*got 2"),
        "no replacement": (lambda: INSPECTABLE.replace_token([1, 2], 1, ""), "text as the replacement"),
        "no attention": (lambda: new_encoder_decoder(Seq2Seq(9, 9, 4, 4)), "translator: .*model with attention"),
        "no source": (lambda: new_transformer().encode_input("=> a"), "at least one character"),
        "a long source": (lambda: new_transformer().encode_input("z" * 129), "1 to 128 tokens.*got 129"),
        "no map": (lambda: run(INSPECTABLE).attention_map("blocks.9.attention", 0), "expected.*blocks.0.attention,"),
        "no head": (lambda: run(INSPECTABLE).attention_map("blocks.0.attention", 2), "head.*0 to 1.*got 2"),
        "unknown field": (lambda: interventions_from(on=1), "interventions: expected ablatedLayers, ablatedHeads,"),
        "an unknown layer": (lambda: interventions_from(ablatedLayers=["embedding"]), LAYERS),
        "a pattern": (lambda: interventions_from(ablatedLayers=["*"]), LAYERS),
        "half a pair": (lambda: interventions_from(ablatedHeads=[["blocks.0.attention"]]), PAIRS),
        "an unknown head": (lambda: interventions_from(ablatedHeads=[["blocks.0.attention", 2]]), PAIRS),
        "a bool as head": (lambda: interventions_from(ablatedHeads=[["blocks.0.attention", True]]), PAIRS),
        "a list as softmax": (lambda: interventions_from(softmax=["softmax"]), "interventions: .*softmax.*one of"),
        "temperature of 0": (lambda: interventions_from(temperature=0), TEMPERATURE),
        "temperature of nan": (lambda: interventions_from(temperature=float("nan")), TEMPERATURE),
    }
)


def test_nan_weights_give_valid_json() -> None:
    model = lively(CONFIG)
    model.blocks[1].mlp.up.weights.array[0, 0] = np.nan
    inspectable = InspectableStack(model, TOKENISER, "broken")
    with np.errstate(all="ignore"):
        json.dumps(collect_static_data(inspectable, run(inspectable)), allow_nan=False)


# -------------------------------------------------------------------- the server
@contextmanager
def serving(service: Any) -> Iterator[LookServer]:
    """Serve a page until the end of the block."""
    with LookServer(service) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[LookServer]:
    with serving(ViewerService([new_inspectable()], TEXT)) as server:
        yield server


def call(server: LookServer, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return status and content (JSON or text) of the response to a request."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    kind = {"Content-Type": "application/json"} if content is not None else {}
    connection.request("GET" if content is None else "POST", path, content, {**kind, **headers})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if "json" in (answer.headers["Content-Type"] or "") else text


def ask(server: LookServer, request: str, **fields: Any) -> tuple[int, Any]:
    return call(server, f"/{server.token}/{request}", fields)


def test_server_returns_the_page_and_answers_each_request(server: LookServer) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    status, text = call(server, f"/{server.token}/")
    assert status == 200
    assert text.startswith("<!doctype html>")
    status, view = ask(server, "run", text=TEXT)
    assert status == 200
    known = {"trace": view["trace"]}
    assert ask(server, "attention_map", layer="blocks.0.attention", head=1, **known)[0] == 200
    assert "map" not in view
    _, same = ask(server, "run", text=TEXT, map=[0, 1])
    assert same["map"] == ask(server, "attention_map", layer="blocks.0.attention", head=1, **known)[1]
    for indices in ([9, 0], [0, 2], [0, -1], [0], "00", {"0": 1}, [True, "a"], [True, True], [0, False], [0.0, 1]):
        assert "map" not in ask(server, "run", text=TEXT, map=indices)[1]
    assert len(ask(server, "head_statistics", start=0, stop=2, **known)[1]["layers"]) == 2
    assert len(ask(server, "stream_statistics", **known)[1]) == 4
    assert len(ask(server, "top_predictions", position=3, **known)[1]["top"]) == 10
    assert len(ask(server, "logit_lens", **known)[1]["tokens"]) == 4
    _, edited = ask(server, "run", ids=view["ids"], edit={"position": 1, "replacement": "dog"})
    assert edited["ids"] != view["ids"]
    interventions = {"ablatedLayers": ["blocks.0.mlp", "blocks.2"], "ablatedHeads": [["blocks.1.attention", 0]]}
    _, changed = ask(server, "run", ids=view["ids"], interventions=interventions)
    assert changed["predictions"]["logProbs"] != view["predictions"]["logProbs"]
    _, again = ask(server, "run", ids=view["ids"])
    assert again == view


def test_prepare_runs_the_first_text(server: LookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.service.prepare()
    monkeypatch.setattr(server.service.models[0], "run", None)
    assert ask(server, "run", text=TEXT)[1]["trace"] == 1
    server.service.text = ""
    server.service.prepare()


def test_the_example_is_cut_to_the_context_window() -> None:
    models = [new_inspectable(replace(CONFIG, context_window=n)) for n in (40, 12)]
    text = look.fitting_example(models)
    assert " " in text and look.EXAMPLE.startswith(text) and len(models[1].encode_input(text)) <= 12
    assert look.fitting_example([new_inspectable(replace(CONFIG, context_window=1))]) == look.EXAMPLE.split()[0]


def test_requests_without_token_or_with_another_host_are_rejected(server: LookServer) -> None:
    port = server.server_address[1]
    token = server.token
    for path in ("/", "//", "/run", "/%C3%A9/run", f"/{token}", f"/{token[:-1]}/", f"/x{token}/run"):
        status, answer = call(server, path, {})
        assert (status, "tiny" in json.dumps(answer)) == (404, False), path
    for host in (f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1"):
        assert call(server, f"/{server.token}/", Host=host)[0] == 404
        assert call(server, f"/{server.token}/run", {"text": "a"}, Host=host)[0] == 404
    for path in ("etc/passwd", "../../etc/passwd", "look.js", "..%2f..%2fetc/passwd"):
        assert call(server, f"/{server.token}/{path}")[0] == 404


INVALID_REQUESTS: dict[str, tuple[str, Any, dict[str, str], int]] = {
    "no JSON": ("run", b"text=a", {}, 400),
    "truncated JSON": ("run", b'{"text": "a', {}, 400),
    "invalid UTF-8": ("run", b"\xff\xfe\x00", {}, 400),
    "no object": ("run", [1], {}, 400),
    "deep nesting": ("run", b"[" * 100_000, {}, 400),
    "another content type": ("run", b"{}", {"Content-Type": "text/plain"}, 415),
    "no text": ("run", {}, {}, 400),
    "an empty text": ("run", {"text": ""}, {}, 400),
    "a text that is too long": ("run", {"text": "z" * 999}, {}, 400),
    "ids that are texts": ("run", {"ids": ["a"]}, {}, 400),
    "ids that are too large": ("run", {"ids": [10**30]}, {}, 400),
    "invalid edit": ("run", {"ids": [1], "edit": {"position": "x"}}, {}, 400),
    "lone surrogates": ("run", b'{"text": "\\ud800"}', {}, 200),
    "unknown model": ("run", {"text": "a", "model": 1}, {}, 400),
    "unknown trace": ("top_predictions", {"trace": 99, "position": 0}, {}, 400),
    "unknown request": ("weights", {}, {}, 404),
    "length above the limit": ("run", b"{}", {"Content-Length": str(MAX_REQUEST_BYTES + 1)}, 413),
    "invalid length": ("run", b"{}", {"Content-Length": "x"}, 411),
    "a negative length": ("run", b"{}", {"Content-Length": "-1"}, 411),
    "integer with too many digits": ("run", b'{"ids": [' + b"9" * 10_000 + b"]}", {}, 400),
}


@pytest.mark.parametrize("case", INVALID_REQUESTS)
def test_invalid_requests_get_an_error_line(server: LookServer, case: str) -> None:
    request, body, headers, expected = INVALID_REQUESTS[case]
    status, answer = call(server, f"/{server.token}/{request}", body, **headers)
    assert status == expected, answer
    if expected != 200:
        assert answer["error"]
        assert "\n" not in answer["error"]
    assert ask(server, "run", text=TEXT)[0] == 200


def test_an_internal_error_is_reported(server: LookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.service.models[0], "run", lambda *args: 1 / 0)
        assert ask(server, "run", text=TEXT) == (500, {"error": "ZeroDivisionError: division by zero"})
    assert ask(server, "run", text=TEXT)[0] == 200


def test_idle_connections_do_not_block_requests(server: LookServer) -> None:
    address = server.server_address[:2]
    idle = [socket.create_connection(address) for _ in range(5)]
    idle[0].sendall(f"POST /{server.token}/run HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le".encode())
    with socket.create_connection(address) as dropped:
        dropped.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n\r\n".encode())
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server, "run", text=TEXT) for _ in range(8)]
    assert [answer.result()[0] for answer in answers] == [200] * 8
    for connection in idle:
        connection.close()


def test_the_trace_without_interventions_is_kept_longest(server: LookServer) -> None:
    _, view = ask(server, "run", text=TEXT)
    for i in range(20):
        _, last = ask(server, "run", ids=view["ids"], interventions={"temperature": 2 + i})
    assert ask(server, "top_predictions", trace=view["trace"], position=1)[0] == 200
    assert ask(server, "top_predictions", trace=last["trace"], position=1)[0] == 200
    status, answer = ask(server, "top_predictions", trace=last["trace"] - 10, position=1)
    assert status == 400 and "trace was deleted" in answer["error"]


def test_used_or_invalid_port_raises(server: LookServer) -> None:
    port = server.server_address[1]
    with pytest.raises(ValueError, match=f"port {port} is in use.*--port"):
        LookServer(server.service, port)
    with pytest.raises(ValueError, match=r"--port.*0 to 65535.*70000"):
        LookServer(server.service, 70000)


# -------------------------------------------------------------------- pages
def test_pages_are_self_contained_and_run_only_their_script() -> None:
    inspectable = new_inspectable()
    text = "</script><script>alert(1)</script> & <b>"
    trace = inspectable.run(inspectable.encode_input("cat </script>"), Interventions())
    data = {"hasServer": False, "text": text, "models": [collect_static_data(inspectable, trace)]}
    content = render_page("look", "<title>\udcff", data)
    assert content.count("</script>") == 2
    assert "&lt;title&gt;?<" in content
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', content)
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; script-src")
    assert "connect-src" not in policy
    assert not re.findall(r"(?:src|href)=\"(?!data:)", content)
    (packed,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', content, re.DOTALL)
    assert json.loads(packed)["text"] == text
    assert "connect-src 'self'" in render_page("look", "t", data, has_server=True)


# -------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "best.safetensors"
    save_checkpoint(path, lively(CONFIG), TOKENISER)
    return path


def test_command_writes_standalone_pages_of_one_and_two_models(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "look.html"
    look.main([str(checkpoint), "the cat", "--out", str(out)])
    assert f"{out}: " in capsys.readouterr().out
    one = out.read_text(encoding="utf-8")
    look.main([str(checkpoint.parent), "the cat", "--compare-with", str(checkpoint), "--out", str(out)])
    assert len(out.read_text(encoding="utf-8")) > len(one)


def test_command_serves_and_opens_the_browser(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_browser = Mock(return_value=False)
    monkeypatch.setattr("webbrowser.open", open_browser)
    monkeypatch.setattr(LookServer, "serve_forever", Mock(side_effect=KeyboardInterrupt))
    look.main([str(checkpoint), "the cat"])
    captured = capsys.readouterr()
    assert "no browser found" in captured.err
    look.main([str(checkpoint), "the cat", "--no-browser"])
    open_browser.assert_called_once_with(captured.out.splitlines()[0])


def test_missing_model_file_and_invalid_texts_raise(checkpoint: Path) -> None:
    for source in ("nowhere.safetensors", "/nowhere/at/all"):
        with pytest.raises(FileNotFoundError, match="there is no such"):
            look.main([source])
    for text, message in (("", r"text.*at least one character"), ("z" * 100, r"1 to 40 tokens.*got 101")):
        with pytest.raises(ValueError, match=message):
            look.main([str(checkpoint), text])
