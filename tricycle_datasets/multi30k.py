"""The Multi30k dataset: 29,000 image captions in English, German and French (Elliott et al. 2016, 2017).

Sentence i of one language is the translation of sentence i of the others. The license excludes commercial use.
"""

from __future__ import annotations

import gzip

from tricycle_datasets.download import fetch

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{name}"
LANGUAGES = {"en": "English", "de": "German", "fr": "French"}
SHA256 = {
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.fr.gz": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.fr.gz": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.fr.gz": "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90",
}
SPLITS = ("train", "val", "test_2016_flickr")


def load_multi30k(split: str, language: str) -> list[str]:
    """Return the stripped Multi30k sentences of a split and language, or ValueError; download them if necessary.

    Args:
        split: "train" (29,000 sentences), "val" (1,014) or "test_2016_flickr" (1,000).
        language: "en", "de" or "fr".

    Raises:
        OSError: the file is missing and could not be downloaded; the message says where to put it.
        ValueError: the split or language is unknown, or the local file has another hash.
    """
    if split not in SPLITS or language not in LANGUAGES:
        known = f"a split of {', '.join(SPLITS)} and a language of {', '.join(LANGUAGES)}"
        raise ValueError(f"multi30k: expected {known}, got {split!r} and {language!r}")
    name = f"{split}.{language}.gz"
    content = fetch(name, URL.format(name=name), SHA256[name], folder="multi30k").read_bytes()
    lines = gzip.decompress(content).decode("utf-8").removesuffix("\n").split("\n")  # a line may hold other line ends
    return [line.strip() for line in lines]
