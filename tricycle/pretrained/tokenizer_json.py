"""Construction of tokenizer.json documents, the format of the library `tokenizers`.

Functions return plain values for JSON. Encoding applies the parts of a document in this order: normalizer,
pre_tokenizer, model, post_processor. Decoding applies the decoder.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tricycle.bpe import PIECE
from tricycle.tokeniser import BPETokeniser

JSONObject = dict[str, Any]

SPACE_CHARACTER = "\u2581"  # replaces spaces in tokens of SentencePiece
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(sorted({*range(256)} - {*_VISIBLE}))
# GPT-2's byte-to-character table: visible bytes map to themselves, the others to characters from U+0100 on.
BYTE_CHARACTERS = {value: chr(value) for value in _VISIBLE} | {value: chr(0x100 + i) for i, value in enumerate(_OTHERS)}

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA_3 = _CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLIT_PATTERNS = {"llama-3": _LLAMA_3, "qwen": _LLAMA_3.replace("{1,3}", ""), "tricycle": PIECE}


def new_document(model: JSONObject, added_tokens: Iterable[JSONObject] = (), **parts: Any) -> JSONObject:
    """Return a tokenizer.json document of a model, added tokens sorted by id, and `parts`; omitted ones are null.

    Args:
        added_tokens: results of `added_token`, in any order.
        parts: normalizer, pre_tokenizer, post_processor or decoder.
    """
    defaults = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    ordered = sorted(added_tokens, key=lambda token: token["id"])
    header = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": ordered}
    return {**header, **defaults, **parts, "model": model}


def added_token(token: int, content: str, special: bool = True) -> JSONObject:
    """Return an added_tokens entry for id `token` with text `content`, which is matched before normalization."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": content, **flags, "special": special}


def bpe_model(vocab: Mapping[str, int], merges: Iterable[tuple[str, str]], **settings: Any) -> JSONObject:
    """Return the BPE `model` object of a tokenizer.json; earlier merges have priority; `settings` replace defaults."""
    options = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **options, **flags, **settings, "vocab": dict(vocab), "merges": [*map(list, merges)]}


def byte_level_parts(split: str, add_prefix_space: bool = False) -> JSONObject:
    """Return normalizer, pre-tokenizer, decoder for a split of "gpt2" or others; KeyError if it is unknown.

    Args:
        split: the pre-tokenization pattern: "gpt2", "gpt2-nfc" (after normalization to NFC), "smollm" (GPT-2's with
            single digits), or a key of SPLIT_PATTERNS.
    """
    normalizer = {"type": "NFC"} if split in ("qwen", "gpt2-nfc") else None
    byte_level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    decoder = {**byte_level, "add_prefix_space": True}
    if split in ("gpt2", "gpt2-nfc"):
        return {"normalizer": normalizer, "pre_tokenizer": byte_level, "decoder": decoder}
    if split == "smollm":
        first: JSONObject = {"type": "Digits", "individual_digits": True}
    else:
        first = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERNS[split]}, "behavior": "Isolated", "invert": False}
        byte_level["use_regex"] = False
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [first, byte_level]}
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}


def sentencepiece_parts(add_prefix_space: bool) -> JSONObject:
    """Return normalizer and decoder of a tokenizer.json for SentencePiece's BPE: spaces as U+2581, byte fallback.

    Args:
        add_prefix_space: insert a space before a text, and remove it when decoding.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_CHARACTER}
    normalizers = [{"type": "Prepend", "prepend": SPACE_CHARACTER}, replace] if add_prefix_space else [replace]
    restore = {"type": "Replace", "pattern": {"String": SPACE_CHARACTER}, "content": " "}
    decoders = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if add_prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def unigram_parts(charsmap: bytes) -> JSONObject:
    """Return the normalizer, which removes extra spaces, and pre-tokenizer of unigrams for a tokenizer.json.

    Args:
        charsmap: SentencePiece's compiled replacements of characters; b"" for none.
    """
    steps: list[JSONObject] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
    return {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": metaspace()}


def metaspace() -> JSONObject:
    """Return tokenizer.json's Metaspace part: as pre-tokenizer it replaces spaces, as decoder it restores them."""
    return {"type": "Metaspace", "replacement": SPACE_CHARACTER, "prepend_scheme": "always", "split": True}


def wordpiece_document(vocab: Mapping[str, int], lowercase: bool, first: str, last: str, unknown: str) -> JSONObject:
    """Return a tokenizer.json of BERT's WordPiece; `first`, `last` enclose texts; ValueError if a token is missing.

    WordPiece splits a word into the longest tokens of the vocabulary, from left to right.

    Args:
        first: the special token before a text.
        last: the special token after a text.
        unknown: the token for words outside the vocabulary.

    Raises:
        ValueError: a special token is not in the vocabulary.
    """
    missing = [name for name in (first, last, unknown) if name not in vocab]
    if missing:
        raise ValueError(f"expected {', '.join(missing)} in the WordPiece vocabulary, got none")
    model = {"type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##", "vocab": dict(vocab)}
    settings = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": lowercase}
    return new_document(
        model | {"max_input_chars_per_word": 100},
        [added_token(vocab[name], name) for name in (first, last, unknown, "[PAD]", "[MASK]") if name in vocab],
        normalizer={"type": "BertNormalizer", **settings},
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=template_processing({first: vocab[first]}, {last: vocab[last]}),
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def template_processing(before: Mapping[str, int], after: Mapping[str, int]) -> JSONObject:
    """Return a tokenizer.json post-processor: special tokens (name: id) around a text, `after` also after a second."""

    def special(names: Iterable[str], part: int) -> list[JSONObject]:
        return [{"SpecialToken": {"id": name, "type_id": part}} for name in names]

    first = [*special(before, 0), {"Sequence": {"id": "A", "type_id": 0}}, *special(after, 0)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *special(after, 1)]
    tokens = {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in {**before, **after}.items()}
    return {"type": "TemplateProcessing", "single": first, "pair": [*first, *second], "special_tokens": tokens}


def to_tokenizer_json(tokeniser: BPETokeniser) -> str:
    """Convert a `BPETokeniser` to tokenizer.json text that gives the ids of `encode(text, allowed_special=True)`.

    `BPETokeniser` merges any two neighbors whose concatenation is a token, not only the pair of the training merge. So
    the document contains a merge for each such pair; and it keeps a piece that is a token (`ignore_merges`).
    """
    state = tokeniser.to_dict()
    ranks = {spelling.encode("latin-1"): rank for rank, spelling in enumerate(state["tokens"])}
    as_text = {token: "".join(map(BYTE_CHARACTERS.__getitem__, token)) for token in ranks}
    merges = []
    for token in ranks:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in halves if left in ranks and right in ranks]
        # The pair of the training merge comes first: its later half has the lowest rank.
        pairs.sort(key=lambda pair: (max(ranks[pair[0]], ranks[pair[1]]), ranks[pair[0]]))
        merges += [(as_text[left], as_text[right]) for left, right in pairs]
    vocab = {as_text[token]: rank for token, rank in ranks.items()}
    special = [added_token(token, name) for name, token in tokeniser.special_tokens.items()]
    model = bpe_model(vocab, merges, ignore_merges=True)
    return json.dumps(new_document(model, special, **byte_level_parts(state["split"])), ensure_ascii=False)
