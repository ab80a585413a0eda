"""Function transforms: gradients, Jacobians and Hessians of functions, which can be differentiated again.

As in JAX, a transform takes a function and returns a function, whose arguments are Tensors, arrays, numbers, or nested
tuples, lists and dicts of them: `grad(grad(f))` is the second derivative of f. A result can be differentiated further,
also by `backward`, with respect to all Tensors that require a gradient; `detach` makes it a constant.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from tricycle import autograd, create_graph, devices, differentiable_rules, extra_ops, ops, tangent_rules  # noqa: F401
from tricycle.activation_checkpointing import enable_grad
from tricycle.batched_arrays import BatchedArray, NotVectorizedError, items_of
from tricycle.kernels import upcast
from tricycle.tensor import Operand, Tensor, record, to_tensor

Tree: TypeAlias = Any  # a Tensor, or a nested tuple, list or dict of Tensors
Function: TypeAlias = Callable[..., Any]
Argnums: TypeAlias = int | Sequence[int]


# -------------------------------------------------------------------- trees of Tensors
def tree_map(function: Function, tree: Tree, *others: Tree) -> Tree:
    """Apply a function to leaves of nested tuples, lists, dicts, and of equal `others` (else ValueError); keep None.

    Raises:
        ValueError: the structures differ.
    """
    if not isinstance(tree, (tuple, list, dict)):
        return None if tree is None else function(tree, *others)
    is_dict = isinstance(tree, dict)
    for other in others:
        fits = isinstance(other, dict) == is_dict and isinstance(other, (tuple, list, dict))
        if not fits or (set(other) != set(tree) if is_dict else len(other) != len(tree)):
            raise ValueError(f"transforms: expected two trees of one structure, got {tree!r} and {other!r}")
    parts = zip(*([each[key] for key in tree] for each in (tree, *others))) if is_dict else zip(tree, *others)
    values = [tree_map(function, *part) for part in parts]
    if is_dict:
        return dict(zip(tree, values))
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def tree_leaves(tree: Tree) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts, in order, without None; the value itself if it is a leaf."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def _like(tree: Tree, leaves: Sequence[Any]) -> Tree:
    """Return a tree of the same structure (None stays) with other leaves, in order."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), tree)


# -------------------------------------------------------------------- inputs and gradients
def _input(x: Any) -> Tensor:
    """Return a Tensor with x's array that requires a gradient, connected to x if x does; TypeError for integers."""
    create_graph.check_builds_graph()
    if not isinstance(x, Tensor):
        x = to_tensor(x, dtype=x.dtype if devices.is_array(x) and x.dtype.kind == "f" else None, requires_grad=False)
    if x.dtype.kind in "biuc":
        raise TypeError(f"transforms: expected real floating-point inputs, got {x.dtype} of shape {x.shape}")
    if x.requires_grad:
        return record(x.array, (x,), _pass_gradient, x.name)
    return Tensor(x.array, True, x.is_batched, x.name)


def _pass_gradient(grad: Any, needs_grad: Sequence[bool]) -> tuple[Any]:
    """Return (grad,): the backward function of a copy that shares the array."""
    return (grad,)


def _pull_back(
    outputs: Sequence[Any],
    cotangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    retain_graph: bool = False,
) -> list[Tensor]:
    """Return the gradients of the inputs, zeros where independent; with a graph if another Tensor requires a gradient.

    Otherwise the gradients are constants: the usual, faster backward pass computes them, and frees the graph unless it
    is retained.
    """
    create_graph.check_builds_graph()
    pairs = [(y, c) for y, c in zip(outputs, cotangents) if isinstance(y, Tensor) and y.requires_grad]
    kept, weights = [y for y, _ in pairs], [c for _, c in pairs]
    root = Tensor(np.zeros(()), args=tuple(kept), backward=lambda grad, needs_grad: [c.array for c in weights])
    order = autograd.topological_order(root) if kept else []
    if kept and _depend_only_on(inputs, order, weights):
        sums = autograd.GradientSums(retain_graph)
        arrays = {x: sums.unshare(x, a) for x, a in autograd.walk_backward(order, root.array, sums)}
        found: list[Tensor | None] = [Tensor(arrays[x], False) if x in arrays else None for x in inputs]
    else:
        found = create_graph.gradients(kept, weights, inputs)
    return [_gradient_of(x, grad) for x, grad in zip(inputs, found)]


def _depend_only_on(inputs: Sequence[Tensor], nodes: Sequence[Tensor], constants: Sequence[Tensor]) -> bool:
    """Return whether nodes, all of a graph, depend on no other Tensors that require a gradient; nor do `constants`."""
    return {node for node in nodes if not node.args} <= set(inputs) and not any(c.requires_grad for c in constants)


def _gradient_of(x: Tensor, grad: Tensor | None) -> Tensor:
    """Return the gradient of x as a Tensor with its `is_batched`: zeros if it is None."""
    if grad is None:
        return Tensor(x.xp.zeros_like(x.array), False, x.is_batched)
    if grad.is_batched == x.is_batched:
        return grad
    return Tensor(grad.array, grad.requires_grad, x.is_batched, "gradient", (grad,), _pass_gradient)


def backward_with_graph(x: Tensor, on_input: Callable[[Tensor], None] | None = None) -> None:
    """Add differentiable gradients to the `grad` of all leaves of x's graph, as `x.backward(create_graph=True)`.

    Args:
        on_input: called with each leaf that got a gradient.
    """
    create_graph.check_builds_graph()
    leaves = [node for node in autograd.topological_order(x) if not node.args]
    grads = create_graph.gradients([x], [_ones_like(x)], leaves)
    for leaf, found in zip(leaves, grads):
        if found is None:
            continue
        grad = create_graph.copy(found)  # the user may change a gradient in place, so it must not share memory
        grad.is_batched = leaf.is_batched
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        if on_input is not None:
            on_input(leaf)


def _ones_like(x: Tensor) -> Tensor:
    """Return a Tensor of ones of x's shape and dtype, without a gradient."""
    return Tensor(x.xp.ones_like(x.array), False, x.is_batched)


Tensor.backward_with_graph = backward_with_graph


# -------------------------------------------------------------------- transforms
def value_and_grad(f: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """Return a function giving (f's value of one element, gradient); with `has_aux`, ((value, aux), gradient).

    Args:
        argnums: the place of the argument, or a tuple of places; the gradient has the structure of that argument, or is
            a tuple of such gradients.
        has_aux: f returns a pair, and so does the value: a Tensor to be differentiated, and anything else.

    Raises:
        ValueError: f does not return a Tensor of one element.
        TypeError: an input is not a real floating-point number.
    """

    def value_and_gradient(*args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        chosen, call = _inputs_at(f, args, argnums)
        value = call(chosen, kwargs)
        y, *aux = value if has_aux else (value,)
        grads = _pull_back([_checked_scalar(y)], [_ones_like(y)], tree_leaves(chosen))
        y = y.detach() if y._version < 0 else y  # its graph was freed
        return (y, *aux) if has_aux else y, _one_or_all(_like(chosen, grads), argnums)

    return value_and_gradient


def _checked_scalar(y: Any) -> Tensor:
    """Return y; raise a ValueError unless it is a Tensor of one element."""
    if isinstance(y, Tensor) and y.size == 1:
        return y
    got = f"a Tensor of shape {y.shape}" if isinstance(y, Tensor) else repr(y)
    raise ValueError(f"transforms: expected a function that returns a Tensor of one element, got {got}")


def grad(f: Function, argnums: Argnums = 0, has_aux: bool = False) -> Function:
    """Return a function that computes the gradient of f, or the pair (gradient, aux); see `value_and_grad`."""
    both = value_and_grad(f, argnums, has_aux)

    def gradient(*args: Any, **kwargs: Any) -> Tree:
        value, result = both(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return gradient


def _inputs_at(f: Function, args: Sequence[Any], argnums: Argnums) -> tuple[tuple[Tree, ...], Function]:
    """Return arguments `argnums` as inputs with gradients, and f as a function (inputs, kwargs); else ValueError."""
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for place in places:
        if not -len(args) <= place < len(args):
            raise ValueError(f"transforms: expected argnums to be places of {len(args)} arguments, got {argnums}")
    chosen = tuple(tree_map(_input, args[place]) for place in places)

    def call(values: Sequence[Tree], kwargs: Mapping[str, Any]) -> Any:
        changed = list(args)
        for place, value in zip(places, values):
            changed[place] = value
        return f(*changed, **kwargs)

    return chosen, call


def _one_or_all(trees: tuple[Tree, ...], argnums: Argnums) -> Tree:
    """Return the only tree if `argnums` is an integer, else the tuple of all."""
    return trees[0] if isinstance(argnums, int) else trees


def vjp(f: Function, *primals: Tree) -> tuple[Tree, Function]:
    """Return `f(*primals)` and a function from cotangents, like the result, to the gradients of the primals, a tuple.

    The function may be called repeatedly: it computes the products of vectors with the Jacobian.
    """
    inputs = tree_map(_input, primals)
    outputs = tree_map(_constant, f(*inputs))

    def pull_back(cotangents: Tree) -> tuple[Tree, ...]:
        weights = tree_leaves(tree_map(_matching, outputs, cotangents))
        result: tuple[Tree, ...] = _like(inputs, _pull_back(tree_leaves(outputs), weights, tree_leaves(inputs), True))
        return result

    return outputs, pull_back


def _matching(x: Tensor, tangent: Any) -> Tensor:
    """Return a tangent or cotangent of x as a Tensor; raise a ValueError for another shape."""
    tangent = tangent if isinstance(tangent, Tensor) else to_tensor(tangent, dtype=x.dtype, requires_grad=False)
    if np.shape(x) != tangent.shape:
        raise ValueError(f"transforms: expected a tangent or cotangent of shape {np.shape(x)}, got {tangent.shape}")
    return tangent


def jvp(f: Function, primals: Sequence[Tree], tangents: Sequence[Tree]) -> tuple[Tree, Tree]:
    """Return `f(*primals)` and its directional derivative along the tangents, like the result.

    The tangents are computed in the order of f's operations (forward mode), for about the cost of two backward passes.
    """
    inputs = tree_map(_input, tuple(primals))
    directions = tree_leaves(tree_map(_matching, inputs, tuple(tangents)))
    outputs, leaves = tree_map(_constant, f(*inputs)), tree_leaves(inputs)
    results = tree_leaves(outputs)
    order = autograd.topological_order(*(y for y in results if y.requires_grad))
    is_constant = _depend_only_on(leaves, order, directions)
    found = create_graph.tangents(results, leaves, directions, is_constant)
    return outputs, _like(outputs, [_gradient_of(y, tangent) for y, tangent in zip(results, found)])


def hvp(f: Function, primals: Sequence[Tree], tangents: Sequence[Tree]) -> Tree:
    """Return the product of the Hessian of f, whose result has one element, and the tangents: a tuple like primals.

    It is the gradient of the derivative of f along the tangents, which forward mode computes. It costs about as much
    as two and a half gradients.
    """
    inputs = tree_map(_input, tuple(primals))
    directions = tree_leaves(tree_map(_matching, inputs, tuple(tangents)))
    y, leaves = _checked_scalar(f(*inputs)), tree_leaves(inputs)
    slope = create_graph.tangents([y], leaves, directions)
    return _like(inputs, _pull_back(slope, [_ones_like(y)], leaves))


def jacobian(f: Function, argnums: Argnums = 0) -> Function:
    """Return a function that computes f's Jacobian (*y.shape, *x.shape), by a backward pass for each element of y.

    For each Tensor y of the result there is a tree like the argument at `argnums`, of Tensors y.shape + x.shape.
    """

    def jacobian_of(*args: Any, **kwargs: Any) -> Tree:
        chosen, call = _inputs_at(f, args, argnums)
        outputs, inputs = tree_map(_constant, call(chosen, kwargs)), tree_leaves(chosen)

        def rows(y: Tensor) -> Tree:
            basis = y.xp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
            each = [_pull_back([y], [Tensor(vector, False)], inputs, True) for vector in basis]
            columns = [extra_ops.stack(grads) for grads in zip(*each)] or [x[None][:0] for x in inputs]
            stacked = [column.reshape(*y.shape, *x.shape) for x, column in zip(inputs, columns)]
            return _one_or_all(_like(chosen, stacked), argnums)

        return tree_map(rows, outputs)

    return jacobian_of


def hessian(f: Function, argnums: Argnums = 0) -> Function:
    """Return a function that computes the Hessian of f, whose result has one element, as `jacobian` of `grad`."""
    return jacobian(grad(f, argnums), argnums)


# -------------------------------------------------------------------- vmap
def vmap(f: Function, in_axes: int | Sequence[int | None] | None = 0) -> Function:
    """Return a function that applies f to each item along an axis of its arguments and stacks the results on axis 0.

    `vmap(grad(f), (None, 0))` returns the gradient for each item of a batch. f is called once, with `BatchedArray`s; if
    it calls an operation that these do not have, draws dropout masks, or depends on values that differ between items
    (`if x > 0`), it is called for each item.

    Args:
        in_axes: the axis of each argument, or of all; None for arguments that all calls share.

    Raises:
        ValueError: the arguments have no axis to map over, or its lengths differ.
    """

    def mapped(*args: Tree) -> Tree:
        axes = tuple(in_axes) if isinstance(in_axes, Sequence) else (in_axes,) * len(args)
        if len(axes) != len(args):
            raise ValueError(f"vmap: expected in_axes for {len(args)} arguments, got {in_axes}")
        pairs = [(x if axis is None else tree_map(_constant, x), axis) for x, axis in zip(args, axes)]
        leaves = [(x, axis) for tree, axis in pairs if axis is not None for x in tree_leaves(tree)]
        sizes = {_length(x, axis) for x, axis in leaves}
        if len(sizes) != 1:
            raise ValueError(f"vmap: expected mapped axes of one length, got lengths {sorted(sizes)}")
        (n_items,) = sizes
        if not any(x.on_gpu for x, _ in leaves):
            with contextlib.suppress(Exception):  # an error of f is raised again below, for one item
                return _map_at_once(f, pairs, n_items)
        if not n_items:
            raise ValueError("vmap: expected an item or more for a function that is called for each, got none")
        results = [f(*(_item(tree, axis, i) for tree, axis in pairs)) for i in range(n_items)]
        return tree_map(lambda *values: extra_ops.stack(values), *results)

    return mapped


def _constant(x: Any) -> Tensor:
    """Return a Tensor unchanged, and anything else as a Tensor without a gradient, an array in its dtype."""
    return to_tensor(x, dtype=x.dtype, requires_grad=False) if devices.is_array(x) else ops.as_tensor(x)


def _length(x: Tensor, axis: int) -> int:
    """Return the length of an axis of x; raise a ValueError if x does not have it."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"vmap: expected arguments with an axis {axis}, got shape {x.shape}")
    return x.shape[axis]


def _item(tree: Tree, axis: int | None, i: int) -> Tree:
    """Return a tree with item i of each leaf along `axis`; the tree itself if `axis` is None."""
    if axis is None:
        return tree
    return tree_map(lambda x: x[(slice(None),) * (axis % x.ndim) + (i,)], tree)


# Cache: a counter for the process.
_levels = itertools.count(1)


def _map_at_once(f: Function, pairs: Sequence[tuple[Tree, int | None]], n_items: int) -> Tree:
    """Call f once with the arrays of all items; raise some error where this does not give the results of a loop.

    Tensors from outside of f are the same for all items, and get the sum of the items' gradients.
    """
    level = next(_levels)
    autograd.increment_versions(())  # so that Tensors from outside have an earlier version
    first_version = autograd.n_changes
    boundary: list[Tensor] = []  # the inputs of the graph inside
    all_items = partial(items_of, level=level, n_items=n_items)

    def batched(x: Tensor, axis: int) -> Tensor:
        split = lambda a: BatchedArray(np.moveaxis(a, axis, 0), level)
        boundary.append(create_graph.linear_map(x, split, lambda a: np.moveaxis(all_items(a), 0, axis), "vmap"))
        return boundary[-1]

    def inside(x: Tensor) -> Tensor:
        if x._version >= first_version or not x.requires_grad:
            return x
        with enable_grad():  # without the functions of `Mode.on_record`
            same = create_graph.linear_map(x, lambda a: a, lambda a: upcast(all_items(a)).sum(axis=0), "vmap sum")
        same._version, same.is_batched = first_version, x.is_batched  # outside of any call of vmap within this one
        boundary.append(same)
        return same

    def connect(node: Tensor) -> None:
        args = tuple(map(inside, node.args))
        is_changed = any(new is not old for new, old in zip(args, node.args))
        if is_changed and create_graph.rule_of(node)[0] in create_graph.CLOSURES:
            raise NotVectorizedError("an operation whose graph is made of Tensors besides its args")
        node.args = args

    values = [tree if axis is None else tree_map(partial(batched, axis=axis), tree) for tree, axis in pairs]
    with autograd.graph_mode(autograd.Mode(on_record=connect)):
        results = tree_map(lambda y: inside(ops.as_tensor(y)), f(*values))
    kept = [y for y in tree_leaves(results) if y.requires_grad]
    weights = [Tensor(BatchedArray(np.ones_like(all_items(y.array)), level), False) for y in kept]
    _check_backward(kept, weights, boundary)
    join = lambda y: create_graph.linear_map(y, all_items, lambda a: BatchedArray(a, level), "vmap")
    return tree_map(join, results)


def _check_backward(outputs: Sequence[Tensor], weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Run the backward pass from outputs to inputs with and without a graph, only to raise the errors of either now."""
    root = Tensor(np.zeros(()), args=tuple(outputs), backward=lambda grad, needs_grad: [w.array for w in weights])
    sums = autograd.GradientSums(retain_graph=True)
    list(autograd.walk_backward(autograd.topological_order(root, inputs=inputs), root.array, sums))
    for x in inputs:
        sums.take(x)
    create_graph.gradients(outputs, weights, inputs)


# -------------------------------------------------------------------- layers as functions of their parameters
def functional_call(model: Any, parameters: Mapping[str, Operand], *args: Any, **kwargs: Any) -> Any:
    """Return `model(*args, **kwargs)` computed by a copy with these parameters; ValueError for a wrong name or shape.

    Args:
        model: a Layer, of which the call uses a copy with the same arrays and random generators.
        parameters: Tensors or arrays by name, as `dict(model.named_parameters())`; others stay.

    Raises:
        ValueError: the model has no parameter of a name, or it has another shape.
    """
    own = dict(model.named_parameters())
    for name, x in parameters.items():
        if name not in own or own[name].shape != np.shape(x):
            expected = f"shape {own[name].shape}" if name in own else f"one of {', '.join(own)}"
            raise ValueError(f"functional_call: expected {expected}, got {name!r} of shape {np.shape(x)}")
    twins: dict[int, Any] = {id(own[name]): ops.as_tensor(x, own[name]) for name, x in parameters.items()}
    return _replaced(model, twins)(*args, **kwargs)


def _replaced(part: Any, twins: dict[int, Any]) -> Any:
    """Return a tree or layer, copied, with the Tensors in `twins` (by id) replaced; add copies of layers to `twins`."""
    if id(part) in twins:
        return twins[id(part)]
    if isinstance(part, (tuple, list, dict)):
        return tree_map(lambda leaf: _replaced(leaf, twins), part)
    if not hasattr(part, "named_parameters"):
        return part
    twin = twins[id(part)] = copy.copy(part)
    for name, value in vars(part).items():
        vars(twin)[name] = _replaced(value, twins)
    return twin
