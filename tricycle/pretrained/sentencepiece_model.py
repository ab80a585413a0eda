"""Reader of SentencePiece models (.spm, .model): unigram vocabularies with their normalization.

The files are Protocol Buffers, of which only the fields that are used are decoded. Sources: Kudo 2018, "Subword
regularization"; sentencepiece_model.proto of SentencePiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from tricycle.pretrained import tokenizer_json

UNIGRAM = 1  # a model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces, and of tokens in GGUF files
WIRE_VARINT, WIRE_64_BITS, WIRE_BYTES, WIRE_32_BITS = 0, 1, 2, 5


def proto_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a Protocol Buffers message; ValueError if it is damaged.

    Values are integers, or the bytes of strings, messages, and numbers of 32 and 64 bits.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == WIRE_VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        size = {WIRE_64_BITS: 8, WIRE_32_BITS: 4}.get(wire, -1)
        if wire == WIRE_BYTES:
            size, position = _varint(data, position)
        if size < 0 or position + size > len(data):
            raise ValueError(f"expected a SentencePiece model, got a damaged field {number} at byte {position}")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return (integer at a position, 7 bits in each byte, position after it); ValueError if it is damaged."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte, position = data[position], position + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError(f"expected a SentencePiece model, got a damaged integer before byte {position}")


def unigram_document(data: bytes) -> dict[str, Any]:
    """Return a tokenizer.json that splits texts into a SentencePiece unigram model's pieces, with other ids.

    Raises:
        ValueError: the file is damaged, or has another model type, user-defined pieces, bytes or other normalization.
    """
    try:
        return _unigram_document(data)
    except (TypeError, AttributeError, struct.error) as error:  # a field has another type
        raise ValueError(f"expected a SentencePiece model, got a field of another type: {error}") from None


def _unigram_document(data: bytes) -> dict[str, Any]:
    """Return `unigram_document`'s dict (<unk>, normal pieces); ValueError if unsupported, or others if damaged."""
    message = list(proto_fields(data))
    trainer = dict(proto_fields(next((value for number, value in message if number == 2), b"")))
    normalizer = dict(proto_fields(next((value for number, value in message if number == 3), b"")))
    if trainer.get(3, UNIGRAM) != UNIGRAM:
        raise ValueError(f"expected a SentencePiece model of type {UNIGRAM} (unigram), got type {trainer[3]}")
    if [normalizer.get(number, 1) for number in (3, 4, 5)] != [1, 1, 1] or trainer.get(24, 0):
        raise ValueError("expected a SentencePiece model with prefix, without extra spaces, and with escaped spaces")
    vocab: list[list[Any]] = [["<unk>", 0.0]]
    for number, value in message:
        if number != 1:
            continue
        piece = dict(proto_fields(value))
        kind = piece.get(3, NORMAL)
        if kind == NORMAL:
            vocab.append([piece.get(1, b"").decode("utf-8"), struct.unpack("<f", piece.get(2, bytes(4)))[0]])
        elif kind not in (UNKNOWN, CONTROL, UNUSED):
            raise ValueError(f"expected normal pieces in a SentencePiece model, got {piece.get(1)!r} of type {kind}")
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}
    return tokenizer_json.new_document(model, **tokenizer_json.unigram_parts(normalizer.get(2, b"")))
