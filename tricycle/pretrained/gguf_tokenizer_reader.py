"""The vocabularies in GGUF files, in the form of a tokenizer.json.

A GGUF file has the tokens with their types, and merges or scores; how text is cut into pieces it says by a name alone.
"""

from __future__ import annotations

from typing import Any

from tricycle.pretrained import tokenizer_json
from tricycle.pretrained.gguf_file import short_repr

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens

# The names of ways to cut text into pieces, by the way.
CUTS = {
    "gpt2": ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion"),
    "smollm": ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-3": ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "dbrx", "smaug-bpe"),
    "qwen": ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"),
}
CUT_OF = {name: cut for cut, names in CUTS.items() for name in names}
# Those that keep a piece whole which is a token, though no merges lead to it, and begin texts with a token.
WHOLE_PIECES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral")
SPACE = "\u2581"


class Vocabulary:
    """What the metadata of a GGUF file say about its tokeniser.

    Attributes:
        kind: "gpt2" (bytes, merges), "llama" (characters, scores) or "bert" (words).
        special: by the names of a tokenizer_config.json, such as bos_token, the texts of those tokens.
        adds_bos, adds_eos: whether `encode` puts them around a text.

    Raises:
        ValueError: something is missing, or has another type.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.kind = self._value("model", str)
        if self.kind not in ("gpt2", "llama", "bert"):
            raise ValueError(f"expected tokenizer.ggml.model gpt2, llama or bert, got {self.kind!r}")
        self.tokens = self._texts("tokens")
        self.types: list[int] = self._value("token_type", list, [NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise ValueError(f"expected {len(self.tokens)} of tokenizer.ggml.token_type, got {len(self.types)}")
        self.cut = self._value("pre", str, "gpt-2") if self.kind == "gpt2" else ""
        if self.cut and self.cut not in CUT_OF:
            known = ", ".join(CUT_OF)
            raise ValueError(f"expected tokenizer.ggml.pre to be one of {known}, got {self.cut!r}")
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
        if self.kind == "bert":
            names |= {"cls": "cls", "sep": "seperator"}  # spelt so in the files
        self.special: dict[str, str] = {}
        for name, key in names.items():
            token = self._value(f"{key}_token_id", int, -1)
            if not -1 <= token < len(self.tokens):
                at_most = len(self.tokens) - 1
                raise ValueError(f"expected tokenizer.ggml.{key}_token_id to be at most {at_most}, got {token}")
            if token >= 0:
                self.special[f"{name}_token"] = self.tokens[token]
        adds_bos = self.kind == "llama" or self.cut in WHOLE_PIECES
        self.adds_bos = self._value("add_bos_token", bool, adds_bos) and "bos_token" in self.special
        self.adds_eos = self._value("add_eos_token", bool, False) and "eos_token" in self.special

    def _value(self, name: str, kind: type, default: Any = None) -> Any:
        key = f"tokenizer.ggml.{name}"
        value = self._metadata.get(key, default)
        if not isinstance(value, kind):
            raise ValueError(f"expected {key} to be of type {kind.__name__}, got {short_repr(value)}")
        return value

    def _texts(self, name: str) -> list[str]:
        values: list[Any] = self._value(name, list)
        odd = [value for value in values if not isinstance(value, str)]
        if odd or not values:
            raise ValueError(f"expected tokenizer.ggml.{name} to be texts, got {short_repr((odd or [values])[0])}")
        return values

    def document(self) -> dict[str, Any]:
        """As a tokenizer.json.

        Raises:
            ValueError: tokens, merges and scores do not belong together.
        """
        return {"gpt2": self._byte_level, "llama": self._scored, "bert": self._word_pieces}[self.kind]()

    def _byte_level(self) -> dict[str, Any]:
        added = self._added(self.tokens)
        merges = [_pair(merge) for merge in self._texts("merges")] if len(self.tokens) > 256 + len(added) else []
        # a vocabulary may have a token that no text gives, spelt in characters that stand for no byte
        model = tokenizer_json.bpe_model(self._ids(self.tokens), merges, ignore_merges=self.cut in WHOLE_PIECES)
        parts = tokenizer_json.byte_level_parts(CUT_OF[self.cut], self._value("add_space_prefix", bool, False))
        return tokenizer_json.new_document(model, added, **parts, post_processor=self._around())

    def _scored(self) -> dict[str, Any]:
        # runs of spaces are stored as such, though the text has other characters there when they are looked for
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in self.tokens]
        scores: list[float] = self._value("scores", list, [])
        if len(scores) != len(tokens):
            raise ValueError(f"expected {len(tokens)} of tokenizer.ggml.scores, got {len(scores)}")
        prefix = self._value("add_space_prefix", bool, True)
        settings = {"unk_token": self.special.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
        model = tokenizer_json.bpe_model(self._ids(tokens), self._merges(tokens, scores), **settings)
        around = self._around()
        return tokenizer_json.new_document(
            model, self._added(tokens), **tokenizer_json.sentencepiece_parts(prefix), post_processor=around
        )

    def _merges(self, tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
        """Each way to put a token together from two, the best token first; of equals the one with the smaller id."""
        made = {token for token, kind in zip(tokens, self.types) if kind in (NORMAL, USER_DEFINED)}
        best_first = sorted(range(len(tokens)), key=lambda token: (-scores[token], token))
        merges = []
        for token in best_first:
            text = tokens[token]
            if text in made:
                halves = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
                merges += [(left, right) for left, right in halves if left in made and right in made]
        return merges

    def _word_pieces(self) -> dict[str, Any]:
        # files mark the beginning of a word, and BERT its continuation
        plain = [token.startswith(SPACE) or (token.startswith("[") and token.endswith("]")) for token in self.tokens]
        tokens = [
            token.removeprefix(SPACE) if is_plain else f"##{token}" for token, is_plain in zip(self.tokens, plain)
        ]
        first, last = (self.special.get(name) for name in ("cls_token", "sep_token"))
        unknown = self.special.get("unk_token", "[UNK]")
        return tokenizer_json.wordpiece_document(self._ids(tokens), True, first or "[CLS]", last or "[SEP]", unknown)

    def _ids(self, tokens: list[str]) -> dict[str, int]:
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
            raise ValueError(f"expected different tokens in tokenizer.ggml.tokens, got {short_repr(twice)} twice")
        return ids

    def _added(self, tokens: list[str]) -> list[dict[str, Any]]:
        """Those that are looked for in a text before it is cut."""
        wanted = (CONTROL, USER_DEFINED)
        whole = [(i, token) for i, (token, kind) in enumerate(zip(tokens, self.types)) if kind in wanted and token]
        added = [tokenizer_json.added_token(i, token, special=self.types[i] == CONTROL) for i, token in whole]
        named = {*self.special.values()} - {token for _, token in whole}
        return added + [tokenizer_json.added_token(tokens.index(token), token) for token in named if token in tokens]

    def _around(self) -> dict[str, Any] | None:
        ends = [
            {self.special[name]: self.tokens.index(self.special[name])} if adds else {}
            for name, adds in (("bos_token", self.adds_bos), ("eos_token", self.adds_eos))
        ]
        return tokenizer_json.template_processing(*ends) if any(ends) else None


def _pair(merge: str) -> tuple[str, str]:
    """A merge, whose halves have a space between them."""
    left, space, right = merge.partition(" ")
    if not left or not space or not right or " " in right:
        raise ValueError(f"expected two tokens with a space between them in merges, got {short_repr(merge)}")
    return left, right
