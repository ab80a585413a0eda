"""The importance of input channels: mean squares of the inputs of linear layers."""

from typing import Any

import numpy as np
import pytest
from tiny_models import add_noise
from transformers_families import LIKE_LLAMA

from tricycle.configs import ModelConfig
from tricycle.models import GPT
from tricycle.pretrained.importance import measure_importance

SIZES: dict[str, Any] = {"vocab_size": 50, "context_window": 64, "embedding_dim": 24, "n_layers": 2, "n_heads": 4}
TOKENS = np.random.default_rng(0).integers(0, 50, 700).astype(np.uint16)


def new_model(**fields: Any) -> GPT:
    return add_noise(GPT(ModelConfig(**{**SIZES, **fields})), 0.2)


@pytest.mark.parametrize("fields", [{}, {"tied": False}, {**LIKE_LLAMA, "hidden_size": 40, "n_key_heads": 2}])
def test_importance_is_the_mean_square_of_inputs(fields):
    model = new_model(**fields)
    importance = measure_importance(model, TOKENS)
    head = "token_embedding.weights" if model.head is None else "head.weights"
    layers = ("attention.qkv", "attention.projection", "mlp.up", "mlp.projection")
    assert set(importance) == {head, *(f"blocks.{i}.{layer}.weights" for i in range(2) for layer in layers)}
    chunks = TOKENS[:640].reshape(10, 64)  # 60 tokens at the end do not fill a chunk
    with model.evaluating():
        embedded = model._embed(model.place(chunks), np.arange(64))
        inputs = model.blocks[0].attention_norm(embedded).numpy()
        outputs = model.norm(model.hidden_states(chunks)).numpy()
    for name, x in {"blocks.0.attention.qkv.weights": inputs, head: outputs}.items():
        np.testing.assert_allclose(importance[name], np.square(x, dtype=float).mean(axis=(0, 1)), rtol=1e-4)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, values in importance.items():
        assert values.dtype == np.float64 and (values >= 0).all() and values.any()
        assert values.shape == (shapes[name][1 if name.startswith("token") else 0],)


def test_model_is_unchanged_afterwards():
    model = new_model()
    before = model(TOKENS[:64].astype(int)).numpy()
    layer = model.blocks[0].mlp.up
    other = vars(layer)["forward"] = layer.forward  # such as the hook of a probe
    measure_importance(model, TOKENS)
    assert vars(layer).pop("forward") is other
    assert not any("forward" in vars(layer) for layer in model.layers())
    np.testing.assert_array_equal(model(TOKENS[:64].astype(int)).numpy(), before)


def test_each_chunk_begins_with_the_start_token():
    model, seen = new_model(), []
    forward = model.token_embedding.forward
    vars(model.token_embedding)["forward"] = lambda ids: seen.append(ids.numpy().tolist()) or forward(ids)
    measure_importance(model, TOKENS, start_token=7)
    assert seen == [[7, *chunk] for chunk in TOKENS[: 63 * 11].reshape(11, 63).tolist()]


def test_progress_bar_is_shown_only_on_request(capsys, monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm, "tqdm", lambda *args, delay, **options: tqdm.std.tqdm(*args, **options))
    measure_importance(new_model(), TOKENS)
    assert capsys.readouterr().err == ""
    measure_importance(new_model(), TOKENS, progress=True)
    assert "640/640" in capsys.readouterr().err


def test_unsuitable_texts_and_models_are_rejected():
    model = new_model()
    for n in (0, 511):
        with pytest.raises(ValueError, match=rf"at least 512 tokens, got {n}"):
            measure_importance(model, TOKENS[:n])
    model.blocks[1].mlp_norm.gain.array[3] = np.nan
    with pytest.raises(ValueError, match=r"finite inputs of blocks\.1\.mlp\.up\.weights"):
        measure_importance(model, TOKENS)
    assert not any("forward" in vars(layer) for layer in model.layers())
