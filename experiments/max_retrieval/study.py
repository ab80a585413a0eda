"""The max-retrieval task: the model and its loss, training, fitting of a temperature, and measurements.

Each of n items has a priority and a class; the answer is the class of the item with the highest priority. Every random
number comes from a stream with a name, so that runs repeat exactly.

Shapes: B batch, N items, C channels = width.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from experiments.shared.program import check_minimum
from experiments.shared.training import stream
from tricycle import kernels
from tricycle.activation import GeLU
from tricycle.attention import Attention, scores_and_weights
from tricycle.functions import RowSoftmax, Softmax
from tricycle.layers import Dense, Layer, Sequential
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.sequences.cross_attention import MultiHeadAttention
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle.tensor import Tensor, no_grad
from tricycle.training import train_on_batch
from tricycle_accelerators.threads import parallel_for
from tricycle_lab.temperature import fit_adaptive_temperature

N_CLASSES = 10


class Batch(NamedTuple):
    """A batch of items, queries and target classes."""

    items: np.ndarray  # (B, N, 1 + N_CLASSES): a priority, uniform in [0, 1), and a one-hot class
    query: np.ndarray  # (B, 1, 1), uniform in [0, 1), uninformative
    targets: np.ndarray  # (B,), the class of the item with the highest priority


def new_batch(n_items: int, size: int, generator: np.random.Generator) -> Batch:
    """Return `size` sets of items (random priority, one-hot class), uninformative queries, top items' classes."""
    priorities = generator.random((size, n_items), dtype=np.float32)
    classes = generator.integers(0, N_CLASSES, (size, n_items))
    items = np.concatenate([priorities[..., None], np.eye(N_CLASSES, dtype=np.float32)[classes]], axis=-1)
    query = generator.random((size, 1, 1), dtype=np.float32)
    return Batch(items, query, classes[np.arange(size), priorities.argmax(axis=1)])


def lecun(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return LeCun-normal float32 weights, with variance 1 / shape[0] (LeCun et al. 1998), flax's default."""
    return generator.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[0]))


class MaxRetrieval(Layer):
    """Two layers for each item and two for the query, one head of attention, two layers for the answer."""

    def __init__(self, generator: np.random.Generator, width: int = 128) -> None:
        def dense(from_size: int, to_size: int) -> Dense:
            return Dense(from_size, to_size, initialiser=lecun, generator=generator)

        self.read_items = Sequential(dense(1 + N_CLASSES, width), GeLU(), dense(width, width), GeLU())
        self.read_query = Sequential(dense(1, width), GeLU(), dense(width, width), GeLU())
        self.attention = MultiHeadAttention(width, n_heads=1, initialiser=lecun, generator=generator)
        self.answer = Sequential(dense(width, width), GeLU(), dense(width, N_CLASSES))

    def forward(self, items: np.ndarray, query: np.ndarray) -> Tensor:
        """Return the logits (B, N_CLASSES) of items (B, N, 1 + N_CLASSES) and a query (B, 1, 1)."""
        return self.answer(self.attention(self.read_query(query), self.read_items(items))[:, 0])

    def project(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries (B, 1, C), keys and values (B, N, C) of a batch."""
        items, query = self.read_items(batch.items), self.read_query(batch.query)
        return self.attention.query(query), self.attention.key(items), self.attention.value(items)

    def project_to_logits(self, mixed: Tensor) -> np.ndarray:
        """Return the logits (B, N_CLASSES) of the attention output (B, 1, C)."""
        return self.answer(self.attention.projection(mixed)[:, 0]).array


def batch_loss(model: MaxRetrieval, batch: Batch, l2: float) -> Tensor:
    """Return the scalar mean cross-entropy in nats plus l2 times the squared norm of all parameters.

    The squares are part of the loss, so Adam divides their gradient as any other: this is no decoupled weight decay.
    """
    loss = CrossEntropy()(batch.targets, model(batch.items, batch.query))
    for parameter in model.parameters():
        loss = loss + l2 * (parameter * parameter).sum()
    return loss


TRAINING, FITTING, EVALUATION, PICTURES = 1, 2, 3, 4  # streams that share no number
FEWEST, MOST = 5, 16  # items of a training example
CHUNK = 2**15  # items that go through the model at once: 16 MiB an activation at width 128
N_PAINTED = 32  # examples in the pictures
BETAS = np.geomspace(1, 12, 20).tolist()  # what the fit tries
CONSTANT = 8.0  # a control: as sharp as the fitted polynomial about is, whatever the entropy


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study; the defaults train as seed 001's notebook does."""

    steps: int = 5_000  # training steps; the notebook's
    batch_size: int = 128  # examples of a step; the notebook's and the paper's
    learning_rate: float = 1e-3  # of Adam; the notebook's and the paper's
    decay: bool = False  # let the learning rate fall to 0 along half a cosine
    l2: float = 1e-3  # what the squares of all parameters are multiplied by before they are added to the loss
    width: int = 128  # channels of all layers
    seeds: int = 3  # trainings, each with other initial weights and data
    data_seeds: int = 10  # test sets, the same for all trained models
    samples: int = 512  # examples of a set, for each number of items
    largest: int = 4096  # the most items: measurements at 2, 4, 8, ... up to it
    fit_rows: int = 1024  # examples for each number of items to fit a temperature on
    quick: bool = False  # a run of half a minute: 2,000 steps, one seed, fewer examples
    paper: bool = False  # the paper's longer training: 100,000 steps, a falling learning rate
    output: Path = Path("runs/max_retrieval")  # where results.json, accuracy.png and weights.png are written

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of items to measure at: 2, 4, 8, ... up to `largest`."""
        return [2**i for i in range(1, self.largest.bit_length())]


def check(settings: Settings) -> None:
    """Raise ValueError for the first setting below its minimum: 16 for `largest`, 1 for the other counts."""
    check_minimum(settings, steps=1, batch_size=1, width=1, seeds=1, data_seeds=1, samples=1, fit_rows=1, largest=16)


# -------------------------------------------------------------------- training
def train(settings: Settings, seed: int) -> tuple[MaxRetrieval, float]:
    """Train a new model; return it with the mean loss of its last 100 steps (nats, l2 term included)."""
    generator = stream(TRAINING, seed)
    model = MaxRetrieval(generator, settings.width)
    falling = WarmupCosine(settings.learning_rate, 0.0, 0, settings.steps)
    optimiser = AdamW(falling if settings.decay else settings.learning_rate, weight_decay=0)  # without decay: Adam
    scaled_loss = lambda batch, factor: batch_loss(model, batch, settings.l2) * factor
    losses = []
    with tqdm(range(settings.steps), desc=f"seed {seed}: training", unit="step") as bar:
        for step in bar:
            n_items = int(generator.integers(FEWEST, MOST + 1))
            batch = new_batch(n_items, settings.batch_size, generator)
            losses.append(train_on_batch(model, optimiser, scaled_loss, batch))
            if step % 100 == 0:
                bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return model, float(np.mean(losses[-100:]))


# -------------------------------------------------------------------- a temperature of our own
def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the cross-entropy (R,) in nats of each row of logits (R, K) with its target class."""
    return -kernels.log_softmax(logits)[np.arange(len(targets)), targets]


def errors(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return (R,), in the logits' dtype: 1 where the argmax of a row of logits (R, K) is not its target, else 0."""
    return (logits.argmax(axis=-1) != targets).astype(logits.dtype)


def fit(model: MaxRetrieval, settings: Settings, seed: int, cost: Callable) -> AdaptiveSoftmax:
    """Return an AdaptiveSoftmax with the polynomial of degree 4 of the entropy that has the lowest cost.

    It is fitted on examples of their own with 16 items (as in training) and up to the most that it is measured on, so
    that it has seen the entropies it will meet: a polynomial is worth nothing outside of these. Rows below the
    threshold, where the polynomial is not used, are left out.

    Args:
        cost: from logits (R, N_CLASSES) and targets (R,) to what each row costs.
    """
    threshold = AdaptiveSoftmax().threshold
    parts = [(n, *part) for n in settings.sizes if n >= MOST for part in split(n, settings.fit_rows)]

    @lru_cache(maxsize=1)  # the fit is done with one part before it comes to the next
    def read(i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, part, size = parts[i]
        batch = new_batch(n, size, stream(FITTING, seed, n, part))
        query, keys, values = model.project(batch)
        scores = scores_of(query, keys)
        used = entropy_of(scores) > threshold
        return scores[used], values.array[used], batch.targets[used]

    def costs(i: int, weights: np.ndarray) -> np.ndarray:
        _, values, targets = read(i)
        bar.update()
        return cost(model.project_to_logits(Tensor(weights[:, None] @ values)), targets)

    bar = tqdm(total=len(parts) * len(BETAS), desc=f"seed {seed}: fitting to {cost.__name__}")
    # threads of BLAS slow products of a matrix and one row down, on a machine with other work a hundredfold
    with no_grad(), bar, threadpool_limits(1):
        scores = [read(i)[0] for i in range(len(parts))]
        bins = min(20, sum(map(len, scores)))
        return AdaptiveSoftmax(fit_adaptive_temperature(scores, costs, BETAS, n_bins=bins), threshold)


def split(n_items: int, size: int) -> list[tuple[int, int]]:
    """Split `size` examples into parts of at most CHUNK items; return pairs (part number, examples of the part)."""
    step = max(1, CHUNK // n_items)
    return [(start // step, min(step, size - start)) for start in range(0, size, step)]


def scores_of(query: Tensor, keys: Tensor) -> np.ndarray:
    """Return the attention scores (B, N), before the softmax, of queries (B, 1, C) and keys (B, N, C)."""
    return scores_and_weights(Attention(causal=False), query[:, :, None], keys[:, :, None])[0][:, 0, 0]


def entropy_of(scores: np.ndarray) -> np.ndarray:
    """Return the entropy (R,) in nats of the softmax of each row of scores (R, N)."""
    return AdaptiveSoftmax().inverse_temperature(scores)[-1][..., 0]


# -------------------------------------------------------------------- measuring
def measure(model: MaxRetrieval, softmaxes: dict[str, RowSoftmax], settings: Settings, seed: int) -> dict:
    """Return "accuracy" and "loss" as {softmax: list by size}, and lists "found", "entropy" and "data_spread".

    Returns:
        "accuracy" (0 to 1) and "loss" (nats) of each softmax; "found", how often the item with the highest score has
        the right class; "entropy" of the plain softmax in nats: lowest, mean and highest; "data_spread", the
        standard deviation of its accuracy between test sets. Each list is over the numbers of items.
    """
    result: dict = {what: {name: [] for name in softmaxes} for what in ("accuracy", "loss")}
    result |= {"found": [], "entropy": [], "data_spread": []}
    total = sum(settings.sizes) * settings.data_seeds * settings.samples
    with tqdm(total=total, desc=f"seed {seed}: measuring", unit="item", unit_scale=True) as bar:
        for n in settings.sizes:
            rows = per_example_errors_of_sets(model, n, softmaxes, settings, bar)
            for i, name in enumerate(softmaxes):
                result["accuracy"][name].append(rounded(1 - rows["wrong"][i].mean()))
                result["loss"][name].append(rounded(rows["loss"][i].mean()))
            result["found"].append(rounded(rows["found"].mean()))
            result["entropy"].append([rounded(f(rows["entropy"])) for f in (np.min, np.mean, np.max)])
            sets = rows["wrong"][0].reshape(settings.data_seeds, -1)
            result["data_spread"].append(rounded(sets.mean(axis=1).std()))
    return result


def per_example_errors_of_sets(
    model: MaxRetrieval, n_items: int, softmaxes: dict[str, RowSoftmax], settings: Settings, bar: tqdm
) -> dict[str, np.ndarray]:
    """Return `per_example_errors` of all test sets of `n_items` items, joined on the last axis; advance `bar`."""
    parts = [(d, *part) for d in range(settings.data_seeds) for part in split(n_items, settings.samples)]
    found: list[dict[str, np.ndarray]] = [{} for _ in parts]

    def work(i: int) -> None:
        data_seed, part, size = parts[i]
        batch = new_batch(n_items, size, stream(EVALUATION, data_seed, n_items, part))
        found[i] = per_example_errors(model, batch, softmaxes)
        bar.update(size * n_items)

    parallel_for(work, range(len(parts)))
    return {key: np.concatenate([part[key] for part in found], axis=-1) for key in found[0]}


def per_example_errors(model: MaxRetrieval, batch: Batch, softmaxes: dict[str, RowSoftmax]) -> dict[str, np.ndarray]:
    """Return "wrong" and "loss" (nats), (softmaxes, B), and "found" (bool) and "entropy" (nats), (B,)."""
    with no_grad():  # here, as it holds in one thread
        query, keys, values = model.project(batch)
        parts = [part[:, :, None] for part in (query, keys, values)]  # as one head, (B, N, 1, C)
        mixed = [Attention(softmax, causal=False)(*parts)[:, :, 0] for softmax in softmaxes.values()]
        logits = [model.project_to_logits(mixture) for mixture in mixed]
        scores = scores_of(query, keys)
    best = batch.items[np.arange(len(scores)), scores.argmax(axis=1), 1:].argmax(axis=1)
    wrong, loss = (np.stack([cost(found, batch.targets) for found in logits]) for cost in (errors, cross_entropy))
    return {"wrong": wrong, "loss": loss, "found": best == batch.targets, "entropy": entropy_of(scores)}


def rounded(value: float) -> float:
    """Return a value rounded to four decimals."""
    return round(float(value), 4)


def top_weights(model: MaxRetrieval, softmaxes: dict[str, RowSoftmax], settings: Settings, n_top: int = 16) -> dict:
    """Return weights (sizes, N_PAINTED, n_top) of the n_top highest priorities, rising, after NaN for fewer items.

    The weights of each softmax, by its name.
    """
    found = {name: np.full((len(settings.sizes), N_PAINTED, n_top), np.nan) for name in softmaxes}
    with no_grad():
        for i, n in enumerate(settings.sizes):
            for start in range(0, N_PAINTED, 8):
                batch = new_batch(n, 8, stream(PICTURES, n, start))
                query, keys, _ = model.project(batch)
                scores = scores_of(query, keys)
                order = batch.items[..., 0].argsort(axis=1)[:, -n_top:]
                for name, softmax in softmaxes.items():
                    weights = np.take_along_axis(softmax.row_softmax(scores), order, axis=1)
                    found[name][i, start : start + 8, n_top - weights.shape[1] :] = weights
    return found


def train_and_fit(settings: Settings, seed: int) -> tuple[MaxRetrieval, dict[str, RowSoftmax], float, float]:
    """Train a model and fit its temperature; return (model, softmaxes by name, loss, seconds of training)."""
    started = time.perf_counter()
    model, loss = train(settings, seed)
    seconds = time.perf_counter() - started
    softmaxes: dict[str, RowSoftmax] = {"plain": Softmax(), "adaptive": AdaptiveSoftmax()}
    softmaxes["fit to loss"] = fit(model, settings, seed, cross_entropy)
    softmaxes["fit to errors"] = fit(model, settings, seed, errors)
    softmaxes["constant"] = AdaptiveSoftmax([CONSTANT])
    return model, softmaxes, loss, seconds
