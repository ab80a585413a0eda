"""Ten-fold cross validation of every model, and whether the words that they look at matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments import classification as shared
from experiments.classification import MODELS, Outcome, Parts, Predicted, Problem, Recipe, Runs
from tricycle.sequences.classifiers import Classifier

PLACES = 6  # a stream of random numbers, beside those of classification.py
TOGETHER = "all together"
BAYES = {"naive Bayes, words": 1, "naive Bayes, words and pairs": 2}  # up to so many words in a row

# Settled on validation sentences of the first folds; the README says what was tried.
RECIPES = {
    "convolution": Recipe(embedding=128, size=100, epochs=6),
    "recurrent": Recipe(embedding=128, size=64, inner_dropout=0.3, epochs=4),
    "Transformer": Recipe(embedding=64, size=2, inner_dropout=0.3, token_dropout=0.1, epochs=6),
}


@dataclass(frozen=True)
class Settings:
    """What a run does."""

    models: tuple[str, ...] = tuple(MODELS)
    """which models, by the names in the table"""
    folds: int = 10
    """how many parts the sentences are dealt into"""
    tested: int = 10
    """how many of the parts to be tested on; for each, every model is trained anew"""
    epochs: int = 0
    """passes over the training sentences; 0 for as many as each model's recipe says"""
    sentences: int = 5331
    """of each class, at most"""
    shown: int = 15
    """sentences on the page, of each class: so many that all models have right, as many where they differ, all wrong"""
    seed: int = 0
    """decides folds, first weights and orders"""
    quick: bool = False
    """within three minutes: two parts to be tested on, three epochs"""
    output: Path = Path("runs/sentiment")
    """where results.json, the pictures and looked_at.html are left"""


def run(problem: Problem, settings: Settings) -> tuple[Runs, Outcome]:
    """All trainings: a record for each model and fold, and all predictions."""
    runs: Runs = []
    folds: list[tuple[Parts, dict[str, Predicted]]] = []
    for fold in range(settings.tested):
        parts = shared.split(problem, settings.folds, fold, settings.seed)
        said: dict[str, Predicted] = {}
        for name in settings.models:
            recipe = replace(RECIPES[name], epochs=settings.epochs or RECIPES[name].epochs)
            model, said[name], record = shared.one_fold(problem, parts, name, recipe, (settings.seed, fold))
            runs.append({**record, **changed(model, parts, said[name], (settings.seed, fold))})
        others = {TOGETHER: shared.mean_logits(said)} if len(said) > 1 else {}
        others |= {name: shared.naive_bayes(problem, parts, most) for name, most in BAYES.items()}
        for name, logits in others.items():
            runs.append({"model": name, "fold": fold, "test": shared.judge(logits, parts.test.labels)[1]})
        folds.append((parts, said))
    return runs, shared.together(problem, folds)


def changed(model: Classifier, parts: Parts, predicted: Predicted, key: tuple[int, ...]) -> dict[str, float]:
    """How often another answer comes where one word is unknown: the one most looked at, the least, one at random."""
    answers, generator = predicted.logits.argmax(axis=1), np.random.default_rng((PLACES, *key))
    places = {
        "most": [int(row.argmax()) for row in predicted.weights],
        "random": [int(generator.integers(len(row))) for row in predicted.weights],
        "least": [int(row.argmin()) for row in predicted.weights],
    }
    hidden = {what: shared.hide(parts.test.sequences, places_of) for what, places_of in places.items()}
    said = {what: shared.predict(model, sequences).logits.argmax(axis=1) for what, sequences in hidden.items()}
    return {what: float((other != answers).mean()) for what, other in said.items()}
