"""The methods: each predicts a window; the squared error of the prediction is the anomaly score.

All see normal windows only. Shapes: N windows, T samples of one, Z size of a code.
"""

from collections.abc import Callable

import numpy as np

from tricycle.sequences.autoencoders import Autoencoder, RecurrentAutoencoder
from tricycle.tensor import no_grad

Predictor = Callable[[np.ndarray], np.ndarray]  # windows (N, T) to what was to be expected, (N, T)
CHUNK = 500  # windows at once
AVERAGED = 33  # samples of a moving average: one more than a beat
PAST = 16  # samples from which a linear prediction is made


def mean(windows: np.ndarray) -> Predictor:
    """Return a function of windows (N, T) that predicts the mean of all training `windows` everywhere."""
    level = windows.mean()
    return lambda inputs: np.full(inputs.shape, level)


def moving_average(windows: np.ndarray) -> Predictor:
    """Return a function that predicts each sample of (N, T) by the mean of its neighbors; `windows` is ignored."""

    def predict(inputs: np.ndarray) -> np.ndarray:
        n, half = inputs.shape[1], AVERAGED // 2
        total = np.cumsum(np.pad(inputs, ((0, 0), (1, 0))), axis=1)
        first, last = np.clip(np.arange(n) - half, 0, n), np.clip(np.arange(n) + half + 1, 0, n)
        return (total[:, last] - total[:, first]) / (last - first)

    return predict


def linear_prediction(windows: np.ndarray) -> Predictor:
    """Fit by least squares; return a function that predicts a sample from the PAST before it, and copies the first."""

    def split(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        runs = np.lib.stride_tricks.sliding_window_view(inputs, PAST + 1, axis=1).reshape(-1, PAST + 1)
        return np.column_stack([runs[:, :-1], np.ones(len(runs))]), runs[:, -1]

    weights = np.linalg.lstsq(*split(windows), rcond=None)[0]

    def predict(inputs: np.ndarray) -> np.ndarray:
        made = (split(inputs)[0] @ weights).reshape(len(inputs), -1)
        return np.concatenate([inputs[:, :PAST], made], axis=1)

    return predict


def pca(windows: np.ndarray, code_size: int) -> Predictor:
    """Fit PCA; return a function that projects windows (N, T) onto the first `code_size` principal components."""
    middle = windows.mean(axis=0)
    directions = np.linalg.svd(windows - middle, full_matrices=False)[2][:code_size]
    return lambda inputs: (inputs - middle) @ directions.T @ directions + middle


def nearest(windows: np.ndarray) -> Predictor:
    """Return a function that predicts each window of (N, T) by the most similar training window."""
    squares = (windows**2).sum(axis=1)

    def predict(inputs: np.ndarray) -> np.ndarray:
        parts = [inputs[i : i + CHUNK] for i in range(0, len(inputs), CHUNK)]
        return np.concatenate([windows[(squares - 2 * part @ windows.T).argmin(axis=1)] for part in parts])

    return predict


def autoencoder_reconstruction(model: Autoencoder) -> Predictor:
    """Return a function that reconstructs windows (N, T) with a trained model, which it sets to evaluation mode."""

    def predict(inputs: np.ndarray) -> np.ndarray:
        x = to_model_shape(model, inputs)
        model.eval()
        with no_grad():
            made = np.concatenate([model(x[i : i + CHUNK]).array for i in range(0, len(x), CHUNK)])
        return made.reshape(inputs.shape)

    return predict


def to_model_shape(model: Autoencoder, windows: np.ndarray) -> np.ndarray:
    """Return windows (N, T) in float32 as a model takes them: (N, T, 1) if it is recurrent, else (N, T)."""
    x = windows.astype(np.float32)
    return x[..., None] if isinstance(model, RecurrentAutoencoder) else x
