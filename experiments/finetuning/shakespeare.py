"""Shakespeare's plays as text to continue, and the fraction of a generated text that is copied."""

import re
from functools import cache

from experiments.shared import texts

TENTHS = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}  # of the text, from its beginning to its end
TESTED = 20_000  # characters of the test's tenth that are looked at
OPENINGS = "JULIET:\n", "This morning the computer would not start, and", "My lord, I bring you news of"
RUN = 5  # consecutive words that also occur in the training text count as copied from this number on
OPENING_WORDS, N_OPENINGS = 24, 12


@cache
def plays() -> str:
    """Return Shakespeare's plays as one text, downloaded if necessary; cached."""
    return texts.plays().decode("utf-8")


def part(name: str) -> str:
    """Return the text of "train", "validation" or "test", cut at a line end."""
    text = plays()
    first, last = (_line_end(text, tenth * len(text) // 10) for tenth in TENTHS[name])
    return text[first:last]


def _line_end(text: str, place: int) -> int:
    """Return the index of the first beginning of a line at `place` or later, or the text's length."""
    return 0 if place == 0 else min(len(text), text.find("\n", place - 1) + 1 or len(text))


def openings(n: int = N_OPENINGS) -> list[tuple[str, str]]:
    """Return up to n (prompt of OPENING_WORDS words, continuation) pairs, evenly spaced in the test part."""
    speeches = [speech for speech in part("test").split("\n\n") if len(speech.split()) > 2 * OPENING_WORDS]
    chosen = speeches[:: max(1, len(speeches) // n)][:n]
    pairs = []
    for speech in chosen:
        end = [match.end() for match in re.finditer(r"\S+", speech)][OPENING_WORDS - 1]
        pairs.append((speech[:end], speech[end:]))
    return pairs


def n_grams(text: str) -> list[tuple[str, ...]]:
    """Return all runs of RUN consecutive lower-case words as tuples; [] for a shorter text."""
    words = re.findall(r"[a-z']+", text.lower())
    return [tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)]


@cache
def training_n_grams() -> frozenset[tuple[str, ...]]:
    """Return the set of all runs of RUN words in the training text; cached."""
    return frozenset(n_grams(part("train")))


def copied_fraction(texts: list[str]) -> float:
    """Return the fraction of runs of RUN words that occur in the training text; 0 if there are no runs."""
    rows = [row for text in texts for row in n_grams(text)]
    return sum(row in training_n_grams() for row in rows) / max(1, len(rows))
