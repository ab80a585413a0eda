"""experiments/sentiment and code shared with experiments/names: folds, training, page, and program."""

import json

import numpy as np
import pytest
from studies import check_files, check_tables, needs_data, run_study
from tables import wrong_flags
from test_plot import Page

from experiments.sentiment import report, study
from experiments.sentiment.__main__ import main
from experiments.shared import classification as shared
from experiments.shared import pooling_weights
from experiments.shared.classification import MODELS, UNKNOWN, Parts, Predicted, Problem, Recipe
from experiments.shared.pooling_weights import Answer, Item
from experiments.shared.results import of, read, select
from tricycle_datasets.rt_polarity import SHA256, load_rt_polarity

GOOD, BAD, OTHER = "fine lovely warm".split(), "dull awful thin".split(), "the film is a story of one man".split()


def made_up(n: int = 60) -> tuple[list[str], list[int]]:
    """Sentences with one or two words that tell, negative ones first."""
    generator = np.random.default_rng(0)
    texts = []
    for words in (BAD, GOOD):
        for i in range(n):
            text = generator.choice(OTHER, 4 + i % 5).tolist()
            text.insert(int(generator.integers(len(text))), words[i % 3])
            texts.append(" ".join(text) + f" <b>{i}</b> isn't it ?")
    return texts, [0] * n + [1] * n


@pytest.fixture
def problem(monkeypatch) -> Problem:
    monkeypatch.setattr(study, "load_rt_polarity", made_up)
    return study.load(100)[1]


# -------------------------------------------------------------------- data
def test_words_splits_contractions_and_punctuation():
    assert study.words("It's n't what I'd call \"good\", Amélie-like; doesn't") == (
        ["it", "'s", "n't", "what", "i", "'d", "call", '"', "good", '"', ",", "amélie", "-", "like", ";", "does", "n't"]
    )
    assert study.words("'tis [a] 5-star") == ["'", "tis", "[", "a", "]", "5", "-", "star"]


@pytest.mark.parametrize("text", ["Doesn't it ?", "  a--b'c  É x", "", "can't 'n' won't"])
def test_words_and_gaps_join_to_the_text(text):
    words, gaps = study.words(text), study.gaps(text)
    assert len(words) == len(gaps)
    assert "".join(gap + word for gap, word in zip(gaps, words)) == text.rstrip().lower()


@needs_data("rt-polarity", SHA256)
def test_rt_polarity_has_the_published_sentences():
    texts, labels = load_rt_polarity()
    assert (len(texts), sum(labels), labels[0], labels[-1]) == (10_662, 5331, 0, 1)
    assert texts[0] == "simplistic , silly and tedious ."
    assert texts[5331].startswith("the rock is destined to be the 21st century's new")
    assert all(text and text == text.strip() for text in texts)
    _, problem = study.load(5331)
    assert len(problem.tokens) == 10_662 and problem.longest == 63 and min(map(len, problem.tokens)) >= 1
    texts, problem = study.load(7)
    assert problem.labels.tolist() == [0] * 7 + [1] * 7 and texts[7].startswith("the rock")


# -------------------------------------------------------------------- folds
def test_folds_are_stratified_and_repeat_by_seed():
    strata = np.array([0] * 25 + [1] * 13 + [2] * 2)
    folds = shared.stratified_folds(strata, 5, (0,))
    assert sorted(np.bincount(folds)) == [8] * 5
    for stratum, (least, most) in {0: (5, 5), 1: (2, 3), 2: (0, 1)}.items():
        counts = np.bincount(folds[strata == stratum], minlength=5)
        assert least <= counts.min() and counts.max() <= most
    assert (folds != shared.stratified_folds(strata, 5, (1,))).any()
    np.testing.assert_array_equal(folds, shared.stratified_folds(strata, 5, (0,)))


def test_splits_are_disjoint_and_keep_groups_together():
    """Every text is tested once, splits are disjoint, and texts of a group stay together."""
    generator = np.random.default_rng(0)
    labels, groups = generator.integers(0, 3, 200), generator.permutation(np.arange(200) // 2)
    problem = Problem([[f"{group}", "x"] for group in groups], labels, ("a", "b", "c"), groups)
    tested = []
    for fold in range(5):
        parts = shared.split(problem, 5, fold, 0)
        assert sorted(np.concatenate(parts.where)) == list(range(200))
        sets = [set(groups[where]) for where in parts.where]
        assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
        assert [len(where) for where in parts.where] == [128, 32, 40]
        assert set(parts.vocabulary) == {f"{group}" for group in groups[parts.where[0]]} | {"x"}
        assert parts.test.sequences[0] == [UNKNOWN, parts.vocabulary["x"]]  # its group is in no other part
        np.testing.assert_array_equal(parts.test.labels, labels[parts.where[2]])
        tested += parts.where[2].tolist()
    assert sorted(tested) == list(range(200))


def test_vocabulary_omits_rare_tokens():
    vocabulary = shared.new_vocabulary(["bab", "ac", "cd"], least=2)
    assert vocabulary == {"a": 2, "b": 3, "c": 4}
    assert shared.encode(["abd"], vocabulary) == [[2, 3, UNKNOWN]]


# -------------------------------------------------------------------- training and prediction
TINY = Recipe(embedding=16, size=8, heads=2, dropout=0.1, learning_rate=0.02, epochs=6, max_tokens=200)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_models_classify_and_weight_the_sentiment_words(problem, name):
    parts = shared.split(problem, 4, 0, 0)
    (model, predicted, record), (_, again, _) = (shared.one_fold(problem, parts, name, TINY, (0, 0)) for _ in range(2))
    assert record["test"] > 0.9
    np.testing.assert_array_equal(predicted.logits, again.logits)
    epochs = np.array(record["epochs"])
    assert epochs.shape == (6, 3) and epochs[-1, 0] < epochs[0, 0]
    logits = shared.predict(model, parts.validation.sequences).logits
    assert record["validation"] == shared.loss_and_accuracy(logits, parts.validation.labels)[1]
    assert record["validation"] == pytest.approx(epochs[:, 2].max(), abs=1e-4)
    for row, sequence in zip(predicted.weights, parts.test.sequences):
        assert len(row) == len(sequence) and row.sum() == pytest.approx(1, abs=1e-4)
    found = shared.concatenate_folds(problem, [(parts, {name: predicted})])
    words = [word for word, share, _ in shared.top_weighted_tokens(problem, found, name, 3) if share > 1]
    assert set(words[:6]) & set(GOOD + BAD)


def test_train_keeps_the_epoch_with_the_best_validation(problem, monkeypatch):
    judged = iter([(0.5, 0.6), (0.4, 0.9), (0.3, 0.9), (0.2, 0.8)])
    states = []
    predict = shared.predict

    def spy(model, sequences):
        states.append({name: array.copy() for name, array in model.state_dict().items()})
        return predict(model, sequences)

    monkeypatch.setattr(shared, "predict", spy)
    monkeypatch.setattr(shared, "loss_and_accuracy", lambda logits, labels: next(judged))
    recipe = Recipe(embedding=4, size=2, epochs=4)
    model, history = shared.train("convolution", recipe, shared.split(problem, 4, 0, 0), 2, problem.longest, (0, 0, 0))
    assert history["best"] == 3
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, states[2][name])
    assert any((array != states[3][name]).any() for name, array in model.state_dict().items())


def test_mask_tokens_replaces_with_unknown():
    assert shared.mask_tokens([[5, 6, 7], [8]], [1, 0]) == [[5, UNKNOWN, 7], [UNKNOWN]]


def test_loss_accuracy_and_mean_logits_of_known_values():
    loss, accuracy = shared.loss_and_accuracy(np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]) + 7, np.array([1, 1]))
    assert (loss, accuracy) == (pytest.approx(-np.log(0.25 * 0.8) / 2), 0.5)
    mean = shared.mean_logits({"a": Predicted(np.log([[0.2, 0.8]]) + 5, []), "b": Predicted(np.log([[0.8, 0.2]]), [])})
    np.testing.assert_allclose(mean, np.log([[0.4, 0.4]]))


def test_naive_bayes_of_known_counts():
    tokens = [["good", "good"], ["good", "film"], ["bad", "film"], ["film", "good", "new"]]
    problem = Problem(tokens, np.array([1, 1, 0, 1]), ("-", "+"), np.arange(4))
    nothing = shared.Texts([], np.zeros(0, int))
    parts = Parts((np.array([0, 1, 2]), np.array([], int), np.array([3])), nothing, nothing, nothing, {})
    logits = shared.naive_bayes(problem, parts, 1)
    # positive: good 2, film 1, bad 0; negative: good 0, film 1, bad 1; one more of each, a word once a text
    np.testing.assert_allclose(np.exp(logits), [[2 / 5 * 2 / 5 * 1 / 5, 3 / 5 * 2 / 6 * 3 / 6]])
    assert shared.n_grams("abab", 2) == {("a",), ("b",), ("a", "b"), ("b", "a")}


# -------------------------------------------------------------------- the page
NASTY = ["</script><script>alert(1)</script>", "<b>", "&amp;", "\t", "\\", '"', "$x$", "ß"]


def nasty_item(label: int = 0) -> Item:
    weights = np.arange(8) / 28
    answers = {"one": Answer(weights, 0, 0.75), "<two>": Answer(weights[::-1], 1, 0.5)}
    return Item(NASTY, [" "] * 8, [False] * 7 + [True], label, answers)


def test_page_escapes_special_characters(tmp_path):
    path = tmp_path / "a folder" / "page.html"
    pooling_weights.write_page(path, "<title>", "a & b", ("<i>", "+"), [nasty_item(), nasty_item(1)])
    text = path.read_text(encoding="utf-8")
    page, empty = Page(text), Page(pooling_weights.PAGE.read_text(encoding="utf-8"))
    assert page.tags == empty.tags and len(page.scripts) == 2
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in page.tags)
    given = json.loads(page.scripts[0])
    assert given["title"] == "<title>" and given["models"] == ["one", "<two>"]
    assert given["items"][0]["tokens"] == NASTY and given["items"][1]["label"] == 1
    assert given["items"][0]["seen"][0]["weights"][7] == pytest.approx(0.25)
    assert "default-src 'none'" in text and "innerHTML" not in text and "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("items", "message"),
    [([], "at least one text"), ([nasty_item()._replace(tokens=["a"])], "1 weights of one.*got 8")],
)
def test_invalid_page_items_are_rejected(tmp_path, items, message):
    with pytest.raises(ValueError, match=f"write_page: .*{message}"):
        pooling_weights.write_page(tmp_path / "page.html", "", "", ("-", "+"), items)
    assert not list(tmp_path.iterdir())


def test_choose_selects_by_agreement_and_label():
    labels = np.array([0, 1] * 20)
    right = np.zeros((2, 40), bool)
    right[:, :20], right[0, 20:30] = True, True
    chosen = pooling_weights.choose(right, labels, 3, np.random.default_rng(0))
    assert len(chosen) == len(set(chosen)) == 18
    assert [labels[i] for i in chosen] == ([0] * 3 + [1] * 3) * 3
    assert [i // 10 for i in chosen[6:]] == [2] * 6 + [3] * 6 and max(chosen[:6]) < 20


def test_wrap_breaks_lines():
    rows = pooling_weights.wrap(["aa", "bbb", "c", "dddddd"], ["", " ", "", " "], np.array([0.25, 0, 0.75, 0]), 6)
    places = [[(x, token) for x, token, _ in row] for row in rows]
    assert places == [[(0, "aa"), (3, "bbb")], [(0, "c")], [(0, "dddddd")]] and rows[0][0][2] == 0.5


# -------------------------------------------------------------------- the program
WORDS = "--folds 4 --tested 2 --epochs 2 --shown 2".split()


@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(problem, tmp_path):
    folder, again = tmp_path / "a run", tmp_path / "again"
    out = run_study(main, "--quick", *WORDS, "--output", folder)
    check_files(folder, ["accuracy.png", "pooling_weights.html", "results.json", "training.png", "words.png"])
    results = read(folder / "results.json")
    assert [run["fold"] for run in results["runs"]] == [0] * 6 + [1] * 6
    assert [run["model"] for run in results["runs"]] == [*MODELS, shared.TOGETHER, *study.BAYES] * 2
    assert of(select(results["runs"], model="naive Bayes, words"), "test") == [1, 1]
    check_tables(report.tables(results["runs"], results["words"]), out)
    shown = json.loads(Page((folder / "pooling_weights.html").read_text(encoding="utf-8")).scripts[0])
    assert shown["models"] == list(MODELS) and shown["classes"] == ["negative", "positive"]
    texts = [text.lower() for text in made_up()[0]]
    for item in shown["items"]:
        assert "".join(gap + token for gap, token in zip(item["gaps"], item["tokens"])) in texts
        for answer in item["seen"]:
            assert sum(answer["weights"]) == pytest.approx(1, abs=0.01) and 0.5 <= answer["probability"] <= 1
    run_study(main, *WORDS, "--models", "Transformer", "--output", again)
    first, second = (select(read(path / "results.json")["runs"], model="Transformer") for path in (folder, again))
    for run in first + second:
        run["seconds"] = 0
    assert first == second  # whatever other models are trained beside it


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--models", "bert"], "--models.*got bert"),
    (["--folds", "2"], "--folds.*got 2"),
    (["--tested", "11"], "--tested.*got 11"),
    (["--sentences", "5"], "--sentences.*got 5"),
)
