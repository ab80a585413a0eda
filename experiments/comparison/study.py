"""Train every kind of model on the recall task at every distance, and measure its gradients."""

import time
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.comparison.recall import MOST_BEFORE, RecallModel, new_batch, new_model
from experiments.comparison.settings import GRADIENTS, TEST, TRAINING, VALIDATION, WEIGHTS, Settings
from experiments.shared.results import rounded
from experiments.shared.training import stream
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.tensor import Tensor
from tricycle.training import supervised_loss, train_on_batch

MAX_NORM = 1.0  # of all gradients together
CHUNK = 250  # sequences that are read at once
FOLLOWED = 64  # sequences through which gradients are followed
LEARNED = 0.99  # the accuracy from which on a task counts as learned
CHECKS = 20  # how often a training is looked at
CHECKED = 200  # sequences of such a look


def train(kind: str, distance: int, rate: float, settings: Settings, seed: int) -> tuple[RecallModel, int | None]:
    """Train a new model; return (model, number of updates until it learned the task, None if it did not).

    All kinds see the same sequences, and weights are drawn anew for each distance.
    """
    model = new_recall_model(kind, settings, seed, distance)
    generator = stream(TRAINING, seed, distance)
    schedule = WarmupCosine(rate, 0.0, settings.updates // 20, settings.updates)
    optimiser, learned = AdamW(schedule, weight_decay=0.0), None
    interval = max(1, settings.updates // CHECKS)
    for step in range(1, settings.updates + 1):
        batch = new_batch(distance, settings.batch_size, generator)
        train_on_batch(model, optimiser, supervised_loss(model, CrossEntropy()), batch, MAX_NORM)
        if learned is None and step % interval == 0:
            accuracy, _ = evaluate_recall(model, distance, VALIDATION, CHECKED)
            learned = step if accuracy >= LEARNED else None
    return model, learned


def new_recall_model(kind: str, settings: Settings, seed: int, distance: int) -> RecallModel:
    """Return a new model of a kind in BODIES, whose initial weights depend on seed and distance."""
    window = settings.farthest + MOST_BEFORE + 1
    return new_model(kind, settings.parameters, window, stream(WEIGHTS, seed, distance))


def evaluate_recall(model: RecallModel, distance: int, which: int, n: int) -> tuple[float, float]:
    """Return (accuracy, loss in nats) on n sequences of the random stream `which`, VALIDATION or TEST."""
    logits, targets = [], []
    with model.evaluating():
        for start in range(0, n, CHUNK):
            tokens, answers = new_batch(distance, min(CHUNK, n - start), stream(which, distance, start))
            logits.append(model(tokens).array)
            targets.append(answers)
        scores, labels = np.concatenate(logits), np.concatenate(targets)
        return float((scores.argmax(axis=-1) == labels).mean()), float(CrossEntropy()(labels, Tensor(scores)))


def train_with_best_rate(
    kind: str, distance: int, settings: Settings, seed: int, bar: tqdm
) -> tuple[RecallModel, dict[str, Any]]:
    """Return (model of the learning rate with the lowest validation loss, its test results); advance `bar` by 1.

    Learning rates are tried in turn until one has learned: each kind gets as many chances as it needs.
    """
    tried = []
    for rate in settings.rates:
        started = time.process_time()
        model, learned = train(kind, distance, rate, settings, seed)
        accuracy, loss = evaluate_recall(model, distance, VALIDATION, settings.tested)
        tried.append((loss, rate, model, learned, time.process_time() - started))
        if accuracy >= LEARNED:
            break
    bar.update()
    loss, rate, model, learned, _ = min(tried, key=lambda trial: trial[:2])
    accuracy, test_loss = evaluate_recall(model, distance, TEST, settings.tested)
    return model, {
        "accuracy": accuracy,
        "loss": rounded(test_loss),
        "rate": rate,
        "learned": learned,
        "seconds": rounded(sum(trial[-1] for trial in tried)),
    }


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Return a dict for each kind and seed: "kind", "seed", "parameters", lists over distances, gradient norms.

    Returns:
        "kind", "seed", "parameters"; over the distances "accuracy", "loss", "rate", "learned" and "seconds" (of the
        processor, all rates together); "before" and "after" training over the farthest distance: see `gradient_norms`.
    """
    runs = []
    total = len(settings.kinds) * settings.seeds * len(settings.distances)
    with tqdm(total=total, desc="recall task", unit="task") as bar:
        for kind in settings.kinds:
            for seed in range(settings.seeds):
                bar.set_postfix_str(f"{kind}, seed {seed}")
                trained = [train_with_best_rate(kind, distance, settings, seed, bar) for distance in settings.distances]
                last = trained[-1][0]
                fresh = new_recall_model(kind, settings, seed, settings.farthest)
                run = {"kind": kind, "seed": seed, "parameters": last.n_parameters}
                run |= {key: [values[key] for _, values in trained] for key in trained[0][1]}
                run |= {key: gradient_norms(m, settings.farthest) for key, m in (("before", fresh), ("after", last))}
                runs.append(run)
    return runs


def gradient_norms(model: RecallModel, distance: int) -> list[float]:
    """Estimate [RMS of |d state / d embedding d tokens before| / sqrt(width)] for d from 0, by one random projection.

    The Frobenius norm of the Jacobian of the state at the question, as the root mean square over sequences. The result
    is 1 if the state equals the embedding. The gradient of a random sum of the state's elements replaces the Jacobian:
    the expectation of its squared norm is the squared Frobenius norm.
    """
    generator = stream(GRADIENTS, distance)
    tokens, _ = new_batch(distance, FOLLOWED, generator)
    read = Tensor(model.embedding(tokens[:, -distance - 1 :]).array)
    mixed = model.body(read)[:, -1]
    (mixed * generator.standard_normal(mixed.shape, dtype=np.float32)).sum().backward()
    model.zero_grad()
    gradient: Any = read.grad
    squares = (gradient.array.astype(float) ** 2).sum(axis=-1).mean(axis=0)
    return [rounded(value) for value in np.sqrt(squares / mixed.shape[-1])[::-1]]
