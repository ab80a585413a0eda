"""experiments/anomalies: events and labels, methods, ROC areas, and a small run."""

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags

from experiments.anomalies import methods, report, study
from experiments.anomalies.__main__ import main
from experiments.anomalies.data import BEAT, KINDS, SLOT, Series, labels_of, normal_series, series_with_events
from experiments.anomalies.study import RATES, Settings, measure, new_windows, roc_area, roc_curve, scores
from experiments.shared.results import read
from experiments.shared.training import stream, train_best
from tricycle.sequences.autoencoders import Autoencoder

WORDS = (
    "--seeds 2 --train-samples 1500 --validation-samples 1500 --each 2 --hidden-size 6 --code-size 4 --steps 4 "
    "--dense-steps 20"
).split()
TINY = Settings(train_samples=1500, validation_samples=1500, each=2)


@pytest.fixture(scope="module")
def series() -> Series:
    return series_with_events(10, np.random.default_rng(0))


# -------------------------------------------------------------------- data
def test_normal_series_has_the_beat_period_and_repeats_by_seed():
    values, events = normal_series(20_000, np.random.default_rng(0))
    assert events == [] and len(values) == 20_000
    assert 0.8 < np.quantile(values, 0.99) < 1.5
    spectrum = np.abs(np.fft.rfft(values - values.mean()))
    assert len(values) / (200 + spectrum[200:].argmax()) == pytest.approx(BEAT, rel=0.1)
    (again, _), (other, _) = (normal_series(20_000, np.random.default_rng(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(again, values)
    assert (other != values).mean() > 0.99


def test_each_slot_contains_one_event(series):
    assert len(series.values) == 60 * SLOT
    assert [first // SLOT for _, first, _ in series.events] == list(range(60))
    assert all(first // SLOT == (last - 1) // SLOT for _, first, last in series.events)
    for i in range(0, 60, 6):
        assert {kind for kind, _, _ in series.events[i : i + 6]} == set(KINDS)


def test_events_have_the_documented_shape(series):
    values = series.values
    parts = {kind: [(first, last) for k, first, last in series.events if k == kind] for kind in KINDS}
    around = np.stack([values[first - 1 : first + 2] for first, _ in parts["spike"]])
    assert (np.abs(around[:, 1] - around[:, [0, 2]].mean(axis=1)) > 0.25).mean() > 0.8
    roughness = lambda first, last: np.diff(values[first:last], 3).std()
    assert np.mean([roughness(*part) / roughness(part[0] - 60, part[0]) for part in parts["noise burst"]]) > 1.5
    assert np.mean([values[first:last].max() < 0.75 for first, last in parts["missing beat"]]) > 0.9
    before = lambda first, n: np.median(values[first - n : first])
    shifts = [abs(np.median(values[first:last]) - before(first, 64)) for first, last in parts["level shift"]]
    assert np.mean(shifts) > 0.25
    for first, last in parts["fast beats"]:
        smooth = np.convolve(values[first - 8 : last], np.ones(5) / 5, mode="valid")
        rises = (np.diff((smooth > smooth.mean()).astype(int)) == 1).sum()  # 3 where beats are as always
        assert 4 <= rises <= 7 and last - first == pytest.approx(3 * BEAT, abs=1)


def test_window_labels_match_event_overlap():
    values = np.zeros(400)
    made = Series(values, [("spike", 70, 71), ("level shift", 200, 300)])
    labels = labels_of(made, 64, 16)
    starts = 16 * np.arange(len(labels))
    assert len(labels) == (400 - 64) // 16 + 1
    for start, label in zip(starts, labels):
        inside = max(0, min(start + 64, 300) - max(start, 200))
        expected = 0 if start <= 70 < start + 64 else 1 if inside >= 8 else -2 if inside else -1
        assert label == expected


def test_windows_are_standardized_by_the_training_series():
    windows = new_windows(TINY, 0)
    assert windows.train.shape == ((1500 - 64) // 8 + 1, 64) and windows.validation.shape == ((1500 - 64) // 16 + 1, 64)
    assert abs(windows.train.mean()) < 0.1 and abs(windows.train.std() - 1) < 0.1
    assert len(windows.labels) == len(windows.test)
    assert set(range(12)) <= set(windows.labels.tolist())  # each event is seen
    assert (windows.labels == -1).mean() > 0.4


# -------------------------------------------------------------------- methods
def test_baseline_methods_reconstruct_known_inputs(rng):
    train = np.array([np.sin(2 * np.pi * (np.arange(40) / 10 + phase)) for phase in rng.random(50)])
    inputs = np.array([np.sin(2 * np.pi * (np.arange(40) / 10 + 0.123))])
    for method in (methods.linear_prediction(train), methods.pca(train, 2)):
        np.testing.assert_allclose(method(inputs), inputs, atol=1e-6)
    broken = inputs.copy()
    broken[0, 30] += 1
    assert scores(methods.linear_prediction(train), broken)[0] > 0.02
    np.testing.assert_array_equal(methods.nearest(train)(train[7:9]), train[7:9])
    np.testing.assert_allclose(methods.mean(train)(inputs), train.mean())
    average = methods.moving_average(train)(inputs)[0]
    np.testing.assert_allclose([average[20], average[0]], [inputs[0, 4:37].mean(), inputs[0, :17].mean()])


def test_train_best_is_deterministic_and_rejects_nan_losses(rng):
    x = rng.standard_normal((200, 1)) * np.sin(np.arange(32) / 5)
    made = []
    for _ in range(2):
        model, generator = Autoencoder.dense((32, 8, 2), generator=0), stream(0)
        batches = (x[generator.integers(0, 200, 32)].astype(np.float32) for _ in range(150))
        validate = lambda model=model: float(model.loss(x.astype(np.float32)))
        batch_loss = lambda batch, factor, model=model: model.loss(batch) * factor
        predict = methods.autoencoder_reconstruction(train_best(model, batch_loss, batches, 150, 0.01, validate, ""))
        made.append(predict(x))
    np.testing.assert_array_equal(*made)
    assert ((made[0] - x) ** 2).mean() < 0.1 * (x**2).mean()
    broken = [np.full((4, 32), np.nan, np.float32)] * 2
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match="learning rate"):
        train_best(model, lambda batch, factor: model.loss(batch) * factor, broken, 2, 1.0, validate, "dense")


# -------------------------------------------------------------------- measures
def test_roc_area_matches_scikit_learn(rng):
    metrics = pytest.importorskip("sklearn.metrics")
    normal, other = rng.integers(0, 20, 300) / 7.0, rng.integers(5, 25, 100) / 7.0
    truth = np.repeat([0, 1], [300, 100])
    errors = np.concatenate([normal, other])
    assert roc_area(other, normal) == pytest.approx(metrics.roc_auc_score(truth, errors))
    assert roc_area(normal, normal) == pytest.approx(0.5)
    assert roc_area(np.array([2.0]), np.array([0.0, 1, 2, 3])) == pytest.approx(2.5 / 4)


def test_roc_curve_of_chance_and_perfect_scores(rng):
    normal = rng.random(20_000)
    np.testing.assert_allclose(roc_curve(rng.random(20_000), normal), RATES, atol=0.02)
    np.testing.assert_array_equal(roc_curve(2 + rng.random(10), normal), 1)


def test_measure_of_a_perfect_and_a_chance_detector():
    windows = new_windows(TINY, 0)
    shows = (windows.labels >= 0)[:, None]
    oracle = lambda x: x - 3 * (shows if len(x) == len(shows) else 0)
    measures = measure(oracle, windows, 0.99)
    assert set(measures["area"].values()) == set(measures["found"].values()) == {1.0} and measures["false_alarms"] == 0
    blind = measure(lambda x: x, windows, 0.99)
    assert set(blind["area"].values()) == {0.5} and set(blind["found"].values()) == {0.0}


def test_overlap_add_inverts_windows_of():
    values = np.arange(100.0)
    np.testing.assert_allclose(report.overlap_add(study.windows_of(values, 20, 5), 5), values)


# -------------------------------------------------------------------- the program
@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(tmp_path):
    out = run_study(main, *WORDS, "--output", tmp_path / "a run")
    check_files(tmp_path / "a run", ["results.json", "roc.png", "series.png"], 300)
    results = read(tmp_path / "a run" / "results.json")
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    check_tables(report.tables(results["runs"]), out)


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--seeds", "0"], "--seeds.*got 0"),
    (["--window", "200"], "--window.*got 200"),
    (["--code-size", "32"], "--code-size.*got 32"),
    (["--train-samples", "100"], "--train-samples.*got 100"),
    (["--quantile", "1"], "--quantile.*got 1"),
)
