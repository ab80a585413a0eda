"""Train small GPTs with three softmax variants, and measure their attention sinks, outliers and induction circuits.

Shapes: N texts, T tokens, L layers, H heads.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.attention_sink.study import Change, hide_first, remove_values
from experiments.quiet_attention.outliers import measure_outliers
from experiments.shared.language_models import token_losses
from experiments.shared.program import check_minimum
from experiments.shared.results import Record, rounded, select
from tricycle.configs import ModelConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimiser_rules import Muon
from tricycle.scheduler import WarmupCosine
from tricycle.training import supervised_loss, train_on_batch
from tricycle_datasets.corpus import Corpus
from tricycle_datasets.python_code import PythonCode
from tricycle_lab.circuits import measure_faithfulness, rank_heads
from tricycle_lab.head_scores import score_weights
from tricycle_lab.hooks import add_hook
from tricycle_lab.patching import Prompts, patch_activations
from tricycle_lab.probe import Probe, unassigned_weight, weight_kurtosis

VARIANTS = ("softmax", "softmax1", "sink")
VOCAB_SIZE = 512
LEARNING_RATE = 8e-3
WARMUP = 50  # steps
ROTARY_BASE = 100.0  # the texts are short
N_RANDOM = 64  # token ids of which random texts consist, all ids would need a longer training
MIN_PERIOD = 6  # tokens of a random text before it is repeated
N_PROMPTS = 12  # pairs of the induction task
PROMPT_TOKENS = 24  # of a prompt of the induction task before the repetition
N_CURVE = 24  # evaluations of the loss on repeated tokens in a training


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study of circuits with attention sinks."""

    steps: int = 1500  # updates of each model
    seeds: int = 3  # models of each softmax variant
    batch_size: int = 16  # texts in an update, half of them source code, half repeated random tokens
    tokens: int = 64  # of a text, the start token included
    width: int = 64  # of the residual stream
    layers: int = 2  # of a model, each with four heads
    texts: int = 32  # held-out texts of each kind that are measured
    quick: bool = False  # a smaller study of at most three minutes
    output: Path = Path("runs/sink_circuits")  # the output folder


QUICK: dict[str, Any] = {"steps": 300, "seeds": 1, "texts": 8}


def check(settings: Settings) -> None:
    """Raise ValueError if steps, batch size, tokens or another count is out of range."""
    shortest, longest = 2 * PROMPT_TOKENS + 1, 2 * N_RANDOM + 1  # `measure_heads` and `repeated_rows` need as many
    check_minimum(settings, steps=1, seeds=1, batch_size=2, tokens=shortest, width=8, layers=1, texts=1)
    if settings.tokens > longest:
        raise ValueError(f"expected --tokens to be at most {longest}, got {settings.tokens}")


# -------------------------------------------------------------------- texts
def code_rows(tokens: Any, n: int, n_tokens: int, start: int, generator: np.random.Generator) -> np.ndarray:
    """Return n random excerpts of source code after the start token, (n, n_tokens + 1)."""
    first = generator.integers(0, len(tokens) - n_tokens, n)
    rows = np.stack([np.asarray(tokens[i : i + n_tokens], np.int64) for i in first])
    return np.insert(rows, 0, start, axis=1)


def repeated_rows(n: int, n_tokens: int, start: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return n texts of repeated random tokens after the start token, (n, n_tokens + 1), and their periods (n,).

    The periods differ, so that a head that attends at a fixed distance cannot predict the repetition.
    """
    periods = generator.integers(MIN_PERIOD, n_tokens // 2 + 1, n)
    rows = [np.resize(generator.choice(N_RANDOM, period, replace=False), n_tokens) for period in periods]
    return np.insert(np.stack(rows), 0, start, axis=1), periods


def batches(corpus: Corpus, settings: Settings, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield endless (inputs, labels), each (batch_size, T): half of them source code, half repeated tokens."""
    generator, start = np.random.default_rng((1, seed)), corpus.tokeniser.end_of_text
    n_repeated = settings.batch_size // 2
    while True:
        code = code_rows(corpus.train, settings.batch_size - n_repeated, settings.tokens, start, generator)
        rows = np.concatenate([code, repeated_rows(n_repeated, settings.tokens, start, generator)[0]])
        yield rows[:, :-1], rows[:, 1:]


def induction_prompts(start: int, generator: np.random.Generator) -> list[Prompts]:
    """Return pairs of prompts "... x y ... z w ... x" and "... z y ... x w ... x", with the answers y and w."""
    pairs = []
    for _ in range(N_PROMPTS):
        text = generator.choice(N_RANDOM, PROMPT_TOKENS, replace=False).astype(int)
        first, second = 2 + 2 * generator.choice(PROMPT_TOKENS // 2 - 2, 2, replace=False)
        other = text.copy()
        other[[first, second]] = text[[second, first]]
        end = [int(text[first])]
        clean, corrupted = ([start, *map(int, row), *end] for row in (text, other))
        pairs.append(Prompts(clean, corrupted, (int(text[first + 1]), int(text[second + 1]))))
    return pairs


# -------------------------------------------------------------------- training
def train(corpus: Any, settings: Settings, variant: str, seed: int, repeated: Any) -> tuple[GPT, list[list[float]]]:
    """Train a model; return it, and pairs of steps and losses on the repetitions of `repeated` (rows, periods)."""
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        context_window=settings.tokens,
        embedding_dim=settings.width,
        n_heads=4,
        n_layers=settings.layers,
        positions="rotary",
        rotary_base=ROTARY_BASE,
        norm="rms_norm",
        bias=False,
        softmax=variant,
        seed=seed,
    )
    model = GPT(config)
    schedule = WarmupCosine(LEARNING_RATE, LEARNING_RATE / 10, min(WARMUP, settings.steps), settings.steps)
    optimiser = Muon(schedule, betas=(0.9, 0.95), weight_decay=0.1, matrix_rate=1.25)
    loss, curve = supervised_loss(model, CrossEntropy()), []
    data = batches(corpus, settings, seed)
    for step in tqdm(range(1, settings.steps + 1), desc=f"{variant} {seed}", unit="step"):
        train_on_batch(model.train(), optimiser, loss, next(data), max_norm=1.0)
        if step % max(1, settings.steps // N_CURVE) == 0:
            curve.append([step, repetition_loss(model, *repeated)])
    model.eval()
    return model, curve


def repetition_loss(model: GPT, rows: np.ndarray, periods: np.ndarray) -> float:
    """Return the loss on the repetitions of random tokens, in nats per token."""
    losses = token_losses(model, rows)
    return float(np.mean([row[period:].mean() for row, period in zip(losses, periods)]))


# -------------------------------------------------------------------- changes
def hide_first_token(model: GPT, probe: Probe, undo: ExitStack) -> None:
    """Hide the first token from all later ones, in all heads, until `undo` closes."""

    def substitute(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        query, key, value, _, *rest = (*args, None)[: max(4, len(args))]
        return op, (query, key, value, hide_first(query.shape[1]), *rest)

    for block in model.blocks:
        undo.callback(add_hook(block.attention.attention, "substitutions", substitute))


def use_softmax(model: GPT, probe: Probe, undo: ExitStack) -> None:
    """Replace the softmax variant by the standard softmax, whose weights sum to 1, until `undo` closes."""
    undo.callback(probe.change_softmax("*", "softmax").close)


CHANGES: dict[str, Change | None] = {
    "none": None,
    "values of the first token removed": remove_values,
    "first token hidden": hide_first_token,
    "standard softmax": use_softmax,
}


def changed_losses(model: GPT, code: np.ndarray, repeated: Any, change: Change | None) -> list[float]:
    """Return the losses on code and on repetitions, in nats per token, of a model with a change."""
    with Probe(model, "blocks.*") as probe, ExitStack() as undo:
        if change is not None:
            change(model, probe, undo)
        return [float(token_losses(model, code).mean()), repetition_loss(model, *repeated)]


def measure_heads(model: GPT, start: int) -> dict[str, Any]:
    """Return measures (L, H) of all heads on texts of PROMPT_TOKENS random tokens, repeated once.

    Returns:
        the scores of `score_weights`, and the weight on the first token and on no token, of queries "before" and
        "after" the repetition begins.
    """
    generator = np.random.default_rng(4)
    random = np.stack([generator.choice(N_RANDOM, PROMPT_TOKENS, replace=False) for _ in range(N_PROMPTS)])
    with model.evaluating(), Probe(model, "blocks.*.attention") as probe:
        model.hidden_states(model.place(np.insert(np.tile(random, 2), 0, start, axis=1)))
    weights = np.stack([probe.weights[f"blocks.{i}.attention"] for i in range(len(model.blocks))])
    layers = [score_weights(layer, PROMPT_TOKENS) for layer in weights]
    measures = {name: [getattr(scores, name).tolist() for scores in layers] for name in layers[0]._fields}
    parts = {"before": slice(PROMPT_TOKENS // 2, PROMPT_TOKENS), "after": slice(PROMPT_TOKENS + 1, None)}
    for part, queries in parts.items():
        chosen = weights[:, :, :, queries]
        measures[f"first_{part}"] = chosen[..., 0].mean(axis=(1, 3)).tolist()
        measures[f"nothing_{part}"] = unassigned_weight(chosen).mean(axis=(1, 3)).tolist()
    return measures


# -------------------------------------------------------------------- the study
def measure(model: GPT, code: np.ndarray, repeated: Any, start: int) -> dict[str, Any]:
    """Return "losses", "outliers", "heads", "effects", "faithfulness", "weight_kurtosis", "sinks" as JSON data.

    Args:
        code: texts (N, T + 1). repeated: (rows, periods), see `repeated_rows`.
    """
    outliers = measure_outliers(model, code[:, :-1])
    prompts = induction_prompts(start, np.random.default_rng(5))
    effects = np.mean([patch_activations(model, pair, "heads") for pair in prompts], axis=0)
    order = rank_heads(effects)
    counts = range(len(order) + 1)
    faithfulness = np.mean([measure_faithfulness(model, pair, order, counts) for pair in prompts], axis=0)
    kurtosis = [value for name, value in weight_kurtosis(model).items() if "blocks" in name]
    return {
        "losses": {name: changed_losses(model, code, repeated, change) for name, change in CHANGES.items()},
        "outliers": {name: value for name, value in outliers.as_dict().items() if name != "tokens"},
        "heads": measure_heads(model, start),
        "effects": effects.tolist(),
        "faithfulness": faithfulness.tolist(),
        "weight_kurtosis": float(np.mean(kurtosis)),
        "sinks": [
            None if block.attention.softmax_scales is None else block.attention.softmax_scales.array.tolist()
            for block in model.blocks
        ],
    }


def run_one(corpus: Corpus, settings: Settings, variant: str, seed: int) -> dict[str, Any]:
    """Train a model and return its measures, with "variant", "seed" and the "curve" of the loss on repetitions."""
    start, generator = corpus.tokeniser.end_of_text, np.random.default_rng(0)
    code = code_rows(corpus.validation, settings.texts, settings.tokens, start, generator)
    repeated = repeated_rows(settings.texts, settings.tokens, start, generator)
    model, curve = train(corpus, settings, variant, seed, repeated)
    return rounded({"variant": variant, "seed": seed, "curve": curve, **measure(model, code, repeated, start)}, 4)


def run(settings: Settings) -> list[dict[str, Any]]:
    """Train and measure all models that are not yet in the results of the output folder; return all measures."""
    corpus, record = PythonCode(VOCAB_SIZE, progress=False), Record(settings, runs=[])
    for seed in range(settings.seeds):
        for variant in VARIANTS:
            if not select(record["runs"], seed=seed, variant=variant):
                record.append("runs", run_one(corpus, settings, variant, seed))
    return record["runs"]
