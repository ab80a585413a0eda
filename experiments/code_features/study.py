"""Train a small GPT on source code and sparse autoencoders on its stream, and compare features with simple rules.

Shapes: R rows (tokens), C channels, F features, K rules.
"""

import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.code_features.rules import RULES, label_tokens
from experiments.shared.program import check_minimum
from experiments.shared.results import rounded
from experiments.shared.texts import python_files, python_root
from tricycle.configs import GPTConfig
from tricycle.devices import to_cpu
from tricycle.evaluation import evaluate
from tricycle.models import GPT
from tricycle.training_state import new_state, train_step
from tricycle_datasets.corpus import Corpus, is_held_out
from tricycle_datasets.python_code import PythonCode
from tricycle_lab.recorded_run import record_run
from tricycle_lab.sparse_autoencoder import (
    SparseAutoencoder,
    TrainingOptions,
    collect_stream,
    score_autoencoder,
    train_autoencoder,
    typical_tokens,
)

VOCAB_SIZE = 1024
LENGTH = 128  # tokens of a text
FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # of the largest activation, above which a feature is active
SEARCHED, TESTED = 0, 1  # halves of the held-out files
N_CONTEXTS = 3  # strongest texts of a feature


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study of features of source code."""

    steps: int = 1500  # updates of the model
    width: int = 96  # of the residual stream
    layers: int = 3  # of the model
    texts: int = 160  # of training code whose stream the autoencoders are trained on
    files: int = 30  # held-out files, in whose first half features are selected; in the others they are tested
    features: int = 512  # of an autoencoder
    active: int = 12  # features of a token with TopK
    sparsity: float = 0.01  # factor of the number of active features in the loss with JumpReLU
    updates: int = 1500  # of an autoencoder
    quick: bool = False  # a smaller study of at most three minutes
    output: Path = Path("runs/code_features")  # the output folder


QUICK: dict[str, Any] = {
    "steps": 100,
    "width": 48,
    "layers": 2,
    "texts": 24,
    "files": 6,
    "features": 128,
    "updates": 150,
}


def check(settings: Settings) -> None:
    """Raise ValueError for a count below its minimum, more active than all features, or a sparsity out of range."""
    check_minimum(settings, steps=1, width=8, layers=2, texts=2, files=2, features=8, active=1, updates=1)
    if settings.active > settings.features:
        raise ValueError(f"expected --active to be at most {settings.features}, the features, got {settings.active}")
    if not 0 < settings.sparsity < 100:
        raise ValueError(f"expected --sparsity above 0 and below 100, got {settings.sparsity}")


def train_model(corpus: Corpus, settings: Settings) -> GPT:
    """Train a GPT on the standard library's code, with a progress bar; return it in evaluation mode."""
    config = GPTConfig(
        vocab_size=VOCAB_SIZE,
        context_window=LENGTH,
        embedding_dim=settings.width,
        n_heads=4,
        n_layers=settings.layers,
        positions="rotary",
        norm="rms_norm",
        bias=False,
        optimiser="muon",
        batch_size=8,
        steps=settings.steps,
        max_learning_rate=8e-3,
        min_learning_rate=8e-4,
        matrix_rate=1.25,
        warmup_steps=50,
    )
    state = new_state(config, corpus.train)
    for _ in tqdm(range(config.steps), desc="model", unit="step"):
        train_step(state)
    state.model.eval()
    return state.model


# -------------------------------------------------------------------- held-out tokens
class Tokens(NamedTuple):
    """Tokens of half of the held-out files: their streams and labels, and the text around each.

    Attributes:
        stream: (R, C). labels: (R, K) booleans.
        contexts: for each row the text before it, its own, and the text after it.
        rows: token ids of the texts.
    """

    stream: np.ndarray
    labels: np.ndarray
    contexts: list[tuple[str, str, str]]
    rows: list[list[int]]


def read_tokens(model: GPT, corpus: Corpus, layer: int, names: list[str]) -> Tokens:
    """Return the Tokens of files, each read in up to 8 texts of LENGTH tokens, without tokens of untypical norm."""
    streams, labels, contexts, rows = [], [], [], []
    for name in names:
        text = (python_root() / name).read_text(encoding="ascii")
        ids = [int(token) for token in corpus.tokeniser.encode(text)]
        pieces = [corpus.tokeniser.decode([token]) for token in ids]
        found = label_tokens(text, pieces)
        for start in range(0, min(len(ids) // LENGTH, 8) * LENGTH, LENGTH):
            rows.append(ids[start : start + LENGTH])
            stream = to_cpu(record_run(model, rows[-1]).stream[layer + 1][0])
            chosen = typical_tokens(stream)
            streams.append(stream[chosen])
            labels.append(found[start + chosen])
            for i in start + chosen:
                contexts.append(("".join(pieces[max(0, i - 6) : i]), pieces[i], "".join(pieces[i + 1 : i + 4])))
    return Tokens(np.concatenate(streams), np.concatenate(labels), contexts, rows)


def held_out_files(n: int) -> list[str]:
    """Return up to n evenly spaced names of held-out, tokenizable ASCII source files of 4,000 or more characters."""
    names = []
    for name in filter(is_held_out, python_files()):
        content = (python_root() / name).read_bytes()
        if content.isascii() and b"\r" not in content and len(content) >= 4000 and _is_source(content):
            names.append(name)
    return [names[int(i)] for i in np.linspace(0, len(names) - 1, min(n, len(names)))]


def _is_source(content: bytes) -> bool:
    """Return whether `tokenize` accepts the content of a file."""
    try:
        label_tokens(content.decode(), [content.decode()])
    except (SyntaxError, tokenize.TokenError):
        return False
    return True


# -------------------------------------------------------------------- features and rules
def confusion(active: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return precision and recall (F, K) of activity (R, F) as a prediction of labels (R, K), 0 where undefined."""
    both = active.T.astype(np.float32) @ labels.astype(np.float32)
    return both / np.maximum(active.sum(axis=0)[:, None], 1), both / np.maximum(labels.sum(axis=0), 1)


def select_features(activations: np.ndarray, labels: np.ndarray) -> list[tuple[int, float]]:
    """Return for each rule the feature and the threshold with the highest F0.5 score on activations (R, F).

    The F0.5 score is a mean of precision and recall in which precision counts more.
    """
    largest, best = activations.max(axis=0), [(-1.0, 0, 0.0)] * labels.shape[1]
    for fraction in FRACTIONS:
        precision, recall = confusion(activations > fraction * largest, labels)
        score = 1.25 * precision * recall / np.maximum(0.25 * precision + recall, 1e-12)
        for rule, feature in enumerate(score.argmax(axis=0)):
            found = float(score[feature, rule]), int(feature), float(fraction * largest[feature])
            best[rule] = max(best[rule], found, key=lambda each: each[0])
    return [(feature, threshold) for _, feature, threshold in best]


def measure_features(activations: Sequence[np.ndarray], halves: Sequence[Tokens]) -> list[dict[str, Any]]:
    """Return each rule's feature, selected on one half, with precision, recall and contexts on the other.

    Args:
        activations: (R, F) of both halves.
    """
    (searched, tested), found = activations, []
    for rule, (feature, threshold) in enumerate(select_features(searched, halves[SEARCHED].labels)):
        values, labels = tested[:, feature], halves[TESTED].labels[:, [rule]]
        precision, recall = confusion((values > threshold)[:, None], labels)
        order = np.argsort(-values)[:N_CONTEXTS]
        found.append(
            {
                "rule": RULES[rule],
                "feature": feature,
                "share": float(labels.mean()),
                "precision": float(precision[0, 0]),
                "recall": float(recall[0, 0]),
                "contexts": [halves[TESTED].contexts[i] for i in order],
            }
        )
    return found


# -------------------------------------------------------------------- the study
def run(settings: Settings) -> dict[str, Any]:
    """Return "loss", and by kind of directions ("topk", "jumprelu", "untrained", "channels") scores and features."""
    corpus = PythonCode(VOCAB_SIZE, progress=False)
    model, layer = train_model(corpus, settings), settings.layers // 2
    loss, _ = evaluate(model, corpus.validation, 8, n_batches=16)
    names = held_out_files(settings.files)
    halves = [read_tokens(model, corpus, layer, names[i::2]) for i in (SEARCHED, TESTED)]
    starts = np.linspace(0, len(corpus.train) - LENGTH, settings.texts).astype(int)
    stream = collect_stream(model, [corpus.train[start : start + LENGTH].tolist() for start in starts], layer)
    results: dict[str, Any] = {"loss": loss, "tokens": [len(half.labels) for half in halves]}
    options = TrainingOptions(n_steps=settings.updates, sparsity=settings.sparsity)
    autoencoders = {
        kind: train_autoencoder(stream, settings.features, settings.active, kind, options)
        for kind in ("topk", "jumprelu")
    }
    trained = autoencoders["topk"]
    autoencoders["untrained"] = SparseAutoencoder(
        settings.width, settings.features, settings.active, "topk", trained.mean, trained.scale
    )
    for kind, autoencoder in autoencoders.items():
        scores = score_autoencoder(model, autoencoder, halves[TESTED].rows, layer)
        active = [autoencoder.activations(half.stream) for half in halves]
        results[kind] = {
            "scores": {**scores._asdict(), "recovered": scores.recovered},
            "features": measure_features(active, halves),
        }
    centered = [half.stream - trained.mean for half in halves]
    channels = [np.maximum(np.concatenate([x, -x], axis=1), 0) for x in centered]
    results["channels"] = {"features": measure_features(channels, halves)}
    return rounded(results, 4)
