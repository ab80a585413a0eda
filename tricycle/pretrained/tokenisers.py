"""Tokenizers of pretrained models, loaded from their files by the library `tokenizers`.

`tricycle.pretrained.load` calls `tokeniser_from_folder` and `tokeniser_from_gguf`.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.pretrained import tokenizer_json
from tricycle.pretrained.gguf_tokenizer_reader import GGUFTokenizer
from tricycle.pretrained.hf_folder import CONFIG, read_optional_json
from tricycle.pretrained.stored_model import error_prefix
from tricycle.pretrained.template_process import Template, open_template
from tricycle.system.files import atomic_write, read_file, read_json, read_json_object
from tricycle.tokeniser import BPETokeniser, Tokeniser

FORMAT = {"format": "tokenizers", "version": 1}
# The special tokens of vocabulary files, unless tokenizer_config.json has others.
BERT_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
ROBERTA_TOKENS = {
    **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>"},
    **{"pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>"},
}
SPECIAL_TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_FILE_BYTES = 2**26  # the largest vocabularies take half of it
MAX_GROWTH = 1000  # factor by which normalization or decoding may lengthen a text; those of T5 and XLM-R reach hundreds
NORMALIZATION_GROWTH = 18  # the largest factor for one character under NFKD
MAX_IDS = 2**24  # above the highest id
JSON_LIMITS = (MAX_FILE_BYTES, 2_200_000)  # bytes and values; the largest tokenizer.json have 1,900,000 values
# Unicode's private-use characters. Two that do not occur in a conversation mark names of special tokens in it.
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

Messages = Sequence[dict[str, Any]]
Marks = tuple[str, str]  # before and after the name of a special token that is to be encoded as text


class PretrainedTokeniser:
    """A tokenizer of a pretrained model, built from the text of a tokenizer.json.

    Args:
        document: the text of a tokenizer.json.
        special: the special tokens by their field of tokenizer_config.json, such as bos_token. Tokens that are not in
            the vocabulary are ignored.
        chat_templates: Jinja templates by name; most models have one, called "default". With tools, "tool_use" is used
            if there is one.

    Attributes:
        bos: the id of the beginning-of-sequence token, or None.
        eos: the id of the end-of-sequence token, or None.
        backend: the `tokenizers.Tokenizer`.

    Raises:
        ImportError: `tokenizers` is not installed.
        ValueError: not a valid tokenizer.json.
    """

    def __init__(
        self, document: str, special: dict[str, str] | None = None, chat_templates: dict[str, str] | None = None
    ) -> None:
        self.backend = load_backend(document)
        self._document = document
        ids = self.backend.get_vocab(with_added_tokens=True)
        self.special = {name: text for name, text in (special or {}).items() if text in ids}
        self.chat_templates = dict(chat_templates or {})
        self._compiled_templates: dict[str, tuple[str, Template]] = {}
        if not ids:
            raise ValueError("expected a tokenizer with tokens, got none")
        self.n_vocab = max(ids.values()) + 1
        self._special_ids = {name: ids[text] for name, text in self.special.items()}
        self.bos = self._special_ids.get("bos_token")
        self.eos = self._special_ids.get("eos_token")

    # ---------------------------------------------------------------- the protocol Tokeniser
    @property
    def vocab_size(self) -> int:
        """The number of ids, which is the minimum vocabulary size of the model."""
        return self.n_vocab

    def __len__(self) -> int:
        """Return the number of ids, `n_vocab`."""
        return self.n_vocab

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ids: uint16 if `n_vocab` allows, else uint32."""
        return np.dtype(np.uint16 if self.n_vocab <= 2**16 else np.uint32)

    @property
    def start_of_text(self) -> int | None:
        """The id that begins every text: bos if `encode` adds it or if it equals eos, else None."""
        first = self.encode("")[:1]
        if first and first[0] == self.bos:
            return self.bos
        return self.bos if self.bos == self.eos else None

    @property
    def end_of_text(self) -> int:
        """The id that separates documents: eos, or bos without an eos; ValueError if the tokenizer has neither."""
        token = self.eos if self.eos is not None else self.bos
        if token is None:
            raise ValueError("expected a tokenizer with an end-of-text token (eos_token or bos_token), got neither")
        return token

    @property
    def new_text(self) -> int:
        """The id after which a model generates without a prompt: bos, else eos; ValueError if there is neither."""
        return self.bos if self.bos is not None else self.end_of_text

    def encode(self, text: str, add_special_tokens: bool = True, allowed_special: bool = True) -> list[int]:
        """Encode a text to ids; by default add special tokens and parse names of special tokens in the text.

        Args:
            add_special_tokens: add the special tokens of the post-processor, such as a beginning-of-sequence token.
            allowed_special: encode the names of special tokens in the text as special tokens. Set it to False for
                untrusted text.
        """
        backend = self.backend if allowed_special else self._plain_backend
        with _convert_library_errors("the tokenizer cannot encode this text"):
            return list(backend.encode(_to_unicode(text), add_special_tokens=add_special_tokens).ids)

    def encode_plain(self, text: str | bytes) -> np.ndarray:
        """Encode a text to ids (T,) of `dtype` without special tokens; their names in the text are encoded as text."""
        return np.array(self.encode(_to_unicode(text), add_special_tokens=False, allowed_special=False), self.dtype)

    # Cache: always valid, because the document never changes.
    @cached_property
    def _plain_backend(self) -> Any:
        """A second backend, cached, that encodes names of special tokens as text; a shared flag is not thread-safe."""
        document = self._document
        if type(self.backend.model).__name__ == "Unigram":  # whose pieces include the names of special tokens
            values = json.loads(document)
            names = {token["content"] for token in values["added_tokens"] if token["special"]}
            for piece in values["model"]["vocab"]:
                piece[0] = " " * (piece[0] in names) + piece[0]  # no text has spaces when it is divided into pieces
            document = json.dumps(values)
        backend = load_backend(document)
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Decode ids of any shape to one text, by default with special tokens; raise ValueError for unknown ids."""
        flat = np.asarray(ids).ravel()
        if flat.size == 0:
            return ""
        if flat.dtype.kind not in "iu":
            raise ValueError(f"decode: expected integer ids, got {flat[:4].tolist()}")
        wrong = flat[(flat < 0) | (flat >= self.n_vocab)]
        if wrong.size:
            raise ValueError(f"decode: expected ids from 0 to {self.n_vocab - 1}, got {int(wrong[0])}")
        with _convert_library_errors("the tokenizer cannot decode these ids"):
            return str(self.backend.decode(flat.tolist(), skip_special_tokens=skip_special_tokens))

    def stream(self, seen: Any = ()) -> PretrainedStream:
        """Return an incremental decoder for the ids that follow `seen`; some tokenizers drop a text's first space."""
        return PretrainedStream(self, [int(token) for token in seen])

    # ---------------------------------------------------------------- conversations
    # Cache: always valid, because the tokens never change.
    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, about in added.items() if about.special)

    def end_of_answer(self) -> int | None:
        """Return the first special id that the chat template writes after an answer, or None; errors as `render`."""
        question = [{"role": "user", "content": "Hello!"}]
        before = self.chat(question)
        conversation = self.chat([*question, {"role": "assistant", "content": "Hello!"}], add_generation_prompt=False)
        if conversation[: len(before)] != before:
            return None
        return next((token for token in conversation[len(before) :] if token in self.special_ids), None)

    @property
    def chat_template(self) -> str | None:
        """The default chat template as Jinja source, or None."""
        return self.chat_templates.get("default")

    def render(self, messages: Messages, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Format messages as text by the chat template (ValueError if none), by default with the next answer's start.

        Args:
            messages: each with "role" ("system", "user", "assistant") and "content".
            add_generation_prompt: end with the text that begins an answer.
            variables: further variables of the template, such as tools, documents or enable_thinking.

        Raises:
            ValueError: the tokenizer has no template, or the template is invalid, rejects the conversation or exceeds
                a limit.
        """
        template = self._template("default" if variables.get("tools") is None else "tool_use")
        if template is None:
            raise ValueError(
                "expected a tokenizer with a chat template, got none: the model was not trained for conversations"
            )
        settings: dict[str, Any] = {"messages": [*messages], "tools": None, "documents": None}
        settings["add_generation_prompt"] = add_generation_prompt
        return template.render(**settings | self.special | variables)

    def _template(self, name: str) -> Template | None:
        """Return a chat template, else the default one, compiled again if its source has changed; None without one."""
        source = self.chat_templates.get(name, self.chat_template)
        if source is None:
            return None
        if name not in self._compiled_templates or self._compiled_templates[name][0] != source:
            self._compiled_templates[name] = source, open_template(source)
        return self._compiled_templates[name][1]

    def chat(
        self, messages: Messages, add_generation_prompt: bool = True, allowed_special: bool = True, **variables: Any
    ) -> list[int]:
        """Encode a conversation in the chat template's format to ids; by default parse names of special tokens.

        Args:
            allowed_special: encode the names of special tokens in messages as special tokens, as `transformers` does.
                A message can then end itself and add messages of other roles. With False such names are text.

        Raises:
            ValueError: as of `render`.
        """
        if allowed_special:
            return self.encode(self.render(messages, add_generation_prompt, **variables), add_special_tokens=False)
        marks, marked = self._mark_special_names(messages, variables)
        text = self.render(marked, add_generation_prompt, **variables)
        if marks[0] not in text:
            return self.encode(text, add_special_tokens=False)
        return self._encode_marked(text, marks)

    def chat_parts(self, messages: Messages, **variables: Any) -> list[tuple[list[int], bool]]:
        """Encode messages up to the last answer as (ids, is_answer): prompt, answer, ...; ValueError as `render`.

        An answer includes the text that the template writes after it, such as an end token. Names of special tokens in
        messages are encoded as text.

        Raises:
            ValueError: as of `render`; or the template formats a message differently when further messages follow.
        """
        marks, marked = self._mark_special_names(messages, variables)
        parts: list[tuple[list[int], bool]] = []
        encoded = ""
        for i, message in enumerate(marked):
            if message.get("role") != "assistant":
                continue
            after = self.render(marked[: i + 1], False, **variables)
            try:
                before = self.render(marked[:i], True, **variables)
                if not before.startswith(encoded) or not after.startswith(before):
                    raise ValueError(
                        "expected a chat template that only appends text, got one that changes earlier text"
                    )
            except ValueError as error:
                if i:
                    raise
                cause = "the template cannot begin an answer without messages before it"
                raise ValueError(f"expected a message before the first answer, because {cause} ({error})") from None
            parts.append((self._encode_marked(before[len(encoded) :], marks, bool(encoded)), False))
            parts.append((self._encode_marked(after[len(before) :], marks, True), True))
            encoded = after
        return parts

    def _mark_special_names(self, messages: Messages, variables: dict[str, Any]) -> tuple[Marks, list[Any]]:
        """Return two unused marks, and copies of the messages with these around the names of special tokens."""
        marks = _unused_characters(self.chat_templates, messages, variables)
        names = sorted((str(self.backend.id_to_token(token)) for token in self.special_ids), key=len, reverse=True)
        roles = [{key: value for key, value in message.items() if key == "role"} for message in messages]
        return marks, [_add_marks(message, names, marks) | role for message, role in zip(messages, roles)]

    def _encode_marked(self, text: str, marks: Marks, is_continuation: bool = False) -> list[int]:
        """Return the ids of a text without its marks: names of special tokens are text between marks, else tokens.

        Args:
            is_continuation: whether the text follows another one.
        """
        ids: list[int] = []
        for i, part in enumerate(text.replace(marks[1], marks[0]).split(marks[0])):
            # Some tokenizers insert a space at the start of a text, so a part is encoded after a line break.
            line_break = self.encode("\n", False, i % 2 == 0)
            with_break = self.encode("\n" + part, False, i % 2 == 0)
            joined = with_break[: len(line_break)] == line_break and (i > 0 or is_continuation)
            ids += with_break[len(line_break) :] if joined else self.encode(part, False, i % 2 == 0)
        return ids

    # ---------------------------------------------------------------- saving
    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON, from which `from_dict` creates an equal tokenizer."""
        return {**FORMAT, "tokenizer": self._document, "special": self.special, "chat_templates": self.chat_templates}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> PretrainedTokeniser:
        """Create a tokenizer from the result of `to_dict`; raise ValueError if it is not such a result."""
        fields = {*FORMAT, "tokenizer", "special", "chat_templates"}
        if not isinstance(state, dict) or set(state) != fields or {key: state[key] for key in FORMAT} != FORMAT:
            raise ValueError(f"expected tokenizer fields {', '.join(sorted(fields))}, got {reprlib.repr(state)}")
        texts = [state["special"], state["chat_templates"]]
        is_valid = isinstance(state["tokenizer"], str) and all(isinstance(part, dict) for part in texts)
        if not is_valid or not all(isinstance(text, str) for part in texts for text in [*part, *part.values()]):
            raise ValueError(f"expected strings in a saved tokenizer, got {reprlib.repr(state)}")
        return cls(state["tokenizer"], state["special"], state["chat_templates"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer to a JSON file, atomically; `load_tokeniser` reads it."""
        with atomic_write(path, text=True) as file:
            json.dump(self.to_dict(), file)

    def to_tokenizer_json(self) -> str:
        """Return the text of the tokenizer.json from which the tokenizer was built."""
        return self._document

    # ---------------------------------------------------------------- object methods
    def __eq__(self, other: object) -> bool:
        """Return whether the other is a PretrainedTokeniser with an equal `to_dict()`; else NotImplemented."""
        return self.to_dict() == other.to_dict() if isinstance(other, PretrainedTokeniser) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        """Return (class, arguments) for pickling: document, special tokens and chat templates."""
        return PretrainedTokeniser, (self._document, self.special, self.chat_templates)

    def __repr__(self) -> str:
        """Return "PretrainedTokeniser(KIND, n_vocab=..., bos=..., eos=...)", KIND as of the model, such as BPE."""
        kind = type(self.backend.model).__name__
        return f"PretrainedTokeniser({kind}, n_vocab={self.n_vocab}, bos={self.bos}, eos={self.eos})"


class PretrainedStream:
    """An incremental decoder that returns a character once all of its bytes have arrived.

    The text of an id depends on its neighbors, so ids are decoded together with those before them.
    """

    MAX_PENDING = 64  # ids; no character has more, so more ids never complete one

    def __init__(self, tokeniser: PretrainedTokeniser, seen: list[int]) -> None:
        self.tokeniser = tokeniser
        n = 8
        while n < len(seen) and tokeniser.decode(seen[-n:]).startswith("\ufffd"):  # within a character, or several
            n *= 2
        self._context = seen[-n:]  # the latest ids whose text was returned
        self._pending: list[int] = []

    def push(self, ids: Any) -> str:
        """Decode one or several further ids; return the completed characters, possibly none."""
        self._pending += [int(token) for token in np.asarray(ids).ravel()]
        return self._decode_pending(final=len(self._pending) > self.MAX_PENDING)

    def flush(self) -> str:
        """End the text; return its rest with U+FFFD for incomplete bytes, or "" if no ids are pending."""
        return self._decode_pending(final=True)

    def _decode_pending(self, final: bool) -> str:
        """Return the pending ids' text and clear them; "" if it ends in an incomplete character, unless `final`."""
        before = self.tokeniser.decode(self._context)
        text = self.tokeniser.decode(self._context + self._pending)
        if text.endswith("\ufffd") and not final:
            return ""
        if self._pending:
            # The pending ids may begin with bytes that complete a character, and are no text without its first bytes.
            begun = self._context if before.endswith("\ufffd") and not final else []
            self._context, self._pending = begun + self._pending, []
        # Not len(before): it may end in U+FFFD for the first bytes of a character that these ids complete.
        n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text)))
        return text[n_same:]


def _to_unicode(text: str | bytes) -> str:
    """Return a text with U+FFFD in place of invalid Unicode, which `tokenizers` does not accept."""
    raw = text if isinstance(text, (bytes, bytearray)) else text.encode("utf-8", "surrogatepass")
    return bytes(raw).decode("utf-8", "replace")


def _unused_characters(*values: Any) -> Marks:
    """Return two private-use characters that occur in none of the values; ValueError if there are none.

    Raises:
        ValueError: fewer than two do not occur.
    """
    used = set(json.dumps(values, ensure_ascii=False, default=str))
    unused = (character for codes in _PRIVATE_USE for character in map(chr, codes) if character not in used)
    marks = tuple(islice(unused, 2))
    if len(marks) < 2:
        raise ValueError("expected a conversation without some of Unicode's private-use characters, got all of them")
    return marks[0], marks[1]


def _add_marks(value: Any, names: list[str], marks: Marks) -> Any:
    """Return a part of a message, copied, with marks around the names of special tokens in all texts, keys too."""
    opening, closing = marks
    if isinstance(value, str):
        for i, name in enumerate(names):  # numbers first, so that no name within a longer one is marked
            value = value.replace(name, f"{opening}{i}{closing}")
        parts = value.split(opening)
        for place, part in enumerate(parts[1:], 1):
            number, _, rest = part.partition(closing)
            parts[place] = f"{opening}{names[int(number)]}{closing}{rest}"
        return "".join(parts)
    if isinstance(value, dict):
        return {_add_marks(key, names, marks): _add_marks(part, names, marks) for key, part in value.items()}
    return [_add_marks(part, names, marks) for part in value] if isinstance(value, (list, tuple)) else value


def _max_growth(part: Any) -> float:
    """Return the largest factor by which a normalizer or decoder of a tokenizer.json may lengthen a text, in bytes."""
    kind = part.get("type")
    if kind == "Sequence":
        return math.prod(map(_max_growth, part.get("normalizers") or part.get("decoders") or ()))
    if kind == "Prepend":
        return 1 + len(part["prepend"].encode())
    if kind == "Replace":
        n_new, n_old = len(part["content"].encode()), len(part["pattern"].get("String", "").encode())
        return max(1, n_new / n_old) if n_old else 1 + n_new  # a regex or an empty text may match beside each character
    return NORMALIZATION_GROWTH if kind in ("NFD", "NFC", "NFKD", "NFKC", "Precompiled", "BertNormalizer") else 1


@contextmanager
def _convert_library_errors(what: str) -> Iterator[None]:
    """Convert errors of `tokenizers` to ValueErrors, including panics of its Rust code, which are BaseExceptions."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from None


def load_backend(document: str) -> Any:
    """Build a `tokenizers.Tokenizer` without truncation and padding; ValueError if invalid or it may inflate texts.

    Raises:
        ImportError, ValueError: as of `PretrainedTokeniser`.
    """
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            'pretrained models need the package tokenizers: pip install "tricycle-gpt[pretrained]"'
        ) from None
    with _convert_library_errors("expected a tokenizer.json"):
        backend = tokenizers.Tokenizer.from_str(document)
        parts = [("normalizer", backend.normalizer), ("decoder", backend.decoder)]
        growths = {name: _max_growth(json.loads(part.__getstate__())) for name, part in parts if part is not None}
    for name, times in growths.items():
        if times > MAX_GROWTH:  # the library would abort the process if the memory did not suffice
            raise ValueError(
                f"expected a {name} that makes texts at most {MAX_GROWTH:,} times longer, got {times:.3g} times"
            )
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= MAX_IDS:  # the library writes an entry for each smaller id, and aborts the process without memory
        raise ValueError(f"expected ids of tokens below {MAX_IDS:,}, got {highest:,}")
    backend.no_truncation()
    backend.no_padding()
    return backend


# -------------------------------------------------------------------- from a folder
def tokeniser_from_folder(folder: str | os.PathLike[str]) -> PretrainedTokeniser:
    """Load a folder's tokenizer.json, or GPT-2's or BERT's vocabulary files; FileNotFoundError without these.

    The vocabulary comes from tokenizer.json, or vocab.json and merges.txt (GPT-2, RoBERTa, BART, Qwen), or vocab.txt
    (BERT). Optional files are tokenizer_config.json, special_tokens_map.json, and the chat templates
    chat_template.jinja and additional_chat_templates/*.jinja.

    Raises:
        FileNotFoundError: the folder has no vocabulary.
        ValueError: a file is invalid.
    """
    folder = Path(folder)
    config = read_optional_json(folder / "tokenizer_config.json", *JSON_LIMITS)
    special_map = read_optional_json(folder / "special_tokens_map.json", *JSON_LIMITS)
    special = {
        name: text for name in SPECIAL_TOKEN_FIELDS if (text := _token_text(config.get(name) or special_map.get(name)))
    }
    path = folder / "tokenizer.json"
    if path.is_file():
        document = read_json_object(path, *JSON_LIMITS)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        kind = str(config.get("tokenizer_class") or read_optional_json(folder / CONFIG).get("model_type")).lower()
        if kind.startswith(("roberta", "bart")):
            special = ROBERTA_TOKENS | special
            config = {**config, "add_bos_token": True, "add_eos_token": True}
        special = special or dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
        document = _read_gpt2_files(folder, config, special, "qwen" if kind.startswith("qwen") else "gpt2")
    elif (folder / "vocab.txt").is_file():
        path = folder / "vocab.txt"
        # Not splitlines(): it splits at U+2028, U+0085 and others, which tokens may contain.
        vocab = {line: i for i, line in enumerate(_read_text(path).removesuffix("\n").split("\n"))}
        lowercase = bool(config.get("do_lower_case", True))
        special = BERT_TOKENS | special
        around = special["cls_token"], special["sep_token"]
        document = tokenizer_json.wordpiece_document(vocab, lowercase, *around, special["unk_token"])
        document["normalizer"]["strip_accents"] = config.get("strip_accents")
        document["normalizer"]["handle_chinese_chars"] = bool(config.get("tokenize_chinese_chars", True))
    else:
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = "; tokenizer.model is not supported: save a tokenizer.json with AutoTokenizer of transformers"
        raise FileNotFoundError(f"{folder}: expected a tokenizer: tokenizer.json, or vocab.json and merges.txt{hint}")
    with error_prefix(f"{folder / 'tokenizer_config.json'}: "):
        templates = _read_chat_templates(folder, config)
    with error_prefix(f"{path}: "):
        return PretrainedTokeniser(_add_configured_tokens(document, special, config), special, templates)


def _add_configured_tokens(document: dict[str, Any], special: dict[str, str], config: dict[str, Any]) -> str:
    """Return a tokenizer.json's text with the added tokens of tokenizer_config.json; ValueError if their ids differ."""
    backend = load_backend(json.dumps(document))
    import tokenizers

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token, described in sorted(_added_token_entries(config).items()):
        content = described["content"]
        if content in known:
            continue
        flags = {name: bool(described.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        flags["normalized"] = bool(described.get("normalized", not flags["special"]))
        backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        got = backend.token_to_id(content)
        if got != token:
            raise ValueError(f"expected {content!r} to be token {token}, as added_tokens_decoder says, got {got}")
        known.add(content)
    ids = backend.get_vocab(with_added_tokens=True)
    named = [text for text in special.values() if text in ids and text not in known]
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in named])
    return str(backend.to_str())


def _added_token_entries(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return {id: entry} of a config's added_tokens_decoder; ValueError for invalid entries."""
    entries = config.get("added_tokens_decoder") or {}
    is_valid = isinstance(entries, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"] and key.isdecimal()
        for key, entry in entries.items()
    )
    if not is_valid:
        raise ValueError(f"expected added_tokens_decoder to have texts by id, got {reprlib.repr(entries)}")
    return {int(key): entry for key, entry in entries.items()}


def _token_text(value: Any) -> str | None:
    """Return the text of a special token, a string or an object with "content"; None for others, or empty text."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name, from *.jinja files or else tokenizer_config.json; {} if none; else ValueError."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {"default": _read_text(path)} | {other.stem: _read_text(other) for other in others}
    value = config.get("chat_template")
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    named: dict[Any, Any] = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if len(named) < len(entries) or not all(isinstance(text, str) for item in named.items() for text in item):
        raise ValueError(
            f"expected chat_template to be a string, or a list of name and template, got {reprlib.repr(value)}"
        )
    return named


def _read_gpt2_files(folder: Path, config: dict[str, Any], special: dict[str, str], split: str) -> dict[str, Any]:
    """Return a tokenizer.json document of GPT-2's vocab.json and merges.txt; ValueError if invalid.

    Args:
        split: the pre-tokenization pattern, as of `tokenizer_json.byte_level_parts`.
    """
    vocab = read_json_object(folder / "vocab.json", *JSON_LIMITS)
    if not all(type(token) is int for token in vocab.values()):
        raise ValueError(f"{folder / 'vocab.json'}: expected an id for each token, got {reprlib.repr(vocab)}")
    merges = []
    for number, line in enumerate(_read_text(folder / "merges.txt").split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        halves = line.split()
        if len(halves) != 2:
            raise ValueError(f"{folder / 'merges.txt'}: expected two tokens in line {number}, got {reprlib.repr(line)}")
        merges.append((halves[0], halves[1]))
    parts = tokenizer_json.byte_level_parts(split, bool(config.get("add_prefix_space", False)))
    ends = [special.get(name, "") if config.get(f"add_{name}") else "" for name in ("bos_token", "eos_token")]
    before, after = ({text: vocab[text]} if text in vocab and text else {} for text in ends)
    post_processor = tokenizer_json.template_processing(before, after)
    return tokenizer_json.new_document(tokenizer_json.bpe_model(vocab, merges), **parts, post_processor=post_processor)


def _read_text(path: Path) -> str:
    """Return a UTF-8 text file with Unix line ends; ValueError if it is not UTF-8 or too large."""
    try:
        return read_file(path, MAX_FILE_BYTES).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from None


# -------------------------------------------------------------------- from a GGUF file
def tokeniser_from_gguf(metadata: dict[str, Any]) -> PretrainedTokeniser:
    """Build the tokenizer of GGUF metadata with its special tokens and chat templates; ValueError if not supported.

    Args:
        metadata: keys and plain Python values.
    """
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(f"{prefix}.")):
            templates[key[len(prefix) + 1 :] or "default"] = value
    with error_prefix("GGUF: "):
        tokenizer = GGUFTokenizer(metadata)
        document = json.dumps(tokenizer.to_tokenizer_json(), ensure_ascii=False)
        return PretrainedTokeniser(document, tokenizer.special, templates)


# -------------------------------------------------------------------- saved tokenizers
def tokeniser_from_dict(state: Any) -> Tokeniser:
    """Create a `PretrainedTokeniser` or `BPETokeniser` from its `to_dict`, by its format; ValueError if invalid."""
    if isinstance(state, dict) and state.get("format") == FORMAT["format"]:
        return PretrainedTokeniser.from_dict(state)
    return BPETokeniser.from_dict(state)


def load_tokeniser(path: str | os.PathLike[str]) -> Tokeniser:
    """Load a `PretrainedTokeniser` or `BPETokeniser` from the JSON file that its `save` wrote; else ValueError."""
    try:
        return tokeniser_from_dict(read_json(path, *JSON_LIMITS))
    except ValueError as error:
        raise ValueError(f"{path}: expected a saved tokeniser: {str(error).removeprefix(f'{path}: ')}") from None
