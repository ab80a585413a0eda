"""Answers in the form that OpenAI's clients read: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import tricycle
from tricycle_serve.errors import ApiError
from tricycle_serve.orders import Order, Wish
from tricycle_serve.work import Work
from tricycle_serve.writing import Piece, TokenTexts, Told

MOST_MERGED = 32  # tokens of a part of an answer, where several came together
END = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def to_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


@dataclass
class Answer:
    """An answer to a request for texts, of either kind.

    Args:
        model: its name.
        prefixes: what is said before each text (echo), or nothing.
    """

    wish: Wish
    orders: list[Order]
    work: Work
    model: str
    tokens: TokenTexts
    prefixes: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    # what the two kinds differ by
    prefix = ""
    object = ""
    object_of_chunk = ""

    def choice(self, index: int, text: str, told: list[Told], finish: str | None) -> dict[str, Any]:
        """A whole text."""
        raise NotImplementedError

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        raise NotImplementedError

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to a stream."""
        raise NotImplementedError

    # ---------------------------------------------------------------- both
    def head(self, kind: str) -> dict[str, Any]:
        """The fields of an answer, or of a part of it, before its choices."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"tricycle-{tricycle.__version__}",
        }

    def usage(self, n_drawn: int) -> dict[str, Any]:
        """How many tokens it took."""
        prompts = {id(order.prompt): len(order.prompt) for order in self.orders}
        n_read = sum(prompts.values())
        return {
            "prompt_tokens": n_read,
            "completion_tokens": n_drawn,
            "total_tokens": n_read + n_drawn,
            "prompt_tokens_details": {"cached_tokens": self.work.n_cached},
        }

    async def whole(self) -> dict[str, Any]:
        """All of it.

        Raises:
            ApiError, Gone: as of `Work.pieces`.
        """
        every = [piece async for pieces in self.work.pieces() for piece in pieces]
        choices = []
        for index in range(len(self.orders)):
            own = [piece for piece in every if piece.number == index]
            told = [one for piece in own for one in piece.told]
            choices.append(self.choice(index, "".join(piece.text for piece in own), told, own[-1].finish))
        n_drawn = sum(piece.n_tokens for piece in every)
        return {**self.head(self.object), "choices": choices, "usage": self.usage(n_drawn)}

    async def events(self) -> Any:
        """Server-sent events, as parts of the answer come.

        Raises:
            Gone: as of `Work.pieces`.
        """
        head = self.head(self.object_of_chunk)
        if self.wish.usage:
            head["usage"] = None
        n_drawn = 0
        for chunk in self.first_chunks():
            yield event({**head, "choices": [chunk]})
        try:
            async for pieces in self.work.pieces():
                n_drawn += sum(piece.n_tokens for piece in pieces)
                for piece in merged(pieces):
                    yield b"".join(event({**head, "choices": [chunk]}) for chunk in self.chunks(piece))
        except ApiError as error:
            yield event(error.fields())
            return
        if self.wish.usage:
            yield event({**head, "choices": [], "usage": self.usage(n_drawn)})
        yield END


def merged(pieces: list[Piece]) -> list[Piece]:
    """Those of one text that follow each other as one: a client that reads slowly gets fewer and longer ones.

    They are not so long that much would have to be sent at once.
    """
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        fits = last is not None and last.n_tokens + piece.n_tokens <= MOST_MERGED
        if last is not None and fits and last.number == piece.number and last.finish is None:
            told = last.told + piece.told
            result[-1] = Piece(piece.number, last.text + piece.text, told, last.n_tokens + piece.n_tokens, piece.finish)
        else:
            result.append(piece)
    return result


class ChatAnswer(Answer):
    """The assistant's message."""

    prefix = "chatcmpl"
    object = "chat.completion"
    object_of_chunk = "chat.completion.chunk"

    def choice(self, index: int, text: str, told: list[Told], finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(told), "finish_reason": finish}

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        ends = {"logprobs": None, "finish_reason": None}
        return [{"index": index, "delta": delta, **ends} for index in range(len(self.orders))]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if piece.text or piece.told:
            logprobs = self._logprobs(piece.told)
            delta = {"content": piece.text}
            chunks.append({"index": piece.number, "delta": delta, "logprobs": logprobs, "finish_reason": None})
        if piece.finish is not None:
            chunks.append({"index": piece.number, "delta": {}, "logprobs": None, "finish_reason": piece.finish})
        return chunks

    def _logprobs(self, told: list[Told]) -> dict[str, Any] | None:
        if self.wish.n_rivals is None:
            return None

        def about(token: int, logprob: float) -> dict[str, Any]:
            text, raw = self.tokens(token)
            return {"token": text, "logprob": logprob, "bytes": raw}

        rivals = [[about(*rival) for rival in one.rivals] for one in told]
        content = [{**about(one.token, one.logprob), "top_logprobs": some} for one, some in zip(told, rivals)]
        return {"content": content, "refusal": None}


class TextAnswer(Answer):
    """The continuation of a text."""

    prefix = "cmpl"
    object = "text_completion"
    object_of_chunk = "text_completion"

    def choice(self, index: int, text: str, told: list[Told], finish: str | None) -> dict[str, Any]:
        return self._chunk(index, self._prefix(index) + text, told, finish)

    def first_chunks(self) -> list[dict[str, Any]]:
        prefixes = [(index, self._prefix(index)) for index in range(len(self.orders))]
        return [self._chunk(index, prefix, [], None) for index, prefix in prefixes if prefix]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._chunk(piece.number, piece.text, piece.told, piece.finish)]

    def _chunk(self, index: int, text: str, told: list[Told], finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(told), "finish_reason": finish}

    def _prefix(self, index: int) -> str:
        return self.prefixes[index // self.wish.n] if self.prefixes else ""

    def _logprobs(self, told: list[Told]) -> dict[str, Any] | None:
        if self.wish.n_rivals is None:
            return None
        rivals = [{self.tokens(token)[0]: logprob for token, logprob in one.rivals} for one in told]
        return {
            "tokens": [self.tokens(one.token)[0] for one in told],
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": rivals if self.wish.n_rivals else None,
            "text_offset": [one.place for one in told],
        }
