"""Chat with a model in the terminal.

Ctrl-C stops an answer. At the prompt, Ctrl-C or Ctrl-D exits. /help lists the commands.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from tricycle.pretrained import Pretrained
from tricycle.sampling import SamplingParams
from tricycle.system.files import atomic_write
from tricycle_cli.flags import parse
from tricycle_cli.generate import stream_text
from tricycle_cli.models import (
    DecodingFlags,
    ModelFlags,
    SamplingFlags,
    chat_stop_tokens,
    check_constraint,
    load_model,
    new_decoder,
)
from tricycle_cli.signals import Signals

HELP = """/reset        start a new conversation
/save FILE    save the conversation, as JSON if the name ends in .json, else as text
/help         show this help
//...         send a message that starts with a slash
Ctrl-C        stop an answer; at the prompt, exit (as Ctrl-D)"""

# For models without generation settings: small models often answer off-topic with random sampling, and repeat
# themselves with greedy decoding, unless a small penalty prevents the repetition.
SAMPLING: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.05}

Message = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle chat`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "smollm2"
    """a chat model, as in `tricycle generate`"""
    system: str | None = None
    """the system message"""
    length: int = 1024
    """the maximum number of tokens of an answer"""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    decoding: DecodingFlags = field(default_factory=DecodingFlags)
    model: ModelFlags = field(default_factory=ModelFlags)


class Conversation:
    """A conversation with a chat model.

    Args:
        loaded: the model with its tokenizer.
        system: the system message; None for no system message.
        n_tokens: the maximum number of tokens of an answer.
        sampling: the sampling parameters.
        decoding: on context overflow, "truncate" drops the oldest messages, "error" rejects the latest message.

    Raises:
        ValueError: a model without a chat template, or a template that rejects the first message.
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
            use = "use `tricycle generate` to continue a text"
            raise ValueError(f"expected a model with a chat template, got one without: it is no chat model; {use}")
        if n_tokens < 1:
            raise ValueError(f"expected --length to be 1 or more, got {n_tokens}")
        self.model, self.tokeniser = loaded.model, loaded.tokeniser
        self.n_tokens, self.decoding = n_tokens, decoding or DecodingFlags()
        self.stops = chat_stop_tokens(loaded)
        self.first_messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.reset()
        self._ids([*self.messages, {"role": "user", "content": "Hello!"}])  # the template raises its errors now
        self.sampling = replace(sampling, stop_tokens=self.stops)

    def reset(self) -> None:
        """Discard all messages and the KV cache, and start a new conversation, with the system message only."""
        self.messages: list[Message] = [*self.first_messages]
        self.state, self._generate = new_decoder(self.model, self.decoding)

    def ask(self, message: str) -> tuple[Iterator[str], int]:
        """Add a user message; return (iterator of the answer's text, number of dropped messages); ValueError if full.

        The conversation gets the part of the answer that the caller has consumed.

        Raises:
            ValueError: the message does not fit into the context window, alone or with overflow "error" after the
                conversation; the conversation is unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        window = self.model.config.context_window
        reserved = min(self.n_tokens, max(1, window // 4))  # for the answer
        n_first, n_dropped = len(self.first_messages), 0
        ids = self._ids(messages)
        while len(ids) + reserved > window:
            if len(messages) <= n_first + 1:
                most = f"at most {window - reserved} tokens with the chat template"
                raise ValueError(f"expected a message of {most}, got {len(ids)}: shorten it")
            if self.decoding.overflow == "error":
                full = f"the context window of {window:,} tokens is full"
                raise ValueError(f"{full}: start a new conversation with /reset")
            n_removed = min(2, len(messages) - n_first - 1)  # a question and its answer
            del messages[n_first : n_first + n_removed]
            n_dropped += n_removed
            ids = self._ids(messages)
        self.messages = messages
        return self._answer(ids), n_dropped

    def _ids(self, messages: list[Message]) -> list[int]:
        """Return the token ids of messages in the chat template; names of special tokens in them are plain text."""
        return list(self.tokeniser.chat(messages, allowed_special=False))

    def _answer(self, ids: list[int]) -> Iterator[str]:
        """Yield the parts of a generated answer, and append it to the messages as it grows."""
        answer: Message = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        n_tokens = min(self.n_tokens, self.model.config.context_window - len(ids))
        tokens = self._generate(self.model, ids, n_tokens, self.sampling, state=self.state)
        for part in stream_text(tokens, self.tokeniser, self.stops, ids):
            answer["content"] += part
            yield part


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle chat`: load a model, and answer each line of stdin, or execute it if it is a /command."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    loaded = load_model(arguments.source, **vars(arguments.model))
    sampling = arguments.decoding.constrain(arguments.sampling.for_model(loaded, SAMPLING), loaded.tokeniser)
    conversation = Conversation(loaded, arguments.system, arguments.length, sampling, arguments.decoding)
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(f"{arguments.source}: {loaded.model.n_parameters:,} parameters. /help lists the commands.")
    for line in read_lines(at_terminal):
        handle_line(conversation, line)


def read_lines(at_terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin without line ends; at a terminal with a prompt `> `, where Ctrl-C ends them too."""
    if not at_terminal:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # readline adds line editing to `input`
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def handle_line(conversation: Conversation, line: str) -> None:
    """Execute /help, /reset or /save FILE, or else print the answer to the line; // at the start sends a slash."""
    word, _, rest = line.strip().partition(" ")
    if word == "/help":
        print(HELP)
    elif word == "/reset":
        conversation.reset()
        print("(new conversation)")
    elif word == "/save":
        save(conversation.messages, rest.strip())
    elif word.startswith("/") and not word.startswith("//"):
        print(f"(unknown command {word}: /help lists the commands; start a message with // to send a slash)")
    elif line.strip():
        answer(conversation, line[1:] if line.startswith("//") else line)


def save(messages: list[Message], name: str) -> None:
    """Save messages to a file, as JSON if its suffix is .json, else as text; print the result, or the error."""
    if not name:
        print("(expected a file name: /save FILE)")
        return
    try:
        path = Path(name).expanduser()
        if path.exists() and not path.is_file():  # never replace a device, such as /dev/null
            raise OSError(f"expected a regular file or a new file, got {path}")
        with atomic_write(path, text=True) as file:
            if path.suffix == ".json":
                json.dump(messages, file, indent=2, ensure_ascii=False)
            else:
                file.write("".join(f"{message['role']}: {message['content']}\n\n" for message in messages))
        print(f"(saved: {name})")
    except (OSError, RuntimeError, ValueError) as error:  # also of an unknown ~user, or a NUL character in the name
        print(f"(not saved: {error})")


def answer(conversation: Conversation, message: str) -> None:
    """Print the answer to a message while it is generated, or an error in one line; Ctrl-C stops the answer.

    Ctrl-C stops after the current token, when the KV caches of all blocks are equal; a second Ctrl-C stops at once.
    """
    try:
        parts, n_dropped = conversation.ask(message)
    except ValueError as error:
        print(f"({error})")
        return
    if n_dropped:
        window = conversation.model.config.context_window
        print(f"(dropped the oldest {n_dropped} messages, which exceed the context window of {window:,} tokens)")
    with Signals(("SIGINT",), announces=False) as interrupted, interrupted.deferred():
        try:
            for part in parts:
                print(part, end="", flush=True)
                if interrupted():
                    break
        except KeyboardInterrupt:
            conversation.state.reset()
        print(" (interrupted)" if interrupted() else "", flush=True)
    try:
        check_constraint(conversation.sampling)
    except ValueError as error:
        print(f"({error})")
