"""Chat templates: Jinja templates of pretrained models that format conversations as prompts.

A template runs in Jinja's immutable sandbox, which prevents access to Python. `Budget` limits its loops and its output,
which the sandbox does not. Untrusted templates also run in a child process: see `template_process`.
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

MAX_SOURCE_CHARACTERS = 2**20
MAX_VALUE_CHARACTERS = 2**22  # of any computed value, converted to text
MAX_OUTPUT_CHARACTERS = 2**25  # of all expressions and texts, macros and blocks included
MAX_ITERATIONS = 10**6  # of all loops and operations together
MAX_SECONDS = 5.0
MAX_WIDTH = 10_000  # to which a text may be padded
MAX_DIGITS = 1000  # of an integer

# Methods and filters whose numeric arguments determine the length of the result, or of a value that they compute.
_EXPANDING_CALLS = frozenset("center ljust rjust zfill expandtabs indent wordwrap batch slice tojson round".split())
_FORBIDDEN_METHODS = ("translate", "encode", "to_bytes")  # the last two give bytes, which no check measures
_VARIABLE_WIDTH = re.compile(r"\d{5,}|\*|:[^}]*\{")  # in a format: a width of five digits, or one from an argument


class Budget:
    """The remaining resources of one rendering, and checks of its limits.

    No value may have more than MAX_VALUE_CHARACTERS as text. This is checked when a value is computed, so comparing,
    sorting and printing values takes bounded time.

    Raises:
        ValueError: by every method, if a limit is exceeded.
    """

    def __init__(self) -> None:
        self.iterations = MAX_ITERATIONS
        self.output = MAX_OUTPUT_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS

    def charge(self, characters: int = 0) -> None:
        """Count one iteration and `characters` of output; raise ValueError if these or the time exceed the budget."""
        self.iterations -= 1
        self.output -= characters
        if self.iterations < 0:
            raise ValueError(f"it takes more than {MAX_ITERATIONS:,} iterations")
        if self.output < 0:
            raise ValueError(f"it writes more than {MAX_OUTPUT_CHARACTERS:,} characters")
        if self.iterations % 64 == 0 and time.monotonic() > self.deadline:
            raise ValueError(f"it takes more than {MAX_SECONDS:.0f} seconds")

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Count one iteration; raise ValueError if `**`, `*` or `%`, not computed yet, would give too big a result."""
        self.charge()
        if operator == "**":
            digits = abs(right) * len(str(left)) if isinstance(left, int) and isinstance(right, (int, float)) else 0
            _check_limit(digits, MAX_DIGITS, "digits")
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, [right])
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    length = len(sequence) if isinstance(sequence, str) else measure_size(sequence)
                    _check_limit(length * times, MAX_VALUE_CHARACTERS, "characters")
            if isinstance(left, int) and isinstance(right, int):
                _check_limit(left.bit_length() + right.bit_length(), 4 * MAX_DIGITS, "bits")

    def check_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one iteration; ValueError if a method or filter is forbidden, or could give too large a result."""
        self.charge()
        values = [*args, *kwargs.values()]
        for value in values:
            measure_size(value)
        if name in _EXPANDING_CALLS:
            for value in values[1:]:
                if isinstance(value, (int, float)):
                    _check_limit(value, MAX_WIDTH, "characters of width")
                elif isinstance(value, str):
                    _check_limit(measure_size(values[0]) * len(value), MAX_VALUE_CHARACTERS, "characters")
        elif name == "replace":
            text, *arguments = map(str, values)
            times = text.count(arguments[0]) if arguments else 0
            n_new = len(arguments[1]) if arguments[1:] else 0
            _check_limit(len(text) + times * n_new, MAX_VALUE_CHARACTERS, "characters")
        elif name in ("format", "format_map"):
            self._check_format(str(values[0]), values[1:])
        elif name in _FORBIDDEN_METHODS:
            raise ValueError(f"it calls {name}, which is not allowed in templates")

    def check_join(self, separator: Any, items: list[Any]) -> None:
        """Raise ValueError if joining the items with `separator` would give a text that is too long."""
        _check_limit(measure_size(items) + len(items) * len(str(separator)), MAX_VALUE_CHARACTERS, "characters")

    def _check_format(self, text: str, values: list[Any]) -> None:
        """Raise ValueError if a formatted text could be too long or has a variable or large width."""
        if _VARIABLE_WIDTH.search(text):
            raise ValueError("it formats to a width that is not allowed in templates")
        n_fields = text.count("%") + text.count("{")
        _check_limit(len(text) + n_fields * sum(map(measure_size, values)), MAX_VALUE_CHARACTERS, "characters")


def _check_limit(n: float, limit: int, unit: str) -> None:
    """Raise a ValueError that names the limit and the unit if n is above the limit."""
    if n > limit:
        raise ValueError(f"it computes a value of more than {limit:,} {unit}")


def measure_size(value: Any) -> int:
    """Return the approximate length of a (nested) value as text, plus 8 for each part; ValueError above a limit."""
    total, pending = 0, [value]
    while pending:
        part = pending.pop()
        total += 8 + (len(part) if isinstance(part, str) else 0)  # 8 for each part also limits the number of parts
        if isinstance(part, (list, tuple, set, frozenset)):
            pending.extend(part)
        elif isinstance(part, dict):
            pending.extend(part)
            pending.extend(part.values())
        elif isinstance(part, int):
            _check_limit(part.bit_length() // 4, MAX_DIGITS, "digits")
        _check_limit(total, MAX_VALUE_CHARACTERS, "characters")
    return total


class ChatTemplate:
    """A compiled chat template.

    Extensions of Jinja are those of `transformers`: blocks remove the line break after them and the spaces before them;
    `break` and `continue`; a `generation` tag, which has no effect; the filter `tojson` without escapes for HTML; the
    functions `raise_exception` and `strftime_now`.

    Raises:
        ValueError: the source is not a valid template; names the line.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ValueError(
                f"chat template: expected at most {MAX_SOURCE_CHARACTERS:,} characters, got {len(source):,}"
            )
        self._lock = threading.Lock()
        self._environment = Sandbox()
        with _errors_with_lines():
            tree = self._environment.parse(source)
            self._environment.text_length = _text_length([tree])
            _insert_checks(tree)
            self._template = self._environment.from_string(tree)

    def render(self, **variables: Any) -> str:
        """Return the text of the template with plain variables; ValueError if it rejects them or exceeds a limit.

        The limits are those of time, iterations and output. The error names the line.
        """
        with self._lock, _errors_with_lines():
            self._environment.budget = Budget()
            return "".join(self._template.generate(plain_variables(variables)))


@contextmanager
def _errors_with_lines() -> Iterator[None]:
    """Convert exceptions of a template to a ValueError of one line that names the line of the template."""
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
    """Return a copy of variables as str, numbers, bool, None, lists (also for tuples) and dicts; else raise ValueError.

    Raises:
        ValueError: a value of another type, or lists and dicts that are nested too deeply.
    """
    with _errors_with_lines():
        return {name: _to_plain(value) for name, value in variables.items()}


def preload() -> None:
    """Import all modules that rendering needs, by rendering a small template."""
    ChatTemplate("{{ [1]|tojson }}{% generation %}{% endgeneration %}").render()


def _to_plain(value: Any) -> Any:
    """Copy a value as dicts, lists (also for tuples), str, numbers, bool and None; ValueError for other types."""
    if isinstance(value, dict):
        return {_to_plain(key): _to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(part) for part in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise ValueError(f"expected strings, numbers, lists and dicts in a conversation, got a {type(value).__name__}")


def _insert_checks(tree: nodes.Template) -> None:
    """Insert checks in place around the expressions of a template that create values, and into its loops."""
    creators = (nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict, nodes.Filter, nodes.Call)

    def checked(node: nodes.Expr) -> nodes.Expr:
        return nodes.Filter(node, " check_size", [], [], None, None, lineno=node.lineno)

    def walk(node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            items = value if isinstance(value, list) else [value]
            for i, item in enumerate(items):
                if not isinstance(item, nodes.Node):
                    continue
                walk(item)
                if isinstance(node, (nodes.CallBlock, nodes.FilterBlock)) and field in ("call", "filter"):
                    continue  # these nodes require a call or a filter as their child
                if isinstance(item, creators) and getattr(item, "ctx", "load") == "load":
                    items[i] = checked(item)
            if not isinstance(value, list):
                setattr(node, field, items[0])
        if isinstance(node, nodes.Concat):
            node.nodes = [checked(part) for part in node.nodes]
        if isinstance(node, nodes.For):
            length = nodes.Const(_text_length(node.body))
            node.iter = nodes.Filter(node.iter, " iterate", [length], [], None, None, lineno=node.lineno)

    walk(tree)


def _text_length(body: Any) -> int:
    """Return the number of characters of literal text in statements of a template, nested ones included."""
    return sum(len(text.data) for statement in body for text in statement.find_all(nodes.TemplateData))


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget that is checked before each call and operation.

    Attributes:
        budget: the budget of the current rendering.
        text_length: the number of characters of literal text in the template.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    text_length = 0

    def __init__(self) -> None:
        extensions: list[Any] = [GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._check_output, extensions=extensions
        )
        self.budget = Budget()
        self.filters["tojson"] = _to_json
        self.filters = {name: self._with_check(name, function) for name, function in self.filters.items()}
        self.filters |= {" check_size": _check_size, " iterate": self._iterate}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(str(form)[:MAX_WIDTH]),
            "namespace": PublicNamespace,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # a function, because the type has methods
        }

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge the budget, check the arguments' sizes, then call a template's function; ValueError beyond a limit."""
        method = getattr(__function, "__wrapped__", __function)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "join":
                args = ([*args[0]],) if args else args
                __self.budget.check_join(owner, *args)
            __self.budget.check_call(name, (owner, *args), kwargs)
        elif isinstance(__function, Macro):
            __self.budget.charge(__self.text_length)
        else:
            __self.budget.check_call(name if isinstance(owner, int) else "", args, kwargs)
        return super().call(__context, __function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the result of a template's binary operation; raise ValueError if it is too large or over budget."""
        self.budget.check_operator(operator, left, right)
        return _check_size(super().call_binop(context, operator, left, right))

    def _with_check(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that first checks its arguments and charges the budget; ValueError beyond a limit."""
        n_hidden = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments that Jinja inserts

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            hidden, (value, *arguments) = args[:n_hidden], args[n_hidden:]
            if name == "join":
                value = [*value]
                self.budget.check_join(arguments[0] if arguments else kwargs.get("d", ""), value)
            self.budget.check_call(name, (value, *arguments), kwargs)
            return function(*hidden, value, *arguments, **kwargs)

        return guarded

    def _check_output(self, value: Any) -> Any:
        """Charge the budget with the size of a value to be written (ValueError beyond it), and return the value."""
        self.budget.charge(measure_size(value))
        return value

    def _iterate(self, values: Iterable[Any], characters: int) -> Iterator[Any]:
        """Yield the values of a loop, and charge the budget with the text of its body for each."""
        for value in values:
            self.budget.charge(characters)
            yield value


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks answers for training in `transformers` and has no effect here."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Consume the tag up to `endgeneration` from the parser's stream; return its content as a scope node."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PublicNamespace(Namespace):
    """Jinja's namespace object without names that begin with an underscore; printing it does not print its values."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute of the namespace; ValueError for a name that begins with an underscore."""
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Return "<Namespace>", without its content."""
        return "<Namespace>"


def _check_name(name: str) -> None:
    """Raise a ValueError for a name that begins with an underscore."""
    if str(name).startswith("_"):
        raise ValueError(f"expected no name that begins with an underscore in a namespace, got {name!r}")


def _check_size(value: Any) -> Any:
    """Return a value; raise ValueError if `measure_size` finds it larger than a limit."""
    measure_size(value)
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON, without escapes for HTML as Jinja's own filter has, and non-ASCII text unescaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    """Raise a ValueError with a message: the function that templates call to reject a conversation."""
    raise ValueError(str(message))
