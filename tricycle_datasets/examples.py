"""Read fine-tuning data and tokenize it: texts, prompts with completions, conversations and preference pairs.

A .jsonl file has one JSON object per line, with one of these sets of fields:

- "text";
- "prompt" and "completion": only the completion counts in the loss;
- "messages", each with "role" and "content": only the assistant's messages count;
- "prompt", "chosen" and "rejected", which are texts or lists of messages.

Any other file is one plain text. `tricycle finetune` and `tricycle distill` use this module.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tricycle.finetuning.packing import Example
from tricycle.system.files import read_file
from tricycle_datasets.text import find_text_files

RECORD_FIELDS = '"text", "prompt" and "completion", "messages", or "prompt", "chosen" and "rejected"'
PREFERENCES = {"preference", "chat preference"}  # kinds of records with a chosen and a rejected answer
HELD_OUT_EVERY = 20  # one record in 20 is held out
MAX_SHOWN = 60  # the most characters of a value in an error message
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it at the beginning of a file
PROMPT_TOKENS = 24  # the length of a prompt from the beginning of a held-out text
MAX_NESTING = 100  # the most levels of a record, well below Python's recursion limit


class Record(NamedTuple):
    """One record of the data before tokenization.

    Attributes:
        source: file and line, for error messages.
        kind: "text", "pair", "messages", "preference" or "chat preference".
        value: a text; a prompt and its completion; a list of messages; or a prompt, the chosen answer and the rejected
            one, which are texts or lists of messages.
    """

    source: str
    kind: str
    value: Any

    @property
    def content_hash(self) -> int:
        """Return a 256-bit integer hash of kind and value; equal records are on one side of the held-out split."""
        content = json.dumps([self.kind, self.value], sort_keys=True)
        return int(hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest(), 16)


# -------------------------------------------------------------------- reading
def read_records(paths: Sequence[str | os.PathLike[str]]) -> list[Record]:
    """Read records from .jsonl, and each other text file as one, also in folders; ValueError if invalid or none.

    Raises:
        ValueError: a record is not valid (no text, no JSON, or wrong fields); the message names the file and the line.
    """
    records = [record for root in paths for path, _ in find_text_files(Path(root)) for record in _records_of(path)]
    if not records:
        raise ValueError(f"expected examples, found none in {', '.join(map(str, paths))}")
    return records


def _records_of(path: Path) -> Iterator[Record]:
    """Yield the records of a .jsonl file, or any other file as one text; raise the errors of `read_records`."""
    content = read_file(path)
    if path.suffix != ".jsonl":
        yield Record(str(path), "text", content.decode("utf-8", "replace"))
        return
    n_records = 0
    for number, line in enumerate(content.removeprefix(BYTE_ORDER_MARK).split(b"\n"), 1):
        if line.strip():
            n_records += 1
            yield _record(f"{path}: line {number}", line)
    if not n_records:
        raise ValueError(f"{path}: expected a line of JSON or more, got none")


def _record(where: str, line: bytes) -> Record:
    """Return the Record of a line of a .jsonl file; `where` begins the message of a ValueError if it is invalid."""
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected an object of JSON, got {_short(line)}: {error}") from None
    if _is_nested_deeper(value, MAX_NESTING):
        raise ValueError(f"{where}: expected JSON nested at most {MAX_NESTING} levels deep, got more: {_short(line)}")
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with {RECORD_FIELDS}, got {_short(value)}")
    if b"\\ud" in line.lower() and re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
        raise ValueError(f"{where}: expected text in Unicode, got half of a surrogate pair")
    if "chosen" in value and "rejected" in value:
        return _preference(where, value)
    if "messages" in value:
        messages = _messages(where, "messages", value["messages"])
        return Record(where, "messages", _with_answer(where, "messages", messages))
    if "prompt" in value and "completion" in value:
        pair = [_text(where, name, value[name]) for name in ("prompt", "completion")]
        return Record(where, "pair", pair)
    if "text" in value:
        return Record(where, "text", _text(where, "text", value["text"]))
    raise ValueError(f"{where}: expected an object with {RECORD_FIELDS}, got {', '.join(map(repr, value))[:MAX_SHOWN]}")


def _is_nested_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested more than `most` levels deep, without recursion."""
    level = [value]
    for _ in range(most + 1):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level = [value for values in inner for value in values]
    return bool(level)


def _text(where: str, name: str, value: Any) -> str:
    """Return `value` if it is a text, not empty unless named "prompt"; else raise ValueError."""
    if not isinstance(value, str) or (not value and name != "prompt"):
        least = "" if name == "prompt" else " of a character or more"
        raise ValueError(f"{where}: expected {name} to be a text{least}, got {_short(value)}")
    return value


def _messages(where: str, name: str, value: Any) -> list[dict[str, Any]]:
    """Return `value` if it is a list of messages with roles and texts; else raise ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: expected {name} to be a list of messages, got {_short(value)}")
    for number, message in enumerate(value, 1):
        which = f"message {number}" if name == "messages" else f"message {number} of {name}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: expected {which} to have a role, got {_short(message)}")
        if not isinstance(message.get("content"), str):
            got = _short(message.get("content"))
            raise ValueError(f"{where}: expected {which} to have a text as its content, got {got}")
    return value


def _with_answer(where: str, name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` if one is of the assistant; else raise ValueError."""
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f'{where}: expected a message in {name} of the role "assistant" to learn from, got none')
    return messages


def _preference(where: str, value: dict[str, Any]) -> Record:
    """Return a preference record; without a prompt, the common first messages of both answers are the prompt."""
    sides = ("chosen", "rejected")
    if any(isinstance(value[name], str) for name in sides):
        texts = [_text(where, name, value.get(name)) for name in ("prompt", *sides)]
        return Record(where, "preference", texts)
    chosen, rejected = (_messages(where, name, value[name]) for name in sides)
    prompt = value.get("prompt", [])
    if prompt != []:
        _messages(where, "prompt", prompt)
    else:
        n_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:-1], rejected[:-1])))
        prompt, chosen, rejected = chosen[:n_shared], chosen[n_shared:], rejected[n_shared:]
    answers = [_with_answer(where, name, answer) for name, answer in zip(sides, (chosen, rejected))]
    return Record(where, "chat preference", [prompt, *answers])


def _short(value: Any) -> str:
    """Return the repr of a value, cut to MAX_SHOWN characters."""
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


# -------------------------------------------------------------------- tokenization
@dataclass
class ExampleEncoder:
    """Tokenizes records into examples of at most one context window, and counts truncated and skipped ones.

    Attributes:
        tokeniser: the model's.
        window: the context window; an example has one token more.
        cut_answers: truncate answers that are longer than the window, instead of refusing them.
        n_cut: the number of truncated examples.
        n_cut_tokens: the number of tokens that were cut off.
        n_left_out: the number of skipped examples, without any token that counts in the loss.
    """

    tokeniser: Any
    window: int
    cut_answers: bool = False
    n_cut: int = 0
    n_cut_tokens: int = 0
    n_left_out: int = 0

    def encode(self, record: Record) -> list[Example]:
        """Tokenize a record, or ValueError; a long text gives several examples, a preference 0 or 2, else 0 or 1.

        Raises:
            ValueError: an answer is longer than the window; or the model has no chat template for a conversation, or
                its template refuses the messages.
        """
        if record.kind == "text":
            return list(self.split_windows(self.encode_text(record.value)))
        if record.kind in PREFERENCES:
            return self._preference(record)
        is_pair = record.kind == "pair"
        example = self._pair(record) if is_pair else self._conversation(record, record.value)
        # a pair loses the beginning of its prompt, which matters least; a conversation loses its end
        (example,) = self._cut([example], keep_start=self.cut_answers or not is_pair)
        if example.n_labels == 0:
            self.n_left_out += 1
            return []
        return [example]

    def _cut(self, examples: list[Example], keep_start: bool) -> list[Example]:
        """Return examples of at most `window` + 1 tokens, all cut at the end (`keep_start`) or the beginning."""
        n_over = max(len(example.ids) for example in examples) - 1 - self.window
        if n_over <= 0:
            return examples
        cut = slice(0, self.window + 1) if keep_start else slice(n_over, None)
        self.n_cut += 1
        self.n_cut_tokens += sum(len(example.ids) - len(example.ids[cut]) for example in examples)
        return [Example(example.ids[cut], example.loss_mask[cut].copy()) for example in examples]

    def encode_text(self, text: str) -> np.ndarray:
        """Return a text's ids (T,), int64: the start-of-text token (if any), its tokens, the end-of-text token."""
        start = self.tokeniser.start_of_text
        before = [] if start is None else [start]
        ids = [*before, *self.tokeniser.encode_plain(text), self.tokeniser.end_of_text]
        return np.array(ids, np.int64)

    def split_windows(self, ids: np.ndarray) -> Iterator[Example]:
        """Yield examples of at most `window` + 1 ids of a text; neighbors share one id, so each is predicted once."""
        for start in range(0, len(ids) - 1, self.window):
            window = ids[start : start + self.window + 1]
            yield Example(window, np.ones(len(window), bool))

    def _pair(self, record: Record) -> Example:
        """Return the example of prompt, completion and end-of-text token; only the last two count in the loss."""
        prompt, completion = record.value
        before = self.encode_prompt(prompt)
        answer = [*map(int, self.tokeniser.encode_plain(completion)), self.tokeniser.end_of_text]
        return self._joined(record, [(before, False), (answer, True)])

    def _preference(self, record: Record) -> list[Example]:
        """Return examples of the chosen and the rejected answer to a prompt; [] if equal, too long or without labels.

        A prompt that is too long loses its beginning. A conversation that is too long is skipped, because it must be
        complete; a pair of equal answers is skipped too.
        """
        prompt, *answers = record.value
        is_chat = record.kind == "chat preference"
        if is_chat:
            both = [self._conversation(record, [*prompt, *answer], len(prompt)) for answer in answers]
        else:
            both = [self._pair(record._replace(value=[prompt, answer])) for answer in answers]
        if self.cut_answers or not is_chat:
            both = self._cut(both, keep_start=self.cut_answers)
        is_long = any(len(example.ids) - 1 > self.window for example in both)
        same = np.array_equal(both[0].ids, both[1].ids)
        if is_long or same or not all(example.n_labels for example in both):
            self.n_left_out += 1
            return []
        return both

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt with special tokens, as in generation; [`new_text`] if it is empty."""
        ids = [int(token) for token in self.tokeniser.encode(prompt)] if prompt else []
        return ids or [self.tokeniser.new_text]

    def _conversation(self, record: Record, messages: list[dict[str, Any]], n_known: int = 0) -> Example:
        """Return a conversation's example, in which answers after `n_known` messages count in the loss, or ValueError.

        Args:
            n_known: answers among the first `n_known` messages do not count in the loss.
        """
        if not self.tokeniser.chat_template:
            raise ValueError(f"{record.source}: expected a model with a chat template for messages, this one has none")
        try:
            parts = self.tokeniser.chat_parts(messages)
        except ValueError as error:
            raise ValueError(f"{record.source}: {error}") from None
        n_answers = sum(message["role"] == "assistant" for message in messages[:n_known])
        known = [(ids, False) for ids, _ in parts[: 2 * n_answers]]
        return self._joined(record, known + parts[2 * n_answers :])

    def _joined(self, record: Record, parts: list[tuple[list[int], bool]]) -> Example:
        """Return the example of joined parts, in which answers count; ValueError if one is too long to keep whole."""
        longest = max(len(ids) for ids, is_answer in parts if is_answer)
        if longest > self.window and not self.cut_answers:
            got = f"got one of {longest}; --truncate-answers cuts such answers"
            most = f"at most {self.window} tokens (--context-window)"
            raise ValueError(f"{record.source}: expected answers of {most}, {got}")
        counts = [self._counted(ids) if is_answer else np.zeros(len(ids), bool) for ids, is_answer in parts]
        ids = np.array([token for ids, _ in parts for token in ids], np.int64)
        return Example(ids, np.concatenate(counts))

    def _counted(self, answer: list[int]) -> np.ndarray:
        """Return a mask of an answer's tokens: True up to the last special token, or everywhere if there is none."""
        special: frozenset[int] = getattr(self.tokeniser, "special_ids", frozenset())
        ends = [i for i, token in enumerate(answer) if token in special]
        last = ends[-1] if ends else len(answer) - 1
        return np.arange(len(answer)) <= last


# -------------------------------------------------------------------- training and held-out examples
@dataclass
class ExampleSplit:
    """The training examples and the held-out examples.

    Attributes:
        prompts: the prompts of held-out records, as text and as token ids.
        encoder: the encoder, with its counts of truncated and skipped examples.
        digest: a hash of all records.
    """

    train: list[Example]
    held_out: list[Example]
    prompts: list[tuple[str, list[int]]]
    encoder: ExampleEncoder
    digest: str
    n_records: int
    kinds: set[str]


def load_examples(records: Sequence[Record], encoder: ExampleEncoder, held_out: Sequence[Record] = ()) -> ExampleSplit:
    """Tokenize records to an `ExampleSplit`, or ValueError; default: hold out 1 in 20 by hash, or few texts' ends.

    Args:
        held_out: the held-out records. If not given, one record in 20 is held out, selected by its content; with fewer
            than 20 plain texts, the last twentieth of each text.

    Raises:
        ValueError: see `ExampleEncoder.encode`; or there are no training or no held-out examples.
    """
    digest = hashlib.sha256(str([record.content_hash for record in (*records, *held_out)]).encode()).hexdigest()
    kinds = {record.kind for record in records}
    if held_out:
        training, held = list(records), list(held_out)
    elif kinds == {"text"} and len(records) < HELD_OUT_EVERY:
        train, rest = _cut_texts(records, encoder)
        openings = [_opening(example.ids, encoder) for example in rest[:HELD_OUT_EVERY]]
        return ExampleSplit(train, rest, openings, encoder, digest, len(records), kinds)
    else:
        training, held = _split(records)
    train = [example for record in training for example in encoder.encode(record)]
    rest = [example for record in held for example in encoder.encode(record)]
    if not train or not rest:
        got = f"{len(train)} and {len(rest)} examples of {len(records) + len(held_out)} records"
        why = f"; {encoder.n_left_out} have no token that counts" if encoder.n_left_out else ""
        advice = "" if held_out else "; equal records are not split, and --held-out names files of your own"
        raise ValueError(f"expected at least one training and one held-out example, got {got}{why}{advice}")
    prompts = [_prompt(record, encoder) for record in held[:HELD_OUT_EVERY]]
    return ExampleSplit(train, rest, prompts, encoder, digest, len(records) + len(held_out), kinds)


def _split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return training and held-out records: 1 in 20 by hash of the content, or else those of the least hash."""
    numbers = [record.content_hash for record in records]
    held = [number % HELD_OUT_EVERY == 0 for number in numbers]
    if not any(held) or all(held):
        held = [number == min(numbers) for number in numbers]
    return [r for r, out in zip(records, held) if not out], [r for r, out in zip(records, held) if out]


def _cut_texts(records: Sequence[Record], encoder: ExampleEncoder) -> tuple[list[Example], list[Example]]:
    """Return training and held-out examples, the last twentieth of each text; ValueError if all are too short."""
    train: list[Example] = []
    held: list[Example] = []
    for record in records:
        ids = encoder.encode_text(record.value)
        cut = len(ids) - max(1, len(ids) // HELD_OUT_EVERY)
        if cut < 2:
            continue
        train += encoder.split_windows(ids[:cut])
        held += encoder.split_windows(ids[cut - 1 :])
    if not train:
        raise ValueError(f"expected a text of at least three tokens, got none in {records[0].source}")
    return train, held


def _opening(ids: np.ndarray, encoder: ExampleEncoder) -> tuple[str, list[int]]:
    """Return the first PROMPT_TOKENS tokens of a text without its end-of-text token, as text and as token ids."""
    first = ids[:PROMPT_TOKENS].tolist()
    if len(first) > 1 and first[-1] == encoder.tokeniser.end_of_text:
        first.pop()
    return encoder.tokeniser.decode(first), first


def _prompt(record: Record, encoder: ExampleEncoder) -> tuple[str, list[int]]:
    """Return (text, ids) of a record's prompt; of a chat: the last message before the first answer, and ids of all."""
    if record.kind == "text":
        return _opening(encoder.encode_text(record.value), encoder)
    if record.kind in ("pair", "preference"):
        return record.value[0], encoder.encode_prompt(record.value[0])
    if record.kind == "chat preference":
        asked = record.value[0]
    else:
        first = next(i for i, message in enumerate(record.value) if message["role"] == "assistant")
        asked = record.value[:first]
    ids = encoder.tokeniser.chat(asked, allowed_special=False)
    return (asked[-1]["content"] if asked else ""), ids
