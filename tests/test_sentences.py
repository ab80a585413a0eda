"""Sentence embeddings from folders of sentence-transformers' form, against transformers and their definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import MODULES, write_pooling

from tricycle.configs import EncoderConfig
from tricycle.pretrained.sentence_encoder import SentenceEncoder, load_sentence_encoder
from tricycle.sequences.text_encoder import TextEncoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a b c d e f g h".split()
TEXTS = ["a b c", "", "h", "d e f g h a b c d e f g h a b", "  c a  ", "A?"]


def flags(**kinds: bool) -> dict[str, Any]:
    named = {"mean_tokens": False, "cls_token": False, "max_tokens": False, "mean_sqrt_len_tokens": False, **kinds}
    return {"word_embedding_dimension": 24, **{f"pooling_mode_{name}": value for name, value in named.items()}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=12, **sizes)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape)
    model.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    write_pooling(tmp_path, flags(mean_tokens=True))
    return tmp_path


def expected(folder: Path, kind: str, normalise: bool, longest: int = 12) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokeniser = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:  # one by one: no padding
        encoded = tokeniser(text, truncation=True, max_length=longest, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**encoded).last_hidden_state[0].numpy()
        rows.append(hidden.mean(axis=0) if kind == "mean" else hidden[0])
    vectors = np.array(rows)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalise else vectors


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("mean", flags(mean_tokens=True)),
        ("first", flags(cls_token=True)),
        ("mean", {"embedding_dimension": 24, "pooling_mode": "mean"}),
        ("first", {"embedding_dimension": 24, "pooling_mode": "cls"}),
    ],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_vectors_are_those_of_transformers(folder: Path, kind: str, pooling: dict[str, Any], normalise: bool) -> None:
    write_pooling(folder, pooling, MODULES if normalise else MODULES[:2])
    model = load_sentence_encoder(folder)
    for batch_size in (1, 4, 32):
        vectors = model.encode(TEXTS, batch_size)
        np.testing.assert_allclose(vectors, expected(folder, kind, normalise), atol=2e-5)
    assert vectors.dtype == np.float32 and model.encode([]).shape == (0, 24)


def test_folder_without_settings(folder: Path) -> None:
    (folder / "modules.json").unlink()
    np.testing.assert_allclose(load_sentence_encoder(folder).encode(TEXTS), expected(folder, "mean", False), atol=2e-5)


def test_long_texts_are_cut_and_capital_letters_lowered(folder: Path) -> None:
    settings = {"max_seq_length": 6, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    model = load_sentence_encoder(folder)
    assert model.max_tokens == 6
    np.testing.assert_allclose(model.encode(TEXTS), expected(folder, "mean", True, 6), atol=2e-5)
    assert len(model.tokeniser.encode("a b c d e f g h")) == 10  # it cuts nothing for others
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": None, "do_lower_case": True}))
    model = load_sentence_encoder(folder)
    assert model.max_tokens == 12
    assert np.array_equal(model.encode(["A B"]), model.encode(["a b"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: write_pooling(f, flags(max_tokens=True)), "one of mean, cls"),
        (lambda f: write_pooling(f, flags(mean_tokens=True, cls_token=True)), r"got \['mean', 'cls'\]"),
        (lambda f: write_pooling(f, {"pooling_mode": ["mean"]}), r"got \[\['mean'\]\]"),
        (lambda f: write_pooling(f, {}), r"got \[\]"),
        (lambda f: write_pooling(f, {}, [*MODULES, "Dense"]), r"Normalize, got .*Dense in '3_Dense'"),
        (lambda f: (f / "modules.json").write_text("{"), r"modules\.json: .*JSON"),
        (lambda f: (f / "modules.json").write_text("{}"), r"modules\.json: .*list of objects"),
        (lambda f: (f / "modules.json").write_text('[{"path": "../x"}]'), r"folder beside it.*, got '\.\./x'"),
        (lambda f: (f / "sentence_bert_config.json").write_text('{"max_seq_length": 2}'), "above 2"),
        (
            lambda f: (f / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}'),
            "default_prompt_name.*null",
        ),
    ],
)
def test_invalid_folders_are_rejected(folder: Path, change: Any, message: str) -> None:
    change(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_sentence_encoder(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_wrong_calls(folder: Path) -> None:
    model = load_sentence_encoder(folder)
    with pytest.raises(TypeError, match="list of texts"):
        model.encode("a b")
    with pytest.raises(ValueError, match=r"batch_size.*got 0"):
        model.encode(["a"], 0)
    other = TextEncoder(EncoderConfig(vocab_size=20, context_window=2, embedding_dim=8, n_heads=2, n_layers=1))
    with pytest.raises(ValueError, match=r"above 2.*got 2"):
        SentenceEncoder(other, model.tokeniser)


def test_loading_a_decoder_as_an_encoder_raises(folder: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    with pytest.raises(ValueError, match=r"encoder.*GPT"):
        load_sentence_encoder(tmp_path / "gpt")
