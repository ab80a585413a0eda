"""Generation with encoder-decoders: sampling, greedy decoding and beam search for one source text.

Shapes: T tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike

from tricycle import kernels
from tricycle.attention import KeyValueCache
from tricycle.attention.cache import takes_ragged
from tricycle.configs.validated import Rule, ValidatedConfig
from tricycle.decoding.beam_search import BeamTexts
from tricycle.decoding.guided import Constraint
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.layers import Layer
from tricycle.sampling import top_indices
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.tensor import Operand, Tensor


class ConditionedDecoder(Layer):
    """The decoder of an encoder-decoder for one source, with the methods of `GPT` that generation calls.

    Args:
        model: the encoder-decoder.
        source: token ids, (S,).

    Raises:
        ValueError: the source is empty, longer than the context window, or has ids outside the vocabulary.
    """

    def __init__(self, model: EncoderDecoderTransformer, source: Sequence[int]) -> None:
        self.model, self.config = model, model.config
        window = self.config.context_window
        if not 1 <= len(source) <= window:
            raise ValueError(f"expected a source text of 1 to {window} tokens, got {len(source)}")
        with model.evaluating():
            projected = model.project_kv(model.encoder(model.place(np.array([source], int))))
        # arrays, as Tensors in the attributes of a layer are its parameters
        self.kv = [tuple(x.array for x in pair) for pair in projected]

    def new_caches(self, dtype: DTypeLike | None = None) -> list[KeyValueCache]:
        """Return a list with an empty KV cache for each block; `dtype` defaults to that of the first keys."""
        return [KeyValueCache(self.config.context_window, dtype) for _ in self.kv]

    @takes_ragged
    def forward(self, tokens: Operand, caches: Sequence[KeyValueCache], last: bool = False) -> Tensor:
        """Return logits (1, T, V) after target tokens (1, T), extending caches; `last`: only after the last token."""
        n_tokens = self.place(tokens).shape[-1]
        segments = caches[0].segments(n_tokens)
        positions = np.concatenate([np.arange(first, first + n) for first, n in segments])
        kv = [tuple(Tensor(array, False) for array in pair) for pair in self.kv]
        x = self.model.hidden_states(tokens, positions, caches, kv)
        if last:
            x = x[..., [rows.stop - 1 for rows, _ in caches[0].texts(n_tokens)], :]
        return self.model.logits(x)


MAX_BEAMS = 1024  # the memory of a beam search grows with them
TARGET_RULES: list[Rule] = [
    ("num_beams", lambda n: 1 <= n <= MAX_BEAMS, f"from 1 to {MAX_BEAMS}"),
    ("suppress_tokens", lambda tokens: all(token >= 0 for token in tokens), "ids of tokens"),
    ("first_token last_token", lambda token: token >= -1, "the id of a token, or -1"),
    ("min_length max_length no_repeat_ngram_size", lambda n: n >= 0, "0 or more"),
]


@dataclass(frozen=True)
class TargetSettings(ValidatedConfig):
    """The settings of a generation_config.json that only encoder-decoders use here; defaults are transformers'.

    Attributes:
        num_beams: hypotheses of the beam search; 1 for greedy decoding or sampling.
        length_penalty: finished hypotheses are compared by log probability / length^penalty.
        early_stopping: end the search once `num_beams` hypotheses are finished, even if another could be better.
        min_length, max_length: of the target with its start token; 0 for no limit.
        first_token, last_token: ids that a target begins with, and that ends it at the maximum length; -1 for none.
        no_repeat_ngram_size: see `PenalizedSamplingParams`.
        suppress_tokens: ids that are never generated.
    """

    rules = TARGET_RULES
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    min_length: int = 0
    max_length: int = 0
    first_token: int = -1
    last_token: int = -1
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, generation: dict[str, Any], config: dict[str, Any]) -> Self:
        """Read the settings from generation_config.json's fields, if empty from config.json's; ValueError if invalid.

        Raises:
            ValueError: a setting has another type or is not supported.
        """
        stated = generation or config
        names = {"forced_bos_token_id": "first_token", "forced_eos_token_id": "last_token"}
        shared = "num_beams length_penalty early_stopping min_length max_length no_repeat_ngram_size".split()
        names |= {name: name for name in shared}
        values = {ours: stated[name] for name, ours in names.items() if stated.get(name) is not None}
        excluded = stated.get("bad_words_ids") or []
        if not isinstance(excluded, list) or any(not isinstance(ids, list) or len(ids) != 1 for ids in excluded):
            raise ValueError(f"expected bad_words_ids to be lists of one token each, got {excluded!r:.60}")
        suppressed = stated.get("suppress_tokens") or []
        if not isinstance(suppressed, list):
            raise ValueError(f"expected suppress_tokens to be a list of ids of tokens, got {suppressed!r:.60}")
        return cls(**values, suppress_tokens=(*suppressed, *(ids[0] for ids in excluded)))

    def sampling(self, params: PenalizedSamplingParams, n_tokens: int) -> PenalizedSamplingParams:
        """Return a copy of sampling parameters with these suppressed tokens, constraint and (if unset) n-gram size."""
        size = params.no_repeat_ngram_size or self.no_repeat_ngram_size
        constraint = TargetConstraint(self, n_tokens)
        return replace(params, no_repeat_ngram_size=size, suppress_tokens=self.suppress_tokens, constraint=constraint)


class TargetConstraint(Constraint):
    """The tokens that `TargetSettings` force at the first and last position, and its minimum length."""

    def __init__(self, settings: TargetSettings, n_tokens: int) -> None:
        self.settings, self.n_tokens, self.error = settings, n_tokens, ""

    def new_text(self) -> TargetConstraint:
        """Return the constraint itself, which has no state."""
        return self

    def forced_token(self, n: int) -> int:
        """Return the only token allowed after n generated ones, or -1; the last one counts where both are forced."""
        last = self.settings.last_token if n == self.n_tokens - 1 else -1
        return self.settings.first_token if n == 0 and last < 0 else last

    def allowed_tokens(self, generated: Sequence[int], stop_tokens: Sequence[int], n_vocab: int) -> np.ndarray:
        """Return a mask (n_vocab,) of allowed tokens: a forced one, or all, but no stop token below min_length."""
        n = len(generated)
        forced = self.forced_token(n)
        mask = np.full(n_vocab, forced < 0)
        mask[[forced] if 0 <= forced < n_vocab else []] = True
        if forced < 0 and n + 1 < self.settings.min_length:
            mask[[token for token in np.atleast_1d(stop_tokens) if token < n_vocab]] = False
        return mask


def generate_target(
    model: EncoderDecoderTransformer,
    source: Sequence[int],
    n_tokens: int,
    sampling: PenalizedSamplingParams,
    settings: TargetSettings | None = None,
) -> Iterator[int]:
    """Return an iterator of a target's tokens, a stop token included; lazy unless `settings.num_beams` is above 1.

    Args:
        source: token ids, with those that the tokenizer adds at the end of a text.
        n_tokens: the maximum number of tokens, also limited by the settings and the context window.
        sampling: with beams, only its penalties and stop tokens are used.

    Raises:
        ValueError: see `ConditionedDecoder`; or a parameter is out of range.
    """
    settings = settings or TargetSettings()
    limits = n_tokens, model.config.context_window, settings.max_length - 1 if settings.max_length else n_tokens
    n_tokens = max(1, min(limits))
    decoder: Any = ConditionedDecoder(model, source)
    sampling = settings.sampling(sampling, n_tokens)
    start = model.config.start_token
    if settings.num_beams == 1:
        return generate(decoder, [start], n_tokens, sampling)
    return iter(search_target(decoder, start, n_tokens, sampling, settings))


class Hypothesis(NamedTuple):
    """A target during beam search: the sum of its log probabilities, or its final score, and its tokens."""

    score: float
    tokens: list[int]


def search_target(
    decoder: Any, start: int, n_tokens: int, sampling: PenalizedSamplingParams, settings: TargetSettings
) -> list[int]:
    """Return the best target's tokens by transformers' beam search, without the start token, with any end token.

    Unlike in `sequences.beam_search`, finished hypotheses do not take the place of unfinished ones, and the search ends
    when the best unfinished one, at its present length, is worse than the worst of `num_beams` finished ones.
    """
    texts = BeamTexts(decoder, [[start]], sampling.n_vocab)
    n_beams, ends = settings.num_beams, np.atleast_1d(sampling.stop_tokens).tolist()
    running, finished = [Hypothesis(0.0, [start])], list[Hypothesis]()
    for length in range(1, n_tokens + 1):
        logits = texts.step(np.array([beam.tokens[-1] for beam in running]))
        totals = np.stack(
            [beam.score + adjusted_log_probabilities(row, beam.tokens, sampling) for beam, row in zip(running, logits)]
        )
        n_kept = max(2, 1 + len(ends)) * n_beams  # so that enough are unfinished
        best = top_indices(totals.reshape(-1), n_kept)
        rows, tokens = np.divmod(best, totals.shape[1])
        candidates = [
            Hypothesis(float(totals[row, token]), [*running[row].tokens, int(token)])
            for row, token in zip(rows, tokens)
        ]
        done = [token in ends or length == n_tokens for token in tokens]
        finished += [
            Hypothesis(beam.score / length**settings.length_penalty, beam.tokens)
            for beam, is_done in zip(candidates[:n_beams], done)
            if is_done
        ]
        finished = sorted(finished, key=lambda beam: -beam.score)[:n_beams]
        chosen = [i for i, is_done in enumerate(done) if not is_done][:n_beams]
        if not chosen or (len(finished) == n_beams and settings.early_stopping):
            break
        running = [candidates[i] for i in chosen]
        if len(finished) == n_beams and running[0].score / length**settings.length_penalty <= finished[-1].score:
            break
        texts.select(rows[chosen])
    return finished[0].tokens[1:]


def adjusted_log_probabilities(
    logits: np.ndarray, seen: Sequence[int], sampling: PenalizedSamplingParams
) -> np.ndarray:
    """Return log probabilities (V,) after penalties, -inf for excluded tokens; 0 for a token that is forced.

    Args:
        seen: the start token and the tokens after it.
    """
    adjusted = sampling.adjusted_logits(kernels.log_softmax(logits.astype(np.float64)), seen, 1)
    is_forced = (
        isinstance(sampling.constraint, TargetConstraint) and sampling.constraint.forced_token(len(seen) - 1) >= 0
    )
    return np.where(np.isfinite(adjusted), 0.0, adjusted) if is_forced else adjusted
