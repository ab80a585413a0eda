"""A graph of Tensors, its values, and the gradients as they arrive: what the page of `tricycle look --graph` shows."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

import tricycle
from tricycle.autograd import topological_order
from tricycle.ops import Op
from tricycle.tensor import Tensor, to_tensor
from tricycle_lab.look.layout import place

MOST_NODES = 400
MOST_LINES, MOST_SOURCES = 30, 5  # of the source of a gradient
NUMBER = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
LETTER, LINE, PADDING = 7.4, 17.0, 9.0  # pixels
ROOT = Path(tricycle.__file__).parent.parent

# What operations give back, by the beginning of the name that they leave on their result. z is the result, g its
# gradient; x and y are the inputs.
FORMULAS = {
    "badd": "z = x + y;  dx = g,  dy = g",
    "bsub": "z = x - y;  dx = g,  dy = -g",
    "bmul": "z = x y;  dx = g y,  dy = g x",
    "bdiv": "z = x / y;  dx = g / y,  dy = -g z / y",
    "bpow": "z = x^y;  dx = g y x^(y-1),  dy = g z ln x",
    "bmaximum": "z = max(x, y);  g goes to the larger",
    "bminimum": "z = min(x, y);  g goes to the smaller",
    "+": "z = x + c;  dx = g",
    "-": "z = x - c;  dx = g",
    "*": "z = c x;  dx = c g",
    "/": "z = x / c;  dx = g / c",
    "**": "z = x^c;  dx = c g x^(c-1)",
    "> 0": "z = max(x, 0);  dx = g where x > 0, else 0",
    "negative": "z = -x;  dx = -g",
    "exp": "z = e^x;  dx = g z",
    "log": "z = ln x;  dx = g / x",
    "sqrt": "z = √x;  dx = g / (2 z)",
    "sin": "z = sin x;  dx = g cos x",
    "cos": "z = cos x;  dx = -g sin x",
    "absolute": "z = |x|;  dx = g sign x",
    "tanh": "z = tanh x;  dx = g (1 - z²)",
    "sigmoid": "z = sigmoid(x);  dx = g z (1 - z)",
    "sum": "z = Σ x;  every summed element gets g",
    "mean": "z = Σ x / n;  every element gets g / n",
    "max": "z = max x;  the largest element gets g",
    "min": "z = min x;  the smallest element gets g",
    "reshape": "the same numbers in another shape, and back",
    "transpose": "axes change places, and back",
    "getitem": "a part of x;  the rest of dx is 0",
    "heads": "channels of some heads;  the rest of dx is 0",
    "split": "a part of x;  the rest of dx is 0",
    "concatenate": "side by side;  each gets its part of g",
    "stack": "one on the other;  each gets its part of g",
    "matmul": "Z = X Y;  dX = G Yᵀ,  dY = Xᵀ G",
    "einsum": "a sum of products;  its gradient is an einsum with the subscripts exchanged",
    "dense": "Z = X W + b;  dX = G Wᵀ,  dW = Xᵀ G,  db = Σ G over rows",
    "linear": "Z = X W + b;  dX = G Wᵀ,  dW = Xᵀ G,  db = Σ G over rows",
    "embedding": "rows of a table;  each row gets the sum of its gradients",
    "softmax1": "z_i = e^x_i / (1 + Σ e^x_j);  dx = z (g - Σ g z)",
    "softmax": "z_i = e^x_i / Σ e^x_j;  dx = z (g - Σ g z)",
    "log_softmax": "z_i = x_i - ln Σ e^x_j;  dx = g - e^z Σ g",
    "cross_entropy": "z = -ln softmax(x)[label], the mean;  dx = g (softmax(x) - 1[label]) / n",
    "mean_squared_error": "z = mean (x - y)²;  dy = 2 g (y - x) / n",
    "layer_norm": "z = gain (x - mean) / √(variance + ε) + bias;  gradients through mean and variance too",
    "rms_norm": "z = gain x / √(mean x² + ε);  dx = (h - n Σ h n / C) / √(mean x² + ε) with h = g gain, n = z / gain",
    "attention": "Z = softmax(Q Kᵀ / √D) V;  dV = Wᵀ G,  and through the softmax to Q and K",
    "gelu": "z = x Φ(x);  dx = g (Φ(x) + x φ(x))",
    "swish": "z = x sigmoid(x);  dx = g (sigmoid(x) + z (1 - sigmoid(x)))",
    "where": "x where the condition holds, else y;  g goes where z came from",
}
# Of `3 - x` and its kin, whose names end with the sign.
NUMBER_FIRST = {"-": "z = c - x;  dx = -g", "/": "z = c / x;  dx = -g z / x", "**": "z = c^x;  dx = g z ln c"}


def graph_of(function: Callable[..., Any], values: Mapping[str, Any], title: str, said: str = "") -> dict[str, Any]:
    """Call a function on values, and tell all about the graph behind its result.

    Args:
        values: by the names of its arguments; numbers and lists.
        title, said: what the page calls it, and a line about it.

    Raises:
        ValueError: it gives no Tensor, or one without a gradient; or a graph of too many nodes.
    """
    inputs = {name: to_tensor(value, name=name) for name, value in values.items()}
    result = function(**inputs)
    if not isinstance(result, Tensor):
        raise ValueError(f"{title}: expected a Tensor as its result, got {type(result).__name__}")
    if not result.requires_grad or not result.args:
        raise ValueError(f"{title}: expected a result that was computed from its inputs, got one without a gradient")
    nodes = _all_behind(result, title)
    names = _names(nodes, result, inputs)
    numbers = {id(node): i for i, node in enumerate(nodes)}
    shown = [_shown(node, names[i], numbers, result) for i, node in enumerate(nodes)]
    edges = [(numbers[id(arg)], i) for i, node in enumerate(nodes) for arg in node.args]
    sizes = [_size(one) for one in shown]
    placed = place(sizes, edges)
    for one, (width, height), (x, y) in zip(shown, sizes, placed.centres):
        one |= {"x": round(x, 1), "y": round(y, 1), "width": round(width, 1), "height": height}
    lines = [
        {"from": start, "to": stop, "points": [[round(x, 1), round(y, 1)] for x, y in points]}
        for (start, stop), points in zip(edges, placed.edges)
    ]
    return {
        "title": title,
        "said": said,
        "nodes": shown,
        "edges": lines,
        "steps": list(_steps(result, numbers, edges)),
        "width": round(placed.width, 1),
        "height": round(placed.height, 1),
    }


def _all_behind(result: Tensor, title: str) -> list[Tensor]:
    """Every Tensor behind a result, constants too, each after what it was made from."""
    order: list[Tensor] = []
    seen: set[int] = set()
    waiting: list[tuple[Tensor, bool]] = [(result, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            if len(seen) > MOST_NODES:
                raise ValueError(f"{title}: expected a graph of at most {MOST_NODES} Tensors to draw, got more")
            waiting.append((node, True))
            waiting += [(arg, False) for arg in reversed(node.args)]
    return order


def _names(nodes: list[Tensor], result: Tensor, inputs: Mapping[str, Tensor]) -> list[str]:
    known = {id(tensor): name for name, tensor in inputs.items()}
    named = []
    for node in nodes:
        role = getattr(node, "role", None) or ("input" if node.requires_grad else "constant")
        named.append(known.get(id(node)) or (_short(node) if node.args else role))
    return named


def _short(node: Tensor) -> str:
    """What made it, as it is written: `badd` is +."""
    signs = {"badd": "+", "bsub": "-", "bmul": "*", "bdiv": "/", "bpow": "**"}
    words = signs.get(node.name or "op", node.name or "op").split()
    return " ".join(f"{float(word):.4g}" if NUMBER.fullmatch(word) else word for word in words)


def _shown(node: Tensor, name: str, numbers: Mapping[int, int], result: Tensor) -> dict[str, Any]:
    kind = "result" if node is result else "op" if node.args else "input" if node.requires_grad else "constant"
    return {
        "name": name,
        "op": node.name if node.args else None,
        "kind": kind,
        "shape": list(node.shape),
        "label": _label(node.array),
        "value": text_of(node.array),
        "args": [numbers[id(arg)] for arg in node.args],
        "formula": formula_of(node.name) if node.args else None,
        "sources": sources_of(node) if node.args else [],
    }


def _label(array: Any, is_gradient: bool = False) -> str:
    """A number; of many their shape, or of a gradient the length, for its shape is known."""
    if array.size == 1:
        return f"{array.item():.4g}"
    length = math.sqrt(float(np.square(array, dtype=np.float64).sum())) if is_gradient else 0.0
    return f"‖{length:.4g}‖" if is_gradient else "(" + ", ".join(map(str, array.shape)) + ")"


def text_of(array: Any) -> str:
    """An array of any size, in a few lines."""
    return np.array2string(
        np.asarray(array), precision=4, threshold=60, edgeitems=3, suppress_small=True, max_line_width=60
    )


def _size(shown: dict[str, Any]) -> tuple[float, float]:
    """Room for the name, the value and the gradient."""
    letters = max(len(shown["name"]), len(shown["label"]) + 2, 9)
    return letters * LETTER + 2 * PADDING, 3 * LINE + 2 * PADDING


def formula_of(name: str | None) -> str | None:
    """What an operation gives back, if it is known here."""
    words = (name or "").split()
    if not words:
        return None
    for key in (name or "", words[0], words[-1] if len(words) == 2 and words[1] in ("-", "/", "**") else ""):
        if key in FORMULAS:
            is_number_first = len(words) == 2 and words[0] not in FORMULAS
            return NUMBER_FIRST.get(words[1], FORMULAS[key]) if is_number_first else FORMULAS[key]
    return None


def sources_of(node: Tensor) -> list[dict[str, str]]:
    """Where the gradient of a node is computed: its backward, and the functions and methods that this one calls."""
    backward = node._backward
    functions = [backward] if isinstance(backward, FunctionType) else []
    for function in functions:  # grows while it is walked over
        if len(functions) < MOST_SOURCES:
            functions += [inner for inner in _called(function) if inner not in functions]
    sources = [source for source in map(_source, functions[:MOST_SOURCES]) if source is not None]
    return list({source["place"]: source for source in sources}.values())


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """What a closure holds that it may call."""
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
        for one in inner if isinstance(inner, tuple) else (inner,):
            if isinstance(one, FunctionType):
                yield one
        if isinstance(inner, Op):
            methods = [getattr(type(inner), name, None) for name in function.__code__.co_names]
            yield from (method for method in methods if isinstance(method, FunctionType))


def _source(function: FunctionType) -> dict[str, str] | None:
    """Its file, line and text."""
    try:
        lines, start = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    path = Path(function.__code__.co_filename)
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    text = textwrap.dedent("".join(lines[:MOST_LINES])).rstrip()
    return {"place": f"{shown}:{start}", "code": text + ("\n…" if len(lines) > MOST_LINES else "")}


# -------------------------------------------------------------------- the way back
def _steps(result: Tensor, numbers: Mapping[int, int], edges: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """What `Tensor.backward` does, one node after the other: the gradient that a node has, and what each input gets."""
    sums: dict[int, np.ndarray] = {id(result): np.ones_like(result.array)}
    first_edges = {stop: place for place, (_, stop) in reversed([*enumerate(edges)])}
    for node in reversed(topological_order(result)):
        grad = sums.get(id(node))
        if grad is None or not node.args:
            continue
        handed = []
        for i, (arg, back_fn) in enumerate(zip(node.args, node.back_fns)):
            if not arg.requires_grad:
                continue
            gradient = back_fn(Tensor(grad, requires_grad=False))
            array = np.asarray(gradient.array if isinstance(gradient, Tensor) else gradient, arg.dtype)
            sums[id(arg)] = total = sums[id(arg)] + array if id(arg) in sums else array
            handed.append(
                {
                    # edges are in the order of nodes and their inputs
                    "edge": first_edges[numbers[id(node)]] + i,
                    "arg": numbers[id(arg)],
                    "label": _label(array),
                    "part": text_of(array),
                    "sum": text_of(total),
                    "sumLabel": _label(total, is_gradient=True),
                }
            )
        yield {
            "node": numbers[id(node)],
            "grad": text_of(grad),
            "gradLabel": _label(grad, is_gradient=True),
            "to": handed,
        }
