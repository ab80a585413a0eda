"""The surnames as a classification problem.

The files repeat themselves: 18,012 different pairs of a name and a language stand in 20,050 lines, and 470 names stand
in several languages. Here each pair comes once, and all pairs of one name are in the same part of the data, so that no
tested name was ever learnt.
"""

import unicodedata
from collections import Counter

import numpy as np

from experiments.shared.classification import Problem
from tricycle_datasets.names import LANGUAGES, load_names

BEGIN, END = "^", "$"  # no name has them


def letters(name: str) -> list[str]:
    """Return the lower-case characters of a name between start and end marks."""
    return [BEGIN, *unicodedata.normalize("NFC", name).lower(), END]


def load(repeated: bool, most: int) -> Problem:
    """Load the names as a classification problem.

    Args:
        repeated: every line of the files is a text of its own instead, to be learnt or tested wherever it falls.
        most: of each language the first so many lines.
    """
    pairs = [(name, label) for label, language in enumerate(LANGUAGES) for name in load_names(language)[:most]]
    if not repeated:
        pairs = list(dict.fromkeys(pairs))
    tokens, labels = [letters(name) for name, _ in pairs], np.array([label for _, label in pairs])
    groups = np.unique(["".join(name) for name in tokens], return_inverse=True)[1]
    return Problem(tokens, labels, LANGUAGES, np.arange(len(pairs)) if repeated else groups)


def ceiling(problem: Problem, where: np.ndarray) -> float:
    """Return the highest possible accuracy, if each name gets one answer."""
    most: dict[str, int] = {}
    for (name, _), count in Counter(("".join(problem.tokens[i]), problem.labels[i]) for i in where).items():
        most[name] = max(most.get(name, 0), count)
    return sum(most.values()) / len(where)
