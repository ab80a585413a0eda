"""Pairs of sentences as numbers: one byte-pair vocabulary for both languages, batches of like length, BLEU.

Shapes: B batch, S source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle.dataset import pad
from tricycle.tokeniser import BPETokeniser

SPECIAL = ("<pad>", "<begin>", "<end>")


class Batch(NamedTuple):
    """
    Attributes:
        source: (B, S). lengths: (B,) of the sources.
        target: (B, T), what the decoder is given: the target behind <begin>.
        labels: (B, T), what it should say: the target and <end>.
    """

    source: np.ndarray
    lengths: np.ndarray
    target: np.ndarray
    labels: np.ndarray


class Vocabulary:
    """Text to token ids and back, with ids for padding, the beginning and the end."""

    def __init__(self, tokeniser: BPETokeniser) -> None:
        self.tokeniser = tokeniser
        self.pad, self.begin, self.end = (tokeniser.special_tokens[name] for name in SPECIAL)

    @classmethod
    def learn(cls, sentences: Sequence[str], vocab_size: int, progress: bool = True) -> Vocabulary:
        """Of both languages together, so that names, numbers and signs are one token on both sides."""
        text = "\n".join(f" {sentence}" for sentence in sentences)
        return cls(BPETokeniser(vocab_size, SPECIAL).train(text, progress))

    def __len__(self) -> int:
        return self.tokeniser.n_vocab

    def encode(self, sentence: str) -> np.ndarray:
        """With a space in front, so that a first word has the token that it has elsewhere."""
        return self.tokeniser.encode(f" {sentence}").astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Leaves out special tokens, which a model that has learnt little may say."""
        return self.tokeniser.decode([i for i in ids if i < self.pad]).strip()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Each token for itself, to write beside a picture."""
        return [self.tokeniser.decode([i]) for i in ids]

    def batch(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Batch:
        source, lengths = pad(sources, self.pad)
        target, _ = pad([[self.begin, *ids] for ids in targets], self.pad)
        labels, _ = pad([[*ids, self.end] for ids in targets], self.pad)
        return Batch(source, lengths, target, labels)


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
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:
        """(N, 2): source tokens, and target tokens with the end."""
        return np.array([(len(source), len(target) + 1) for source, target in self.numbers])

    def batch(self, chosen: Sequence[int] | np.ndarray) -> Batch:
        return self.vocabulary.batch(*zip(*(self.numbers[i] for i in chosen)))


def bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """BLEU of detokenised, cased text, and sacrebleu's signature that says how it was computed (Post 2018).

    Raises:
        ImportError: sacrebleu is not installed.
    """
    metric = bleu_metric()
    score = metric.corpus_score(list(translations), [list(references)]).score
    return float(score), str(metric.get_signature())


def bleu_metric() -> Any:
    """sacrebleu's, with its usual settings.

    Raises:
        ImportError: sacrebleu is not installed.
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ImportError("translation is measured with sacrebleu, which is missing: pip install sacrebleu") from None
    return BLEU()
