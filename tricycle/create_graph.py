"""The backward pass on Tensors, whose gradients can be differentiated, and forward mode: `gradients` and `tangents`.

The backward function of a node maps arrays to arrays, which is fast, but records no graph. `gradients` calls, in its
place, a rule of the operation, a function rule(node, grad, variables) that computes the gradients of the args by
operations on Tensors. `variables` has the variables that the backward function takes from the operation, such as the
axes of a sum. `differentiable_rules.py` has the rules. Forward mode transposes them: a rule is linear in `grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from tricycle import ops
from tricycle.autograd import SlicedGradient, check_unchanged, current_modes, sum_slices, topological_order
from tricycle.devices import Array, array_module
from tricycle.tensor import Tensor, record

Rule: TypeAlias = Callable[[Tensor, Tensor, Any], Sequence[Tensor | None]]
Unfused: TypeAlias = Callable[[Tensor, Any], Tensor]
Tangents: TypeAlias = Sequence[Tensor | None]  # of a node's args; None for 0, but not for all
TangentRule: TypeAlias = Callable[[Tensor, Any, Any], Tensor]  # (node, Tangents, variables), or NotImplemented

RULES: dict[str, Rule] = {}  # by the function that records the node: "tricycle.extra_ops.sum"
UNFUSED: dict[str, Unfused] = {}  # the operations that are computed by others, by the same names
TANGENTS: dict[str, TangentRule] = {}  # the rules of forward mode, where it does not transpose the gradient's rule
CLOSURES: set[str] = set()  # those whose unfused form uses the Tensors of the call, not `node.args`
ELEMENTWISE: set[str] = set()  # the operations of one arg whose rule multiplies each element, and so is symmetric
# The operations that have no rule on purpose, and why
WITHOUT_RULE = {
    "tricycle.experts.add_router_loss": "its gradient reaches the routers outside of the graph: set router_loss to 0",
}


# -------------------------------------------------------------------- the backward pass
def gradients(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor], constants: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """Return the gradient, a Tensor with a graph, of sum(output * cotangent) for each input; None if independent.

    The graph behind the outputs is kept, and not followed behind the inputs and constants.

    Raises:
        RuntimeError: an array in the graph has been changed in place, the graph was freed, or no graph can be built.
        NotImplementedError: an operation has no rule.
        TypeError: an output is complex.
    """
    check_builds_graph()
    order = topological_order(*outputs, inputs=(*inputs, *constants))
    sums: dict[Tensor, Tensor | None] = dict.fromkeys(inputs)
    for node in order:
        if any(arg in sums for arg in node.args):
            sums[node] = None  # it depends on an input
    _add(sums, outputs, cotangents)
    while order:
        node = order.pop()
        grad = sums.pop(node, None)
        if grad is not None:
            check_unchanged(node)
            name, variables = rule_of(node)
            _add(sums, node.args, RULES[name](node, grad, variables))
    return [sums[x] for x in inputs]


def check_builds_graph() -> None:
    """Raise a RuntimeError within blocks of `no_grad` and `evaluation`."""
    if not all(mode.builds_graph for mode in current_modes.get()):
        rule = "expected that operations record a graph, got a block of no_grad() or evaluation()"
        raise RuntimeError(f"create_graph: {rule}: differentiate outside of it")


def _add(sums: dict[Tensor, Tensor | None], nodes: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Add the gradients of nodes that depend on an input to `sums`, cast to the node's dtype; TypeError if complex."""
    for node, grad in zip(nodes, grads, strict=True):
        if grad is None or node not in sums:
            continue
        grad, before = _cast_to(node, grad), sums[node]
        sums[node] = grad if before is None else ops.add(before, grad)


def _cast_to(node: Tensor, change: Tensor) -> Tensor:
    """Return a gradient or tangent of a node in its dtype; raise a TypeError for complex numbers."""
    if node.dtype.kind == "c":
        raise TypeError(f"create_graph: expected real numbers, got {node.dtype} of shape {node.shape}")
    return cast(change, node.dtype)


def rule_of(node: Tensor) -> tuple[str, SimpleNamespace]:
    """Return the name of a node's rule and its backward function's variables; NotImplementedError without a rule."""
    backward: Any = node._backward
    while check := getattr(backward, "check", None):  # of `debug.watch_arrays`, perhaps several times
        check()
        backward = backward.__wrapped__
    name = f"{backward.__module__}.{backward.__qualname__.partition('.<locals>')[0]}"
    if name not in RULES:
        advice = WITHOUT_RULE.get(name, "compose it of other operations, or add a rule, see tricycle.create_graph")
        raise NotImplementedError(f"create_graph: {name} has no gradient that can be differentiated: {advice}")
    closure = zip(backward.__code__.co_freevars, backward.__closure__ or ())
    return name, SimpleNamespace(**{name: cell.cell_contents for name, cell in closure})


def rule(*names: str, elementwise: bool = False) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to RULES for these functions: "module.function" or "module.Class.method".

    The function is the one that calls `record` and contains the backward function, or the backward function itself.

    Args:
        elementwise: the node has one arg, and each element of its gradient depends only on that element of `grad`.
    """

    def decorate(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        ELEMENTWISE.update(names if elementwise else ())
        return function

    return decorate


def tangent_rule(*names: str) -> Callable[[TangentRule], TangentRule]:
    """Return a decorator that adds a rule of forward mode to TANGENTS for functions named as in `rule`."""

    def decorate(function: TangentRule) -> TangentRule:
        TANGENTS.update(dict.fromkeys(names, function))
        return function

    return decorate


def unfused(*names: str, closure: bool = False) -> Callable[[Unfused], Unfused]:
    """Return a decorator that registers, for operations, a function (node, variables) composed of simpler operations.

    Args:
        closure: the function uses Tensors of the original call besides `node.args`, such as a layer's parameters.
    """

    def decorate(function: Unfused) -> Unfused:
        rule(*names)(lambda node, grad, variables: gradients_through(function(node, variables), node, grad))
        UNFUSED.update(dict.fromkeys(names, function))
        CLOSURES.update(names if closure else ())
        return function

    return decorate


def gradients_through(result: Tensor, node: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Return gradients of a node's args (or None) by differentiating `result`, the same value computed from them."""
    args = list(dict.fromkeys(node.args))  # an arg that occurs twice gets its gradient once
    found = dict(zip(args, gradients([result], [grad], args)))
    return [found.pop(arg, None) for arg in node.args]


# -------------------------------------------------------------------- forward mode
def tangents(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], directions: Sequence[Tensor | None], constant: bool = False
) -> list[Tensor | None]:
    """Return outputs' tangents (Jacobian-vector products) for input `directions`, detached if `constant`; None for 0.

    The tangents of all nodes are computed in the order of the nodes. Raises the errors of `gradients`.

    Args:
        directions: the tangents of the inputs; None for 0.
        constant: no graph of the tangents is kept.
    """
    check_builds_graph()
    found = {x: _cast_to(x, t) for x, t in zip(inputs, directions) if t is not None}
    for node in topological_order(*outputs, inputs=inputs):
        if any(arg in found for arg in node.args):
            check_unchanged(node)
            tangent = _tangent(node, [found.get(arg) for arg in node.args], constant)
            if tangent is not None:
                tangent = _cast_to(node, tangent)
                found[node] = tangent.detach() if constant else tangent
    return [found.get(y) for y in outputs]


def _tangent(node: Tensor, directions: Sequence[Tensor | None], constant: bool) -> Tensor | None:
    """Return a node's tangent from its args', None for 0: by its own rule, or the transpose of the gradient's rule."""
    name, variables = rule_of(node)
    if name in TANGENTS and (found := TANGENTS[name](node, directions, variables)) is not NotImplemented:
        return found
    if name in UNFUSED:
        return tangents([UNFUSED[name](node, variables)], node.args, directions, constant)[0]
    if name in ELEMENTWISE:
        return RULES[name](node, directions[0], variables)[0]  # type: ignore[arg-type]  # it has a tangent
    probe = Tensor(node.xp.zeros_like(node.array), True, node.is_batched)
    pulled = zip(RULES[name](node, probe, variables), directions)
    pairs = [(grad, direction) for grad, direction in pulled if grad is not None and direction is not None]
    return gradients([grad for grad, _ in pairs], [t for _, t in pairs], [probe], (node, *node.args))[0]


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
    """Return y like an array, 0 except y[index] = x; sum elements that are selected twice, unless all are `unique`."""
    empty = array_module(like).empty_like(like, shape=())
    shaped = array_module(like).broadcast_to(empty, like.shape)  # needs no memory
    place = lambda a: sum_slices([SlicedGradient(a, index, unique)], shaped)
    return linear_map(x, place, lambda a: a[index], "scatter")


def broadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Broadcast x to a shape, differentiably."""
    before = x.shape
    spread = lambda a: array_module(a).broadcast_to(a, shape)
    return linear_map(x, spread, lambda a: ops.unbroadcast(a, before), "broadcast")


def unbroadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum x over the axes that broadcasting `shape` to the shape of x adds or lengthens; return x for equal shapes."""
    before = x.shape
    spread = lambda a: array_module(a).broadcast_to(a, before)
    return x if before == shape else linear_map(x, lambda a: ops.unbroadcast(a, shape), spread, "unbroadcast")
