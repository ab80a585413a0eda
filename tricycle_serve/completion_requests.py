"""Parsing and validation of requests for text: chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle_serve.errors import ApiError
from tricycle_serve.guides import Guide, parse_guide
from tricycle_serve.request_fields import RequestFields, format_value, replace_surrogates
from tricycle_serve.tools import Tools, parse_message_calls, parse_tools

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_SEQUENCES = 64  # per request
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 500
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 2**31  # of the request field; the server applies a lower limit
MAX_MESSAGES = 4096
MAX_LOGIT_BIASES = 1024
TEXT_PARTS = ("text", "input_text", "output_text")  # the latter two in the Responses API
ROLES = ("system", "developer", "user", "assistant", "tool")
# These fields identify the user or concern storage and scheduling, so they do not affect the response.
IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
DEPRECATED = "tools have replaced it"
TEXT_ONLY = "responses are plain text or tool calls"


@dataclass(frozen=True)
class SequenceRequest:
    """The request for one generated sequence.

    Attributes:
        prompt: token ids. Sequences with the same prompt share one list object.
        max_tokens: maximum number of new tokens.
        stop_strings: strings that end the sequence.
        n_top_logprobs: number of most probable tokens that are reported with each token; None for no log-probabilities.
        echoed_text: the text of the prompt, if it is returned with log-probabilities of its tokens.
    """

    prompt: list[int]
    max_tokens: int
    sampling: PenalizedSamplingParams
    stop_strings: tuple[str, ...] = ()
    n_top_logprobs: int | None = None
    echoed_text: str | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """The validated fields of a request for text, without its prompts.

    Attributes:
        max_tokens: None for no limit but the server's and the context window.
        n_top_logprobs: see `SequenceRequest`.
        n: number of sequences per prompt.
        include_usage: whether a stream ends with the token counts.
        echo: whether the returned text includes the prompt.
        guide: the constraint that the text must match; None without one.
        tools: the tools of a chat request.
    """

    max_tokens: int | None
    sampling: PenalizedSamplingParams
    stop_strings: tuple[str, ...]
    n_top_logprobs: int | None
    n: int
    stream: bool
    include_usage: bool
    echo: bool = False
    guide: Guide | None = None
    tools: Tools | None = None

    @property
    def has_prompt_logprobs(self) -> bool:
        """Return whether prompt tokens' log-probabilities are returned: they and `echo` were requested."""
        return self.echo and self.n_top_logprobs is not None

    def sequence_requests(
        self, prompts: list[list[int]], max_tokens: int, context_window: int, texts: Sequence[str] = ()
    ) -> list[SequenceRequest]:
        """Return `n` requests per prompt, max_tokens cut to fit the window; ApiError if too many or no room.

        Args:
            prompts: token ids.
            max_tokens: the server's limit for new tokens of a sequence.
            context_window: maximum number of tokens of a prompt and its continuation.
            texts: the text of each prompt, if `has_prompt_logprobs`.
        """
        n_sequences = len(prompts) * self.n
        if n_sequences > MAX_SEQUENCES:
            raise ApiError(f"expected at most {MAX_SEQUENCES} texts per request, got {n_sequences}", param="n")
        limit = max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)
        requests: list[SequenceRequest] = []
        longest = context_window - min(limit, 1)
        for i, prompt in enumerate(prompts):
            if len(prompt) > longest:
                expected = f"expected a prompt of at most {longest}, got {len(prompt)}"
                message = f"the context window has {context_window} tokens: {expected}"
                raise ApiError(message, code="context_length_exceeded")
            n_tokens = min(limit, context_window - len(prompt))
            text = texts[i] if self.has_prompt_logprobs else None
            for _ in range(self.n):
                sampling = self.sampling.for_text(len(requests))
                output = (self.stop_strings, self.n_top_logprobs, text)
                requests.append(SequenceRequest(prompt, n_tokens, sampling, *output))
        return requests


def parse_completion_request(
    fields: RequestFields, default_sampling: PenalizedSamplingParams, is_chat: bool
) -> CompletionRequest:
    """Parse a completion's remaining fields, after messages or prompt; ApiError if one is invalid or unknown."""
    stream = fields.get_bool("stream")
    include_usage = _parse_stream_options(fields, stream)
    fields.ignore(*IGNORED_FIELDS)
    n = fields.get_int("n", 1, 1, MAX_CHOICES)
    n_top_logprobs = _parse_chat_logprobs(fields) if is_chat else fields.get_int("logprobs", None, 0, MAX_TOP_LOGPROBS)
    echo = not is_chat and fields.get_bool("echo")
    max_tokens = fields.get_int("max_tokens", None, 0 if echo else 1, MAX_TOKENS)
    if is_chat:
        max_completion_tokens = fields.get_int("max_completion_tokens", None, 1, MAX_TOKENS)
        if max_completion_tokens is not None and max_tokens is not None and max_completion_tokens != max_tokens:
            raise ApiError("expected max_tokens or max_completion_tokens, got both", param="max_tokens")
        max_tokens = max_tokens if max_completion_tokens is None else max_completion_tokens
    stop_strings = _parse_stop_strings(fields)
    sampling = _parse_sampling(fields, default_sampling)
    guide, tools = parse_guide(fields), parse_tools(fields) if is_chat else None
    if tools is not None and (call := tools.guide()) is not None:
        if guide is not None:
            message = f"expected {guide.param} or a tool_choice that forces a call, got both"
            raise ApiError(message, param="tool_choice")
        guide = call
    if not is_chat:
        max_tokens = 16 if max_tokens is None else max_tokens  # the default of OpenAI's API
    fields.reject_unknown()
    output = (stop_strings, n_top_logprobs, n, stream, include_usage, echo)
    return CompletionRequest(max_tokens, sampling, *output, guide, tools)


def _parse_stream_options(fields: RequestFields, stream: bool) -> bool:
    """Return whether the stream ends with token counts; ApiError for invalid options or options without `stream`."""
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        fields.reject("stream_options", "an object")
    if not stream:
        raise ApiError("expected stream_options only with stream: true", param="stream_options")
    option_fields = RequestFields(options)
    option_fields.ignore("include_obfuscation")
    include_usage = option_fields.get_bool("include_usage")
    option_fields.reject_unknown()
    return include_usage


def _parse_chat_logprobs(fields: RequestFields) -> int | None:
    """Return `top_logprobs` (0 if absent), or None if `logprobs` is not true; raise ApiError if invalid."""
    has_logprobs = fields.get_bool("logprobs")
    n = fields.get_int("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if n and not has_logprobs:
        raise ApiError("expected logprobs to be true, because top_logprobs is set", param="top_logprobs")
    return n if has_logprobs else None


def _parse_stop_strings(fields: RequestFields) -> tuple[str, ...]:
    """Return the different stop strings, () if absent; ApiError if too many, empty or too long."""
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOP_STRINGS or not all(isinstance(stop, str) for stop in stops):
        fields.reject("stop", f"a string, or a list of at most {MAX_STOP_STRINGS} strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ApiError(f"expected stop strings of 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return tuple(dict.fromkeys(map(replace_surrogates, stops)))


def _parse_sampling(fields: RequestFields, default: PenalizedSamplingParams) -> PenalizedSamplingParams:
    """Return `default` with its values replaced by those of the request; raise ApiError if invalid."""
    changes: dict[str, Any] = {
        "temperature": fields.get_float("temperature", None, 0, 2),
        "top_p": fields.get_float("top_p", None, 0, 1),
        "presence_penalty": fields.get_float("presence_penalty", None, -2, 2),
        "frequency_penalty": fields.get_float("frequency_penalty", None, -2, 2),
        "logit_bias": _parse_logit_bias(fields, default.n_vocab),
        "top_k": fields.get_int("top_k", None, 0, 2**31),
        "min_p": fields.get_float("min_p", None, 0, 1),
        "repetition_penalty": fields.get_float("repetition_penalty", None, 0.01, 100),
    }
    seed = fields.get_int("seed", None, -(2**63), 2**63 - 1)
    if changes["top_p"] == 0:  # only the most probable token, as in other servers
        changes["top_p"] = 1e-9
    if seed is not None:
        changes["seed"] = seed % 2**64
    return replace(default, **{name: value for name, value in changes.items() if value is not None})


def _parse_logit_bias(fields: RequestFields, n_vocab: int | None) -> tuple[tuple[int, float], ...] | None:
    """Return (token id, bias) pairs, None if absent; ApiError for unknown ids, or biases outside -100 to 100."""
    biases = fields.get("logit_bias")
    if biases is None:
        return None
    if not isinstance(biases, dict) or len(biases) > MAX_LOGIT_BIASES:
        fields.reject("logit_bias", f"an object of at most {MAX_LOGIT_BIASES} token ids")
    pairs = []
    for token, bias in biases.items():
        is_id = token.isascii() and token.isdecimal() and len(token) < 10 and (n_vocab is None or int(token) < n_vocab)
        is_bias = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not is_id or not is_bias:
            expected = "expected logit_bias to map token ids to numbers from -100 to 100"
            raise ApiError(f"{expected}, got {format_value(token)}: {format_value(bias)}", param="logit_bias")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


# -------------------------------------------------------------------- messages and prompts
def parse_messages(fields: RequestFields) -> list[dict[str, Any]]:
    """Return a chat request's messages as `role` and `content`, perhaps `tool_calls`; raise ApiError if invalid.

    Raises:
        ApiError: an invalid message, or content other than text.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        fields.reject("messages", f"a list of 1 to {MAX_MESSAGES} messages")
    fields.allow_only("functions", ([],), DEPRECATED)
    fields.allow_only("function_call", ("none", "auto"), DEPRECATED)
    fields.allow_only("modalities", (["text"],), TEXT_ONLY)
    return [parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def parse_message(message: Any, path: str) -> dict[str, Any]:
    """Return a message's role ("developer" as "system"), text and tool calls; ApiError if invalid, at `path`."""
    if not isinstance(message, dict):
        raise ApiError(f"expected {path} to be an object, got {format_value(message)}", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        expected = f"expected {path}.role to be one of {', '.join(ROLES)}, got {format_value(role)}"
        raise ApiError(expected, param=f"{path}.role")
    for name in ("function_call", "audio"):
        if message.get(name):
            raise ApiError(f"{path}.{name} is not supported: {TEXT_ONLY}", param=f"{path}.{name}")
    calls = parse_message_calls(message, path) if role == "assistant" else []
    content = "" if calls and message.get("content") is None else _parse_content(message.get("content"), path)
    parsed: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    return parsed | {"tool_calls": calls} if calls else parsed


def _parse_content(content: Any, path: str) -> str:
    """Return a text: a string, or the joined texts of a list's parts; raise ApiError for any other content."""
    if isinstance(content, str):
        return replace_surrogates(content)
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not (isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)):
            expected = f"expected {path}.content to be a string, or a list of parts of type text"
            raise ApiError(f"{expected}, got {format_value(part)}", param=f"{path}.content")
        texts.append(replace_surrogates(part["text"]))
    return "".join(texts)


def parse_prompts(fields: RequestFields, n_vocab: int) -> list[str | list[int]]:
    """Return a list of a completion's prompts, strings or id lists, [""] if missing; ApiError if wrong or unsupported.

    Raises:
        ApiError: an invalid prompt, or an unsupported field.
    """
    fields.allow_only("suffix", ("",), "text is only generated after a prompt")
    best_of = fields.get("best_of")
    if best_of is not None and best_of != fields.get("n", 1):
        raise ApiError("best_of is not supported, unless it equals n", param="best_of", code="unsupported_parameter")
    prompt = fields.get("prompt", "")
    expected = f"a string, a list of 1 to {MAX_PROMPTS} strings, or token ids"
    if isinstance(prompt, str):
        return [replace_surrogates(prompt)]
    if not isinstance(prompt, list) or not prompt:
        fields.reject("prompt", expected)
    prompts = [prompt] if all(type(token) is int for token in prompt) else prompt
    if len(prompts) > MAX_PROMPTS:
        fields.reject("prompt", expected)
    for item in prompts:
        are_ids = isinstance(item, list) and item and all(type(token) is int and 0 <= token < n_vocab for token in item)
        if not isinstance(item, str) and not are_ids:
            raise ApiError(f"expected prompt to be {expected} below {n_vocab}", param="prompt")
    return [replace_surrogates(item) if isinstance(item, str) else item for item in prompts]
