"""ModernBERT as GGUF: round trips, llama.cpp's hidden states and tokens, transformers, and rejected files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf_writer import (
    TEXTS,
    TOKENS,
    bpe_tokeniser,
    dtype_names,
    lively,
    new_batch,
    open_llama_cpp,
    rewritten,
    runs_of_characters,
)

from tricycle.configs import EncoderConfig
from tricycle.pretrained import load, tokenizer_json
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.gguf import read_gguf
from tricycle.pretrained.gguf_file import read_gguf_header
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.pretrained.sentence_encoder import load_sentence_encoder
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tensor import no_grad

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

CONFIG = EncoderConfig(
    **{"vocab_size": 300, "context_window": 64, "embedding_dim": 64, "n_layers": 4, "n_heads": 4, "hidden_size": 96},
    **{"positions": "rotary", "rotary_base": 500.0, "rotary_local_base": 50.0, "activation": "gelu_exact"},
    **{"norm_placement": "before", "first_norm": False, "norm_eps": 1e-5, "token_types": 0, "gated": True},
    **{"bias": False, "window": 8, "full_layers": (0, 3)},
)
CONFIGS = {
    "usual": CONFIG,
    "SwiGLU, odd window": replace(CONFIG, activation="swish", window=7, full_layers=(0, 2)),
    "one global layer": replace(CONFIG, full_layers=(0,)),
    "approximated GELU, no window": replace(CONFIG, activation="gelu", window=0, full_layers=(), rotary_local_base=0.0),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def hidden_states(model: Any) -> np.ndarray:
    with no_grad():
        return np.array(model(TOKENS[:1]).numpy()[0])


def tokeniser(**mask: bool) -> PretrainedTokeniser:
    """Return a tokenizer like ModernBERT's, whose flags of [MASK] are lstrip and those of `mask`."""
    document = json.loads(tokenizer_json.to_tokenizer_json(bpe_tokeniser()))
    n, names = len(document["model"]["vocab"]) + 1, ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    added = [tokenizer_json.added_token(n + i, name) for i, name in enumerate(names)]
    added[-1] |= {"lstrip": True, **mask}
    document["added_tokens"] += added
    document["normalizer"] = {"type": "NFC"}
    document["post_processor"] = tokenizer_json.template_processing({"[CLS]": n + 1}, {"[SEP]": n + 2})
    special = {f"{name[1:-1].lower()}_token": name for name in names}
    return PretrainedTokeniser(json.dumps(document), special)


# -------------------------------------------------------------------- round trips
@each_config
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_exported_model_round_trips(tmp_path, config, pooling):
    model = lively(TextEncoder(config))
    assert export_gguf(model, tokeniser(), tmp_path / "a.gguf", pooling=pooling) == "modern-bert"
    back = load_sentence_encoder(tmp_path / "a.gguf")
    assert differing_fields(config, back.model.config) == [] and back.pooling.mode == pooling
    np.testing.assert_equal(back.model.state_dict(), model.state_dict())


def test_matrices_are_quantized_as_in_the_file(tmp_path):
    export_gguf(lively(TextEncoder(CONFIG)), None, tmp_path / "a.gguf", "Q8_0")
    kinds = dtype_names(tmp_path / "a.gguf")
    assert {kinds[name] for name in kinds if "norm" not in name} == {"Q8_0"}
    assert {kinds[name] for name in kinds if "norm" in name} == {"F32"}


def test_tokenizer_round_trips(tmp_path):
    own = tokeniser()
    export_gguf(TextEncoder(CONFIG), own, tmp_path / "a.gguf")
    metadata = read_gguf_header(tmp_path / "a.gguf").metadata
    assert metadata["tokenizer.ggml.pre"] == "modern-bert" and metadata["general.name"] == "a modern-bert"
    assert metadata["tokenizer.ggml.mask_token_id"] == 268
    assert metadata["tokenizer.ggml.bos_token_id"] == metadata["tokenizer.ggml.cls_token_id"] == 265
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.seperator_token_id"] == 266
    back = load(tmp_path / "a.gguf").tokeniser
    for text in [*TEXTS, "the  [MASK] in", "e\u0301"]:
        assert back.encode(text) == own.encode(text), text
    assert back.special.items() >= own.special.items()
    assert back.encode("the [MASK]") == back.encode("the[MASK]")
    with pytest.raises(ValueError, match=r"\[MASK\] with lstrip, as in llama\.cpp, got \[\]"):
        export_gguf(TextEncoder(CONFIG), tokeniser(lstrip=False), tmp_path / "b.gguf")


# -------------------------------------------------------------------- llama.cpp and transformers
def hidden_states_of_llama_cpp(path: Path) -> np.ndarray:
    """Return llama.cpp's hidden states of TOKENS[0], without pooling."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model, tokens = open_llama_cpp(path, embedding=True, pooling_type=0), TOKENS[0].tolist()
    batch = new_batch(tokens)
    context = model._ctx.ctx
    assert llama_cpp.llama_encode(context, batch) == 0
    rows = [llama_cpp.llama_get_embeddings_ith(context, i) for i in range(len(tokens))]
    states = np.array([np.ctypeslib.as_array(row, (model.n_embd(),)) for row in rows])
    llama_cpp.llama_batch_free(batch)
    model.close()
    return states


@pytest.mark.slow
@each_config
def test_llama_cpp_computes_equal_hidden_states(tmp_path, config):
    """llama.cpp approximates GELU with tanh and a table of 16 bits."""
    model = lively(TextEncoder(config))
    export_gguf(model, tokeniser(), tmp_path / "a.gguf")
    expected, tolerance = hidden_states(model), 2e-3 if "gelu" in config.activation else 1e-5
    difference = np.abs(hidden_states_of_llama_cpp(tmp_path / "a.gguf") - expected).max()
    assert difference < tolerance * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_llama_cpp_pools_equally(tmp_path, pooling):
    export_gguf(lively(TextEncoder(CONFIG)), tokeniser(), tmp_path / "a.gguf", pooling=pooling)
    theirs, texts = open_llama_cpp(tmp_path / "a.gguf", embedding=True), ["the thing in the wind", "ing", ""]
    expected = load_sentence_encoder(tmp_path / "a.gguf").encode(texts)
    assert np.abs(np.array(theirs.embed(texts)) - expected).max() < 2e-3 * np.abs(expected).max()
    theirs.close()


DEFAULTS = ("rope.freq_base", "rope.freq_base_swa", "attention.sliding_window", "attention.sliding_window_pattern")


@pytest.mark.slow
@pytest.mark.parametrize("key", DEFAULTS)
def test_missing_keys_have_the_defaults_of_llama_cpp(tmp_path, key):
    export_gguf(lively(TextEncoder(CONFIGS["SwiGLU, odd window"])), tokeniser(), tmp_path / "a.gguf")
    path = rewritten(tmp_path / "a.gguf", {key: None}, with_tokenizer=True)
    expected = hidden_states(load(path).model)
    assert np.abs(hidden_states_of_llama_cpp(path) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_llama_cpp_tokenizes_equally(tmp_path):
    own = tokeniser()
    export_gguf(TextEncoder(CONFIG), own, tmp_path / "a.gguf")
    model = open_llama_cpp(tmp_path / "a.gguf", vocab_only=True)
    for text in [*TEXTS, *runs_of_characters(), "the [MASK] in the  [MASK][MASK]"]:
        assert model.tokenize(text.encode(), special=True) == own.encode(text), text
    model.close()


# -------------------------------------------------------------------- rejected files and models
WRONG_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "no eps": ({"attention.layer_norm_epsilon": None}, r"expected a key modern-bert\.attention\.layer_norm_epsilon"),
    "no heads": ({"attention.head_count": None}, r"expected a key modern-bert\.attention\.head_count"),
    "one half of the MLP": ({"feed_forward_length": 192}, "feed_forward_length is 192, but the tensors have 96"),
    "causal": ({"attention.causal": True}, "causal to be missing or False, got True"),
    "another activation": (
        {"hidden_activation": "relu"},
        "hidden_activation gelu or gelu_pytorch_tanh or silu, got 'relu'",
    ),
    "scaled RoPE": ({"rope.scaling.type": "linear"}, r"rope\.scaling\.type to be missing or none, got 'linear'"),
    "partial RoPE": ({"rope.dimension_count": 8}, "dimension_count to be missing or 16, got 8"),
    "fewer key heads": ({"attention.head_count_kv": 2}, "head_count_kv to be missing or 4, got 2"),
    "wide heads": ({"attention.key_length": 24}, "(key|value)_length to be .*16, got"),
    "a pattern of layers": (
        {"attention.sliding_window_pattern": [False, True, True, False]},
        "sliding_window_pattern to be a whole number",
    ),
    "a window of text": ({"attention.sliding_window": "8"}, "sliding_window to be a whole number above 0, .*got '8'"),
}


@pytest.mark.parametrize(("keys", "message"), WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_invalid_metadata_is_rejected(tmp_path, keys, message):
    export_gguf(TextEncoder(CONFIG), None, tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf(rewritten(tmp_path / "a.gguf", keys))
    assert str(caught.value).startswith(f"{tmp_path / 'b.gguf'}: ") and "\n" not in str(caught.value)


def test_heads_of_tasks_are_ignored_and_biases_rejected(tmp_path):
    model = lively(TextEncoder(CONFIG))
    export_gguf(model, None, tmp_path / "a.gguf")
    head = {"cls.weight": np.zeros((64, 64), np.float32), "cls.norm.weight": np.zeros(64, np.float32)}
    head |= {"cls.output.weight": np.zeros((2, 64), np.float32), "cls.output.bias": np.zeros(2, np.float32)}
    np.testing.assert_array_equal(
        hidden_states(load(rewritten(tmp_path / "a.gguf", {}, head)).model), hidden_states(model)
    )
    bias = {"blk.1.attn_output.bias": np.zeros(64, np.float32)}
    with pytest.raises(ValueError, match=r"unexpected layers\.1\.attn\.Wo\.bias"):
        load(rewritten(tmp_path / "a.gguf", {}, bias))
    with pytest.raises(ValueError, match=r"'token_types\.weight' is unknown in the architecture modern-bert"):
        load(rewritten(tmp_path / "a.gguf", {}, {"token_types.weight": np.zeros((2, 64), np.float32)}))
