"""Compare a custom softmax with the built-in ones, by training the same small GPT with each."""

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
from tricycle_datasets.python_code import source_files
from tricycle_lab.look.graph_functions import load_module
from tricycle_lab.look.page import render_page, write_page

N_BYTES = 600_000  # of training text
SHAPE = ModelConfig(vocab_size=512, context_window=64, embedding_dim=64, n_heads=4, n_layers=2)
BATCH_SIZE, LEARNING_RATE = 16, 3e-3
N_EVALUATIONS = 10  # in a run


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle bench`."""

    softmax: Path
    """a Python file, which is executed, with a subclass of tricycle.functions.RowSoftmax (an attention normalizer)"""
    steps: int = 300
    """updates of each run"""
    seeds: int = 2
    """runs with each softmax; runs of the same seed have the same initial weights and batches"""
    against: tuple[str, ...] = tuple(SOFTMAXES)
    """names of the built-in softmaxes for the comparison"""
    out: Path = Path("softmax.html")
    """the HTML page to write"""


class Run(NamedTuple):
    """The result of one training run."""

    losses: list[float]  # the held-out losses during training, in nats per token
    seconds: float  # the median time of a step


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle bench`: train GPTs with a file's softmax and built-in ones; print losses, write an HTML page."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    check_positive("bench", steps=arguments.steps, seeds=arguments.seeds)
    for name in arguments.against:
        if name not in SOFTMAXES:
            raise ValueError(f"expected --against to be of {', '.join(SOFTMAXES)}, got {name!r}")
    started = time.perf_counter()
    with register_softmax(arguments.softmax) as own:
        names = [own, *(name for name in arguments.against if name != own)]
        text, held_out = load_tokens()
        steps = evaluation_steps(arguments.steps)
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for seed in range(arguments.seeds):
            for name in names:
                runs[name].append(train(name, seed, steps, text, held_out))
                shown = f"{name}, seed {seed}: held-out loss {runs[name][-1].losses[-1]:.4f} nats/token"
                print(f"{shown}, {1000 * runs[name][-1].seconds:.1f} ms/step", file=sys.stderr, flush=True)
    rows = [summarize_runs(name, runs[name]) for name in names]
    shape = f"{SHAPE.n_layers} layers of width {SHAPE.embedding_dim}, {SHAPE.n_heads} heads"
    result = {
        "own": own,
        "file": arguments.softmax.name,
        "source": arguments.softmax.read_text(encoding="utf-8", errors="replace")[:20_000],
        "steps": steps,
        "seeds": arguments.seeds,
        "shape": f"{shape}, {SHAPE.context_window} tokens, batches of {BATCH_SIZE}",
        "softmaxes": rows,
        "minutes": round((time.perf_counter() - started) / 60, 1),
    }
    write_page(arguments.out, render_page("bench", f"{own} and built-in softmaxes", result))
    for row in rows:
        print(f"{row['name']:<12}{row['mean']:.4f} ± {row['spread']:.4f} nats/token, {row['ms']:.1f} ms/step")
    print(f"page: {arguments.out}")


@contextmanager
def register_softmax(path: Path) -> Iterator[str]:
    """Execute a file, register its last softmax in SOFTMAXES within a `with`; yield its name; ValueError if unfit.

    Raises:
        FileNotFoundError, ValueError: no such file, no softmax in it, or one that `check_softmax` rejects.
    """
    before = dict(SOFTMAXES)
    try:
        module = load_module(path)
        added = [name for name in SOFTMAXES if name not in before]
        if not added:
            own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
            kinds = {kind.__name__: kind for kind in own if isinstance(kind, type) and issubclass(kind, RowSoftmax)}
            if not kinds:
                raise ValueError(f"{path}: expected a subclass of tricycle.functions.RowSoftmax in it, got none")
            added = [*kinds]
            SOFTMAXES.update(kinds)
        check_softmax(path, SOFTMAXES[added[-1]]())
        yield added[-1]
    finally:
        SOFTMAXES.clear()
        SOFTMAXES.update(before)


def check_softmax(path: Path, softmax: Any) -> None:
    """Check a softmax's gradient by finite differences, and weights of 0 for masked keys; else raise ValueError."""
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
        raise ValueError(f"{title}: expected finite weights for rows with masked keys (scores of -inf), got others")
    if weights[np.isinf(hidden)].any():
        raise ValueError(f"{title}: expected weights of 0 for masked keys (scores of -inf), got others")


def load_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Return int64 ids of training and held-out texts of Python's library by a BPE trained here; ValueError if few."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / name).read_bytes() for name in source_files(root) if "/" not in name]
    held_out = b"".join(texts[::10])[: N_BYTES // 10]
    text = b"".join(part for i, part in enumerate(texts) if i % 10)[:N_BYTES]
    if len(held_out) < 2000 or len(text) < 10_000:
        raise ValueError("expected the source files of Python's standard library, got too few")
    tokeniser = BPETokeniser(SHAPE.vocab_size).train(text, progress=False)
    return tokeniser.encode(text).astype(np.int64), tokeniser.encode(held_out).astype(np.int64)


def evaluation_steps(n_steps: int) -> list[int]:
    """Return up to 10 evenly spaced steps, ascending, after which to evaluate; the last is `n_steps`."""
    return sorted({max(1, round(n_steps * (i + 1) / N_EVALUATIONS)) for i in range(N_EVALUATIONS)})


def train(name: str, seed: int, steps: Sequence[int], text: np.ndarray, held_out: np.ndarray) -> Run:
    """Train a small GPT with a softmax; return held-out losses (nats/token) after `steps` and median seconds per step.

    Runs of the same seed have the same initial weights and batches. The last of `steps` is the number of updates.
    """
    model = GPT(replace(SHAPE, softmax=name, seed=seed))
    n_steps = steps[-1]
    schedule = WarmupCosine(LEARNING_RATE, LEARNING_RATE / 10, min(100, n_steps), n_steps)
    optimiser = AdamW(schedule, betas=(0.9, 0.98), weight_decay=0.1)
    batch_loss = supervised_loss(model, CrossEntropy())
    batches = CausalLMDataset(text, SHAPE.vocab_size, BATCH_SIZE, SHAPE.context_window, seed).batch().shuffle()
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(1, n_steps + 1):
        start = time.perf_counter()
        train_on_batch(model, optimiser, batch_loss, next(batches), max_norm=1.0)
        seconds.append(time.perf_counter() - start)
        if step in steps:
            losses.append(evaluate(model, held_out, BATCH_SIZE, n_batches=12)[0])
    return Run(losses, float(np.median(seconds)))


def summarize_runs(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return "name", "losses" (list per run), last "mean", "spread" (sample std, 0 if one run), median "ms" a step."""
    last = np.array([run.losses[-1] for run in runs])
    return {
        "name": name,
        "losses": [[round(loss, 5) for loss in run.losses] for run in runs],
        "mean": round(float(last.mean()), 5),
        "spread": round(float(last.std(ddof=1)) if len(last) > 1 else 0.0, 5),
        "ms": round(1000 * float(np.median([run.seconds for run in runs])), 2),
    }
