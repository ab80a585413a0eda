"""TextEncoder by itself, and what it refuses; test_pretrained_bert.py compares it with transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tables import bad_input
from transformers_families import difference

from tricycle.configs import EncoderConfig, ModelConfig
from tricycle.gradcheck import gradcheck
from tricycle.models import GPT
from tricycle.sequences.text_encoder import SentencePooling, TextEncoder
from tricycle.tensor import Tensor, to_tensor
from tricycle_lab.probe import Probe

SMALL = EncoderConfig(
    vocab_size=61, context_window=20, embedding_dim=24, n_heads=3, n_layers=2, hidden_size=40, token_types=3
)


def a_batch(config: EncoderConfig, n_tokens: int = 11) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, mask and types (4, T): a text, one with padding behind and one before, and one of one token."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (4, n_tokens))
    types = rng.integers(0, max(1, config.token_types), (4, n_tokens))
    mask = np.ones((4, n_tokens), bool)
    mask[1, 6:] = False
    mask[2, :3] = False
    mask[3, 1:] = False
    return tokens, mask, types


# -------------------------------------------------------------------- by itself
def test_padding_does_not_change_hidden_states() -> None:
    model = TextEncoder(replace(SMALL, positions="rotary", norm_placement="before", norm="rms_norm")).eval()
    tokens, mask, types = a_batch(SMALL)
    others = np.where(mask, tokens, (tokens + 7) % SMALL.vocab_size)
    assert (others != tokens).any()
    hidden = model(tokens, mask, types).array
    np.testing.assert_allclose(model(others, mask, types).array[mask], hidden[mask], atol=1e-6)
    np.testing.assert_allclose(model(tokens[1:2, :6], token_type_ids=types[1:2, :6]).array[0], hidden[1, :6], atol=1e-6)
    assert np.abs(model(tokens, token_type_ids=types).array[1, :6] - hidden[1, :6]).max() > 1e-3


def test_every_token_attends_to_all_tokens_that_are_not_padding() -> None:
    model = TextEncoder(SMALL).eval()
    tokens, mask, _ = a_batch(SMALL)
    with Probe(model, "*.attention") as probe:
        model(tokens, mask)
    visible = probe.weights["blocks.1.attention"] > 0
    assert np.array_equal(visible, np.broadcast_to(mask[:, None, None], visible.shape))


def test_every_weight_gets_a_gradient_with_a_text_of_padding() -> None:
    model = TextEncoder(replace(SMALL, dropout=0.1))
    tokens, mask, types = a_batch(SMALL)
    mask[0] = False
    vectors = SentencePooling()(model(tokens, mask, types), mask)
    (vectors * np.arange(24.0)).sum().backward()
    assert all(np.isfinite(p.grad.array).all() and np.abs(p.grad.array).max() > 0 for p in model.parameters())
    assert np.array_equal(vectors.array[0], np.zeros(24))


def test_another_softmax_and_another_precision() -> None:
    model = TextEncoder(SMALL).eval()
    tokens, mask, _ = a_batch(SMALL)
    before = model(tokens, mask).array
    model.use_precision("bfloat16")
    assert model.config == replace(SMALL, precision="bfloat16")
    assert difference(model(tokens, mask).array, before) < 0.1
    model.use_precision("float32").use_softmax("softmax1")
    assert isinstance(model.config, EncoderConfig) and model.config.softmax == "softmax1"
    assert difference(model(tokens, mask).array, before) > 1e-3


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = (TextEncoder(replace(SMALL, seed=seed)).state_dict() for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["token_embedding.weights"], other["token_embedding.weights"])
    assert TextEncoder(EncoderConfig(), draw_weights=False).n_parameters == 108_891_648  # BERT's without its pooler


# -------------------------------------------------------------------- one vector for a text
def test_pooling_by_hand() -> None:
    hidden = to_tensor([[[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]], [[0.0, 2.0], [0.0, 0.0], [0.0, 0.0]]])
    mask = np.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(SentencePooling("mean", False)(hidden, mask).array, [[2, 2], [0, 2]])
    np.testing.assert_allclose(SentencePooling("mean", False)(hidden).array, [[13 / 3, 13 / 3], [0, 2 / 3]], rtol=1e-6)
    np.testing.assert_allclose(SentencePooling("first")(hidden, mask).array, [[0.6, 0.8], [0, 1]], rtol=1e-6)


@pytest.mark.parametrize("kind", ["mean", "first"])
def test_gradients_of_pooling(kind: str) -> None:
    mask = np.array([[True, True, False], [True, False, False]])
    hidden = np.random.default_rng(0).standard_normal((2, 3, 4))
    gradcheck(lambda x: SentencePooling(kind)(x, mask), hidden)


# -------------------------------------------------------------------- what is refused
TOKENS = np.zeros((2, 5), int)
SHAPE_ERROR = r"TextEncoder\(context_window=20\): .*1 to 20 tokens"
test_bad_input_is_refused = bad_input(
    {
        "too long": (lambda: TextEncoder(SMALL)(np.zeros((1, 21), int)), rf"{SHAPE_ERROR}.*got \(1, 21\)"),
        "no token": (lambda: TextEncoder(SMALL)(np.zeros((1, 0), int)), rf"{SHAPE_ERROR}.*got \(1, 0\)"),
        "one text by itself": (lambda: TextEncoder(SMALL)(np.zeros(5, int)), rf"{SHAPE_ERROR}.*got \(5,\)"),
        "a mask of numbers": (lambda: TextEncoder(SMALL)(TOKENS, np.ones((2, 5))), "TextEncoder: expected a mask of"),
        "a short mask": (lambda: TextEncoder(SMALL)(TOKENS, np.ones((2, 4), bool)), "TextEncoder: expected a mask of"),
        "short types": (
            lambda: TextEncoder(SMALL)(TOKENS, token_type_ids=np.zeros((1, 5), int)),
            "TextEncoder: expected token_type_ids",
        ),
        "types where there are none": (
            lambda: TextEncoder(replace(SMALL, token_types=0))(TOKENS, token_type_ids=TOKENS),
            r"TextEncoder\(token_types=0\): .*token_type_ids",
        ),
        "a token shift": (lambda: replace(SMALL, token_shift=True), "EncoderConfig: .*token_shift.*got True"),
        "a head": (lambda: replace(SMALL, tied=False), "EncoderConfig: .*tied.*True"),
        "types below 0": (lambda: replace(SMALL, token_types=-1), "EncoderConfig: .*token_types"),
        "pooling": (lambda: SentencePooling("last"), "SentencePooling: .*mode.*mean, first"),
    }
)


def test_config_of_another_model_raises() -> None:
    with pytest.raises(TypeError, match=r"^GPT: .*decoder.*EncoderConfig.*TextEncoder"):
        GPT(SMALL)
    with pytest.raises(TypeError, match=r"^TextEncoder: .*EncoderConfig.*ModelConfig\("):
        TextEncoder(ModelConfig())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 to 60"):
        TextEncoder(SMALL)(np.array([[61]]))


def test_a_mask_may_be_a_tensor() -> None:
    model = TextEncoder(SMALL).eval()
    tokens, mask, _ = a_batch(SMALL)
    assert np.array_equal(model(tokens, Tensor(mask, False)).array, model(tokens, mask).array)
