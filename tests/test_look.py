"""Looking inside: what pages are told is what the model computed, and their server answers nobody else."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tables import bad_input
from test_models import TINY, lively

from tricycle.checkpoint import save_checkpoint
from tricycle.configs.encoder import EncoderConfig
from tricycle.models import GPT
from tricycle.sequences.attentions import AdditiveAttention
from tricycle.sequences.seq2seq import Seq2Seq, Seq2SeqAttention, Transformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tensor import no_grad
from tricycle.tokeniser import BPETokeniser
from tricycle.weights import quantize
from tricycle_cli import look
from tricycle_lab.look.changes import Changes
from tricycle_lab.look.page import page, whole
from tricycle_lab.look.reading import Reading
from tricycle_lab.look.server import MOST_BYTES, Desk, LookServer
from tricycle_lab.look.subjects import Stack, Subject, Translator
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


def load_inspectable(config: Any = CONFIG) -> Stack:
    return Stack(lively(config), TOKENISER, "tiny")


def read(subject: Subject, text: str = TEXT, **changes: Any) -> Reading:
    return subject.read(subject.ids_of(text), Changes(**changes))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1)[..., None]


def unpack(text: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


# -------------------------------------------------------------------- what pages are told
@each_kind
def test_predictions_are_those_of_the_logits(kind: str) -> None:
    subject = load_inspectable(KINDS[kind])
    reading = read(subject)
    assert "".join(reading.texts[1:]).replace("�", "") == TEXT.replace("é", "")
    logs = log_softmax(subject.model(np.array(reading.ids)).array)
    view = reading.view()["predictions"]
    came = logs[np.arange(len(logs) - 1), reading.ids[1:]]
    np.testing.assert_allclose(view["logP"][:-1], came, atol=2e-4)
    assert view["rank"][:-1] == (logs[:-1] > came[:, None]).sum(axis=-1).tolist()
    assert [reading.predictions.best.tolist()] == [logs.argmax(axis=-1).tolist()]
    np.testing.assert_allclose(view["bestP"], np.exp(logs.max(axis=-1)), atol=2e-5)
    np.testing.assert_allclose(view["entropy"], -(np.exp(logs) * logs).sum(axis=-1), atol=1e-3)


@each_kind
def test_maps_are_those_of_a_probe(kind: str) -> None:
    subject = load_inspectable(KINDS[kind])
    reading = read(subject)
    with Probe(subject.model, "*") as probe, no_grad():
        subject.model(np.array([reading.ids]))
    assert [site.name for site in reading.sites] == list(probe.weights)
    for name, weights in probe.weights.items():
        for head in range(2):
            told = reading.attention(name, head)
            small = reading.attention(name, head, small=True)
            assert zlib.decompress(base64.b64decode(small["weights"])) == base64.b64decode(told["weights"])
            scores = probe.scores[name][0, head]
            found = (unpack(told["weights"], told["shape"]) / 255) ** 2
            np.testing.assert_allclose(found, np.clip(weights[0, head], 0, 1), atol=1 / 255)
            levels = unpack(told["scores"], told["shape"])
            assert ((levels == 0) == (scores == -np.inf)).all()
            seen = levels > 0
            step = (told["high"] - told["low"]) / 254
            found_scores = told["low"] + (levels[seen] - 1.0) * step
            np.testing.assert_allclose(found_scores, scores[seen], atol=0.51 * step + 1e-3 * abs(scores[seen]).max())
            np.testing.assert_allclose(told["entropy"], entropy(weights[0, head]), atol=0.006)
            assert told["scoreKurtosis"] == pytest.approx(excess_kurtosis(scores[seen]), rel=1e-3, abs=1e-3)
    names = ["embedding", *(f"blocks.{i}" for i in range(3))]
    assert [state["name"] for state in reading.states()] == names
    last = probe.activations["blocks.2"][0]
    norms = np.linalg.norm(last, axis=-1)
    np.testing.assert_allclose(reading.states()[-1]["norms"], norms, rtol=1e-3)
    largest = reading.states()[-1]["outliers"][0]
    assert abs(last).max() == pytest.approx(abs(largest["value"]), rel=1e-3)
    assert last[largest["place"], largest["channel"]] == pytest.approx(largest["value"], rel=1e-3)
    heads = reading.overview(1, 3)["heads"]
    assert [head["name"] for head in heads] == ["blocks.1.attention", "blocks.2.attention"]


def test_the_lens_ends_with_what_the_model_says() -> None:
    reading = read(load_inspectable())
    lens = reading.lens()
    assert lens["tokens"][-1] == reading.predictions.best.tolist()
    for place in (0, 4, len(reading.ids) - 1):
        told = reading.token(place)
        assert told["rivals"][0]["id"] == reading.predictions.best[place]
        assert len(told["rivals"]) == 10
        assert [one["p"] for one in told["rivals"]] == sorted((one["p"] for one in told["rivals"]), reverse=True)
        assert [layer["top"][0]["id"] for layer in told["lens"]] == [row[place] for row in lens["tokens"]]
        assert ("rank" in told["lens"][0]) == (place + 1 < len(reading.ids))


CHANGES = {
    "nothing": {},
    "a head of the last layer": {"heads": (("blocks.2.attention", 1),)},
    "an MLP": {"off": ("blocks.1.mlp",)},
    "a layer": {"off": ("blocks.1",)},
    "the first attention": {"off": ("blocks.0.attention",)},
    "a softmax": {"softmax": "softmax1"},
    "a temperature, and heads": {"temperature": 2.0, "heads": (("blocks.1.attention", 0), ("blocks.1.attention", 1))},
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("kind", ["gpt2", "rotary, few key heads, cap", "parallel, untied"])
def test_changes_are_those_of_a_probe_and_begin_where_something_changes(kind: str, case: str) -> None:
    subject = load_inspectable(KINDS[kind])
    before = read(subject)
    changes = Changes(**CHANGES[case])
    changed = subject.read(before.ids, changes, before)
    anew = subject.read(before.ids, changes)
    with Probe(subject.model, "") as probe, no_grad():
        changes.make(probe)
        logs = log_softmax(subject.model(np.array(before.ids)).array)
    came = logs[np.arange(len(logs) - 1), before.ids[1:]]
    for reading in (changed, anew):
        np.testing.assert_allclose(reading.view()["predictions"]["logP"][:-1], came, atol=2e-4)
        assert list(reading.stream) == list(before.stream)
    for name, x in anew.stream.items():
        np.testing.assert_allclose(changed.stream[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    for site, other in zip(changed.sites, anew.sites):
        for one, two in zip(site.look(), other.look()):
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(read(subject).predictions.log_p, before.predictions.log_p)


def test_no_earlier_block_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = load_inspectable()
    before = read(subject)
    monkeypatch.setattr(subject.model.blocks[0], "forward", None)
    monkeypatch.setattr(subject.model, "forward", None)
    with pytest.raises(TypeError):
        subject.read(before.ids, Changes(off=("blocks.0.mlp",)), before)
    subject.read(before.ids, Changes(off=("blocks.1.mlp",)), before)


# a text with other tokens, and how many of the first n stay
EDITS: dict[str, tuple[Any, Any]] = {
    "a token": (lambda ids: [*ids[:4], 7, *ids[5:]], lambda n: 4),
    "several for one": (lambda ids: [*ids[:3], 7, 8, 9, *ids[4:]], lambda n: 3),
    "the first": (lambda ids: [7, *ids[1:]], lambda n: 0),
    "the last": (lambda ids: [*ids[:-1], 7], lambda n: n - 1),
    "one more": (lambda ids: [*ids, 7], lambda n: n),
    "fewer": (lambda ids: ids[:5], lambda n: 4),
}


@pytest.mark.parametrize("case", EDITS)
@each_kind
def test_another_token_leaves_those_before_it(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = load_inspectable(KINDS[kind])
    changes = Changes(heads=(("blocks.1.attention", 0),), temperature=0.5)
    before = read(subject, heads=changes.heads, temperature=0.5)
    ids, stay = EDITS[case][0](before.ids), EDITS[case][1](len(before.ids))
    anew = subject.read(ids, changes)
    asked: list[int] = []
    with monkeypatch.context() as patch:
        hidden = subject.model.hidden_states
        patch.setattr(subject.model, "hidden_states", lambda t, *more: asked.append(t.shape[-1]) or hidden(t, *more))
        reading = subject.read(ids, changes, before)
    assert asked == [len(ids) - stay]
    again = subject.read(ids, changes, subject.read(before.ids, changes, reading))
    for other in (reading, again):
        assert other.ids == ids
        for name, numbers in vars(anew.predictions).items():
            np.testing.assert_allclose(vars(other.predictions)[name], numbers, atol=2e-4, err_msg=name)
        for name, x in anew.stream.items():
            np.testing.assert_allclose(other.stream[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
        for site, wanted in zip(other.sites, anew.sites):
            for one, two in zip(site.look(), wanted.look()):
                np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["decoder", "transformer", "additive, before"])
def test_a_text_of_one_token(kind: str) -> None:
    subject = load_inspectable() if kind == "decoder" else load_translator(translators()[kind])
    reading = subject.read(subject.ids_of("a =>")[:1], Changes())
    assert len(reading.view()["predictions"]["logP"]) == 1
    json.dumps(whole(subject, reading), allow_nan=False)


@pytest.mark.parametrize("shift", ["token_shift", "key_shift"])
def test_where_tokens_mix_otherwise_everything_is_read_again(shift: str) -> None:
    subject = load_inspectable(replace(CONFIG, **{shift: True}))
    before = read(subject)
    ids = [*before.ids[:-1], 7]
    assert subject.spared(ids, Changes(), before) == 0
    reading, anew = subject.read(ids, Changes(), before), subject.read(ids, Changes())
    np.testing.assert_array_equal(reading.predictions.log_p, anew.predictions.log_p)


def test_of_several_changes_the_earlier_ones_stay() -> None:
    subject = load_inspectable()
    first = Changes(off=("blocks.1.mlp",), temperature=2.0)
    both = replace(first, heads=(("blocks.2.attention", 1),))
    desk = Desk([subject], TEXT)
    ids = subject.ids_of(TEXT)
    before = subject.read(ids, first)
    assert subject.spared(ids, both, before) == pytest.approx(2 / 3)
    assert subject.spared(ids, both, subject.read(ids, Changes())) == 0
    assert subject.spared(ids, first, before) == 1
    anew = subject.read(ids, both)
    np.testing.assert_allclose(subject.read(ids, both, before).predictions.log_p, anew.predictions.log_p, atol=1e-5)
    same = subject.read(ids, replace(first, off=("blocks.1.mlp",) * 2), before)
    np.testing.assert_allclose(same.predictions.log_p, before.predictions.log_p, atol=1e-5)
    assert desk.answer("view", {"text": TEXT})["reading"] == 1


def test_an_encoder_says_nothing_but_attends() -> None:
    config = EncoderConfig(vocab_size=300, context_window=40, embedding_dim=8, n_heads=2, n_layers=2)
    subject = Stack(TextEncoder(config), TOKENISER, "encoder")
    reading = read(subject)
    assert subject.about()["kind"] == "encoder"
    assert reading.view()["predictions"] is None
    assert reading.token(1)["rivals"] == []
    assert reading.lens()["tokens"] == []
    told = reading.attention("blocks.1.attention", 0)
    assert (unpack(told["scores"], told["shape"]) > 0).all()  # all see each other
    json.dumps(whole(subject, reading), allow_nan=False)
    other = subject.read(reading.ids, Changes(off=("blocks.1.mlp",)), reading)
    assert abs(other.stream["blocks.1"] - reading.stream["blocks.1"]).max() > 0


# -------------------------------------------------------------------- encoder-decoders
def translators() -> dict[str, Any]:
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


def load_translator(model: Any) -> Translator:
    begin, end = (TOKENISER.special_tokens[name] for name in SPECIAL[1:])
    return Translator(model, TOKENISER.encode, lambda i: TOKENISER.decode([i]), begin, end)


@pytest.mark.parametrize("kind", translators())
def test_alignment_of_encoder_decoders(kind: str) -> None:
    model = translators()[kind]
    subject = load_translator(model)
    reading = read(subject, "the cat => and the dog")
    assert "".join(reading.sources) == "the cat"
    assert "".join(reading.texts) == "<begin>and the dog"
    with model.evaluating():
        logits = model(np.array([subject.source]), np.array([reading.ids])).array[0]
    logs = log_softmax(logits)
    came = logs[np.arange(len(logs) - 1), reading.ids[1:]]
    np.testing.assert_allclose(reading.view()["predictions"]["logP"][:-1], came, atol=2e-4)
    cross = [site for site in reading.sites if site.kind == "cross"]
    assert cross
    for site in cross:
        weights = site.look()[1]
        assert weights.shape == (site.n_heads, len(reading.ids), len(reading.sources))
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-4)
    if reading.stream:
        assert reading.lens()["tokens"][-1] == logs.argmax(axis=-1).tolist()
        off = Changes(off=("decoder.blocks.0.cross",), heads=(("decoder.blocks.1.cross", 0),))
        assert abs(subject.read(reading.ids, off, reading).predictions.log_p - reading.predictions.log_p).max() > 0
    else:
        assert reading.token(2)["rivals"][0]["id"] == logs[2].argmax()
    json.dumps(whole(subject, reading), allow_nan=False)
    flat = subject.read(reading.ids, Changes(temperature=1000.0))
    np.testing.assert_allclose(flat.sites[-1].look()[1], 1 / len(reading.sources), rtol=0.02)
    other = subject.read(reading.ids, Changes(softmax="softmax1"))
    assert (other.sites[-1].look()[1].sum(axis=-1) < 0.999).all()
    again = subject.read(reading.ids, Changes())
    np.testing.assert_array_equal(again.predictions.log_p, reading.predictions.log_p)


def test_parts_that_a_recurrent_model_has_not() -> None:
    subject = load_translator(translators()["additive, after"])
    ids = subject.ids_of("the cat => and")
    for changes in (Changes(heads=(("attention", 0),)), Changes(softmax="blocks")):
        with pytest.raises(ValueError, match="changes: expected a"):
            subject.read(ids, changes)


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_weights_of_few_bits(weights: str) -> None:
    pytest.importorskip("ml_dtypes")
    model = lively(CONFIG).eval()
    quantize(model, weights)
    model.use_precision("bfloat16" if weights == "bfloat16" else "float32")
    subject = Stack(model, TOKENISER, "small")
    reading = read(subject)
    json.dumps(whole(subject, reading), allow_nan=False)
    other = subject.read(reading.ids, Changes(off=("blocks.2.mlp",)), reading)
    anew = subject.read(reading.ids, Changes(off=("blocks.2.mlp",)))
    np.testing.assert_allclose(other.predictions.log_p[:-1], anew.predictions.log_p[:-1], atol=0.1)


def test_a_target_of_the_models_own() -> None:
    subject = load_translator(translators()["transformer"])
    ids = subject.ids_of("the cat")
    assert ids[0] == subject.begin
    assert 1 <= len(ids) <= 2 * len(subject.source) + 11


# -------------------------------------------------------------------- refusals
SUBJECT = load_inspectable()


def changes_of(**fields: Any) -> Changes:
    return Changes.of(fields, SUBJECT.parts, SUBJECT.n_heads)


PAIRS = "changes: expected heads to be pairs of a layer with attention and one of its heads"

test_bad_input = bad_input(
    {
        "no text": (lambda: SUBJECT.ids_of(""), "expected a text of at least one character, got none"),
        "too long": (lambda: SUBJECT.ids_of("z" * 40), "expected a text of 1 to 40 tokens to look at, got 41"),
        "a strange id": (lambda: SUBJECT.check([0, 999]), f"expected tokens from 0 to {TOKENISER.n_vocab - 1}"),
        "no place": (lambda: SUBJECT.edited([1, 2], 2, "a"), "expected a token from 0 to 1 to change, got 2"),
        "no token": (lambda: SUBJECT.edited([1, 2], 1, ""), "expected a text to put in the place of the token, got"),
        "no attention": (
            lambda: load_translator(Seq2Seq(9, 9, 4, 4)),
            "translator: expected a model with attention to",
        ),
        "no source": (
            lambda: load_translator(translators()["transformer"]).ids_of("=> a"),
            "expected a text of at least one character, got none",
        ),
        "a long source": (
            lambda: load_translator(translators()["transformer"]).ids_of("z" * 129),
            "expected a source of 1 to 128 tokens to look at, got 129",
        ),
        "no map": (lambda: read(SUBJECT).attention("blocks.9.attention", 0), "expected one of blocks.0.attention,"),
        "no head": (lambda: read(SUBJECT).attention("blocks.0.attention", 2), "expected a head from 0 to 1, got 2"),
        "changes that are none": (lambda: changes_of(on=1), "changes: expected off, heads, softmax and temperature"),
        "a part that is none": (lambda: changes_of(off=["token_embedding"]), "changes: expected off to be a list of"),
        "a pattern": (lambda: changes_of(off=["*"]), "changes: expected off to be a list of parts of the model"),
        "half a pair": (lambda: changes_of(heads=[["blocks.0.attention"]]), PAIRS),
        "a head that is none": (lambda: changes_of(heads=[["blocks.0.attention", 2]]), PAIRS),
        "true": (lambda: changes_of(heads=[["blocks.0.attention", True]]), PAIRS),
        "a list": (lambda: changes_of(softmax=["softmax"]), "changes: expected softmax to be one of"),
        "too cold": (lambda: changes_of(temperature=0), "changes: expected a temperature from 0.001 to 1000"),
        "not a number": (lambda: changes_of(temperature=float("nan")), "changes: expected a temperature from 0.001 to"),
    }
)


def test_broken_weights_give_an_answer() -> None:
    model = lively(CONFIG)
    model.blocks[1].mlp.up.weights.array[0, 0] = np.nan
    subject = Stack(model, TOKENISER, "broken")
    with np.errstate(all="ignore"):
        json.dumps(whole(subject, read(subject)), allow_nan=False)


# -------------------------------------------------------------------- the server
@pytest.fixture
def server() -> Iterator[LookServer]:
    with LookServer(Desk([load_inspectable()], TEXT)) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def call(server: LookServer, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """The status of an answer, and what JSON or text it holds."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    kind = {"Content-Type": "application/json"} if content is not None else {}
    connection.request("GET" if content is None else "POST", path, content, {**kind, **headers})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if "json" in (answer.headers["Content-Type"] or "") else text


def ask(server: LookServer, question: str, **fields: Any) -> tuple[int, Any]:
    return call(server, f"/{server.token}/{question}", fields)


def test_a_page_and_its_questions(server: LookServer) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    status, text = call(server, f"/{server.token}/")
    assert status == 200
    assert text.startswith("<!doctype html>")
    status, view = ask(server, "view", text=TEXT)
    assert status == 200
    known = {"reading": view["reading"]}
    assert ask(server, "attention", site="blocks.0.attention", head=1, **known)[0] == 200
    assert "map" not in view
    _, same = ask(server, "view", text=TEXT, map=[0, 1])
    assert same["map"] == ask(server, "attention", site="blocks.0.attention", head=1, **known)[1]
    for place in ([9, 0], [0, 2], [0, -1], [0], "00", {"0": 1}, [True, "a"], [True, True], [0, False], [0.0, 1]):
        assert "map" not in ask(server, "view", text=TEXT, map=place)[1]
    assert len(ask(server, "overview", start=0, stop=2, **known)[1]["heads"]) == 2
    assert len(ask(server, "states", **known)[1]) == 4
    assert len(ask(server, "token", place=3, **known)[1]["rivals"]) == 10
    assert len(ask(server, "lens", **known)[1]["tokens"]) == 4
    _, edited = ask(server, "view", ids=view["ids"], edit={"place": 1, "by": "dog"})
    assert edited["ids"] != view["ids"]
    changes = {"off": ["blocks.0.mlp"], "heads": [["blocks.1.attention", 0]], "softmax": None, "temperature": 1}
    _, changed = ask(server, "view", ids=view["ids"], changes=changes)
    assert changed["predictions"]["logP"] != view["predictions"]["logP"]
    _, again = ask(server, "view", ids=view["ids"])
    assert again == view


def test_the_text_is_read_before_the_page_asks(server: LookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.desk.prepare()
    monkeypatch.setattr(server.desk.subjects[0], "read", None)
    assert ask(server, "view", text=TEXT)[1]["reading"] == 1
    server.desk.text = ""
    server.desk.prepare()


def test_who_does_not_know_the_address_gets_nothing(server: LookServer) -> None:
    port = server.server_address[1]
    token = server.token
    for path in ("/", "//", "/view", "/%C3%A9/view", f"/{token}", f"/{token[:-1]}/", f"/x{token}/view"):
        status, answer = call(server, path, {})
        assert (status, "tiny" in json.dumps(answer)) == (404, False), path
    for host in (f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1"):
        assert call(server, f"/{server.token}/", Host=host)[0] == 404
        assert call(server, f"/{server.token}/view", {"text": "a"}, Host=host)[0] == 404
    for path in ("etc/passwd", "../../etc/passwd", "look.js", "..%2f..%2fetc/passwd"):
        assert call(server, f"/{server.token}/{path}")[0] == 404


NONSENSE: dict[str, tuple[str, Any, dict[str, str], int]] = {
    "no JSON": ("view", b"text=a", {}, 400),
    "half a JSON": ("view", b'{"text": "a', {}, 400),
    "bytes": ("view", b"\xff\xfe\x00", {}, 400),
    "no object": ("view", [1], {}, 400),
    "deep": ("view", b"[" * 100_000, {}, 400),
    "a form": ("view", b"{}", {"Content-Type": "text/plain"}, 415),
    "no text": ("view", {}, {}, 400),
    "an empty text": ("view", {"text": ""}, {}, 400),
    "a text that is too long": ("view", {"text": "z" * 999}, {}, 400),
    "ids of another kind": ("view", {"ids": ["a"]}, {}, 400),
    "ids that are too large": ("view", {"ids": [10**30]}, {}, 400),
    "an edit that is none": ("view", {"ids": [1], "edit": {"place": "x"}}, {}, 400),
    "lone surrogates": ("view", b'{"text": "\\ud800"}', {}, 200),
    "another side": ("view", {"text": "a", "side": 1}, {}, 400),
    "a reading that is not": ("token", {"reading": 99, "place": 0}, {}, 400),
    "no such question": ("weights", {}, {}, 404),
    "too long by what it says": ("view", b"{}", {"Content-Length": str(MOST_BYTES + 1)}, 413),
    "no length": ("view", b"{}", {"Content-Length": "x"}, 411),
    "a negative length": ("view", b"{}", {"Content-Length": "-1"}, 411),
    "a number without end": ("view", b'{"ids": [' + b"9" * 10_000 + b"]}", {}, 400),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_gets_one_clear_line_and_the_server_goes_on(server: LookServer, case: str) -> None:
    question, body, headers, wanted = NONSENSE[case]
    status, answer = call(server, f"/{server.token}/{question}", body, **headers)
    assert status == wanted, answer
    if wanted != 200:
        assert answer["error"]
        assert "\n" not in answer["error"]
    assert ask(server, "view", text=TEXT)[0] == 200


def test_a_mistake_of_ours_is_said_and_the_server_goes_on(server: LookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.desk.subjects[0], "read", lambda *args: 1 / 0)
        assert ask(server, "view", text=TEXT) == (500, {"error": "ZeroDivisionError: division by zero"})
    assert ask(server, "view", text=TEXT)[0] == 200


def test_a_connection_that_says_nothing_keeps_nobody_waiting(server: LookServer) -> None:
    address = server.server_address[:2]
    silent = [socket.create_connection(address) for _ in range(5)]
    silent[0].sendall(f"POST /{server.token}/view HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le".encode())
    with socket.create_connection(address) as dropped:
        dropped.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n\r\n".encode())
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(ask(server, "view", text=TEXT)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * 8
    for connection in silent:
        connection.close()


def test_few_readings_are_kept_and_the_unchanged_one_longest(server: LookServer) -> None:
    _, view = ask(server, "view", text=TEXT)
    for i in range(20):
        _, last = ask(server, "view", ids=view["ids"], changes={"temperature": 2 + i})
    assert ask(server, "token", reading=view["reading"], place=1)[0] == 200
    assert ask(server, "token", reading=last["reading"], place=1)[0] == 200
    status, answer = ask(server, "token", reading=last["reading"] - 10, place=1)
    assert (status, answer["error"]) == (400, "this reading is no longer kept: read the text again")


def test_a_port_in_use(server: LookServer) -> None:
    port = server.server_address[1]
    with pytest.raises(ValueError, match=f"port {port} is in use: name another with --port, or 0 for any"):
        LookServer(server.desk, port)
    with pytest.raises(ValueError, match="expected --port from 0 to 65535, got 70000"):
        LookServer(server.desk, 70000)


# -------------------------------------------------------------------- pages
def test_pages_need_nothing_else_and_run_nothing_else() -> None:
    subject = load_inspectable()
    text = "</script><script>alert(1)</script> & <b>"
    reading = subject.read(subject.ids_of("cat </script>"), Changes())
    data = {"served": False, "text": text, "sides": [whole(subject, reading)]}
    content = page("look", "<title>", data)
    assert content.count("</script>") == 2
    assert "&lt;title&gt;" in content
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
    assert "connect-src 'self'" in page("look", "t", data, served=True)


# -------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "best.safetensors"
    save_checkpoint(path, lively(CONFIG), TOKENISER)
    return path


def test_a_file_of_one_model_and_of_two(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "look.html"
    look.main([str(checkpoint), "the cat", "--out", str(out)])
    assert f"{out}: " in capsys.readouterr().out
    one = out.read_text(encoding="utf-8")
    look.main([str(checkpoint.parent), "the cat", "--compare-with", str(checkpoint), "--out", str(out)])
    assert len(out.read_text(encoding="utf-8")) > len(one)


def test_serving(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[str] = []

    def stop(self: LookServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))
    monkeypatch.setattr(LookServer, "serve_forever", stop)
    look.main([str(checkpoint), "the cat"])
    told = capsys.readouterr()
    assert opened == [told.out.splitlines()[0]]
    assert "no browser found" in told.err
    look.main([str(checkpoint), "the cat", "--no-browser"])
    assert len(opened) == 1


def test_an_example_is_there() -> None:
    assert "dog" in look.EXAMPLE
    assert isinstance(lively(CONFIG), GPT)


@pytest.mark.parametrize("source", ["nowhere.safetensors", "/nowhere/at/all"])
def test_no_model(source: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such"):
        look.main([source])


def test_texts_that_cannot_be_read(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="expected a text of at least one character, got none"):
        look.main([str(checkpoint), ""])
    with pytest.raises(ValueError, match="expected a text of 1 to 40 tokens to look at, got 101"):
        look.main([str(checkpoint), "z" * 100, "--no-browser"])
