"""Sampling from inexact logits: accept a token only if no logits within the tolerance would give another token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.sampling import SamplingParams


def sample_if_certain(
    sampling: SamplingParams,
    logits: np.ndarray,
    generator: np.random.Generator,
    seen: Sequence[int],
    tolerance: float,
    n_prompt: int = 0,
) -> int | None:
    """Sample a token; return None, generator restored, if logit errors of tolerance * max |logit| could change it.

    Args:
        tolerance: the largest error of a logit, as a fraction of the largest absolute logit.

    Raises:
        ValueError: logits are not finite.
    """
    state = generator.bit_generator.state
    tolerance *= float(np.abs(logits[: sampling.n_vocab]).max())  # also of excluded ones, which may be far larger
    logits = sampling.adjusted_logits(logits, seen, n_prompt)
    if isinstance(sampling, PenalizedSamplingParams):
        tolerance *= max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
    number = generator.random() if sampling.temperature else 0.0
    token = sampling.token_at_quantile(logits, number)
    if is_certain(sampling, logits, token, number, tolerance):
        return token
    generator.bit_generator.state = state
    return None


def is_certain(sampling: SamplingParams, logits: np.ndarray, token: int, number: float, tolerance: float) -> bool:
    """Return whether all logits within the absolute tolerance provably give this token for the same random number.

    Args:
        logits: (V,), after logits processors.
        token: what `sampling.token_at_quantile(logits, number)` returned.
        number: the random number, in [0, 1).
        tolerance: the largest absolute error of a logit; 0 makes each token certain.
    """
    if not tolerance:
        return True
    if sampling.temperature == 0:
        return bool(np.count_nonzero(logits >= logits[token] - 2 * tolerance) == 1)
    temperature = max(sampling.temperature, 1e-6)
    log_ratio = min(2 * tolerance / temperature, 50.0)  # the largest error of the logarithm of a ratio of two weights
    certain, possible = _candidate_bounds(logits, sampling, tolerance, log_ratio)
    if not certain[token]:
        return False
    weights = np.exp((logits - logits.max()) / temperature)
    most_before = weights[:token] @ possible[:token]
    least_from_it = weights[token:] @ certain[token:]
    least_to_it = weights[: token + 1] @ certain[: token + 1]
    most_after = weights[token + 1 :] @ possible[token + 1 :]
    begin = _largest_share(most_before, least_from_it, log_ratio)
    end = 1 - _largest_share(most_after, least_to_it, log_ratio)
    return bool((most_before == 0 or begin < number) and (most_after == 0 or number < end))


def _largest_share(weight: float, other: float, log_ratio: float) -> float:
    """Return weight / (weight + other), with the ratio weight / other taken e^log_ratio times as large."""
    return weight / (weight + other * np.exp(-log_ratio))


def _candidate_bounds(
    logits: np.ndarray, sampling: SamplingParams, tolerance: float, log_ratio: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return masks (V,) of tokens that are candidates for all, and for some, logits within the tolerance."""
    top_p, min_p = sampling.top_p, sampling.min_p
    if not sampling.top_k and top_p == 1 and not min_p:
        return np.isfinite(logits), np.isfinite(logits)
    factor = np.exp(log_ratio)
    narrow = replace(sampling, top_p=max(top_p - log_ratio, 1e-9), min_p=min(min_p * factor, 1.0))
    broad = replace(sampling, top_p=min(top_p + log_ratio, 1.0), min_p=min_p / factor)
    fewest, _ = narrow.candidates(logits)
    most, _ = broad.candidates(logits)
    most = most[np.isfinite(logits[most])]
    possible = logits >= logits[most].min() - 2 * tolerance
    if np.count_nonzero(possible) == len(fewest):
        return possible, possible
    return logits > logits[fewest].min() + 2 * tolerance, possible
