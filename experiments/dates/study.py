"""Train a model, and measure its exact accuracy and its attention. Each random number comes from a named stream.

Shapes: B batch, S source characters, T = 11 target tokens.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.dates import data as dates
from experiments.dates.data import BEGIN, END, FIELDS, IGNORED, ISO_FIELDS, LANGUAGES, MONTH, Example, examples
from experiments.dates.models import MODELS, Seq2SeqHard, new_model
from tricycle import kernels
from tricycle.dataset import Buckets, pad
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.sequences.attentions import reinforce
from tricycle.sequences.beam_search import beam_search
from tricycle.sequences.seq2seq import EncoderDecoder, Transformer
from tricycle.tensor import Tensor, no_grad
from tricycle.training import train_on_batch
from tricycle_lab.probe import Probe

POOL, WEIGHTS, VALIDATION, TEST = range(1, 5)  # streams that share no number
TRAINED = 64  # the most characters of a source in training
# of sources in the test; (0, 0) are dates alone
LENGTHS = [(0, 0), (33, 48), (49, 64), (65, 96), (97, 128), (129, 192), (193, 256), (385, 512)]
CHECKS = 10  # looks at validation dates in a training
SLOW = {"fixed context": 2, "hard": 2, "Transformer": 3}  # times as many steps: by then they learn no more, or little
BASELINE = 0.99  # how much of the mean reward each step keeps
MOST = 10_000  # characters that go through a model at once when it is measured


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study of dates."""

    models: tuple[str, ...] = tuple(MODELS)  # the models, by their names in the table
    seeds: int = 3  # trainings of each model, with other initial weights and texts
    steps: int = 1500  # updates of a training; those of SLOW models are multiplied
    parameters: int = 100_000  # the approximate number of each model
    examples: int = 40_000  # texts to train on
    max_tokens: int = 2048  # of a batch: source characters and answers, padding included
    learning_rate: float = 4e-3  # at its peak, of recurrent models
    transformer_rate: float = 8e-3  # at its peak, of the Transformer
    validated: int = 500  # validation dates for evaluations during training
    tested: int = 500  # unseen dates for each range of lengths; four times as many on texts as in training
    several: bool = False  # use texts of one to four dates, all of which must be converted
    quick: bool = False  # at most three minutes: one seed, shorter trainings, fewer models
    output: Path = Path("runs/dates")  # where results.json (or several.json) and the plots are written


class Texts(NamedTuple):
    """Examples with their tokens: lists of numbers, and (N, 1 + T) filled up with IGNORED."""

    examples: list[Example]
    sources: list[list[int]]
    targets: np.ndarray


def texts(examples: list[Example]) -> Texts:
    """Return Texts: the examples with the token ids of their sources and padded targets."""
    return Texts(examples, [dates.encode(one.source) for one in examples], dates.targets(examples))


@cache
def training_texts(n: int, seed: int) -> Texts:
    """Return `n` training texts of one date each, in an order that depends on `seed`; cached."""
    training, _, _ = dates.split()
    generator = np.random.default_rng((POOL, seed))
    return texts(examples([training[i] for i in generator.permutation(len(training))], n, (0, TRAINED), generator))


@cache
def held_out(part: str, n: int, lengths: tuple[int, int]) -> Texts:
    """Return n texts of `lengths` with unseen dates of "validation" or "test", the same for all models; cached."""
    number = {"validation": VALIDATION, "test": TEST}[part]
    days = dates.split()[1 if part == "validation" else 2]
    return texts(examples(days, n, lengths, np.random.default_rng((number, *lengths))))


def batches(sources: list[list[int]]) -> Iterator[np.ndarray]:
    """Yield index arrays that together contain each text once, in batches of similar lengths."""
    return iter(Buckets([len(source) for source in sources], max(MOST, *map(len, sources))).batches(0))


# -------------------------------------------------------------------- training
def train(
    name: str, settings: Settings, seed: int, data: Texts, validation: Texts
) -> tuple[EncoderDecoder, dict[str, Any]]:
    """Train a new model; return (model, {"losses", "checks": [(step, validation accuracy)], "seconds"}).

    Args:
        data: the training texts. validation: the texts for evaluations during training.

    Returns:
        the model; "losses" of all steps, "checks" as pairs of a step and the fraction of `validation`
        that was right, and "seconds" of computing, of all threads together, without the checks.
    """
    number = list(MODELS).index(name)
    model = new_model(name, settings.parameters, np.random.default_rng((WEIGHTS, seed, number)))
    sizes = [(len(source), len(one.iso) + 1) for source, one in zip(data.sources, data.examples)]
    order = Buckets(np.array(sizes), settings.max_tokens, seed)
    rate = settings.transformer_rate if isinstance(model, Transformer) else settings.learning_rate
    n_steps = settings.steps * SLOW.get(name, 1)
    schedule = WarmupCosine(rate, rate / 100, min(100, n_steps), n_steps)
    optimiser, critic = AdamW(schedule, betas=(0.9, 0.98), weight_decay=0.01), RunningMeanReward()
    losses: list[float] = []
    checks, seconds = [], 0.0

    def scaled_loss(chosen: Any, factor: Any) -> Tensor:
        source, lengths = pad([data.sources[i] for i in chosen])
        loss, entropy = batch_loss(model, source, data.targets[chosen], lengths, critic)
        losses.append(entropy)
        return loss * factor

    with tqdm(range(1, n_steps + 1), desc=f"{name}, seed {seed}", unit="step") as bar:
        for step in bar:
            started = time.process_time()
            chosen = next(order)
            train_on_batch(model, optimiser, scaled_loss, chosen, max_norm=1.0)
            seconds += time.process_time() - started
            if step % (n_steps // CHECKS) == 0:
                checks.append((step, exact_accuracy(model, validation)))
                bar.set_postfix(loss=f"{losses[-1]:.3f}", exact=f"{checks[-1][1]:.1%}")
    return model, {"losses": losses, "checks": checks, "seconds": seconds}


class RunningMeanReward:
    """The running mean of the rewards at each target position, a baseline for REINFORCE."""

    def __init__(self) -> None:
        self.expected: np.ndarray | None = None

    def __call__(self, reward: np.ndarray) -> np.ndarray:
        """Return the running mean of rewards (T,) before these (B, T), at first their own mean; then update it."""
        mean = reward.mean(axis=0)
        before = mean if self.expected is None else self.expected
        self.expected = BASELINE * before + (1 - BASELINE) * mean
        return before


def batch_loss(
    model: EncoderDecoder, source: np.ndarray, target: np.ndarray, lengths: np.ndarray, critic: RunningMeanReward
) -> tuple[Tensor, float]:
    """Return (training loss with its graph, its cross-entropy part in nats); hard attention updates `critic`.

    For hard attention the reward of a choice is the log probability of the token that was generated from it: with
    attention after the step, nothing else depends on it.
    """
    target = target[:, : 1 + (target[:, 1:] != IGNORED).any(axis=0).sum()]  # as long as the longest here
    state = model.start_decoding(source, lengths)
    logits = model.decode(np.where(target == IGNORED, END, target)[:, :-1], state)
    loss = CrossEntropy(IGNORED)(target[:, 1:], logits)
    thin_history = float(loss)
    if isinstance(model, Seq2SeqHard):
        reward = np.take_along_axis(kernels.log_softmax(logits.array), target[:, 1:, None], axis=2)[..., 0]
        loss = loss + reinforce(state["log_probability"], reward, critic(reward))
    return loss, thin_history


# -------------------------------------------------------------------- measuring
def greedy_answers(model: EncoderDecoder, data: Texts) -> list[str]:
    """Return the greedily decoded output for each text, in the order of the texts."""
    answers, max_length = [""] * len(data.sources), data.targets.shape[1] - 1
    for chosen in batches(data.sources):
        source, lengths = pad([data.sources[i] for i in chosen])
        written = beam_search(model, source, lengths, begin=BEGIN, end=END, max_length=max_length)
        for i, tokens in zip(chosen, written):
            answers[i] = dates.decode(tokens)
    return answers


def exact_accuracy(model: EncoderDecoder, data: Texts) -> float:
    """Return the fraction of texts whose greedily decoded output is exactly correct."""
    return float(np.mean([text == one.iso for text, one in zip(greedy_answers(model, data), data.examples)]))


def attention_weights(model: EncoderDecoder, source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return attention weights (B, A, T, S) with teacher forcing; rows sum to 1; A is 0 without attention.

    A is 1; of the Transformer its layers' heads of attention to the source, first layer first.
    """
    model.eval()  # hard attention draws only in training
    with no_grad():
        if isinstance(model, Transformer):
            with Probe(model, "decoder.blocks.*.cross") as probe:
                model(source, target[:, :-1], lengths)
            return np.concatenate(list(probe.weights.values()), axis=1)
        state = model.start_decoding(source, lengths)
        model.decode(target[:, :-1], state)
    weights = state.get("weights")
    nowhere = np.zeros((len(source), 0, target.shape[1] - 1, source.shape[1]))
    return nowhere if weights is None else weights.array[:, None]


class FieldAttention(NamedTuple):
    """The attention from year, month and day in the output to the same field in the text: (A, 3) for A heads."""

    share: np.ndarray  # the attention on the characters of the same field
    top: np.ndarray  # how often the maximum is on the field
    even: np.ndarray  # (3,), the attention on the field with uniform weights


def measure_attention(model: EncoderDecoder, data: Texts) -> FieldAttention:
    """Return `share` and `top` (A, 3), `even` (3,) for year, month and day: means over all examples and digits."""
    rows: list[tuple[np.ndarray, ...]] = []
    for chosen in batches(data.sources):
        source, lengths = pad([data.sources[i] for i in chosen])
        fields, _ = pad([data.examples[i].fields for i in chosen])
        weights = attention_weights(model, source, data.targets[chosen], lengths)
        even = [(fields == field).sum(axis=1) / lengths for field in FIELDS.values()]
        rows.append((*attention_on_fields(weights, fields), np.stack(even, axis=-1)))
    return FieldAttention(*(np.concatenate(parts).mean(axis=0) for parts in zip(*rows)))


def attention_on_fields(weights: np.ndarray, fields: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (share of weight, frequency of the maximum) on the right field, (B, A, 3): year, month, day.

    Args:
        weights: (B, A, T, S). fields: (B, S), the date field of each character.
    """
    items = np.arange(len(weights))[:, None, None]
    shares, tops = [], []
    for field in FIELDS.values():
        rows = weights[:, :, np.equal(ISO_FIELDS, field)]  # (B, A, digits, S)
        right = fields == field
        shares.append((rows * right[:, None, None]).sum(axis=-1).mean(axis=-1))
        tops.append(right[items, rows.argmax(axis=-1)].mean(axis=-1))
    return np.stack(shares, axis=-1), np.stack(tops, axis=-1)


def measure(model: EncoderDecoder, settings: Settings) -> dict[str, Any]:
    """Return fractions "exact", "languages", "lengths" and, with attention, "share", "top" and others.

    Returns:
        "exact" on texts as in training, and by language; "lengths", the same at each of LENGTHS; "share" and "top" of
        year, month and day (`FieldAttention`) of texts as in training, and "share_at_lengths", the mean of the three:
        of the mean of all heads, and with several "of_best" head, the one with the largest share on validation dates.
    """
    data = held_out("test", 4 * settings.tested, (0, TRAINED))
    right = np.array([text == one.iso for text, one in zip(greedy_answers(model, data), data.examples)])
    languages = np.array([one.language for one in data.examples])
    measures: dict[str, Any] = {"exact": rounded(right.mean())}
    measures["languages"] = {name: rounded(right[languages == name].mean()) for name in LANGUAGES}
    tests = [held_out("test", settings.tested, lengths) for lengths in LENGTHS]
    measures["lengths"] = [rounded(exact_accuracy(model, test)) for test in tests]
    attention = measure_attention(model, data)
    n_heads = len(attention.share)
    if n_heads:
        attention_by_length = [measure_attention(model, test) for test in tests]
        measures |= mean_over_heads(attention, attention_by_length, slice(None))
    if n_heads > 1:
        known = measure_attention(model, held_out("validation", settings.validated, (0, TRAINED)))
        best = int(known.share.mean(axis=1).argmax())
        measures["of_best"] = {"head": best, **mean_over_heads(attention, attention_by_length, slice(best, best + 1))}
    measures["even"] = [rounded(value) for value in attention.even]
    return measures


def mean_over_heads(
    attention: FieldAttention, attention_by_length: list[FieldAttention], heads: slice
) -> dict[str, Any]:
    """Return {"share", "top": [year, month, day], "share_at_lengths"}, the means over a slice of heads."""
    share, top = (
        [rounded(value) for value in values[heads].mean(axis=0)] for values in (attention.share, attention.top)
    )
    return {
        "share": share,
        "top": top,
        "share_at_lengths": [rounded(one.share[heads].mean()) for one in attention_by_length],
    }


def rounded(value: float) -> float:
    """Return a value rounded to four decimals."""
    return round(float(value), 4)


# -------------------------------------------------------------------- to look at
def plotted_examples() -> list[Example]:
    """Return for each language the first test text of 30 to 44 characters with the month as a word."""
    data = held_out("test", 1000, (0, TRAINED)).examples
    fits = [
        one
        for one in data
        if 30 <= len(one.source) <= 44
        and one.fields[0] == one.fields[-1] == 0
        and any(character.isalpha() for character, field in zip(one.source, one.fields) if field == MONTH)
    ]
    return [next(one for one in fits if one.language == name) for name in LANGUAGES]


def alignments(model: EncoderDecoder, examples: list[Example], head: int = 0) -> list[np.ndarray]:
    """Return the attention weights (T, S) of one head for each example."""
    data = texts(examples)
    maps = []
    for i, one in enumerate(data.sources):
        maps.append(attention_weights(model, np.array([one]), data.targets[i : i + 1], np.array([len(one)]))[0, head])
    return maps
