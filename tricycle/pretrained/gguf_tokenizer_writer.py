"""Conversion of a tokenizer to metadata of a GGUF file, the inverse of `gguf_tokenizer_reader`."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from tricycle.bpe import END_OF_TEXT
from tricycle.pretrained.gguf_tokenizer_reader import IGNORE_MERGES, LEFT_STRIPPED, PRE_TOKENIZERS, GGUFTokenizer
from tricycle.pretrained.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.pretrained.tokenizer_json import (
    SPACE_CHARACTER,
    byte_level_parts,
    metaspace,
    sentencepiece_parts,
    to_tokenizer_json,
    unigram_parts,
)
from tricycle.tokeniser import BPETokeniser

Metadata = dict[str, Any]

_BPE_OPTIONS = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")  # which llama.cpp does not have
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of one byte in SentencePiece
# Pre-tokenizers: from names in llama.cpp to names in `tokenizer_json.byte_level_parts`.
_PRE_TOKENIZERS = {names[0]: split for split, names in PRE_TOKENIZERS.items()}


def tokenizer_metadata(tokeniser: Any, n_rows: int) -> Metadata:
    """Return GGUF's "tokenizer.*", with chat templates, padded to `n_rows` tokens; ValueError if unsupported.

    Args:
        tokeniser: a `BPETokeniser` or a `PretrainedTokeniser`: byte-level BPE, SentencePiece's BPE or unigrams, or
            WordPiece in lower case.
        n_rows: the number of rows of the embedding; rows without a token get an unused token, as llama.cpp requires.

    Raises:
        ValueError: a GGUF file cannot represent the tokenizer; the message names the cause.
    """
    if isinstance(tokeniser, BPETokeniser):
        special = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
        tokeniser = PretrainedTokeniser(to_tokenizer_json(tokeniser), special)
    if not isinstance(tokeniser, PretrainedTokeniser):
        raise ValueError(f"expected a BPETokeniser or a PretrainedTokeniser, got {type(tokeniser).__name__}")
    document = json.loads(tokeniser.to_tokenizer_json())
    if document["model"].get("type") == "WordPiece":
        metadata = _wordpiece(document, tokeniser, n_rows)
    elif document["model"].get("type") == "Unigram":
        metadata = _special_tokens(tokeniser) | _unigrams(document, n_rows)
    else:
        convert = _sentencepiece if document["model"].get("byte_fallback") else _byte_level_bpe
        metadata = _special_tokens(tokeniser) | convert(document, n_rows)
    _check_added_tokens(document, LEFT_STRIPPED.get(metadata.get("tokenizer.ggml.pre", "")))
    return metadata | _chat_templates(tokeniser.chat_templates)


def _check_added_tokens(document: Metadata, left_stripped: str | None) -> None:
    """Raise ValueError for an added token with lstrip, rstrip or single_word, but lstrip alone of `left_stripped`."""
    for token in document.get("added_tokens", []):
        flags = [name for name in ("lstrip", "rstrip", "single_word") if token.get(name)]
        if token["content"] == left_stripped and flags != ["lstrip"]:
            raise ValueError(f"expected {left_stripped} with lstrip, as in llama.cpp, got {flags}")
        if token["content"] != left_stripped and flags:
            raise ValueError(f"expected tokens without lstrip, rstrip and single_word, got {token['content']!r}")


# -------------------------------------------------------------------- byte-level BPE
def _byte_level_bpe(document: Metadata, n_rows: int) -> Metadata:
    """Return a byte-level BPE document's metadata, padded to `n_rows` tokens; ValueError if llama.cpp differs."""
    pre_tokenizer = _pre_tokenizer_name(document)
    _check_merges(document, pre_tokenizer)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        **_token_lists(_tokens(document, n_rows)),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in _merges(document)],
    }


def _pre_tokenizer_name(document: Metadata) -> str:
    """Return llama.cpp's name of a document's pre-tokenizer; raise ValueError if it has none."""
    for name, split in _PRE_TOKENIZERS.items():
        if _steps_before_merging(document) == _steps_before_merging(byte_level_parts(split)):
            return name
    names = ", ".join(_PRE_TOKENIZERS)
    raise ValueError(f"expected one of the pre-tokenizers {names}, as by `tricycle train --tokeniser portable`")


def _steps_before_merging(document: Metadata) -> list[tuple[str, Any]]:
    """Return normalizers and pre-tokenizers as (type, option) pairs, which are equal for equivalent settings."""
    return [*_flatten_steps([document.get("normalizer"), document.get("pre_tokenizer")])]


def _flatten_steps(parts: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (type, main option, else dict of options) of each normalizer or pre-tokenizer, flattened; skip None."""
    for part in parts:
        if part is None:
            continue
        kind = part.get("type")
        if kind == "Sequence":
            yield from _flatten_steps(part.get("pretokenizers") or part.get("normalizers") or [])
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            yield kind, part.get("use_regex", True)
        elif kind == "Digits":
            yield kind, part.get("individual_digits")
        elif kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
            yield kind, part.get("pattern", {}).get("Regex")
        else:
            yield kind, {name: value for name, value in part.items() if name != "type"}


def _check_merges(document: Metadata, pre_tokenizer: str) -> None:
    """Raise ValueError unless a document is a byte-level BPE of which llama.cpp makes the same tokens."""
    model = document["model"]
    options = [name for name in _BPE_OPTIONS if model.get(name)]
    if model.get("type") != "BPE" or options:
        raise ValueError(f"expected a byte-level BPE, got {model.get('type')} {' '.join(options)}".rstrip())
    ignores_merges = bool(model.get("ignore_merges"))
    if ignores_merges != (pre_tokenizer in IGNORE_MERGES) and (tokens := _tokens_without_merges(document)):
        raise ValueError(f"expected merges for every token, got none for {len(tokens)}, such as {tokens[0]!r}")


def _tokens_without_merges(document: Metadata) -> list[str]:
    """Return the tokens that merges alone do not produce; only these depend on the option ignore_merges."""
    from tokenizers import Tokenizer

    added = {token["content"] for token in document.get("added_tokens", [])}
    tokens = [token for token in document["model"]["vocab"] if token not in added]
    plain = {"version": "1.0", "added_tokens": [], "model": {**document["model"], "ignore_merges": False}}
    encoded = Tokenizer.from_str(json.dumps(plain)).encode_batch(tokens, add_special_tokens=False)
    return [token for token, encoding in zip(tokens, encoded) if len(encoding.ids) != 1]


# -------------------------------------------------------------------- SentencePiece BPE
def _sentencepiece(document: Metadata, n_rows: int) -> Metadata:
    """Return a SentencePiece BPE document's metadata, with scores in place of merges; ValueError if they differ.

    llama.cpp merges the neighbors whose concatenation is the token with the highest score.
    """
    ranks: dict[str, int] = {}
    for left, right in _merges(document):
        ranks.setdefault(left + right, len(ranks))
    tokens = [_sentencepiece_token(text, kind, document, ranks) for text, kind in _tokens(document, n_rows)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": _adds_space_prefix(document),
        **_token_lists(tokens),
        "tokenizer.ggml.scores": [float(-ranks.get(text, len(ranks))) for text, _ in tokens],
    }
    _check_scores(document, metadata)
    return metadata


def _unigrams(document: Metadata, n_rows: int) -> Metadata:
    """Return the metadata of a document of SentencePiece's unigrams; ValueError for another normalization."""
    model, steps = document["model"], _steps_before_merging(document)
    charsmap = base64.b64decode(dict(steps).get("Precompiled", {}).get("precompiled_charsmap") or "")
    parts = unigram_parts(charsmap)
    known = [_steps_before_merging(parts)]
    if charsmap:  # T5's divides texts at spaces, also those that replace other ones, and so removes extra ones
        first = parts["normalizer"]["normalizers"][0]
        known.append([*_flatten_steps([first, {"type": "WhitespaceSplit"}, metaspace()])])
    if model.get("byte_fallback") or steps not in known:
        raise ValueError("expected unigrams without bytes, with the normalization of SentencePiece, got others")
    scores = dict(model["vocab"])
    tokens = _tokens({**document, "model": {"vocab": {text: i for i, (text, _) in enumerate(model["vocab"])}}}, n_rows)
    unknown = model["vocab"][model["unk_id"]][0]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.unknown_token_id": model["unk_id"],
        **_token_lists([(text, UNKNOWN if text == unknown else kind) for text, kind in tokens]),
        "tokenizer.ggml.scores": [float(scores.get(text, 0.0)) for text, _ in tokens],
        **({"tokenizer.ggml.precompiled_charsmap": charsmap} if charsmap else {}),
    }


def _sentencepiece_token(text: str, kind: int, document: Metadata, ranks: dict[str, int]) -> tuple[str, int]:
    """Return (text, type): BYTE, UNKNOWN, NORMAL for spaces that merges form, else `kind`."""
    if _BYTE.fullmatch(text):
        return text, BYTE
    if text == document["model"].get("unk_token"):
        return text, UNKNOWN
    # Gemma's tokens of several spaces are added tokens, but texts are normalized before, so that merges form them.
    is_merged = kind == USER_DEFINED and not text.strip(SPACE_CHARACTER) and text in ranks
    return text, NORMAL if is_merged else kind


def _adds_space_prefix(document: Metadata) -> bool:
    """Return whether SentencePiece inserts a space before texts; raise ValueError for another normalization."""
    no_spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    for prefix in (False, True):
        normalizer = sentencepiece_parts(prefix)["normalizer"]
        # Normalized texts have no spaces, so that Gemma's division at spaces has no effect.
        for pre_tokenizer in (None, no_spaces):
            expected = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
            if _steps_before_merging(document) == _steps_before_merging(expected):
                return prefix
    raise ValueError("expected SentencePiece's normalizer: spaces as U+2581, and no other steps, got others")


def _check_scores(document: Metadata, metadata: Metadata) -> None:
    """Raise ValueError if other neighbors would be merged by scores than by the document's merges.

    Merges of added tokens do not count, because these are matched before; only those of spaces are merged.
    """
    model = document["model"]
    options = [name for name in (*_BPE_OPTIONS, "ignore_merges") if model.get(name)]
    if model.get("type") != "BPE" or options:
        raise ValueError(f"expected a SentencePiece BPE, got {model.get('type')} {' '.join(options)}".rstrip())
    texts = {token["content"] for token in document.get("added_tokens", [])}
    added = {text for text in texts if text.strip(SPACE_CHARACTER)}
    both = []
    for merges in (_merges(document), GGUFTokenizer(metadata).to_tokenizer_json()["model"]["merges"]):
        both.append([(left, right) for left, right in merges if not added & {left, right, left + right}])
    results = [[token for token, _ in groupby(left + right for left, right in merges)] for merges in both]
    if results[0] != results[1] or set(both[0]) != set(both[1]):
        wrong = next((left + right for left, right in set(both[0]) ^ set(both[1])), "another order")
        raise ValueError(f"expected a merge for each pair of tokens that is a token, ordered by token, got {wrong!r}")


# -------------------------------------------------------------------- WordPiece
def _wordpiece(document: Metadata, tokeniser: PretrainedTokeniser, n_rows: int) -> Metadata:
    """Return the metadata of BERT's WordPiece: U+2581 before words' first tokens, no ##; ValueError for other kinds."""
    model, vocab = document["model"], tokeniser.backend.get_vocab(with_added_tokens=True)
    around = tokeniser.backend.encode("").tokens
    if len(around) != 2:
        raise ValueError(f"expected a tokeniser that adds two tokens to a text, such as [CLS] and [SEP], got {around}")
    tokens = _tokens(document, n_rows)
    metadata: Metadata = {
        "tokenizer.ggml.model": "bert",
        **_token_lists([(_wordpiece_text(text, kind), kind) for text, kind in tokens]),
        # llama.cpp inserts bos_token_id before a text; older versions insert cls_token_id.
        "tokenizer.ggml.bos_token_id": vocab[around[0]],
        "tokenizer.ggml.cls_token_id": vocab[around[0]],
        "tokenizer.ggml.seperator_token_id": vocab[around[1]],
        "tokenizer.ggml.unknown_token_id": vocab[model["unk_token"]],
    }
    for name, key in (("pad_token", "padding"), ("mask_token", "mask")):
        if name in tokeniser.special:
            metadata[f"tokenizer.ggml.{key}_token_id"] = vocab[tokeniser.special[name]]
    back = GGUFTokenizer(metadata).to_tokenizer_json()
    normalizer = document.get("normalizer") or {}
    if normalizer.get("lowercase") and normalizer.get("strip_accents"):
        document["normalizer"] = {**normalizer, "strip_accents": None}  # which has the same effect in lower case
    if _steps_before_merging(document) != _steps_before_merging(back):
        raise ValueError("expected the normalizer and pre-tokenizer of a BERT in lower case, got others")
    back_vocab = back["model"]["vocab"]
    wrong = [text for i, (text, kind) in enumerate(tokens) if kind == USER_DEFINED or back_vocab.get(text) != i]
    if wrong or model.get("continuing_subword_prefix") != "##":
        raise ValueError(f"expected special tokens in brackets, and ## before parts of words, got {wrong[:1] or model}")
    return metadata


def _wordpiece_text(text: str, kind: int) -> str:
    """Return a WordPiece token without "##", or with a space mark before it; special and unused ones unchanged."""
    if kind in (CONTROL, UNUSED):
        return text
    return text.removeprefix("##") if text.startswith("##") else SPACE_CHARACTER + text


# -------------------------------------------------------------------- tokens
def _tokens(document: Metadata, n_rows: int) -> list[tuple[str, int]]:
    """Return (text, type) of each row's token; unused tokens fill `n_rows`; ValueError for too many tokens."""
    tokens: dict[int, tuple[str, int]] = {i: (token, NORMAL) for token, i in document["model"]["vocab"].items()}
    for token in document.get("added_tokens", []):
        tokens[token["id"]] = (token["content"], CONTROL if token.get("special") else USER_DEFINED)
    if (n_tokens := max(tokens) + 1) > n_rows:
        raise ValueError(f"expected a tokeniser of at most {n_rows} tokens, the rows of the embedding, got {n_tokens}")
    return [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(n_rows)]


def _token_lists(tokens: list[tuple[str, int]]) -> Metadata:
    """Return the metadata of (text, type) tokens: one list of texts and one of types."""
    return {
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
    }


def _merges(document: Metadata) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged; older documents have them as one text with a space."""
    merges = document["model"].get("merges") or []
    return [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges]


# -------------------------------------------------------------------- special tokens and chat templates
def _special_tokens(tokeniser: PretrainedTokeniser) -> Metadata:
    """Return the ids of special tokens, and whether texts get BOS and EOS; ValueError if they get other tokens.

    Encoders may have [CLS] and [SEP] in their place.
    """
    vocabulary = tokeniser.backend.get_vocab(with_added_tokens=True)
    ids = {name: vocabulary[text] for name, text in tokeniser.special.items()}
    bos, eos = ids.get("bos_token", ids.get("cls_token")), ids.get("eos_token", ids.get("sep_token"))
    if bos is None and eos is None:
        why = "because llama.cpp ends every text with a token"
        raise ValueError(f"expected a tokeniser with bos_token or eos_token, such as {END_OF_TEXT}, {why}")
    added = tokeniser.encode("")
    adds_bos, adds_eos = added[:1] == [bos] and bos is not None, added[-1:] == [eos] and eos is not None
    if added == [bos] and bos == eos:
        adds_eos = False
    if len(added) != adds_bos + adds_eos:
        raise ValueError(f"expected a tokeniser that adds only bos_token and eos_token to a text, got {added}")
    metadata = {
        "tokenizer.ggml.bos_token_id": bos if bos is not None else eos,
        "tokenizer.ggml.eos_token_id": eos if eos is not None else bos,
        "tokenizer.ggml.add_bos_token": adds_bos,
        "tokenizer.ggml.add_eos_token": adds_eos,
    }
    names = {"unk": "unknown", "pad": "padding", "cls": "cls", "sep": "seperator", "mask": "mask"}
    others = {key: ids[f"{name}_token"] for name, key in names.items() if f"{name}_token" in ids}
    return metadata | {f"tokenizer.ggml.{key}_token_id": token for key, token in others.items()}


def _chat_templates(templates: dict[str, str]) -> Metadata:
    """Return the metadata of templates by name, with a list of those other than "default"."""
    others = [name for name in templates if name != "default"]
    metadata: Metadata = {f"tokenizer.chat_template.{name}": templates[name] for name in others}
    if others:
        metadata["tokenizer.chat_templates"] = others
    if "default" in templates:
        metadata["tokenizer.chat_template"] = templates["default"]
    return metadata
