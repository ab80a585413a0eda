"""experiments/comparison: operation chains, costs, receptive fields, and a small run."""

import dataclasses

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags

from experiments.comparison import costs, report, study
from experiments.comparison.__main__ import main
from experiments.comparison.chains import Chains, count_operations, longest_path, shortest_path
from experiments.comparison.layers import LAYERS
from experiments.comparison.recall import BODIES, MOST_BEFORE, N_CLASSES, N_LAYERS, QUESTION, new_batch, new_model
from experiments.comparison.settings import TEST, VALIDATION, Settings
from experiments.comparison.study import evaluate_recall, gradient_norms, new_recall_model, train, train_with_best_rate
from experiments.shared.results import read
from experiments.shared.training import stream
from tricycle.devices import ARRAY_MODULES
from tricycle.layers import Dense, Sequential
from tricycle.tensor import Tensor

WORDS = (
    "--longest 128 --rounds 2 --farthest 8 --updates 4 --parameters 2000 --width 8 --seeds 2 --tested 10 --rates 0.003"
).split()
TINY = Settings(farthest=8, updates=40, parameters=2000, tested=100, rates=(1e-2,))


# -------------------------------------------------------------------- chains
def test_chain_length_of_each_operation():
    with count_operations(np.maximum, 0) as rule:
        a, b = (np.full((3, 3), n, np.float32).view(Chains) for n in (2, 5))
        expected = {2: (a * 0.5, np.tanh(a), a - 1, a.sum(axis=0)), 5: (a + b, b.max())}
        expected |= {6: (a * b, a / b, a @ b, (a @ a) @ b), 7: ((a @ b) * a, (b @ b) @ a)}
        for length, results in expected.items():
            assert all((np.asarray(result) == length).all() for result in results), length
        assert rule.multiplications == 6 * 27
        b[1] = 0  # a constant comes from nowhere
        assert np.asarray(b).tolist() == [[5] * 3, [0] * 3, [5] * 3]
    assert Chains not in ARRAY_MODULES
    with pytest.raises(LookupError):
        a + b


@pytest.mark.parametrize("n", [1, 7, 20])
@pytest.mark.parametrize("d", [3, 4])
def test_table_of_the_lecture_equals_the_counts(n, d):
    expected = {
        "CNN, k = 3": (1, 3 * n * d**2),
        "CNN, k = 7": (1, 7 * n * d**2),
        "RNN": (n, 2 * n * d**2),
        "GRU": (3 * n, 6 * n * d**2),
        "LSTM": (3 * n, 8 * n * d**2),
        "self-attention": (5, 4 * n * d**2 + 2 * n**2 * d),
        "self-attention, all weights at once": (5, 4 * n * d**2 + 2 * n**2 * d),
    }
    assert list(expected) == list(LAYERS)
    for name, expected_values in expected.items():
        assert longest_path(LAYERS[name](d, n, stream(0)), n, d) == expected_values, name


def test_dense_layers_form_no_path_between_tokens():
    stack = lambda: Sequential(*(Dense(4, 4, generator=0) for _ in range(3)))
    assert longest_path(stack(), 2, 4) == (3, 3 * 2 * 16)
    assert shortest_path(stack(), 1, 4) == 3
    assert shortest_path(stack(), 2, 4) == np.inf  # from one token to another there is no way


def test_path_lengths_of_each_layer():
    distances = [4, 6, 13]
    counts = costs.paths(distances)
    for k in (3, 7):
        layers = [-(-distance // (k - 1)) for distance in distances]
        assert counts[f"CNN, k = {k}"] == {"layers": layers, "products": layers}
    for name, more in {"RNN": 1, "GRU": 1, "LSTM": 3}.items():
        assert counts[name] == {"layers": [1] * 3, "products": [distance + more for distance in distances]}
    for name in ("self-attention", "self-attention, all weights at once"):
        assert counts[name] == {"layers": [1] * 3, "products": [3] * 3}


# -------------------------------------------------------------------- costs
def test_fused_and_plain_self_attention_agree():
    fused, plain = (LAYERS[f"self-attention{end}"](8, 5, stream(0)) for end in ("", ", all weights at once"))
    fused.qkv.weights.array[...] = np.concatenate([part.weights.array for part in plain.parts], axis=1)
    fused.projection.weights.array[...] = plain.projection.weights.array
    x = stream(1).standard_normal((2, 5, 8), dtype=np.float32)
    np.testing.assert_allclose(fused(Tensor(x)).array, plain(Tensor(x)).array, rtol=1e-4, atol=1e-6)


def test_layers_keep_the_shape_and_all_but_attention_are_causal():
    x = stream(1).standard_normal((2, 9, 4), dtype=np.float32)
    changed = x.copy()
    changed[:, 5:] += 1
    for name, new in LAYERS.items():
        layer = new(4, 9, stream(0))
        first, second = layer(Tensor(x)).array, layer(Tensor(changed)).array
        assert first.shape == x.shape
        assert np.array_equal(first[:, :5], second[:, :5]) == (not name.startswith("self-attention")), name


def test_fitted_exponents_of_power_laws():
    sizes = [64, 128, 256, 512]
    rows = [[0, 0, 3 * n**1.5, 3 * (2 * n) ** 1.5] for n in (256,)] + [[1, 1, 7, 7]]
    assert costs.exponents(sizes, rows) == pytest.approx([1.5, 0], abs=1e-3)
    assert costs.exponents([64], [3.0]) == []


def test_memory_of_unfused_attention_is_quadratic():
    mib = lambda name, n: costs.peak_memory(*costs.new_case(name, n, 16)) / 2**20
    unfused = mib("self-attention, all weights at once", 1024)
    assert 1.8 < np.log2(unfused / mib("self-attention, all weights at once", 512)) < 2.1
    assert 0.8 < np.log2(mib("CNN, k = 3", 1024) / mib("CNN, k = 3", 512)) < 1.4
    n_weights = 1024**2 * 4 / 2**20
    assert 2 * n_weights < unfused < 8 * n_weights
    assert mib("self-attention", 1024) < unfused / 2


# -------------------------------------------------------------------- remembering
@pytest.mark.parametrize("distance", [1, 4, 16])
def test_recall_batches_contain_the_target_once(distance):
    generator, lengths = stream(0), set()
    for _ in range(40):
        tokens, targets = new_batch(distance, 50, generator)
        place = tokens.shape[1] - 1 - distance
        lengths.add(place)
        np.testing.assert_array_equal(tokens[:, place], targets)
        assert (tokens[:, -1] == QUESTION).all()
        rest = np.delete(tokens, [place, tokens.shape[1] - 1], axis=1)
        assert ((rest >= N_CLASSES) & (rest < QUESTION)).all()  # what is to be remembered stands there once
    assert lengths == set(range(MOST_BEFORE + 1))
    assert set(targets) == set(range(N_CLASSES))


@pytest.mark.parametrize("kind", BODIES)
def test_models_use_the_parameter_budget(kind):
    model = new_model(kind, 20_000, 40, stream(0))
    assert 16_000 < model.n_parameters <= 20_000
    tokens, _ = new_batch(8, 3, stream(1))
    assert model(tokens).shape == (3, N_CLASSES)
    if kind == "LSTM, open":
        (run,) = model.body.run.runs[0]
        assert [part.mean() for part in np.split(run.input_bias.array, 4)] == [0, 3, 0, 0]
    if kind == "RNN, orthogonal":
        matrix = model.body.run.runs[0][0].hidden_weights.array
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-5)


@pytest.mark.parametrize("k", [3, 7])
def test_cnn_gradients_are_zero_beyond_the_receptive_field(k):
    reach = N_LAYERS * (k - 1)
    model = new_model(f"CNN, k = {k}", 2000, 64, stream(0))
    norms = gradient_norms(model, reach + 3)
    assert len(norms) == reach + 4
    assert norms[reach] > 0
    assert norms[reach + 1 :] == [0, 0, 0]


def test_gradient_norms_match_known_jacobians():
    model = new_model("CNN, k = 3", 10_000, 64, stream(0))
    model.body = Sequential()
    first, *others = gradient_norms(model, 5)
    assert first == pytest.approx(1, abs=0.1)
    assert others == [0] * 5
    model.body = Sequential(lambda x: 2.0 * x[:, :-2])
    norms = gradient_norms(model, 5)
    assert norms[2] == pytest.approx(2, abs=0.2)
    assert [norm for i, norm in enumerate(norms) if i != 2] == [0] * 5
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.nightly
def test_cnn_learns_recall_only_within_its_receptive_field():
    settings = dataclasses.replace(TINY, updates=120, farthest=12)
    near, learned = train("CNN, k = 3", 4, 1e-2, settings, 0)
    assert evaluate_recall(near, 4, TEST, 200)[0] > 0.99
    assert learned is not None and learned % 6 == 0
    far, never = train("CNN, k = 3", 12, 1e-2, settings, 0)
    assert evaluate_recall(far, 12, TEST, 200)[0] < 0.25
    assert never is None


def test_learning_rate_is_chosen_on_validation_data(monkeypatch):
    accuracies, tried = {1e-3: 0.5, 1e-2: 0.6, 1e-1: 0.4}, []

    def fake_train(kind, distance, rate, settings, seed):
        tried.append(rate)
        return rate, None

    def fake_examine(model, distance, which, n):
        return (accuracies[model], 1 - accuracies[model]) if which == VALIDATION else (0.1, 2.0)

    monkeypatch.setattr(study, "train", fake_train)
    monkeypatch.setattr(study, "evaluate_recall", fake_examine)
    settings = dataclasses.replace(TINY, rates=tuple(accuracies))
    bar = study.tqdm(disable=True)
    model, record = train_with_best_rate("RNN", 4, settings, 0, bar)
    assert (model, record["rate"], record["accuracy"], record["loss"]) == (1e-2, 1e-2, 0.1, 2.0)
    assert tried == [1e-3, 1e-2, 1e-1]
    tried.clear()
    accuracies[1e-3] = 0.995
    assert train_with_best_rate("RNN", 4, settings, 0, bar)[0] == 1e-3
    assert tried == [1e-3]


def test_test_and_validation_streams_differ_and_repeat():
    model = new_recall_model("CNN, k = 3", TINY, 0, 4)
    assert evaluate_recall(model, 4, TEST, 300) == evaluate_recall(model, 4, TEST, 300)
    assert evaluate_recall(model, 4, TEST, 300) != evaluate_recall(model, 4, VALIDATION, 300)


# -------------------------------------------------------------------- the program
@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(tmp_path):
    folder = tmp_path / "a run"
    out = run_study(main, *WORDS, "--output", folder)
    check_files(folder, ["costs.png", "gradients.png", "recall.png", "results.json"], 300)
    results = read(folder / "results.json")
    assert (results["sizes"], results["distances"]) == ([64, 128], [4, 8])
    assert [(run["kind"], run["seed"]) for run in results["runs"]] == [(kind, s) for kind in BODIES for s in (0, 1)]
    for values in results["costs"].values():
        assert np.shape(values["cpu"]) == np.shape(values["wall"]) == (2, 2)
        assert np.min(values["cpu"]) > 0 < min(values["memory"])
    for run in results["runs"]:
        assert len(run["before"]) == len(run["after"]) == 9
        assert len(run["accuracy"]) == 2
    check_tables(report.tables(results), out)


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--longest", "32"], "--longest.*got 32"),
    (["--farthest", "3"], "--farthest.*got 3"),
    (["--updates", "0"], "--updates.*got 0"),
    (["--kinds", "GRU", "Transformer"], "--kinds.*got Transformer"),
    (["--rates", "0", "0.1"], "--rates.*got 0.0 0.1"),
    (["--parameters", "100"], "--parameters.*got 100"),
)
