"""Conversion of a tokenizer to metadata of a GGUF file, the inverse of `gguf_tokenizer_reader`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tricycle.bpe import END_OF_TEXT
from tricycle.pretrained.gguf_tokenizer_reader import (
    CONTROL,
    IGNORE_MERGES,
    NORMAL,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
)
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.pretrained.tokenizer_json import byte_level_parts, to_tokenizer_json
from tricycle.tokeniser import BPETokeniser

Metadata = dict[str, Any]

# Pre-tokenizers: from names in llama.cpp to names in `tokenizer_json.byte_level_parts`.
_PRE_TOKENIZERS = {names[0]: split for split, names in PRE_TOKENIZERS.items()}


def tokenizer_metadata(tokeniser: Any, n_rows: int) -> Metadata:
    """Return GGUF's "tokenizer.*", with chat templates, of a byte-level BPE; pad to `n_rows`; else ValueError.

    Args:
        tokeniser: a `BPETokeniser` or a `PretrainedTokeniser`.
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
    special_tokens = _special_tokens(tokeniser)
    pre_tokenizer = _pre_tokenizer_name(document)
    _check_merges(document, pre_tokenizer)
    metadata: Metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_tokenizer}
    return metadata | _tokens_and_merges(document, n_rows) | special_tokens | _chat_templates(tokeniser.chat_templates)


# -------------------------------------------------------------------- pre-tokenizer and merges
def _pre_tokenizer_name(document: Metadata) -> str:
    """Return llama.cpp's name of the pre-tokenizer; raise ValueError if it has none."""
    for name, split in _PRE_TOKENIZERS.items():
        if _steps_before_merging(document) == _steps_before_merging(byte_level_parts(split)):
            return name
    raise ValueError(f"expected one of the pre-tokenizers {', '.join(_PRE_TOKENIZERS)}, which llama.cpp supports")


def _steps_before_merging(document: Metadata) -> list[tuple[str, Any]]:
    """Return the steps of normalization and pre-tokenization in a form that is equal for equivalent settings."""
    return [*_flatten_steps([document.get("normalizer"), document.get("pre_tokenizer")])]


def _flatten_steps(parts: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield type and option of each step."""
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
            yield kind, None


def _check_merges(document: Metadata, pre_tokenizer: str) -> None:
    """Raise ValueError if llama.cpp would divide pieces into other tokens."""
    model = document["model"]
    unsupported = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
    options = [name for name in unsupported if model.get(name)]
    if model.get("type") != "BPE" or options:
        raise ValueError(f"expected a byte-level BPE, got {model.get('type')} {' '.join(options)}".rstrip())
    for token in document.get("added_tokens", []):
        if any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
            raise ValueError(f"expected tokens without lstrip, rstrip and single_word, got {token.get('content')!r}")
    ignores_merges = bool(model.get("ignore_merges"))
    if ignores_merges != (pre_tokenizer in IGNORE_MERGES) and (tokens := _tokens_without_merges(document)):
        raise ValueError(f"expected merges for every token, got none for {len(tokens)}, such as {tokens[0]!r}")


def _tokens_without_merges(document: Metadata) -> list[str]:
    """Return the tokens that merges do not produce; only these depend on the option ignore_merges."""
    from tokenizers import Tokenizer

    added = {token["content"] for token in document.get("added_tokens", [])}
    tokens = [token for token in document["model"]["vocab"] if token not in added]
    plain = {"version": "1.0", "added_tokens": [], "model": {**document["model"], "ignore_merges": False}}
    encoded = Tokenizer.from_str(json.dumps(plain)).encode_batch(tokens, add_special_tokens=False)
    return [token for token, encoding in zip(tokens, encoded) if len(encoding.ids) != 1]


# -------------------------------------------------------------------- tokens
def _tokens_and_merges(document: Metadata, n_rows: int) -> Metadata:
    """Return all tokens with their types, and the merges."""
    tokens: dict[int, tuple[str, int]] = {i: (token, NORMAL) for token, i in document["model"]["vocab"].items()}
    for token in document.get("added_tokens", []):
        tokens[token["id"]] = (token["content"], CONTROL if token.get("special") else USER_DEFINED)
    if (n_tokens := max(tokens) + 1) > n_rows:
        raise ValueError(f"expected a tokeniser of at most {n_rows} tokens, the rows of the embedding, got {n_tokens}")
    rows = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(n_rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    return {
        "tokenizer.ggml.tokens": [text for text, _ in rows],
        "tokenizer.ggml.token_type": [token_type for _, token_type in rows],
        "tokenizer.ggml.merges": merges,
    }


# -------------------------------------------------------------------- special tokens and chat templates
def _special_tokens(tokeniser: PretrainedTokeniser) -> Metadata:
    bos, eos = tokeniser.bos, tokeniser.eos
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
    vocabulary = tokeniser.backend.get_vocab(with_added_tokens=True)
    for name, key in (("unk_token", "unknown"), ("pad_token", "padding")):
        if name in tokeniser.special:
            metadata[f"tokenizer.ggml.{key}_token_id"] = vocabulary[tokeniser.special[name]]
    return metadata


def _chat_templates(templates: dict[str, str]) -> Metadata:
    others = [name for name in templates if name != "default"]
    metadata: Metadata = {f"tokenizer.chat_template.{name}": templates[name] for name in others}
    if others:
        metadata["tokenizer.chat_templates"] = others
    if "default" in templates:
        metadata["tokenizer.chat_template"] = templates["default"]
    return metadata
