"""Compare: a softmax of your own with the built-in ones, by training the same small GPT with each."""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tricycle.configs.model import ModelConfig
from tricycle.dataset import CausalLMDataset
from tricycle.evaluation import evaluate
from tricycle.functions import RowSoftmax
from tricycle.gradcheck import gradcheck
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import check_positive
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.softmaxes import SOFTMAXES
from tricycle.tokeniser import BPETokeniser
from tricycle.training import supervised_loss, train_on_batch
from tricycle_cli.flags import parse
from tricycle_lab.look.functions import module_of
from tricycle_lab.look.page import page, write_page

N_BYTES = 600_000  # of text to learn from
SHAPE = ModelConfig(vocab_size=512, context_window=64, embedding_dim=64, n_heads=4, n_layers=2)
BATCH, RATE = 16, 3e-3
MEASURED = 10  # times along a run


@dataclass(frozen=True)
class Arguments:
    """What to compare."""

    softmax: Path
    """a file of your own, which is run, with a subclass of tricycle.functions.RowSoftmax: a way to weigh keys"""
    steps: int = 300
    """updates of each run"""
    seeds: int = 2
    """runs with each softmax: their first weights and batches are the same for all of them"""
    against: tuple[str, ...] = tuple(SOFTMAXES)
    """built-in ways to compare with"""
    out: Path = Path("softmax.html")
    """the page to write"""


class Run(NamedTuple):
    """One training."""

    losses: list[float]  # held-out losses along the way, in nats a token
    seconds: float  # a step, the median


def main(args: Sequence[str] | None = None) -> None:
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    check_positive("bench", steps=arguments.steps, seeds=arguments.seeds)
    for name in arguments.against:
        if name not in SOFTMAXES:
            raise ValueError(f"expected --against to be of {', '.join(SOFTMAXES)}, got {name!r}")
    started = time.perf_counter()
    with own_softmax(arguments.softmax) as own:
        names = [own, *(name for name in arguments.against if name != own)]
        text, held_out = corpus()
        steps = steps_of(arguments.steps)
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for seed in range(arguments.seeds):
            for name in names:
                runs[name].append(train(name, seed, steps, text, held_out))
                shown = f"{name}, seed {seed}: held-out loss {runs[name][-1].losses[-1]:.4f} nats a token"
                print(f"{shown}, {1000 * runs[name][-1].seconds:.1f} ms a step", file=sys.stderr, flush=True)
    rows = [summary(name, runs[name]) for name in names]
    result = {
        "own": own,
        "file": arguments.softmax.name,
        "source": arguments.softmax.read_text(encoding="utf-8", errors="replace")[:20_000],
        "steps": steps,
        "seeds": arguments.seeds,
        "shape": f"{SHAPE.n_layers} layers of width {SHAPE.embedding_dim}, {SHAPE.n_heads} heads, "
        f"{SHAPE.context_window} tokens, batches of {BATCH}",
        "softmaxes": rows,
        "minutes": round((time.perf_counter() - started) / 60, 1),
    }
    write_page(arguments.out, page("bench", f"{own} beside built-in softmaxes", result))
    for row in rows:
        print(f"{row['name']:<12}{row['mean']:.4f} ± {row['spread']:.4f} nats a token, {row['ms']:.1f} ms a step")
    print(f"{arguments.out}: the page")


@contextmanager
def own_softmax(path: Path) -> Iterator[str]:
    """Within this block the softmax of a file is among those that a config may name; its name.

    Raises:
        FileNotFoundError, ValueError: no file, no softmax in it, or one that is wrong.
    """
    before = dict(SOFTMAXES)
    try:
        module = module_of(path)
        added = [name for name in SOFTMAXES if name not in before]
        if not added:
            kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, RowSoftmax)]
            kinds = [kind for kind in kinds if kind.__module__ == module.__name__]
            if not kinds:
                raise ValueError(f"{path}: expected a subclass of tricycle.functions.RowSoftmax in it, got none")
            SOFTMAXES[kinds[-1].__name__] = kinds[-1]
            added = [kinds[-1].__name__]
        check(path, SOFTMAXES[added[-1]]())
        yield added[-1]
    finally:
        SOFTMAXES.clear()
        SOFTMAXES.update(before)


def check(path: Path, softmax: Any) -> None:
    """Raise ValueError for a softmax whose gradient is wrong, or that lets hidden keys be seen."""
    title = f"{path}: {type(softmax).__name__}"
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 5))
    try:
        gradcheck(softmax, scores)
        hidden = np.where(np.tri(5, dtype=bool), rng.standard_normal((5, 5)), -np.inf).astype(np.float32)
        weights = softmax.row_softmax(hidden.copy())
    except Exception as error:
        raise ValueError(f"{title}: {type(error).__name__}: {error}") from error
    if weights.shape != hidden.shape or not np.isfinite(weights).all():
        raise ValueError(f"{title}: expected finite weights for rows with hidden keys (scores of -inf)")
    if weights[np.isinf(hidden)].any():
        raise ValueError(f"{title}: expected weights of 0 for hidden keys (scores of -inf)")


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Return tokens of Python's standard library to learn from, and of other files of it to be tested on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_bytes() for path in files]
    held_out = b"".join(texts[::10])[: N_BYTES // 10]
    text = b"".join(part for i, part in enumerate(texts) if i % 10)[:N_BYTES]
    if len(held_out) < 2000 or len(text) < 10_000:
        raise ValueError("expected the source files of Python's standard library to learn from, found none")
    tokeniser = BPETokeniser(SHAPE.vocab_size).train(text, progress=False)
    return tokeniser.encode(text).astype(np.int64), tokeniser.encode(held_out).astype(np.int64)


def steps_of(n_steps: int) -> list[int]:
    """After which steps to measure: the last among them."""
    return sorted({max(1, round(n_steps * (i + 1) / MEASURED)) for i in range(MEASURED)})


def train(name: str, seed: int, steps: Sequence[int], text: np.ndarray, held_out: np.ndarray) -> Run:
    """A small GPT with a softmax: the same weights and batches for each of them."""
    model = GPT(replace(SHAPE, softmax=name, seed=seed))
    n_steps = steps[-1]
    schedule = WarmupCosine(RATE, RATE / 10, min(100, n_steps), n_steps)
    optimiser = AdamW(schedule, betas=(0.9, 0.98), weight_decay=0.1)
    batch_loss = supervised_loss(model, CrossEntropy())
    batches = CausalLMDataset(text, SHAPE.vocab_size, BATCH, SHAPE.context_window, seed).batch().shuffle()
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(1, n_steps + 1):
        start = time.perf_counter()
        train_on_batch(model, optimiser, batch_loss, next(batches), max_norm=1.0)
        seconds.append(time.perf_counter() - start)
        if step in steps:
            losses.append(evaluate(model, held_out, BATCH, n_batches=12)[0])
    return Run(losses, float(np.median(seconds)))


def summary(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The mean of some runs, and how far they lie apart."""
    last = np.array([run.losses[-1] for run in runs])
    return {
        "name": name,
        "losses": [[round(loss, 5) for loss in run.losses] for run in runs],
        "mean": round(float(last.mean()), 5),
        "spread": round(float(last.std(ddof=1)) if len(last) > 1 else 0.0, 5),
        "ms": round(1000 * float(np.median([run.seconds for run in runs])), 2),
    }
