"""The rt-polarity dataset: 5,331 positive and 5,331 negative sentences from film reviews (Pang and Lee 2005).

The sentences are in lower case. The labels are those of the reviews, so some sentences are labeled wrongly.
"""

from __future__ import annotations

from tricycle_datasets.download import fetch

_COMMIT = "a0d0e9742b3dc42194955e78858f7be93027c75e"
URL = f"https://raw.githubusercontent.com/dennybritz/cnn-text-classification-tf/{_COMMIT}/data/rt-polaritydata/{{name}}"
SHA256 = {
    "rt-polarity.neg": "2d11cfbc790f1cd96d78339f41ce53ced1efa83cd22d37d6788fa3fe3d17e2fd",
    "rt-polarity.pos": "4134882974a28d0c7b5151256f0e33a6169984ee7372c279e673f1114f475d58",
}
CLASSES = ("negative", "positive")


def load_rt_polarity() -> tuple[list[str], list[int]]:
    """Return film-review sentences and labels, all negative (0) before all positive (1); download if necessary.

    Raises:
        OSError: a file is missing and could not be downloaded; the message says where to put it.
        ValueError: a local file has another hash.
    """
    texts: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(SHA256):
        content = fetch(name, URL.format(name=name), SHA256[name], folder="rt-polarity").read_bytes()
        lines = content.decode("utf-8").removesuffix("\n").split("\n")  # a line may hold other line ends
        texts += [line.strip() for line in lines]
        labels += [label] * len(lines)
    return texts, labels
