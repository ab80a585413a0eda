"""The form of a tokenizer.json, which the library `tokenizers` reads: how vocabularies of several kinds look in it.

All functions here give plain values that JSON can hold. The form's parts, in the order in which text goes through them:
normalizer, pre_tokenizer, model, post_processor; and back: decoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tricycle.bpe import PIECE
from tricycle.tokeniser import BPETokeniser

Fields = dict[str, Any]

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(sorted({*range(256)} - {*_VISIBLE}))
# GPT-2's spelling of bytes: each is one visible character, itself where it is visible, else one from U+0100 on.
BYTE_CHARACTERS = {value: chr(value) for value in _VISIBLE} | {value: chr(0x100 + i) for i, value in enumerate(_HIDDEN)}

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA_3 = _CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {"llama-3": _LLAMA_3, "qwen": _LLAMA_3.replace("{1,3}", ""), "tricycle": PIECE}


def document(model: Fields, added_tokens: Iterable[Fields] = (), **parts: Any) -> Fields:
    """A whole tokenizer.json; parts that are not given do nothing.

    Args:
        added_tokens: from `added_token`, in any order.
    """
    known = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    ordered = sorted(added_tokens, key=lambda token: token["id"])
    header = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": ordered}
    return {**header, **known, **parts, "model": model}


def added_token(token: int, content: str, special: bool = True) -> Fields:
    """A token that is looked for in a text before anything else is done with it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": content, **flags, "special": special}


def bpe(vocab: Mapping[str, int], merges: Iterable[tuple[str, str]], **settings: Any) -> Fields:
    """Byte-pair encoding: pairs are merged, the earliest in the list first."""
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    switches = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **switches, **settings, "vocab": dict(vocab), "merges": [*map(list, merges)]}


def byte_level_parts(split: str, add_prefix_space: bool = False) -> Fields:
    """What goes around the BPE of bytes.

    Args:
        split: what cuts a text into pieces: "gpt2", "smollm" (the same, and each digit by itself), or one of SPLITS.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    decoder = {**byte_level, "add_prefix_space": True}
    if split == "gpt2":
        return {"pre_tokenizer": byte_level, "decoder": decoder}
    if split == "smollm":
        first: Fields = {"type": "Digits", "individual_digits": True}
    else:
        first = {"type": "Split", "pattern": {"Regex": SPLITS[split]}, "behavior": "Isolated", "invert": False}
        byte_level["use_regex"] = False
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [first, byte_level]}
    normalizer = {"type": "NFC"} if split == "qwen" else None
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}


def spaces_as_letters_parts(prefix: bool) -> Fields:
    """What goes around the BPE of characters in which spaces are written as U+2581, with one before a text or not.

    As in SentencePiece (Kudo and Richardson 2018).
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    normalizers = [{"type": "Prepend", "prepend": "\u2581"}, replace] if prefix else [replace]
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def word_piece(vocab: Mapping[str, int], lowercase: bool, first: str, last: str, unknown: str) -> Fields:
    """BERT's: words, and from each the longest piece that is in the vocabulary, again and again (Devlin et al. 2019).

    Args:
        first, last: the special tokens before and after a text.
    """
    missing = [name for name in (first, last, unknown) if name not in vocab]
    if missing:
        raise ValueError(f"expected {', '.join(missing)} in the vocabulary of word pieces, there is none")
    model = {"type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##", "vocab": dict(vocab)}
    settings = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": lowercase}
    return document(
        model | {"max_input_chars_per_word": 100},
        [added_token(vocab[name], name) for name in (first, last, unknown, "[PAD]", "[MASK]") if name in vocab],
        normalizer={"type": "BertNormalizer", **settings},
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=around({first: vocab[first]}, {last: vocab[last]}),
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def around(before: Mapping[str, int], after: Mapping[str, int]) -> Fields:
    """The post-processor that puts special tokens, named with their ids, before and after each text."""

    def special(names: Iterable[str], part: int) -> list[Fields]:
        return [{"SpecialToken": {"id": name, "type_id": part}} for name in names]

    first = [*special(before, 0), {"Sequence": {"id": "A", "type_id": 0}}, *special(after, 0)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *special(after, 1)]
    tokens = {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in {**before, **after}.items()}
    return {"type": "TemplateProcessing", "single": first, "pair": [*first, *second], "special_tokens": tokens}


def to_tokenizer_json(tokeniser: BPETokeniser) -> str:
    """Our own tokeniser as a tokenizer.json, which gives the ids of `encode(text, allowed_special=True)`.

    Our encoder merges any two neighbours that make a token, whichever two made it when it was learnt, so every pair
    that makes one is a merge here; and a piece that is a token stays whole.
    """
    state = tokeniser.to_dict()
    ranks = {spelling.encode("latin-1"): rank for rank, spelling in enumerate(state["tokens"])}
    spelt = {token: "".join(map(BYTE_CHARACTERS.__getitem__, token)) for token in ranks}
    merges = []
    for token in ranks:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in halves if left in ranks and right in ranks]
        # the pair that was merged when the token was learnt comes first: its later half came earliest
        pairs.sort(key=lambda pair: (max(ranks[pair[0]], ranks[pair[1]]), ranks[pair[0]]))
        merges += [(spelt[left], spelt[right]) for left, right in pairs]
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    special = [added_token(token, name) for name, token in tokeniser.special_tokens.items()]
    model = bpe(vocab, merges, ignore_merges=True)
    return json.dumps(document(model, special, **byte_level_parts(state["split"])), ensure_ascii=False)
