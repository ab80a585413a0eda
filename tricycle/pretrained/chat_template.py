"""Chat templates: programs in Jinja that come with a model and write conversations as the model was taught them.

A template runs in Jinja's immutable sandbox, which keeps it from Python; and `Budget` bounds its loops and its output,
which the sandbox does not. What is not known is rendered in a child process besides: see `template_process`.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_SOURCE = 2**20  # characters of a template
MOST_CHARACTERS = 2**22  # of any value that a template makes, if it were written out
MOST_OUTPUT = 2**25  # characters that all its parts together write
MOST_ROUNDS = 10**6  # of all loops together
MOST_SECONDS = 5.0
MOST_WIDTH = 10_000  # to which a text may be filled up
MOST_DIGITS = 1000  # of a number

# Functions that make much out of little, by the numbers that they are given.
_WIDENING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson"}
_WIDE = re.compile(r"\d{5,}|\*|:[^}]*\{")  # in a format: a large number, or one that is an argument


class Budget:
    """What one rendering may still use, and the checks that keep it to that.

    The rule behind them: no value may be longer than MOST_CHARACTERS if it were written out, and this is checked where
    it is made. So to compare, sort or print values takes a bounded time.

    Raises:
        ValueError: by every method, where there is too much of something.
    """

    def __init__(self) -> None:
        self.rounds = MOST_ROUNDS
        self.output = MOST_OUTPUT
        self.deadline = time.monotonic() + MOST_SECONDS

    def spend(self, characters: int = 0) -> None:
        """One round of something, which writes a text."""
        self.rounds -= 1
        self.output -= characters
        if self.rounds < 0:
            raise ValueError(f"it goes through more than {MOST_ROUNDS:,} rounds")
        if self.output < 0:
            raise ValueError(f"it writes more than {MOST_OUTPUT:,} characters")
        if self.rounds % 64 == 0 and time.monotonic() > self.deadline:
            raise ValueError(f"it takes more than {MOST_SECONDS:.0f} seconds")

    def product(self, operator: str, left: Any, right: Any) -> None:
        """Before a binary operation."""
        self.spend()
        if operator == "**":
            digits = abs(right) * len(str(left)) if isinstance(left, int) and isinstance(right, (int, float)) else 0
            _at_most(digits, MOST_DIGITS, "digits")
        elif operator == "%" and isinstance(left, str):
            self._format(left, [right])
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                    length = len(many) if isinstance(many, str) else size(many)
                    _at_most(length * times, MOST_CHARACTERS, "characters")
            if isinstance(left, int) and isinstance(right, int):
                _at_most(left.bit_length() + right.bit_length(), 4 * MOST_DIGITS, "bits")

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a method of a text or a filter of that name; `args` begins with the text or value itself."""
        self.spend()
        values = [*args, *kwargs.values()]
        for value in values:
            size(value)
        if name in _WIDENING:
            for value in values[1:]:
                if isinstance(value, (int, float)):
                    _at_most(value, MOST_WIDTH, "characters of width")
                elif isinstance(value, str):
                    _at_most(size(values[0]) * len(value), MOST_CHARACTERS, "characters")
        elif name == "replace":
            text, *rest = map(str, values)
            times = text.count(rest[0]) if rest else 0
            _at_most(len(text) + times * (len(rest[1]) if rest[1:] else 0), MOST_CHARACTERS, "characters")
        elif name in ("format", "format_map"):
            self._format(str(values[0]), values[1:])
        elif name == "translate":
            raise ValueError("it calls translate, which templates must not")

    def join(self, separator: Any, items: list[Any]) -> None:
        """Before texts are put together."""
        _at_most(size(items) + len(items) * len(str(separator)), MOST_CHARACTERS, "characters")

    def _format(self, text: str, values: list[Any]) -> None:
        if _WIDE.search(text):
            raise ValueError("it formats to a width that templates must not ask for")
        places = text.count("%") + text.count("{")
        _at_most(len(text) + places * sum(map(size, values)), MOST_CHARACTERS, "characters")


def _at_most(n: float, most: int, what: str) -> None:
    if n > most:
        raise ValueError(f"it makes a value of more than {most:,} {what}")


def size(value: Any) -> int:
    """About how many characters a value has if it is written out.

    Raises:
        ValueError: more than any value of a template may have.
    """
    total, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        total += 8 + (len(part) if isinstance(part, str) else 0)  # none is free, so that none has very many parts
        if isinstance(part, (list, tuple, set, frozenset)):
            waiting.extend(part)
        elif isinstance(part, dict):
            waiting.extend(part)
            waiting.extend(part.values())
        elif isinstance(part, int):
            _at_most(part.bit_length() // 4, MOST_DIGITS, "digits")
        _at_most(total, MOST_CHARACTERS, "characters")
    return total


class ChatTemplate:
    """A template, ready to render.

    The sandbox and what it offers beside Jinja's own are those of `transformers`: blocks take the line break after them
    and the spaces before them away; `break` and `continue`; a `generation` tag, which does nothing here; the filter
    `tojson`, which leaves characters as they are; the functions `raise_exception` and `strftime_now`.

    Raises:
        ValueError: it is no template; names the line.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MOST_SOURCE:
            raise ValueError(f"chat template: expected at most {MOST_SOURCE:,} characters, got {len(source):,}")
        self._lock = threading.Lock()
        self._environment = Sandbox()
        with _naming_lines():
            tree = self._environment.parse(source)
            self._environment.text_length = _text_length([tree])
            _guard(tree)
            self._template = self._environment.from_string(tree)

    def render(self, **variables: Any) -> str:
        """The text for some variables, which are seen as plain values: texts, numbers, lists and dicts.

        Raises:
            ValueError: the template refuses them (`raise_exception`), is broken, or does what templates must not; names
                the line.
        """
        with self._lock, _naming_lines():
            self._environment.budget = Budget()
            return "".join(self._template.generate(plain_variables(variables)))


@contextmanager
def _naming_lines() -> Iterator[None]:
    """Turn what a template raises into a ValueError of one line that names the place in the template."""
    try:
        yield
    except Exception as error:
        line, trace = getattr(error, "lineno", None), error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<template>":
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f", line {line}" if line else ""
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        if isinstance(error, RecursionError):
            reason = "it nests too deeply"
        elif isinstance(error, MemoryError):
            reason = "it takes too much memory"
        raise ValueError(f"chat template{where}: {reason}") from None


def plain_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a rendering as plain values: texts, numbers, lists and dicts.

    Raises:
        ValueError: other values, or lists and dicts that are nested too deeply.
    """
    with _naming_lines():
        return {name: _plain(value) for name, value in variables.items()}


def preload() -> None:
    """Import all that rendering needs."""
    ChatTemplate("{{ [1]|tojson }}{% generation %}{% endgeneration %}").render()


def _plain(value: Any) -> Any:
    """Without methods that the sandbox does not know."""
    if isinstance(value, dict):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise ValueError(f"expected texts, numbers, lists and dicts in a conversation, got a {type(value).__name__}")


def _guard(tree: nodes.Template) -> None:
    """Put checks around all that makes values in a program, and into its loops."""
    makers = (nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict, nodes.Filter, nodes.Call)

    def checked(node: nodes.Expr) -> nodes.Expr:
        return nodes.Filter(node, " small", [], [], None, None, lineno=node.lineno)

    def walk(node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            items = value if isinstance(value, list) else [value]
            for i, item in enumerate(items):
                if not isinstance(item, nodes.Node):
                    continue
                walk(item)
                if isinstance(node, (nodes.CallBlock, nodes.FilterBlock)) and field in ("call", "filter"):
                    continue  # these need a call, and a filter, itself
                if isinstance(item, makers) and getattr(item, "ctx", "load") == "load":
                    items[i] = checked(item)
            if not isinstance(value, list):
                setattr(node, field, items[0])
        if isinstance(node, nodes.Concat):
            node.nodes = [checked(part) for part in node.nodes]
        if isinstance(node, nodes.For):
            length = nodes.Const(_text_length(node.body))
            node.iter = nodes.Filter(node.iter, " loop", [length], [], None, None, lineno=node.lineno)

    walk(tree)


def _text_length(body: Any) -> int:
    """How many characters of a template's own text stand in some statements."""
    return sum(len(text.data) for statement in body for text in statement.find_all(nodes.TemplateData))


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a budget that is checked before each call and computation.

    Attributes:
        budget: of the rendering at present.
        text_length: characters of all text that stands in the template.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    text_length = 0

    def __init__(self) -> None:
        extensions: list[Any] = [Generation, "jinja2.ext.loopcontrols"]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._written, extensions=extensions
        )
        self.budget = Budget()
        self.filters["tojson"] = _to_json
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters |= {" small": _small, " loop": self._loop}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(str(form)[:MOST_WIDTH]),
            "namespace": PublicNamespace,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # as a type it would offer more than to be called
        }

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__function, "__wrapped__", __function)  # of str.format, the sandbox has its own
        owner = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "join":
                args = ([*args[0]],) if args else args
                __self.budget.join(owner, *args)
            __self.budget.call(name, (owner, *args), kwargs)
        elif isinstance(__function, Macro):
            __self.budget.spend(__self.text_length)
        else:
            __self.budget.call("", args, kwargs)
        return super().call(__context, __function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.product(operator, left, right)
        return _small(super().call_binop(context, operator, left, right))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that it checks the budget first."""
        n_hidden = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments that Jinja adds

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            hidden, (value, *rest) = args[:n_hidden], args[n_hidden:]
            if name == "join":
                value = [*value]
                self.budget.join(rest[0] if rest else kwargs.get("d", ""), value)
            self.budget.call(name, (value, *rest), kwargs)
            return function(*hidden, value, *rest, **kwargs)

        return guarded

    def _written(self, value: Any) -> Any:
        """What goes into the output."""
        self.budget.spend(size(value))
        return value

    def _loop(self, values: Iterable[Any], characters: int) -> Iterator[Any]:
        """Yield the values of a loop, and charge the budget for the text of its body each time."""
        for value in values:
            self.budget.spend(characters)
            yield value


class Generation(Extension):
    """`{% generation %}`: what an assistant said, for those who train on nothing else. Its text is as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PublicNamespace(Namespace):
    """Jinja's own, without names that begin with an underscore. What it holds is not written out."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise ValueError(f"expected no name that begins with an underscore in a namespace, got {name!r}")


def _small(value: Any) -> Any:
    """Return a value that was made, if it is not too long."""
    size(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what HTML would read otherwise."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise ValueError(str(message))
