"""Images of digits in fixed training, validation and test parts."""

from typing import NamedTuple

import numpy as np

from tricycle_datasets.mnist import load_mnist

HELD_OUT = 300  # of scikit-learn's 1,797 images for validation, and as many for the test
HELD_OUT_MNIST = 5_000  # of the 60,000 training images, the last; the test has files of its own


class Part(NamedTuple):
    """One part of a dataset: images (N, height, width, 1) and labels (N,)."""

    images: np.ndarray  # (N, height, width, 1), float32 from 0 (paper) to 1 (ink)
    labels: np.ndarray  # (N,), the digits


class Data(NamedTuple):
    """The training, validation and test parts."""

    train: Part
    validation: Part
    test: Part

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape (height, width, 1) of an image."""
        return self.train.images.shape[1:]


def load(name: str) -> Data:
    """Load "digits" (scikit-learn) or "mnist" (downloaded) in three fixed parts; ImportError or OSError if missing."""
    return _digits() if name == "digits" else _mnist()


def _digits() -> Data:
    """Return the 8 x 8 digits, 0 to 1, in parts that are the same in every run; ImportError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits and PCA come with scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))  # the parts are the same in every run
    everything = part(images[order].reshape(-1, 8, 8) / 16, labels[order])
    ends = len(order) - 2 * HELD_OUT, len(order) - HELD_OUT
    return Data(*(Part(*cut) for cut in zip(*(np.split(array, ends) for array in everything))))


def _mnist() -> Data:
    """Return MNIST (downloaded if necessary), 0 to 1; the last HELD_OUT_MNIST training images are for validation."""
    images, labels = load_mnist("train")
    known = part(images / np.float32(255), labels)
    test_images, test_labels = load_mnist("test")
    train, validation = (Part(*halves) for halves in zip(*(np.split(array, [-HELD_OUT_MNIST]) for array in known)))
    return Data(train, validation, part(test_images / np.float32(255), test_labels))


def part(images: np.ndarray, labels: np.ndarray) -> Part:
    """Return a Part: images (N, height, width) as float32 (N, height, width, 1), and labels (N,) as int64."""
    return Part(images.astype(np.float32)[..., None], labels.astype(np.int64))
