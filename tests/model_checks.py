"""Checks of small models with other blocks than GPT-2's: caches, gradients, generation, learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.decoding.batch import generate_batch
from tricycle.decoding.beam_search import generate_beam_search
from tricycle.decoding.prompt_lookup import generate_prompt_lookup
from tricycle.generate import generate
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.sampling import SamplingParams
from tricycle.state.activations import free_activations

L = TypeVar("L", bound=Layer)


def randomize(layer: L) -> L:
    """Draw weights of a layer or model, large enough that each part affects the result, and return it."""
    generator = np.random.default_rng(4)
    for name, parameter in layer.named_parameters():
        noise = generator.standard_normal(parameter.shape)
        if parameter.ndim == 1:
            parameter.array[...] += 0.2 * noise
        elif "embedding" not in name:
            parameter.array[...] = noise * parameter.shape[0 if parameter.ndim == 2 else -1] ** -0.5
    return layer


def cached_logits(
    model: GPT, tokens: np.ndarray, starts: Sequence[int] = (2, 14, 15), dtype: Any = None
) -> tuple[np.ndarray, list[Any]]:
    """Return the logits of tokens (B, T), computed from caches in parts, and the caches; later parts have `starts`."""
    caches = model.new_caches(dtype)
    with model.evaluating():
        parts = [model(part, caches).array for part in np.split(tokens, starts, axis=1)]
    return np.concatenate(parts, axis=1), caches


def check_learning(model: GPT) -> None:
    """Check that 60 updates on a regular text of 61 tokens halve the loss of a new model."""
    tokens = np.arange(2 * 30).reshape(2, 30) * 7 % 61
    losses = []
    optimiser = AdamW(learning_rate=3e-3)
    for _ in range(60):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        loss.backward()
        model.update(optimiser)
    assert losses[0] == pytest.approx(np.log(61), rel=0.05) and losses[-1] < 0.5 * losses[0]


def check_gradients(new_model: Callable[[], GPT], tokens: np.ndarray) -> None:
    """Check that activation checkpointing and freed activations change no bit of any gradient, and that none is 0."""

    def gradients(model: GPT) -> dict[str, np.ndarray]:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        return {name: parameter.grad.array for name, parameter in model.named_parameters()}

    expected, model = gradients(new_model()), new_model()
    assert all(grad.any() for grad in expected.values())
    model.recompute = checkpoint_activations
    recomputed = gradients(model)
    with free_activations():
        freed = gradients(new_model())
    for grads in (recomputed, freed):
        assert [name for name, grad in expected.items() if not np.array_equal(grad, grads[name])] == []


def check_generation(model: GPT, prompts: list[list[int]]) -> None:
    """Check that three prompts in a batch, beam searches, and drafts from the prompt give the text of each alone."""
    greedy = [list(generate(model, prompt, 9, temperature=0)) for prompt in prompts]
    assert generate_batch(model, prompts, 9, [SamplingParams(0)] * 3) == greedy
    assert generate_beam_search(model, prompts, 9, 1) == greedy
    assert generate_beam_search(model, prompts, 9, 3) == [generate_beam_search(model, [p], 9, 3)[0] for p in prompts]
    repetitive = 3 * prompts[0]
    drafted = list(generate_prompt_lookup(model, repetitive, 20, SamplingParams(0)))
    assert drafted == list(generate(model, repetitive, 20, temperature=0))
