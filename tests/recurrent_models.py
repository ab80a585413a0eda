"""Checks of models whose layers have a state in place of a cache."""

from __future__ import annotations

import numpy as np
import pytest

from tricycle.decoding.batch import generate_batch
from tricycle.decoding.beam_search import generate_beam_search
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.sampling import SamplingParams


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


def check_batches(model: GPT, prompts: list[list[int]]) -> None:
    """Check that three prompts in a batch get the greedy and beam-search texts that each gets alone."""
    greedy = [list(generate(model, prompt, 9, temperature=0)) for prompt in prompts]
    assert generate_batch(model, prompts, 9, [SamplingParams(0)] * 3) == greedy
    assert generate_beam_search(model, prompts, 9, 1) == greedy
    assert generate_beam_search(model, prompts, 9, 3) == [generate_beam_search(model, [p], 9, 3)[0] for p in prompts]
