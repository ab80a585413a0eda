"""Cross-validate every model, with the languages' own frequencies and with a uniform prior."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.names.data import ceiling
from experiments.shared import classification as shared
from experiments.shared.classification import FoldSettings, Outcome, Parts, Problem, Recipe
from experiments.shared.results import Runs

BAYES, N_LETTERS = "naive Bayes, runs of letters", 4
ALWAYS = "always the most frequent"

# Settled on the validation names of the first fold; the README says what was tried.
RECIPES = {
    "convolution": Recipe(
        embedding=32, size=128, widths=(2, 3, 4), dropout=0.3, learning_rate=2e-3, epochs=8, max_tokens=1024
    ),
    "recurrent": Recipe(embedding=32, size=96, dropout=0.3, learning_rate=3e-3, epochs=8, max_tokens=1024),
    "Transformer": Recipe(
        embedding=64, size=2, layers=2, dropout=0.1, inner_dropout=0.1, learning_rate=2e-3, epochs=8, max_tokens=1024
    ),
}


QUICK: dict[str, Any] = {"tested": 2, "epochs": 4}


@dataclass(frozen=True)
class Settings(FoldSettings):
    """The command-line settings of the surname study."""

    folds: int = 5  # the number of folds
    tested: int = 5  # the number of folds to test; every model is trained for each
    names: int = 10_000  # of each language, at most
    repeated: bool = False
    """treat every line of the files as a separate name: duplicates may be in training and test"""
    shown: int = 3
    """names on the page for each language: this many that all models have right, where they differ, all wrong"""
    output: Path = Path("runs/names")  # where results.json, the plots and pooling_weights.html are written


def run(problem: Problem, settings: Settings) -> tuple[Runs, Outcome]:
    """Cross-validate all models and baselines; return a record for each and each fold, and all predictions."""
    n_classes = len(problem.classes)
    prior_of = lambda parts: shared.log_prior(parts.training.labels, n_classes)

    def of_logits(logits: np.ndarray, parts: Parts) -> dict[str, Any]:
        measured = both(logits, parts.test.labels, prior_of(parts))
        return {**measured, "ceiling": ceiling(problem, parts.where[2])}

    def others(parts: Parts) -> dict[str, np.ndarray]:
        always = np.broadcast_to(prior_of(parts), (len(parts.test.labels), n_classes))
        return {BAYES: shared.naive_bayes(problem, parts, N_LETTERS), ALWAYS: always}

    of_model = lambda model, parts, predicted, key: of_logits(predicted.logits, parts)
    return shared.cross_validate(problem, settings, RECIPES, of_model, of_logits, others)


def both(logits: np.ndarray, labels: np.ndarray, prior: np.ndarray) -> dict[str, Any]:
    """Return `measures` of the argmax of logits ("plain"), and of logits minus the log `prior` ("even")."""
    return {
        kind: measures(confusion(labels, (logits - shift).argmax(axis=1), len(prior)))
        for kind, shift in (("plain", 0), ("even", prior))
    }


def confusion(labels: np.ndarray, answers: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the confusion matrix (K, K): the number of texts of each class (row) by answer (column)."""
    return np.bincount(labels * n_classes + answers, minlength=n_classes**2).reshape(n_classes, n_classes)


def measures(counts: np.ndarray) -> dict[str, Any]:
    """Return "accuracy", "balanced" (mean recall), macro "f1" of counts (true class, answer), over classes with texts.

    All are from 0 to 1. F1 = 2 right / (texts of the class + answers of it).
    """
    right, there = counts.diagonal(), counts.sum(axis=1)
    has_texts = there > 0
    recall = (right / np.maximum(there, 1))[has_texts]
    f1 = (2 * right / np.maximum(there + counts.sum(axis=0), 1))[has_texts]
    return {"accuracy": float(right.sum() / there.sum()), "balanced": float(recall.mean()), "f1": float(f1.mean())}


def confusions(problem: Problem, outcome: Outcome, name: str) -> dict[str, list[list[int]]]:
    """Return a model's confusion matrices over all tested texts, "plain" and "even" (uniform prior), as lists."""
    labels, logits = problem.labels[outcome.where], outcome.predicted[name].logits
    answers = {"plain": logits.argmax(axis=1), "even": (logits - outcome.prior).argmax(axis=1)}
    return {kind: confusion(labels, answer, len(problem.classes)).tolist() for kind, answer in answers.items()}
