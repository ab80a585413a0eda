"""The held-out loss: every token counts once, with the correct context."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training import CONFIG, TEXT

from tricycle import evaluation
from tricycle.checkpoint import new_model
from tricycle.configs import GPTConfig
from tricycle.configs.presets import EncoderDecoderTrainingConfig
from tricycle.evaluation import HeldOut, evaluate
from tricycle.functions import LogSoftmax
from tricycle.models import GPT
from tricycle.tensor import no_grad, to_tensor


def brute_force(model: GPT, tokens: np.ndarray, stride: int) -> float:
    """Return the mean loss of all tokens, each computed alone from its window."""
    length = min(model.config.context_window, len(tokens) - 1)
    stride = min(stride or length, length)
    total = 0.0
    for place in range(1, len(tokens)):
        # the first window ends at `length`, the others move on by the stride, the last one ends with the text
        end = min(len(tokens) - 1, length if place <= length else length - (length - place) // stride * stride)
        with no_grad():
            logits = model(to_tensor(tokens[end - length : place], dtype=int))
            total -= float(LogSoftmax()(logits).array[-1, int(tokens[place])])
    return total / (len(tokens) - 1)


@settings(max_examples=25)
@given(st.integers(2, 40), st.integers(0, 9), st.integers(1, 4), st.integers(0, 3))
def test_loss_matches_brute_force_over_each_token(n_tokens, stride, batch_size, seed):
    model = GPT(GPTConfig(vocab_size=11, context_window=6, embedding_dim=4, n_heads=1, n_layers=1, dropout=0.5)).eval()
    for parameter in model.parameters():
        parameter.array[...] = np.random.default_rng(seed).normal(0, 1, parameter.shape)
    tokens = np.random.default_rng(seed).integers(0, 11, n_tokens).astype(np.uint16)
    model.train()
    loss, count = evaluate(model, tokens, batch_size, stride=stride)
    assert count == n_tokens - 1
    assert model.training
    assert loss == pytest.approx(brute_force(model.eval(), tokens, stride), rel=1e-4, abs=1e-6)
    assert evaluate(model, tokens, batch_size, 0, stride)[0] == loss
    assert not model.training


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 30), st.integers(0, 19))
def test_windows_cover_each_token_once(n_pairs, length, stride, n_skipped):
    length = min(length, n_pairs)
    n_skipped = min(n_skipped, n_pairs - 1)
    counted = []
    for start, n_counted in evaluation._windows(n_pairs, length, min(stride, length), n_skipped):
        assert start >= 0
        counted += range(start + length - n_counted, start + length)
    assert counted == list(range(n_skipped, n_pairs))


def test_encoder_decoder_predicts_each_token_after_the_context_once():
    """From the source before the window's target and the target's earlier tokens, as a decoder does in windows."""
    fields = {"vocab_size": 11, "context_window": 7, "embedding_dim": 4, "n_heads": 1, "n_layers": 1, "start_token": 2}
    config = EncoderDecoderTrainingConfig(**fields, batch_size=2)
    model, n = new_model(config), config.source_tokens
    for parameter in model.parameters():
        parameter.array[...] = np.random.default_rng(0).normal(0, 1, parameter.shape)
    text = np.random.default_rng(1).integers(0, 11, 18)
    tokens, total = np.concatenate([np.full(n, 5), text]), 0.0
    for place in range(n, len(tokens)):  # windows of 7 tokens move on by 3, the last one ends with the text
        end = min(len(tokens) - 1, 7 if place <= 7 else 7 - (7 - place) // 3 * 3)
        source, target = tokens[end - 7 : end - 7 + n], tokens[end - 7 + n : place]
        logits = model(source[None], np.concatenate([[2], target])[None])
        total -= float(LogSoftmax()(logits).array[0, -1, tokens[place]])
    loss, count = evaluate(model, tokens, 2, stride=3, n_context=n)
    assert n == 3 and count == 18 and loss == pytest.approx(total / 18, rel=1e-5)
    assert HeldOut(tokens, 36, n).bits_per_byte(math.log(2)) == 0.5
    with pytest.raises(ValueError, match=r"at least 3 tokens.*got 2"):
        model.loss(tokens[None, :2], tokens[None, :2])


def test_estimate_uses_evenly_spaced_batches(monkeypatch):
    model = GPT(replace(CONFIG, dropout=0.0))
    windows = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x: (windows.append(x.array.copy()), forward(x))[1])
    tokens = np.arange(241) % 257
    _, count = evaluate(model, tokens, 2, n_batches=3)
    assert count == 6 * 8
    assert np.concatenate(windows)[:, 0].tolist() == [0, 40, 88, 136, 184, 232]
    assert evaluate(model, tokens, 2, n_batches=1000)[1] == 240


@pytest.mark.parametrize(
    ("tokens", "message"), [([], "2 tokens, got 0"), ([1], "2 tokens, got 1"), ([1, 257, 1], "0 to 256, got 257")]
)
def test_too_few_tokens_and_unknown_ids_raise_and_keep_training_mode(tokens, message):
    model = GPT(CONFIG).train()
    with pytest.raises(ValueError, match=message):
        evaluate(model, np.array(tokens, int), 2)
    assert model.training


def test_bits_per_byte_of_a_uniform_byte_model_is_8():
    """A uniform model over bytes needs eight bits for each, whatever the text."""
    model = GPT(replace(CONFIG, vocab_size=256))
    model.norm.gain.array[...] = 0
    content = TEXT.encode()[:501]
    loss, n_tokens = evaluate(model, np.frombuffer(content, np.uint8), 4)
    assert n_tokens == 500
    assert HeldOut(content, 500).bits_per_byte(loss) == pytest.approx(8, rel=1e-5)
    assert HeldOut(np.zeros(101, int), 400).bits_per_byte(math.log(2)) == pytest.approx(0.25)
