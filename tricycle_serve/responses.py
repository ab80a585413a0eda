"""Response bodies of chat completions and completions, complete or as a stream of server-sent events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import tricycle
from tricycle_serve.completion_requests import CompletionRequest, SequenceRequest
from tricycle_serve.engine_request import EngineRequest
from tricycle_serve.errors import ApiError, encode_json
from tricycle_serve.output_processor import TextDelta, TokenDecoder, TokenLogprob
from tricycle_serve.tools import ToolCallParser

MAX_MERGED_TOKENS = 32  # per streamed chunk, if several deltas are waiting
DONE_EVENT = b"data: [DONE]\n\n"


def format_event(value: dict[str, Any]) -> bytes:
    """Return a JSON object as the bytes of a server-sent event: "data: ", the JSON, and an empty line."""
    return b"data: " + encode_json(value) + b"\n\n"


@dataclass
class CompletionResponse:
    """The response to a request for text; the base class of both kinds.

    Args:
        sequences: requests of all sequences, in the order of their indices.
        model: name of the model.
        prefixes: text before the completions of each prompt (echo), or empty.
    """

    request: CompletionRequest
    sequences: list[SequenceRequest]
    engine_request: EngineRequest
    model: str
    decode_token: TokenDecoder
    prefixes: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    # JSON values that differ between the kinds
    id_prefix = ""
    object_type = ""
    chunk_object_type = ""

    def complete_choice(self, whole: TextDelta) -> dict[str, Any]:
        """Return the choice of a sequence from a delta with its whole text; in this class NotImplementedError."""
        raise NotImplementedError

    def format_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Return log-probabilities as JSON data; in this class NotImplementedError."""
        raise NotImplementedError

    def initial_choices(self) -> list[dict[str, Any]]:
        """Return the choices that begin a stream, one for each chunk, or []; in this class NotImplementedError."""
        raise NotImplementedError

    def delta_choices(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the choices of a delta in a stream, one for each chunk; in this class NotImplementedError."""
        raise NotImplementedError

    # ---------------------------------------------------------------- common to both kinds
    def choice(
        self, index: int, content: dict[str, Any], logprobs: list[TokenLogprob] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        """Return an element of "choices": index, the fields of `content`, logprobs or None, and finish_reason."""
        has_logprobs = logprobs is not None and self.request.n_top_logprobs is not None
        logprobs_json = self.format_logprobs(logprobs or []) if has_logprobs else None
        return {"index": index, **content, "logprobs": logprobs_json, "finish_reason": finish_reason}

    def common_fields(self, object_type: str) -> dict[str, Any]:
        """Return id, object type, creation time, model and fingerprint, with which a response and its chunks begin."""
        return {
            "id": f"{self.id_prefix}-{self.id}",
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"tricycle-{tricycle.__version__}",
        }

    def usage(self, n_completion_tokens: int) -> dict[str, Any]:
        """Return prompt, completion, total and cached token counts; a prompt with several sequences counts once."""
        prompt_lengths = {id(sequence.prompt): len(sequence.prompt) for sequence in self.sequences}
        n_prompt_tokens = sum(prompt_lengths.values())
        return {
            "prompt_tokens": n_prompt_tokens,
            "completion_tokens": n_completion_tokens,
            "total_tokens": n_prompt_tokens + n_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.engine_request.n_cached_tokens},
        }

    async def collect(self) -> dict[str, Any]:
        """Wait for all sequences; return the body: the common fields, "choices" in order of index, and "usage".

        Raises:
            ApiError, RequestCancelled: as for `EngineRequest.outputs`.
        """
        deltas = [delta async for batch in self.engine_request.outputs() for delta in batch]
        choices = []
        for index in range(len(self.sequences)):
            own = [delta for delta in deltas if delta.sequence_index == index]
            text = "".join(delta.text for delta in own)
            logprobs = [entry for delta in own for entry in delta.logprobs]
            choices.append(self.complete_choice(own[-1]._replace(text=text, logprobs=logprobs)))
        n_completion_tokens = sum(delta.n_tokens for delta in deltas)
        return {**self.common_fields(self.object_type), "choices": choices, "usage": self.usage(n_completion_tokens)}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: initial choices, deltas, the token counts if requested, and [DONE].

        Raises:
            ApiError, RequestCancelled: as for `EngineRequest.outputs`.
        """
        common = self.common_fields(self.chunk_object_type)
        if self.request.include_usage:
            common["usage"] = None
        n_completion_tokens = 0
        for choice in self.initial_choices():
            yield format_event({**common, "choices": [choice]})
        async for deltas in self.engine_request.outputs():
            n_completion_tokens += sum(delta.n_tokens for delta in deltas)
            for delta in merge_deltas(deltas):
                choices = self.delta_choices(delta)
                yield b"".join(format_event({**common, "choices": [choice]}) for choice in choices)
        if self.request.include_usage:
            yield format_event({**common, "choices": [], "usage": self.usage(n_completion_tokens)})
        yield DONE_EVENT

    def error_event(self, error: ApiError) -> bytes:
        """Return the last server-sent event of a stream that an error ends."""
        return format_event(error.body())


def merge_deltas(deltas: list[TextDelta]) -> list[TextDelta]:
    """Return deltas with consecutive ones of a sequence merged up to MAX_MERGED_TOKENS tokens, for fewer chunks."""
    merged: list[TextDelta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.n_tokens + delta.n_tokens <= MAX_MERGED_TOKENS
            and last.sequence_index == delta.sequence_index
            and last.finish_reason is None
        ):
            text, logprobs = last.text + delta.text, last.logprobs + delta.logprobs
            merged[-1] = delta._replace(text=text, logprobs=logprobs, n_tokens=last.n_tokens + delta.n_tokens)
        else:
            merged.append(delta)
    return merged


@dataclass
class ChatCompletionResponse(CompletionResponse):
    """The response of /v1/chat/completions: a message of the assistant."""

    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)  # of streamed sequences

    id_prefix = "chatcmpl"
    object_type = "chat.completion"
    chunk_object_type = "chat.completion.chunk"

    def complete_choice(self, whole: TextDelta) -> dict[str, Any]:
        """Return a choice with the message: role, content (None or what precedes calls), refusal, any tool calls."""
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        finish_reason = whole.finish_reason
        if self.request.tools is not None:
            parser = self.request.tools.parser()
            before = parser.push(whole.text)
            rest, calls = parser.finish()
            if calls:
                message |= {"content": before.strip() or None, "tool_calls": calls}
                finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
            else:
                message["content"] = before + rest
        return self.choice(whole.sequence_index, {"message": message}, whole.logprobs, finish_reason)

    def initial_choices(self) -> list[dict[str, Any]]:
        """Return one choice per sequence, with the role and no text."""
        content = {"delta": {"role": "assistant", "content": ""}}
        return [self.choice(index, content, None, None) for index in range(len(self.sequences))]

    def delta_choices(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return a choice for each chunk: text or log-probabilities, tool calls and finish reason, if there are any."""
        index, text, finish_reason = delta.sequence_index, delta.text, delta.finish_reason
        calls: list[dict[str, Any]] = []
        if self.request.tools is not None:
            parser = self._parsers.setdefault(index, self.request.tools.parser())
            text = parser.push(text)
            if finish_reason is not None:
                rest, calls = parser.finish()
                text += rest
        choices: list[dict[str, Any]] = []
        if text or delta.logprobs:
            choices.append(self.choice(index, {"delta": {"content": text}}, delta.logprobs, None))
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            choices.append(self.choice(index, {"delta": {"tool_calls": numbered}}, None, None))
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        if finish_reason is not None:
            choices.append(self.choice(index, {"delta": {}}, None, finish_reason))
        return choices

    def format_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Return {"content": [{"token", "logprob", "bytes", "top_logprobs"} of each token], "refusal": None}."""

        def format_token(token: int, logprob: float | None) -> dict[str, Any]:
            text, token_bytes = self.decode_token(token)
            return {"token": text, "logprob": logprob, "bytes": token_bytes}

        content = []
        for entry in logprobs:
            top_logprobs = [format_token(token, logprob) for token, logprob in entry.top_logprobs or ()]
            content.append({**format_token(entry.token, entry.logprob), "top_logprobs": top_logprobs})
        return {"content": content, "refusal": None}


class TextCompletionResponse(CompletionResponse):
    """The response of /v1/completions: a continuation of each prompt."""

    id_prefix = "cmpl"
    object_type = "text_completion"
    chunk_object_type = "text_completion"

    def complete_choice(self, whole: TextDelta) -> dict[str, Any]:
        """Return a choice with the text, after its prompt if `echo` is set."""
        (choice,) = self.delta_choices(whole._replace(text=self._echoed_prompt(whole.sequence_index) + whole.text))
        return choice

    def initial_choices(self) -> list[dict[str, Any]]:
        """Return a choice with the prompt for each sequence if `echo` is set and it is not empty; else []."""
        prompts = [(index, self._echoed_prompt(index)) for index in range(len(self.sequences))]
        return [self.choice(index, {"text": prompt}, [], None) for index, prompt in prompts if prompt]

    def delta_choices(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return a list of one choice with index, new text, logprobs (None unless requested) and finish_reason."""
        return [self.choice(delta.sequence_index, {"text": delta.text}, delta.logprobs, delta.finish_reason)]

    def _echoed_prompt(self, index: int) -> str:
        """Return the prompt before the text of a sequence; "" if it is not echoed."""
        return self.prefixes[index // self.request.n] if self.prefixes else ""

    def format_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Return {"tokens", "token_logprobs", "top_logprobs" (list of dicts or None), "text_offset"} of the tokens."""
        top_logprobs: list[dict[str, float] | None] = []
        for entry in logprobs:
            texts: dict[str, float] = {}
            for token, logprob in entry.top_logprobs or ():
                # Several parts of characters have the text U+FFFD; it gets the logprob of the most probable one.
                texts.setdefault(self.decode_token(token)[0], logprob)
            top_logprobs.append(texts or None)
        return {
            "tokens": [self.decode_token(entry.token)[0] for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": top_logprobs if self.request.n_top_logprobs else None,
            "text_offset": [entry.text_offset for entry in logprobs],
        }
