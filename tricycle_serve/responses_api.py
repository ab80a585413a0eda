"""OpenAI's Responses API on top of chat completions: requests as chat messages, and chat output as output items.

The server keeps no responses: clients send the earlier items of a conversation in `input`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tricycle_serve.completion_requests import IGNORED_FIELDS, MAX_MESSAGES, MAX_TOKENS, parse_message
from tricycle_serve.errors import ApiError, encode_json
from tricycle_serve.output_processor import TokenLogprob
from tricycle_serve.request_fields import RequestFields, format_value
from tricycle_serve.responses import ChatCompletionResponse, merge_deltas
from tricycle_serve.tools import ToolCallParser

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
STATELESS = "the server keeps no responses; send the earlier items of the conversation in input"
# Fields that have the same name and meaning in chat completions, those of this server included.
CHAT_FIELDS = (
    "frequency_penalty grammar logit_bias min_p model parallel_tool_calls presence_penalty regex repetition_penalty "
    "seed stop stream stream_options temperature tool_choice top_k top_logprobs top_p"
).split()
# Names in messages of chat completions, and in this API.
RENAMED = {"response_format.json_schema": "text.format", "response_format": "text.format", ".function.": "."}


class ResponsesRequest(NamedTuple):
    """A request of the Responses API.

    Attributes:
        chat: the fields of the equivalent chat request without messages.
        messages: as of `parse_messages`.
        shown: fields of the request that the response repeats.
    """

    chat: dict[str, Any]
    messages: list[dict[str, Any]]
    shown: dict[str, Any]


def parse_responses_request(fields: RequestFields) -> ResponsesRequest:
    """Return the equivalent chat request; ApiError for a field that is invalid or unknown or needs stored responses."""
    fields.allow_only("previous_response_id", (), STATELESS)
    fields.allow_only("conversation", (), STATELESS)
    fields.allow_only("background", (False,), STATELESS)
    fields.allow_only("prompt", (), "prompts are not stored")
    fields.allow_only("truncation", ("disabled",), "the input must fit into the context window")
    fields.allow_only("store", (False,), STATELESS)
    reasoning = _inner_fields(fields, "reasoning")
    for name in ("effort", "summary", "generate_summary"):
        reasoning.allow_only(f"reasoning.{name}", ("none",), "the text contains any reasoning of the model")
    reasoning.reject_unknown()
    fields.ignore(*IGNORED_FIELDS, "prompt_cache_retention")
    chat = {name: value for name in CHAT_FIELDS if (value := fields.get(name)) is not None}
    tools, choice = fields.get("tools", []), chat.get("tool_choice", "auto")
    chat["tools"] = [_nested(tool) for tool in tools] if isinstance(tools, list) else tools
    chat["tool_choice"] = _nested(choice)
    chat["max_tokens"] = fields.get_int("max_output_tokens", None, 1, MAX_TOKENS)
    included = fields.get("include", [])
    if not isinstance(included, list) or not all(name in INCLUDED for name in included):
        fields.reject("include", f"a list of {' and '.join(INCLUDED)}")
    chat["logprobs"] = LOGPROBS in included or "top_logprobs" in chat
    text_format = _parse_text_format(fields)
    described = {name: value for name, value in text_format.items() if name != "type"}
    nested = {"json_schema": described} if text_format["type"] == "json_schema" else described
    chat["response_format"] = {"type": text_format["type"], **nested}
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        fields.reject("metadata", "an object of strings")
    shown = {
        "instructions": fields.get_str("instructions"),
        "max_output_tokens": chat["max_tokens"],
        "max_tool_calls": fields.get_int("max_tool_calls", None, 1, MAX_TOKENS),  # of built-in tools: none here
        "metadata": metadata,
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "text": {"format": text_format},
        "tool_choice": choice,
        "tools": tools,
        "top_logprobs": chat.get("top_logprobs", 0),
    }
    messages = _parse_input(fields)
    fields.reject_unknown()
    return ResponsesRequest(chat, messages, shown)


def _nested(tool: Any) -> Any:
    """Return a tool or a choice of a tool, whose function's fields are on its level here, in the form of chat."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _parse_text_format(fields: RequestFields) -> dict[str, Any]:
    """Return the object `text.format`, {"type": "text"} if it is absent; ApiError if invalid."""
    inner = _inner_fields(fields, "text")
    inner.allow_only("text.verbosity", ("medium",), "instructions can ask for a short or long text")
    text_format = inner.get("text.format", {"type": "text"})
    if not isinstance(text_format, dict) or not isinstance(text_format.get("type"), str):
        inner.reject("text.format", "an object with a type")
    inner.reject_unknown()
    return text_format


def _inner_fields(fields: RequestFields, name: str) -> RequestFields:
    """Return the fields of the object field `name` as "name.field", none if it is absent; ApiError if no object."""
    value = fields.get(name, {})
    if not isinstance(value, dict):
        fields.reject(name, "an object")
    return RequestFields({f"{name}.{inner}": each for inner, each in value.items()})


def _parse_input(fields: RequestFields) -> list[dict[str, Any]]:
    """Return the chat messages of `instructions` and `input`; ApiError if invalid."""
    instructions, items = fields.get_str("instructions"), fields.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not 0 < len(items) <= MAX_MESSAGES:
        fields.reject("input", f"a string, or a list of 1 to {MAX_MESSAGES} items")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    for i, item in enumerate(items):
        message = parse_message(_to_message(item, f"input[{i}]"), f"input[{i}]")
        calls = message.get("tool_calls", [])
        if calls and not message["content"] and messages and messages[-1]["role"] == "assistant":
            # A text and calls, or several calls, are separate items here, and one message in chat templates.
            messages[-1] = {**messages[-1], "tool_calls": messages[-1].get("tool_calls", []) + calls}
        else:
            messages.append(message)
    return messages


def _to_message(item: Any, path: str) -> Any:
    """Return an input item as a chat message with unvalidated values; ApiError if its type is unknown."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        return item
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    expected = f"expected {path}.type to be message, function_call or function_call_output"
    raise ApiError(f"{expected}, got {format_value(kind)}", param=f"{path}.type")


def renamed_error(error: ApiError) -> ApiError:
    """Return a new error whose message and parameter name this API's fields instead of the chat API's."""
    message, param = str(error), error.param
    for name, other in RENAMED.items():
        message, param = message.replace(name, other), param and param.replace(name, other)
    message, param = re.sub(r"\bmessages\b", "input", message), "input" if param == "messages" else param
    return ApiError(message, error.status, param, error.code, error.retry_after_seconds)


@dataclass
class ResponsesResponse(ChatCompletionResponse):
    """The response of /v1/responses: output items of one sequence, a message and function calls.

    Args:
        shown: fields of the request that the response repeats.
    """

    shown: dict[str, Any] = field(default_factory=dict)
    _n_sent: int = 0  # streamed events

    # ---------------------------------------------------------------- complete or streamed
    async def collect(self) -> dict[str, Any]:
        """Wait for the sequence; return the response object.

        Raises:
            ApiError, RequestCancelled: as for `EngineRequest.outputs`.
        """
        async for event in self._events():
            last = event
        return last["response"]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the API's server-sent events.

        Raises:
            ApiError, RequestCancelled: as for `EngineRequest.outputs`.
        """
        async for event in self._events():
            yield _format_event(event, self._n_sent)
            self._n_sent += 1

    def error_event(self, error: ApiError) -> bytes:
        """Return the event `response.failed` with the error."""
        failure = {"code": error.code or "server_error", "message": str(error)}
        return _format_event(self._response_event("failed", error=failure), self._n_sent)

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events without their numbers; the last one contains the complete response."""
        for status in ("created", "in_progress"):
            yield self._response_event(status)
        message = _MessageEvents(self)
        parser = ToolCallParser([]) if self.request.tools is None else self.request.tools.parser()
        n_tokens, finish_reason = 0, None
        async for deltas in self.engine_request.outputs():
            for delta in merge_deltas(deltas):
                n_tokens += delta.n_tokens
                finish_reason = delta.finish_reason or finish_reason
                text = delta.text if self.request.tools is None else parser.push(delta.text)
                for event in message.push(text, delta.logprobs):
                    yield event
        rest, calls = parser.finish()
        status = "incomplete" if finish_reason == "length" else "completed"
        for event in message.finish(rest, status, is_needed=not calls):
            yield event
        output = [*message.items]
        for call in calls:
            for event in _call_events(call, len(output)):
                yield event
            output.append(event["item"])
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        yield self._response_event(status, output=output, usage=self._usage(n_tokens), incomplete_details=reason)

    def _response_event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Return the event "response.EVENT" with the response object, of which `fields` override entries."""
        response = {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": "in_progress" if event == "created" else event,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "temperature": self.request.sampling.temperature,
            "top_p": self.request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            **self.shown,
            **fields,
        }
        return {"type": f"response.{event}", "response": response}

    def _usage(self, n_tokens: int) -> dict[str, Any]:
        """Return the token counts under the names of the Responses API, with `n_tokens` of output."""
        usage = self.usage(n_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": n_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def logprobs_list(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """Return tokens' log-probabilities as a list of objects; [] for no tokens."""
        return self.format_logprobs(list(logprobs))["content"]


class _MessageEvents:
    """The events of the message with the generated text, which begins with its first character.

    Attributes:
        items: the finished message, or an empty list.
    """

    def __init__(self, response: ResponsesResponse) -> None:
        self.items: list[dict[str, Any]] = []
        self._response = response
        self._id = f"msg_{response.id}"
        self._place = {"item_id": self._id, "output_index": 0, "content_index": 0}
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._held_logprobs: list[dict[str, Any]] = []
        self._has_begun = False

    def push(self, text: str, logprobs: Iterable[TokenLogprob] = ()) -> Iterator[dict[str, Any]]:
        """Yield the events of further text; keep the log-probabilities of held-back text until it is sent."""
        self._held_logprobs += self._response.logprobs_list(logprobs)
        if not text:
            return
        yield from self._begin()
        entries, self._held_logprobs = self._held_logprobs, []
        self._text += text
        self._logprobs += entries
        yield {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": entries}

    def _begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events that add the message and its text part, at the first call only."""
        if not self._has_begun:
            self._has_begun = True
            added = {"output_index": 0, "item": self._item("in_progress", [])}
            yield {"type": "response.output_item.added", **added}
            yield {"type": "response.content_part.added", **self._place, "part": self._part()}

    def finish(self, text: str, status: str, is_needed: bool) -> Iterator[dict[str, Any]]:
        """Yield the events of the last text, and of the message's end; none for a message that is empty and not needed.

        Args:
            status: "completed" or "incomplete".
        """
        yield from self.push(text)
        if not self._has_begun and not is_needed:
            return
        yield from self._begin()
        self.items = [self._item(status, [self._part()])]
        yield {"type": "response.output_text.done", **self._place, "text": self._text, "logprobs": self._logprobs}
        yield {"type": "response.content_part.done", **self._place, "part": self._part()}
        yield {"type": "response.output_item.done", "output_index": 0, "item": self.items[0]}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the message as an output item: id, type, role, status and content."""
        return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        """Return the text so far, with its log-probabilities, as an `output_text` content part."""
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}


def _call_events(call: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a function call; the last one has the complete item."""
    function, item_id = call["function"], call["id"].replace("call_", "fc_")
    item = {"id": item_id, "type": "function_call", "call_id": call["id"], **function, "status": "completed"}
    place = {"item_id": item_id, "output_index": index}
    begun = {**item, "arguments": "", "status": "in_progress"}
    arguments = function["arguments"]
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
    yield {"type": "response.function_call_arguments.done", **place, "name": function["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _format_event(event: dict[str, Any], number: int) -> bytes:
    """Return an event as the bytes of a server-sent event: "event: TYPE", and "data:" with its sequence number."""
    data = encode_json({**event, "sequence_number": number})
    return b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n"
