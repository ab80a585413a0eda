"""The backward pass on Tensors, whose gradients can be differentiated: `gradients`, for `create_graph=True`.

The backward function of a node maps arrays to arrays, which is fast, but records no graph. `gradients` calls, in its
place, a rule of the operation, a function rule(node, grad, variables) that computes the gradients of the args by
operations on Tensors. `variables` has the variables that the backward function takes from the operation, such as the
axes of a sum. `differentiable_rules.py` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from tricycle import ops
from tricycle.autograd import SlicedGradient, check_unchanged, current_modes, sum_slices, topological_order
from tricycle.devices import Array, array_module
from tricycle.tensor import Tensor, record

Rule: TypeAlias = Callable[[Tensor, Tensor, Any], Sequence[Tensor | None]]
Unfused: TypeAlias = Callable[[Tensor, Any], Tensor]

RULES: dict[str, Rule] = {}  # by the function that records the node: "tricycle.extra_ops.sum"


# -------------------------------------------------------------------- the backward pass
def gradients(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient, a Tensor with a graph, of sum(output * cotangent) for each input; None if independent.

    The graph behind the outputs is kept, and not followed behind the inputs.

    Raises:
        RuntimeError: an array in the graph has been changed in place, the graph was freed, or no graph can be built.
        NotImplementedError: an operation has no rule.
        TypeError: an output is complex.
    """
    check_builds_graph()
    sums: dict[Tensor, Tensor] = {}
    _add(sums, outputs, cotangents)
    root = Tensor(np.zeros(()), args=tuple(outputs))
    order = topological_order(root, inputs)[:-1]
    while order:
        node = order.pop()
        grad = sums.pop(node, None)
        if grad is not None and node.args:
            check_unchanged(node)
            _add(sums, node.args, _apply_rule(node, grad))
    return [sums.get(x) for x in inputs]


def check_builds_graph() -> None:
    """Raise a RuntimeError within blocks of `no_grad` and `evaluation`."""
    if not all(mode.builds_graph for mode in current_modes.get()):
        rule = "expected that operations record a graph, got a block of no_grad() or evaluation()"
        raise RuntimeError(f"create_graph: {rule}: differentiate outside of it")


def _add(sums: dict[Tensor, Tensor], nodes: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Add the gradients of nodes that require one to `sums`, cast to the node's dtype; TypeError if complex."""
    for node, grad in zip(nodes, grads, strict=True):
        if grad is None or not node.requires_grad:
            continue
        if node.dtype.kind == "c":
            raise TypeError(f"create_graph: expected real numbers, got {node.dtype} of shape {node.shape}")
        grad = cast(grad, node.dtype)
        sums[node] = ops.add(sums[node], grad) if node in sums else grad


def _apply_rule(node: Tensor, grad: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of a node's args as Tensors with a graph; NotImplementedError without a rule."""
    backward: Any = node._backward
    name = f"{backward.__module__}.{backward.__qualname__.partition('.<locals>')[0]}"
    if name not in RULES:
        advice = "compose it of other operations, or add a rule, see tricycle.create_graph"
        raise NotImplementedError(f"create_graph: {name} has no gradient that can be differentiated: {advice}")
    closure = zip(backward.__code__.co_freevars, backward.__closure__ or ())
    return RULES[name](node, grad, SimpleNamespace(**{name: cell.cell_contents for name, cell in closure}))


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to RULES for these functions: "module.function" or "module.Class.method".

    The function is the one that calls `record` and contains the backward function, or the backward function itself.
    """

    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return decorate


def unfused(*names: str) -> Callable[[Unfused], Unfused]:
    """Return a decorator like `rule` for a function (node, variables) that recomputes the node by other operations."""

    def decorate(function: Unfused) -> Unfused:
        rule(*names)(lambda node, grad, variables: gradients_through(function(node, variables), node, grad))
        return function

    return decorate


def gradients_through(result: Tensor, node: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of a node's args by differentiating `result`, the same value computed from the same args."""
    args = list(dict.fromkeys(node.args))  # an arg that occurs twice gets its gradient once
    found = dict(zip(args, gradients([result], [grad], args)))
    return [found.pop(arg, None) for arg in node.args]


# -------------------------------------------------------------------- linear maps of arrays
def linear_map(x: Tensor, forward: Callable[[Array], Array], transpose: Callable[[Array], Array], name: str) -> Tensor:
    """Apply a linear function of arrays whose gradient is `transpose`, also a linear function of arrays."""
    return record(forward(x.array), (x,), lambda grad, needs_grad, forward: (transpose(grad),), name, False, (forward,))


@rule("tricycle.create_graph.linear_map")
def _linear_map(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of a linear map's input: the transposed map of `grad`, differentiable again."""
    return [linear_map(grad, v.transpose, node._saved[0], f"{node.name} transposed")]


def cast(x: Tensor, dtype: Any) -> Tensor:
    """Return x in another dtype; the gradient has that of x."""
    before = x.dtype
    if before == dtype:
        return x
    return linear_map(x, lambda a: a.astype(dtype), lambda a: a.astype(before), "cast")


def copy(x: Tensor) -> Tensor:
    """Return a Tensor with a copy of the array of x, connected to x."""
    return linear_map(x, lambda a: a.copy(), lambda a: a, "copy")


def scatter(x: Tensor, index: Any, like: Array, unique: bool = False) -> Tensor:
    """Return y like an array, 0 except for y[index] = x; the sum where an element is selected twice."""
    empty = array_module(like).empty((), like.dtype)
    shaped = array_module(like).broadcast_to(empty, like.shape)  # needs no memory
    place = lambda a: sum_slices([SlicedGradient(a, index, unique)], shaped)
    return linear_map(x, place, lambda a: a[index], "scatter")


def broadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Broadcast x to a shape."""
    before = x.shape
    spread = lambda a: array_module(a).broadcast_to(a, shape)
    return linear_map(x, spread, lambda a: ops.unbroadcast(a, before), "broadcast")


def unbroadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum x to a shape that broadcasts to that of x."""
    before = x.shape
    spread = lambda a: array_module(a).broadcast_to(a, before)
    return x if before == shape else linear_map(x, lambda a: ops.unbroadcast(a, shape), spread, "unbroadcast")
