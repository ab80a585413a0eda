"""Beam search: against all texts that there are, and against greedy decoding."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tricycle.configs import DebugConfig
from tricycle.decoding.beam_search import generate_beam_search
from tricycle.decoding.encoder_decoder import TargetSettings, search_target
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.decoding.ragged import next_logits
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.sampling import SamplingParams

CONFIG = DebugConfig(vocab_size=6, context_window=20, embedding_dim=16, n_layers=2)
CHANGES = [
    {},
    {"positions": "rotary", "window": 3},
    {"token_shift": True, "n_key_heads": 1, "softmax": "softmax1"},
    {"key_shift": True},
]
PROMPTS = [[1, 2, 3], [4], [5, 0, 0, 2, 1]]


def new_model(**changes) -> GPT:
    model = GPT(replace(CONFIG, **changes))
    generator = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.array[...] = generator.normal(0, 0.5, parameter.shape)
    return model


def score(model: GPT, prompt: list[int], tokens: tuple[int, ...], n_vocab: int) -> float:
    logits = next_logits(model, [[*prompt, *tokens]], [model.new_caches()], every=True)[:, :n_vocab].astype(float)
    shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(shares[len(prompt) - 1 + i, token] for i, token in enumerate(tokens))


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_wide_beam_finds_the_best_sequence(changes, length_penalty):
    model = new_model(**changes)
    stops, n_vocab = [2, 4], 5
    going_on = [token for token in range(n_vocab) if token not in stops]
    texts = [(*t, stop) for n in range(3) for t in itertools.product(going_on, repeat=n) for stop in stops]
    texts += list(itertools.product(going_on, repeat=3))
    best = [max(texts, key=lambda t: score(model, p, t, n_vocab) / len(t) ** length_penalty) for p in PROMPTS]
    actual = generate_beam_search(model, PROMPTS, 3, 200, length_penalty, stops, n_vocab)
    assert actual == [list(text) for text in best]
    settings = TargetSettings(num_beams=200, length_penalty=length_penalty)
    sampling = PenalizedSamplingParams(stop_tokens=stops, n_vocab=n_vocab)
    assert search_target(model, PROMPTS[1][0], 3, sampling, settings) == list(best[1])


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("stop", [(), 3, [3, 5]])
def test_beam_of_one_equals_greedy_decoding(changes, stop):
    model = new_model(**changes)
    greedy = [list(generate(model, prompt, 9, SamplingParams(0, stop_tokens=stop))) for prompt in PROMPTS]
    assert generate_beam_search(model, PROMPTS, 9, 1, stop_tokens=stop) == greedy


@pytest.mark.parametrize("changes", CHANGES)
def test_batches_equal_single_prompts_and_beat_greedy(changes):
    model = new_model(**changes)
    together = generate_beam_search(model, PROMPTS, 8, 3)
    assert together == [generate_beam_search(model, [prompt], 8, 3)[0] for prompt in PROMPTS]
    for prompt, tokens in zip(PROMPTS, together):
        greedy = tuple(generate(model, prompt, 8, temperature=0))
        assert score(model, prompt, tuple(tokens), 6) >= score(model, prompt, greedy, 6) - 1e-4


def test_empty_inputs_are_accepted_and_invalid_settings_raise():
    model = new_model()
    assert generate_beam_search(model, [], 3) == []
    assert generate_beam_search(model, [[1], [2]], 0) == [[], []]
    assert len(generate_beam_search(model, [[1]], 20)[0]) == 20
    for arguments, message in [
        (([[1]], 21), "at most 21 tokens with the prompt, got 22"),
        (([[1]], 3, 0), "beam_size above 0, got 0"),
        (([[]], 3), "prompt of 1 to 20 tokens, got 0"),
        (([[6]], 3), "ids from 0 to 5, got 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate_beam_search(model, *arguments)
