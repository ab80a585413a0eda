"""The surnames as a classification problem.

The files contain duplicates: 20,050 lines have 18,012 different pairs of a name and a language, and 470 names occur in
several languages. Here each pair occurs once, and all pairs of one name are in the same part of the data, so that no
test name occurs in training.
"""

import unicodedata
from collections import Counter

import numpy as np

from experiments.shared.classification import Problem
from tricycle_datasets.names import LANGUAGES, load_names

BEGIN, END = "^", "$"  # no name has them


def letters(name: str) -> list[str]:
    """Return the lower-case NFC characters of a name as a list, between the marks "^" and "$"."""
    return [BEGIN, *unicodedata.normalize("NFC", name).lower(), END]


def load(repeated: bool, most: int) -> Problem:
    """Return a Problem of each language's first `most` surnames; unless `repeated`, pairs once, equal names grouped.

    The tokens of a text are its characters.

    Args:
        repeated: keep duplicates: each line of the files is a separate text, in a separate group.
        most: the number of lines that are read for each language, from the first.
    """
    pairs = [(name, label) for label, language in enumerate(LANGUAGES) for name in load_names(language)[:most]]
    if not repeated:
        pairs = list(dict.fromkeys(pairs))
    tokens, labels = [letters(name) for name, _ in pairs], np.array([label for _, label in pairs])
    groups = np.unique(["".join(name) for name in tokens], return_inverse=True)[1]
    return Problem(tokens, labels, LANGUAGES, np.arange(len(pairs)) if repeated else groups)


def ceiling(problem: Problem, where: np.ndarray) -> float:
    """Return the highest possible accuracy (0 to 1) on the texts `where` (indices), if each name gets one answer."""
    most: dict[str, int] = {}
    for (name, _), count in Counter(("".join(problem.tokens[i]), problem.labels[i]) for i in where).items():
        most[name] = max(most.get(name, 0), count)
    return sum(most.values()) / len(where)
