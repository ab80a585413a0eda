"""Ten-fold cross-validation of every model, and the effect of replacing the words with the largest weights."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared import classification as shared
from experiments.shared.classification import FoldSettings, Outcome, Parts, Predicted, Problem, Recipe
from experiments.shared.results import Runs
from tricycle.sequences.classifiers import Classifier
from tricycle_datasets.rt_polarity import CLASSES, load_rt_polarity

# "n't" and what follows another apostrophe within a word ("'s") are words of their own, as are single marks.
WORD = re.compile(r"n't|(?<=\w)'\w+|\w+?(?=n't)|\w+|[^\w\s]", re.IGNORECASE)
LEAST = 2  # a word that comes once in training is unknown


def words(text: str) -> list[str]:
    """Return the lower-case words and punctuation marks of a text, in order; "n't" and "'s" are separate words."""
    return [word.lower() for word in WORD.findall(text)]


def gaps(text: str) -> list[str]:
    """Return the text before each word; words and gaps together give the text, except for letter case."""
    spans = [match.span() for match in WORD.finditer(text)]
    ends = [0, *(end for _, end in spans)]
    return [text[end:start] for end, (start, _) in zip(ends, spans)]


def load(most: int) -> tuple[list[str], Problem]:
    """Return the sentences, by class, and their Problem; of each class the first `most`; download if necessary."""
    texts, labels = load_rt_polarity()
    chosen = [i for label in range(len(CLASSES)) for i in np.flatnonzero(np.array(labels) == label)[:most]]
    texts, kept = [texts[i] for i in chosen], np.array([labels[i] for i in chosen])
    # a sentence is a group, so that one that comes twice is never in two parts
    groups = np.unique(texts, return_inverse=True)[1]
    return texts, Problem([words(text) for text in texts], kept, CLASSES, groups, LEAST)


PLACES = 6  # a stream of random numbers, beside those of classification.py
BAYES = {"naive Bayes, words": 1, "naive Bayes, words and pairs": 2}  # the longest n-gram, in words

# Settled on validation sentences of the first folds; the README says what was tried.
RECIPES = {
    "convolution": Recipe(embedding=128, size=100, epochs=6),
    "recurrent": Recipe(embedding=128, size=64, inner_dropout=0.3, epochs=4),
    "Transformer": Recipe(embedding=64, size=2, inner_dropout=0.3, token_dropout=0.1, epochs=6),
}
QUICK: dict[str, Any] = {"tested": 2, "epochs": 3}


@dataclass(frozen=True)
class Settings(FoldSettings):
    """The command-line settings of the sentiment study."""

    sentences: int = 5331  # of each class, at most
    output: Path = Path("runs/sentiment")  # where results.json, the plots and pooling_weights.html are written


def run(problem: Problem, settings: Settings) -> tuple[Runs, Outcome]:
    """Cross-validate all models and baselines; return a record for each and each fold, and all predictions."""
    right = lambda logits, parts: {"test": shared.loss_and_accuracy(logits, parts.test.labels)[1]}
    bayes = lambda parts: {name: shared.naive_bayes(problem, parts, most) for name, most in BAYES.items()}
    return shared.cross_validate(problem, settings, RECIPES, changed_answers, right, bayes)


def changed_answers(model: Classifier, parts: Parts, predicted: Predicted, key: tuple[int, ...]) -> dict[str, float]:
    """Return "most", "random", "least": the fraction of answers changed by masking the word of such weight."""
    answers, generator = predicted.logits.argmax(axis=1), np.random.default_rng((PLACES, *key))
    places = {
        "most": [int(row.argmax()) for row in predicted.weights],
        "random": [int(generator.integers(len(row))) for row in predicted.weights],
        "least": [int(row.argmin()) for row in predicted.weights],
    }
    masked = {kind: shared.mask_tokens(parts.test.sequences, places_of) for kind, places_of in places.items()}
    masked_answers = {
        kind: shared.predict(model, sequences).logits.argmax(axis=1) for kind, sequences in masked.items()
    }
    return {kind: float((changed != answers).mean()) for kind, changed in masked_answers.items()}
