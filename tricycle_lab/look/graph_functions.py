"""Functions for `tricycle look --graph`, from a command line: an example, a formula, or a function in a Python file."""

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
from tricycle.tensor import Tensor
from tricycle_lab.look.examples import EXAMPLES
from tricycle_lab.look.graph import build_graph

FORMULA_FUNCTIONS: dict[str, Callable[..., Any]] = {
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
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.USub: operator.neg,
    ast.UAdd: lambda x: x,
}
# The syntax of a formula, which may come from an untrusted source: it cannot access anything but numbers.
ALLOWED_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant, ast.List, ast.Subscript),
    *(ast.Tuple, ast.Slice, *OPERATORS),
)
MAX_FORMULA_LENGTH = 2000  # characters


def build_graph_from_spec(spec: str, values: str = "") -> dict[str, Any]:
    """Return as JSON data the graph of an example, FILE.py:function (executed) or formula at inputs; else ValueError.

    Args:
        spec: the name of an example; FILE.py:function; or a formula such as "x * y + exp(x)".
        values: values of the inputs, such as "x=2, y=[1, 2]". The default values are 2, 3, 4 and so on.

    Raises:
        FileNotFoundError, ValueError: an invalid specification or value.
    """
    given = parse_values(values)
    title, description = spec, ""
    defaults: dict[str, Any] = {}
    function: Any
    path, colon, name = spec.rpartition(":")
    if spec in EXAMPLES:
        function, defaults = EXAMPLES[spec]
        names, description = list(defaults), function.__doc__ or ""
    elif colon and path.endswith(".py"):
        function = getattr(load_module(Path(path)), name, None)
        if not callable(function):
            raise ValueError(f"{path}: expected a function {name!r} in it, got none")
        names, title = _argument_names(function, spec), f"{Path(path).name}:{name}"
        description = (inspect.getdoc(function) or "").partition("\n")[0]
    else:
        function, names = parse_formula(spec)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"{spec[:80]}: expected values for {', '.join(names)}, got one for {unknown[0]}")
    inputs = {name: given.get(name, defaults.get(name, 2.0 + i)) for i, name in enumerate(names)}
    return build_graph(function, inputs, title, description)


def parse_values(text: str) -> dict[str, Any]:
    """Parse values such as "x=2, y=[1, 2]" into a dict by name; ValueError for another form."""
    message = f'expected values such as "x=2, y=[1, 2]", got {text[:80]!r}'
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError(message)
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(message) from None


def parse_formula(text: str) -> tuple[Callable[..., Any], list[str]]:
    """Parse a formula by a whitelist of syntax, else ValueError; return a function of its variables, and sorted names.

    The function can call `FORMULA_FUNCTIONS` only, so that a formula from an untrusted source is safe.
    """
    accepted = f"an example ({', '.join(EXAMPLES)}), FILE.py:function or a formula"
    try:
        tree = ast.parse(text, mode="eval") if len(text) <= MAX_FORMULA_LENGTH else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = None
    if tree is None:
        raise ValueError(f"expected {accepted}, got {text[:80]!r}")
    function_nodes: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED_NODES):
            raise ValueError(
                f"{text[:80]!r}: expected numbers, names and {', '.join(FORMULA_FUNCTIONS)}, got {type(node).__name__}"
            )
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in FORMULA_FUNCTIONS or node.keywords:
                raise ValueError(f"{text[:80]!r}: expected to call one of {', '.join(FORMULA_FUNCTIONS)}")
            function_nodes.add(id(node.func))
    variables = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in function_nodes]
    names = sorted({node.id for node in variables})
    if not names:
        raise ValueError(f"expected {accepted}, got {text[:80]!r}, which has no variable")
    return partial(_evaluate_formula, tree.body), names


def _evaluate_formula(node: ast.AST, **inputs: Any) -> Any:
    """Return the value of a parsed formula; raise ValueError for large numbers, wrong operands, or too deep nesting."""
    try:
        return _evaluate(node, inputs)
    except RecursionError:
        raise ValueError("expected a formula with less nesting") from None
    except (OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"expected a formula of finite numbers, got {error}") from None
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"expected a formula with fitting operands and indices, got {error}") from None


def _evaluate(node: ast.AST | None, inputs: Mapping[str, Any]) -> Any:
    """Return the value of a node of a checked formula: an array, a number, a tuple, or a slice."""
    if isinstance(node, ast.Name):
        return inputs[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, inputs), _evaluate(node.right, inputs)
        if not isinstance(left, Tensor) and not isinstance(right, Tensor):
            left = float(left)  # a power of integers, or a product with a list, could have any size
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_evaluate(node.operand, inputs))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return FORMULA_FUNCTIONS[node.func.id](*(_evaluate(argument, inputs) for argument in node.args))
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, inputs)[_evaluate(node.slice, inputs)]
    if isinstance(node, ast.Slice):
        return slice(*(_evaluate(bound, inputs) for bound in (node.lower, node.upper, node.step)))
    if isinstance(node, (ast.List, ast.Tuple)):
        elements = [_evaluate(element, inputs) for element in node.elts]
        return tuple(elements) if isinstance(node, ast.Tuple) else elements
    return node.value if isinstance(node, ast.Constant) else None


def load_module(path: Path) -> Any:
    """Execute a Python file, and return it as a module, also in sys.modules; an error in it raises ValueError.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an error while the file was executed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"_tricycle_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    return module


def _argument_names(function: Callable[..., Any], spec: str) -> list[str]:
    """Return the names of arguments without a default; ValueError if the function has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"{spec}: expected a function with named arguments") from None
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [argument.name for argument in parameters if argument.default is argument.empty and argument.kind in named]
