"""The services behind the endpoints: text generation with a decoder, and embeddings with an encoder."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.pretrained import Pretrained
from tricycle.pretrained.sentence_encoder import SentenceEncoder
from tricycle_serve.completion_requests import (
    CompletionRequest,
    parse_completion_request,
    parse_messages,
    parse_prompts,
)
from tricycle_serve.embeddings import EmbeddingEngine, EmbeddingsResponse, parse_embeddings_request
from tricycle_serve.engine import Engine, EngineLimits, GenerationEngine
from tricycle_serve.errors import ApiError
from tricycle_serve.guides import GuideCompiler
from tricycle_serve.output_processor import TokenDecoder
from tricycle_serve.request_fields import RequestFields
from tricycle_serve.responses import ChatCompletionResponse, CompletionResponse, TextCompletionResponse
from tricycle_serve.responses_api import ResponsesResponse, parse_responses_request, renamed_error
from tricycle_serve.tools import NO_TOOLS, is_supported

MAX_NORMALIZATION_RATIO = 4  # by which a tokenizer's normalization may shorten a text
N_TOKENIZER_THREADS = 2


@dataclass(frozen=True)
class ServiceDefaults:
    """Default sampling parameters of requests, and limits of each request.

    Attributes:
        chat: sampling parameters of chat completions.
        text: sampling parameters of completions.
        max_tokens: maximum number of new tokens of a sequence.
        timeout_seconds: maximum duration of a request.
    """

    chat: PenalizedSamplingParams
    text: PenalizedSamplingParams
    max_tokens: int = 1024
    timeout_seconds: float = 600.0


class ModelService:
    """A served model: base class of `GenerationService` and `EmbeddingService`.

    Args:
        name: the model name in requests.
        context_window: maximum number of tokens.
        created: Unix time in seconds that /v1/models reports.
    """

    engine: Engine
    kind = ""

    def __init__(self, name: str, context_window: int, created: int) -> None:
        self.name = name
        self.context_window = context_window
        self._created = created
        self._thread_pool = ThreadPoolExecutor(N_TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    def model_info(self) -> dict[str, Any]:
        """Return the model's entry in /v1/models: id, object, created (Unix time), owned_by, kind, context_window."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "tricycle",
            "kind": self.kind,
            "context_window": self.context_window,
        }

    def close(self) -> None:
        """Reject new requests, end the engine after its step, and cancel waiting tokenizations; do not wait."""
        self.engine.close()
        self._thread_pool.shutdown(wait=False, cancel_futures=True)

    def check_model_name(self, fields: RequestFields) -> None:
        """Raise ApiError of status 404 if the request names another model; none, or null, is accepted."""
        name = fields.get_str("model")
        if name is not None and name != self.name:
            raise model_not_found(name, self.name)

    async def run_in_thread(self, function: Any, *args: Any) -> Any:
        """Run a slow function with `args` in a thread without blocking the event loop; return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread_pool, function, *args)

    async def chat(self, fields: RequestFields) -> CompletionResponse:
        """Raise ApiError: chat completions are not supported."""
        raise ApiError(f"{self.name} does not support chat completions", code="unsupported_endpoint")

    async def respond(self, fields: RequestFields) -> CompletionResponse:
        """Raise ApiError: the Responses API is not supported."""
        raise ApiError(f"{self.name} does not support responses", code="unsupported_endpoint")

    async def complete(self, fields: RequestFields) -> CompletionResponse:
        """Raise ApiError: completions are not supported."""
        raise ApiError(f"{self.name} does not support completions", code="unsupported_endpoint")

    async def embed(self, fields: RequestFields) -> EmbeddingsResponse:
        """Raise ApiError: embeddings are not supported."""
        message = f"{self.name} does not support embeddings: expected an encoder"
        raise ApiError(message, code="unsupported_endpoint")


def model_not_found(name: str, served_name: str) -> ApiError:
    """Return (not raise) the ApiError of status 404 for a request that names a model that is not served."""
    message = f"the model {name[:100]!r} does not exist, this server has {served_name!r}"
    return ApiError(message, status=404, param="model", code="model_not_found")


class GenerationService(ModelService):
    """Text generation with a decoder, with or without a chat template.

    Args:
        cache_dtype: data type of the KV caches.
    """

    def __init__(
        self,
        name: str,
        loaded: Pretrained,
        defaults: ServiceDefaults,
        limits: EngineLimits,
        created: int,
        cache_dtype: str | None = None,
    ) -> None:
        super().__init__(name, loaded.model.config.context_window, created)
        self.tokeniser = loaded.tokeniser
        self.decode_token = TokenDecoder(self.tokeniser)
        self.engine: GenerationEngine = GenerationEngine(loaded.model, self.tokeniser, limits, cache_dtype)
        self._defaults = defaults
        self._guides = GuideCompiler(self.tokeniser)
        if hasattr(self.tokeniser, "backend"):
            tokens = self.tokeniser.backend.get_vocab(with_added_tokens=True)
        else:
            tokens = map(self.tokeniser.token_bytes, range(self.tokeniser.n_vocab))
        self._max_characters = MAX_NORMALIZATION_RATIO * self.context_window * max(map(len, tokens))
        self._has_chat_template = bool(self.tokeniser.chat_template)
        self.kind = "chat" if self._has_chat_template else "text"

    async def chat(self, fields: RequestFields) -> CompletionResponse:
        """Validate and queue a chat completion; return its response to `collect` or stream; else ApiError."""
        return await self._answer(fields, parse_messages, ChatCompletionResponse)

    async def respond(self, fields: RequestFields) -> CompletionResponse:
        """Validate and queue a request of the Responses API; return its response to `collect` or stream; else ApiError.

        Raises:
            ApiError: an invalid request, or a full queue.
        """
        request = parse_responses_request(fields)
        response_class = functools.partial(ResponsesResponse, shown=request.shown)
        try:
            return await self._answer(RequestFields(request.chat), lambda _: request.messages, response_class)
        except ApiError as error:
            raise renamed_error(error) from None

    async def _answer(
        self,
        fields: RequestFields,
        parse: Callable[[RequestFields], list[dict[str, Any]]],
        response_class: Callable[..., CompletionResponse],
    ) -> CompletionResponse:
        """Validate and queue a chat request of parsed messages; return its response, or ApiError if it is invalid."""
        if not self._has_chat_template:
            message = f"{self.name} has no chat template; /v1/completions continues a text"
            raise ApiError(message, code="no_chat_template")
        self.check_model_name(fields)
        messages = parse(fields)
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        request = parse_completion_request(fields, self._defaults.chat, is_chat=True)
        variables = self._tool_variables(request, messages)
        request = await self._compile_guide(request)
        encode = functools.partial(self.tokeniser.chat, messages, allowed_special=False, **variables)
        try:
            prompt = await self.run_in_thread(encode)
        except (ValueError, RecursionError) as error:  # the latter for arguments of tool calls that are nested deeply
            message = f"expected messages that the model's chat template accepts: {error}"
            raise ApiError(message, param="messages") from None
        return self._submit(response_class, request, [prompt], [])

    async def complete(self, fields: RequestFields) -> CompletionResponse:
        """Validate and queue completions of prompts; return their response to `collect` or stream; else ApiError."""
        self.check_model_name(fields)
        inputs = parse_prompts(fields, self.tokeniser.n_vocab)
        self._check_length(max(len(item) for item in inputs), "prompt")
        request = await self._compile_guide(parse_completion_request(fields, self._defaults.text, is_chat=False))
        prompts = [await self.run_in_thread(self._encode, item) for item in inputs]
        prefixes = [self.tokeniser.decode(item) if isinstance(item, list) else item for item in inputs]
        return self._submit(TextCompletionResponse, request, prompts, prefixes if request.echo else [])

    def _tool_variables(self, request: CompletionRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the chat template's tool variables, {} without tools; ApiError if the tools cannot be used."""
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        templates = self.tokeniser.chat_templates
        template = templates.get("tool_use" if request.tools else "default", templates["default"])
        if (request.tools or has_calls) and not is_supported(template):
            param = "tools" if request.tools else "messages"
            raise ApiError(f"{param} is not supported: {NO_TOOLS}", param=param, code="unsupported_parameter")
        if request.tools is None:
            return {}
        text = json.dumps(request.tools.functions, ensure_ascii=False)
        self._check_length(len(text), "tools")
        for token in self.tokeniser.special_ids:  # the template would make it a special token of the conversation
            if (name := self.tokeniser.backend.id_to_token(token)) in text:
                raise ApiError(f"expected tools without names of special tokens, got {name!r}", param="tools")
        return {"tools": request.tools.functions}

    async def _compile_guide(self, request: CompletionRequest) -> CompletionRequest:
        """Return the request with the constraint of its guide, if it has one; else ApiError."""
        if request.guide is None:
            return request
        constraint = await self.run_in_thread(self._guides.compile, request.guide)
        return replace(request, sampling=replace(request.sampling, constraint=constraint))

    def _check_length(self, n_characters: int, param: str) -> None:
        """Raise ApiError if a text of `n_characters` cannot fit into the context window, before it is tokenized."""
        if n_characters > self._max_characters:
            message = f"the context window has {self.context_window} tokens: {n_characters:,} characters do not fit"
            raise ApiError(message, param=param, code="context_length_exceeded")

    def _encode(self, prompt: str | list[int]) -> list[int]:
        """Return a prompt as token ids, or the token of a new text if it is empty; copy a list of ids."""
        if isinstance(prompt, list):
            return list(prompt)
        ids = [int(token) for token in self.tokeniser.encode(prompt)] if prompt else []
        return ids or [self.tokeniser.new_text]

    def _submit(
        self,
        response_class: Callable[..., CompletionResponse],
        request: CompletionRequest,
        prompts: list[list[int]],
        prefixes: list[str],
    ) -> CompletionResponse:
        """Queue a request's prompts in the engine, without waiting; return the response that reports its results."""
        limits = (self._defaults.max_tokens, self.context_window)
        sequences = request.sequence_requests(prompts, *limits, prefixes)
        engine_request = self.engine.submit(sequences, self._defaults.timeout_seconds)
        shown = [] if request.has_prompt_logprobs else prefixes  # else the engine sends the prompt's text
        return response_class(request, sequences, engine_request, self.name, self.decode_token, shown)


class EmbeddingService(ModelService):
    """Embeddings with an encoder."""

    kind = "encoder"

    def __init__(
        self, name: str, encoder: SentenceEncoder, limits: EngineLimits, created: int, timeout_seconds: float
    ) -> None:
        super().__init__(name, encoder.max_tokens, created)
        self.encoder = encoder
        self.engine: EmbeddingEngine = EmbeddingEngine(encoder, limits.max_queue)
        self._timeout_seconds = timeout_seconds

    async def embed(self, fields: RequestFields) -> EmbeddingsResponse:
        """Validate and queue an embeddings request; return its response to `collect`; ApiError if it is invalid.

        Raises:
            ApiError: an invalid request, or a full queue.
        """
        self.check_model_name(fields)
        request = parse_embeddings_request(fields, self.encoder.model.config.embedding_dim)
        lengths = await self.run_in_thread(self.encoder.count_tokens, request.texts)
        longest = max(lengths)
        if longest > self.context_window and not request.truncate:
            index = lengths.index(longest)
            message = f"expected texts of at most {self.context_window} tokens, got {longest} in input[{index}]"
            raise ApiError(f"{message}; truncate: true cuts them", param="input", code="context_length_exceeded")
        engine_request = self.engine.submit(request.texts, self._timeout_seconds)
        n_tokens = sum(min(length, self.context_window) for length in lengths)
        if self.engine.metrics is not None:
            self.engine.metrics.count_prompt(n_tokens)
        return EmbeddingsResponse(engine_request, self.name, n_tokens, request.dimensions, request.as_base64)
