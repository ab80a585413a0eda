"""Gradients that can be differentiated: for each operation, its backward function written in operations on Tensors.

The backward function of a node maps arrays to arrays, which is fast, but records nothing. `gradients` calls, in its
place, the rule of the operation: a function (node, grad, variables), or the backward function itself where its code
also works on Tensors. `variables` has the local variables that the backward function uses, such as `axes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from tricycle import extra_ops, functions, kernels, ops
from tricycle.activations import erf
from tricycle.autograd import SlicedGradient, check_unchanged, current_modes, sum_slices, topological_order
from tricycle.devices import Array, array_module
from tricycle.einsum import contraction, gradient_labels, matmul
from tricycle.kernels.reference.attention import mask_scores
from tricycle.tensor import Tensor, record

Rule: TypeAlias = Callable[[Tensor, Tensor, Any], Sequence[Tensor | None]]
Unfused: TypeAlias = Callable[[Tensor, Any], Tensor]

RULES: dict[str, Rule] = {}  # by the function that records the node: "tricycle.extra_ops.sum"
# Functions whose backward function also accepts a Tensor, and depends on no values of the inputs
ACCEPT_TENSORS = {
    f"tricycle.{name}"
    for name in "extra_ops.negative extra_ops.concatenate extra_ops.transpose ops.reshape "
    "functions.add_residual layers.Dropout.forward activation.ReLU.forward".split()
}


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
    for node, grad in zip(nodes, grads, strict=True):
        if grad is None or not node.requires_grad:
            continue
        if node.dtype.kind == "c":
            raise TypeError(f"create_graph: expected real numbers, got {node.dtype} of shape {node.shape}")
        grad = cast(grad, node.dtype)
        sums[node] = ops.add(sums[node], grad) if node in sums else grad


def _apply_rule(node: Tensor, grad: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of the args of a node, as Tensors with a graph."""
    name, backward = recorded_by(node), node._backward
    if name in ACCEPT_TENSORS:
        return backward(grad, [arg.requires_grad for arg in node.args], *node._saved)  # type: ignore[misc]
    if name not in RULES:
        rule = "RULES of tricycle.differentiable_rules has no entry: compose it of other operations, or add one"
        raise NotImplementedError(f"create_graph: {name} has no gradient that can be differentiated; {rule}")
    return RULES[name](node, grad, SimpleNamespace(**closure_of(backward)))


def recorded_by(node: Tensor) -> str:
    """Return the full name of the function that recorded a node, or of its backward function if that is no closure."""
    backward: Any = node._backward
    return f"{backward.__module__}.{backward.__qualname__.partition('.<locals>')[0]}"


def closure_of(function: Any) -> dict[str, Any]:
    """Return the variables of outer functions that a function uses."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    return {name: cell.cell_contents for name, cell in cells}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to RULES, for the functions of these names in the package `tricycle`."""

    def decorate(function: Rule) -> Rule:
        RULES.update({f"tricycle.{name}": function for name in names})
        return function

    return decorate


def unfused(*names: str) -> Callable[[Unfused], Unfused]:
    """Return a decorator like `rule` for a function (node, variables) that recomputes the node by other operations."""

    def decorate(function: Unfused) -> Unfused:
        rule(*names)(lambda node, grad, variables: gradients_through(function(node, variables), node, grad))
        return function

    return decorate


def gradients_through(result: Tensor, node: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the args of a node, with `result`, computed from the same args, in its place."""
    args = list(dict.fromkeys(node.args))  # an arg that occurs twice gets its gradient once
    found = dict(zip(args, gradients([result], [grad], args)))
    return [found.pop(arg, None) for arg in node.args]


# -------------------------------------------------------------------- linear maps of arrays
def linear_map(x: Tensor, forward: Callable[[Array], Array], transpose: Callable[[Array], Array], name: str) -> Tensor:
    """Apply a linear function of arrays whose gradient is `transpose`, also a linear function of arrays."""
    return record(forward(x.array), (x,), lambda grad, needs_grad, forward: (transpose(grad),), name, False, (forward,))


@rule("differentiable_rules.linear_map")
def _linear_map(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
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


@rule("functions.to_compute_dtype")
def _to_compute_dtype(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    return [cast(grad, v.x.dtype)]


@rule("ops.getitem")
def _getitem(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    return [scatter(grad, v.index, node.args[0].array)]


@rule("extra_ops._sliced_gradient")
def _split_sizes(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    return [scatter(grad, node._saved[0], node.args[0].array, unique=True)]


@rule("ops._heads_gradient")
def _split_heads(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    (start,), n_channels = node._saved, grad.shape[2] * grad.shape[3]
    index = (slice(None), slice(None), slice(start, start + n_channels))
    return [scatter(grad.reshape(*grad.shape[:2], n_channels), index, node.args[0].array, unique=True)]


@rule("layers.Embedding.forward")
def _embedding(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    return [scatter(grad, v.index, node.args[0].array)]


@rule("extra_ops.stack")
def _stack(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    before = (slice(None),) * (v.axis % node.ndim)
    return [grad[(*before, i)] for i in range(len(node.args))]


@unfused("attention.rotary.Rotary.forward")
def _rotary(node: Tensor, v: Any) -> Tensor:
    (x,), half = node.args, v.cos.shape[1]
    cos, sin = v.cos[:, None, :], v.sin[:, None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return extra_ops.concatenate([*rotated, x[..., 2 * half :]], axis=-1)


@rule("einsum.contraction")
def _contraction(node: Tensor, grad: Tensor, v: Any) -> list[Tensor | None]:
    results: list[Tensor | None] = []
    for i, x in enumerate(node.args):
        terms = node.args[:i] + (grad,) + node.args[i + 1 :]
        labels = gradient_labels(i, x.shape, v.labels, v.out, v.sizes)
        results.append(contraction(terms, *labels, v.sizes, "einsum").reshape(x.shape) if x.requires_grad else None)
    return results


@rule("functions.linear")
def _linear(node: Tensor, grad: Tensor, v: Any) -> list[Tensor | None]:
    x, weights, *_ = node.args
    dx = dweights = None
    dy, rows = grad.reshape(v.n_rows, v.to_size), x.reshape(v.n_rows, x.shape[-1])
    if x.requires_grad:
        dx = functions.linear(dy, weights, None, precision=v.precision, transposed=not v.transposed).reshape(x.shape)
    if weights.requires_grad:
        left, right = (dy, rows) if v.transposed else (rows, dy)
        dweights = functions.linear(left.transpose(), right, precision=v.precision)
    return [dx, dweights, dy.sum(axis=0)][: len(node.args)]


# -------------------------------------------------------------------- elementwise
def _sign(x: Tensor) -> Tensor:
    return Tensor(x.xp.sign(x.array), False, x.is_batched)


# The array module of `unary_op`, for Tensors
TENSOR_MODULE = SimpleNamespace(sin=extra_ops.sin, cos=extra_ops.cos, exp=extra_ops.exp, sign=_sign)


@rule("ops.unary_op")
def _unary(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    return [_on_tensors(v.gradient)(TENSOR_MODULE, grad, node.args[0], node)]


@rule("ops.binary_op")
def _binary(node: Tensor, grad: Tensor, v: Any) -> list[Tensor | None]:
    left, right = (_on_tensors(getattr(v, side, None)) for side in ("left", "right"))
    if len(node.args) == 1:  # the other operand is a number
        (x,), (a, b, _, *_) = node.args, node._saved
        return [right(grad, a, x, node) if left is None else left(grad, x, b, node)]
    x, y = node.args
    to_x = unbroadcast(left(grad, x, y, node), x.shape) if x.requires_grad else None
    to_y = unbroadcast(right(grad, x, y, node), y.shape) if y.requires_grad else None
    return [to_x, to_y]


def _on_tensors(gradient: Any) -> Any:
    """Return a function of `unary_op` or `binary_op` that computes a gradient, in a form for Tensors."""
    if gradient in TENSOR_FORMS:
        return TENSOR_FORMS[gradient]
    # the code of the library's other gradients works on Tensors, too; that of others might silently make arrays
    if gradient is not None and not gradient.__module__.startswith("tricycle."):
        where = f"{gradient.__module__}.{gradient.__qualname__}"
        raise NotImplementedError(f"create_graph: add {where} to TENSOR_FORMS of tricycle.differentiable_rules")
    return gradient


def _power_left(g: Tensor, x: Tensor, y: Any, z: Tensor) -> Tensor:
    if not isinstance(y, Tensor):
        return g * (y * x ** (y - 1)) if y else g * 0
    y = cast(y, x.dtype)
    return g * y * x ** extra_ops.where(y == 0, 1, y - 1)


def _power_right(g: Tensor, x: Any, y: Tensor, z: Tensor) -> Tensor:
    x = ops.as_tensor(x, y)
    positive = x > 0
    return g * extra_ops.where(positive, z * extra_ops.log(extra_ops.where(positive, x, 1)), 0)


def _extreme_of_two(chosen: Any, x: Any, y: Any) -> Array:
    """Return the share of the gradient of one of two operands: 1 or 0, and 1/2 where they are equal."""
    x, y, chosen = (value.array if isinstance(value, Tensor) else value for value in (x, y, chosen))
    return chosen * (1 - 0.5 * (x == y))


TENSOR_FORMS: dict[Any, Any] = {
    extra_ops.power_left: _power_left,
    extra_ops.power_right: _power_right,
    extra_ops.extremes[0]: lambda g, x, y, z: g * _extreme_of_two(x == z, x, y),
    extra_ops.extremes[1]: lambda g, x, y, z: g * _extreme_of_two(y == z, x, y),
}


@rule("extra_ops.where")
def _where(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    x, y = node.args
    chosen = v.chosen
    return [
        unbroadcast(extra_ops.where(chosen, grad, 0), x.shape),
        unbroadcast(extra_ops.where(chosen, 0, grad), y.shape),
    ]


@rule("functions.softcap")
def _softcap(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    tanh = node * (1 / node._saved[0])
    return [grad * (1 - tanh * tanh)]


@unfused("activation.GeLU.forward")
def _gelu(node: Tensor, v: Any) -> Tensor:
    (x,) = node.args
    return 0.5 * x * (1 + ops.tanh(kernels.SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))))


def normal_cdf(x: Tensor) -> Tensor:
    """Compute the normal distribution function, elementwise."""
    density = lambda grad, needs_grad: (grad * _normal_density(array_module(grad), x.array),)
    return record(0.5 * (1 + erf(x.array * math.sqrt(0.5))), (x,), density, "normal_cdf")


def _normal_density(xp: Any, x: Any) -> Any:
    return xp.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))


@rule("differentiable_rules.normal_cdf")
def _normal_cdf(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    return [grad * _normal_density(TENSOR_MODULE, node.args[0])]


@unfused("activations.ExactGeLU.forward")
def _exact_gelu(node: Tensor, v: Any) -> Tensor:
    return node.args[0] * normal_cdf(node.args[0])


@unfused("activations.ReLUSquared.forward")
def _relu_squared(node: Tensor, v: Any) -> Tensor:
    positive = extra_ops.maximum(node.args[0], 0)
    return positive * positive


@unfused("activation.Swish.forward")
def _swish(node: Tensor, v: Any) -> Tensor:
    return node.args[0] * ops.sigmoid(node.args[0])


@unfused("activation.SwiGLU._gate")
def _swiglu(node: Tensor, v: Any) -> Tensor:
    (x,), half = node.args, node.shape[-1]
    b = x[..., half:]
    return x[..., :half] * (b * ops.sigmoid(b))


# -------------------------------------------------------------------- reductions
@rule("extra_ops.sum", "extra_ops.mean")
def _sum(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    grad = grad / v.count if hasattr(v, "count") else grad
    return [broadcast(_restored(grad, v.shape, v.axes), v.shape)]


def _restored(grad: Tensor, shape: tuple[int, ...], axes: Iterable[int]) -> Tensor:
    """Return the gradient of a reduction with the reduced axes restored, of length 1."""
    return grad.reshape(tuple(1 if i in axes else n for i, n in enumerate(shape)))


@rule("extra_ops._extreme")
def _extreme(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    chosen = v.array == v.y
    return [_restored(grad, v.array.shape, v.axes) * (chosen / chosen.sum(axis=v.axes, keepdims=True))]


# -------------------------------------------------------------------- softmax, norms, losses
@rule("functions.RowSoftmax.forward")
def _row_softmax(node: Tensor, grad: Tensor, v: Any) -> Sequence[Tensor | None]:
    if isinstance(v.self, functions.Softmax):
        return [node * (grad - (grad * node).sum(axis=-1, keepdims=True))]
    if hasattr(v.self, "row_softmax_of_tensor"):
        return gradients_through(v.self.row_softmax_of_tensor(node.args[0]), node, grad)
    name = type(v.self).__name__
    raise NotImplementedError(f"create_graph: expected {name} to define row_softmax_of_tensor, for its gradient")


@rule("functions.LogSoftmax.forward")
def _log_softmax(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    return [grad - extra_ops.exp(node) * grad.sum(axis=-1, keepdims=True)]


@unfused("layers.LayerNorm.forward")
def _norm(node: Tensor, v: Any) -> Tensor:
    x, *parameters = node.args
    x = cast(x, np.result_type(x.dtype, np.float32)) if x.dtype.itemsize == 2 else x
    if v.self._subtract_mean:
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / ((x * x).mean(axis=-1, keepdims=True) + v.self.eps).sqrt()
    if parameters:
        x = x * (parameters[0] + 1 if getattr(v.self, "unit_offset", False) else parameters[0])
    return cast(x + parameters[1] if len(parameters) > 1 else x, node.dtype)


@unfused("loss.CrossEntropy._weighted_sum")
def _cross_entropy(node: Tensor, v: Any) -> Tensor:
    (logits,), (ids, weights, smoothing) = node.args, node._saved
    counted = weights.nonzero()[0]  # the loss of an ignored row may be infinite, and 0 times infinity is NaN
    rows = functions.LogSoftmax()(logits.reshape(-1, logits.shape[-1])[counted])
    truth = rows[logits.xp.arange(len(counted)), ids[counted]]
    if smoothing:
        truth = (1 - smoothing) * truth + smoothing * rows.mean(axis=-1)
    return -(truth * weights[counted]).sum()


@rule("loss.MeanSquaredError.forward")
def _mean_squared_error(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    y_true, y_pred = node.args
    to_pred = grad * v.scale * (y_pred - y_true)
    return [-to_pred, to_pred]


# -------------------------------------------------------------------- attention
@unfused("attention.attend.Attention.forward")
def _attention(node: Tensor, v: Any) -> Tensor:
    """Compute attention by operations on Tensors, in memory quadratic in the number of tokens."""
    q, k, values, *scales = node.args
    (op, mask), (n_items, n_queries, n_heads, size), n_keys = node._saved, q.shape, k.shape[1]
    options = op.score_options(q.array, k.array)
    grouped = (n_items, n_queries, k.shape[2], n_heads // k.shape[2], size)
    queries = q.reshape(grouped).transpose(0, 2, 3, 1, 4)  # (B, K, H / K, T, D)
    keys = k.transpose(0, 2, 3, 1).reshape(n_items, k.shape[2], 1, size, n_keys)
    scores = matmul(queries, keys).reshape(n_items, n_heads, n_queries, n_keys) * options.scale
    if options.softcap is not None:
        scores = functions.softcap(scores, options.softcap)
    hidden = mask_scores(q.xp.zeros((1, 1, n_queries, n_keys), q.dtype), options, mask)
    if hasattr(op.softmax, "scales_of_queries"):
        scales = [op.softmax.scales_of_queries(x, options.offset or 0, n_queries, n_keys) for x in scales]
    weights = op.softmax(scores + hidden, *scales).reshape(*queries.shape[:4], n_keys)
    mixed = matmul(weights, values.transpose(0, 2, 1, 3).reshape(n_items, k.shape[2], 1, n_keys, values.shape[3]))
    return mixed.transpose(0, 3, 1, 2, 4).reshape(node.shape)
