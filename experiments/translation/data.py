"""Pairs of sentences as numbers: one byte-pair vocabulary for both languages, BLEU.

Shapes: B batch, S source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.sequences.translators import Batch, Vocabulary


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
