"""experiments/dates: unambiguous dates, attention on fields, and a small run."""

import contextlib
import re
import unicodedata
from collections import Counter
from datetime import date

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags

from experiments.dates import data, multiple_dates, report, study
from experiments.dates.__main__ import main
from experiments.dates.data import DAY, LANGUAGES, MONTH, NOTHING, YEAR, examples, is_unambiguous, write
from experiments.dates.models import MODELS, new_model
from experiments.dates.study import Settings, attention_on_fields, attention_weights, exact_accuracy, train
from experiments.shared.results import read
from tricycle.dataset import pad

WORDS = "--steps 10 --seeds 2 --examples 40 --tested 2 --validated 4 --parameters 6000 --max-tokens 512".split()
TINY = Settings(steps=10, examples=40, tested=2, validated=4, parameters=6000, max_tokens=512)


def plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFD", character)[0] for character in text.lower())


MONTHS = {
    plain(word).strip("."): number
    for language in LANGUAGES.values()
    for words in (language.months, language.short_months)
    for number, word in enumerate(words, 1)
}


def all_readings(text: str) -> set[date]:
    """Every date that a reader from anywhere may find in a text, by trying what each of its numbers may be.

    Four digits or an apostrophe mark a year, and where a year of four digits stands first the month comes next.
    """
    found = re.findall(r"'?\d+|[^\W\d_]+", plain(text))
    named = {MONTHS[word] for word in found if word in MONTHS}
    values = [word for word in found if word[-1].isdigit()]
    assert len(named) <= 1 and len(values) == 3 - len(named)
    orders = ["dy", "yd"] if named else ["ymd"] if len(values[0]) == 4 else ["dmy", "mdy", "ymd"]
    dates = set()
    for order in orders:
        parts = dict(zip(order, values))
        marked = [kind for kind, value in parts.items() if len(value) == 4 or value[0] == "'"]
        year = parts["y"].strip("'").zfill(2)
        if marked in ([], ["y"]) and len(year) in (2, 4):
            (whole,) = [y for y in range(1950, 2050) if year in (str(y), str(y)[2:])]
            with contextlib.suppress(ValueError):
                dates.add(date(whole, min(named, default=0) or int(parts["m"]), int(parts["d"])))
    return dates


# -------------------------------------------------------------------- data
@pytest.fixture(scope="module")
def many() -> list[data.Example]:
    return examples(data.split()[0], 6000, (0, 64), np.random.default_rng(0))


def test_every_source_has_exactly_one_reading(many):
    for one in many:
        kept = [place for place, field in enumerate(one.fields) if field != NOTHING]
        first = kept[0] - (one.source[kept[0] - 1] == "'" if kept[0] else 0)
        assert all_readings(one.source[first : kept[-1] + 1]) == {date.fromisoformat(one.iso)}, one.source


def test_reference_reader_finds_all_readings_of_ambiguous_dates():
    assert len(all_readings("03/04/1998")) == 2
    assert len(all_readings("10 11 12")) == 3
    assert len(all_readings("3 March 12")) == 2  # the 12th of March 2003, too
    assert len(all_readings("3 March '12")) == len(all_readings("25.12.98")) == len(all_readings("1998-03-04")) == 1


def test_unambiguous_forms_are_accepted():
    """No ambiguous one is: every source has exactly one reading."""
    assert {data.full_year(number) for number in range(100)} == set(range(1950, 2050))
    for form in ("{dd}_{mm}_{yyyy}", "{mm}_{dd}_{yyyy}"):
        assert is_unambiguous(form, date(1998, 12, 25)) and is_unambiguous(form, date(1998, 3, 3))
    for form, day in (("{d} {month} '{yy}", date(2012, 3, 4)), ("{d} {month} {yy}", date(2032, 3, 4))):
        assert is_unambiguous(form, day)


def test_fields_have_the_documented_positions(many):
    for one in many:
        assert len(one.source) == len(one.fields)
        text = {field: "".join(c for c, f in zip(one.source, one.fields) if f == field) for field in (DAY, MONTH, YEAR)}
        year, month, day = one.iso.split("-")
        assert text[YEAR] in (year, year[2:])
        assert int(re.match(r"\d+", text[DAY])[0]) == int(day)
        word = plain(text[MONTH]).strip(".")
        assert (int(word) if word.isdigit() else MONTHS[word]) == int(month)
        outside = [c for c, field in zip(one.source, one.fields) if field == NOTHING]
        assert not any(c.isdigit() for c in outside)


def test_examples_cover_all_forms_and_languages(many):
    assert {one.language for one in many} == set(LANGUAGES)
    counts = Counter(one.language for one in many)
    assert min(counts.values()) > 0.22 * len(many)
    shapes = {re.sub(r"\d", "0", one.source) for one in many}
    assert len(shapes) > 3000
    day = date(1998, 9, 25)
    for name, language in LANGUAGES.items():
        for form in language.forms:
            source, fields = write(day, name, form)
            assert len(source) == len(fields) and {DAY, MONTH, YEAR} <= set(fields)
            assert all(character in data.NUMBER for character in source.replace("_", "/").upper())


def test_dates_are_written_as_expected_in_each_language():
    day = date(1998, 3, 1)
    assert write(day, "English", "{weekday}, the {ordinal} of {month}, {yyyy}")[0] == "Sunday, the 1st of March, 1998"
    assert write(day, "German", "{weekday}, den {d}. {month} {yyyy}")[0] == "Sonntag, den 1. März 1998"
    assert write(day, "French", "le {weekday} {ordinal} {month} {yyyy}")[0] == "le dimanche 1er mars 1998"
    assert write(day, "Spanish", "{d} de {month} de {yyyy}")[0] == "1 de marzo de 1998"
    assert [data.ordinal("English", n) for n in (2, 3, 11, 12, 13, 21, 22, 23, 30)] == (
        "2nd 3rd 11th 12th 13th 21st 22nd 23rd 30th".split()
    )


def test_filler_words_contain_no_month_or_weekday():
    lists = [words for language in LANGUAGES.values() for words in language[:4]]
    known = {plain(word).strip(".") for words in lists for word in words}
    for language in LANGUAGES.values():
        for word in map(plain, language.filler):
            cuts = {word[:n] for n in range(3, len(word) + 1)} | {word[-n:] for n in range(3, len(word) + 1)}
            assert not cuts & {name for name in known if len(name) > 2}, word
    months = Counter()
    for language in LANGUAGES.values():
        for words in (language.months, language.short_months):
            months.update({(plain(word).strip("."), number) for number, word in enumerate(words)})
    assert len({word for word, _ in months}) == len(months)  # no word is two months, in whatever languages
    assert not set(MONTHS) & {plain(word) for n in LANGUAGES.values() for word in n.weekdays + n.short_weekdays}


@pytest.mark.parametrize(("lengths", "least", "most"), [((0, 0), 6, 40), ((0, 64), 6, 64), ((193, 256), 193, 256)])
def test_source_lengths_are_within_the_range(lengths, least, most):
    sizes = [len(one.source) for one in examples(data.split()[2], 300, lengths, np.random.default_rng(0))]
    assert least <= min(sizes) <= max(sizes) <= most


def test_no_date_is_in_two_splits():
    training, validation, test = map(set, data.split())
    assert len(training) + len(validation) + len(test) == len(training | validation | test) == 36_525
    assert (len(validation), len(test)) == (1000, 2000)
    for part, days in (("validation", validation), ("test", test)):
        texts = study.held_out(part, 20, (0, 64))
        assert {date.fromisoformat(one.iso) for one in texts.examples} <= days
    assert {date.fromisoformat(one.iso) for one in study.training_texts(40, 0).examples} <= training


def test_targets_decode_to_the_iso_date():
    drawn = examples(data.split()[2], 5, (0, 0), np.random.default_rng(0))
    rows = data.targets(drawn)
    assert rows.shape == (5, 12)
    assert [data.decode(row[1:-1]) for row in rows] == [one.iso for one in drawn]
    assert set(rows[:, 0]) == {data.BEGIN} and set(rows[:, -1]) == {data.END}


def test_multiple_date_examples_have_padded_targets():
    drawn = data.multiple_date_examples(data.split()[2], 50, (2, 4), np.random.default_rng(0))
    assert {len(one.iso) // 10 for one in drawn} == {2, 3, 4}
    for one in drawn:
        parts = one.source.split(data.BETWEEN)
        assert len(one.fields) == len(one.source) and len(parts) == len(one.iso) // 10
    assert len({one.iso[-10:] for one in drawn}) == 50
    rows = data.targets(drawn)
    assert rows.shape == (50, 42)
    for one, row in zip(drawn, rows):
        assert (row[: len(one.iso) + 2] >= 0).all() and (row[len(one.iso) + 2 :] == data.IGNORED).all()
    assert multiple_dates.fraction_of_right_dates("1998-03-032001-01-01", "1998-03-032001-01-02") == 0.5
    assert multiple_dates.fraction_of_right_dates("1998-03-03", "1998-03-032001-01-02") == 0.5


# -------------------------------------------------------------------- models
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_models_train_deterministically_with_valid_attention(name):
    known, unseen = study.training_texts(TINY.examples, 0), study.held_out("validation", 4, (0, 64))
    (model, history), (again, _) = (train(name, TINY, 0, known, unseen) for _ in range(2))
    assert abs(model.n_parameters / TINY.parameters - 1) < 0.35
    assert len(history["losses"]) == 10 * study.SLOW.get(name, 1) and history["losses"][-1] < history["losses"][0]
    for (key, value), other in zip(model.state_dict().items(), again.state_dict().values()):
        np.testing.assert_array_equal(value, other, err_msg=key)
    texts = study.held_out("test", 6, (0, 64))
    source, lengths = pad(texts.sources)
    weights = attention_weights(model, source, texts.targets, lengths)
    n_heads = {"fixed context": 0, "Transformer": 8}.get(name, 1)
    assert weights.shape == (6, n_heads, 11, source.shape[1])
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    for row, length in zip(weights, lengths):
        assert (row[..., length:] == 0).all()


def test_models_have_similar_parameter_counts():
    sizes = [new_model(name, 100_000, np.random.default_rng(0)).n_parameters for name in MODELS]
    assert max(abs(size / 100_000 - 1) for size in sizes) < 0.08


@pytest.mark.nightly
def test_attention_generalizes_to_unseen_dates():
    settings = Settings(steps=160, parameters=25_000, max_tokens=1024, learning_rate=1.2e-2)
    days, generator = data.split()[0], np.random.default_rng(0)
    known, unseen = study.texts(examples(days, 2000, (0, 0), generator)), study.held_out("validation", 200, (0, 0))
    model, history = train("Luong general", settings, 0, known, study.held_out("validation", 4, (0, 0)))
    assert np.mean(history["losses"][-10:]) < 0.25
    assert exact_accuracy(model, unseen) > 0.4


def test_attention_on_fields_of_known_weights():
    fields = np.array([[NOTHING, DAY, MONTH, MONTH, YEAR, NOTHING]])
    weights = np.zeros((1, 2, 11, 6))
    weights[0, 0, np.arange(11), [4, 4, 4, 5, 0, 2, 3, 0, 1, 0, 0]] = 1  # one digit of the year and of the day miss
    weights[0, 1] = 1 / 6
    share, top = attention_on_fields(weights, fields)
    np.testing.assert_allclose(share[0], [[0.75, 1, 0.5], [1 / 6, 2 / 6, 1 / 6]])
    np.testing.assert_allclose(top[0, 0], [0.75, 1, 0.5])


def test_equal_scores_give_uniform_attention_on_fields():
    model = new_model("Luong general", 6000, np.random.default_rng(0))
    model.attention.key.weights.array[:] = 0  # all scores are equal
    alignment = study.measure_attention(model, study.held_out("test", 40, (0, 64)))
    assert alignment.share.shape == (1, 3)
    np.testing.assert_allclose(alignment.share[0], alignment.even, rtol=1e-5)


def test_reward_baseline_is_the_running_mean():
    critic = study.RunningMeanReward()
    np.testing.assert_array_equal(critic(np.array([[1.0, 3.0], [3.0, 5.0]])), [2, 4])
    np.testing.assert_allclose(critic(np.array([[12.0, 14.0]])), [2, 4])
    np.testing.assert_allclose(critic(np.array([[0.0, 0.0]])), [2.1, 4.1])


# -------------------------------------------------------------------- the program
@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(tmp_path):
    folder = tmp_path / "a run"
    models = "--models", "fixed context", "Transformer"
    out = run_study(main, "--quick", *models, *WORDS, "--output", folder)
    pictures = ["alignment-transformer.png", "lengths.png", "models.png", "training.png"]
    check_files(folder, [*pictures, "results.json"], 200)
    results = read(folder / "results.json")
    assert results["settings"]["steps"] == 10
    expected = [(name, seed) for name in ("fixed context", "Transformer") for seed in (0, 1)]
    assert [(run["model"], run["seed"]) for run in results["runs"]] == expected
    for run in results["runs"]:
        assert len(run["lengths"]) == len(results["lengths"]) == len(study.LENGTHS)
        assert ("share" in run) == (run["model"] != "fixed context")
    check_tables(report.tables(results["runs"]), out)


@pytest.mark.nightly
def test_several_flag_writes_multiple_date_results(monkeypatch, tmp_path):
    words = [*WORDS, "--seeds", "1", "--models", "fixed context", "--output", tmp_path]
    monkeypatch.setattr(multiple_dates, "COUNTS", (1, 3))
    monkeypatch.setattr(report, "COUNTS", (1, 3))
    out = run_study(main, "--several", *words)
    check_files(tmp_path, ["several.json", "several.png"], 200)
    results = read(tmp_path / "several.json")
    assert results["counts"] == [1, 3] and results["settings"]["max_tokens"] == 512
    assert len(results["runs"][0]["whole"]) == len(results["runs"][0]["each"]) == 2
    assert report.multiple_dates_table(results["runs"]) in out


def test_loss_ignores_padding_after_shorter_answers():
    """Positions after the end of a shorter answer count neither in the loss nor in its mean."""
    model = new_model("Luong general", 6000, np.random.default_rng(0))
    generator = np.random.default_rng(1)
    texts = study.texts([*(data.multiple_date_examples(data.split()[0], 1, (n, n), generator)[0] for n in (1, 3))])
    source, lengths = pad(texts.sources)
    whole, _ = study.batch_loss(model, source, texts.targets, lengths, study.RunningMeanReward())
    parts = []
    for i, one in enumerate(texts.examples):
        row = texts.targets[i : i + 1, : len(one.iso) + 2]
        part, _ = study.batch_loss(model, source[i : i + 1], row, lengths[i : i + 1], study.RunningMeanReward())
        parts.append(float(part) * (len(one.iso) + 1))
    assert float(whole) == pytest.approx(sum(parts) / (11 + 31), rel=1e-5)


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--models", "additive", "bert"], "--models.*got bert"),
    (["--models"], "--models.*got none"),
    (["--several", "--models", "hard"], "--models without hard.*--several"),
    (["--steps", "1"], "--steps.*got 1"),
    (["--tested", "0"], "--tested.*got 0"),
    (["--max-tokens", "50"], "--max-tokens.*got 50"),
    (["--learning-rate", "0"], "--learning-rate.*got 0.0"),
    (["--parameters", "100"], "--parameters.*got 100"),
)
