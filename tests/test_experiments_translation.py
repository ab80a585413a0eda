"""experiments/translation on a synthetic language: data, models, training, and a small run."""

import gzip
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from studies import check_files, run_study

from experiments.translation import __main__ as program
from experiments.translation import report
from experiments.translation.alignment import translate_with_attention
from experiments.translation.study import (
    RECIPES,
    Pairs,
    Recipe,
    Training,
    TrainingSettings,
    bleu,
    mean_loss,
    translate,
)
from tricycle.sequences.translators import Vocabulary, load_translator, new_translator
from tricycle_datasets import multi30k as module
from tricycle_datasets.multi30k import SHA256, SPLITS, load_multi30k

NOUNS = {"dog": "Hund", "man": "Mann", "bird": "Vogel", "tree": "Baum", "boy": "Junge"}
VERBS = {"sees": "sieht", "finds": "findet", "likes": "mag", "paints": "malt"}


def sentences(n: int, seed: int) -> tuple[list[str], list[str]]:
    """The made-up target language has the verb at the end, and more words for "and" clauses."""
    generator, pairs = np.random.default_rng(seed), []
    for _ in range(n):
        clauses = []
        for _ in range(generator.integers(1, 3)):
            (a, x), (b, y) = (list(NOUNS.items())[i] for i in generator.integers(0, len(NOUNS), 2))
            v, w = list(VERBS.items())[generator.integers(0, len(VERBS))]
            clauses.append((f"the {a} {v} the {b}", f"der {x} den {y} {w}"))
        one, other = (words.join(side) for words, side in zip((" and ", ", und "), zip(*clauses)))
        pairs.append((f"{one.capitalize()}.", f"{other}."))
    return tuple(map(list, zip(*pairs)))


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    sources, targets = sentences(300, seed=0)
    return Pairs(Vocabulary.train(sources + targets, 330, progress=False), sources, targets)


PLAN = TrainingSettings(minutes=0, steps=4, warmup=0.1, average=0.9, measurements=2, measured=5)
SMALL = Recipe("small", 16, 1, 3e-3, 0.1, 400, n_heads=2)


# -------------------------------------------------------------------- data
def test_vocabulary_round_trip(pairs):
    vocabulary = pairs.vocabulary
    assert len({vocabulary.pad, vocabulary.begin, vocabulary.end}) == 3
    for text in ["The dog sees the man.", "der Hund <end> \xfc", "x"]:
        ids = vocabulary.encode(text)
        assert vocabulary.decode([*ids, vocabulary.end, vocabulary.pad]) == text
        assert max(ids) < vocabulary.pad
    assert "".join(vocabulary.texts(vocabulary.encode("The dog."))) == " The dog."
    first, later = vocabulary.encode("dog dog")[0], vocabulary.encode("the dog")[-1]
    assert first == later


def test_batch_is_padded_and_labels_are_shifted(pairs):
    vocabulary = pairs.vocabulary
    short, long = np.argsort(pairs.lengths.sum(axis=1))[[0, -1]]
    batch = pairs.batch([short, long])
    (n_short, t_short), (n_long, t_long) = pairs.lengths[[short, long]]
    assert batch.lengths.tolist() == [n_short, n_long]
    assert batch.source.shape == (2, n_long) and batch.target.shape == batch.labels.shape == (2, t_long)
    assert (batch.source[0, n_short:] == vocabulary.pad).all() and (batch.labels[0, t_short:] == vocabulary.pad).all()
    assert (batch.target[:, 0] == vocabulary.begin).all()
    assert batch.labels[0, t_short - 1] == batch.labels[1, t_long - 1] == vocabulary.end
    np.testing.assert_array_equal(batch.target[1, 1:], batch.labels[1, :-1])
    assert vocabulary.decode(batch.labels[1]) == pairs.texts[long][1]


def test_pairs_longer_than_the_limit_are_omitted(pairs):
    sources, targets = map(list, zip(*pairs.texts))
    kept = Pairs(pairs.vocabulary, sources, targets, longest=10)
    assert 0 < len(kept) < len(pairs)
    assert set(kept.texts) == {
        text for text, lengths in zip(pairs.texts, pairs.lengths) if lengths[0] < 10 and lengths[1] - 1 < 10
    }
    with pytest.raises(ValueError, match=r"targets.*sources.*got 1 and 300"):
        Pairs(pairs.vocabulary, sources, targets[:1])


def test_bleu_scores_and_signature():
    pytest.importorskip("sacrebleu")
    score, signature = bleu(["A man rides a brown horse."], ["A man rides a brown horse."])
    assert score == pytest.approx(100) and "case:mixed" in signature and "tok:13a" in signature
    lower, _ = bleu(["a man rides a brown horse."], ["A man rides a brown horse."])
    assert 0 < lower < 90


def test_bleu_without_sacrebleu_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ImportError, match="pip install sacrebleu"):
        bleu(["a"], ["a"])


def test_multi30k_reads_lines_and_rejects_unknown_splits(monkeypatch, tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress("Ein Hund. \nZwei\u2028 \xa0Hunde.\n".encode()))
    calls = []
    monkeypatch.setattr(module, "fetch", lambda *words, **more: calls.append((words, more)) or path)
    assert load_multi30k("val", "de") == ["Ein Hund.", "Zwei\u2028 \xa0Hunde."]
    (((name, url, sha256), more),) = calls
    assert name == "val.de.gz" and url.endswith("/task1/raw/val.de.gz") and sha256 == SHA256[name]
    assert more == {"folder": "multi30k"}
    for words in [("test", "de"), ("val", "es")]:
        with pytest.raises(ValueError, match=r"train, val, test_2016_flickr.*en"):
            load_multi30k(*words)


@pytest.mark.skipif(
    not Path(os.environ.get("TRICYCLE_DATA", "-"), "multi30k").is_dir(), reason="no multi30k under TRICYCLE_DATA"
)
def test_multi30k_has_the_published_sentences():
    for split, n in zip(SPLITS, (29_000, 1_014, 1_000)):
        for language in ("en", "de", "fr"):
            assert len(load_multi30k(split, language)) == n
    assert load_multi30k("train", "en")[0] == "Two young, White males are outside near many bushes."
    assert load_multi30k("train", "de")[0] == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."
    shared = set(load_multi30k("train", "en")) & set(load_multi30k("test_2016_flickr", "en"))
    assert len(shared) < 10


# -------------------------------------------------------------------- models and training
@pytest.mark.parametrize("name", RECIPES)
def test_resumed_training_equals_uninterrupted_training(pairs, name, tmp_path):
    pytest.importorskip("sacrebleu")
    plan = replace(PLAN, measurements=1)
    whole, cut = (Training(name, SMALL, plan, pairs, pairs) for _ in range(2))
    whole.run()
    kept = tmp_path / "run.safetensors"
    for _ in range(2):
        cut.train_step()
    cut.save(kept)
    again = Training(name, SMALL, plan, pairs, pairs)
    again.load(kept)
    again.run()
    for key, array in whole.model.state_dict().items():
        np.testing.assert_array_equal(array, again.model.state_dict()[key])
        np.testing.assert_array_equal(whole.mean[key], again.mean[key])
    assert whole.curve[-1]["validation_loss"] == again.curve[-1]["validation_loss"]
    other = Training(name, SMALL, replace(plan, seed=1), pairs, pairs)
    with pytest.raises(ValueError, match="plan"):
        other.load(kept)


@pytest.mark.nightly
def test_transformer_learns_a_synthetic_language(pairs):
    plan = replace(PLAN, steps=200, measurements=0, label_smoothing=0.0)
    training = Training("transformer", Recipe("", 32, 1, 1e-2, 0.0, 1500, n_heads=2), plan, pairs, pairs)
    training.run()
    test = sentences(20, seed=1)
    with training.averaged_weights() as model:
        found = translate(model, pairs.vocabulary, test[0], beam_size=2, progress=False)
        assert mean_loss(model, Pairs(pairs.vocabulary, *test)) < 0.2
        looked = translate_with_attention(model, pairs.vocabulary, "The dog sees the tree.")
    assert np.mean([a == b for a, b in zip(found, test[1])]) > 0.7
    assert looked["translation"] == "der Hund den Baum sieht."
    (weights,) = looked["weights"].values()
    assert np.shape(weights) == (len(looked["target"]), len(looked["source"]))
    np.testing.assert_allclose(np.sum(weights, axis=1), 1, atol=0.02)


def test_learning_rate_schedule_and_averaged_weights(pairs):
    training = Training("fixed", SMALL, replace(PLAN, steps=100), pairs, pairs)
    rates = []
    for step in range(100):
        training.step = step
        rates.append(training.rate())
    assert np.argmax(rates) == 10 and rates[10] == pytest.approx(SMALL.learning_rate)
    assert 0 < rates[0] < 1e-4 and 0 < rates[-1] < 1e-5
    training.step = 0
    name, first = next(iter(training.model.state_dict().items()))
    first = first.copy()
    training.train_step()
    moved = training.model.state_dict()[name]
    np.testing.assert_allclose(training.mean[name], first + (1 - 1 / 11) * (moved - first), rtol=1e-4, atol=1e-7)
    shaken = moved.copy()
    with training.averaged_weights() as model:
        np.testing.assert_array_equal(model.state_dict()[name], training.mean[name])
        assert not model.training
    np.testing.assert_array_equal(training.model.state_dict()[name], shaken)
    assert training.model.training


def test_training_time_is_measured_by_the_given_clock(pairs):
    ticks = iter(range(1000))
    training = Training("fixed", SMALL, replace(PLAN, minutes=0.1, measurements=0), pairs, pairs, lambda: next(ticks))
    training.run()
    assert training.seconds == 6 and training.step == 6


def test_embeddings_of_both_languages_are_shared():
    for name in RECIPES:
        model = new_translator(SMALL.config(name, 300), np.random.default_rng(0))
        assert sum(p.shape == (300, 16) for p in model.parameters()) == 1
    with pytest.raises(ValueError, match=r"name.*fixed, bahdanau"):
        new_translator(SMALL.config("cnn", 300), np.random.default_rng(0))


def test_attention_of_each_transformer_layer_is_returned(pairs):
    config = Recipe("", 16, 2, 1e-3, 0.0, 400, n_heads=2).config("transformer", 330)
    model = new_translator(config, np.random.default_rng(0)).eval()
    shown = translate_with_attention(model, pairs.vocabulary, "The dog.")
    assert list(shown["weights"]) == ["layer 1", "layer 2"]
    n = len(shown["source"])
    flat, sharp = [[1 / n] * n], [[1.0] + [0.0] * (n - 1)]
    assert report.sharpest_layer([{"weights": {"a": flat, "b": sharp}}, {"weights": {"a": flat, "b": flat}}]) == "b"


def test_empty_and_overlong_sentences_are_rejected(pairs):
    model = new_translator(SMALL.config("transformer", 330), np.random.default_rng(0))
    for sentence, got in [(" ", "got 0: ' '"), ("dog tree " * 100, r"got \d{3}: 'dog tree")]:
        with pytest.raises(ValueError, match=f"128 tokens, {got}"):
            translate(model, pairs.vocabulary, ["The dog.", sentence])


def test_token_labels_mark_continuations():
    tokens = [" Kin", "d", ", ", "das", " $", "5", " \x16", "<end>"]
    assert report._labels(tokens) == ["Kin", "-d", ",", "das", "$", "5", "·", "<end>"]


# -------------------------------------------------------------------- the program
SIZES = "--width 16 --layers 1 --vocab-size 320 --max-tokens 300"
WORDS = f"--steps 3 {SIZES} --measurements 2 --measured 3 --beam 2".split()


def call(folder, *words) -> str:
    return run_study(program.main, *words, "--output", folder)


@pytest.fixture
def made_up(monkeypatch):
    def load(split, language):
        return sentences({"train": 200, "val": 12, "test_2016_flickr": 15}[split], len(split))[language != "en"]

    monkeypatch.setattr(program, "load_multi30k", load)
    monkeypatch.setattr(program, "SHOWN", (1,))


def test_run_writes_results_plots_and_tables(made_up, monkeypatch, tmp_path):
    pytest.importorskip("sacrebleu")
    out = call(tmp_path, *WORDS)
    names = {f"{name}-de-0.{ending}" for name in RECIPES for ending in ("json", "safetensors")}
    pictures = {"curves-de.png", "lengths-de.png", "alignment-de.png"}
    check_files(tmp_path, names | pictures, 300)
    runs = report.load_runs(tmp_path)
    assert list(runs) == [("de", name) for name in RECIPES]
    assert report.table(runs, "de") in out and report.length_table(runs, "de") in out
    run = runs["de", "bahdanau"][0]
    assert run["steps"] == 3 and len(run["curve"]) == 2 and len(run["examples"]) == 8
    assert len(run["alignments"]) == 1 and 0 <= run["test"]["beam"] <= 100
    assert sum(part["sentences"] for part in run["by_length"]) == 15
    output = call(tmp_path, "--translate", "The dog sees the man.", "--model", "fixed")
    model, vocabulary, _ = load_translator(tmp_path / "fixed-de-0.safetensors")
    assert output.strip() == translate(model, vocabulary, ["The dog sees the man."], 5, progress=False)[0]
    for name in ("transformer", "bahdanau", "luong"):
        words = ["--look", "The dog sees => Der Hund", "--model", name, "--out", str(tmp_path / "look.html")]
        call(tmp_path, *words)
        assert f'"title":"{name}-de-0"' in (tmp_path / "look.html").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"fixed-de-0: .*attention.*Seq2Seq"):
        call(tmp_path, "--look", "The dog", "--model", "fixed")
    monkeypatch.setattr(report, "draw", lambda *_: [])  # once is enough
    assert " ± " in call(tmp_path, *WORDS, "--model", "fixed", "--seed", "1")
    (tmp_path / "fixed-de-0.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match="trained model"):
        call(tmp_path, *WORDS, "--model", "fixed", "--resume")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "cnn"], "--model.*transformer.*got cnn"),
        (["--target", "en"], "--target.*de, fr.*got en"),
        (["--minutes", "0"], "--minutes.*got 0"),
        (["--dropout", "1"], "--dropout.*got 1"),
        (["--width", "0"], "--width.*got 0"),
        (["--beam", "0"], "--beam.*got 0"),
        (["--vocab-size", "3"], "--vocab-size.*260.*got 3"),
        (["--report"], r"results.*transformer-de-0\.json"),
        (["--translate", "A dog."], r"transformer-de-0\.safetensors: .*encoder-decoder"),
    ],
)
def test_wrong_flags_are_refused(monkeypatch, tmp_path, words, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(tmp_path, *words)
