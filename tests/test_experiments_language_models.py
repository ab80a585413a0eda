"""Pretrained language models: held-out texts, bytes per token, and token losses."""

import math

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tiny_models import TEXT, lively_model, tiny_tokeniser

from experiments.shared import language_models
from experiments.shared.language_models import (
    bits_per_byte,
    load_model,
    perplexity,
    read,
    text_of,
    token_losses,
    windows,
)
from tricycle.evaluation import evaluate
from tricycle_lab.probe import Probe


@pytest.fixture(scope="module")
def tokeniser():
    return tiny_tokeniser()


def test_token_losses_average_to_the_evaluated_loss():
    model, ids = lively_model(), np.random.default_rng(0).integers(0, 400, (5, 33))
    losses = token_losses(model, ids, n_rows=2)
    assert losses.shape == (5, 32)
    top1 = np.concatenate([model(row[None, :-1]).array.argmax(axis=-1) for row in ids])
    assert (read(model, ids).top1 == top1).mean() > 0.99  # but for ties
    means = [evaluate(model, row, 1)[0] for row in ids]
    np.testing.assert_allclose(losses.mean(axis=1), means, rtol=1e-5)
    np.testing.assert_allclose(token_losses(model, ids), losses, rtol=1e-4)
    assert perplexity(losses) == pytest.approx(math.exp(np.mean(means)), rel=1e-5)
    with Probe(model) as probe, probe.change_softmax(softmax="softmax1"):
        assert abs(token_losses(model, ids) - losses).max() > 1e-3


def test_windows_count_the_bytes_of_their_tokens(tokeniser):
    text = TEXT + "é € 3 °\n" + TEXT
    rows = windows(tokeniser, text, 3, 20)
    assert rows.ids.shape == (3, 21)
    assert rows.n_bytes.shape == (3, 20)
    whole = tokeniser.encode_plain(text)
    assert rows.ids[0].tolist() == whole[:21].tolist()
    assert rows.ids[-1].tolist() == whole[-21:].tolist()
    for ids, n_bytes in zip(rows.ids, rows.n_bytes):
        assert n_bytes.sum() == len(tokeniser.decode(ids[1:]).encode("utf-8"))
    everything = windows(tokeniser, text, 1, len(whole), first=1)
    assert everything.ids[0].tolist() == [1, *whole.tolist()]
    assert everything.n_bytes.sum() == len(text.encode("utf-8"))
    with pytest.raises(ValueError, match="1000001"):
        windows(tokeniser, text, 1, 10**6)


def test_bits_per_byte_of_known_losses():
    losses = np.full((2, 8), math.log(4))
    assert bits_per_byte(losses, np.full((2, 8), 2)) == pytest.approx(1)


@pytest.mark.nightly
def test_held_out_texts_are_in_no_other_split(monkeypatch):
    train, test = text_of("code", "train"), text_of("code", "test")
    assert len(test) > 10**5
    assert len(train) > 10 * len(test)
    functions = [part for part in test.split("\n\n") if len(part) > 400][:100]
    assert sum(part in train for part in functions) < 10  # a few functions stand in two files
    sentences = {"train": ["a", "b"], "val": ["c"], "test_2016_flickr": ["d", "e"]}
    monkeypatch.setattr(language_models, "load_multi30k", lambda split, language: sentences[split])
    assert [text_of("captions", part) for part in ("train", "test")] == ["a\nb", "c\nd\ne"]
    with pytest.raises(ValueError, match=r"code, shakespeare, captions.*'news'"):
        text_of("news", "train")


def test_load_model_from_a_folder_has_contiguous_weights(tmp_path):
    from tiny_models import write_folder

    loaded = load_model(str(write_folder(tmp_path / "tiny")))
    assert all(p.array.flags.c_contiguous for p in loaded.model.parameters())
