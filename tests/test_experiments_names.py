"""experiments/names: data splits, measures, and a small run."""

import numpy as np
import pytest
from studies import check_files, check_tables, needs_data, run_study
from tables import wrong_flags

from experiments.names import data, report, study
from experiments.names.__main__ import main
from experiments.shared import classification as shared
from experiments.shared.classification import MODELS
from experiments.shared.results import read
from tricycle_datasets.names import LANGUAGES, SHA256, load_names

ENDINGS = {"Czech": "ová", "Dutch": "stra", "Greek": "akis", "Polish": "wski"}
BOTH = ["Lang", "Maas"]  # in two languages


def made_up(language: str) -> list[str]:
    """Ten names, two of them again, and those of two languages; few languages have any."""
    if language not in ENDINGS:
        return []
    stems = "Ban Dor Fel Gim Hol Jur Kem Lis Mor Nav".split()
    return [stem + ENDINGS[language] for stem in [*stems, "Ban", "Ban"]] + BOTH * (language in ("Dutch", "Greek"))


# -------------------------------------------------------------------- data
def test_letters_are_normalized_and_delimited():
    assert data.letters("O'Béb-É") == ["^", "o", "'", "b", "é", "b", "-", "é", "$"]
    assert data.letters("Be\u0301b") == ["^", "b", "é", "b", "$"]  # an accent of its own


def test_equal_names_stay_in_one_split(monkeypatch):
    monkeypatch.setattr(data, "load_names", made_up)
    problem = data.load(repeated=False, most=100)
    assert len(problem.tokens) == 44 and problem.groups.max() + 1 == 42
    same = [problem.groups[i] for i, tokens in enumerate(problem.tokens) if tokens == data.letters("Lang")]
    assert len(same) == 2 and same[0] == same[1]
    for fold in range(5):
        where = shared.split(problem, 5, fold, 0).where
        found = [{tuple(problem.tokens[i]) for i in part} for part in where]
        assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]
    assert data.ceiling(problem, np.arange(44)) == pytest.approx(42 / 44)
    repeated = data.load(repeated=True, most=100)
    assert len(repeated.tokens) == 52 and repeated.groups.tolist() == list(range(52))
    assert len(data.load(repeated=False, most=3).tokens) == 12


@needs_data("names", [f"{name}.txt" for name in SHA256])
def test_names_data_has_the_published_counts():
    counts = {language: len(load_names(language)) for language in LANGUAGES}
    assert sum(counts.values()) == 20_050 and len(LANGUAGES) == 18
    assert (counts["Russian"], counts["Arabic"], counts["Vietnamese"]) == (9384, 2000, 73)
    assert load_names("Arabic")[:3] == ["Khoury", "Nahas", "Daher"] and len(set(load_names("Arabic"))) == 108
    problem = data.load(repeated=False, most=10_000)
    assert (len(problem.tokens), problem.groups.max() + 1) == (18_012, 17_449)
    characters = {letter for tokens in problem.tokens for letter in tokens[1:-1]}
    assert {"ß", "ñ", "ś", "'", " "} < characters and not {data.BEGIN, data.END} & characters
    assert problem.longest == 22


def test_unknown_language_is_rejected():
    with pytest.raises(ValueError, match=r"Arabic, Chinese, .*'Klingon'"):
        load_names("Klingon")


# -------------------------------------------------------------------- measures
def test_measures_of_a_known_confusion_matrix():
    counts = study.confusion(np.array([0, 0, 0, 1, 1, 3]), np.array([0, 0, 1, 1, 0, 0]), 4)
    assert counts.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    found = study.measures(counts)
    assert found["accuracy"] == 0.5
    assert found["balanced"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert found["f1"] == pytest.approx((4 / 7 + 2 / 4 + 0) / 3)


def test_removing_the_prior_favors_rare_classes():
    """Subtracting the log prior raises the predictions of rare classes."""
    prior = np.log([0.9, 0.1])
    logits = np.log([[0.8, 0.2], [0.95, 0.05]])
    found = study.both(logits, np.array([1, 0]), prior)
    assert (found["plain"]["accuracy"], found["even"]["accuracy"]) == (0.5, 1)


# -------------------------------------------------------------------- the program
WORDS = "--folds 4 --tested 2 --epochs 2 --shown 1".split()


@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "load_names", made_up)
    out = run_study(main, "--quick", *WORDS, "--output", tmp_path)
    files = ["balanced.png", "confusion.png", "letters.png", "pooling_weights.html", "results.json", "training.png"]
    check_files(tmp_path, files)
    results = read(tmp_path / "results.json")
    names_of_models = [*MODELS, shared.TOGETHER, study.BAYES, study.ALWAYS]
    assert [run["model"] for run in results["runs"]] == names_of_models * 2
    for matrices in results["confusion"].values():
        assert 20 <= np.sum(matrices["plain"]) == np.sum(matrices["even"]) <= 24  # two of four folds of 44
    always = [run["plain"]["balanced"] for run in results["runs"] if run["model"] == study.ALWAYS]
    assert always == [0.25, 0.25]  # of four languages that have names
    bayes = [run["plain"]["accuracy"] for run in results["runs"] if run["model"] == study.BAYES]
    assert min(bayes) > 0.8
    check_tables(report.tables(results["runs"], results["classes"], results["confusion"]), out)


@pytest.mark.nightly
def test_models_learn_endings(monkeypatch):
    monkeypatch.setattr(data, "load_names", made_up)
    problem = data.load(repeated=False, most=10)
    parts = shared.split(problem, 4, 0, 0)
    for name in MODELS:
        recipe = shared.Recipe(embedding=16, size=8, heads=2, dropout=0.0, learning_rate=0.03, epochs=15, max_tokens=80)
        assert shared.one_fold(problem, parts, name, recipe, (0, 0))[2]["test"] > 0.8


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--models", "bert"], "--models.*got bert"),
    (["--tested", "6"], "--tested.*got 6"),
    (["--names", "4"], "--names.*got 4"),
    (["--shown", "0"], "--shown.*got 0"),
)
