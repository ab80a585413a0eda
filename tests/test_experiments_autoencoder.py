"""experiments/autoencoder: data, linear baselines, measures, and a small run."""

import gzip

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags

from experiments.autoencoder import data, report, study
from experiments.autoencoder.__main__ import main
from experiments.autoencoder.models import PCA, LinearFilter
from experiments.autoencoder.study import Settings, Study, negative_elbo, precision_and_recall, unexplained_variance
from experiments.shared.results import read
from experiments.shared.training import stream
from tricycle_datasets import mnist
from tricycle_datasets.download import file_sha256

pytest.importorskip("sklearn")
WORDS = (
    "--steps 12 --seeds 2 --code-sizes 2 4 --noises 0.5 --deviations 0.1 0.3 --variational-size 4 --denoising-size 4"
).split()
TINY = Settings(steps=12, code_sizes=(2, 4), noises=(0.5,), deviations=(0.1, 0.3), variational_size=4, denoising_size=4)


@pytest.fixture(scope="module")
def digits() -> data.Data:
    return data.load("digits")


@pytest.fixture(autouse=True)
def short_classifiers(monkeypatch):
    monkeypatch.setattr(study, "CLASSIFIER_STEPS", 40)


# -------------------------------------------------------------------- data
def test_digits_are_split_completely_and_reproducibly(digits):
    assert [part.images.shape for part in digits] == [(1197, 8, 8, 1), (300, 8, 8, 1), (300, 8, 8, 1)]
    for part in digits:
        assert part.images.dtype == np.float32 and part.images.min() == 0 and part.images.max() == 1
        assert np.bincount(part.labels, minlength=10).min() > 15
    together = np.concatenate([part.images for part in digits]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    order = lambda images: images[np.lexsort(images.T)]
    np.testing.assert_array_equal(order(together), order(load_digits().data.astype(np.float32) / 16))
    np.testing.assert_array_equal(data.load("digits").test.images, digits.test.images)


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def made_up(tmp_path, monkeypatch, rng):
    """A little MNIST in the place of the real one, some of it packed."""
    arrays, folder = {}, tmp_path / "mnist"
    folder.mkdir()
    for name in [name for name in mnist.SHA256 if not name.endswith(".gz")]:
        n = 50 if name.startswith("train") else 12
        shape, above = ((n,), 10) if "labels" in name else ((n, 28, 28), 256)
        arrays[name] = rng.integers(0, above, shape, np.uint8)
        content = idx(arrays[name])
        path = folder / (name if name.startswith("train") else f"{name}.gz")
        path.write_bytes(content if name.startswith("train") else gzip.compress(content))
        monkeypatch.setitem(mnist.SHA256, path.name, file_sha256(path))
    monkeypatch.setenv("TRICYCLE_DATA", str(tmp_path))
    return arrays, folder


def test_mnist_loads_plain_and_gzipped_files(made_up, monkeypatch):
    arrays, folder = made_up
    for split, begin in mnist.SPLITS.items():
        images, labels = mnist.load_mnist(split)
        np.testing.assert_array_equal(images, arrays[f"{begin}-images-idx3-ubyte"])
        np.testing.assert_array_equal(labels, arrays[f"{begin}-labels-idx1-ubyte"])
    monkeypatch.setattr(data, "HELD_OUT_MNIST", 10)
    loaded = data.load("mnist")
    assert [part.images.shape for part in loaded] == [(40, 28, 28, 1), (10, 28, 28, 1), (12, 28, 28, 1)]
    np.testing.assert_array_equal(loaded.validation.labels, arrays["train-labels-idx1-ubyte"][-10:])
    assert loaded.shape == (28, 28, 1)
    np.testing.assert_allclose(loaded.test.images[..., 0] * 255, arrays["t10k-images-idx3-ubyte"], atol=1e-4)
    (folder / "train-images-idx3-ubyte").write_bytes(b"another file")
    with pytest.raises(ValueError, match="SHA-256"):
        mnist.load_mnist("train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x0d\x01\0\0\0\x01\x07", "IDX file"),
        (b"\0\0\x08", "IDX file"),
        (b"\0\0\x08\x02\0\0\0\x02\0\0\0\x03\x01\x02", r"6 elements.*\(2, 3\).*got 2"),
    ],
)
def test_invalid_idx_files_and_splits_are_rejected(content, message):
    with pytest.raises(ValueError, match=message):
        mnist.read_idx(content)
    with pytest.raises(ValueError, match=r"split.*'validation'"):
        mnist.load_mnist("validation")


# -------------------------------------------------------------------- linear answers and measures
def test_pca_likelihood_and_samples_match_a_normal_distribution(digits):
    from scipy.stats import multivariate_normal

    pca = PCA(digits.train.images, 5)
    images = digits.test.images.reshape(300, -1).astype(float)
    mean, spread = pca.fitted.mean_, pca.fitted.get_covariance()
    assert pca.negative_log_likelihood(digits.test.images) == pytest.approx(
        -multivariate_normal(mean, spread).logpdf(images).mean()
    )
    drawn = pca.draw(20_000, np.random.default_rng(0)).reshape(20_000, -1)
    np.testing.assert_allclose(np.cov(drawn.T), spread - pca.fitted.noise_variance_ * np.eye(64), atol=0.02)
    made = pca.decode(pca.encode(digits.test.images))
    assert made.shape == (300, 8, 8, 1) and unexplained_variance(made, digits.test.images, digits) < 0.6


@pytest.mark.nightly
def test_linear_filter_matches_least_squares_denoising(digits, rng):
    clean = digits.train.images.repeat(40, axis=0)
    noisy = clean + 0.5 * rng.standard_normal(clean.shape)
    x, y = ((images - digits.train.images.mean(axis=0)).reshape(-1, 64) for images in (noisy, clean))
    regression = np.linalg.lstsq(x, y, rcond=None)[0]
    assert np.abs(LinearFilter(digits.train.images, 0.5).weights - regression).max() < 0.05
    assert unexplained_variance(LinearFilter(digits.train.images, 0.5)(noisy), clean, digits) < 0.55


def test_unexplained_variance_is_0_for_exact_and_1_for_mean_images(digits):
    images, mean = digits.test.images, digits.train.images.mean(axis=0)
    assert unexplained_variance(images, images, digits) == 0
    assert unexplained_variance(np.broadcast_to(mean, images.shape), images, digits) == pytest.approx(1, rel=1e-5)
    assert (
        unexplained_variance(images + 5 * (images == 1) - 3 * (images == 0), images, digits) == 0
    )  # cut to paper and ink


def test_negative_elbo_is_at_least_the_loss_and_repeats(digits):
    """Each draw of the code costs at least the loss at its mean, up to sampling error."""
    model = Study(digits, TINY, 0).get_trained("dense", 4, 0.0, 0.3)
    images = digits.test.images[:50]
    whole, divergence = negative_elbo(model, images)
    with model.evaluating():
        constant = 64 * np.log(0.3 * np.sqrt(2 * np.pi))
        assert whole > float(model.loss(images)) + constant - 0.5  # the mean of the code errs less than draws
    assert whole == negative_elbo(model, images)[0] and 0 < divergence < whole - constant


def test_precision_and_recall_of_known_distributions(rng):
    real, others = rng.standard_normal((300, 2)), rng.standard_normal((200, 2))
    precision, recall = precision_and_recall(real, rng.standard_normal((300, 2)), others)
    assert precision > 0.9 < recall
    assert precision_and_recall(real, real + 50, others) == (0, 0)
    narrow = precision_and_recall(real, 0.1 * rng.standard_normal((300, 2)), others)
    assert narrow[0] == 1 and narrow[1] < 0.2


def test_linear_probe_accuracy_of_separable_and_random_codes(digits, rng, monkeypatch):
    monkeypatch.setattr(study, "CLASSIFIER_STEPS", 100)
    noise = lambda part: rng.standard_normal((len(part.labels), 10))
    parts = [(np.eye(10)[part.labels] + 0.1 * noise(part), part.labels) for part in digits]
    assert study.linear_probe_accuracy(*parts, seed=0) > 0.95
    parts = [(noise(part), part.labels) for part in digits]
    assert study.linear_probe_accuracy(*parts, seed=0) < 0.2
    rows = study.balanced_subset(digits.train, 30, seed=0)
    assert (np.bincount(digits.train.labels[rows]) == 3).all() and len(set(rows)) == 30


# -------------------------------------------------------------------- training
@pytest.mark.nightly
def test_dense_autoencoder_beats_pca_and_training_repeats(digits):
    settings = Settings(steps=400, code_sizes=(2,))
    one = Study(digits, settings, 0, "validation")
    shares = one.reconstruction()
    assert shares["dense"][0] < shares["PCA"][0] - 0.1
    fresh = study.new_model("dense", digits.shape, 2, stream(study.TRAINING, 0, 0))
    again = study.train(fresh, digits, settings, 0, "")
    for name, array in again.state_dict().items():
        np.testing.assert_array_equal(array, one.get_trained("dense", 2).state_dict()[name])


# -------------------------------------------------------------------- the program
@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(tmp_path):
    out = run_study(main, *WORDS, "--output", tmp_path / "a run")
    pictures = ["between", "codes", "denoising", "drawn", "errors", "plane", "reconstruction"]
    check_files(tmp_path / "a run", ["results.json", *(f"{name}.png" for name in pictures)], 150)
    results = read(tmp_path / "a run" / "results.json")
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    one, other = (run["reconstruction"] for run in results["runs"])
    assert one["PCA"] == other["PCA"] and one["dense"] != other["dense"]
    check_tables(report.tables(results["runs"], results["settings"]), out)


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--data", "letters"], "--data.*got letters"),
    (["--seeds", "0"], "--seeds.*got 0"),
    (["--code-sizes", "2", "64"], "--code-sizes.*got 2 64"),
    (["--noises", "-1"], "--noises.*got -1"),
    (["--variational-size", "99"], "--variational-size.*got 99"),
    (["--learning-rate", "0"], "--learning-rate.*got 0"),
)
