"""Talk with a model in the terminal.

Ctrl-C ends an answer; at the prompt it leaves, as Ctrl-D does. /help lists what else can be said.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

from tricycle.pretrained import Pretrained
from tricycle.sampling import SamplingParams
from tricycle.system.files import atomic_write
from tricycle_cli.flags import parse
from tricycle_cli.generate import stream_text
from tricycle_cli.models import DecodingFlags, ModelFlags, SamplingFlags, load_model, new_decoder, stop_tokens
from tricycle_cli.signals import Signals

HELP = """/reset        forget the conversation
/save FILE    write it down: as JSON where the name ends in .json, else as text
/help         this
//...         a message that begins with a slash
Ctrl-C        ends an answer; at the prompt it leaves, as Ctrl-D does"""

# For models whose makers say nothing. A small one that may draw answers beside the point as often as not, and one that
# always says the likeliest goes round in circles, but for a small penalty.
SAMPLING: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.05}

Message = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """Whom to talk with, and how."""

    source: tyro.conf.Positional[str] = "smollm2"
    """a model for conversations, as `tricycle generate` takes it"""
    system: str | None = None
    """what the model is told before the conversation begins"""
    length: int = 1024
    """the most tokens of an answer"""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    decoding: DecodingFlags = field(default_factory=DecodingFlags)
    model: ModelFlags = field(default_factory=ModelFlags)


class Conversation:
    """What was said, and the model that answers.

    Args:
        system: what the model is told first.
        n_tokens: the most tokens of an answer.
        sampling: how answers are drawn.
        decoding: its overflow "truncate" forgets the oldest messages where they no longer fit, "error" the latest.

    Raises:
        ValueError: a model without a chat template, or one whose template refuses the first message.
    """

    def __init__(
        self,
        loaded: Pretrained,
        system: str | None,
        n_tokens: int,
        sampling: SamplingParams,
        decoding: DecodingFlags | None = None,
    ) -> None:
        if not loaded.tokeniser.chat_template:
            raise ValueError(
                "expected a model with a chat template, this one has none: it was not taught to talk. "
                "`tricycle generate` lets it continue a text"
            )
        if n_tokens < 1:
            raise ValueError(f"expected --length to be 1 or more, got {n_tokens}")
        self.model, self.tokeniser = loaded.model, loaded.tokeniser
        self.n_tokens, self.decoding = n_tokens, decoding or DecodingFlags()
        self.stops = stop_tokens(loaded)
        self.beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.reset()
        self._ids([*self.messages, {"role": "user", "content": "Hello!"}])  # refused now, or not at all
        with contextlib.suppress(ValueError):  # a template may refuse such a short one
            end = self.tokeniser.end_of_answer()
            if end is not None and end not in self.stops:  # the files may name the end of texts alone
                self.stops.append(end)
        self.sampling = replace(sampling, stop_tokens=self.stops)

    def reset(self) -> None:
        """Forget what was said."""
        self.messages: list[Message] = [*self.beginning]
        self.state, self._generate = new_decoder(self.model, self.decoding)

    def ask(self, said: str) -> tuple[Iterator[str], int]:
        """Take a message; returns the answer as it comes, and how many messages had to be forgotten for it.

        The answer becomes part of the conversation as far as it was taken.

        Raises:
            ValueError: the message alone does not fit into the context window, or the conversation with it does not and
                nothing is to be forgotten; it is not kept.
        """
        messages = [*self.messages, {"role": "user", "content": said}]
        window = self.model.config.context_window
        room = min(self.n_tokens, max(1, window // 4))
        n_first, n_forgotten = len(self.beginning), 0
        ids = self._ids(messages)
        while len(ids) + room > window:
            if len(messages) <= n_first + 1:
                most = window - room
                raise ValueError(
                    f"the message is too long: expected at most {most} tokens with all around it, got {len(ids)}"
                )
            if self.decoding.overflow == "error":
                raise ValueError(
                    f"the context of {window:,} tokens is full and nothing is to be forgotten: /reset begins anew"
                )
            n_gone = min(2, len(messages) - n_first - 1)  # a question and its answer
            del messages[n_first : n_first + n_gone]
            n_forgotten += n_gone
            ids = self._ids(messages)
        self.messages = messages
        return self._answer(ids), n_forgotten

    def _ids(self, messages: list[Message]) -> list[int]:
        return list(self.tokeniser.chat(messages, allowed_special=False))

    def _answer(self, ids: list[int]) -> Iterator[str]:
        answer: Message = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        n_tokens = min(self.n_tokens, self.model.config.context_window - len(ids))
        tokens = self._generate(self.model, ids, n_tokens, self.sampling, state=self.state)
        for part in stream_text(tokens, self.tokeniser, self.stops, ids):
            answer["content"] += part
            yield part


def main(args: Sequence[str] | None = None) -> None:
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    loaded = load_model(arguments.source, **vars(arguments.model))
    sampling = arguments.sampling.for_model(loaded, SAMPLING)
    conversation = Conversation(loaded, arguments.system, arguments.length, sampling, arguments.decoding)
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(f"{arguments.source}: {loaded.model.n_parameters:,} parameters. /help lists what else can be said.")
    for said in lines(at_terminal):
        turn(conversation, said)


def lines(at_terminal: bool) -> Iterator[str]:
    """What somebody types, or a pipe holds, until it ends."""
    if not at_terminal:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # lines can be edited where there is this
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def turn(conversation: Conversation, said: str) -> None:
    """Do what a line says: a command, or a message to answer."""
    word, _, rest = said.strip().partition(" ")
    if word == "/help":
        print(HELP)
    elif word == "/reset":
        conversation.reset()
        print("(forgotten)")
    elif word == "/save":
        save(conversation.messages, rest.strip())
    elif word.startswith("/") and not word.startswith("//"):
        print(f"(there is no {word}: /help lists what there is; a message that begins with a slash has two)")
    elif said.strip():
        answer(conversation, said[1:] if said.startswith("//") else said)


def save(messages: list[Message], name: str) -> None:
    """Write a conversation to a file, and print whether that could be done."""
    if not name:
        print("(expected the name of a file: /save FILE)")
        return
    try:
        path = Path(name).expanduser()
        if path.exists() and not path.is_file():  # to replace a device, or a link to one, would break it for everybody
            raise OSError(f"expected a file, or the name of a new one, got {path}")
        with atomic_write(path, text=True) as file:
            if path.suffix == ".json":
                json.dump(messages, file, indent=2, ensure_ascii=False)
            else:
                file.write("".join(f"{message['role']}: {message['content']}\n\n" for message in messages))
        print(f"(saved: {name})")
    except OSError as error:
        print(f"(not saved: {error})")


def answer(conversation: Conversation, said: str) -> None:
    """Print the answer as it comes. Ctrl-C ends it after the token at work, when all blocks have read the same; a
    second one at once.
    """
    try:
        parts, n_forgotten = conversation.ask(said)
    except ValueError as error:
        print(f"({error})")
        return
    if n_forgotten:
        window = conversation.model.config.context_window
        print(
            f"(the oldest {n_forgotten} messages no longer fit into the context of {window:,} tokens and are forgotten)"
        )
    with Signals(("SIGINT",), announces=False) as interrupted, interrupted.deferred():
        try:
            for part in parts:
                print(part, end="", flush=True)
                if interrupted():
                    break
        except KeyboardInterrupt:
            conversation.state.reset()
        print(" (interrupted)" if interrupted() else "", flush=True)
