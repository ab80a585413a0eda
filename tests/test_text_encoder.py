"""TextEncoder against transformers' BertModel, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tables import bad_input

from tricycle.configs import EncoderConfig, ModelConfig
from tricycle.gradcheck import gradcheck
from tricycle.models import GPT
from tricycle.sequences.text_encoder import SentencePooling, TextEncoder
from tricycle.tensor import Tensor, no_grad, to_tensor
from tricycle_lab.probe import Probe

AGREED = 2e-5  # relative to the largest element
SMALL = EncoderConfig(
    vocab_size=61, context_window=20, embedding_dim=24, n_heads=3, n_layers=2, hidden_size=40, token_types=3
)
CONFIGS = {
    "BERT": SMALL,
    "one head, one layer": replace(SMALL, n_heads=1, n_layers=1, hidden_size=7),
    "many narrow heads": replace(SMALL, n_heads=12, n_layers=3),
    "tanh GELU, another eps": replace(SMALL, activation="gelu", norm_eps=0.3),
    "ReLU, one type": replace(SMALL, activation="relu", token_types=1),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def difference(actual: Any, expected: Any) -> float:
    """Relative to the largest element."""
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def a_batch(config: EncoderConfig, n_tokens: int = 11) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mask and types (4, T): a whole text, one with padding behind and one before, and one of one token."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (4, n_tokens))
    types = rng.integers(0, max(1, config.token_types), (4, n_tokens))
    mask = np.ones((4, n_tokens), bool)
    mask[1, 6:] = False
    mask[2, :3] = False
    mask[3, 1:] = False
    return tokens, mask, types


# -------------------------------------------------------------------- against transformers
@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """With one thread: two pools that wait for each other's cores take seconds for milliseconds."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(before)


def new_hf_model(torch: Any, config: EncoderConfig) -> Any:
    """A BertModel with weights so large that all of them show."""
    import transformers

    words = {"gelu_exact": "gelu", "gelu": "gelu_new", "relu": "relu"}
    fields = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.embedding_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        intermediate_size=config.mlp_width,
        hidden_act=words[config.activation],
        max_position_embeddings=config.context_window,
        type_vocab_size=config.token_types,
        layer_norm_eps=config.norm_eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = transformers.BertModel(fields, add_pooling_layer=False).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(p + 0.2 * noise if p.ndim == 1 else noise * p.shape[1] ** -0.5)
    return model


NAMES = {
    "token_embedding": ["embeddings.word_embeddings"],
    "position_embedding": ["embeddings.position_embeddings"],
    "type_embedding": ["embeddings.token_type_embeddings"],
    "embedding_norm": ["embeddings.LayerNorm"],
    "attention.qkv": [f"attention.self.{part}" for part in ("query", "key", "value")],
    "attention.projection": ["attention.output.dense"],
    "attention_norm": ["attention.output.LayerNorm"],
    "mlp.up": ["intermediate.dense"],
    "mlp.projection": ["output.dense"],
    "mlp_norm": ["output.LayerNorm"],
}


def to_tricycle_state(model: TextEncoder, tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return weights or gradients of transformers with Tricycle's names and layouts; all are used."""
    state = {}
    left = set(tensors)
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        place = ""
        if layer.startswith("blocks."):
            _, number, layer = layer.split(".", 2)
            place = f"encoder.layer.{number}."
        sources = [f"{place}{their}.{'bias' if kind == 'bias' else 'weight'}" for their in NAMES[layer]]
        left -= set(sources)
        whole = np.concatenate([tensors[source].detach().numpy() for source in sources])
        state[name] = whole.T if getattr(parameter, "role", "") == "matrix" else whole
    assert left == set()
    return state


@each_config
def test_hidden_states_and_gradients_are_those_of_bert(torch: Any, config: EncoderConfig) -> None:
    hf_model = new_hf_model(torch, config)
    model = TextEncoder(config, draw_weights=False)
    model.load_state_dict(to_tricycle_state(model, dict(hf_model.named_parameters())))
    tokens, mask, types = a_batch(config)
    hidden = model(tokens, mask, types)
    expected = hf_model(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(types)).last_hidden_state
    assert difference(hidden.array, expected.detach()) < AGREED
    weights = np.random.default_rng(2).standard_normal(hidden.shape).astype(np.float32) * mask[..., None]
    (hidden * weights).sum().backward()
    (expected * torch.from_numpy(weights)).sum().backward()
    grads = to_tricycle_state(model, {name: p.grad for name, p in hf_model.named_parameters()})
    # beside those of queries and values, for of keys' biases it is 0: they add the same to all scores of a query
    differences = {name: difference(p.grad.array, grads[name]) for name, p in model.named_parameters()}
    assert max(differences.values()) < AGREED, differences


@each_config
def test_without_types_and_mask(torch: Any, config: EncoderConfig) -> None:
    hf_model = new_hf_model(torch, config).eval()
    model = TextEncoder(config).eval()
    model.load_state_dict(to_tricycle_state(model, dict(hf_model.named_parameters())))
    for n_tokens in (1, config.context_window):
        tokens, _, _ = a_batch(config, n_tokens) if n_tokens > 6 else (np.array([[5], [7]]), None, None)
        with torch.no_grad(), no_grad():
            expected = hf_model(torch.from_numpy(tokens)).last_hidden_state
            assert difference(model(tokens).array, expected) < AGREED


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
        "a window": (lambda: replace(SMALL, window=3), "EncoderConfig: .*window.*got 3"),
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
