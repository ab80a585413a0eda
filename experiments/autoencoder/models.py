"""The autoencoders of the study, and the linear baselines PCA and Wiener filter in closed form.

Shapes: B or N images, (N, height, width, 1), P pixels, Z size of the code.
"""

import math

import numpy as np

from tricycle.layers import Sequential
from tricycle.sequences.autoencoders import Autoencoder, Reshape, VariationalAutoencoder


class PCA:
    """Principal component analysis of images: the linear code with the smallest squared error.

    With normal codes and noise of one variance it is a probabilistic model (Tipping and Bishop 1999), of which images
    have a likelihood and from which new ones can be drawn.

    Args:
        images: (N, height, width, 1) to fit to.
        code_size: Z.
    """

    def __init__(self, images: np.ndarray, code_size: int) -> None:
        from sklearn.decomposition import PCA as Fitted

        self.shape = images.shape[1:]
        self.fitted = Fitted(code_size, svd_solver="covariance_eigh").fit(flat(images))

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Return the float64 codes (N, Z) of images (N, height, width, 1)."""
        return self.fitted.transform(flat(images))

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the images (N, height, width, 1) of codes (N, Z)."""
        return self.fitted.inverse_transform(codes).reshape(-1, *self.shape)

    def draw(self, n: int, generator: np.random.Generator) -> np.ndarray:
        """Return n images (n, height, width, 1) drawn from the fitted normal distribution, without pixel noise."""
        deviations = np.sqrt((self.fitted.explained_variance_ - self.fitted.noise_variance_).clip(0))
        return self.decode(generator.standard_normal((n, len(deviations))) * deviations)

    def negative_log_likelihood(self, images: np.ndarray) -> float:
        """Return the mean of -log p(image), in nats."""
        return -float(self.fitted.score(flat(images)))


class LinearFilter:
    """The linear denoising filter with the smallest squared error (Wiener 1949).

    Args:
        images: (N, height, width, 1), clean ones to fit to.
        deviation: of the noise, which is known.
    """

    def __init__(self, images: np.ndarray, deviation: float) -> None:
        self.mean, covariance = moments(images)
        noise = deviation**2 * np.eye(len(covariance))
        self.weights = np.linalg.solve(covariance + noise, covariance)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return the best linear estimates of the clean images, in the shape of the noisy `images`."""
        return ((flat(images) - self.mean) @ self.weights + self.mean).reshape(images.shape)


def flat(images: np.ndarray) -> np.ndarray:
    """Return images (N, height, width, 1) as (N, P) in float64."""
    return images.reshape(len(images), -1).astype(float)


def moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (P,) and the covariance (P, P), divided by N, of images (N, height, width, 1)."""
    pixels = flat(images)
    return pixels.mean(axis=0), np.cov(pixels.T, bias=True)


# Hidden layers by the number of an image's pixels: of dense models their widths, of convolutional ones the channels.
WIDTHS = {64: (128, 64), 784: (256, 128)}
CHANNELS = {64: (16, 32), 784: (16, 32)}


def new_model(
    kind: str,
    shape: tuple[int, int, int],
    code_size: int,
    generator: np.random.Generator,
    deviation: float | None = None,
) -> Autoencoder:
    """Return a new autoencoder of images (64 or 784 pixels), variational if `deviation` is given.

    Args:
        kind: "dense" or "convolutional".
        deviation: of a variational one; a plain one unless given.
    """
    owner = Autoencoder if deviation is None else VariationalAutoencoder
    options = {} if deviation is None else {"output_std": deviation}
    n_pixels = math.prod(shape)
    if kind == "convolutional":
        model = owner.convolutional(shape, CHANNELS[n_pixels], code_size, generator=generator, **options)
    else:
        model = owner.dense((n_pixels, *WIDTHS[n_pixels], code_size), generator=generator, **options)
        model.encoder = Sequential(Reshape(n_pixels), model.encoder)
        model.decoder = Sequential(model.decoder, Reshape(*shape))
    return model
