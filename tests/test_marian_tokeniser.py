"""Marian's tokenizer: SentencePiece models against their library and transformers, and damaged files."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import struct
from pathlib import Path

import pytest

from tricycle.pretrained.marian_tokeniser import MarianTokeniser, marian_tokeniser_from_folder
from tricycle.pretrained.sentencepiece_model import proto_fields, unigram_document

pytest.importorskip("tokenizers")
PIECES = {"▁the": -1.0, "▁": -2.0, "s": -3.0, "ea": -2.5, "▁se": -2.5, "a": -3.0, "e": -3.5, ".": -2.0}
WORDS = "the sea is deep and the ships sail over it to far lands where people speak other languages".split()


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def score(value: float) -> bytes:
    return varint(2 << 3 | 5) + struct.pack("<f", value)


def spm(pieces: dict[str, float], *more: bytes) -> bytes:
    """Return the bytes of a SentencePiece model."""
    special = [field(1, b"<unk>") + score(0) + field(3, 2), field(1, b"</s>") + score(0) + field(3, 3)]
    normal = [field(1, piece.encode()) + score(value) for piece, value in pieces.items()]
    return b"".join([*(field(1, piece) for piece in (*special, *normal)), *more])


def save(folder: Path, model: bytes, pieces: list[str], **config: object) -> None:
    vocab = {piece: i for i, piece in enumerate(["</s>", "<unk>", *reversed(pieces), ">>de<<", "ü", "<pad>"])}
    (folder / "source.spm").write_bytes(model)
    (folder / "target.spm").write_bytes(model)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    config = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_text_is_split_into_the_most_probable_pieces(tmp_path: Path) -> None:
    save(tmp_path, spm(PIECES), list(PIECES))
    tokeniser = marian_tokeniser_from_folder(tmp_path)
    assert isinstance(tokeniser, MarianTokeniser)
    ids = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    expected = [">>de<<", "▁the", "▁se", "a", ".", "</s>"]
    assert tokeniser.encode(">>de<<the  sea.") == [ids[piece] for piece in expected]
    assert tokeniser.encode("ü ß", add_special_tokens=False) == [ids[x] for x in ("▁", "ü", "▁", "<unk>")]
    assert tokeniser.encode("a</s>", False) == [ids[x] for x in ("▁", "a", "</s>")]
    assert ids["</s>"] not in tokeniser.encode("a</s>", False, allowed_special=False)
    assert tokeniser.decode(tokeniser.encode("the sea."), skip_special_tokens=True) == "the sea."
    assert (tokeniser.n_vocab, tokeniser.eos) == (len(ids), ids["</s>"])
    assert pickle.loads(pickle.dumps(tokeniser)) == tokeniser
    with pytest.raises(ValueError, match="to save or export"):
        tokeniser.to_dict()


def test_ids_and_texts_are_those_of_sentencepiece_and_transformers(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    rng, model = random.Random(0), io.BytesIO()
    sentences = [" ".join(rng.choices(WORDS, k=9)) + "." for _ in range(300)]
    options = {"vocab_size": 38, "model_type": "unigram", "eos_id": 1, "bos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [reference.id_to_piece(i) for i in range(2, len(reference))]
    save(tmp_path, model.getvalue(), pieces)
    tokeniser = marian_tokeniser_from_folder(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    texts = [
        *sentences[:30],
        "",
        " two  spaces ",
        "Ünknown ﬁsh ½ 東京 z",
        "tabs\tand\nlines",
        "e\u0301 oversea",
        "..the",
    ]
    for text in texts:
        expected = [vocab.get(piece, vocab["<unk>"]) for piece in reference.encode(text, out_type=str)]
        assert tokeniser.encode(text, add_special_tokens=False) == expected, text
        decoded = tokeniser.decode([i for i in expected if i != vocab["<unk>"]])
        assert (
            decoded.strip() == reference.decode([p for p in reference.encode(text, out_type=str) if p in vocab]).strip()
        ), text
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    for text in (*texts, ">>de<< the sea", "the </s> sea"):
        assert tokeniser.encode(text) == theirs(text)["input_ids"], text


DAMAGED = {
    "cut": (spm(PIECES)[:-3], "damaged"),
    "integer": (b"\x80" * 12, "damaged integer"),
    "a group": (varint(1 << 3 | 3), "damaged field 1"),
    "BPE": (spm(PIECES, field(2, field(3, 2))), "unigram"),
    "user-defined": (spm(PIECES, field(1, field(1, b"x") + field(3, 4))), "type 4"),
    "no prefix": (spm(PIECES, field(3, field(3, 0))), "with prefix"),
    "text": (spm(PIECES, field(1, field(1, b"\xff"))), "utf-8"),
    "nested": (spm(PIECES, field(1, 5)), "SentencePiece"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_and_unsupported_models_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    save(tmp_path, data, list(PIECES))
    with pytest.raises(ValueError, match=f"source.spm: .*{message}"):
        marian_tokeniser_from_folder(tmp_path)


@pytest.mark.parametrize("seed", range(40))
def test_changed_bytes_raise_only_value_errors(seed: int) -> None:
    rng, data = random.Random(seed), bytearray(spm(PIECES, field(3, field(2, b"abcd"))))
    for _ in range(3):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with contextlib.suppress(ValueError):
        unigram_document(bytes(data))


def test_fields_are_read() -> None:
    assert list(proto_fields(field(1, b"ab") + field(300, 12345) + score(1.5))) == [
        (1, b"ab"),
        (300, 12345),
        (2, struct.pack("<f", 1.5)),
    ]


@pytest.mark.parametrize(
    ("vocab", "config", "message"),
    [
        ({"</s>": 0}, {}, "<unk> in vocab.json"),
        ({"</s>": 0, "<unk>": "1"}, {}, "an id for each"),
        ({"</s>": 0, "<unk>": 1}, {"separate_vocabs": True}, "separate_vocabs"),
    ],
)
def test_wrong_vocabularies_are_refused(vocab: dict, config: dict, message: str, tmp_path: Path) -> None:
    save(tmp_path, spm(PIECES), [], **config)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        marian_tokeniser_from_folder(tmp_path)
