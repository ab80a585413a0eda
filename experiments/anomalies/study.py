"""Run every method on one series for each seed, and measure how well it separates normal and abnormal windows.

Shapes: N windows, T samples of one.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.anomalies import methods
from experiments.anomalies.data import KINDS, SLOT, Series, labels_of, normal_series, series_with_events, windows_of
from experiments.anomalies.methods import Predictor
from experiments.shared.program import check_fractions, check_minimum
from experiments.shared.training import stream, train_best
from tricycle.sequences.autoencoders import Autoencoder, RecurrentAutoencoder

DATA, TRAINING = 1, 2  # streams that share no number
RATES = np.linspace(0, 0.3, 61)  # false-alarm rates of the stored curves; higher rates are of no use


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the anomaly study."""

    seeds: int = 3  # number of series; separate models are trained for each
    train_samples: int = 20_000  # of the normal series to train on
    validation_samples: int = 20_000  # of the normal series that chooses weights and thresholds
    each: int = 20  # events of each kind in the test series
    window: int = 64  # samples
    code_size: int = 8  # of PCA and of both autoencoders
    hidden_size: int = 48  # of the recurrent autoencoder
    steps: int = 1500  # updates of the recurrent autoencoder
    dense_steps: int = 4000  # updates of the dense one
    batch_size: int = 64  # windows of an update
    rate: float = 0.01  # learning rate of the recurrent autoencoder at its peak
    dense_rate: float = 0.003  # and of the dense one
    quantile: float = 0.99  # fraction of normal validation windows below the threshold
    quick: bool = False  # a smaller study of at most three minutes
    output: Path = Path("runs/anomalies")  # where results.json and the plots are written


QUICK: dict[str, Any] = {"seeds": 1, "each": 10, "steps": 600, "dense_steps": 2000}


def check(settings: Settings) -> None:
    """Raise ValueError for counts below their minima, a code or window too large, or fractions out of range."""
    check_minimum(
        settings, seeds=1, each=1, window=20, code_size=1, hidden_size=1, steps=1, dense_steps=1, batch_size=1
    )
    check_minimum(settings, train_samples=10 * settings.window, validation_samples=10 * settings.window)
    if settings.window > SLOT // 4:  # or too few windows between two events were normal
        raise ValueError(f"expected --window to be at most {SLOT // 4}, got {settings.window}")
    if 2 * settings.code_size >= settings.window:
        raise ValueError(f"expected --code-size below half of --window, got {settings.code_size}")
    check_fractions(settings, "rate", "dense_rate", "quantile")


class Windows(NamedTuple):
    """The windows of one series, split into training, validation and test.

    Attributes:
        train, validation, test: (N, T), in standard deviations from the mean of the training series.
        labels: (N,) of the test, as of `labels_of`.
        series: the test series, in the same units.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    labels: np.ndarray
    series: Series


def new_windows(settings: Settings, seed: int) -> Windows:
    """Return the Windows of new random series, standardized by the training series; `seed` determines them."""
    generator, size = stream(DATA, seed), settings.window
    train, validation = (
        normal_series(n, generator).values for n in (settings.train_samples, settings.validation_samples)
    )
    test = series_with_events(settings.each, generator)
    mean, deviation = train.mean(), train.std()
    test = test._replace(values=(test.values - mean) / deviation)
    parts = ((train - mean) / deviation, size // 8), ((validation - mean) / deviation, size // 4)
    first, second, third = (windows_of(values, size, stride) for values, stride in (*parts, (test.values, size // 4)))
    return Windows(first, second, third, labels_of(test, size, size // 4), test)


def fit_methods(windows: Windows, settings: Settings, seed: int) -> tuple[dict[str, Predictor], dict[str, float]]:
    """Fit every method; return ({name: function that predicts windows (N, T)}, {name: seconds to fit})."""
    train, size, code = windows.train, settings.window, settings.code_size

    def learned(model: Autoencoder, steps: int, rate: float, name: str) -> Predictor:
        generator = stream(TRAINING, seed, 1)
        x, validation = (methods.to_model_shape(model, part) for part in (train, windows.validation))
        batches = (x[generator.integers(0, len(x), settings.batch_size)] for _ in range(steps))
        batch_loss = lambda batch, factor: model.loss(batch) * factor
        validate = lambda: float(model.loss(validation))
        return methods.autoencoder_reconstruction(
            train_best(model, batch_loss, batches, steps, rate, validate, f"seed {seed}, {name}", 1.0)
        )

    dense = Autoencoder.dense((size, 64, 32, code), generator=stream(TRAINING, seed, 0))
    recurrent = RecurrentAutoencoder(1, settings.hidden_size, code, generator=stream(TRAINING, seed, 0))
    makers = {
        "mean": lambda: methods.mean(train),
        "moving average": lambda: methods.moving_average(train),
        "linear prediction": lambda: methods.linear_prediction(train),
        "PCA": lambda: methods.pca(train, code),
        "PCA, twice the code": lambda: methods.pca(train, 2 * code),
        "nearest window": lambda: methods.nearest(train),
        "dense autoencoder": lambda: learned(dense, settings.dense_steps, settings.dense_rate, "dense autoencoder"),
        "recurrent autoencoder": lambda: learned(recurrent, settings.steps, settings.rate, "recurrent autoencoder"),
    }
    expectations, seconds = {}, {}
    for name, make in makers.items():
        started = time.perf_counter()
        expectations[name] = make()
        seconds[name] = time.perf_counter() - started
    return expectations, seconds


# -------------------------------------------------------------------- measures
def scores(predict: Predictor, windows: np.ndarray) -> np.ndarray:
    """Return the mean squared prediction error of each window (N,)."""
    return ((windows - predict(windows)) ** 2).mean(axis=1)


def roc_area(abnormal: np.ndarray, normal: np.ndarray) -> float:
    """Return the ROC area of scores: the probability that an abnormal one is higher, ties counted half."""
    normal = np.sort(normal)
    below, up_to = (np.searchsorted(normal, abnormal, side) for side in ("left", "right"))
    return float((below + up_to).mean() / 2 / len(normal))


def roc_curve(abnormal: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Return the true-positive rate of scores (len(RATES),) at each false-positive rate in RATES."""
    thresholds = np.quantile(normal, 1 - RATES)
    return (abnormal[:, None] >= thresholds).mean(axis=0)


def measure(predict: Predictor, windows: Windows, quantile: float) -> dict[str, Any]:
    """Return "area", "curve", "found" by kind and for "all"; "false_alarms", "threshold" (of validation), "error".

    Returns:
        areas and curves by kind of event and of all windows with one; with the threshold for this fraction of normal
        validation windows, the share of events found by kind, and of false alarms among normal windows.
    """
    errors, labels, events = scores(predict, windows.test), windows.labels, windows.series.events
    normal, known = errors[labels == -1], scores(predict, windows.validation)
    threshold = float(np.quantile(known, quantile))
    groups = {kind: np.array([i for i, event in enumerate(events) if event[0] == kind]) for kind in KINDS}
    groups["all"] = np.arange(len(events))
    best = np.array([errors[labels == i].max() for i in range(len(events))])
    return {
        "area": {kind: roc_area(errors[np.isin(labels, group)], normal) for kind, group in groups.items()},
        "curve": {kind: roc_curve(errors[np.isin(labels, group)], normal).tolist() for kind, group in groups.items()},
        "found": {kind: float((best[group] > threshold).mean()) for kind, group in groups.items()},
        "false_alarms": float((normal > threshold).mean()),
        "threshold": threshold,
        "error": float(known.mean()),
    }
