"""Sentences from film reviews and their words."""

from __future__ import annotations

import re

import numpy as np

from experiments.classification import Problem
from tricycle_datasets.rt_polarity import CLASSES, rt_polarity

# "n't" and what follows another apostrophe within a word ("'s") are words of their own, as are single marks.
WORD = re.compile(r"n't|(?<=\w)'\w+|\w+?(?=n't)|\w+|[^\w\s]", re.IGNORECASE)
LEAST = 2  # a word that comes once in training is unknown


def words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def gaps(text: str) -> list[str]:
    """What stands before each word, so that the two together are the text, but for capital letters."""
    spans = [match.span() for match in WORD.finditer(text)]
    ends = [0, *(end for _, end in spans)]
    return [text[end:start] for end, (start, _) in zip(ends, spans)]


def load(most: int) -> tuple[list[str], Problem]:
    """The texts, and what is asked of them; of each class the first `most`."""
    texts, labels = rt_polarity()
    chosen = [i for label in range(len(CLASSES)) for i in np.flatnonzero(np.array(labels) == label)[:most]]
    texts, kept = [texts[i] for i in chosen], np.array([labels[i] for i in chosen])
    # a sentence is a group, so that one that comes twice is never in two parts
    groups = np.unique(texts, return_inverse=True)[1]
    return texts, Problem([words(text) for text in texts], kept, CLASSES, groups, LEAST)
