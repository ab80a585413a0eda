"""Train a small GPT, replace its softmax by block softmax, and measure it."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.learned_statistics.blocks import FrozenModel, Job, VariantEvaluator
from experiments.shared.program import check_minimum, words
from experiments.shared.texts import held_out
from tricycle import devices
from tricycle.checkpoint import load_checkpoint
from tricycle.configs import GPTConfig
from tricycle.evaluation import HeldOut, evaluate
from tricycle.models import GPT
from tricycle.training_state import new_state, resume_state, train_step
from tricycle_datasets.corpus import Corpus
from tricycle_datasets.shakespeare import Shakespeare
from tricycle_datasets.text import TextFiles
from tricycle_lab.probe import spikiness

BYTES = 257  # the vocabulary: single bytes and the end of a text
MEASURED_WINDOWS = 64  # of training text, for the mean of the exact statistics
SEEN_WINDOWS = 8  # of held-out text, for spikiness
SAVE_INTERVAL = 250
# Settings that may change when the command is repeated: they only add rows.
FREE = ("quick", "blocks", "seeds", "models", "device")


@dataclass(frozen=True)
class Settings:
    """The models, the training of the scales, and the output folder."""

    quick: bool = False  # a smaller model, fewer blocks and one seed: at most 3 minutes on two CPU cores
    model: str = ""  # a run folder or checkpoint to use instead of training a model
    files: tuple[str, ...] = ()  # text files or folders to use instead of tiny Shakespeare
    blocks: tuple[int, ...] = (2, 4, 8)  # the numbers of blocks of the softmax
    seeds: int = 3  # trainings of the scales, each on other batches
    models: int = 1  # models to train, each with other initial weights and batches
    width: int = 128  # channels of the model trained here
    layers: int = 4  # its transformer blocks
    heads: int = 4  # attention heads in each, a divisor of the width
    context_window: int = 256  # the context length in tokens
    batch_size: int = 8  # sequences a batch, for the model, the scales and measuring
    steps: int = 1500  # updates of the model
    scale_steps: int = 400  # updates of the scales
    scale_rate: float = 1e-2  # the scales' learning rate, which falls to 0 along half a cosine
    equal_start: bool = False
    """initialize the scales with 1 / k for each of the k visible blocks, instead of 1"""
    windows: int = 0  # held-out windows to measure perplexity on, evenly spaced; 0 for all
    output: Path = Path("runs/learned_statistics")  # the output folder
    device: str = "auto"  # "auto" uses a GPU if there is one; "cpu" does not


QUICK: dict[str, Any] = {
    "blocks": (2, 4),
    "seeds": 1,
    "width": 64,
    "layers": 3,
    "context_window": 128,
    "steps": 2000,
    "scale_steps": 300,
    "windows": 128,
}


def check(settings: Settings) -> None:
    """Raise ValueError for a count below its minimum, scale_rate <= 0, bad blocks, or several models with --model."""
    check_minimum(settings, seeds=1, models=1, steps=1, scale_steps=1, batch_size=1, layers=1, windows=0)
    if not settings.scale_rate > 0:
        raise ValueError(f"expected --scale-rate to be above 0, got {settings.scale_rate}")
    if min(settings.blocks, default=0) < 2 or len({*settings.blocks}) < len(settings.blocks):
        raise ValueError(f"expected --blocks of 2 or more, each once, got {words(settings.blocks)}")
    if settings.model and settings.models > 1:
        raise ValueError(f"expected one model with --model, got --models {settings.models}")


# -------------------------------------------------------------------- the model
def load_frozen_model(settings: Settings, seed: int) -> tuple[FrozenModel, HeldOut]:
    """Return (frozen model with its texts, held-out text): --model, or one trained here; ValueError if unsuited.

    Raises:
        ValueError: a model that learned with another softmax, or a tokeniser that does not fit.
    """
    on_gpu = settings.device != "cpu" and devices.gpu_problem() is None
    checkpoint = load_checkpoint(find_checkpoint(Path(settings.model))) if settings.model else None
    tokeniser = checkpoint.tokeniser() if checkpoint else None
    vocabulary = (None if tokeniser else BYTES, tokeniser)
    corpus: Corpus = TextFiles(settings.files, *vocabulary) if settings.files else Shakespeare(*vocabulary)
    if checkpoint:
        model = checkpoint.model()
    else:
        model = train_model(new_config(settings, seed), corpus, settings.output / f"model-{seed}.safetensors", on_gpu)
    if model.config.softmax != "softmax":
        raise ValueError(f"expected a model that learned with a plain softmax, got {model.config.softmax}")
    if corpus.tokeniser.n_vocab > model.config.vocab_size:
        known, got = model.config.vocab_size, corpus.tokeniser.n_vocab
        raise ValueError(f"expected a tokeniser of at most {known} tokens, as the model knows, got {got}")
    if on_gpu:
        model.to_gpu()
    model.freeze().eval()
    scored, window = held_out(corpus), model.config.context_window
    parts = {"train": corpus.train, "test": scored.tokens}
    rows = lambda text, part, n: spread_windows(parts[part], n, window)
    return FrozenModel(model, corpus.tokeniser, window, rows), scored


def spread_windows(tokens: Any, n_rows: int, window: int) -> np.ndarray:
    """Return int64 windows (n_rows, window + 1) of a 1-D token array, spread evenly."""
    starts = np.linspace(0, len(tokens) - window - 1, n_rows + 2).astype(int)[1:-1]
    return np.stack([np.asarray(tokens[start : start + window + 1], np.int64) for start in starts])


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint; for a run folder the path of its best, else of its last checkpoint."""
    best = path / "best.safetensors"
    return path if not path.is_dir() else best if best.exists() else path / "last.safetensors"


def new_config(settings: Settings, seed: int) -> GPTConfig:
    """Return the config of the small GPT: a byte vocabulary, sizes from the settings."""
    return GPTConfig(
        vocab_size=BYTES,
        context_window=settings.context_window,
        embedding_dim=settings.width,
        n_heads=settings.heads,
        n_layers=settings.layers,
        bias=False,
        batch_size=settings.batch_size,
        steps=settings.steps,
        max_learning_rate=3e-3,
        min_learning_rate=1e-4,
        warmup_steps=100,
        beta2=0.99,
        seed=seed,
    )


def train_model(config: GPTConfig, corpus: Corpus, path: Path, on_gpu: bool) -> GPT:
    """Train the small GPT, or resume it from `path`; save it there and return it; ValueError for another config."""
    state = resume_state(path, corpus.train, on_gpu) if path.exists() else new_state(config, corpus.train, on_gpu)
    if state.config != config:
        raise ValueError(f"{path}: expected a model with these settings, found another; name another --output")
    with tqdm(total=config.steps, initial=state.step, desc=path.stem, unit="step", dynamic_ncols=True) as bar:
        while state.step < config.steps:
            loss, _ = train_step(state)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()
            if state.step % SAVE_INTERVAL == 0 or state.step == config.steps:
                state.save(path, corpus.tokeniser)
    return state.model


# -------------------------------------------------------------------- measuring
VARIANTS = {  # ways to scale the blocks, by their keys in results.json
    "none": Job("none"),
    "1 / k": Job("1 / k"),
    "measured": Job("mean", grain="position"),
    "measured per head": Job("mean", grain="head and position"),
    "learned": Job("learned", grain="position"),
    "learned per head": Job("learned", grain="head and position"),
    "exact": Job("exact"),
}


def job_of(settings: Settings, kind: str, blocks: int = 1, seed: int = 0) -> Job:
    """Return the job of a kind in VARIANTS, or "whole"; `seed` counts only for learned scales."""
    job = VARIANTS.get(kind, Job(kind))._replace(blocks=blocks)
    if job.kind != "learned":
        return job
    return job._replace(start="1 / k" if settings.equal_start else "1", rate=settings.scale_rate, seed=seed)


def all_rows(settings: Settings) -> list[dict[str, Any]]:
    """Return the arguments {"kind", "blocks", "seed"} of `job_of` for each result row of a model."""
    rows = [{"kind": "whole", "blocks": 1, "seed": 0}]
    for n in settings.blocks:
        for kind, job in VARIANTS.items():
            n_seeds = settings.seeds if job.kind == "learned" else 1
            rows += [{"kind": kind, "blocks": n, "seed": seed} for seed in range(n_seeds)]
    return rows


def new_evaluator(frozen: FrozenModel, number: int, settings: Settings) -> VariantEvaluator:
    """Return a VariantEvaluator for model `number`, which stores its scales in the output folder."""
    folder = settings.output / "scales" / str(number)
    return VariantEvaluator(
        frozen, folder, settings.scale_steps, settings.batch_size, MEASURED_WINDOWS, settings.blocks
    )


def measure(evaluator: VariantEvaluator, job: Job, held_out: HeldOut, settings: Settings) -> dict[str, Any]:
    """Return held-out "loss" (nats per token), "perplexity", "seconds" and "seconds_of_learning" of a job."""
    started = time.perf_counter()
    evaluator.prepare(job)
    prepared = time.perf_counter()
    n_batches = -(-settings.windows // settings.batch_size)
    loss, _ = evaluate(evaluator.frozen.model, held_out.tokens, settings.batch_size, n_batches)
    seconds = {"seconds_of_learning": prepared - started, "seconds": time.perf_counter() - started}
    return {"loss": loss, "perplexity": math.exp(loss), **{name: round(s, 1) for name, s in seconds.items()}}


def map_statistics(maps: dict[str, np.ndarray], full: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Return {"spikiness", "distance": a mean for each layer} of attention maps; distance from `full`.

    Returns:
        "spikiness": of rows divided by their sum. "distance": the sum of |weight - weight of the full softmax|.
    """
    return {
        "spikiness": [float(np.nanmean(spikiness(weights))) for weights in maps.values()],
        "distance": [float(abs(maps[name] - full[name]).sum(axis=-1).mean()) for name in full],
    }
