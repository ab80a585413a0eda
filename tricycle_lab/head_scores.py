"""Scores of attention heads on repeated random tokens: induction, previous-token and duplicate-token heads.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads".

Shapes: B texts, L layers, H heads, T tokens of a text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tricycle.devices import to_cpu
from tricycle.models import GPT
from tricycle.ops import check_positive
from tricycle_lab.attribution import check_decoder, check_tokens
from tricycle_lab.probe import Probe

MAX_DEFAULT_TOKENS = 50


class HeadScores(NamedTuple):
    """Mean attention weights, from 0 to 1, of all heads, each (L, H), or (H,) of one layer.

    Attributes:
        induction: from a token of the repetition to the token after its first occurrence.
        previous_token: from each token to the one before it.
        duplicate_token: from a token of the repetition to its first occurrence.
    """

    induction: np.ndarray
    previous_token: np.ndarray
    duplicate_token: np.ndarray


def score_heads(model: GPT, n_tokens: int = 0, n_texts: int = 4, seed: int = 0, start: int | None = None) -> HeadScores:
    """Compute the scores of all heads, (L, H), on random tokens repeated once; ValueError if these do not fit.

    Args:
        model: any `GPT`.
        n_tokens: the number of random tokens before their repetition; 0 for 50, or fewer if the context is shorter.
        n_texts: the number of texts; the scores are means over them.
        seed: of the random tokens, which are uniform over the vocabulary.
        start: the id of a token in front of each text, such as the start-of-text token.

    Raises:
        ValueError: an invalid id, sizes below 1, or more tokens than the context window has.
    """
    check_decoder("score_heads", model)
    check_positive("score_heads", n_texts=n_texts)
    vocab_size, window = model.config.vocab_size, model.config.context_window
    n_start = int(start is not None)
    n_tokens = n_tokens or min(MAX_DEFAULT_TOKENS, (window - n_start) // 2)
    if not 2 <= n_tokens <= (window - n_start) // 2:
        raise ValueError(f"score_heads: expected 2 to {(window - n_start) // 2} tokens to repeat, got {n_tokens}")
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (n_texts, n_tokens))
    parts = [tokens, tokens]
    if start is not None:
        check_tokens("score_heads", [start], vocab_size)
        parts.insert(0, np.full((n_texts, 1), start))
    with Probe(model, "blocks.*.attention") as probe, model.evaluating():
        model.hidden_states(model.place(np.concatenate(parts, axis=1)))
    layers = [
        score_weights(to_cpu(probe.weights[f"blocks.{layer}.attention"]), n_tokens)
        for layer in range(len(model.blocks))
    ]
    return HeadScores(*(np.stack(scores) for scores in zip(*layers)))


def score_weights(weights: np.ndarray, n_tokens: int) -> HeadScores:
    """Compute the scores (H,) of attention weights (B, H, T, T) of texts that end with n_tokens tokens, repeated once.

    Raises:
        ValueError: weights of another shape, or fewer than 2 n_tokens rows.
    """
    n_start = weights.shape[-1] - 2 * n_tokens
    if weights.ndim != 4 or weights.shape[2] != weights.shape[3] or n_tokens < 2 or n_start < 0:
        expected = f"weights (texts, heads, T, T) with T of at least {2 * n_tokens}, and 2 tokens or more"
        raise ValueError(f"score_weights: expected {expected}, got {weights.shape} and {n_tokens} tokens")

    def mean_weight(distance: int, first_key: int) -> np.ndarray:
        """Return the mean weight (H,) of keys from `first_key` on, of the queries `distance` tokens later."""
        diagonal = np.diagonal(weights, -distance, axis1=2, axis2=3)
        return diagonal[..., first_key:].mean(axis=(0, 2), dtype=np.float64)

    return HeadScores(mean_weight(n_tokens - 1, n_start + 1), mean_weight(1, 0), mean_weight(n_tokens, n_start))
