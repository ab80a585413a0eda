"""Text from a model, token by token, with cached keys and values: by sampling, and by search for encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tricycle.attention import KeyValueCache
from tricycle.models import GPT
from tricycle.ops import check_range


def sample(
    logits: np.ndarray,
    generator: np.random.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    never: Sequence[int] = (),
) -> int:
    """Draw a token.

    Args:
        logits: (V,).
        temperature: divides the logits; 0 takes the largest.
        top_k: draw among the k largest only; 0 for all.
        top_p: draw among the fewest largest whose probabilities reach this sum (Holtzman et al. 2020).
        min_p: draw among those at least this many times as probable as the largest (Nguyen et al. 2024).
        never: tokens that are not drawn, unless there is no other.

    Raises:
        ValueError: settings out of range, or logits that are not finite.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise ValueError("sample: expected finite logits, got NaN or infinity: the model's weights are broken")
    if 0 < len(hidden := {token for token in never if token < len(logits)}) < len(logits):
        logits[list(hidden)] = -np.inf
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    # the shift keeps a small temperature from overflowing
    probabilities = np.exp((logits[order] - logits[order[0]]) / max(temperature, 1e-6))
    probabilities /= probabilities.sum()
    if top_p < 1 or min_p:
        n_likely = np.count_nonzero(probabilities >= min_p * probabilities[0])
        n_kept = min(n_likely, int(np.searchsorted(probabilities.cumsum(), top_p)) + 1)
        order, probabilities = order[:n_kept], probabilities[:n_kept] / probabilities[:n_kept].sum()
    return int(order[generator.choice(len(probabilities), p=probabilities)])


def repeats(tokens: Sequence[int], size: int) -> list[int]:
    """The tokens that would complete a run of this many which the text already has (Paulus et al. 2017); 0 for none."""
    tail = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1) if size else ()
    return [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == tail]


def check_sampling(
    temperature: float, top_k: int, top_p: float, min_p: float = 0.0, no_repeat_ngram_size: int = 0
) -> None:
    """Refuse settings out of range.

    Raises:
        ValueError: names the setting.
    """
    if not 0 <= temperature < np.inf:
        raise ValueError(f"expected temperature to be 0 or more, got {temperature!r}")
    if not isinstance(top_k, (int, np.integer)) or top_k < 0:
        raise ValueError(f"expected top_k to be a whole number, 0 or more, got {top_k!r}")
    if not isinstance(no_repeat_ngram_size, (int, np.integer)) or no_repeat_ngram_size < 0:
        got = f"got {no_repeat_ngram_size!r}"
        raise ValueError(f"expected no_repeat_ngram_size to be a whole number, 0 or more, {got}")
    if not 0 < top_p <= 1:
        raise ValueError(f"expected top_p to be above 0 and at most 1, got {top_p!r}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"expected min_p to be from 0 to 1, got {min_p!r}")


def generate(
    model: GPT,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | np.random.Generator | None = 0,
    stop_token: int | None = None,
    n_vocab: int | None = None,
    min_p: float = 0.0,
    no_repeat_ngram_size: int = 0,
) -> Iterator[int]:
    """Continue a prompt; gives each token as soon as it is drawn.

    Keys and values of tokens seen are cached. When the context window is full, its later half is read anew
    and generation goes on from there.

    Args:
        prompt: token ids, at least one and at most the context window.
        n_tokens: how many to draw at most.
        temperature, top_k, top_p, min_p: as of `sample`.
        stop_token: end after drawing this one.
        n_vocab: draw only ids below this (a tokeniser may know fewer than the model).
        no_repeat_ngram_size: never write so many tokens a second time in the same order; 0 lets them be. Small models
            run in circles without it.

    Raises:
        ValueError: an empty or too long prompt, ids outside the vocabulary, settings out of range.
    """
    check_sampling(temperature, top_k, top_p, min_p, no_repeat_ngram_size)
    tokens = [int(token) for token in prompt]
    window = model.config.context_window
    if not 1 <= len(tokens) <= window:
        raise ValueError(f"generate: expected a prompt of 1 to {window} tokens, got {len(tokens)}")
    if n_tokens < 0:
        raise ValueError(f"generate: expected n_tokens to be 0 or more, got {n_tokens}")
    if n_vocab is not None and not 1 <= n_vocab <= model.config.vocab_size:
        raise ValueError(f"generate: expected n_vocab from 1 to {model.config.vocab_size}, got {n_vocab}")
    check_range("generate: prompt", np.array(tokens), model.config.vocab_size)
    generator = np.random.default_rng(seed)

    def draw() -> Iterator[int]:
        caches, unread = model.new_caches(), tokens
        for _ in range(n_tokens):
            if caches[0].length + len(unread) > window:
                caches, unread = model.new_caches(), tokens[-max(1, window // 2) :]
            logits, never = next_logits(model, unread, caches)[:n_vocab], repeats(tokens, no_repeat_ngram_size)
            token = sample(logits, generator, temperature, top_k, top_p, min_p, never)
            tokens.append(token)
            unread = [token]
            yield token
            if token == stop_token:
                return

    return draw()


@np.errstate(all="ignore")  # broken weights are an error of `sample`
def next_logits(model: GPT, tokens: list[int], caches: list[KeyValueCache]) -> np.ndarray:
    """The logits (V,) after some more tokens, in host memory; dropout is off."""
    with model.evaluating():
        return model(model.place(np.array([tokens])), caches).numpy()[0, -1]
