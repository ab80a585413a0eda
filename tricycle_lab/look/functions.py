"""What a command line may name as a function to see gradients in: an example, a formula, or a function in a file."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tricycle import extra_ops, functions, ops
from tricycle.loss import MeanSquaredError
from tricycle_lab.look.examples import EXAMPLES
from tricycle_lab.look.graph import graph_of

NAMED: dict[str, Callable[..., Any]] = {
    **{name: getattr(ops, name) for name in ("tanh", "sigmoid")},
    **{name: getattr(extra_ops, name) for name in "exp log sqrt sin cos absolute maximum minimum where".split()},
    "softmax": functions.Softmax(),
    "softmax1": functions.Softmax1(),
    "log_softmax": functions.LogSoftmax(),
    "squared_error": MeanSquaredError(),
    "sum": lambda x, *axes: x.sum(*axes),
    "mean": lambda x, *axes: x.mean(*axes),
    "max": lambda x, *axes: x.max(*axes),
    "min": lambda x, *axes: x.min(*axes),
}
SIGNS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.USub: operator.neg,
    ast.UAdd: lambda x: x,
}
# What a formula may be made of: nothing that could reach beyond numbers.
ALLOWED = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant, ast.List, ast.Subscript),
    *(ast.Tuple, ast.Slice, *SIGNS),
)
LONGEST = 2000  # characters of a formula


def graph_named(what: str, values: str = "") -> dict[str, Any]:
    """The graph of what a command line names.

    Args:
        what: the name of an example; FILE.py:function; or a formula such as "x * y + exp(x)".
        values: of its inputs, such as "x=2, y=[1, 2]"; those that are not named are 2, 3, 4 and so on.

    Raises:
        FileNotFoundError, ValueError: one line about what is wrong.
    """
    stated = values_of(values)
    if what in EXAMPLES:
        example = EXAMPLES[what]
        _check_names(what, stated, list(example.values))
        return graph_of(example.function, {**example.values, **stated}, what, example.said)
    path, colon, name = what.rpartition(":")
    if colon and path.endswith(".py"):
        function = function_of(Path(path), name)
        said = (inspect.getdoc(function) or "").partition("\n")[0]
        return graph_of(function, _filled(what, _arguments(function, what), stated), f"{Path(path).name}:{name}", said)
    function, names = formula(what)
    return graph_of(function, _filled(what, names, stated), what)


def values_of(text: str) -> dict[str, Any]:
    """From "x=2, y=[1, 2]" to values by name.

    Raises:
        ValueError: anything else.
    """
    wanted = f'expected values such as "x=2, y=[1, 2]", got {text[:80]!r}'
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError(wanted)
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(wanted) from None


def formula(text: str) -> tuple[Callable[..., Any], list[str]]:
    """A function of what a formula names, and these names in their order. Nothing else can be called or reached.

    Raises:
        ValueError: no formula of what is allowed.
    """
    known = f"an example ({', '.join(EXAMPLES)}), FILE.py:function or a formula"
    try:
        tree = ast.parse(text, mode="eval") if len(text) <= LONGEST else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = None
    if tree is None:
        raise ValueError(f"expected {known}, got {text[:80]!r}")
    called: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            raise ValueError(
                f"{text[:80]!r}: expected numbers, names and {', '.join(NAMED)}, got {type(node).__name__}"
            )
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in NAMED or node.keywords:
                raise ValueError(f"{text[:80]!r}: expected to call one of {', '.join(NAMED)}")
            called.add(id(node.func))
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called})
    if not names:
        raise ValueError(f"expected {known}, got {text[:80]!r}, which names no input")
    return partial(_computed, tree.body), names


def _computed(node: ast.AST, **inputs: Any) -> Any:
    """The value of a formula that was found to be one, for values of its names.

    Raises:
        ValueError: numbers that grow beyond bounds, or a formula that is too deep.
    """
    try:
        return _value(node, inputs)
    except RecursionError:
        raise ValueError("expected a formula that is not so deep") from None
    except (OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"expected a formula of finite numbers, got {error}") from None


def _value(node: ast.AST | None, inputs: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return inputs[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, inputs), _value(node.right, inputs)
        if isinstance(left, int) and isinstance(right, int):
            left = float(left)  # whose powers end
        return SIGNS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        return SIGNS[type(node.op)](_value(node.operand, inputs))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return NAMED[node.func.id](*(_value(argument, inputs) for argument in node.args))
    if isinstance(node, ast.Subscript):
        return _value(node.value, inputs)[_value(node.slice, inputs)]
    if isinstance(node, ast.Slice):
        return slice(*(_value(part, inputs) for part in (node.lower, node.upper, node.step)))
    if isinstance(node, (ast.List, ast.Tuple)):
        parts = [_value(part, inputs) for part in node.elts]
        return tuple(parts) if isinstance(node, ast.Tuple) else parts
    return node.value if isinstance(node, ast.Constant) else None


def function_of(path: Path, name: str) -> Callable[..., Any]:
    """A function from a file of the user's own, which is run for that.

    Raises:
        FileNotFoundError, ValueError: there is none.
    """
    function = getattr(module_of(path), name, None)
    if not callable(function):
        raise ValueError(f"{path}: expected a function {name!r} in it")
    return function


def module_of(path: Path) -> Any:
    """A file of the user's own as a module: it is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be run.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"_looked_at_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: expected a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    return module


def _arguments(function: Callable[..., Any], what: str) -> list[str]:
    """The names of what it must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"{what}: expected a function whose arguments have names") from None
    return [one.name for one in parameters if one.default is one.empty and one.kind in (0, 1, 3)]


def _filled(what: str, names: list[str], stated: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(what, stated, names)
    return {name: stated.get(name, float(2 + i)) for i, name in enumerate(names)}


def _check_names(what: str, stated: Mapping[str, Any], names: list[str]) -> None:
    strange = [name for name in stated if name not in names]
    if strange:
        raise ValueError(f"{what[:80]}: expected values for {', '.join(names)}, got one for {strange[0]}")
