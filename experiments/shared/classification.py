"""Text classification studies: folds, vocabularies, models, training, prediction and measures.

Shapes: N texts, B batch, T tokens, V vocabulary, K classes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.shared.program import check_choices, check_minimum
from experiments.shared.results import Runs, of
from experiments.shared.tables import cell
from experiments.shared.training import copied
from tricycle import kernels
from tricycle.dataset import Buckets, pad
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.sequences.classifiers import AttentionPooling, Classifier, ConvolutionalEncoder, MaxPooling
from tricycle.sequences.seq2seq import RecurrentEncoder, TransformerEncoder
from tricycle.tensor import Tensor
from tricycle.training import train_on_batch

PADDING, UNKNOWN, N_SPECIAL = 0, 1, 2
SPLIT, WEIGHTS, ORDER, DROPPED = range(1, 5)  # streams that share no number
MOST = 10_000  # tokens of a forward pass without training


# -------------------------------------------------------------------- data
class Problem(NamedTuple):
    """A text classification problem: tokenized texts with labels, class names and groups."""

    tokens: list[list[str]]  # of N texts
    labels: np.ndarray  # (N,) class indices
    classes: tuple[str, ...]
    groups: np.ndarray  # (N,) group indices; a group is never split over parts
    least: int = 1  # rarer tokens of the training texts become unknown

    @property
    def longest(self) -> int:
        """Return the length of the longest text, in tokens."""
        return max(map(len, self.tokens))


class Texts(NamedTuple):
    """Token ids of N texts, and their labels (N,)."""

    sequences: list[list[int]]
    labels: np.ndarray


class Parts(NamedTuple):
    """The training, validation and test sets of a fold.

    Attributes:
        where: the indices (N,) of the training, validation and test texts in the problem.
    """

    where: tuple[np.ndarray, np.ndarray, np.ndarray]
    training: Texts
    validation: Texts
    test: Texts
    vocabulary: dict[str, int]

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, those of padding and unknown tokens included."""
        return N_SPECIAL + len(self.vocabulary)


def split(problem: Problem, n_folds: int, number: int, seed: int) -> Parts:
    """Return the Parts of a fold: fold `number` (from 0) is the test, 1 / n_folds of the rest the validation.

    Each class, and each set of classes that a group has, has like shares of all three. The vocabulary is that of the
    training texts.
    """
    sets: list[set[int]] = [set() for _ in range(problem.groups.max() + 1)]
    for group, label in zip(problem.groups, problem.labels):
        sets[group].add(int(label))
    kinds = sorted(set(map(tuple, map(sorted, sets))))
    strata = np.array([kinds.index(tuple(sorted(one))) for one in sets])
    folds = stratified_folds(strata, n_folds, (seed,))
    rest = np.flatnonzero(folds != number)
    part_of = np.where(folds == number, 2, 0)  # of each group
    part_of[rest[stratified_folds(strata[rest], n_folds, (seed, number)) == 0]] = 1
    training, validation, test = (np.flatnonzero(part_of[problem.groups] == part) for part in range(3))
    vocabulary = new_vocabulary([problem.tokens[i] for i in training], problem.least)
    where = training, validation, test
    encoded = [Texts(encode([problem.tokens[i] for i in part], vocabulary), problem.labels[part]) for part in where]
    return Parts(where, encoded[0], encoded[1], encoded[2], vocabulary)


def stratified_folds(strata: np.ndarray, n_folds: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the random fold, 0 to n_folds - 1, of each item (N,); folds have similar fractions of each stratum.

    A stratum goes on dealing where the one before it stopped, so that folds are of like size, too.
    """
    generator = np.random.default_rng((SPLIT, *key))
    dealt = np.concatenate([generator.permutation(np.flatnonzero(strata == one)) for one in np.unique(strata)])
    folds = np.empty(len(strata), int)
    folds[dealt] = np.arange(len(strata)) % n_folds
    return folds


def new_vocabulary(texts: Sequence[Sequence[str]], least: int = 1) -> dict[str, int]:
    """Return {token: id} of tokens that occur at least `least` times, the most frequent first, ids from 2."""
    counts = Counter(token for text in texts for token in text)
    kept = sorted((token for token, count in counts.items() if count >= least), key=lambda t: (-counts[t], t))
    return {token: number for number, token in enumerate(kept, N_SPECIAL)}


def encode(texts: Sequence[Sequence[str]], vocabulary: dict[str, int]) -> list[list[int]]:
    """Return the token ids of texts; tokens outside the vocabulary become UNKNOWN (1)."""
    return [[vocabulary.get(token, UNKNOWN) for token in text] for text in texts]


# -------------------------------------------------------------------- models
@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a classifier and of its training.

    Attributes:
        embedding: channels of a token.
        size: filters of each width, hidden units of each direction, or the multiple of `embedding` in the blocks' MLP.
        layers: of recurrence, or Transformer blocks.
        dropout: of the pooled vector.
        inner_dropout: of embeddings, between layers and in blocks.
        token_dropout: the share of tokens that are made unknown in training.
        learning_rate: at its peak, after a tenth of all steps; from there half a cosine down to a tenth of it.
        max_tokens: of a batch, padding included.
    """

    embedding: int = 128
    size: int = 100
    layers: int = 1
    heads: int = 4
    cell: str = "gru"
    widths: tuple[int, ...] = (3, 4, 5)
    dropout: float = 0.5
    inner_dropout: float = 0.0
    token_dropout: float = 0.0
    label_smoothing: float = 0.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    epochs: int = 5
    max_tokens: int = 1024


MODELS = ("convolution", "recurrent", "Transformer")


def new_model(
    name: str, recipe: Recipe, vocab_size: int, n_classes: int, longest: int, rng: np.random.Generator
) -> Classifier:
    """Return a new classifier in MODELS: a convolution with max pooling, else with attention pooling.

    Args:
        longest: the most tokens of a text that the Transformer takes.
    """
    options: dict[str, Any] = {"dropout": recipe.inner_dropout, "generator": rng}
    encoder: Any
    sizes: tuple[Any, ...]
    if name == "convolution":
        encoder = ConvolutionalEncoder(vocab_size, recipe.embedding, recipe.size, recipe.widths, **options)
        return Classifier(encoder, MaxPooling(), recipe.size * len(recipe.widths), n_classes, recipe.dropout, rng)
    if name == "recurrent":
        sizes, width = (recipe.embedding, recipe.size, recipe.layers, recipe.cell), 2 * recipe.size
        encoder = RecurrentEncoder(vocab_size, *sizes, **options)
    else:
        sizes, width = (recipe.embedding, recipe.heads, recipe.layers, longest), recipe.embedding
        encoder = TransformerEncoder(vocab_size, *sizes, norm_first=True, expansion_ratio=recipe.size, **options)
    return Classifier(encoder, AttentionPooling(width, generator=rng), width, n_classes, recipe.dropout, rng)


# -------------------------------------------------------------------- training
def train(
    name: str, recipe: Recipe, parts: Parts, n_classes: int, longest: int, key: tuple[int, ...], title: str = ""
) -> tuple[Classifier, dict[str, Any]]:
    """Train a MODELS model; return it as of the epoch with the highest validation accuracy, and its history.

    Args:
        longest: tokens of the longest text that will ever come.
        key: the numbers from which all that is random here comes.

    Returns:
        the model; and "epochs", for each the training loss, the validation loss and accuracy, "best", the number of the
        epoch taken, from 1, and "seconds" of computing, of all threads together.
    """
    started = time.process_time()
    weights_rng = np.random.default_rng((WEIGHTS, *key))
    model = new_model(name, recipe, parts.vocab_size, n_classes, longest, weights_rng)
    order, dropped = (np.random.default_rng((stream, *key)) for stream in (ORDER, DROPPED))
    training, validation = parts.training, parts.validation
    buckets = Buckets([len(s) for s in training.sequences], recipe.max_tokens, int(order.integers(2**31)))
    passes = [buckets.batches(epoch) for epoch in range(recipe.epochs)]
    n_steps, rate = sum(map(len, passes)), recipe.learning_rate
    optimiser = AdamW(WarmupCosine(rate, rate / 10, max(1, n_steps // 10), n_steps), weight_decay=recipe.weight_decay)
    loss_fn = CrossEntropy(label_smoothing=recipe.label_smoothing)

    def batch_loss(batch: Any, factor: Any) -> Tensor:
        tokens, lengths, labels = batch
        return loss_fn(labels, model(tokens, lengths), factor)

    epochs: list[tuple[float, float, float]] = []
    best, kept = 0, {}
    with tqdm(total=n_steps, desc=title or name, unit="step") as bar:
        for batches in passes:
            losses = []
            for chosen in batches:
                tokens, lengths = pad([training.sequences[i] for i in chosen])
                if recipe.token_dropout:
                    tokens[dropped.random(tokens.shape) < recipe.token_dropout] = UNKNOWN
                batch = tokens, lengths, training.labels[chosen]
                losses.append(train_on_batch(model, optimiser, batch_loss, batch, max_norm=1.0))
                bar.update()
            judged = loss_and_accuracy(predict(model, validation.sequences).logits, validation.labels)
            epochs.append((float(np.mean(losses)), *judged))
            bar.set_postfix(accuracy=f"{epochs[-1][2]:.1%}")
            ranks = [(accuracy, -loss) for _, loss, accuracy in epochs]
            if ranks[-1] == max(ranks):
                best, kept = len(epochs), copied(model)
    model.load_state_dict(kept)
    return model, {"epochs": epochs, "best": best, "seconds": time.process_time() - started}


# -------------------------------------------------------------------- prediction
class Predicted(NamedTuple):
    """Logits (N, K), and the pooling weights (T,) of each text."""

    logits: np.ndarray
    weights: list[np.ndarray]


def predict(model: Classifier, sequences: list[list[int]]) -> Predicted:
    """Return the logits (N, K) and the pooling weights (T,) of each sequence, in order, without dropout."""
    logits: list[Any] = [None] * len(sequences)
    weights: list[Any] = [None] * len(sequences)
    lengths = [len(s) for s in sequences]
    with model.evaluating():
        for chosen in Buckets(lengths, max(MOST, *lengths)).batches(0):
            tokens, sizes = pad([sequences[i] for i in chosen])
            scores, looked_at = model(tokens, sizes, return_weights=True)
            for i, row, looked, size in zip(chosen, scores.array, looked_at, sizes):
                logits[i], weights[i] = row, looked[:size]
    return Predicted(np.array(logits), weights)


def mask_tokens(sequences: list[list[int]], places: Sequence[int]) -> list[list[int]]:
    """Return copies of the sequences with the token at places[i] of sequence i replaced by UNKNOWN (1)."""
    return [[*s[:place], UNKNOWN, *s[place + 1 :]] for s, place in zip(sequences, places)]


def loss_and_accuracy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return (mean cross-entropy in nats, accuracy from 0 to 1) of logits (N, K)."""
    loss = -kernels.log_softmax(logits)[np.arange(len(labels)), labels].mean()
    return float(loss), float((logits.argmax(axis=-1) == labels).mean())


# -------------------------------------------------------------------- cross validation
TOGETHER = "ensemble"


@dataclass(frozen=True)
class FoldSettings:
    """The command-line settings that all classification studies share."""

    models: tuple[str, ...] = MODELS  # the models, by their names in the table
    folds: int = 10  # the number of folds
    tested: int = 10  # the number of folds to test; every model is trained for each
    epochs: int = 0  # epochs; 0 for the number in each model's recipe
    seed: int = 0  # of folds, initial weights and order
    shown: int = 15
    """texts on the page for each class: this many that all models have right, as many where they differ, all wrong"""
    quick: bool = False  # at most three minutes: two folds, few epochs
    output: Path = Path("runs")  # where results.json, the plots and pooling_weights.html are written


def check_folds(settings: Any, **lowest: int) -> None:
    """Raise ValueError for an invalid field of FoldSettings, or for a field below its value in `lowest`."""
    check_minimum(settings, folds=3, tested=1, epochs=0, shown=1, seed=0, **lowest)
    check_choices(settings, models=MODELS)
    if settings.tested > settings.folds:
        raise ValueError(f"expected --tested to be at most {settings.folds}, the folds, got {settings.tested}")


def cross_validate(
    problem: Problem,
    settings: Any,
    recipes: dict[str, Recipe],
    of_model: Callable[[Classifier, Parts, Predicted, tuple[int, int]], dict[str, Any]],
    of_logits: Callable[[np.ndarray, Parts], dict[str, Any]],
    others: Callable[[Parts], dict[str, np.ndarray]],
) -> tuple[Runs, Outcome]:
    """Train models on tested folds; return records of models, mean and `others` by fold, and the models' predictions.

    Args:
        of_model, of_logits: return measures of a trained model, and of logits of the test texts.
        others: returns the logits of predictors without training, by name.
    """
    runs: Runs = []
    folds: list[tuple[Parts, dict[str, Predicted]]] = []
    for fold in range(settings.tested):
        parts, key = split(problem, settings.folds, fold, settings.seed), (settings.seed, fold)
        predicted: dict[str, Predicted] = {}
        for name in settings.models:
            recipe = replace(recipes[name], epochs=settings.epochs or recipes[name].epochs)
            model, predicted[name], record = one_fold(problem, parts, name, recipe, key)
            runs.append({**record, **of_model(model, parts, predicted[name], key)})
        untrained = {TOGETHER: mean_logits(predicted)} if len(predicted) > 1 else {}
        for name, logits in {**untrained, **others(parts)}.items():
            runs.append({"model": name, "fold": fold, **of_logits(logits, parts)})
        folds.append((parts, predicted))
    return runs, concatenate_folds(problem, folds)


def model_cells(runs: Runs) -> list[str]:
    """Return 3 cells for one model's runs: parameters, seconds, validation accuracy in %; "" if untrained."""
    if runs[0]["model"] not in MODELS:
        return ["", "", ""]
    parameters = f"{np.mean(of(runs, 'parameters')):,.0f}"
    return [parameters, cell(of(runs, "seconds"), 0), cell(of(runs, "validation"), 1, 100)]


class Outcome(NamedTuple):
    """The predictions of all models for the tested texts, in the order of `where` (N,), indices in the problem."""

    where: np.ndarray
    known: list[np.ndarray]  # for each text a mask of known tokens
    predicted: dict[str, Predicted]  # by model
    prior: np.ndarray  # (N, K) log class frequencies of the training texts


def one_fold(
    problem: Problem, parts: Parts, name: str, recipe: Recipe, key: tuple[int, ...]
) -> tuple[Classifier, Predicted, dict[str, Any]]:
    """Train a model on one fold; return it, its test predictions, and a record of the training and the test scores.

    Args:
        key: seed and fold.
    """
    title, key = f"fold {key[1]}, {name}", (*key, MODELS.index(name))
    model, history = train(name, recipe, parts, len(problem.classes), problem.longest, key, title)
    predicted = predict(model, parts.test.sequences)
    loss, accuracy = loss_and_accuracy(predicted.logits, parts.test.labels)
    record = {
        "model": name,
        "fold": key[1],
        "parameters": model.n_parameters,
        "seconds": round(history["seconds"], 1),
        "epochs": [[round(value, 4) for value in epoch] for epoch in history["epochs"]],
        "best": history["best"],
        "validation": history["epochs"][history["best"] - 1][2],
        "test": accuracy,
        "loss": loss,
    }
    return model, predicted, record


def concatenate_folds(problem: Problem, folds: list[tuple[Parts, dict[str, Predicted]]]) -> Outcome:
    """Return the predictions of all folds as one Outcome, fold after fold."""
    known, priors, names = [], [], list(folds[0][1])
    for parts, _ in folds:
        known += [np.array(sequence) != UNKNOWN for sequence in parts.test.sequences]
        prior = log_prior(parts.training.labels, len(problem.classes))
        priors.append(np.broadcast_to(prior, (len(parts.where[2]), len(prior))))
    predicted = {
        name: Predicted(
            np.concatenate([by_name[name].logits for _, by_name in folds]),
            [row for _, by_name in folds for row in by_name[name].weights],
        )
        for name in names
    }
    return Outcome(np.concatenate([parts.where[2] for parts, _ in folds]), known, predicted, np.concatenate(priors))


def mean_logits(predicted: dict[str, Predicted]) -> np.ndarray:
    """Return the mean (N, K) of all models' log probabilities."""
    return np.mean([kernels.log_softmax(each.logits) for each in predicted.values()], axis=0)


def top_weighted_tokens(problem: Problem, outcome: Outcome, name: str, least: int) -> list[tuple[str, float, int]]:
    """Return (token, mean weight relative to uniform, count) of a model's tokens, the largest weight first.

    Left out are tokens that come less often than `least` times, and those unknown to the model.
    """
    shares: dict[str, list[float]] = {}
    for i, known, weights in zip(outcome.where, outcome.known, outcome.predicted[name].weights):
        for token, is_known, weight in zip(problem.tokens[i], known, weights * len(weights)):
            if is_known:
                shares.setdefault(token, []).append(float(weight))
    means = [(token, float(np.mean(values)), len(values)) for token, values in shares.items() if len(values) >= least]
    return sorted(means, key=lambda entry: (-entry[1], entry[0]))


# -------------------------------------------------------------------- what needs no network
def n_grams(tokens: Sequence[str], most: int) -> set[tuple[str, ...]]:
    """Return the set of all n-grams of one to `most` tokens."""
    return {tuple(tokens[i : i + n]) for n in range(1, most + 1) for i in range(len(tokens) - n + 1)}


def naive_bayes(problem: Problem, parts: Parts, most: int) -> np.ndarray:
    """Return test logits (N, K) of naive Bayes, add-one smoothing; a 1- to `most`-gram counts once per text.

    An n-gram counts once a text (Wang and Manning 2012); those that training lacks are left out.
    """
    n_classes, (training, _, test) = len(problem.classes), parts.where
    numbers: dict[tuple[str, ...], int] = {}
    features = [[numbers.setdefault(gram, len(numbers)) for gram in n_grams(problem.tokens[i], most)] for i in training]
    counts = np.ones((n_classes, len(numbers)))
    for label, present in zip(problem.labels[training], features):
        counts[label, present] += 1
    scores = np.log(counts / counts.sum(axis=1, keepdims=True))
    prior = log_prior(problem.labels[training], n_classes)
    known = ([numbers[gram] for gram in n_grams(problem.tokens[i], most) if gram in numbers] for i in test)
    return np.array([prior + scores[:, present].sum(axis=1) for present in known])


def log_prior(labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Return the log relative frequency (K,) of each class, with add-one smoothing."""
    counts = 1 + np.bincount(labels, minlength=n_classes)
    return np.log(counts / counts.sum())
