"""Train for a given time: the learning rate follows the fraction of the time used.

The weights that are measured and kept are a running mean of those along the way (Polyak and Juditsky 1992).
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.shared.training import copied
from tricycle.checkpoint import wrap_content_errors
from tricycle.dataset import Buckets
from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW
from tricycle.sequences.beam_search import beam_search
from tricycle.sequences.seq2seq import EncoderDecoder
from tricycle.sequences.translators import TranslationBatch, TranslatorConfig, Vocabulary, new_translator
from tricycle.system.files import atomic_write
from tricycle.tensor import Tensor, no_grad
from tricycle.training import train_on_batch

CONTEXT_WINDOW = 128  # tokens of a sentence, more than any in the data
A_RUN = "a trained model of this experiment"


class Pairs:
    """Sentences in two languages, and their ids.

    Args:
        longest: pairs with a longer side are left out (of training only); 0 keeps all.
    """

    def __init__(
        self, vocabulary: Vocabulary, sources: Sequence[str], targets: Sequence[str], longest: int = 0
    ) -> None:
        if len(sources) != len(targets) or not sources:
            raise ValueError(f"Pairs: expected as many targets as sources, got {len(targets)} and {len(sources)}")
        self.vocabulary = vocabulary
        numbers = [(vocabulary.encode(source), vocabulary.encode(target)) for source, target in zip(sources, targets)]
        kept = [i for i, pair in enumerate(numbers) if not longest or max(map(len, pair)) < longest]
        self.texts = [(sources[i], targets[i]) for i in kept]
        self.numbers = [numbers[i] for i in kept]

    def __len__(self) -> int:
        """Return the number of sentence pairs."""
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:
        """Return the numbers (N, 2) of source tokens, and of target tokens with the end."""
        return np.array([(len(source), len(target) + 1) for source, target in self.numbers])

    def batch(self, chosen: Sequence[int] | np.ndarray) -> TranslationBatch:
        """Return the sentence pairs with the indices `chosen` as one padded batch."""
        return self.vocabulary.batch(*zip(*(self.numbers[i] for i in chosen)))


def bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return sacrebleu's corpus BLEU (0 to 100) of detokenized, cased text and its signature; ImportError without it.

    Source: Post 2018, "A call for clarity in reporting BLEU scores".

    Raises:
        ImportError: sacrebleu is not installed.
    """
    metric = bleu_metric()
    score = metric.corpus_score(list(translations), [list(references)]).score
    return float(score), str(metric.get_signature())


def bleu_metric() -> Any:
    """Return sacrebleu's BLEU metric with default settings; ImportError if sacrebleu is not installed."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ImportError("translation is measured with sacrebleu, which is missing: pip install sacrebleu") from None
    return BLEU()


@dataclass(frozen=True)
class Recipe:
    """The architecture and the training settings of a model."""

    title: str
    width: int  # channels of embeddings and of states
    n_layers: int  # of the encoder and of the decoder each
    learning_rate: float  # the highest
    dropout: float  # probability of dropping an element
    max_tokens: int  # of a batch, both sides and padding included
    n_heads: int = 4
    expansion: float = 2  # the ratio of the Transformer's MLP width to `width`
    norm_first: bool = True

    def config(self, name: str, n_vocab: int) -> TranslatorConfig:
        """Return the architecture as a `TranslatorConfig`."""
        shape = (self.width, self.n_layers, self.dropout, self.n_heads, self.expansion, self.norm_first)
        return TranslatorConfig(name, n_vocab, *shape, CONTEXT_WINDOW)


RECIPES = {
    "fixed": Recipe("fixed context (Cho et al. 2014)", 256, 1, 3e-3, 0.2, 2048),
    "bahdanau": Recipe("additive attention (Bahdanau et al. 2015)", 256, 1, 3e-3, 0.2, 2048),
    "luong": Recipe("general attention (Luong et al. 2015)", 256, 1, 3e-3, 0.2, 2048),
    "transformer": Recipe("Transformer (Vaswani et al. 2017)", 192, 3, 2e-3, 0.2, 3072),
}


@dataclass(frozen=True)
class TrainingSettings:
    """The training settings common to all models, with the help and defaults of their flags."""

    minutes: float = 25.0  # of training for each model, by the clock; the learning rate falls to 0 in that time
    steps: int = 0  # train for this many steps instead, for reproducible results
    label_smoothing: float = 0.1  # the label probability spread over all tokens
    weight_decay: float = 0.01  # of AdamW
    warmup: float = 0.08  # the fraction of the training with a rising learning rate
    average: float = 0.99  # the decay per step of the averaged weights, which are evaluated
    measurements: int = 10  # the number of evaluations during a run
    measured: int = 250  # validation sentences to translate in each evaluation
    seed: int = 0  # of first weights, order and dropout


class Training:
    """The training of one model, which can be saved and resumed.

    Args:
        clock: gives seconds.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        plan: TrainingSettings,
        pairs: Pairs,
        held_out: Pairs,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.recipe, self.plan, self.pairs, self.held_out = name, recipe, plan, pairs, held_out
        self.vocabulary, self.clock = pairs.vocabulary, clock
        self.seconds, self.step = 0.0, 0
        self.curve: list[dict[str, Any]] = []
        self.generator = np.random.default_rng(plan.seed)
        self.model = new_translator(recipe.config(name, len(self.vocabulary)), self.generator)
        self.mean = copied(self.model)
        self.buckets = Buckets(pairs.lengths, recipe.max_tokens, plan.seed)
        self.loss = CrossEntropy(self.vocabulary.pad, label_smoothing=plan.label_smoothing)
        self.optimiser = AdamW(self.rate, (0.9, 0.98), 1e-9, plan.weight_decay)

    # ---------------------------------------------------------------- the schedule
    @property
    def progress(self) -> float:
        """Return the fraction of the training that is done, 0 to 1, by seconds or, without minutes, by steps."""
        plan = self.plan
        return min(1.0, self.seconds / (60 * plan.minutes) if plan.minutes else self.step / plan.steps)

    def rate(self, _: int = 0) -> float:
        """Return the learning rate now: linear warm-up, then half a cosine to 0; the argument is ignored."""
        progress, warmup = self.progress, self.plan.warmup
        if progress < warmup:
            return self.recipe.learning_rate * max(progress, 1e-3) / warmup
        return self.recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))

    # ---------------------------------------------------------------- training
    def run(self, keep: Callable[[], None] = lambda: None, every: float = 180.0) -> None:
        """Train to the end, appending measurements to `curve`; call `keep` every `every` seconds and at the end."""
        smooth, due, kept, last = 0.0, len(self.curve), self.seconds, self.clock()
        with tqdm(total=1000, initial=round(1000 * self.progress), desc=self.name, unit="‰", leave=True) as bar:
            while self.progress < 1:
                loss = self.train_step()
                smooth = loss if not smooth else 0.98 * smooth + 0.02 * loss
                now = self.clock()
                self.seconds, last = self.seconds + now - last, now
                if self.progress * self.plan.measurements >= due + 1:
                    self.curve.append({"step": self.step, "loss": smooth, **self.measure()})
                    now = self.clock()
                    self.seconds, last = self.seconds + now - last, now
                    self.curve[-1]["seconds"] = round(self.seconds, 1)
                    due = math.floor(self.progress * self.plan.measurements)
                    bar.set_postfix(loss=f"{smooth:.3f}", bleu=f"{self.curve[-1]['bleu']:.1f}", step=self.step)
                if self.seconds - kept > every:
                    keep()
                    kept = self.seconds
                bar.update(round(1000 * self.progress) - bar.n)
        keep()

    def train_step(self) -> float:
        """Make one update, also of the averaged weights, and return the loss in nats per token."""
        batch = self.pairs.batch(next(self.buckets))
        loss = train_on_batch(self.model, self.optimiser, self.batch_loss, batch, max_norm=1.0)
        self.step += 1
        share = 1 - min(self.plan.average, self.step / (self.step + 10))
        for name, array in self.model.state_dict().items():
            mean = self.mean[name]
            mean += share * (array - mean)
        return loss

    def batch_loss(self, batch: TranslationBatch, factor: Any) -> Tensor:
        """Return the mean label-smoothed loss of a batch in nats per target token, times a factor."""
        return self.loss(batch.labels, self.model(batch.source, batch.target, batch.lengths), factor)

    # ---------------------------------------------------------------- measuring
    @contextmanager
    def averaged_weights(self) -> Iterator[EncoderDecoder]:
        """Yield the model with averaged weights, in evaluation mode; then restore weights and training mode."""
        shaken = copied(self.model)
        self.model.load_state_dict(self.mean)
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.load_state_dict(shaken)
            self.model.train()

    def measure(self) -> dict[str, float]:
        """Return "validation_loss" in nats per token, and "bleu" (0 to 100) of greedy translations."""
        chosen = self.held_out.texts[: self.plan.measured]
        with self.averaged_weights() as model:
            loss = mean_loss(model, self.held_out)
            translations = translate(model, self.vocabulary, [source for source, _ in chosen], progress=False)
        return {"validation_loss": loss, "bleu": bleu(translations, [target for _, target in chosen])[0]}

    # ---------------------------------------------------------------- keeping
    def save(self, path: Path) -> None:
        """Write the complete training state to one safetensors file, replacing it atomically."""
        from safetensors.numpy import save

        tensors = {f"mean.{name}": array for name, array in self.mean.items()}
        n_updates = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.numpy()
            n_updates[name], moments = self.optimiser.state_of(parameter)
            tensors |= {f"{moment}.{name}": array for moment, array in moments.items()}
        about = {
            "name": self.name,
            "recipe": vars(self.recipe),
            "plan": vars(self.plan),
            "seconds": self.seconds,
            "step": self.step,
            "curve": self.curve,
            "buckets": self.buckets.state(),
            "n_updates": n_updates,
            "generator": self.generator.bit_generator.state,
            "tokeniser": self.vocabulary.tokeniser.to_dict(),
        }
        content = save(tensors, {"translation": json.dumps(about)})
        with atomic_write(path) as file:
            file.write(content)

    def load(self, path: Path) -> None:
        """Restore the training state of a run; raise ValueError unless it has the same settings and vocabulary.

        Raises:
            ValueError: a run with other settings, or no run at all.
        """
        tensors, about = read(path)
        expected = {"name": self.name, "recipe": vars(self.recipe), "plan": vars(self.plan)}
        for field, value in expected.items():
            if about[field] != value:
                raise ValueError(f"{path}: expected a run whose {field} is {value}, got {about[field]}")
        if about["tokeniser"] != self.vocabulary.tokeniser.to_dict():
            raise ValueError(f"{path}: expected a run with the vocabulary of this data, got another")
        self.model.load_state_dict(part(tensors, "model"))
        self.mean = part(tensors, "mean")
        for name, parameter in self.model.named_parameters():
            moments = {moment: tensors[f"{moment}.{name}"] for moment in self.optimiser.rule_of(parameter).state_names}
            self.optimiser.set_state(parameter, about["n_updates"][name], moments)
        self.optimiser.n_steps = self.step = about["step"]
        self.generator.bit_generator.state = about["generator"]
        self.buckets.load_state(about["buckets"])
        self.seconds, self.curve = about["seconds"], about["curve"]


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return arrays by name, and metadata, of a file of `Training.save`; FileNotFoundError, or ValueError for others.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is something else.
    """
    from safetensors import safe_open

    with wrap_content_errors(path, A_RUN), safe_open(path, framework="numpy") as file:
        about = json.loads((file.metadata() or {})["translation"])
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (no iterator here)


def part(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the tensors whose names begin with "prefix.", by the rest of the name."""
    return {name.removeprefix(f"{prefix}."): a for name, a in tensors.items() if name.startswith(f"{prefix}.")}


# -------------------------------------------------------------------- using a model
def mean_loss(model: EncoderDecoder, pairs: Pairs, max_tokens: int = 8192) -> float:
    """Return the cross-entropy in nats per target token, including <end>, with teacher forcing."""
    cross_entropy, total, n_tokens = CrossEntropy(pairs.vocabulary.pad), 0.0, 0
    with no_grad():
        for chosen in Buckets(pairs.lengths, max_tokens).batches(0):
            batch = pairs.batch(chosen)
            counted = int((batch.labels != pairs.vocabulary.pad).sum())
            total += counted * float(cross_entropy(batch.labels, model(batch.source, batch.target, batch.lengths)))
            n_tokens += counted
    return total / n_tokens


def translate(
    model: EncoderDecoder,
    vocabulary: Vocabulary,
    sentences: list[str],
    beam_size: int = 1,
    length_penalty: float = 1.0,
    rows: int = 256,
    progress: bool = True,
) -> list[str]:
    """Return translations in order, by beam search (1: greedy); ValueError if a sentence is empty or too long.

    Args:
        rows: beams that go through the model at once.

    Raises:
        ValueError: an empty sentence, or one that is longer than the model takes.
    """
    numbers = [vocabulary.encode(sentence) for sentence in sentences]
    for sentence, ids in zip(sentences, numbers):
        if not sentence.strip() or len(ids) > CONTEXT_WINDOW:
            expected = f"expected a sentence of 1 to {CONTEXT_WINDOW} tokens"
            raise ValueError(f"{expected}, got {len(ids) if sentence.strip() else 0}: {sentence[:40]!r}")
    order = sorted(range(len(sentences)), key=lambda i: len(numbers[i]))
    translations = [""] * len(sentences)
    step = max(1, rows // beam_size)
    bar = tqdm(total=len(order), desc=f"translating, beam {beam_size}", unit="sentence", disable=not progress)
    with bar:
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            batch = vocabulary.batch([numbers[i] for i in chosen], [[]] * len(chosen))
            longest = min(CONTEXT_WINDOW, 2 * batch.source.shape[1] + 10)
            outputs = beam_search(
                model,
                batch.source,
                batch.lengths,
                begin=vocabulary.begin,
                end=vocabulary.end,
                max_length=longest,
                beam_size=beam_size,
                length_penalty=length_penalty,
            )
            for i, output in zip(chosen, outputs):
                translations[i] = vocabulary.decode(output)
            bar.update(len(chosen))
    return translations
