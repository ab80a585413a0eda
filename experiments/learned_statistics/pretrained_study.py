"""A pretrained model with block softmax and scales of many kinds, and its measurements.

Shapes: N rows, T tokens, W window, L layers, H heads, n blocks.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.learned_statistics.blocks import (
    GRAINS,
    STARTS,
    FrozenModel,
    Job,
    Shares,
    VariantEvaluator,
    average_scales,
    block_starts,
    digest,
    equal_shares,
)
from experiments.shared.language_models import TEXTS, load_model, read, set_context_window, text_of, windows
from tricycle.decoding.batch import generate_batch
from tricycle.models import GPT
from tricycle.system.files import atomic_write

BINS = 16  # of positions, for losses along the window
REPEATED = 4  # tokens, whose second appearance counts as a repetition


@dataclass(frozen=True)
class PretrainedSettings:
    """The model, the training of the scales, and the test texts."""

    model: str = "smollm2"
    """a model for `tricycle.pretrained.load`: "smollm2", a folder in Hugging Face's format, a GGUF file, or a name"""
    quick: bool = False  # 2 and 4 blocks, a third of the steps, one seed: under three minutes on two cores
    blocks: tuple[int, ...] = (2, 4, 8, 16)  # the numbers of blocks of the softmax
    middle: int = 4  # the number of blocks at which all settings are varied
    text: str = "shakespeare"
    """the training text of the scales: code, shakespeare or captions; the others are used at `middle` blocks"""
    window: int = 256  # the context length in tokens
    steps: int = 24  # updates of the scales
    batch_size: int = 2  # windows an update
    rate: float = 0.03  # the scales' learning rate, which falls to 0 along half a cosine
    other_rates: tuple[float, ...] = (0.01, 0.1)  # tried at `middle` blocks; 0.01 is the seed's
    seeds: int = 3  # trainings of the scales of each position at `middle` blocks, each on other windows
    test_windows: int = 4  # held-out windows of each text
    measured_windows: int = 16  # of the training text, for the mean of the exact shares
    prompts: int = 2  # prompts of each text, three quarters of a window long, which the model continues
    n_written: int = 48  # tokens to generate
    output: Path = Path("runs/learned_statistics_real")  # the output folder


def load_frozen_model(settings: PretrainedSettings) -> FrozenModel:
    """Return the model, frozen, narrowed to the window; ValueError without decoder or tokeniser, or if it is shorter.

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
    set_context_window(model, window)
    model.freeze().eval()
    first = loaded.tokeniser.encode("")[:1]  # which begins every window, where the tokeniser begins texts with it
    first = first[0] if first else None
    rows = lambda text, part, n: windows(loaded.tokeniser, text_of(text, part), n, window, first).ids
    return FrozenModel(model, loaded.tokeniser, window, rows)


def expand_scales(mean: np.ndarray, grain: str) -> np.ndarray:
    """Return shares (L, H, n, W) averaged to the scales of a grain and expanded to (L, H, n, W) again."""
    scales = average_scales(mean, grain)
    per_head, per_position = GRAINS[grain]
    if not per_head:
        scales = scales[:, None].repeat(mean.shape[1], axis=1)
    if per_position:
        return scales
    return scales.repeat(-(-mean.shape[3] // mean.shape[2]), axis=-1)[..., : mean.shape[3]]


def explained(shares: Shares, n: int, grain: str) -> float:
    """Return the fraction of the exact shares' variance around 1 / k that the means of a grain explain.

    What is left is what no scale of that grain can know: it differs from text to text. Queries that see one block, in
    which there is nothing to know, do not count.
    """
    mean, square = shares.mean[n].astype(np.float64), shares.square[n]
    window = mean.shape[3]
    begun = block_starts(n, window)[:, None] <= np.arange(window)
    equal = np.zeros((n, window))
    equal[: len(begun)] = np.where(begun, equal_shares(n, window)[: len(begun)], 0)
    visible = np.arange(window) >= -(-window // n)

    def distance(scales: np.ndarray) -> float:
        return float((square - 2 * scales * mean + scales**2)[..., visible].sum())

    return 1 - distance(expand_scales(mean, grain)) / distance(equal)


# -------------------------------------------------------------------- what is measured
def repeated_fraction(tokens: Sequence[int], size: int = REPEATED) -> float:
    """Return the fraction of n-grams of `size` tokens that occurred before; 0 for fewer tokens."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def common_prefix_length(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = list(zip(tokens, others))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


# Settings that may change when the command is repeated: they only add rows.
FREE = ("quick", "blocks", "seeds", "other_rates")
DIGITS = 5


# -------------------------------------------------------------------- jobs
def learned_job(settings: PretrainedSettings, **changes: Any) -> Job:
    """Return a job of learned scales by position at `middle` blocks, with its fields replaced by `changes`."""
    job = Job("learned", settings.middle, "position", settings.text, "1 / k", settings.rate)
    return job._replace(**changes)


def mean_job(settings: PretrainedSettings, **changes: Any) -> Job:
    """Return a job of mean shares by position at `middle` blocks, with its fields replaced by `changes`."""
    return Job("mean", settings.middle, "position", settings.text)._replace(**changes)


def all_jobs(settings: PretrainedSettings) -> list[Job]:
    """Return all jobs, the most informative first: all kinds at `middle` blocks, then variations of one setting."""
    middle = settings.middle
    others = [text for text in TEXTS if text != settings.text]
    jobs = [Job("whole"), *(Job(kind, n) for n in settings.blocks for kind in ("none", "1 / k"))]
    jobs += [Job("exact", middle)]
    jobs += [mean_job(settings, blocks=n) for n in settings.blocks]
    jobs += [mean_job(settings, grain=grain) for grain in GRAINS if grain != "position"]
    jobs += [mean_job(settings, text=text) for text in others]
    jobs += [learned_job(settings, start=start) for start in STARTS]
    jobs += [learned_job(settings, blocks=2, start=start) for start in ("1", "1 / k")]
    jobs += [learned_job(settings, grain=grain) for grain in GRAINS if grain != "position"]
    jobs += [learned_job(settings, blocks=n) for n in settings.blocks if n not in (2, middle)]
    if not settings.quick:
        jobs += [learned_job(settings, text=text) for text in others]
        jobs += [learned_job(settings, blocks=1)]  # nothing is cut: what scales can do beside putting blocks together
        jobs += [learned_job(settings, rate=rate) for rate in settings.other_rates]
        jobs += [learned_job(settings, rate=max(settings.other_rates), start="1")]
    jobs += [learned_job(settings, seed=seed) for seed in range(1, settings.seeds)]
    return list(dict.fromkeys(jobs))


def generation_jobs(settings: PretrainedSettings) -> list[Job]:
    """Return the different jobs whose softmax continues the prompts, the full softmax first."""
    middle, most = settings.middle, max(settings.blocks)
    jobs = [
        Job("whole"),
        Job("none", middle),
        Job("1 / k", middle),
        mean_job(settings),
        mean_job(settings, grain="head"),
    ]
    jobs += [learned_job(settings, start=start) for start in STARTS]
    jobs += [learned_job(settings, blocks=n) for n in dict.fromkeys((min(settings.blocks), most)) if n != middle]
    return jobs


# -------------------------------------------------------------------- the evaluator
class PretrainedEvaluator(VariantEvaluator):
    """A pretrained model, and the measurements of its softmax variants.

    Attributes:
        digest: of the model's own weights when it was loaded.
        tests: by text, ids (N, W + 1) of its held-out part.
        prompts: the beginnings of some of them.
    """

    def __init__(self, settings: PretrainedSettings, frozen: FrozenModel | None = None) -> None:
        frozen = frozen or load_frozen_model(settings)
        blocks = (settings.middle, *settings.blocks)
        folder = settings.output / "scales"
        super().__init__(frozen, folder, settings.steps, settings.batch_size, settings.measured_windows, blocks)
        self.settings, self.digest = settings, digest(frozen.model)
        self.tests = {text: frozen.rows(text, "test", settings.test_windows) for text in TEXTS}
        n_read = frozen.window * 3 // 4
        self.prompts = [row[:n_read] for rows in self.tests.values() for row in rows[: settings.prompts]]

    def measure(self, job: Job) -> dict[str, Any]:
        """Return "losses", "seconds", "seconds_of_learning", "texts"; first Job("whole"), whose files others read."""
        started = time.perf_counter()
        losses = self.prepare(job)
        prepared = time.perf_counter()
        seconds = {"seconds_of_learning": prepared - started}
        texts = {}
        for text, rows in self.tests.items():
            found = read(self.frozen.model, rows, 4)
            same = float((found.top1 == self._top1(text, job, found.top1)).mean())
            each, bins = found.losses.mean(axis=1), np.array_split(found.losses, min(BINS, rows.shape[1] - 1), axis=1)
            texts[text] = {
                "perplexity": round(math.exp(each.mean()), DIGITS),
                "same": round(same, DIGITS),
                "windows": [round(float(loss), DIGITS) for loss in each],
                "positions": [round(float(part.mean()), DIGITS) for part in bins],
            }
        seconds["seconds"] = time.perf_counter() - started
        return {
            **{name: round(value, 1) for name, value in seconds.items()},
            "losses": [round(loss, 4) for loss in losses],
            "texts": texts,
        }

    def explained(self) -> dict[str, dict[str, float]]:
        """Return {number of blocks as str: {grain: fraction of variance that means explain}}."""
        shares = self.shares(self.settings.text)
        return {
            str(n): {grain: round(explained(shares, n, grain), DIGITS) for grain in GRAINS}
            for n in self.settings.blocks
        }

    def write(self, job: Job) -> dict[str, Any]:
        """Return the job's fields with "tokens", each prompt's greedy continuation by its softmax, and "seconds"."""
        self.prepare(job)
        started = time.perf_counter()
        tokens = generate_batch(self.frozen.model, self.prompts, self.settings.n_written, temperature=0)
        return {**job._asdict(), "tokens": tokens, "seconds": round(time.perf_counter() - started, 1)}

    def _top1(self, text: str, job: Job, found: np.ndarray) -> np.ndarray:
        """Return a text's top-1 tokens with full softmax from a file; for job "whole" write `found` there first."""
        path = self.folder / f"top1-{text}.npy"
        if job.kind == "whole":
            with atomic_write(path) as file:
                np.save(file, found)
        return np.load(path, allow_pickle=False)


def compare(written: list[dict[str, Any]], tokeniser: Any) -> Iterator[dict[str, Any]]:
    """Yield each variant's job fields, "same", "until", "repeated" and "texts", against the full softmax, the first."""
    full = written[0]["tokens"]
    for variant in written:
        pairs = list(zip(variant["tokens"], full))
        yield {
            **{name: variant[name] for name in Job._fields},
            "same": float(np.mean([np.mean([a == b for a, b in zip(*pair)]) for pair in pairs])),
            "until": float(np.mean([common_prefix_length(*pair) for pair in pairs])),
            "repeated": float(np.mean([repeated_fraction(tokens) for tokens in variant["tokens"]])),
            "texts": [tokeniser.decode(tokens) for tokens in variant["tokens"]],
        }
