"""Other people's tokenisers, from their files, through the library `tokenizers`."""

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

from tricycle.pretrained import tokenizer_json as form
from tricycle.pretrained.ggml_vocabulary import Vocabulary
from tricycle.pretrained.source import error_prefix
from tricycle.pretrained.template_process import Template, open_template
from tricycle.system.files import atomic_write, read_file, read_json, read_json_object
from tricycle.tokeniser import BPETokeniser, Tokeniser

FORMAT = {"format": "tokenizers", "version": 1}
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MOST_BYTES = 2**26  # of a file; the largest vocabularies take half of it
MOST_GROWTH = 1000  # times; those of T5 and XLM-R may reach some hundreds by this count
UNICODE_GROWTH = 18  # of one character under NFKD
MOST_VALUES = 2_200_000  # of its JSON; the largest have 1,900,000
# Unicode's private-use characters: two that do not occur in a conversation mark names of special tokens in it.
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

Messages = Sequence[dict[str, Any]]
Marks = tuple[str, str]  # before and after a name that is to be read as text


class PretrainedTokeniser:
    """A tokeniser that came with a model.

    Args:
        document: a tokenizer.json, as text.
        special: which of its tokens are special, by the names in a tokenizer_config.json, such as bos_token. Texts that
            are no tokens are left out.
        chat_templates: Jinja templates by name; that of most models is called "default".

    Attributes:
        bos, eos: the ids that begin and end a text, or None.
        backend: the `tokenizers.Tokenizer`.

    Raises:
        ImportError: the library is not installed.
        ValueError: no tokenizer.json.
    """

    def __init__(
        self, document: str, special: dict[str, str] | None = None, chat_templates: dict[str, str] | None = None
    ) -> None:
        self.backend = _backend(document)
        self._document = document
        ids = self.backend.get_vocab(with_added_tokens=True)
        self.special = {name: text for name, text in (special or {}).items() if text in ids}
        self.chat_templates = dict(chat_templates or {})
        self._opened: tuple[str, Template] | None = None
        if not ids:
            raise ValueError("expected a tokeniser with tokens, got none")
        self.n_vocab = max(ids.values()) + 1
        self._special_ids = {name: ids[text] for name, text in self.special.items()}
        self.bos = self._special_ids.get("bos_token")
        self.eos = self._special_ids.get("eos_token")

    # ---------------------------------------------------------------- what Tricycle asks of any tokeniser
    @property
    def vocab_size(self) -> int:
        """A model may have more rows."""
        return self.n_vocab

    def __len__(self) -> int:
        return self.n_vocab

    @property
    def dtype(self) -> np.dtype:
        """What holds any id: uint16 or uint32."""
        return np.dtype(np.uint16 if self.n_vocab <= 2**16 else np.uint32)

    @property
    def start_of_text(self) -> int | None:
        """The token that `encode` puts before a text; where it puts none, that which ends one if it also begins one."""
        first = self.encode("")[:1]
        if first and first[0] == self.bos:
            return self.bos
        return self.bos if self.bos == self.eos else None

    @property
    def end_of_text(self) -> int:
        """The token that ends a text; of a tokeniser without one, that which begins it.

        Raises:
            ValueError: there is neither.
        """
        token = self.eos if self.eos is not None else self.bos
        if token is None:
            raise ValueError("expected a tokeniser with an end of text (eos_token or bos_token), it names none")
        return token

    @property
    def new_text(self) -> int:
        """The token that begins a text; of a tokeniser without one, that which ends it.

        Raises:
            ValueError: there is neither.
        """
        return self.bos if self.bos is not None else self.end_of_text

    def encode(self, text: str, add_special_tokens: bool = True, allowed_special: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            add_special_tokens: put around it what the model's makers put around texts, such as a token that begins it.
            allowed_special: read the names of special tokens that stand in it as these. Set it to False for text that
                you did not write yourself.
        """
        backend = self.backend if allowed_special else self._plain_backend
        with _library_errors("the tokeniser cannot encode this text"):
            return list(backend.encode(_text(text), add_special_tokens=add_special_tokens).ids)

    def encode_plain(self, text: str | bytes) -> np.ndarray:
        """The ids (T,) of nothing but this text: no name in it is a special token, and none is added."""
        return np.array(self.encode(_text(text), add_special_tokens=False, allowed_special=False), self.dtype)

    # Cache: valid as long as the tokeniser, whose document never changes.
    @cached_property
    def _plain_backend(self) -> Any:
        """One that reads the names of special tokens as text. (Switching the other would not be safe with threads.)"""
        backend = _backend(self._document)
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text that ids stand for.

        Raises:
            ValueError: something that is not an integer, or an id outside the vocabulary.
        """
        flat = np.asarray(ids).ravel()
        if flat.size == 0:
            return ""
        if flat.dtype.kind not in "iu":
            raise ValueError(f"decode: expected integer ids, got {flat[:4].tolist()}")
        wrong = flat[(flat < 0) | (flat >= self.n_vocab)]
        if wrong.size:
            raise ValueError(f"decode: expected ids from 0 to {self.n_vocab - 1}, got {int(wrong[0])}")
        with _library_errors("the tokeniser cannot decode these ids"):
            return str(self.backend.decode(flat.tolist(), skip_special_tokens=skip_special_tokens))

    def stream(self, seen: Any = ()) -> PretrainedStream:
        """Decodes what comes after ids that were seen before: some tokenisers drop the space before a first word."""
        return PretrainedStream(self, [int(token) for token in seen])

    # ---------------------------------------------------------------- conversations
    # Cache: valid as long as the tokeniser, whose tokens never change.
    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that stand for no text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, about in added.items() if about.special)

    def end_of_answer(self) -> int | None:
        """The special token that the chat template writes after an answer, if it writes one: the answer's end.

        Raises:
            ValueError: as of `render`.
        """
        asked = [{"role": "user", "content": "Hello!"}]
        before = self.chat(asked)
        whole = self.chat([*asked, {"role": "assistant", "content": "Hello!"}], add_generation_prompt=False)
        if whole[: len(before)] != before:
            return None
        return next((token for token in whole[len(before) :] if token in self.special_ids), None)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of conversations, if there is one."""
        return self.chat_templates.get("default")

    def render(self, messages: Messages, add_generation_prompt: bool = True, **variables: Any) -> str:
        """A conversation as the text that the model was taught with.

        Args:
            messages: each with "role" ("system", "user", "assistant") and "content".
            add_generation_prompt: end with what begins an answer.
            variables: further ones of the template, such as tools, documents or enable_thinking.

        Raises:
            ValueError: there is no template, or it is broken, refuses the conversation or does what templates must not.
        """
        if self._template is None:
            raise ValueError(
                "expected a tokeniser with a chat template, it has none: the model is not for conversations"
            )
        settings: dict[str, Any] = {"messages": [*messages], "tools": None, "documents": None}
        settings["add_generation_prompt"] = add_generation_prompt
        return self._template.render(**settings | self.special | variables)

    @property
    def _template(self) -> Template | None:
        """The compiled chat template. Cache: valid while `chat_templates` has the same source."""
        source = self.chat_template
        if source is None:
            return None
        if self._opened is None or self._opened[0] != source:
            self._opened = source, open_template(source)
        return self._opened[1]

    def chat(
        self, messages: Messages, add_generation_prompt: bool = True, allowed_special: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a conversation, as `render` writes it.

        Args:
            allowed_special: whether a message may contain special tokens, by their names. With True it can say that it
                has ended and speak as someone else, as in `transformers`; with False names are just text.

        Raises:
            ValueError: as of `render`.
        """
        if allowed_special:
            return self.encode(self.render(messages, add_generation_prompt, **variables), add_special_tokens=False)
        marks, marked = self._with_marks(messages, variables)
        text = self.render(marked, add_generation_prompt, **variables)
        if marks[0] not in text:
            return self.encode(text, add_special_tokens=False)
        return self._encode_marked(text, marks)

    def chat_parts(self, messages: Messages, **variables: Any) -> list[tuple[list[int], bool]]:
        """The ids of a conversation up to its last answer, in parts, and whether each is an answer.

        An answer is what the model would write: it begins after what `chat` gives for the messages before it, and ends
        with what the template writes behind it. Names of special tokens in messages are just text.

        Raises:
            ValueError: as of `render`; or the template writes a message in another way once there are later ones.
        """
        marks, marked = self._with_marks(messages, variables)
        parts: list[tuple[list[int], bool]] = []
        done = ""
        for i, message in enumerate(marked):
            if message.get("role") != "assistant":
                continue
            before = self.render(marked[:i], True, **variables)
            after = self.render(marked[: i + 1], False, **variables)
            if not before.startswith(done) or not after.startswith(before):
                raise ValueError("expected a chat template that only adds to what it wrote, this one changes it")
            parts.append((self._encode_marked(before[len(done) :], marks, bool(done)), False))
            parts.append((self._encode_marked(after[len(before) :], marks, True), True))
            done = after
        return parts

    def _with_marks(self, messages: Messages, variables: dict[str, Any]) -> tuple[Marks, list[Any]]:
        """Return two marks, and messages with these around the names of special tokens."""
        marks = _unused_marks(self.chat_template, messages, variables)
        names = sorted((str(self.backend.id_to_token(token)) for token in self.special_ids), key=len, reverse=True)
        return marks, [_marked(message, names, marks) for message in messages]

    def _encode_marked(self, text: str, marks: Marks, goes_on: bool = False) -> list[int]:
        """Encode a text in which marks surround names of special tokens that are to be read as text.

        Args:
            goes_on: whether there is a text before it.
        """
        ids: list[int] = []
        for i, part in enumerate(text.replace(marks[1], marks[0]).split(marks[0])):
            # after a line break, for some tokenisers put a space before a text that begins
            line_break = self.encode("\n", False, i % 2 == 0)
            after_it = self.encode("\n" + part, False, i % 2 == 0)
            joined = after_it[: len(line_break)] == line_break and (i > 0 or goes_on)
            ids += after_it[len(line_break) :] if joined else self.encode(part, False, i % 2 == 0)
        return ids

    # ---------------------------------------------------------------- saving
    def to_dict(self) -> dict[str, Any]:
        """Everything there is to know, as JSON can hold it."""
        return {**FORMAT, "tokenizer": self._document, "special": self.special, "chat_templates": self.chat_templates}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> PretrainedTokeniser:
        """The tokeniser that `to_dict` described.

        Raises:
            ValueError: anything that `to_dict` could not have made.
        """
        fields = {*FORMAT, "tokenizer", "special", "chat_templates"}
        if not isinstance(state, dict) or set(state) != fields or {key: state[key] for key in FORMAT} != FORMAT:
            raise ValueError(f"expected a tokeniser's {', '.join(sorted(fields))}, got {reprlib.repr(state)}")
        texts = [state["special"], state["chat_templates"]]
        sound = isinstance(state["tokenizer"], str) and all(isinstance(part, dict) for part in texts)
        if not sound or not all(isinstance(text, str) for part in texts for text in [*part, *part.values()]):
            raise ValueError(f"expected texts in a saved tokeniser, got {reprlib.repr(state)}")
        return cls(state["tokenizer"], state["special"], state["chat_templates"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, whole or not at all."""
        with atomic_write(path, text=True) as file:
            json.dump(self.to_dict(), file)

    def to_tokenizer_json(self) -> str:
        """The tokenizer.json that it was made from."""
        return self._document

    # ---------------------------------------------------------------- being an object
    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, PretrainedTokeniser) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return PretrainedTokeniser, (self._document, self.special, self.chat_templates)

    def __repr__(self) -> str:
        kind = type(self.backend.model).__name__
        return f"PretrainedTokeniser({kind}, n_vocab={self.n_vocab}, bos={self.bos}, eos={self.eos})"


class PretrainedStream:
    """Decodes ids as they are generated, and holds a character back until all of its bytes are there.

    What an id adds to a text hangs on its neighbours, so each is decoded together with those just before it.
    """

    MOST_HELD = 64  # ids; no character has so many, so these are not going to be one

    def __init__(self, tokeniser: PretrainedTokeniser, seen: list[int]) -> None:
        self.tokeniser = tokeniser
        self._said = seen[-8:]  # the ids whose text is out, as far back as it matters
        self._held: list[int] = []

    def push(self, ids: Any) -> str:
        """As of `TextStream`."""
        self._held += [int(token) for token in np.asarray(ids).ravel()]
        return self._take(to_the_end=len(self._held) > self.MOST_HELD)

    def flush(self) -> str:
        """As of `TextStream`."""
        return self._take(to_the_end=True)

    def _take(self, to_the_end: bool) -> str:
        before = self.tokeniser.decode(self._said)
        text = self.tokeniser.decode(self._said + self._held)
        if text.endswith("\ufffd") and not to_the_end:
            return ""
        if self._held:
            self._said, self._held = self._held, []
        # not len(before): where that ends in the first bytes of a character, shown as U+FFFD, these ids complete it
        n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text)))
        return text[n_same:]


def _text(text: str | bytes) -> str:
    """What is no Unicode shows as U+FFFD: these tokenisers take Unicode alone."""
    raw = text if isinstance(text, (bytes, bytearray)) else text.encode("utf-8", "surrogatepass")
    return bytes(raw).decode("utf-8", "replace")


def _unused_marks(*values: Any) -> Marks:
    """Return two private-use characters that occur in none of these values.

    Raises:
        ValueError: all of them occur.
    """
    used = set(json.dumps(values, ensure_ascii=False, default=str))
    unused = (character for codes in _PRIVATE_USE for character in map(chr, codes) if character not in used)
    marks = tuple(islice(unused, 2))
    if len(marks) < 2:
        raise ValueError("expected a conversation without some of Unicode's private-use characters, got all of them")
    return marks[0], marks[1]


def _marked(value: Any, names: list[str], marks: Marks) -> Any:
    """Return a part of a message with marks around the names of special tokens in all of its texts."""
    opening, closing = marks
    if isinstance(value, str):
        for i, name in enumerate(names):  # numbers first, so that no name is marked within a longer one
            value = value.replace(name, f"{opening}{i}{closing}")
        parts = value.split(opening)
        for place, part in enumerate(parts[1:], 1):
            number, _, rest = part.partition(closing)
            parts[place] = f"{opening}{names[int(number)]}{closing}{rest}"
        return "".join(parts)
    if isinstance(value, dict):
        return {key: part if key == "role" else _marked(part, names, marks) for key, part in value.items()}
    return [_marked(part, names, marks) for part in value] if isinstance(value, (list, tuple)) else value


def _growth(part: Any) -> float:
    """Return how many times longer, in bytes, a normalizer or decoder of a tokenizer.json may make a text."""
    kind = part.get("type")
    if kind == "Sequence":
        return math.prod(map(_growth, part.get("normalizers") or part.get("decoders") or ()))
    if kind == "Prepend":
        return 1 + len(part["prepend"].encode())
    if kind == "Replace":
        n_new, n_old = len(part["content"].encode()), len(part["pattern"].get("String", "").encode())
        return max(1, n_new / n_old) if n_old else 1 + n_new  # a regex, or nothing, may match beside each character
    return UNICODE_GROWTH if kind in ("NFD", "NFC", "NFKD", "NFKC", "Precompiled", "BertNormalizer") else 1


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Turn errors of `tokenizers` into ValueErrors; a panic of its Rust core is not even an Exception."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {' '.join(str(error).split())}") from None


def _backend(document: str) -> Any:
    """A `tokenizers.Tokenizer` that neither cuts texts off nor fills them up.

    Raises:
        ImportError, ValueError: as of `PretrainedTokeniser`.
    """
    try:
        import tokenizers
    except ImportError:
        raise ImportError('pretrained tokenisers need tokenizers: pip install "tricycle-gpt[pretrained]"') from None
    with _library_errors("expected a tokenizer.json"):
        backend = tokenizers.Tokenizer.from_str(document)
        parts = [("normalizer", backend.normalizer), ("decoder", backend.decoder)]
        growths = {name: _growth(json.loads(part.__getstate__())) for name, part in parts if part is not None}
    for name, times in growths.items():
        if times > MOST_GROWTH:  # the library would ask for that much memory, and end the process without it
            raise ValueError(
                f"expected a {name} that makes texts at most {MOST_GROWTH:,} times longer, got {times:.3g}"
            )
    backend.no_truncation()
    backend.no_padding()
    return backend


# -------------------------------------------------------------------- from a folder
def from_folder(folder: str | os.PathLike[str]) -> PretrainedTokeniser:
    """The tokeniser in a folder in Hugging Face's form.

    Read are tokenizer.json, or vocab.json and merges.txt as GPT-2 has them, or vocab.txt as BERT has it; and
    tokenizer_config.json, special_tokens_map.json and chat_template.jinja, where they are.

    Raises:
        FileNotFoundError: there is none of them.
        ValueError: a damaged file.
    """
    folder = Path(folder)
    config = _json_object(folder / "tokenizer_config.json")
    special_map = _json_object(folder / "special_tokens_map.json")
    special = {name: text for name in SPECIAL if (text := _content(config.get(name) or special_map.get(name)))}
    path = folder / "tokenizer.json"
    if path.is_file():
        document = _json_object(path)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        special = special or dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
        document = _byte_level_files(folder, config, special)
    elif (folder / "vocab.txt").is_file():
        path = folder / "vocab.txt"
        # not splitlines(): a token may contain U+2028, U+0085 and other characters that it takes for line ends
        vocab = {line: i for i, line in enumerate(_read(path).removesuffix("\n").split("\n"))}
        document = form.word_piece(vocab, bool(config.get("do_lower_case", True)), "[CLS]", "[SEP]", "[UNK]")
    else:
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = "; tokenizer.model alone is not read: AutoTokenizer of transformers writes a tokenizer.json"
        raise FileNotFoundError(f"{folder}: expected a tokeniser: tokenizer.json, or vocab.json and merges.txt{hint}")
    with error_prefix(f"{path}: "):
        text = _with_tokens(document, special, config)
        return PretrainedTokeniser(text, special, _chat_templates(folder, config))


def _with_tokens(document: dict[str, Any], special: dict[str, str], config: dict[str, Any]) -> str:
    """A tokenizer.json with the tokens that tokenizer_config.json adds to it."""
    backend = _backend(json.dumps(document))
    import tokenizers

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token, described in sorted(_described(config).items()):
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


def _described(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The entries of added_tokens_decoder, by id."""
    entries = config.get("added_tokens_decoder") or {}
    sound = isinstance(entries, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"] and key.isdecimal()
        for key, entry in entries.items()
    )
    if not sound:
        raise ValueError(f"expected added_tokens_decoder to have texts by id, got {reprlib.repr(entries)}")
    return {int(key): entry for key, entry in entries.items()}


def _content(value: Any) -> str | None:
    """The text of a special token, which may be given with its flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name: from a file, or from the config, where there may be one or several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": _read(path)}
    stated = config.get("chat_template")
    if stated is None:
        return {}
    entries = stated if isinstance(stated, list) else [{"name": "default", "template": stated}]
    named: dict[Any, Any] = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if len(named) < len(entries) or not all(isinstance(text, str) for item in named.items() for text in item):
        raise ValueError(
            f"expected chat_template to be a text, or a list of name and template, got {reprlib.repr(stated)}"
        )
    return named


def _byte_level_files(folder: Path, config: dict[str, Any], special: dict[str, str]) -> dict[str, Any]:
    """GPT-2's two files as a tokenizer.json."""
    vocab = _json_object(folder / "vocab.json")
    if not all(type(token) is int for token in vocab.values()):
        raise ValueError(f"{folder / 'vocab.json'}: expected an id for each token, got {reprlib.repr(vocab)}")
    merges = []
    for number, line in enumerate(_read(folder / "merges.txt").split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        halves = line.split()
        if len(halves) != 2:
            raise ValueError(f"{folder / 'merges.txt'}: expected two tokens in line {number}, got {reprlib.repr(line)}")
        merges.append((halves[0], halves[1]))
    parts = form.byte_level_parts("gpt2", bool(config.get("add_prefix_space", False)))
    ends = [special.get(name, "") if config.get(f"add_{name}") else "" for name in ("bos_token", "eos_token")]
    around = form.around(*({text: vocab[text]} if text in vocab and text else {} for text in ends))
    return form.document(form.bpe(vocab, merges), **parts, post_processor=around)


def _json_object(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is no such file."""
    return read_json_object(path, MOST_BYTES, MOST_VALUES) if path.is_file() else {}


def _read(path: Path) -> str:
    try:
        return read_file(path, MOST_BYTES).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from None


# -------------------------------------------------------------------- from a GGUF file
def from_gguf(metadata: dict[str, Any]) -> PretrainedTokeniser:
    """The tokeniser that the metadata of a GGUF file describe.

    Args:
        metadata: all keys with their values, as plain Python values.

    Raises:
        ValueError: metadata that do not describe a tokeniser, or one of an unknown kind.
    """
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(f"{prefix}.")):
            templates[key[len(prefix) + 1 :] or "default"] = value
    with error_prefix("GGUF: "):
        vocabulary = Vocabulary(metadata)
        return PretrainedTokeniser(json.dumps(vocabulary.document(), ensure_ascii=False), vocabulary.special, templates)


# -------------------------------------------------------------------- any tokeniser
def tokeniser_from_dict(state: Any) -> Tokeniser:
    """Our own or another, as its `to_dict` described it.

    Raises:
        ValueError: it describes neither.
    """
    if isinstance(state, dict) and state.get("format") == FORMAT["format"]:
        return PretrainedTokeniser.from_dict(state)
    return BPETokeniser.from_dict(state)


def load_tokeniser(path: str | os.PathLike[str]) -> Tokeniser:
    """Our own or another, from a file that its `save` wrote.

    Raises:
        ValueError: any other file.
    """
    try:
        return tokeniser_from_dict(read_json(path, MOST_BYTES, MOST_VALUES))
    except ValueError as error:
        raise ValueError(f"{path}: expected a saved tokeniser: {str(error).removeprefix(f'{path}: ')}") from None
