"""The model, its softmax cut into blocks, scales that learn, and what is measured.

Shapes: B batch, T tokens, S keys, H heads, W context window.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from tricycle import devices
from tricycle.checkpoint import load_checkpoint
from tricycle.configs import GPTConfig
from tricycle.devices import to_cpu
from tricycle.evaluation import HeldOut, evaluate
from tricycle.models import GPT
from tricycle.softmaxes import BlockSoftmax
from tricycle.tokeniser import BPETokeniser
from tricycle.training_state import new_state, resume_state, train_step
from tricycle_datasets.corpus import Corpus
from tricycle_datasets.shakespeare import Shakespeare
from tricycle_datasets.text import TextFiles
from tricycle_lab.probe import Probe, spikiness

BYTES = 257  # the vocabulary: single bytes and the end of a text
MEASURED_WINDOWS = 64  # of training text, for the mean of the exact statistics
SEEN_WINDOWS = 8  # of held-out text, for spikiness
SAVE_INTERVAL = 250


@dataclass(frozen=True)
class Settings:
    """What to take apart, how long to learn, and where to leave what came out."""

    quick: bool = False
    """a smaller model, fewer blocks and one seed: at most 3 minutes on two CPU cores"""
    model: Path | None = None
    """a run folder or checkpoint whose model to take, instead of training one"""
    files: tuple[Path, ...] = ()
    """your own text files or folders of them, instead of tiny Shakespeare"""
    blocks: tuple[int, ...] = (2, 4, 8)
    """into how many blocks to cut the softmax"""
    seeds: int = 3
    """how often to learn the scales, each time on other batches"""
    models: int = 1
    """how many models to train, from other first weights on other batches"""
    width: int = 128
    """channels of the model trained here"""
    layers: int = 4
    """its transformer blocks"""
    heads: int = 4
    """attention heads in each, a divisor of the width"""
    context_window: int = 256
    """the most tokens it sees at once"""
    batch_size: int = 8
    """sequences a batch, for the model, the scales and measuring"""
    steps: int = 1500
    """updates of the model"""
    scale_steps: int = 400
    """updates of the scales"""
    scale_rate: float = 1e-2
    """the scales' learning rate, which falls to 0 along half a cosine"""
    equal_start: bool = False
    """let the scales begin at 1 / k for each of the k blocks that a position sees, instead of at 1"""
    windows: int = 0
    """held-out windows to measure perplexity on, spread evenly; 0 for all"""
    output: Path = Path("runs/learned_statistics")
    """the folder for everything"""
    device: str = "auto"
    """"auto" takes a GPU if there is one, "cpu" does not"""


class Subject(NamedTuple):
    """A model that is taken apart, and texts in its tokens.

    Of the model, this experiment asks for logits, a context window and `attention.use_softmax` in each of its `blocks`.
    """

    model: GPT
    tokeniser: BPETokeniser
    train: Any
    held_out: HeldOut

    @property
    def window(self) -> int:
        return self.model.config.context_window


# -------------------------------------------------------------------- the model
def new_subject(settings: Settings, seed: int) -> Subject:
    """The model that --model names, or one that is trained here, frozen. All that asks for our own GPT is here.

    Raises:
        ValueError: a model that learned with another softmax, or a tokeniser that does not fit.
    """
    on_gpu = settings.device != "cpu" and devices.gpu_problem() is None
    checkpoint = load_checkpoint(find_checkpoint(settings.model)) if settings.model else None
    tokeniser = checkpoint.tokeniser() if checkpoint else None
    words = (None if tokeniser else BYTES, tokeniser)
    corpus: Corpus = TextFiles(settings.files, *words) if settings.files else Shakespeare(*words)
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
    tokens = np.concatenate([[corpus.tokeniser.end_of_text], corpus.validation])
    return Subject(model, corpus.tokeniser, corpus.train, HeldOut(tokens, len(corpus.validation_bytes)))


def find_checkpoint(path: Path) -> Path:
    """A checkpoint as it is; of a run folder its best one, else its last."""
    best = path / "best.safetensors"
    return path if not path.is_dir() else best if best.exists() else path / "last.safetensors"


def new_config(settings: Settings, seed: int) -> GPTConfig:
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
    """Train, going on from the checkpoint at `path` if there is one, to its end if it has come there."""
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


# -------------------------------------------------------------------- blocks and their scales
def cut(model: GPT, n_blocks: int, correction: str = "learned", per_head: bool = False) -> list[Any]:
    """Let each layer's softmax work in blocks from now on.

    Returns:
        the layers' scales, ([H,] n_blocks, W), each 1, if they are "learned": the only parameters that are not frozen.
    """
    for block in model.blocks:
        block.attention.use_softmax(BlockSoftmax(n_blocks, correction, per_head))
    return [block.attention.softmax_scales for block in model.blocks]


def make_whole(model: GPT) -> None:
    """Undo `cut`."""
    for block in model.blocks:
        block.attention.use_softmax("softmax")


def set_scales(layers: list[Any], arrays: list[np.ndarray]) -> None:
    """Put values, one array a layer, into what `cut` returned."""
    for scales, array in zip(layers, arrays, strict=True):
        scales.array[...] = scales.xp.asarray(array)


def learn(subject: Subject, n_blocks: int, per_head: bool, seed: int, settings: Settings) -> list[np.ndarray]:
    """Cut the softmax and let the scales learn to predict the next token of the training text."""
    scales = cut(subject.model, n_blocks, "learned", per_head)
    if settings.equal_start:
        set_scales(scales, [equal_shares(n_blocks, subject.window)] * len(scales))
    config = dataclasses.replace(
        subject.model.config,
        batch_size=settings.batch_size,
        accumulation_steps=1,
        steps=settings.scale_steps,
        minutes=0.0,
        max_learning_rate=settings.scale_rate,
        min_learning_rate=0.0,
        warmup_steps=0,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.999,
        max_gradient_norm=0.0,
        seed=seed,
    )
    state = new_state(config, subject.train, model=subject.model)
    title = f"{n_blocks} blocks, scales {'per head' if per_head else 'per layer'}, seed {seed}"
    with tqdm(total=config.steps, desc=title, unit="step", position=1, leave=False, dynamic_ncols=True) as bar:
        while state.step < config.steps:
            loss, _ = train_step(state)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()
    return [to_cpu(parameter.array) for parameter in scales]


def block_starts(n_blocks: int, window: int) -> np.ndarray:
    """Where the blocks of keys begin, as `BlockSoftmax` cuts them."""
    return np.arange(0, window, max(1, -(-window // n_blocks)))


def equal_shares(n_blocks: int, window: int) -> np.ndarray:
    """Scales (n_blocks, W) that know nothing but how many blocks a position sees: 1 / k for each of k."""
    n_seen = np.searchsorted(block_starts(n_blocks, window), np.arange(window), side="right")
    return np.tile(1 / n_seen, (n_blocks, 1)).astype(np.float32)


def mean_shares(subject: Subject, n_blocks: int, per_head: bool) -> list[np.ndarray]:
    """What flash attention would compute, on average over training text: scales by measuring, with no gradient.

    Returns:
        ([H,] n_blocks, W) for each layer.
    """
    make_whole(subject.model)
    window, totals = subject.window, list[np.ndarray]()
    starts = np.linspace(0, len(subject.train) - window, MEASURED_WINDOWS).astype(int)
    edges = block_starts(n_blocks, window)
    for start in starts:
        row = np.asarray(subject.train[start : start + window], np.int64)[None]
        shares = [np.add.reduceat(w[0], edges, axis=-1) for w in look(subject.model, row).values()]  # (H, T, n_blocks)
        totals = [a + b for a, b in zip(totals, shares)] or shares
    means = [total.swapaxes(1, 2) / len(starts) for total in totals]
    full = [np.zeros((len(mean), n_blocks, window), np.float32) for mean in means]  # some blocks may have no keys
    for array, mean in zip(full, means):
        array[:, : len(edges)] = mean
    return full if per_head else [array.mean(axis=0) for array in full]


# -------------------------------------------------------------------- measuring
def loss_of(subject: Subject, settings: Settings) -> float:
    """The held-out loss in nats a token, in windows of the full context window, which need all scales."""
    n_batches = -(-settings.windows // settings.batch_size)
    return evaluate(subject.model, subject.held_out.tokens, settings.batch_size, n_batches)[0]


def look(model: GPT, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Attention weights (B, H, T, T) of each layer, for tokens (B, T)."""
    with model.evaluating(), Probe(model) as probe:
        model(model.place(rows))
    return {name: to_cpu(weights) for name, weights in probe.weights.items()}


def held_out_rows(subject: Subject, n_rows: int) -> np.ndarray:
    """Windows of held-out text (n_rows, W), spread evenly."""
    tokens, window = subject.held_out.tokens, subject.window
    starts = np.linspace(0, len(tokens) - window, n_rows + 2).astype(int)[1:-1]
    return np.stack([np.asarray(tokens[start : start + window], np.int64) for start in starts])


def about_maps(maps: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Means over rows, heads and texts, for each layer.

    Returns:
        "spikiness": of rows divided by their sum. "distance": the sum of |weight - weight of the whole softmax|.
    """
    return {
        "spikiness": [float(np.nanmean(spikiness(weights))) for weights in maps.values()],
        "distance": [float(abs(maps[name] - whole[name]).sum(axis=-1).mean()) for name in whole],
    }
