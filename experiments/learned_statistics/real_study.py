"""A model that others trained, its softmax in blocks with scales of many kinds, and what is measured of it.

Shapes: N rows, T tokens, W window, L layers, H heads, n blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.learned_statistics.study import block_starts, equal_shares
from experiments.real_model import ROWS_OF_LOGITS, TEXTS, load_model, text_of, windows
from tricycle.decoding.batch import generate_batch
from tricycle.functions import LogSoftmax
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.softmaxes import BlockSoftmax
from tricycle.tensor import Tensor, no_grad
from tricycle.training import LossOf, train_on_batch
from tricycle_lab.probe import Probe

# Which scales there are in each layer: whether each head has its own, and whether each position has.
GRAINS = {
    "layer": (False, False),
    "head": (True, False),
    "position": (False, True),
    "head and position": (True, True),
}
KINDS = ("whole", "none", "exact", "1 / k", "mean", "learned")
STARTS = ("1", "1 / k", "mean")  # of the exact shares
BINS = 16  # of positions, for losses along the window
REPEATED = 4  # tokens, whose second appearance counts as a repetition


@dataclass(frozen=True)
class RealSettings:
    """Whose softmax to cut, how long scales learn, and what they are tried on."""

    model: str = "smollm2"
    """as `tricycle.pretrained.load` takes it: "smollm2", a folder in Hugging Face's form, a GGUF file, a name"""
    quick: bool = False
    """2 and 4 blocks, a third of the steps, one seed: under three minutes on two cores"""
    blocks: tuple[int, ...] = (2, 4, 8, 16)
    """into how many blocks the softmax is cut"""
    middle: int = 4
    """the number of blocks at which all that can be varied is"""
    text: str = "shakespeare"
    """what scales learn from: code, shakespeare or captions; the others are tried at `middle` blocks"""
    window: int = 256
    """tokens that are seen at once"""
    steps: int = 24
    """updates of the scales"""
    batch_size: int = 2
    """windows an update"""
    rate: float = 0.03
    """the scales' learning rate, which falls to 0 along half a cosine"""
    other_rates: tuple[float, ...] = (0.01, 0.1)
    """tried at `middle` blocks; 0.01 is the seed's"""
    seeds: int = 3
    """how often scales of each position learn at `middle` blocks, each time from other windows"""
    test_windows: int = 4
    """held-out windows of each text"""
    measured_windows: int = 16
    """of the training text, for the mean of the exact shares"""
    prompts: int = 2
    """of each text, three quarters of a window long, which the model goes on with"""
    n_written: int = 48
    """tokens that it writes"""
    output: Path = Path("runs/learned_statistics_real")
    """the folder for everything"""


class Job(NamedTuple):
    """A way to weigh keys, and where its scales are from.

    Attributes:
        kind: in KINDS.
        grain: in GRAINS, of those with scales ("mean" and "learned").
        start: in STARTS, of "learned", as `text`, which it learns from, `rate` and `seed`.
    """

    kind: str
    blocks: int = 1
    grain: str = ""
    text: str = ""
    start: str = ""
    rate: float = 0.0
    seed: int = 0

    @property
    def file_name(self) -> str:
        words = [str(value) for value in self if value not in ("", 0.0)]
        return "-".join(words).replace(" / ", "_").replace(" ", "_")


class RealSubject(NamedTuple):
    """A frozen model, and what it is asked.

    Attributes:
        tests: by text, ids (N, W + 1) of its held-out part.
        prompts: the beginnings of some of them.
    """

    model: GPT
    tokeniser: Any
    window: int
    tests: dict[str, np.ndarray]
    prompts: list[np.ndarray]


def new_subject(settings: RealSettings) -> RealSubject:
    """The model, frozen and narrowed to the window, so that blocks are parts of that and not of all that it can see.

    Raises:
        FileNotFoundError, ValueError: as of `tricycle.pretrained.load`; no decoder, or one with a shorter window; no
            tokeniser.
    """
    loaded = load_model(settings.model)
    model, window = loaded.model, settings.window
    if not isinstance(model, GPT) or loaded.tokeniser is None:
        raise ValueError(f"{settings.model}: expected a decoder with a tokeniser, got {type(model).__name__}")
    if model.config.context_window < window:
        raise ValueError(f"expected --window of at most {model.config.context_window}, got {window}")
    model.config = dataclasses.replace(model.config, context_window=window)
    for block in model.blocks:
        block.attention.context_window = window
    model.freeze().eval()
    tests = {text: rows_of(loaded.tokeniser, text, "test", settings.test_windows, window) for text in TEXTS}
    n_read = window * 3 // 4
    prompts = [row[:n_read] for rows in tests.values() for row in rows[: settings.prompts]]
    return RealSubject(model, loaded.tokeniser, window, tests, prompts)


def rows_of(tokeniser: Any, text: str, part: str, n_rows: int, window: int) -> np.ndarray:
    """Windows (N, W + 1) of a text, each begun as the tokeniser begins texts."""
    first = tokeniser.encode("")[:1]
    return windows(tokeniser, text_of(text, part), n_rows, window, first[0] if first else None).ids


def digest(model: GPT) -> str:
    """Of the bytes of all parameters but the scales."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not name.endswith("softmax_scales"):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(parameter.array).data)
    return sha.hexdigest()


# -------------------------------------------------------------------- blocks and their scales
def cut(model: GPT, job: Job, arrays: Sequence[np.ndarray] = ()) -> list[Tensor]:
    """Let each layer weigh keys as a job asks.

    Args:
        arrays: the scales of each layer, of a job that has any.

    Returns:
        the parameters that hold them.
    """
    per_head, per_position = GRAINS[job.grain or "position"]
    correction = job.kind if job.kind in ("none", "exact") else "learned"
    for block in model.blocks:
        softmax = BlockSoftmax(job.blocks, correction, per_head, per_position=per_position)
        block.attention.use_softmax("softmax" if job.kind == "whole" else softmax)
    scales = [block.attention.softmax_scales for block in model.blocks]
    for parameter, array in zip(scales, arrays, strict=bool(arrays)):
        parameter.array[...] = parameter.xp.asarray(array)
    return scales if arrays else []


def first_scales(job: Job, n_layers: int, n_heads: int, window: int) -> list[np.ndarray]:
    """Where scales begin that nobody measured: all at 1, or at 1 / k for each of the k blocks that a query sees."""
    per_head, per_position = GRAINS[job.grain or "position"]
    array = equal_shares(job.blocks, window if per_position else job.blocks)
    if job.start == "1":
        array = np.ones_like(array)
    return [np.tile(array, (n_heads, 1, 1)) if per_head else array] * n_layers


def learn(
    subject: RealSubject, job: Job, settings: RealSettings, first: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[float]]:
    """Let scales learn to predict a text's next tokens, all else being frozen.

    Args:
        first: where those of each layer begin.

    Returns:
        those of each layer, and the loss of each batch.

    Raises:
        RuntimeError: anything but scales changed.
    """
    model = subject.model
    before = digest(model)
    scales = cut(model, job, first)
    needed = settings.steps * settings.batch_size
    rows = rows_of(subject.tokeniser, job.text, "train", 4 * needed, subject.window)
    chosen = np.random.default_rng(job.seed).permutation(len(rows))[:needed].reshape(settings.steps, -1)
    optimiser = AdamW(WarmupCosine(job.rate, 0.0, 0, settings.steps), weight_decay=0.0)
    losses = []
    with tqdm(chosen, desc=job.file_name, unit="step", position=1, leave=False, dynamic_ncols=True) as bar:
        for index in bar:
            losses.append(float(train_on_batch(model, optimiser, loss_of(model), rows[index])))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    if digest(model) != before:
        raise RuntimeError(f"{job.file_name}: expected the model's own weights to stay as they are; some changed")
    return [np.array(parameter.numpy()) for parameter in scales], losses


def loss_of(model: GPT) -> LossOf:
    def loss(rows: Any, factor: Any) -> Tensor:
        return model.loss(model.place(rows[:, :-1]), model.place(rows[:, 1:]), None, factor)

    return loss


# -------------------------------------------------------------------- exact shares
class Shares(NamedTuple):
    """The share of all exponentials in each block, over windows of a text.

    Attributes:
        mean: by the number of blocks, (L, H, n, W).
        square: the mean of their squares.
    """

    mean: dict[int, np.ndarray]
    square: dict[int, np.ndarray]


def exact_shares(subject: RealSubject, rows: np.ndarray, blocks: Sequence[int]) -> Shares:
    """What FlashAttention computes on the way, for each row of tokens (N, W + 1)."""
    cut(subject.model, Job("whole"))
    mean: dict[int, Any] = dict.fromkeys(blocks, 0.0)
    square: dict[int, Any] = dict.fromkeys(blocks, 0.0)
    for row in tqdm(rows, desc="exact shares", unit="window", position=1, leave=False, dynamic_ncols=True):
        with subject.model.evaluating(), Probe(subject.model, "blocks.*.attention") as probe, no_grad():
            subject.model.hidden(subject.model.place(row[None, :-1]))
        for n in blocks:
            edges = block_starts(n, subject.window)
            here = np.stack([np.add.reduceat(weights[0], edges, axis=-1) for weights in probe.weights.values()])
            shares = np.zeros((*here.shape[:2], n, subject.window))  # some blocks may have no keys
            shares[:, :, : len(edges)] = here.swapaxes(2, 3)
            mean[n] = mean[n] + shares / len(rows)
            square[n] = square[n] + shares**2 / len(rows)
    return Shares({n: value.astype(np.float32) for n, value in mean.items()}, square)


def coarsen(mean: np.ndarray, grain: str) -> np.ndarray:
    """Shares (L, H, n, W) as the scales of a grain: (L, [H,] n, W or n)."""
    per_head, per_position = GRAINS[grain]
    n, window = mean.shape[2:]
    if not per_position:
        edges = block_starts(n, window)
        sizes = np.diff([*edges, window])
        of_blocks = np.zeros((*mean.shape[:2], n, n), mean.dtype)
        of_blocks[..., : len(edges)] = np.add.reduceat(mean, edges, axis=-1) / sizes
        mean = of_blocks
    return mean if per_head else mean.mean(axis=1)


def spread(mean: np.ndarray, grain: str) -> np.ndarray:
    """Scales of a grain for each head and position, (L, H, n, W)."""
    scales = coarsen(mean, grain)
    per_head, per_position = GRAINS[grain]
    if not per_head:
        scales = scales[:, None].repeat(mean.shape[1], axis=1)
    if per_position:
        return scales
    return scales.repeat(-(-mean.shape[3] // mean.shape[2]), axis=-1)[..., : mean.shape[3]]


def explained(shares: Shares, n: int, grain: str) -> float:
    """How much of the exact shares' squared distance from 1 / k the means of a grain take away, 0 to 1.

    What is left is what no scale of that grain can know: it differs from text to text. Queries that see one block, in
    which there is nothing to know, do not count.
    """
    mean, square = shares.mean[n].astype(np.float64), shares.square[n]
    window = mean.shape[3]
    begun = block_starts(n, window)[:, None] <= np.arange(window)
    equal = np.zeros((n, window))
    equal[: len(begun)] = np.where(begun, equal_shares(n, window)[: len(begun)], 0)
    seen = np.arange(window) >= -(-window // n)

    def distance(scales: np.ndarray) -> float:
        return float((square - 2 * scales * mean + scales**2)[..., seen].sum())

    return 1 - distance(spread(mean, grain)) / distance(equal)


# -------------------------------------------------------------------- what is measured
class Read(NamedTuple):
    """Of rows (N, W + 1): the loss of each token but the first, in nats, and the likeliest in its place, (N, W)."""

    losses: np.ndarray
    likeliest: np.ndarray


def read(model: GPT, rows: np.ndarray, n_together: int = 4) -> Read:
    """As a model sees them now."""
    parts = [_read(model, rows[start : start + n_together]) for start in range(0, len(rows), n_together)]
    return Read(*(np.concatenate(arrays) for arrays in zip(*parts)))


def _read(model: GPT, rows: np.ndarray) -> Read:
    """All logits of many tokens would not fit into memory: so some at a time."""
    losses, likeliest = [], []
    with model.evaluating(), no_grad():
        hidden = model.hidden(model.place(rows[:, :-1]))
        step = max(1, ROWS_OF_LOGITS // len(rows))
        for first in range(0, hidden.shape[1], step):
            labels = rows[:, 1:][:, first : first + step, None]
            logs = LogSoftmax()(model.logits(hidden[:, first : first + step])).numpy()
            losses.append(-np.take_along_axis(logs, labels, axis=-1)[..., 0])
            likeliest.append(logs.argmax(axis=-1))
    return Read(np.concatenate(losses, axis=1), np.concatenate(likeliest, axis=1))


def write(subject: RealSubject, n_tokens: int) -> list[list[int]]:
    """How the model, as it weighs keys now, goes on with each prompt, by its likeliest tokens."""
    return generate_batch(subject.model, subject.prompts, n_tokens, temperature=0)


def repeated(tokens: Sequence[int], size: int = REPEATED) -> float:
    """The share of runs of so many tokens that have been there before."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def same_beginning(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens are the same, up to the first that is not."""
    pairs = list(zip(tokens, others))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def in_bins(losses: np.ndarray) -> list[float]:
    """Mean losses (N, W) of parts of the window, all of about one length."""
    return [float(part.mean()) for part in np.array_split(losses, min(BINS, losses.shape[1]), axis=1)]
