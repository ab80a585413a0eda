"""What a request for text asks for, in words that the model's thread understands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle_serve.errors import ApiError
from tricycle_serve.fields import Fields, clean, shown

MOST_CHOICES = 16
MOST_PROMPTS = 64
MOST_TEXTS = 64  # of a request
MOST_STOPS = 16
MOST_STOP = 500  # characters of a text that ends an answer
MOST_LOGPROBS = 20
MOST_TOKENS = 2**31  # that may be asked for; a server has a limit of its own
MOST_MESSAGES = 4096
MOST_BIASES = 1024
ROLES = ("system", "developer", "user", "assistant")
# What says who asks, or what to do with the answer elsewhere.
OF_NO_BEARING = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
NO_TOOLS = "this server calls no tools"


@dataclass(frozen=True)
class Order:
    """One text to be written.

    Attributes:
        prompt: ids. Texts that go on from the same prompt have the same list.
        n_tokens: the most to draw.
        stops: texts that end it.
        n_rivals: of how many tokens to tell the probabilities beside that of the one drawn; None for no probabilities.
    """

    prompt: list[int]
    n_tokens: int
    sampling: PenalizedSamplingParams
    stops: tuple[str, ...] = ()
    n_rivals: int | None = None


@dataclass(frozen=True)
class Wish:
    """What the fields of a request say, before prompts are ids.

    Attributes:
        n_tokens: None for as many as there is room for.
        n: texts of each prompt.
        usage: whether a stream ends with the number of tokens.
        echo: whether the prompt is part of the answer.
    """

    n_tokens: int | None
    sampling: PenalizedSamplingParams
    stops: tuple[str, ...]
    n_rivals: int | None
    n: int
    stream: bool
    usage: bool
    echo: bool = False

    def orders(self, prompts: list[list[int]], most: int, window: int) -> list[Order]:
        """One for each text.

        Args:
            most: tokens of an answer, whatever is asked for.
            window: tokens of a prompt and its answer.

        Raises:
            ApiError: a prompt that leaves no room for an answer, or too many texts.
        """
        if len(prompts) * self.n > MOST_TEXTS:
            raise ApiError(f"expected at most {MOST_TEXTS} texts of a request, got {len(prompts) * self.n}", param="n")
        wanted = most if self.n_tokens is None else min(self.n_tokens, most)
        every: list[Order] = []
        for prompt in prompts:
            if len(prompt) >= window:
                wanted_prompt = f"expected a prompt of at most {window - 1}, got {len(prompt)}"
                message = f"the context has {window} tokens: {wanted_prompt}"
                raise ApiError(message, code="context_length_exceeded")
            n_tokens = min(wanted, window - len(prompt))
            for _ in range(self.n):
                way = self.sampling.for_text(len(every))
                every.append(Order(prompt, n_tokens, way, self.stops, self.n_rivals))
        return every


def wish_of(fields: Fields, sampling: PenalizedSamplingParams, chat: bool) -> Wish:
    """The fields that both kinds of requests have; all others must have been taken before.

    Args:
        sampling: how the model writes where the request says nothing.

    Raises:
        ApiError: names the field that is wrong.
    """
    stream = fields.flag("stream")
    usage = _usage(fields, stream)
    fields.ignore(*OF_NO_BEARING)
    n = fields.whole("n", 1, 1, MOST_CHOICES)
    n_rivals = _rivals_of_chat(fields) if chat else fields.whole("logprobs", None, 0, MOST_LOGPROBS)
    n_tokens = fields.whole("max_tokens", None, 1, MOST_TOKENS)
    if chat:
        newer = fields.whole("max_completion_tokens", None, 1, MOST_TOKENS)
        if newer is not None and n_tokens is not None and newer != n_tokens:
            raise ApiError("expected max_tokens or max_completion_tokens, got both", param="max_tokens")
        n_tokens = n_tokens if newer is None else newer
    stops = _stops(fields)
    way = _sampling(fields, sampling)
    echo = False
    if not chat:
        echo = fields.flag("echo")
        n_tokens = 16 if n_tokens is None else n_tokens  # as OpenAI has it
        if echo and n_rivals is not None:
            raise ApiError("echo with logprobs is not supported", param="echo", code="unsupported_parameter")
    fields.expect_no_more()
    return Wish(n_tokens, way, stops, n_rivals, n, stream, usage, echo)


def _usage(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        fields.refuse("stream_options", "an object")
    if not stream:
        raise ApiError("expected stream_options with stream alone", param="stream_options")
    inner = Fields(options)
    inner.ignore("include_obfuscation")
    usage = inner.flag("include_usage")
    inner.expect_no_more()
    return usage


def _rivals_of_chat(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    n = fields.whole("top_logprobs", 0, 0, MOST_LOGPROBS)
    if n and not wanted:
        raise ApiError("expected logprobs to be true where top_logprobs is given", param="top_logprobs")
    return n if wanted else None


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.take("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        fields.refuse("stop", f"a text, or a list of at most {MOST_STOPS} texts")
    if not all(0 < len(stop) <= MOST_STOP for stop in stops):
        raise ApiError(f"expected texts of 1 to {MOST_STOP} characters in stop", param="stop")
    return tuple(dict.fromkeys(map(clean, stops)))


def _sampling(fields: Fields, sampling: PenalizedSamplingParams) -> PenalizedSamplingParams:
    changes: dict[str, Any] = {
        "temperature": fields.number("temperature", None, 0, 2),
        "top_p": fields.number("top_p", None, 0, 1),
        "presence_penalty": fields.number("presence_penalty", None, -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", None, -2, 2),
        "logit_bias": _bias(fields, sampling.n_vocab),
        "top_k": fields.whole("top_k", None, 0, 2**31),
        "min_p": fields.number("min_p", None, 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", None, 0.01, 100),
    }
    seed = fields.whole("seed", None, -(2**63), 2**63 - 1)
    if changes["top_p"] == 0:  # the likeliest alone, as others read it
        changes["top_p"] = 1e-9
    if seed is not None:
        changes["seed"] = seed % 2**64
    return replace(sampling, **{name: value for name, value in changes.items() if value is not None})


def _bias(fields: Fields, n_vocab: int | None) -> tuple[tuple[int, float], ...] | None:
    biases = fields.take("logit_bias")
    if biases is None:
        return None
    if not isinstance(biases, dict) or len(biases) > MOST_BIASES:
        fields.refuse("logit_bias", f"an object of at most {MOST_BIASES} tokens")
    pairs = []
    for token, bias in biases.items():
        known = token.isascii() and token.isdecimal() and len(token) < 10 and (n_vocab is None or int(token) < n_vocab)
        sound = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not known or not sound:
            wanted = "expected logit_bias to be of ids of tokens and numbers from -100 to 100"
            raise ApiError(f"{wanted}, got {shown(token)}: {shown(bias)}", param="logit_bias")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


# -------------------------------------------------------------------- what to go on from
def messages_of(fields: Fields) -> list[dict[str, str]]:
    """A conversation, each message with a role and a text.

    Raises:
        ApiError: it is none, or has what no text is.
    """
    messages = fields.take("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        fields.refuse("messages", f"a list of 1 to {MOST_MESSAGES} messages")
    fields.only("tools", ([],), NO_TOOLS)
    fields.only("functions", ([],), NO_TOOLS)
    fields.only("tool_choice", ("none", "auto"), NO_TOOLS)
    fields.only("function_call", ("none", "auto"), NO_TOOLS)
    fields.only("response_format", ({"type": "text"},), "answers are plain text")
    fields.only("modalities", (["text"],), "answers are plain text")
    fields.ignore("parallel_tool_calls")
    return [_message(message, i) for i, message in enumerate(messages)]


def _message(message: Any, i: int) -> dict[str, str]:
    place = f"messages[{i}]"
    if not isinstance(message, dict):
        raise ApiError(f"expected {place} to be an object, got {shown(message)}", param=place)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        wanted = f"expected {place}.role to be one of {', '.join(ROLES)}, got {shown(role)}"
        raise ApiError(wanted, param=f"{place}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise ApiError(f"{place}.{name} is not supported: {NO_TOOLS}", param=f"{place}.{name}")
    return {"role": "system" if role == "developer" else role, "content": _content(message.get("content"), place)}


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return clean(content)
    texts = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            wanted = "a text, or a list of parts of type text"
            raise ApiError(f"expected {place}.content to be {wanted}, got {shown(part)}", param=f"{place}.content")
        texts.append(clean(part["text"]))
    return "".join(texts)


def prompts_of(fields: Fields, n_vocab: int) -> list[str | list[int]]:
    """Texts, or the ids of texts.

    Raises:
        ApiError: neither.
    """
    fields.only("suffix", ("",), "text is only written behind a prompt")
    best_of = fields.take("best_of")
    if best_of is not None and best_of != fields.take("n", 1):
        raise ApiError("best_of is not supported, unless it is n", param="best_of", code="unsupported_parameter")
    prompt = fields.take("prompt", "")
    wanted = f"a text, a list of 1 to {MOST_PROMPTS} texts, or ids of tokens"
    if isinstance(prompt, str):
        return [clean(prompt)]
    if not isinstance(prompt, list) or not prompt:
        fields.refuse("prompt", wanted)
    prompts = [prompt] if all(type(part) is int for part in prompt) else prompt
    if len(prompts) > MOST_PROMPTS:
        fields.refuse("prompt", wanted)
    for part in prompts:
        are_ids = isinstance(part, list) and part and all(type(token) is int and 0 <= token < n_vocab for token in part)
        if not isinstance(part, str) and not are_ids:
            raise ApiError(f"expected prompt to be {wanted} below {n_vocab}", param="prompt")
    return [clean(part) if isinstance(part, str) else part for part in prompts]
