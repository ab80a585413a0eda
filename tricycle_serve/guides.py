"""Requests for text that matches a JSON schema, regular expression or grammar, and their compilation."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from tricycle.decoding.guided import Constraint, GrammarCompiler
from tricycle_serve.errors import ApiError
from tricycle_serve.request_fields import RequestFields


class Guide(NamedTuple):
    """What a text must match.

    Attributes:
        param: the field of the request, for error messages.
        kind: "json_schema", "regex" or "grammar".
        value: the schema, expression or grammar.
    """

    param: str
    kind: str
    value: Any


def parse_guide(fields: RequestFields) -> Guide | None:
    """Return the guide of `response_format`, `regex` or `grammar`, not compiled; ApiError if invalid or several."""
    candidates = [_parse_response_format(fields)]
    for name in ("regex", "grammar"):
        value = fields.get_str(name)
        candidates.append(None if value is None else Guide(name, name, value))
    guides = [guide for guide in candidates if guide is not None]
    if len(guides) > 1:
        raise ApiError(f"expected {guides[0].param} or {guides[1].param}, got both", param=guides[1].param)
    return guides[0] if guides else None


def _parse_response_format(fields: RequestFields) -> Guide | None:
    """Return the guide of JSON mode or a JSON schema; None for text or if absent; ApiError if invalid."""
    value = fields.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        fields.reject("response_format", "an object of type text, json_object or json_schema")
    inner = RequestFields(value)
    inner.ignore("type")
    schema: Any = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        described = inner.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            expected = "expected response_format.json_schema to be an object with an object `schema`"
            raise ApiError(expected, param="response_format")
        about = RequestFields(described)
        about.ignore("schema", "name", "description", "strict")  # a schema is always followed strictly
        about.reject_unknown()
    inner.reject_unknown()
    return None if schema is None else Guide("response_format", "json_schema", schema)


class GuideCompiler:
    """Compiles the guides of requests for a tokenizer; llguidance is imported at the first one."""

    def __init__(self, tokeniser: Any) -> None:
        self._tokeniser = tokeniser
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def compile(self, guide: Guide) -> Constraint:
        """Return the constraint of a guide, which may take seconds; raise ApiError if it cannot be used.

        Raises:
            ApiError: llguidance is not installed or does not support the guide; the message has the reason.
        """
        try:
            with self._lock:
                if self._compiler is None:
                    self._compiler = GrammarCompiler(self._tokeniser)
            compiler = self._compiler
            methods: Any = {
                "json_schema": compiler.from_json_schema,
                "regex": compiler.from_regex,
                "grammar": compiler.from_lark,
            }
            return methods[guide.kind](guide.value)
        except ImportError as error:
            raise ApiError(str(error), param=guide.param, code="unsupported_parameter") from None
        except (ValueError, RecursionError) as error:
            what = guide.kind.replace("_", " ")
            raise ApiError(f"{guide.param}: cannot use this {what}: {error}", param=guide.param) from None
