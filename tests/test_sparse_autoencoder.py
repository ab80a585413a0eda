"""Sparse autoencoders find planted features, and are scored on a model's residual stream."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from programs import good, run_here
from tables import bad_input
from test_models import TINY, lively
from tiny_models import TEXT, write_folder

from tricycle.models import GPT
from tricycle.pretrained.safetensors_weights import read_tensors, write_tensors
from tricycle.tensor import Tensor, no_grad
from tricycle_cli.inspect import main
from tricycle_lab.probe import Probe
from tricycle_lab.sparse_autoencoder import (
    SparseAutoencoder,
    TrainingOptions,
    collect_stream,
    score_autoencoder,
    strongest_occurrences,
    train_autoencoder,
    typical_tokens,
)

TEXTS = np.random.default_rng(1).integers(0, 11, (12, 10)).tolist()


def planted_rows(n_rows: int = 4096, n_features: int = 48, width: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Return rows that are sums of two out of 48 random directions in 24 channels, and the directions."""
    generator = np.random.default_rng(7)  # another seed than that of the initial weights, which would equal them
    directions = generator.standard_normal((n_features, width))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    weights = np.zeros((n_rows, n_features))
    for row in weights:
        row[generator.choice(n_features, 2, replace=False)] = generator.uniform(0.5, 1.5, 2)
    return 3 + 10 * weights @ directions, directions


@pytest.mark.parametrize(
    ("kind", "n_steps"), [("topk", 300), pytest.param("jumprelu", 1000, marks=pytest.mark.nightly)]
)
def test_planted_features_are_found(kind, n_steps) -> None:
    rows, directions = planted_rows()
    options = TrainingOptions(n_steps=n_steps, learning_rate=5e-3)
    autoencoder = train_autoencoder(rows, 96, 2, kind, options)
    cosines = directions @ autoencoder.decoder.weights.array.T
    assert (cosines.max(axis=1) > 0.9).mean() >= 0.95
    assert (autoencoder.activations(rows) > 0).sum(axis=1).mean() < 4
    error = ((rows - autoencoder.reconstruct(rows)) ** 2).sum() / ((rows - rows.mean(axis=0)) ** 2).sum()
    assert error < 0.1
    random = SparseAutoencoder(24, 96, 2, kind)  # which shows that the test can fail
    assert ((directions @ random.decoder.weights.array.T).max(axis=1) > 0.9).mean() < 0.2


def test_training_is_deterministic() -> None:
    rows = planted_rows(200)[0]
    options = TrainingOptions(n_steps=5)
    first, second = (train_autoencoder(rows, 30, 2, options=options) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters()):
        np.testing.assert_array_equal(one.array, other.array)


def test_activations_are_sparse() -> None:
    x = np.random.default_rng(0).normal(0, 1, (20, 6)).astype(np.float32)
    topk = SparseAutoencoder(6, 30, k=3)
    before = x @ topk.encoder.weights.array
    active = topk.activations(x)
    assert ((active > 0).sum(axis=1) == 3).all()
    np.testing.assert_allclose(active.sum(axis=1), np.sort(before, axis=1)[:, -3:].sum(axis=1), rtol=1e-4)
    jumprelu = SparseAutoencoder(6, 30, kind="jumprelu")
    np.testing.assert_allclose(jumprelu.activations(x), np.where(before > 0.1, before, 0), rtol=1e-4, atol=1e-6)


def test_thresholds_get_the_gradient_of_the_kernel_estimate() -> None:
    """Only values within half a bandwidth of the threshold count: lowering it by d activates d / bandwidth of them."""
    autoencoder = SparseAutoencoder(1, 2, k=1, kind="jumprelu")
    autoencoder.encoder.weights.array[...] = 1
    autoencoder.log_thresholds.array[...] = np.log([0.1, 0.3])
    x = np.array([[0.11], [0.2]], np.float32)
    _, before = autoencoder.encode(Tensor(x, requires_grad=False))
    count = autoencoder.count_active(before)
    assert count.array == pytest.approx(1)  # both rows exceed the first threshold, none the second
    count.backward()
    np.testing.assert_allclose(autoencoder.log_thresholds.grad.array, [-0.1 / 0.03 / 2, 0], rtol=1e-5)


def test_stream_is_that_of_a_probe() -> None:
    model = lively(TINY).eval()
    with Probe(model, "blocks.1") as probe, no_grad():
        model(np.array(TEXTS))
    expected = probe.activations["blocks.1"][:, 1:].reshape(-1, 8)
    np.testing.assert_allclose(collect_stream(model, TEXTS, 1), expected, rtol=1e-4, atol=1e-4)


def test_first_and_massive_tokens_are_left_out() -> None:
    stream = np.ones((6, 4))
    stream[3] *= 9
    assert typical_tokens(stream).tolist() == [1, 2, 4, 5]
    stream[3] /= 1.2
    assert typical_tokens(stream).tolist() == [1, 2, 3, 4, 5]


def test_scores_of_perfect_and_empty_autoencoders() -> None:
    model = lively(replace(TINY, n_layers=3)).eval()
    rows = collect_stream(model, TEXTS, 1)
    mean = rows.mean(axis=0)
    perfect = SparseAutoencoder(8, 16, k=16, mean=mean)
    both = np.concatenate([np.eye(8), -np.eye(8)]).astype(np.float32)
    perfect.encoder.weights.array[...], perfect.decoder.weights.array[...] = both.T, both
    scores = score_autoencoder(model, perfect, TEXTS, 1)
    assert scores.explained == pytest.approx(1) and scores.recovered == pytest.approx(1, abs=1e-4)
    assert scores.n_dead == 0 and scores.n_active == pytest.approx(8)
    with no_grad():
        logits = model(np.array(TEXTS)).array[:, :-1].astype(np.float64)
    chosen = np.take_along_axis(logits, np.array(TEXTS)[:, 1:, None], axis=-1)[..., 0]
    assert scores.loss == pytest.approx((np.log(np.exp(logits).sum(axis=-1)) - chosen).mean(), rel=1e-5)
    perfect.decoder.weights.array[...] = 0
    empty = score_autoencoder(model, perfect, TEXTS, 1)
    assert empty.recovered == pytest.approx(0, abs=1e-6) and empty.explained == pytest.approx(0, abs=1e-6)
    perfect.encoder.bias.array[:3] = -1e6
    assert score_autoencoder(model, perfect, TEXTS, 1).n_dead == 3


def test_strongest_occurrences_are_the_largest_activations() -> None:
    model = lively(TINY).eval()
    autoencoder = SparseAutoencoder(8, 12, k=4)
    frequencies, found = strongest_occurrences(model, autoencoder, TEXTS, 0, n=3)
    active = autoencoder.activations(collect_stream(model, TEXTS, 0)).reshape(len(TEXTS), 9, 12)
    np.testing.assert_allclose(frequencies, (active > 0).mean(axis=(0, 1)))
    for feature, occurrences in enumerate(found):
        largest = np.sort(active[:, :, feature].max(axis=1))[::-1][:3]
        np.testing.assert_allclose([each.value for each in occurrences], largest[largest > 0], rtol=1e-4)
        for value, text, position in occurrences:
            assert active[text, position - 1, feature] == pytest.approx(value, rel=1e-4)


MODEL = GPT(TINY)


def write_changed(path, changes=(), **metadata):
    """Write a file of an autoencoder of `MODEL` with other tensors or metadata, and return its path."""
    autoencoder = SparseAutoencoder(MODEL.config.embedding_dim, 12, 3)
    autoencoder.save(path, 1)
    stored, fields = read_tensors(path)
    tensors = {**{name: np.array(tensor.read()) for name, tensor in stored.items()}, **dict(changes)}
    shapes = {name: array.shape for name, array in tensors.items()}
    with path.open("wb") as file:
        write_tensors(file, shapes, tensors.items(), "F32", {**fields, **metadata})
    return path


@pytest.mark.parametrize("kind", ["topk", "jumprelu"])
def test_file_restores_the_autoencoder(kind, tmp_path) -> None:
    rows = collect_stream(MODEL, TEXTS, 1)
    autoencoder = train_autoencoder(rows, 12, 3, kind, TrainingOptions(n_steps=3))
    autoencoder.save(tmp_path / "a.safetensors", 1)
    loaded, layer = SparseAutoencoder.load(tmp_path / "a.safetensors", MODEL)
    assert layer == 1 and (loaded.k, loaded.kind) == (3, kind)
    np.testing.assert_array_equal(loaded.activations(rows), autoencoder.activations(rows))


@pytest.mark.parametrize(
    ("changes", "metadata", "message"),
    [
        ((), {"layer": "2"}, "after one of 2 blocks"),
        ((), {"layer": "-1"}, "after one of 2 blocks"),
        ((), {"k": "13"}, "k of at most 12"),
        ((), {"k": "many"}, "with k and layer"),
        ((), {"kind": "relu"}, "topk or jumprelu"),
        ({"mean": np.zeros(3, np.float32)}, {}, "expected an autoencoder of 8 channels"),
        ({"log_thresholds": np.zeros(5, np.float32)}, {}, "expected an autoencoder of 8 channels"),
        ({"scale": np.full(1, np.nan, np.float32)}, {}, "expected finite values"),
    ],
)
def test_wrong_files_are_rejected(changes, metadata, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAutoencoder.load(write_changed(tmp_path / "a.safetensors", changes, **metadata), MODEL)


ROWS = np.random.default_rng(0).standard_normal((9, 4))


def test_threshold_autoencoders_ignore_k() -> None:
    autoencoder = train_autoencoder(ROWS, 8, kind="jumprelu", options=TrainingOptions(n_steps=2))
    assert autoencoder.activations(ROWS).shape == (9, 8)


test_invalid_arguments = bad_input(
    {
        "kind": (lambda: SparseAutoencoder(4, 8, kind="relu"), "topk or jumprelu.*'relu'"),
        "k": (lambda: SparseAutoencoder(4, 8, k=9), "k of at most 8"),
        "rate": (
            lambda: train_autoencoder(ROWS, 8, 2, options=TrainingOptions(learning_rate=-1.0)),
            "rate above 0.*-1",
        ),
        "rows": (lambda: train_autoencoder(np.ones(4), 8), r"matrix.*shape \(4,\)"),
        "nan": (lambda: train_autoencoder(np.full((4, 4), np.nan), 8, 2), "finite"),
        "no texts": (lambda: collect_stream(MODEL, [], 0), "at least one text"),
        "one token": (lambda: collect_stream(MODEL, [[1]], 0), "two tokens"),
        "layer": (lambda: collect_stream(MODEL, TEXTS, 2), "layer from 0 to 1"),
    }
)


@pytest.mark.parametrize("kind", ["topk", "jumprelu"])
def test_command_prints_draws_and_writes(kind, tmp_path) -> None:
    pytest.importorskip("jinja2")
    folder = write_folder(tmp_path / "a <b>")
    (tmp_path / "text.txt").write_text(TEXT.replace("quick", "<quick>"))
    words = ("features", folder, "text.txt", "--kind", kind, "--length", "16", "--tokens", "400", "--steps", "40")
    words = (*words, "--n-features", "40", *["--active", "4"] * (kind == "topk"), "--top", "5")
    words = (*words, "--page", "a.html", "--save", "a.safetensors", "--out", "a.png")
    out = good(run_here(main, "tricycle inspect", words, tmp_path))
    assert out.startswith("layer 1, 40 features, ") and "recovered\n" in out
    assert out.splitlines()[4].split() == ["feature", "tokens", "largest", "strongest", "text"]
    page = (tmp_path / "a.html").read_text()
    assert "Features of a &lt;b&gt;" in page and "<mark>" in page and "<quick>" not in page
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert read_tensors(tmp_path / "a.safetensors")[0]["decoder.weights"].shape == (40, 32)
