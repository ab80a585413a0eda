"""A model as it is offered: its name, how it writes, and how much may be asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.pretrained import Pretrained
from tricycle.pretrained.sentences import SentenceEncoder
from tricycle_serve.answers import Answer, ChatAnswer, TextAnswer
from tricycle_serve.engine import Engine, Limits, TextEngine
from tricycle_serve.errors import ApiError
from tricycle_serve.fields import Fields
from tricycle_serve.orders import Wish, messages_of, prompts_of, wish_of
from tricycle_serve.vectors import VectorEngine, vector_wish_of, written
from tricycle_serve.work import Work
from tricycle_serve.writing import TokenTexts

MARGIN = 4  # by which a tokeniser may make a text shorter before it cuts it
N_PREPARING = 2  # threads that make tokens of texts


@dataclass(frozen=True)
class Ways:
    """How a model answers where a request says nothing, and the most that it does.

    Attributes:
        chat, text: how it draws tokens in conversations, and elsewhere.
        length: the most tokens of an answer.
        seconds: the most that a request may take.
    """

    chat: PenalizedSamplingParams
    text: PenalizedSamplingParams
    length: int = 1024
    seconds: float = 600.0


class Served:
    """What all models that are offered have.

    Args:
        name: by which requests call it.
    """

    engine: Engine
    kind = ""

    def __init__(self, name: str, window: int, created: int) -> None:
        self.name = name
        self.window = window
        self._created = created
        self._preparing = ThreadPoolExecutor(N_PREPARING, thread_name_prefix="preparing")

    def about(self) -> dict[str, Any]:
        """As /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "tricycle",
            "kind": self.kind,
            "context_window": self.window,
        }

    def close(self) -> None:
        """Take nothing more."""
        self.engine.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def check_name(self, fields: Fields) -> None:
        """Raise ApiError for a request of another model."""
        name = fields.text("model")
        if name is not None and name != self.name:
            raise no_such_model(name, self.name)

    async def prepared(self, function: Any, *args: Any) -> Any:
        """The result of something that may take a while, while others are answered."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, function, *args)

    async def chat(self, fields: Fields) -> Answer:
        raise ApiError(f"{self.name} cannot answer in conversations", code="unsupported_endpoint")

    async def complete(self, fields: Fields) -> Answer:
        raise ApiError(f"{self.name} cannot write", code="unsupported_endpoint")

    async def embed(self, fields: Fields) -> VectorAnswer:
        raise ApiError(f"{self.name} cannot make embeddings: an encoder is needed", code="unsupported_endpoint")


def no_such_model(name: str, known: str) -> ApiError:
    """For a request that names another."""
    message = f"the model {name[:100]!r} does not exist, this server has {known!r}"
    return ApiError(message, status=404, param="model", code="model_not_found")


class Writer(Served):
    """A decoder, with or without a chat template.

    Args:
        cache: the dtype of keys and values.
    """

    def __init__(
        self, name: str, loaded: Pretrained, ways: Ways, limits: Limits, created: int, cache: str | None = None
    ) -> None:
        super().__init__(name, loaded.model.config.context_window, created)
        self.tokeniser = loaded.tokeniser
        self.tokens = TokenTexts(self.tokeniser)
        self.engine: TextEngine = TextEngine(loaded.model, self.tokeniser, limits, cache)
        self._ways = ways
        if hasattr(self.tokeniser, "backend"):
            lengths = map(len, self.tokeniser.backend.get_vocab(with_added_tokens=True))
        else:
            lengths = map(len, map(self.tokeniser.token_bytes, range(self.tokeniser.n_vocab)))
        self._most_characters = MARGIN * self.window * max(lengths)
        self._talks = bool(self.tokeniser.chat_template)
        self.kind = "chat" if self._talks else "text"
        if self._talks:  # files may name the end of texts alone; the template tells what ends an answer
            with contextlib.suppress(ValueError):  # a template may refuse such a short conversation
                end = self.tokeniser.end_of_answer()
                if end is not None and not ways.chat.is_stop_token(end):
                    chat = replace(ways.chat, stop_tokens=(*ways.chat.stop_tokens, end))  # type: ignore[misc]
                    self._ways = replace(ways, chat=chat)

    async def chat(self, fields: Fields) -> Answer:
        """An answer to a conversation.

        Raises:
            ApiError: a request that cannot be answered.
        """
        if not self._talks:
            message = f"{self.name} has no chat template: it was not taught to talk; /v1/completions continues a text"
            raise ApiError(message, code="no_chat_template")
        self.check_name(fields)
        messages = messages_of(fields)
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        wish = wish_of(fields, self._ways.chat, chat=True)
        try:
            prompt = await self.prepared(functools.partial(self.tokeniser.chat, messages, allowed_special=False))
        except ValueError as error:
            raise ApiError(f"the model does not take this conversation: {error}", param="messages") from None
        return self._answer(ChatAnswer, wish, [prompt], [])

    async def complete(self, fields: Fields) -> Answer:
        """The continuation of texts.

        Raises:
            ApiError: a request that cannot be answered.
        """
        self.check_name(fields)
        texts = prompts_of(fields, self.tokeniser.n_vocab)
        self._check_length(max(len(text) for text in texts), "prompt")
        wish = wish_of(fields, self._ways.text, chat=False)
        prompts = [await self.prepared(self._ids, text) for text in texts]
        prefixes = [self.tokeniser.decode(text) if isinstance(text, list) else text for text in texts]
        return self._answer(TextAnswer, wish, prompts, prefixes if wish.echo else [])

    def _check_length(self, n_characters: int, param: str) -> None:
        """What cannot fit is not cut into tokens, which may take seconds."""
        if n_characters > self._most_characters:
            message = f"the context has {self.window} tokens: {n_characters:,} characters do not fit"
            raise ApiError(message, param=param, code="context_length_exceeded")

    def _ids(self, text: str | list[int]) -> list[int]:
        if isinstance(text, list):
            return list(text)
        ids = [int(token) for token in self.tokeniser.encode(text)] if text else []
        return ids or [self.tokeniser.new_text]

    def _answer(self, kind: type[Answer], wish: Wish, prompts: list[list[int]], prefixes: list[str]) -> Answer:
        orders = wish.orders(prompts, self._ways.length, self.window)
        work = self.engine.submit(orders, self._ways.seconds)
        return kind(wish, orders, work, self.name, self.tokens, prefixes)


@dataclass
class VectorAnswer:
    """An answer to a request for embeddings.

    Args:
        n_tokens: of all texts.
    """

    work: Work
    model: str
    n_tokens: int
    as_base64: bool

    async def whole(self) -> dict[str, Any]:
        """All of it.

        Raises:
            ApiError, Gone: as of `Work.pieces`.
        """
        data: list[dict[str, Any]] = []
        async for parts in self.work.pieces():
            for vector in (vector for part in parts for vector in part):
                data.append({"object": "embedding", "index": len(data), "embedding": written(vector, self.as_base64)})
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}


class Encoder(Served):
    """An encoder."""

    kind = "encoder"

    def __init__(self, name: str, encoder: SentenceEncoder, limits: Limits, created: int, seconds: float) -> None:
        super().__init__(name, encoder.longest, created)
        self.encoder = encoder
        self.engine: VectorEngine = VectorEngine(encoder, limits.n_queue)
        self._seconds = seconds

    async def embed(self, fields: Fields) -> VectorAnswer:
        """Vectors for texts.

        Raises:
            ApiError: a request that cannot be answered.
        """
        self.check_name(fields)
        wish = vector_wish_of(fields, self.encoder.model.config.embedding_dim)
        lengths = await self.prepared(self.encoder.lengths, wish.texts)
        if max(lengths) > self.window and not wish.cuts:
            place, longest = lengths.index(max(lengths)), max(lengths)
            message = f"expected texts of at most {self.window} tokens, got {longest} in input[{place}]"
            raise ApiError(f"{message}; truncate: true cuts them", param="input", code="context_length_exceeded")
        work = self.engine.submit(wish.texts, self._seconds)
        n_tokens = sum(min(length, self.window) for length in lengths)
        return VectorAnswer(work, self.name, n_tokens, wish.as_base64)
