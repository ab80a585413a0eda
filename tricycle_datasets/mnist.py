"""The MNIST dataset: 70,000 images of handwritten digits, 28 x 28 (LeCun, Cortes and Burges 1998)."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np

from tricycle_datasets.download import check_hash, fetch

URL = "https://storage.googleapis.com/cvdf-datasets/mnist/{name}"
SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
SPLITS = {"train": "train", "test": "t10k"}


def load_mnist(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return MNIST's read-only uint8 images (N, 28, 28), 255 for ink, and labels (N,); download them if necessary.

    Uncompressed files in `$TRICYCLE_DATA/mnist` are read too.

    Args:
        split: "train" (60,000 images) or "test" (10,000).

    Raises:
        OSError: a file is missing and could not be downloaded; the message says where to put it.
        ValueError: the split is unknown, or a local file has another hash.
    """
    if split not in SPLITS:
        raise ValueError(f"mnist: expected a split of {', '.join(SPLITS)}, got {split!r}")
    images, labels = (_content(f"{SPLITS[split]}-{what}-ubyte") for what in ("images-idx3", "labels-idx1"))
    return read_idx(images), read_idx(labels)


def _content(name: str) -> bytes:
    """Return a file's uncompressed content, from TRICYCLE_DATA or a download; ValueError for a wrong hash."""
    unpacked, packed = Path(os.environ.get("TRICYCLE_DATA") or "-", "mnist", name), f"{name}.gz"
    if unpacked.is_file():
        check_hash(unpacked, SHA256[name])
        return unpacked.read_bytes()
    return gzip.decompress(fetch(packed, URL.format(name=packed), SHA256[packed], folder="mnist").read_bytes())


def read_idx(content: bytes) -> np.ndarray:
    """Parse an IDX file with elements of one byte to a read-only uint8 array; raise ValueError for other content.

    The content is: two zeros, 8 for bytes, the number of axes, the sizes, and the elements.
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise ValueError(f"read_idx: expected an IDX file of bytes, got one that begins with {content[:4]!r}")
    shape = tuple(np.frombuffer(content, ">u4", content[3], offset=4).tolist())
    elements = np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
    if elements.size != np.prod(shape):
        raise ValueError(f"read_idx: expected {np.prod(shape)} elements for shape {shape}, got {elements.size}")
    return elements.reshape(shape)
