"""Steering vectors: directions of the residual stream between two groups of prompts, added while a model generates.

Sources: Rimsky et al. 2023, "Steering Llama 2 via Contrastive Activation Addition" (difference of means); Turner et al.
2023, "Activation Addition".

Shapes: L layers, C channels, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from tricycle.devices import to_cpu
from tricycle.models import GPT
from tricycle.tensor import Tensor
from tricycle_lab.attribution import check_decoder, check_tokens
from tricycle_lab.hooks import add_hook
from tricycle_lab.recorded_run import record_run


def contrast_prompts(model: GPT, positive: Sequence[Sequence[int]], negative: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the difference of two groups' mean residual streams at the last token, (L, C); ValueError if one is empty.

    Args:
        positive, negative: token ids of prompts, of any lengths.

    Raises:
        ValueError: a group without prompts, or tokens outside of the vocabulary.
    """
    check_decoder("contrast_prompts", model)
    if not positive or not negative:
        got = f"{len(positive)} and {len(negative)}"
        raise ValueError(f"contrast_prompts: expected positive and negative prompts, got {got}")
    means = []
    for prompts in (positive, negative):
        streams = []
        for tokens in prompts:
            check_tokens("contrast_prompts", tokens, model.config.vocab_size)
            streams.append([to_cpu(x[0, -1]) for x in record_run(model, tokens).stream[1:]])
        means.append(np.mean(streams, axis=0, dtype=np.float64))
    return np.asarray(means[0] - means[1], np.float32)


def steer(model: GPT, vectors: Mapping[int, np.ndarray], strength: float = 1.0) -> ExitStack:
    """Add vectors to the residual stream at all tokens, until the returned context manager exits or is closed.

    Args:
        vectors: (C,), by the index of the block after which they are added.
        strength: a factor of all vectors; negative values steer in the opposite direction.

    Raises:
        ValueError: a block that does not exist, a vector of another size, or a strength that is not finite.
    """
    check_decoder("steer", model)
    n_layers, width = len(model.blocks), model.config.embedding_dim
    for layer, vector in vectors.items():
        if not 0 <= layer < n_layers or np.shape(vector) != (width,):
            expected = f"vectors ({width},) after blocks 0 to {n_layers - 1}"
            raise ValueError(f"steer: expected {expected}, got {np.shape(vector)} after block {layer}")
    if not np.isfinite(strength):
        raise ValueError(f"steer: expected a finite strength, got {strength}")
    hooks = ExitStack()
    for layer, vector in vectors.items():
        added = model.place(Tensor(np.asarray(strength * vector, np.float32), requires_grad=False))
        hooks.callback(add_hook(model.blocks[layer], "changes", lambda out, *args, added=added: out + added))
    return hooks


def score_steering(
    model: GPT,
    vectors: Mapping[int, np.ndarray],
    prompts: Sequence[Sequence[int]],
    answers: tuple[int, int],
    strengths: Sequence[float],
) -> np.ndarray:
    """Return the mean logit difference of two answers after prompts, for each strength, (strengths,).

    Raises:
        ValueError: no prompts, or ids out of range.
    """
    if not len(prompts):
        raise ValueError("score_steering: expected at least one prompt, got none")
    for tokens in (answers, *prompts):
        check_tokens("score_steering", tokens, model.config.vocab_size)
    scores = []
    for strength in strengths:
        with steer(model, vectors, strength), model.evaluating():
            logits = [to_cpu(model(model.place(np.array([tokens])), last=True).array)[0, 0] for tokens in prompts]
        scores.append(np.mean([row[answers[0]] - row[answers[1]] for row in logits], dtype=np.float64))
    return np.array(scores)
