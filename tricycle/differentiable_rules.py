"""Rules of the library's operations, by which `create_graph.gradients` makes gradients that can be differentiated.

A rule computes the gradients of a node's args from that of the node (`rule`), or the node by other operations, through
which the gradients are computed (`unfused`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tricycle import extra_ops, functions, kernels, linalg, ops
from tricycle.activation_checkpointing import recompute_derivatives
from tricycle.create_graph import broadcast, cast, gradients_through, rule, scatter, unbroadcast, unfused
from tricycle.devices import Array, array_module
from tricycle.einsum import contraction, matmul
from tricycle.kernels.activations import gaussian_and_cdf
from tricycle.kernels.reference.attention import mask_scores
from tricycle.tensor import Tensor, record


@rule(
    "tricycle.extra_ops.negative",
    "tricycle.layers.Dropout.forward",
    "tricycle.activation.ReLU.forward",
    elementwise=True,
)
@rule(
    "tricycle.ops.reshape",
    "tricycle.extra_ops.transpose",
    "tricycle.extra_ops.concatenate",
    "tricycle.transforms._pass_gradient",
)
def _same_code(node: Tensor, grad: Tensor, v: Any) -> Sequence[Tensor]:
    """Call the backward function of a linear operation whose code works on Tensors as on arrays."""
    backward: Any = node._backward
    result: Sequence[Tensor] = backward(grad, (True,) * len(node.args), *node._saved)
    return result


# -------------------------------------------------------------------- indexing, shapes, products
@rule(
    "tricycle.functions.to_compute_dtype",
    "tricycle.experts.Router.forward",
    "tricycle.finetuning.lora.AdaptedDense.forward",
)
def _conversion(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of a conversion: `grad` cast to the dtype of the first arg."""
    return [cast(grad, node.args[0].dtype)]


@rule("tricycle.ops.getitem", "tricycle.layers.Embedding.forward")
def _getitem(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of x or a table from that of x[index]: 0 if not selected, the sum if selected repeatedly."""
    return [scatter(grad, v.index, node.args[0].array)]


@rule("tricycle.extra_ops._sliced_gradient")
def _split_sizes(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of x from that of one of its parts: `grad` at the part's slice, 0 elsewhere."""
    return [scatter(grad, node._saved[0], node.args[0].array, unique=True)]


@rule("tricycle.ops._heads_gradient")
def _split_heads(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of x from that of one of its parts: `grad` in the part's channels, 0 elsewhere."""
    (start,), n_channels = node._saved, grad.shape[2] * grad.shape[3]
    index = (slice(None), slice(None), slice(start, start + n_channels))
    return [scatter(grad.reshape(*grad.shape[:2], n_channels), index, node.args[0].array, unique=True)]


@rule("tricycle.extra_ops.stack")
def _stack(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of each stacked Tensor: its place along the stacked axis of `grad`."""
    before = (slice(None),) * (v.axis % node.ndim)
    return [grad[(*before, i)] for i in range(len(node.args))]


@unfused("tricycle.attention.rotary.Rotary.forward")
def _rotary(node: Tensor, v: Any) -> Tensor:
    """Recompute RoPE by operations on Tensors, from the operation's cosines and sines."""
    (x,), half = node.args, v.cos.shape[1]
    cos, sin = v.cos[:, None, :], v.sin[:, None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return extra_ops.concatenate([*rotated, x[..., 2 * half :]], axis=-1)


@rule("tricycle.einsum.contraction_backward")
def _contraction(node: Tensor, grad: Tensor, v: Any) -> list[Tensor | None]:
    """Return the gradients of an einsum's args as contractions of `grad` and the other args; None if not needed."""
    results: list[Tensor | None] = []
    for i, (x, plan) in enumerate(zip(node.args, node._saved[0].gradients)):
        terms = (*node.args[:i], grad, *node.args[i + 1 :])
        results.append(contraction(terms, plan, "einsum").reshape(x.shape) if x.requires_grad else None)
    return results


@rule("tricycle.functions.linear")
def _linear(node: Tensor, grad: Tensor, v: Any) -> list[Tensor | None]:
    """Return the gradients of x, W and (if any) b of x W + b as Tensors; None for an x or W that needs none."""
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
    """Return the signs of x (-1, 0, 1) as a Tensor without a gradient."""
    return Tensor(x.xp.sign(x.array), False, x.is_batched)


# The array module of `unary_op`, for Tensors
TENSOR_MODULE = SimpleNamespace(sin=extra_ops.sin, cos=extra_ops.cos, exp=extra_ops.exp, sign=_sign)


@rule("tricycle.ops.unary_op", elementwise=True)
def _unary(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of an elementwise operation by its own gradient function, applied to Tensors."""
    return [_on_tensors(v.gradient)(TENSOR_MODULE, grad, node.args[0], node)]


@rule("tricycle.ops.binary_op")
def _binary(node: Tensor, grad: Tensor, v: Any) -> list[Tensor | None]:
    """Return each arg's gradient, None if not needed, by the operation's own functions; only one beside a number."""
    left, right = (_on_tensors(getattr(v, side, None)) for side in ("left", "right"))
    if len(node.args) == 1:  # the other operand is a number
        (x,), (a, b, _, *_) = node.args, node._saved
        return [right(grad, a, x, node) if left is None else left(grad, x, b, node)]
    x, y = node.args
    to_x = unbroadcast(left(grad, x, y, node), x.shape) if x.requires_grad else None
    to_y = unbroadcast(right(grad, x, y, node), y.shape) if y.requires_grad else None
    return [to_x, to_y]


def _on_tensors(gradient: Any) -> Any:
    """Return a gradient function in a form for Tensors, by TENSOR_FORMS, or itself; NotImplementedError if foreign."""
    if gradient in TENSOR_FORMS:
        return TENSOR_FORMS[gradient]
    # the code of the library's other gradients works on Tensors, too; that of others might silently make arrays
    if gradient is not None and not gradient.__module__.startswith("tricycle."):
        where = f"{gradient.__module__}.{gradient.__qualname__}"
        raise NotImplementedError(f"create_graph: add {where} to TENSOR_FORMS of tricycle.differentiable_rules")
    return gradient


def _power_left(g: Tensor, x: Tensor, y: Any, z: Tensor) -> Tensor:
    """Return g y x ** (y - 1) as a Tensor, 0 where y is 0."""
    if not isinstance(y, Tensor):
        return g * (y * x ** (y - 1)) if y else g * 0
    y = cast(y, x.dtype)
    return g * y * x ** extra_ops.where((y.array == 0) & (x.array == 0), 1, y - 1)  # 0 times infinity is NaN


def _power_right(g: Tensor, x: Any, y: Tensor, z: Tensor) -> Tensor:
    """Return g z log x as a Tensor, for z = x ** y; 0 where x is not above 0."""
    x = ops.as_tensor(x, y)
    positive = x > 0
    return g * extra_ops.where(positive, z * extra_ops.log(extra_ops.where(positive, x, 1)), 0)


def _extreme_of_two(chosen: Any, x: Any, y: Any) -> Array:
    """Return an operand's share of the gradient, from a mask where it is the result or ties: 1, 0, or 1/2 if x == y."""
    x, y, chosen = (value.array if isinstance(value, Tensor) else value for value in (x, y, chosen))
    return chosen * (1 - 0.5 * (x == y))


TENSOR_FORMS: dict[Any, Any] = {
    extra_ops.power_left: _power_left,
    extra_ops.power_right: _power_right,
    extra_ops.extremes[0]: lambda g, x, y, z: g * _extreme_of_two(x == z, x, y),
    extra_ops.extremes[1]: lambda g, x, y, z: g * _extreme_of_two(y == z, x, y),
}


@rule("tricycle.extra_ops.where")
def _where(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradients of x and y in their shapes: `grad` where it was selected, else 0."""
    x, y = node.args
    chosen = v.chosen
    return [
        unbroadcast(extra_ops.where(chosen, grad, 0), x.shape),
        unbroadcast(extra_ops.where(chosen, 0, grad), y.shape),
    ]


@rule("tricycle.functions.softcap", elementwise=True)
def _softcap(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return `grad` times 1 - tanh(x / cap)^2, with tanh from the result."""
    tanh = node * (1 / node._saved[0])
    return [grad * (1 - tanh * tanh)]


@unfused("tricycle.activation.GeLU.forward")
def _gelu(node: Tensor, v: Any) -> Tensor:
    """Recompute GELU's tanh approximation by operations on Tensors."""
    (x,) = node.args
    return 0.5 * x * (1 + ops.tanh(kernels.SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))))


def normal_cdf(x: Tensor) -> Tensor:
    """Compute the distribution function of the standard normal distribution, elementwise and differentiably."""
    density = lambda grad, needs_grad: (grad * _normal_density(array_module(grad), x.array),)
    return record(gaussian_and_cdf(x.array)[1], (x,), density, "normal_cdf")


def _normal_density(xp: Any, x: Any) -> Any:
    """Return the standard normal density of x, an array or Tensor of the module `xp`, elementwise."""
    return xp.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))


@rule("tricycle.differentiable_rules.normal_cdf", elementwise=True)
def _normal_cdf(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of x: `grad` times the standard normal density of x."""
    return [grad * _normal_density(TENSOR_MODULE, node.args[0])]


@unfused("tricycle.activations.ExactGeLU.forward")
def _exact_gelu(node: Tensor, v: Any) -> Tensor:
    """Recompute x * normal_cdf(x) by operations on Tensors."""
    return node.args[0] * normal_cdf(node.args[0])


@unfused("tricycle.activations.ReLUSquared.forward")
def _relu_squared(node: Tensor, v: Any) -> Tensor:
    """Recompute max(x, 0)^2 by operations on Tensors."""
    positive = extra_ops.maximum(node.args[0], 0)
    return positive * positive


@unfused("tricycle.activation.Swish.forward")
def _swish(node: Tensor, v: Any) -> Tensor:
    """Recompute x * sigmoid(x) by operations on Tensors."""
    return node.args[0] * ops.sigmoid(node.args[0])


@unfused("tricycle.activation.SwiGLU._gate")
def _swiglu(node: Tensor, v: Any) -> Tensor:
    """Recompute a b sigmoid(b) of x = [a, b] by operations on Tensors."""
    (x,), half = node.args, node.shape[-1]
    b = x[..., half:]
    return x[..., :half] * (b * ops.sigmoid(b))


@unfused("tricycle.state_spaces.scan.StateSpaceScan.forward")
def _state_space_scan(node: Tensor, v: Any) -> Tensor:
    """Recompute the scan on Tensors as attention: q k^T times the decay from each earlier token, times values."""
    values, decays, k, q = node.args
    keys, queries, v_by_head = _by_head(k, values.shape[2]), _by_head(q, values.shape[2]), _by_head(values)
    scores = matmul(queries, extra_ops.transpose(keys, 0, 1, 3, 2)) * _decay_weights(decays)
    return extra_ops.transpose(matmul(scores, v_by_head), 0, 2, 1, 3)


@unfused("tricycle.state_spaces.delta_rule.GatedDeltaRule.forward")
def _gated_delta_rule(node: Tensor, v: Any) -> Tensor:
    """Recompute the gated delta rule on Tensors: solve a system for all tokens' updates, then attend to those."""
    values, decays, k, q, strengths = node.args
    keys, queries, by_head = _by_head(k, values.shape[2]), _by_head(q, values.shape[2]), _by_head(values)
    transposed, weights = extra_ops.transpose(keys, 0, 1, 3, 2), _decay_weights(decays)
    factors = extra_ops.transpose(strengths, 0, 2, 1).reshape(*by_head.shape[:3], 1)
    earlier = values.xp.tri(values.shape[1], k=-1, dtype=bool)
    system = extra_ops.where(earlier, matmul(keys, transposed) * weights, 0) * factors
    identity = Tensor(values.xp.eye(values.shape[1], dtype=values.dtype), False)
    updates = linalg.solve(system + identity, by_head * factors)
    return extra_ops.transpose(matmul(matmul(queries, transposed) * weights, updates), 0, 2, 1, 3)


def _by_head(x: Tensor, n_heads: int = 0) -> Tensor:
    """Return x (B, T, G, N) as (B, H, T, N), with each group repeated for its heads; 0 heads for G."""
    heads = np.arange(x.shape[2]).repeat(n_heads // x.shape[2] if n_heads else 1)
    return extra_ops.transpose(x[:, :, heads.tolist()], 0, 2, 1, 3)


def _decay_weights(decays: Tensor) -> Tensor:
    """Return e^(sum of the log decays (B, T, H) after token s until t) as (B, H, t, s), 0 for s > t."""
    xp, n_tokens = decays.xp, decays.shape[1]
    visible = xp.tri(n_tokens, dtype=bool)
    sums = matmul(Tensor(visible.astype(decays.dtype), False), decays)  # (B, T, H), of the decays up to each token
    by_head = extra_ops.transpose(sums, 0, 2, 1)
    exponents = by_head.reshape(*by_head.shape, 1) - by_head.reshape(*by_head.shape[:2], 1, n_tokens)
    return extra_ops.exp(extra_ops.where(visible, exponents, -xp.inf))


# -------------------------------------------------------------------- reductions
@rule("tricycle.extra_ops.sum", "tricycle.extra_ops.mean")
def _sum(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of a sum or mean: `grad`, divided by any count, broadcast to the input's shape."""
    grad = cast(grad, np.result_type(grad.dtype, np.float32)) / v.count if hasattr(v, "count") else grad
    return [broadcast(extra_ops.restore_axes(grad, v.shape, v.axes), v.shape)]


@rule("tricycle.extra_ops._extreme")
def _extreme(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of max or min, divided evenly among equal extremes."""
    chosen = v.array == v.y
    return [extra_ops.restore_axes(grad, v.array.shape, v.axes) * (chosen / chosen.sum(axis=v.axes, keepdims=True))]


# -------------------------------------------------------------------- softmax, norms, losses
@rule("tricycle.functions.RowSoftmax.forward")
def _row_softmax(node: Tensor, grad: Tensor, v: Any) -> Sequence[Tensor | None]:
    """Return the gradient of a softmax's scores; a variant needs `row_softmax_of_tensor`, else NotImplementedError."""
    if isinstance(v.self, functions.Softmax):
        return [node * (grad - (grad * node).sum(axis=-1, keepdims=True))]
    if hasattr(v.self, "row_softmax_of_tensor"):
        return gradients_through(v.self.row_softmax_of_tensor(node.args[0]), node, grad)
    name = type(v.self).__name__
    raise NotImplementedError(f"create_graph: expected {name} to define row_softmax_of_tensor, for its gradient")


@rule("tricycle.functions.LogSoftmax.forward")
def _log_softmax(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return grad - exp(y) sum(grad), the gradient of the scores."""
    return [grad - extra_ops.exp(node) * grad.sum(axis=-1, keepdims=True)]


@unfused("tricycle.layers.LayerNorm.forward")
def _norm(node: Tensor, v: Any) -> Tensor:
    """Recompute a layer or RMS norm by operations on Tensors, in float32 for 16-bit inputs."""
    x, *parameters = node.args
    x = cast(x, np.result_type(x.dtype, np.float32)) if x.dtype.itemsize == 2 else x
    if v.self._subtract_mean:
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / ((x * x).mean(axis=-1, keepdims=True) + v.self.eps).sqrt()
    if parameters:
        x = x * (parameters[0] + 1 if getattr(v.self, "unit_offset", False) else parameters[0])
    return cast(x + parameters[1] if len(parameters) > 1 else x, node.dtype)


@unfused("tricycle.loss.CrossEntropy._weighted_sum")
def _cross_entropy(node: Tensor, v: Any) -> Tensor:
    """Recompute the weighted, label-smoothed sum of cross-entropies by operations on Tensors."""
    (logits,), (ids, weights, smoothing) = node.args, node._saved
    rows = logits.reshape(-1, logits.shape[-1])
    # the loss of an ignored row may be infinite, and 0 times infinity is NaN
    rows = functions.LogSoftmax()(extra_ops.where(weights[:, None] != 0, rows, 0))
    truth = rows[logits.xp.arange(len(ids)), ids]
    if smoothing:
        truth = (1 - smoothing) * truth + smoothing * rows.mean(axis=-1)
    return -(truth * weights).sum()


@rule("tricycle.loss.MeanSquaredError.forward")
def _mean_squared_error(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradients of y_true and y_pred, in this order."""
    y_true, y_pred = node.args
    to_pred = grad * v.scale * (y_pred - y_true)
    return [-to_pred, to_pred]


# -------------------------------------------------------------------- attention
MAX_SCORES = 2**20  # the number of attention scores from which on they are computed for some queries at a time


@unfused("tricycle.attention.attend.Attention.forward")
def _attention(node: Tensor, v: Any) -> Tensor:
    """Recompute attention on Tensors; if it has many scores, by blocks of queries whose scores are not stored."""
    q, k, values, *scales = node.args
    (op, mask), n_queries, n_keys = node._saved, q.shape[1], k.shape[1]
    n_rows = max(1, MAX_SCORES // max(1, len(q) * q.shape[2] * n_keys))
    if n_rows >= n_queries or n_keys < n_queries or not op.softmax.fused:
        return _attend(op, mask, *node.args)
    parts = []
    for start in range(0, n_queries, n_rows):
        stop = min(start + n_rows, n_queries)
        end = n_keys - n_queries + stop if op.causal else n_keys  # the last query of a call is at the last key
        rows = slice(start, stop) if mask is not None and mask.shape[2] > 1 else slice(None)
        attend = partial(_attend, op, None if mask is None else mask[:, :, rows, :end])
        parts.append(recompute_derivatives(attend, q[:, start:stop], k[:, :end], values[:, :end], *scales))
    return extra_ops.concatenate(parts, axis=1)


def _attend(op: Any, mask: Array | None, q: Tensor, k: Tensor, values: Tensor, *scales: Any) -> Tensor:
    """Return attention (B, T, H, E) of q (B, T, H, D) to k and values (B, S, K, ...), by differentiable operations.

    Args:
        scales: parameters of the softmax.
    """
    (n_items, n_queries, n_heads, size), n_keys = q.shape, k.shape[1]
    options = op.score_options(q.array, k.array)
    grouped = (n_items, n_queries, k.shape[2], n_heads // k.shape[2], size)
    queries = q.reshape(grouped).transpose(0, 2, 3, 1, 4)  # (B, K, H / K, T, D)
    keys = k.transpose(0, 2, 3, 1).reshape(n_items, k.shape[2], 1, size, n_keys)
    scores = matmul(queries, keys).reshape(n_items, n_heads, n_queries, n_keys) * options.scale
    if options.softcap is not None:
        scores = functions.softcap(scores, options.softcap)
    hidden = mask_scores(q.xp.zeros((1, 1, n_queries, n_keys), q.dtype), options, mask)
    if hasattr(op.softmax, "scales_of_queries"):
        scales = tuple(op.softmax.scales_of_queries(x, options.offset or 0, n_queries, n_keys) for x in scales)
    weights = op.softmax(scores + hidden, *scales).reshape(*queries.shape[:4], n_keys)
    mixed = matmul(weights, values.transpose(0, 2, 1, 3).reshape(n_items, k.shape[2], 1, n_keys, values.shape[3]))
    return mixed.transpose(0, 3, 1, 2, 4).reshape(n_items, n_queries, n_heads, values.shape[3])
