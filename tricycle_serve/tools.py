"""Tools in chat requests, and the tool calls in generated text, in the format of Qwen's and Hermes's chat templates.

A model writes a call as `<tool_call>`, a line with a JSON object of `name` and `arguments`, and `</tool_call>`. Other
formats are not supported.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from tricycle.decoding.guided import JSON_OPTIONS
from tricycle_serve.errors import ApiError
from tricycle_serve.guides import Guide
from tricycle_serve.request_fields import STRICT_JSON, RequestFields, format_value

OPENING, CLOSING = "<tool_call>", "</tool_call>"
NO_TOOLS = "the model's chat template has no tools in the format <tool_call>"
MAX_TOOLS = 128
_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
_BEGIN = re.compile(rf"\s*{OPENING}\s*")
_END = re.compile(rf"\s*(?:{CLOSING}|\Z)")


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        functions: the validated tools, as the chat template receives them.
        forced: the functions of which the text must be a call; empty if the model chooses between a call and text.
        max_calls: maximum number of returned calls; None for no limit.
    """

    functions: list[dict[str, Any]]
    forced: list[dict[str, Any]]
    max_calls: int | None = None

    def parser(self) -> ToolCallParser:
        """Return a new parser of calls of these functions."""
        return ToolCallParser([tool["function"]["name"] for tool in self.functions], self.max_calls)

    def guide(self) -> Guide | None:
        """Return the guide for a text that is one call of a forced function; None without any."""
        if not self.forced:
            return None
        calls: list[str] = []
        schemas: list[str] = []
        for i, tool in enumerate(self.forced):
            name, parameters = tool["function"]["name"], tool["function"].get("parameters") or {"type": "object"}
            # The parameters are a document of their own, because their references begin at its root.
            schemas.append(f"arguments{i}: %json {json.dumps({**parameters, 'x-guidance': JSON_OPTIONS})}")
            calls.append(f'"{{\\"name\\": \\"{name}\\", \\"arguments\\": " arguments{i} "}}"')
        lines = [f'start: "{OPENING}\\n" ({" | ".join(calls)}) "\\n{CLOSING}"', *schemas]
        return Guide("tools", "grammar", "\n".join(lines))


def is_supported(chat_template: str) -> bool:
    """Return whether a chat template has tools in the format `<tool_call>`."""
    return "tools" in chat_template and OPENING in chat_template


def parse_tools(fields: RequestFields) -> Tools | None:
    """Return the tools of a chat request, None without any or with tool_choice "none"; ApiError if invalid."""
    values, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    is_parallel = fields.get_bool("parallel_tool_calls", True)
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        fields.reject("tools", f"a list of at most {MAX_TOOLS} tools")
    functions = [_parse_tool(value, f"tools[{i}]") for i, value in enumerate(values)]
    forced = functions if choice == "required" else []
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
        forced = [tool for tool in functions if tool["function"]["name"] == name]
        if not forced:
            fields.reject("tool_choice", "a function with the name of one of the tools")
    elif choice not in ("none", "auto", "required"):
        fields.reject("tool_choice", "none, auto, required or a function")
    elif choice == "required" and not functions:
        raise ApiError("expected tools, because tool_choice is required", param="tools")
    return Tools(functions, forced, None if is_parallel else 1) if functions and choice != "none" else None


def _parse_tool(value: Any, path: str) -> dict[str, Any]:
    """Return a tool as {type, function as given}; ApiError for a wrong type, unknown field, or bad name."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(f"expected {path} to be an object of type function, got {format_value(value)}", param=path)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = f"expected {path}.function.name to be of letters, digits, _ and -"
        raise ApiError(f"{expected}, got {format_value(name)}", param=f"{path}.function.name")
    about = RequestFields(function)
    about.get_str("description")
    if not isinstance(about.get("parameters", {}), dict):
        about.reject("parameters", "a JSON schema")
    about.ignore("name", "strict")
    about.reject_unknown()
    return {"type": "function", "function": function}


def parse_message_calls(message: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant's message with their arguments as objects; ApiError if invalid."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
        raise ApiError(f"expected {path}.tool_calls to be a list of at most {MAX_TOOLS} calls", param=path)
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        fields = function if isinstance(function, dict) else {}
        try:
            arguments = STRICT_JSON.decode(fields.get("arguments", ""))
        except (TypeError, ValueError, RecursionError):
            arguments = None
        if not isinstance(fields.get("name"), str) or not isinstance(arguments, dict):
            expected = "expected each of tool_calls to have a function with a name, and a JSON object as arguments"
            raise ApiError(f"{path}: {expected}", param=f"{path}.tool_calls")
        parsed.append({"type": "function", "function": {"name": fields["name"], "arguments": arguments}})
    return parsed


class ToolCallParser:
    """Separates the tool calls at the end of a generated text from the text before.

    Args:
        names: of the functions that may be called.
        max_calls: maximum number of calls; further ones are omitted.
    """

    def __init__(self, names: list[str], max_calls: int | None = None) -> None:
        self._names = names
        self._max_calls = max_calls
        self._text = ""
        self._n_sent = 0

    def push(self, text: str) -> str:
        """Add text; return what can be sent now, and hold back what may begin or follow the first tool call."""
        self._text += text
        start = self._text.find(OPENING)
        if start < 0:
            starts = range(max(0, len(self._text) - len(OPENING) + 1), len(self._text))
            start = next((i for i in starts if OPENING.startswith(self._text[i:])), len(self._text))
        sent, self._n_sent = self._text[self._n_sent : start], max(start, self._n_sent)
        return sent

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls in OpenAI's format; invalid or unknown calls are text."""
        rest, calls, end = self._text[self._n_sent :], [], 0
        while begin := _BEGIN.match(rest, end):
            try:
                value, end = STRICT_JSON.raw_decode(rest, begin.end())
                name, arguments = value["name"], value["arguments"]
            except (ValueError, TypeError, KeyError, RecursionError):
                return rest, []
            found = _END.match(rest, end)
            if found is None or name not in self._names or not isinstance(arguments, dict):
                return rest, []
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
            end = found.end()
        return ("", calls[: self._max_calls]) if calls and not rest[end:].strip() else (rest, [])
