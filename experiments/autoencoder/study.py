"""Train the autoencoders and measure them. Each random number comes from a named stream, so runs are reproducible.

Shapes: N images, Z size of the code.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.autoencoder.data import Data, Part
from experiments.autoencoder.models import PCA, LinearFilter, new_model
from experiments.shared.program import check_choices, check_fractions, check_minimum, flag, words
from experiments.shared.training import stream, train_best
from tricycle.layers import Dense
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.sequences.autoencoders import Autoencoder, VariationalAutoencoder
from tricycle.tensor import Tensor, no_grad
from tricycle.training import train_on_batch

TRAINING, LABELS, NOISE, DRAWING, BOUND = range(1, 6)  # streams that share no number
KINDS = ("dense", "convolutional")
CHUNK = 1000  # images that go through a model at once when it is measured
DECAYS = (0.0, 0.3, 3.0)  # weight decays that a classifier is tried with
CLASSIFIER_STEPS, CLASSIFIER_RATE, CLASSIFIER_BATCH = 400, 0.01, 512
BOUND_DRAWS = 16  # codes of an image over which the bound is averaged
NEIGHBOURS = 3  # how far the neighbourhood of an image reaches
MOST_COMPARED = 3000  # images whose distances to each other are taken


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the autoencoder study."""

    data: str = "digits"  # "digits" (8 x 8, comes with scikit-learn) or "mnist" (28 x 28, downloaded)
    code_sizes: tuple[int, ...] = (2, 4, 8, 16, 32)  # the code sizes, in increasing order
    noises: tuple[float, ...] = (0.25, 0.5)  # standard deviations of the noise in denoising; ink is 1 and paper 0
    deviations: tuple[float, ...] = (0.1, 0.15, 0.3)
    """the output standard deviations of variational autoencoders"""
    variational_size: int = 16  # the code size of variational autoencoders and their baselines
    denoising_size: int = 32  # the code size for denoising
    few_labels: int = 100  # labels for a classifier on frozen codes, balanced over digits; another gets all labels
    seeds: int = 3  # trainings, each with other initial weights
    steps: int = 2500  # updates of a training
    batch_size: int = 64  # images of an update
    learning_rate: float = 0.01  # at its peak; it falls to 0 along half a cosine
    quick: bool = False  # a smaller study of at most three minutes
    output: Path = Path("runs/autoencoder")  # where results.json and the plots are written


QUICK: dict[str, Any] = {
    "code_sizes": (2, 8, 32),
    "noises": (0.5,),
    "deviations": (0.1, 0.2),
    "variational_size": 8,
    "seeds": 1,
    "steps": 500,
}
MOST = 63  # numbers in a code: a small digit has 64 pixels


def check(settings: Settings) -> None:
    """Raise ValueError for unknown data, counts or sizes out of range, or a learning rate that is no fraction."""
    check_choices(settings, data=("digits", "mnist"))
    check_minimum(settings, seeds=1, steps=1, batch_size=1, few_labels=10, denoising_size=1, variational_size=2)
    for name, most in (("code_sizes", MOST), ("noises", np.inf), ("deviations", np.inf)):
        values = getattr(settings, name)
        if not values or min(values) <= 0 or max(values) > most:
            expected = f"numbers from 1 to {most}" if most == MOST else "numbers above 0"
            raise ValueError(f"expected {flag(name)} to be {expected}, got {words(values)}")
    for name in ("variational_size", "denoising_size"):
        if getattr(settings, name) > MOST:
            raise ValueError(f"expected {flag(name)} to be at most {MOST}, got {getattr(settings, name)}")
    check_fractions(settings, "learning_rate")


Measures = dict[str, Any]
ImageFn = Callable[[np.ndarray], np.ndarray]  # images to images


def in_chunks(function: Callable[[np.ndarray], Any], images: np.ndarray) -> np.ndarray:
    """Call a function of images to a Tensor in chunks, without gradients, and return the concatenated array."""
    with no_grad():
        return np.concatenate([function(images[i : i + CHUNK]).array for i in range(0, len(images), CHUNK)])


def encode(model: Autoencoder, images: np.ndarray) -> np.ndarray:
    """Return the codes (N, Z) of images, in chunks; the model stays in evaluation mode."""
    model.eval()
    return in_chunks(model.encode, images)


def reconstruct(model: Autoencoder, images: np.ndarray) -> np.ndarray:
    """Return the reconstructions of images, in chunks; the model stays in evaluation mode."""
    return in_chunks(model.eval(), images)


# -------------------------------------------------------------------- training
def train(model: Autoencoder, data: Data, settings: Settings, seed: int, name: str, noise: float = 0.0) -> Autoencoder:
    """Train an autoencoder in place, and return it with the weights of the lowest validation loss.

    Args:
        noise: standard deviation of what is added to an image, anew each time; the clean one is to come out.
    """
    generator, images = stream(TRAINING, seed, 1), data.train.images
    noisy = add_noise(data.validation.images, noise, stream(NOISE, 0))

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            clean = images[generator.integers(0, len(images), settings.batch_size)]
            yield add_noise(clean, noise, generator), clean

    batch_loss = lambda batch, factor: model.loss(*batch) * factor
    validate = lambda: float(model.loss(noisy, data.validation.images))
    title = f"seed {seed}, {name}"
    return train_best(model, batch_loss, batches(), settings.steps, settings.learning_rate, validate, title)


def add_noise(images: np.ndarray, deviation: float, generator: np.random.Generator) -> np.ndarray:
    """Return images plus normal noise, not clipped to [0, 1]; the same array if `deviation` is 0."""
    if not deviation:
        return images
    return images + np.float32(deviation) * generator.standard_normal(images.shape, dtype=np.float32)


# -------------------------------------------------------------------- measures
def unexplained_variance(made: np.ndarray, images: np.ndarray, data: Data) -> float:
    """Return the squared error relative to that of the mean training image; predictions are clipped to [0, 1]."""
    around = ((images - data.train.images.mean(axis=0)) ** 2).mean()
    return float(((made.clip(0, 1) - images) ** 2).mean() / around)


def linear_probe_accuracy(train_part: tuple, validation_part: tuple, test_part: tuple, seed: int) -> float:
    """Return the test accuracy, 0 to 1, of a linear classifier on features; validation data chooses its decay.

    Args:
        train_part, validation_part, test_part: features (N, Z) and labels (N,).
    """
    mean, deviation = train_part[0].mean(axis=0), train_part[0].std(axis=0) + 1e-6
    x, validation_x, test_x = (
        ((features - mean) / deviation).astype(np.float32) for features, _ in (train_part, validation_part, test_part)
    )
    labels, tried = train_part[1], []
    for decay in DECAYS:
        generator = stream(TRAINING, seed, 2)
        layer = Dense(x.shape[1], 10, generator=generator)
        optimiser = AdamW(WarmupCosine(CLASSIFIER_RATE, 0, 0, CLASSIFIER_STEPS), weight_decay=decay)

        def batch_loss(rows: Any, factor: Any, layer: Dense = layer) -> Tensor:
            return CrossEntropy()(labels[rows], layer(x[rows]), factor)

        for _ in range(CLASSIFIER_STEPS):
            rows = generator.permutation(len(x))[:CLASSIFIER_BATCH] if len(x) > CLASSIFIER_BATCH else slice(None)
            train_on_batch(layer, optimiser, batch_loss, rows)
        with layer.evaluating():
            cost = float(CrossEntropy()(validation_part[1], layer(validation_x)))
            right = float((layer(test_x).array.argmax(axis=1) == test_part[1]).mean())
        tried.append((cost, right))
    return min(tried)[1]


def balanced_subset(part: Part, n: int, seed: int) -> np.ndarray:
    """Return the indices of n // 10 random images of each digit, ordered by digit."""
    generator = stream(LABELS, seed)
    rows = [generator.permutation(np.flatnonzero(part.labels == digit))[: n // 10] for digit in range(10)]
    return np.concatenate(rows)


def negative_elbo(model: VariationalAutoencoder, images: np.ndarray) -> tuple[float, float]:
    """Return (mean negative evidence lower bound, its KL divergence) in nats per image.

    Codes are drawn, also of a model that is not training, and the constant of the normal distribution is counted, so
    that models with another deviation, and PCA, can be compared.
    """
    generator, n_pixels = stream(BOUND), math.prod(images.shape[1:])
    mean, log_variance = (in_chunks(lambda x, i=i: model.posterior(x)[i], images) for i in (0, 1))
    divergence = 0.5 * (mean**2 + np.exp(log_variance) - log_variance - 1).sum(axis=1).mean()
    errors = []
    for _ in range(BOUND_DRAWS):
        codes = mean + np.exp(log_variance / 2) * generator.standard_normal(mean.shape, dtype=np.float32)
        made = in_chunks(model.decode, codes)
        errors.append(((made - images) ** 2).sum() / len(images))
    constant = n_pixels * math.log(model.output_std * math.sqrt(2 * math.pi))
    return float(np.mean(errors) / (2 * model.output_std**2) + constant + divergence), float(divergence)


def precision_and_recall(real: np.ndarray, drawn: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Return (fraction of `drawn` near `real`, of `others` near `drawn`) in pixels (Kynkäänniemi et al. 2019).

    An image is among a set if it is no further from one of them than that one from its third neighbour in the set.

    Args:
        real: images whose set the drawn ones should be among: the share that is.
        others: further real images, of which a share is among the drawn ones.
    """
    real, drawn, others = (x.reshape(len(x), -1)[:MOST_COMPARED].astype(float) for x in (real, drawn, others))
    share = lambda x, images: float((distances(x, images) <= neighbor_radius(images)).any(axis=1).mean())
    return share(drawn, real), share(others, drawn)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the squared Euclidean distances (len(a), len(b)) between the rows of a and of b."""
    return ((a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T).clip(0)


def neighbor_radius(images: np.ndarray) -> np.ndarray:
    """Return the squared distance (N,) of each row of images (N, P) to its third nearest neighbor."""
    return np.sort(distances(images, images), axis=1)[:, NEIGHBOURS]


# -------------------------------------------------------------------- the questions
class Study:
    """The models of one seed, each trained when first needed, and their measurements.

    Args:
        part: the part to measure on; "validation" to choose settings.
    """

    def __init__(self, data: Data, settings: Settings, seed: int, part: str = "test") -> None:
        self.data, self.settings, self.seed = data, settings, seed
        self.test_part: Part = getattr(data, part)
        self.models: dict[tuple, Any] = {}  # cached models and other results

    def get_trained(self, kind: str, size: int, noise: float = 0.0, deviation: float | None = None) -> Autoencoder:
        """Return an autoencoder, trained at the first call and cached; variational with output std `deviation`."""
        key = kind, size, noise, deviation
        if key not in self.models:
            model = new_model(kind, self.data.shape, size, stream(TRAINING, self.seed, 0), deviation)
            name = f"{kind} {size}" + (f", noise {noise:g}" if noise else "")
            name += f", variational {deviation:g}" if deviation else ""
            self.models[key] = train(model, self.data, self.settings, self.seed, name, noise)
        return self.models[key]

    def pca(self, size: int) -> PCA:
        """Return the PCA of this code size, fitted to the training images at the first call and cached."""
        key = ("PCA", size)
        if key not in self.models:
            self.models[key] = PCA(self.data.train.images, size)
        return self.models[key]

    def reconstructors(self, size: int) -> dict[str, ImageFn]:
        """Return {"PCA", "dense", "convolutional": image function}; PCA is fitted now, the others train when called."""
        trained = {kind: lambda images, kind=kind: reconstruct(self.get_trained(kind, size), images) for kind in KINDS}
        return {"PCA": self.pca_reconstructor(size), **trained}

    def encoders(self, size: int) -> dict[str, ImageFn]:
        """Return {"PCA", "untrained", "dense", "convolutional": function from images to codes (N, size)}."""
        untrained = new_model("dense", self.data.shape, size, stream(TRAINING, self.seed, 0))
        trained = {kind: lambda images, kind=kind: encode(self.get_trained(kind, size), images) for kind in KINDS}
        return {"PCA": self.pca(size).encode, "untrained": partial(encode, untrained), **trained}

    # ---------------------------------------------------------------- how much is lost
    def reconstruction(self) -> Measures:
        """Return {model: [fraction of unexplained variance at each of settings.code_sizes]}."""
        sizes = self.settings.code_sizes
        made = {size: self.reconstructors(size) for size in sizes}
        return {
            name: [
                unexplained_variance(made[size][name](self.test_part.images), self.test_part.images, self.data)
                for size in sizes
            ]
            for name in made[sizes[0]]
        }

    # ---------------------------------------------------------------- noise
    def denoisers(self, noise: float) -> dict[str, ImageFn]:
        """Return {name: function that denoises images}; train missing autoencoders; validation picks the PCA."""
        size, train_images = self.settings.denoising_size, self.data.train.images
        clean = self.data.validation.images
        noisy = add_noise(clean, noise, stream(NOISE, 0))
        projections = [self.pca_reconstructor(n) for n in (*self.settings.code_sizes, 64) if n < clean[0].size]
        best = min(projections, key=lambda make: unexplained_variance(make(noisy), clean, self.data))
        return {
            "noisy image": lambda images: images,
            "PCA": best,
            "linear filter": LinearFilter(train_images, noise),
            "dense, trained without noise": self.reconstructors(size)["dense"],
            **{kind: partial(reconstruct, self.get_trained(kind, size, noise)) for kind in KINDS},
        }

    def pca_reconstructor(self, size: int) -> ImageFn:
        """Return a function that reconstructs images with PCA of this code size."""
        pca = self.pca(size)
        return lambda images: pca.decode(pca.encode(images))

    def denoising(self) -> Measures:
        """Return {method: [fraction of the clean images' unexplained variance at each of settings.noises]}."""
        shares: Measures = {}
        for noise in self.settings.noises:
            images = add_noise(self.test_part.images, noise, stream(NOISE, 1))
            for name, make in self.denoisers(noise).items():
                shares.setdefault(name, []).append(unexplained_variance(make(images), self.test_part.images, self.data))
        return shares

    # ---------------------------------------------------------------- codes as features
    def classification(self) -> Measures:
        """Return {features: [result of `accuracies` at each code size]}; "pixels" has only one entry."""
        accuracies: Measures = {"pixels": [self.accuracies(lambda images: images.reshape(len(images), -1))]}
        for size in self.settings.code_sizes:
            for name, make in self.encoders(size).items():
                accuracies.setdefault(name, []).append(self.accuracies(make))
        return accuracies

    def accuracies(self, make: ImageFn) -> dict[str, float]:
        """Return {"few", "all"}: test accuracies of a linear classifier on make(images), by number of labels."""
        train_part, validation_part, test_part = (
            (make(part.images), part.labels) for part in (self.data.train, self.data.validation, self.test_part)
        )
        rows = balanced_subset(self.data.train, self.settings.few_labels, self.seed)
        few = tuple(array[rows] for array in train_part)
        return {
            "few": linear_probe_accuracy(few, validation_part, test_part, self.seed),
            "all": linear_probe_accuracy(train_part, validation_part, test_part, self.seed),
        }

    # ---------------------------------------------------------------- new digits
    def best_output_std(self, kind: str) -> float:
        """Return the one of settings.deviations with the lowest negative ELBO on validation images."""
        size, images = self.settings.variational_size, self.data.validation.images
        return min(
            self.settings.deviations, key=lambda d: negative_elbo(self.get_trained(kind, size, 0.0, d), images)[0]
        )

    def variational_models(self) -> dict[str, VariationalAutoencoder]:
        """Return {"variational, KIND, DEVIATION": model}, each trained at the first call."""
        size = self.settings.variational_size
        return {
            f"variational, {kind}, {deviation:g}": self.get_trained(kind, size, 0.0, deviation)
            for kind in KINDS
            for deviation in self.settings.deviations
        }

    def generators(self) -> dict[str, Callable[[int, np.random.Generator], np.ndarray]]:
        """Return {name: function (n, generator) that generates images (n, height, width, 1)}."""
        size = self.settings.variational_size
        draws: dict[str, Any] = {"PCA": self.pca(size).draw}
        for kind in KINDS:
            draws[kind] = lambda n, generator, kind=kind: self.generate_from_normal_fit(kind, n, generator)
        codes = lambda n, generator: generator.standard_normal((n, size), dtype=np.float32)
        for name, model in self.variational_models().items():
            draws[name] = lambda n, generator, model=model: in_chunks(model.eval().decode, codes(n, generator))
        return draws

    def generate_from_normal_fit(self, kind: str, n: int, generator: np.random.Generator) -> np.ndarray:
        """Return n images that a plain autoencoder decodes from a normal fit of the training codes."""
        model = self.get_trained(kind, self.settings.variational_size)
        codes = encode(model, self.data.train.images)
        drawn = generator.multivariate_normal(codes.mean(axis=0), np.cov(codes.T), n)
        return in_chunks(model.decode, drawn.astype(np.float32))

    def variational(self) -> Measures:
        """Return by model, if defined, "bound", "validation" and "divergence" in nats, and the fraction "missed"."""
        test_part, size = self.test_part.images, self.settings.variational_size
        pca, missed = self.pca(size), lambda made: unexplained_variance(made, test_part, self.data)
        measures: Measures = {
            "PCA": {
                "bound": pca.negative_log_likelihood(test_part),
                "missed": missed(pca.decode(pca.encode(test_part))),
            }
        }
        for kind in KINDS:
            measures[kind] = {"missed": missed(reconstruct(self.get_trained(kind, size), test_part))}
        for name, model in self.variational_models().items():
            whole, divergence = negative_elbo(model, test_part)
            measures[name] = {
                "validation": negative_elbo(model, self.data.validation.images)[0],
                "bound": whole,
                "divergence": divergence,
                "missed": missed(reconstruct(model, test_part)),
            }
        return measures

    def drawing(self) -> Measures:
        """Return {model: (precision, recall)} of generated images, and of "real images" for comparison."""
        real, n = self.data.train.images, min(len(self.data.train.images), MOST_COMPARED)
        others = self.test_part.images
        measures = {
            "real images": (precision_and_recall(real, others, others)[0], precision_and_recall(real, real, others)[1])
        }
        for name, draw in self.generators().items():
            measures[name] = precision_and_recall(real, draw(n, stream(DRAWING, self.seed)).clip(0, 1), others)
        return measures

    def measure_all(self) -> Measures:
        """Return {"seed"} and the results of `reconstruction`, `denoising` and so on, by the method's name."""
        parts = self.reconstruction, self.denoising, self.classification, self.variational, self.drawing
        return {"seed": self.seed, **{part.__name__: part() for part in parts}}
