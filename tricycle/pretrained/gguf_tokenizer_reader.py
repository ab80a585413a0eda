"""Conversion of the tokenizer in the metadata of a GGUF file to a tokenizer.json.

A GGUF file has the tokens with their types, and merges or scores; its pre-tokenizer is only a name.
"""

from __future__ import annotations

from typing import Any

from tricycle.pretrained import tokenizer_json
from tricycle.pretrained.gguf_file import short_repr
from tricycle.pretrained.sentencepiece_model import CONTROL, NORMAL, USER_DEFINED
from tricycle.pretrained.tokenizer_json import SPACE_CHARACTER

# From pre-tokenizers of `tokenizer_json.byte_level_parts` to their names in llama.cpp.
PRE_TOKENIZERS = {
    "gpt2": ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion"),
    "gpt2-nfc": ("modern-bert",),
    "smollm": ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-3": ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "dbrx", "smaug-bpe"),
    "qwen": ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"),
}
PRE_TOKENIZER_OF_NAME = {name: split for split, names in PRE_TOKENIZERS.items() for name in names}
# With these, merges are ignored for pieces that are tokens, and texts begin with a special token by default.
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral")
LEFT_STRIPPED = {"modern-bert": "[MASK]"}  # by the name of the pre-tokenizer, the token that removes spaces before it


class GGUFTokenizer:
    """The tokenizer in the metadata of a GGUF file.

    Attributes:
        model_type: "gpt2" (byte-level BPE), "llama" (SentencePiece BPE), "t5" (unigrams) or "bert" (WordPiece).
        special: texts of special tokens by their names in a tokenizer_config.json, such as bos_token.
        adds_bos, adds_eos: whether `encode` adds these tokens to a text.

    Raises:
        ValueError: a value is missing, or has another type.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.model_type = self._value("model", str)
        if self.model_type not in ("gpt2", "llama", "t5", "bert"):
            raise ValueError(f"expected tokenizer.ggml.model gpt2, llama, t5 or bert, got {self.model_type!r}")
        self.tokens = self._strings("tokens")
        self.types: list[int] = self._value("token_type", list, [NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise ValueError(f"expected {len(self.tokens)} of tokenizer.ggml.token_type, got {len(self.types)}")
        self.pre_tokenizer = self._value("pre", str, "gpt-2") if self.model_type == "gpt2" else ""
        if self.pre_tokenizer and self.pre_tokenizer not in PRE_TOKENIZER_OF_NAME:
            known = ", ".join(PRE_TOKENIZER_OF_NAME)
            raise ValueError(f"expected tokenizer.ggml.pre to be one of {known}, got {self.pre_tokenizer!r}")
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
        if self.model_type in ("bert", "gpt2"):
            names |= {"cls": "cls", "sep": "seperator"}  # llama.cpp's spelling
        self.special: dict[str, str] = {}
        for name, key in names.items():
            token = self._value(f"{key}_token_id", int, -1)
            if not -1 <= token < len(self.tokens):
                last = len(self.tokens) - 1
                raise ValueError(f"expected tokenizer.ggml.{key}_token_id to be at most {last}, got {token}")
            if token >= 0:
                self.special[f"{name}_token"] = self.tokens[token]
        adds_bos = self.model_type == "llama" or self.pre_tokenizer in IGNORE_MERGES
        self.adds_bos = self._value("add_bos_token", bool, adds_bos) and "bos_token" in self.special
        self.adds_eos = self._value("add_eos_token", bool, self.model_type == "t5") and "eos_token" in self.special

    def _value(self, name: str, kind: type, default: Any = None) -> Any:
        """Return tokenizer.ggml.NAME, or the default; ValueError if it is of another type, or if both are missing."""
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key, default)
        if not isinstance(value, kind):
            raise ValueError(f"expected {key} to be of type {kind.__name__}, got {short_repr(value)}")
        return value

    def _strings(self, name: str) -> list[str]:
        """Return the list of strings of tokenizer.ggml.NAME; ValueError if it is empty or has others."""
        values: list[Any] = self._value(name, list)
        others = [value for value in values if not isinstance(value, str)]
        if others or not values:
            raise ValueError(f"expected tokenizer.ggml.{name} to be texts, got {short_repr((others or [values])[0])}")
        return values

    def to_tokenizer_json(self) -> dict[str, Any]:
        """Return an equivalent tokenizer.json as a dict: byte-level BPE, SentencePiece BPE or WordPiece by model_type.

        Raises:
            ValueError: tokens, merges and scores contradict each other.
        """
        converters = {"gpt2": self._byte_level_bpe, "bert": self._wordpiece}
        converters |= {"llama": self._sentencepiece, "t5": self._unigrams}
        return converters[self.model_type]()

    def _byte_level_bpe(self) -> dict[str, Any]:
        """Return the tokenizer.json document (a dict) of a byte-level BPE vocabulary with its merges."""
        added = self._added_tokens(self.tokens)
        has_merges = len(self.tokens) > 256 + len(added)
        merges = [_split_merge(merge) for merge in self._strings("merges")] if has_merges else []
        ignore_merges = self.pre_tokenizer in IGNORE_MERGES
        # A vocabulary may have tokens with characters that are no bytes; no text contains them.
        model = tokenizer_json.bpe_model(self._ids(self.tokens), merges, ignore_merges=ignore_merges)
        split = PRE_TOKENIZER_OF_NAME[self.pre_tokenizer]
        parts = tokenizer_json.byte_level_parts(split, self._value("add_space_prefix", bool, False))
        return tokenizer_json.new_document(model, added, **parts, post_processor=self._post_processor())

    def _sentencepiece(self) -> dict[str, Any]:
        """Return a SentencePiece BPE's tokenizer.json document (a dict), whose merges follow from the scores."""
        # Tokens of spaces are stored with spaces, but the text to be encoded contains SPACE_CHARACTER instead.
        tokens = [SPACE_CHARACTER * len(token) if token and not token.strip(" ") else token for token in self.tokens]
        scores = self._scores()
        prefix = self._value("add_space_prefix", bool, True)
        settings = {"unk_token": self.special.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
        model = tokenizer_json.bpe_model(self._ids(tokens), self._scores_to_merges(tokens, scores), **settings)
        parts = tokenizer_json.sentencepiece_parts(prefix) | {"post_processor": self._post_processor()}
        return tokenizer_json.new_document(model, self._added_tokens(tokens), **parts)

    def _scores(self) -> list[float]:
        """Return the score of each token; ValueError if there are not as many numbers as tokens."""
        scores: list[float] = self._value("scores", list, [])
        if len(scores) != len(self.tokens) or not all(isinstance(score, float) for score in scores):
            raise ValueError(f"expected {len(self.tokens)} numbers in tokenizer.ggml.scores, got {len(scores)}")
        return scores

    def _unigrams(self) -> dict[str, Any]:
        """Return the tokenizer.json document of a SentencePiece unigram model."""
        for name in ("add_space_prefix", "remove_extra_whitespaces"):
            if not self._value(name, bool, True):
                raise ValueError(f"expected tokenizer.ggml.{name} to be missing or true, got false")
        if "unk_token" not in self.special:
            raise ValueError("expected a key tokenizer.ggml.unknown_token_id, which is missing")
        charsmap = self._value("precompiled_charsmap", list, [])
        if not all(isinstance(byte, int) and -128 <= byte < 256 for byte in charsmap):
            raise ValueError("expected bytes in tokenizer.ggml.precompiled_charsmap, got other values")
        vocab = [[token, score] for token, score in zip(self.tokens, self._scores())]
        unknown = self._ids(self.tokens)[self.special["unk_token"]]
        return tokenizer_json.new_document(
            {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": False},
            self._added_tokens(self.tokens),
            **tokenizer_json.unigram_parts(bytes(byte % 256 for byte in charsmap)),
            decoder=tokenizer_json.metaspace(),
            post_processor=self._post_processor(),
        )

    def _scores_to_merges(self, tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
        """Return all pairs of tokens that form a token, sorted by decreasing score and increasing id of that token."""
        mergeable = {token for token, kind in zip(tokens, self.types) if kind in (NORMAL, USER_DEFINED)}
        best_first = sorted(range(len(tokens)), key=lambda token: (-scores[token], token))
        merges = []
        for token in best_first:
            text = tokens[token]
            if text in mergeable:
                pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
                merges += [(left, right) for left, right in pairs if left in mergeable and right in mergeable]
        return merges

    def _wordpiece(self) -> dict[str, Any]:
        """Return a WordPiece's tokenizer.json document (a dict): "##" before tokens that do not begin a word."""
        # A GGUF file marks the first token of a word, and BERT the following ones.
        tokens = []
        for token in self.tokens:
            is_first = token.startswith(SPACE_CHARACTER) or (token.startswith("[") and token.endswith("]"))
            tokens.append(token.removeprefix(SPACE_CHARACTER) if is_first else f"##{token}")
        cls = self.special.get("cls_token") or "[CLS]"
        sep = self.special.get("sep_token") or "[SEP]"
        unknown = self.special.get("unk_token", "[UNK]")
        return tokenizer_json.wordpiece_document(self._ids(tokens), True, cls, sep, unknown)

    def _ids(self, tokens: list[str]) -> dict[str, int]:
        """Return {token: id}; ValueError for a token that occurs twice."""
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            duplicate = next(token for i, token in enumerate(tokens) if ids[token] != i)
            raise ValueError(f"expected different tokens in tokenizer.ggml.tokens, got {short_repr(duplicate)} twice")
        return ids

    def _added_tokens(self, tokens: list[str]) -> list[dict[str, Any]]:
        """Return tokenizer.json's added tokens: of control, user-defined and named special tokens."""
        added_types = (CONTROL, USER_DEFINED)
        typed = [(i, token) for i, (token, kind) in enumerate(zip(tokens, self.types)) if kind in added_types and token]
        added = [tokenizer_json.added_token(i, token, special=self.types[i] == CONTROL) for i, token in typed]
        named = {*self.special.values()} - {token for _, token in typed}
        added += [tokenizer_json.added_token(tokens.index(token), token) for token in named if token in tokens]
        stripped = LEFT_STRIPPED.get(self.pre_tokenizer)
        return [token | {"lstrip": token["content"] == stripped} for token in added]

    def _post_processor(self) -> dict[str, Any] | None:
        """Return tokenizer.json's post-processor that adds BOS and EOS to texts; None if neither is added."""
        ends = [
            {self.special[name]: self.tokens.index(self.special[name])} if adds else {}
            for name, adds in (("bos_token", self.adds_bos), ("eos_token", self.adds_eos))
        ]
        return tokenizer_json.template_processing(*ends) if any(ends) else None


def _split_merge(merge: str) -> tuple[str, str]:
    """Split a merge into its two tokens at the space between them; ValueError unless there is exactly one."""
    left, space, right = merge.partition(" ")
    if not left or not space or not right or " " in right:
        raise ValueError(f"expected two tokens with a space between them in merges, got {short_repr(merge)}")
    return left, right
