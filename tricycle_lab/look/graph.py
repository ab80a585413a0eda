"""Data of the page of `tricycle look --graph`: a computation graph, its values, and the steps of the backward pass."""

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
from tricycle_lab.look.layout import layout_graph

MAX_NODES = 400
MAX_SOURCE_LINES, MAX_SOURCES = 30, 5  # of the source code of a gradient
NUMBER = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
CHARACTER_WIDTH, LINE_HEIGHT, PADDING = 7.4, 17.0, 9.0  # of the text in a node, in pixels
ROOT = Path(tricycle.__file__).parent.parent

# Forward and backward formulas of operations, by the start of the name that an operation gives its result. z is the
# result, g its gradient; x and y are the inputs.
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
    "softplus": "z = ln(1 + e^x);  dx = g sigmoid(x)",
    "sum": "z = Σ x;  every summed element gets g",
    "mean": "z = Σ x / n;  every element gets g / n",
    "max": "z = max x;  the largest element gets g",
    "min": "z = min x;  the smallest element gets g",
    "reshape": "another shape of x;  dx = g in the shape of x",
    "transpose": "permuted axes;  dx = g with the inverse permutation",
    "getitem": "a part of x;  dx = g in that part, else 0",
    "heads": "channels of some heads;  dx = g in these channels, else 0",
    "split": "a part of x;  dx = g in that part, else 0",
    "concatenate": "joined along an axis;  each input gets its part of g",
    "stack": "joined along a new axis;  each input gets its part of g",
    "matmul": "Z = X Y;  dX = G Yᵀ,  dY = Xᵀ G",
    "einsum": "a sum of products;  the gradient is an einsum with exchanged subscripts",
    "dense": "Z = X W + b;  dX = G Wᵀ,  dW = Xᵀ G,  db = Σ G over rows",
    "linear": "Z = X W + b;  dX = G Wᵀ,  dW = Xᵀ G,  db = Σ G over rows",
    "embedding": "rows of a table;  each row gets the sum of the gradients of its uses",
    "state_space_scan": "S_t = e^d_t S_t-1 + k_t v_tᵀ,  z_t = S_tᵀ q_t;  dv, dd, dk, dq by the scan from last to first",
    "gated_delta_rule": "S_t = e^d_t S_t-1 + k_t u_tᵀ,  u_t = b_t (v_t - e^d_t S_t-1ᵀ k_t),  z_t = S_tᵀ q_t",
    "softmax1": "z_i = e^x_i / (1 + Σ e^x_j);  dx = z (g - Σ g z)",
    "softmax": "z_i = e^x_i / Σ e^x_j;  dx = z (g - Σ g z)",
    "log_softmax": "z_i = x_i - ln Σ e^x_j;  dx = g - e^z Σ g",
    "cross_entropy": "z = mean of -ln softmax(x)[label];  dx = g (softmax(x) - 1[label]) / n",
    "mean_squared_error": "z = mean (x - y)²;  dy = 2 g (y - x) / n",
    "layer_norm": "z = gain (x - mean) / √(variance + ε) + bias;  gradients through mean and variance too",
    "rms_norm": "z = gain x / √(mean x² + ε);  dx = (h - n Σ h n / C) / √(mean x² + ε) with h = g gain, n = z / gain",
    "attention": "Z = softmax(Q Kᵀ / √D) V;  dV = Wᵀ G,  and through the softmax to Q and K",
    "gelu": "z = x Φ(x);  dx = g (Φ(x) + x φ(x))",
    "swish": "z = x sigmoid(x);  dx = g (sigmoid(x) + z (1 - sigmoid(x)))",
    "solve": "A Z = B;  dB = A⁻ᵀ G,  dA = -dB Zᵀ",
    "inv": "Z = X⁻¹;  dX = -Zᵀ G Zᵀ",
    "det": "z = det X;  dX = g z X⁻ᵀ",
    "slogdet": "z = ln |det X|;  dX = g X⁻ᵀ",
    "cholesky": "X = Z Zᵀ;  dX = Z⁻ᵀ Φ(Zᵀ G) Z⁻¹, made symmetric;  Φ: lower triangle, half of the diagonal",
    "eigh values": "X = V diag(z) Vᵀ;  dX = V diag(g) Vᵀ",
    "eigh vectors": "X = Z diag(λ) Zᵀ;  dX = Z (F ∘ Zᵀ G) Zᵀ, made symmetric;  F_ij = 1 / (λ_j - λ_i)",
    "svd u": "X = Z diag(s) Vᵀ;  gradient through the gaps of s²",
    "svd s": "X = U diag(z) Vᵀ;  dX = U diag(g) Vᵀ",
    "svd vh": "X = U diag(s) Z;  gradient through the gaps of s²",
    "where": "z = x where the condition holds, else y;  g goes to the selected input",
}
# Formulas of operations with a number on the left, such as `3 - x`, whose names end with the operator.
NUMBER_ON_THE_LEFT = {"-": "z = c - x;  dx = -g", "/": "z = c / x;  dx = -g z / x", "**": "z = c^x;  dx = g z ln c"}


def build_graph(
    function: Callable[..., Any], values: Mapping[str, Any], title: str, description: str = ""
) -> dict[str, Any]:
    """Call a function; return its graph as JSON data: nodes, edges, backward steps and others; ValueError if no graph.

    Args:
        function: a function of Tensors that returns a Tensor.
        values: numbers and lists, by the names of the arguments.
        title: the title of the page.
        description: one sentence below the title.

    Raises:
        ValueError: values that are not numbers, a result that is not a Tensor with a gradient, or too many nodes.
    """
    try:
        inputs = {name: to_tensor(value, name=name) for name, value in values.items()}
    except TypeError as error:
        raise ValueError(f"{title}: {error}") from None
    result = function(**inputs)
    if not isinstance(result, Tensor):
        raise ValueError(f"{title}: expected a Tensor as its result, got {type(result).__name__}")
    if not result.requires_grad or not result.args:
        raise ValueError(f"{title}: expected a result that was computed from its inputs, got one without a gradient")
    tensors = _collect_tensors(result, title)
    input_names = {id(tensor): name for name, tensor in inputs.items()}
    indices = {id(tensor): i for i, tensor in enumerate(tensors)}
    nodes = [_describe_node(tensor, input_names.get(id(tensor)), indices, result) for tensor in tensors]
    edges = [(indices[id(arg)], i) for i, tensor in enumerate(tensors) for arg in tensor.args]
    n_characters = [max(len(node["name"]), len(node["label"]) + 2, 9) for node in nodes]
    height = 3 * LINE_HEIGHT + 2 * PADDING  # of name, value and gradient
    sizes = [(n * CHARACTER_WIDTH + 2 * PADDING, height) for n in n_characters]
    layout = layout_graph(sizes, edges)
    for node, (width, _), (x, y) in zip(nodes, sizes, layout.centers):
        node |= {"x": round(x, 1), "y": round(y, 1), "width": round(width, 1), "height": height}
    lines = [
        {"from": start, "to": stop, "points": [[round(x, 1), round(y, 1)] for x, y in points]}
        for (start, stop), points in zip(edges, layout.edges)
    ]
    return {
        "title": title,
        "description": description,
        "nodes": nodes,
        "edges": lines,
        "steps": list(_backward_steps(result, indices, edges)),
        "width": round(layout.width, 1),
        "height": round(layout.height, 1),
    }


def _collect_tensors(result: Tensor, title: str) -> list[Tensor]:
    """Return all Tensors of a graph, each after its inputs; ValueError for more than MAX_NODES."""
    order: list[Tensor] = []
    seen: set[int] = set()
    stack: list[tuple[Tensor, bool]] = [(result, False)]
    while stack:
        tensor, inputs_done = stack.pop()
        if inputs_done:
            order.append(tensor)
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            if len(seen) > MAX_NODES:
                raise ValueError(f"{title}: expected a graph of at most {MAX_NODES} Tensors to draw, got more")
            stack.append((tensor, True))
            stack += [(arg, False) for arg in reversed(tensor.args)]
    return order


def _operation_name(tensor: Tensor) -> str:
    """Return the name of the operation that computed a Tensor, with the usual operators: + in place of `badd`."""
    operators = {"badd": "+", "bsub": "-", "bmul": "*", "bdiv": "/", "bpow": "**"}
    words = operators.get(tensor.name or "op", tensor.name or "op").split()
    return " ".join(f"{float(word):.4g}" if NUMBER.fullmatch(word) else word for word in words)


def _describe_node(
    tensor: Tensor, input_name: str | None, indices: Mapping[int, int], result: Tensor
) -> dict[str, Any]:
    """Return JSON data of a Tensor of the graph: its name, kind, shape, value, formula, and indices of its args."""
    leaf_kind = "input" if tensor.requires_grad else "constant"
    kind = "result" if tensor is result else "op" if tensor.args else leaf_kind
    other_name = _operation_name(tensor) if tensor.args else getattr(tensor, "role", None) or leaf_kind
    return {
        "name": input_name or other_name,
        "op": tensor.name if tensor.args else None,
        "kind": kind,
        "shape": list(tensor.shape),
        "label": _label(tensor.array),
        "value": format_array(tensor.array),
        "args": [indices[id(arg)] for arg in tensor.args],
        "formula": find_formula(tensor.name) if tensor.args else None,
        "sources": backward_sources(tensor) if tensor.args else [],
    }


def _label(array: Any, is_gradient: bool = False) -> str:
    """Return as text the value of a scalar, the norm of a gradient, or the shape of any other array."""
    if array.size == 1:
        return f"{array.item():.4g}"
    if is_gradient:
        return f"‖{math.sqrt(float(np.square(array, dtype=np.float64).sum())):.4g}‖"
    return "(" + ", ".join(map(str, array.shape)) + ")"


def format_array(array: Any) -> str:
    """Return an array of any size as a few lines of text."""
    return np.array2string(
        np.asarray(array), precision=4, threshold=60, edgeitems=3, suppress_small=True, max_line_width=60
    )


def find_formula(name: str | None) -> str | None:
    """Return formulas of an operation and its gradient by name ("bmul"; "2 -" for 2 - x); None if unknown."""
    words = (name or "").split()
    if not words:
        return None
    for key in (name or "", words[0], words[-1] if len(words) == 2 and words[1] in ("-", "/", "**") else ""):
        if key in FORMULAS:
            is_number_on_the_left = len(words) == 2 and words[0] not in FORMULAS
            return NUMBER_ON_THE_LEFT.get(words[1], FORMULAS[key]) if is_number_on_the_left else FORMULAS[key]
    return None


def backward_sources(tensor: Tensor) -> list[dict[str, str]]:
    """Return "location" and "code" of a Tensor's backward function and of the functions in its closure; or []."""
    backward = tensor._backward
    functions = [backward] if isinstance(backward, FunctionType) else []
    for function in functions:  # the list grows during the loop: a breadth-first search
        if len(functions) < MAX_SOURCES:
            functions += [inner for inner in _called_functions(function) if inner not in functions]
    sources = [source for source in map(_source, functions[:MAX_SOURCES]) if source is not None]
    return list({source["location"]: source for source in sources}.values())


def _called_functions(function: FunctionType) -> Iterator[FunctionType]:
    """Yield the functions in the closure of a function, and the methods of ops in it that the function may call."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        for value in content if isinstance(content, tuple) else (content,):
            if isinstance(value, FunctionType):
                yield value
        if isinstance(content, Op):
            methods = [getattr(type(content), name, None) for name in function.__code__.co_names]
            yield from (method for method in methods if isinstance(method, FunctionType))


def _source(function: FunctionType) -> dict[str, str] | None:
    """Return the location (file and line) and the source code of a function; None without source code."""
    try:
        lines, start = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    path = Path(function.__code__.co_filename)
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    code = textwrap.dedent("".join(lines[:MAX_SOURCE_LINES])).rstrip()
    return {"location": f"{shown}:{start}", "code": code + ("\n…" if len(lines) > MAX_SOURCE_LINES else "")}


# -------------------------------------------------------------------- backward pass
def _backward_steps(
    result: Tensor, indices: Mapping[int, int], edges: list[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the steps of `Tensor.backward`, one for each node: its gradient, and the contribution to each input."""
    sums: dict[int, np.ndarray] = {id(result): np.ones_like(result.array)}
    first_edges = {stop: i for i, (_, stop) in reversed([*enumerate(edges)])}
    for tensor in reversed(topological_order(result)):
        grad = sums.get(id(tensor))
        if grad is None or not tensor.args:
            continue
        contributions = []
        for i, (arg, back_fn) in enumerate(zip(tensor.args, tensor.back_fns)):
            if not arg.requires_grad:
                continue
            contribution = back_fn(Tensor(grad, requires_grad=False))
            array = np.asarray(contribution.array if isinstance(contribution, Tensor) else contribution, arg.dtype)
            sums[id(arg)] = total = sums[id(arg)] + array if id(arg) in sums else array
            contributions.append(
                {
                    # edges are in the order of nodes and their inputs
                    "edge": first_edges[indices[id(tensor)]] + i,
                    "arg": indices[id(arg)],
                    "label": _label(array),
                    "value": format_array(array),
                    "sum": format_array(total),
                    "sumLabel": _label(total, is_gradient=True),
                }
            )
        yield {
            "node": indices[id(tensor)],
            "grad": format_array(grad),
            "gradLabel": _label(grad, is_gradient=True),
            "contributions": contributions,
        }
