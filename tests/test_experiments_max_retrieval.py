"""experiments/max_retrieval: data, model, loss, and a small run."""

import dataclasses

import numpy as np
import pytest
from studies import check_files, run_study
from tables import wrong_flags

from experiments.max_retrieval import report, study
from experiments.max_retrieval.__main__ import main
from experiments.max_retrieval.study import (
    N_CLASSES,
    MaxRetrieval,
    Settings,
    batch_loss,
    errors,
    fit,
    measure,
    new_batch,
    per_example_errors,
    scores_of,
    top_weights,
    train,
)
from experiments.shared.results import read
from tricycle.functions import Softmax
from tricycle.gradcheck import gradcheck
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle.tensor import Tensor, no_grad

TINY = Settings(steps=3, seeds=1, batch_size=4, width=8, data_seeds=2, samples=3, largest=32, fit_rows=16)
WORDS = "--steps 3 --seeds 2 --batch-size 4 --width 8 --data-seeds 2 --samples 3 --largest 32 --fit-rows 16".split()
pytestmark = pytest.mark.filterwarnings("ignore:Polyfit may be poorly conditioned")  # of models after three steps


@pytest.fixture(scope="module")
def model() -> MaxRetrieval:
    return train(TINY, seed=0)[0]


# -------------------------------------------------------------------- data and model
def test_batches_target_the_item_with_the_highest_priority():
    items, query, targets = new_batch(64, 500, np.random.default_rng(0))
    priorities, classes = items[..., 0], items[..., 1:]
    assert (items.shape, query.shape, targets.shape) == ((500, 64, 1 + N_CLASSES), (500, 1, 1), (500,))
    assert items.dtype == query.dtype == np.float32
    for uniform in (priorities, query):
        assert 0 <= uniform.min() < uniform.max() < 1
        counts = np.histogram(uniform, 10, (0, 1))[0]
        np.testing.assert_allclose(counts, uniform.size / 10, rtol=0.5)
    assert set(np.unique(classes)) == {0, 1}
    np.testing.assert_array_equal(classes.sum(axis=-1), 1)
    np.testing.assert_allclose(classes.mean(axis=(0, 1)), 0.1, rtol=0.1)
    for example, target in zip(items, targets):
        assert max(example.tolist())[1 + target] == 1  # the row with the highest priority


def test_model_output_shape_and_parameter_count():
    model = MaxRetrieval(np.random.default_rng(0))
    batch = new_batch(7, 3, np.random.default_rng(1))
    assert model(batch.items, batch.query).shape == (3, N_CLASSES)
    width, dense = 128, lambda i, o: i * o + o
    inner = 7 * dense(width, width)  # the second layers, four projections, the head's first
    assert model.n_parameters == dense(1 + N_CLASSES, width) + dense(1, width) + inner + dense(width, N_CLASSES)


@pytest.mark.parametrize("name", ["softmax", "adaptive"])
def test_errors_match_the_model_with_each_softmax(model, name):
    batch = new_batch(20, 3, np.random.default_rng(0))
    softmax = Softmax() if name == "softmax" else AdaptiveSoftmax()
    with no_grad():
        model.attention.use_softmax(name)
        logits = model(batch.items, batch.query).array
        model.attention.use_softmax("softmax")
    wrong = per_example_errors(model, batch, {name: softmax})["wrong"][0]
    np.testing.assert_array_equal(wrong, errors(logits, batch.targets))
    query, keys, values = model.project(batch)
    mixed = Tensor(softmax.row_softmax(scores_of(query, keys))[:, None] @ values.array)
    np.testing.assert_allclose(model.project_to_logits(mixed), logits, rtol=1e-4, atol=1e-5)


def test_loss_with_weight_decay_passes_gradcheck():
    model = MaxRetrieval(np.random.default_rng(0), width=3)
    batch = new_batch(5, 4, np.random.default_rng(1))
    names, parameters = zip(*model.named_parameters())

    def loss(*tensors: Tensor) -> Tensor:
        for name, tensor in zip(names, tensors):
            *path, last = name.split(".")
            owner = model
            for step in path:
                owner = owner[int(step)] if step.isdecimal() else getattr(owner, step)
            setattr(owner, last, tensor)
        return batch_loss(model, batch._replace(items=batch.items.astype(float), query=batch.query.astype(float)), 0.1)

    values = [parameter.array.copy() for parameter in parameters]
    squares = sum((value.astype(float) ** 2).sum() for value in values)
    plain = batch_loss(model, batch, 0.0)
    assert float(batch_loss(model, batch, 0.1)) == pytest.approx(float(plain) + 0.1 * squares, rel=1e-5)
    gradcheck(loss, *values, rtol=1e-4)


# -------------------------------------------------------------------- the study
def test_the_same_seed_gives_the_same_model(model):
    again, other = (train(TINY, seed)[0].state_dict() for seed in (0, 1))
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, again[name])
    assert any((array != other[name]).any() for name, array in model.state_dict().items())


def test_split_chunks_cover_all_samples(monkeypatch):
    monkeypatch.setattr(study, "CHUNK", 100)
    assert study.split(16, 14) == [(0, 6), (1, 6), (2, 2)]
    assert study.split(4096, 2) == [(0, 1), (1, 1)]
    assert study.split(2, 3) == [(0, 3)]


@pytest.mark.nightly
def test_fitted_adaptive_softmax_improves_accuracy():
    settings = dataclasses.replace(TINY, steps=200, batch_size=64, width=32, samples=200, largest=64, fit_rows=200)
    model, _ = train(settings, 0)
    softmax = fit(model, settings, 0, errors)
    assert len(softmax.coefficients) == 5
    assert softmax.threshold == AdaptiveSoftmax().threshold
    accuracy = measure(model, {"plain": Softmax(), "fit": softmax}, settings, 0)["accuracy"]
    assert accuracy["fit"][-1] > accuracy["plain"][-1] + 0.01


def test_measure_repeats_and_gives_valid_values(model):
    softmaxes = {"plain": Softmax(), "adaptive": AdaptiveSoftmax([1.0])}
    found = measure(model, softmaxes, TINY, 0)
    assert found == measure(model, softmaxes, TINY, 0)
    assert found["accuracy"]["plain"] == found["accuracy"]["adaptive"]  # beta is 1 here
    for values in (found["accuracy"]["plain"], found["found"]):
        assert len(values) == len(TINY.sizes) == 5
        assert all(0 <= value <= 1 for value in values)
    for (low, mean, high), n in zip(found["entropy"], TINY.sizes):
        assert 0 <= low <= mean <= high <= np.log(n) + 1e-3


def test_top_weights_are_padded_and_sum_to_at_most_1(model):
    weights = top_weights(model, {"plain": Softmax()}, TINY)["plain"]
    assert weights.shape == (5, study.N_PAINTED, 16)
    for values, n in zip(weights, TINY.sizes):
        assert np.isnan(values[:, : max(0, 16 - n)]).all()
        total = np.nansum(values, axis=-1)
        assert (total <= 1 + 1e-5).all()
        if n <= 16:
            np.testing.assert_allclose(total, 1, rtol=1e-5)


# -------------------------------------------------------------------- the program
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a run"
    return folder, run_study(main, *WORDS, "--output", folder)


@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(finished):
    folder, out = finished
    check_files(folder, ["accuracy.png", "results.json", "weights.png"], 300)
    results = read(folder / "results.json")
    assert results["sizes"] == [2, 4, 8, 16, 32]
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    assert results["settings"]["steps"] == 3
    assert report.accuracy_table(results["sizes"], results["runs"]) in out
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * (2 + 5)  # two tables
    assert rows[0].startswith("| items | notebook, plain | notebook, adaptive | plain | adaptive | fit to loss |")


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["--quick", "--paper"])
def test_flags_override_presets_and_runs_repeat(finished, tmp_path, preset):
    run_study(main, preset, *WORDS, "--output", tmp_path)
    first, again = (read(folder / "results.json") for folder in (finished[0], tmp_path))
    assert again["settings"]["decay"] == (preset == "--paper")
    for a, b in zip(first["runs"], again["runs"], strict=True):
        for timing in ("seconds", "seconds_of_training"):
            a.pop(timing), b.pop(timing)
        assert (a == b) == (preset == "--quick")


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--quick", "--paper"], "--quick.*got both"),
    (["--steps", "0"], "--steps.*got 0"),
    (["--largest", "8"], "--largest.*got 8"),
)
