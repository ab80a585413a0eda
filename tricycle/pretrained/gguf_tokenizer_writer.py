"""A tokeniser as keys of a GGUF file: the other way round than `ggml_vocabulary`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tricycle.bpe import END_OF_TEXT
from tricycle.pretrained.gguf_tokenizer_reader import CONTROL, NORMAL, UNUSED, USER_DEFINED
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.pretrained.tokenizer_json import byte_level_parts, to_tokenizer_json
from tricycle.tokeniser import BPETokeniser

Keys = dict[str, Any]

# The ways to cut text into pieces that llama.cpp knows: its name, and ours.
_CUTS = {"gpt-2": "gpt2", "smollm": "smollm", "llama-bpe": "llama-3", "qwen2": "qwen"}
WHY_AN_END = "for llama.cpp ends every text with some token"
_KEEPS_WHOLE_PIECES = ("llama-bpe",)  # a piece that is a token is one, without looking at merges


def tokenizer_metadata(tokeniser: Any, n_rows: int) -> Keys:
    """The keys that begin with "tokenizer.".

    Args:
        tokeniser: our own, or another.
        n_rows: of the model's embedding. Rows without a token get one that is never used: llama.cpp counts them.

    Raises:
        ValueError: a tokeniser that such a file cannot describe: says what is in the way.
    """
    if isinstance(tokeniser, BPETokeniser):
        document, ends = to_tokenizer_json(tokeniser), _ends_of_ours(tokeniser)
    elif isinstance(tokeniser, PretrainedTokeniser):
        document, ends = tokeniser.to_tokenizer_json(), _ends_of_theirs(tokeniser)
    else:
        raise ValueError(f"expected a BPETokeniser or a PretrainedTokeniser, got {type(tokeniser).__name__}")
    parsed = json.loads(document)
    cut = _name_of_cut(parsed)
    _check_merging(parsed, cut)
    keys: Keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": cut}
    keys |= _token_lists(parsed, n_rows)
    return keys | ends | _templates(tokeniser)


# -------------------------------------------------------------------- cutting and merging
def _name_of_cut(document: Keys) -> str:
    """Return llama.cpp's name of the way to cut text; raise ValueError where it knows none."""
    for name, cut in _CUTS.items():
        if _steps_of(document) == _steps_of(byte_level_parts(cut)):
            return name
    raise ValueError(f"expected a tokeniser that cuts text as one of {', '.join(_CUTS)} does, which llama.cpp knows")


def _steps_of(document: Keys) -> list[tuple[str, Any]]:
    return [*_steps([document.get("normalizer"), document.get("pre_tokenizer")])]


def _steps(parts: list[Any]) -> Iterator[tuple[str, Any]]:
    """What is done to a text before merging, step by step; of the same form for equal things."""
    for part in parts:
        if part is None:
            continue
        kind = part.get("type")
        if kind == "Sequence":
            yield from _steps(part.get("pretokenizers") or part.get("normalizers") or [])
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            yield kind, part.get("use_regex", True)
        elif kind == "Digits":
            yield kind, part.get("individual_digits")
        elif kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
            yield kind, part.get("pattern", {}).get("Regex")
        else:
            yield kind, None


def _check_merging(document: Keys, cut: str) -> None:
    """Raise ValueError where what llama.cpp makes of the pieces would differ."""
    model = document["model"]
    unusual = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
    in_the_way = [name for name in unusual if model.get(name)]
    if model.get("type") != "BPE" or in_the_way:
        raise ValueError(f"expected a byte-level BPE, got {model.get('type')} {' '.join(in_the_way)}".rstrip())
    for token in document.get("added_tokens", []):
        if any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
            raise ValueError(f"expected tokens without lstrip, rstrip and single_word, got {token.get('content')!r}")
    keeps_whole = bool(model.get("ignore_merges"))
    if keeps_whole != (cut in _KEEPS_WHOLE_PIECES) and (lost := _not_merged(document)):
        raise ValueError(f"expected merges that lead to every token, none leads to {len(lost)}, such as {lost[0]!r}")


def _not_merged(document: Keys) -> list[str]:
    """Tokens that merges alone do not make of their characters: only these depend on whole pieces being kept."""
    from tokenizers import Tokenizer

    added = {token["content"] for token in document.get("added_tokens", [])}
    tokens = [token for token in document["model"]["vocab"] if token not in added]
    plain = {"version": "1.0", "added_tokens": [], "model": {**document["model"], "ignore_merges": False}}
    encoded = Tokenizer.from_str(json.dumps(plain)).encode_batch(tokens, add_special_tokens=False)
    return [token for token, encoding in zip(tokens, encoded) if len(encoding.ids) != 1]


# -------------------------------------------------------------------- lists
def _token_lists(document: Keys, n_rows: int) -> Keys:
    """All tokens with their kinds, and the merges."""
    tokens: dict[int, tuple[str, int]] = {i: (token, NORMAL) for token, i in document["model"]["vocab"].items()}
    for token in document.get("added_tokens", []):
        tokens[token["id"]] = (token["content"], CONTROL if token.get("special") else USER_DEFINED)
    if (n_tokens := max(tokens) + 1) > n_rows:
        raise ValueError(f"expected a tokeniser of at most {n_rows} tokens, as the model has rows, got {n_tokens}")
    rows = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(n_rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    return {
        "tokenizer.ggml.tokens": [text for text, _ in rows],
        "tokenizer.ggml.token_type": [kind for _, kind in rows],
        "tokenizer.ggml.merges": merges,
    }


# -------------------------------------------------------------------- ends and templates
def _ends_of_ours(tokeniser: BPETokeniser) -> Keys:
    if END_OF_TEXT not in tokeniser.special_tokens:
        raise ValueError(f"expected a tokeniser with {END_OF_TEXT}, {WHY_AN_END}")
    return _ends(tokeniser.end_of_text, tokeniser.end_of_text, False, False)


def _ends_of_theirs(tokeniser: PretrainedTokeniser) -> Keys:
    bos, eos = tokeniser.bos, tokeniser.eos
    if bos is None and eos is None:
        raise ValueError(f"expected a tokeniser with bos_token or eos_token, {WHY_AN_END}")
    around = tokeniser.encode("")
    starts, ends = around[:1] == [bos] and bos is not None, around[-1:] == [eos] and eos is not None
    if around == [bos] and bos == eos:
        ends = False
    if len(around) != starts + ends:
        raise ValueError(f"expected a tokeniser that puts bos_token and eos_token around a text at most, got {around}")
    keys = _ends(bos if bos is not None else eos, eos if eos is not None else bos, starts, ends)
    vocabulary = tokeniser.backend.get_vocab(with_added_tokens=True)
    for name, key in (("unk_token", "unknown"), ("pad_token", "padding")):
        if name in tokeniser.special:
            keys[f"tokenizer.ggml.{key}_token_id"] = vocabulary[tokeniser.special[name]]
    return keys


def _ends(bos: int | None, eos: int | None, starts: bool, ends: bool) -> Keys:
    return {
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_bos_token": starts,
        "tokenizer.ggml.add_eos_token": ends,
    }


def _templates(tokeniser: Any) -> Keys:
    templates: dict[str, str] = getattr(tokeniser, "chat_templates", {})
    keys: Keys = {f"tokenizer.chat_template.{name}": text for name, text in templates.items() if name != "default"}
    if keys:
        keys["tokenizer.chat_templates"] = [name for name in templates if name != "default"]
    if "default" in templates:
        keys["tokenizer.chat_template"] = templates["default"]
    return keys
