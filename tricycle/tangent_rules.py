"""Forward-mode rules of models' operations, which `create_graph.tangents` calls in place of transposed gradient rules.

A rule computes the tangent of a node from those of its args. The tangents of fused operations (norms, GELU, attention,
cross-entropy) are fused, too, with one backward function for a Hessian-vector product. Derivatives of higher order use
the unfused forms, and so do arrays for which a rule returns NotImplemented.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from tricycle import functions, kernels, ops
from tricycle.attention.attend import adjacent_like
from tricycle.autograd import OwnedGradient
from tricycle.create_graph import UNFUSED, Tangents, broadcast, rule_of, tangent_rule, tangents, unfused
from tricycle.devices import Array, array_module, on_gpu
from tricycle.kernels import ScoreOptions
from tricycle.kernels.batched import run_over_batch
from tricycle.kernels.reference.attention import mask_scores
from tricycle.layers import LayerNorm
from tricycle.tensor import Tensor, record

CHUNK_SIZE = 2**15  # elements of a chunk whose temporary arrays stay in a CPU's cache
MAX_BLOCK_SCORES = 2**17  # attention scores of a block of queries, for the same reason


# -------------------------------------------------------------------- linear operations
@tangent_rule("tricycle.functions.linear")
def _linear(node: Tensor, directions: Tangents, v: Any) -> Tensor:
    """Return dx W + x dW + db, in at most two products; W transposed if the operation was; a None tangent is 0."""
    (x, weights, *_), (dx, dweights, *biases) = node.args, directions
    pairs = [(a, b) for a, b in ((dx, weights), (x, dweights)) if a is not None and b is not None]
    bias, terms = (*biases, None)[0], []
    for a, b in pairs:
        added = bias if b is pairs[-1][1] else None
        terms.append(functions.linear(a, b, added, precision=v.precision, dtype=node.dtype, transposed=v.transposed))
    if not terms:
        return broadcast(bias, node.shape)  # type: ignore[arg-type]  # one of the three has a tangent
    return terms[0] if len(terms) == 1 else ops.add(*terms)


@tangent_rule("tricycle.ops.getitem", "tricycle.layers.Embedding.forward")
def _getitem(node: Tensor, directions: Sequence[Tensor], v: Any) -> Tensor:
    """Return the selected elements of the tangent."""
    return directions[0][v.index]


@tangent_rule("tricycle.ops._heads_gradient")
def _split_heads(node: Tensor, directions: Sequence[Tensor], v: Any) -> Tensor:
    """Return the tangent's channels of the same heads."""
    (start,), n_channels = node._saved, node.shape[2] * node.shape[3]
    return directions[0][:, :, start : start + n_channels].reshape(node.shape)


# -------------------------------------------------------------------- fused operations
def _fused_tangent(
    node: Tensor, directions: Sequence[Tensor], value: Array, pull_back: Callable[[Array], Sequence[Array | None]]
) -> Tensor:
    """Return `value`, the tangent of a fused operation, as a Tensor in a graph of its args and their tangents.

    Args:
        value: the tangent.
        pull_back: maps its gradient to those of the args, and then of the directions, as arrays of separate memory.
    """
    primal = SimpleNamespace(rule=rule_of(node), saved=node._saved, dtype=node.dtype, n_args=len(node.args))

    def backward(grad: Array, needs_grad: Sequence[bool], primal: Any) -> list[OwnedGradient | None]:
        return [None if array is None else OwnedGradient(array) for array in pull_back(grad)]

    return record(value, (*node.args, *directions), backward, f"{node.name} tangent", None, (primal,))


@unfused("tricycle.tangent_rules._fused_tangent")
def _unfused_tangent(node: Tensor, v: Any) -> Tensor:
    """Recompute the tangent of a fused operation as that of its unfused form."""
    (primal,) = node._saved
    (name, variables), args, directions = primal.rule, node.args[: primal.n_args], node.args[primal.n_args :]
    again: Any = SimpleNamespace(args=args, _saved=primal.saved, dtype=primal.dtype)
    found = tangents([UNFUSED[name](again, variables)], args[: len(directions)], directions)[0]
    return found  # type: ignore[return-value]  # it depends on x


def _is_fusible(node: Tensor, directions: Tangents) -> bool:
    """Return whether args and tangents are arrays, none empty, of the node's library and dtype, not of 16 bits."""
    arrays = [x.array for x in (*node.args, *directions) if x is not None]
    same = all(type(a) is type(node.array) and a.dtype == node.dtype and a.size for a in arrays)
    return same and node.dtype.itemsize > 2 and not hasattr(node.array, "keeps_type")


def _run_in_chunks(work: Callable[[slice], None], like: Array) -> None:
    """Call `work` with slices that cover the rows of an array (N, C): one on a GPU, else chunks, perhaps in threads."""
    n_rows, n_channels = like.shape
    step = n_rows if on_gpu(like) else max(1, CHUNK_SIZE // n_channels)
    slices = [slice(start, start + step) for start in range(0, n_rows, step)]
    kernels.run_independent(like, [(partial(work, rows), step * n_channels, True, True) for rows in slices])


def _dots(a: Array, b: Array) -> Array:
    """Return the dot products (..., 1) of the rows of two arrays (..., C)."""
    return array_module(a).einsum("...i,...i->...", a, b)[..., None]


@tangent_rule("tricycle.activation.GeLU.forward")
def _gelu(node: Tensor, directions: Sequence[Tensor], v: Any) -> Tensor:
    """Return dx gelu'(x) as one operation; NotImplemented if the arrays are not fusible."""
    (x,), (dx,) = node.args, directions
    if not _is_fusible(node, directions):
        return NotImplemented
    slope_of: Callable[[Array], Array] = lambda grad: kernels.gelu_backward(grad, x.array, v.slope)

    def pull_back(grad: Array) -> tuple[Array, Array]:
        to_x = grad * dx.array
        by_row, rows = (a.reshape(-1, a.shape[-1] if a.ndim else 1) for a in (to_x, x.array))
        _run_in_chunks(lambda part: _times_gelu_curvature(by_row[part], rows[part]), by_row)
        return by_row.reshape(x.shape), slope_of(grad)

    return _fused_tangent(node, [dx], slope_of(dx.array), pull_back)


def _times_gelu_curvature(array: Array, x: Array) -> None:
    """Multiply an array in place by the second derivative of the tanh approximation of GELU at x.

    With t = tanh(u) and u' the derivative of u, it is (1 - t^2) (2 u' - u'(0) - x t u'^2).
    """
    square = x * x
    t = array_module(x).tanh(kernels.SQRT_2_OVER_PI * x * (1 + 0.044715 * square))
    slope = kernels.SQRT_2_OVER_PI * (1 + 3 * 0.044715 * square)
    array *= (1 - t * t) * (2 * slope - kernels.SQRT_2_OVER_PI - x * t * slope * slope)


@tangent_rule("tricycle.loss.CrossEntropy._weighted_sum")
def _cross_entropy(node: Tensor, directions: Sequence[Tensor], v: Any) -> Tensor:
    """Return the dot product of the loss's gradient and the logits' tangent; NotImplemented if not fusible."""
    (logits,), (dlogits,), weights = node.args, directions, node._saved[1]
    if not _is_fusible(node, directions):
        return NotImplemented
    rows, drows = (x.array.reshape(v.slope.shape) for x in (logits, dlogits))

    def pull_back(grad: Array) -> tuple[Array, Array]:
        to_logits = kernels.softmax_backward(drows, kernels.softmax(rows)) * (weights * grad)[:, None]
        # the logits of an ignored row may be infinite, and 0 times infinity is NaN
        to_logits = array_module(rows).where(weights[:, None] != 0, to_logits, 0)
        return to_logits.reshape(logits.shape), (v.slope * grad).reshape(logits.shape)

    value = (v.slope * drows).sum()
    return _fused_tangent(node, [dlogits], value, pull_back)


# -------------------------------------------------------------------- norms
@tangent_rule("tricycle.layers.LayerNorm.forward")
def _norm(node: Tensor, directions: Tangents, v: Any) -> Tensor:
    """Return a norm's tangent by x, plus that by gain and bias, as a norm of x; NotImplemented if not fusible."""
    if not _is_fusible(node, directions):
        return NotImplemented
    (x, *parameters), (dx, *others) = node.args, directions
    terms = [] if dx is None else [_norm_tangent_by_input(node, dx, v)]
    if any(d is not None for d in others):
        gain, bias = (*others, None)[:2]
        twin = copy.copy(v.self)
        twin.gain = Tensor(x.xp.zeros_like(parameters[0].array), False) if gain is None else gain
        twin.bias, twin.unit_offset = bias, False
        terms.append(LayerNorm.forward(twin, x, node.dtype))
    return terms[0] if len(terms) == 1 else ops.add(*terms)


def _norm_tangent_by_input(node: Tensor, dx: Tensor, v: Any) -> Tensor:
    """Return J(x) dx gain, in which J(x), the derivative of the normalized x, is a symmetric matrix for each row."""
    x, *parameters = node.args
    n_channels, gain = x.shape[-1], v.gain
    statistics = v.mean, v.scale, v.self._subtract_mean
    jacobian_times: Callable[[Array, Array], Array] = lambda a, factors: kernels.layer_norm_backward(
        a, x.array, factors, *statistics
    )[0]
    normal_tangent = jacobian_times(dx.array, x.xp.ones_like(gain))

    def pull_back(grad: Array) -> list[Array | None]:
        to_x, to_dx = x.xp.empty_like(x.array, order="C"), jacobian_times(grad, gain)
        arrays = (to_x, x.array, v.mean, v.scale, dx.array, grad, normal_tangent, to_dx)
        rows = [a.reshape(-1, a.shape[-1]) for a in arrays]
        _run_in_chunks(lambda part: _second_derivative_of_norm(gain, *(a[part] for a in rows)), rows[0])
        to_gain = kernels.sum_rows((grad * normal_tangent).reshape(-1, n_channels))
        return [to_x, *[to_gain, None][: len(parameters)], to_dx]

    return _fused_tangent(node, [dx], normal_tangent * gain, pull_back)


def _second_derivative_of_norm(
    gain: Array, out: Array, x: Array, mean: Array, scale: Array, dx: Array, grad: Array, j_dx: Array, j_grad: Array
) -> None:
    """Write the gradient of <g, J(x) dx> by x to `out`, for g = grad * gain; arrays (N, C), mean and scale (N, 1).

    With n = (x - mean) scale it is -scale / C (<g, J dx> n + <n, g> J dx + <n, dx> J g).
    """
    normal, g = (x - mean) * scale, grad * gain
    array_module(x).multiply(_dots(normal, dx), j_grad, out=out)
    out += _dots(normal, g) * j_dx
    out += _dots(g, j_dx) * normal
    out *= scale / -x.shape[-1]


# -------------------------------------------------------------------- attention
@tangent_rule("tricycle.attention.attend.Attention.forward")
def _attention(node: Tensor, directions: Sequence[Tensor], v: Any) -> Tensor:
    """Return the tangent of softmax attention in linear memory; NotImplemented with mask, soft-cap, or not fusible."""
    if len(node.args) > 3 or any(x is None for x in directions) or not _is_fusible(node, directions):
        return NotImplemented
    (op, mask), arrays = node._saved, [x.array for x in (*node.args, *directions)]
    options, n_heads = op.score_options(*arrays[:2]), arrays[1].shape[2]
    if not isinstance(op.softmax, functions.Softmax) or mask is not None or options.softcap is not None:
        return NotImplemented
    if (options.offset or 0) < 0:  # some queries have no key
        return NotImplemented
    new_grads = adjacent_like(arrays[:3]), adjacent_like(arrays[3:])
    operands: Callable[[slice], _Operands] = lambda items: _Operands(*(_by_head(a[items], n_heads) for a in arrays))
    out = node.xp.empty(node.shape, node.dtype)

    def forward(items: slice) -> None:
        of_items, mixed = operands(items), _by_head(out[items], n_heads)
        for block in _blocks(of_items, options, op.softmax.off_by_one):
            part = of_items.block(block)
            mixed[..., block.queries, :] = block.dweights @ part.v + block.weights @ part.dv

    def pull_back(grad: Array) -> list[Array]:
        grads = [array for new in new_grads for array in new()]

        def work(items: slice) -> None:
            of_items, totals = operands(items), _Operands(*(_by_head(a[items], n_heads) for a in grads))
            for total in totals:
                total[...] = 0
            for block in _blocks(of_items, options, op.softmax.off_by_one):
                some = _by_head(grad[items], n_heads)[..., block.queries, :]
                _add_attention_gradients(totals.block(block), of_items.block(block), block, some, options.scale)

        run_over_batch(arrays[0], work)
        return grads

    run_over_batch(arrays[0], forward)
    return _fused_tangent(node, directions, out, pull_back)


def _by_head(x: Array, n_key_heads: int) -> Array:
    """Return a view (B, K, H / K, T, D) of queries, keys or values x (B, T, H, D)."""
    n_items, n_rows, n_heads, size = x.shape
    return x.reshape(n_items, n_rows, n_key_heads, n_heads // n_key_heads, size).transpose(0, 2, 3, 1, 4)


class _Block(NamedTuple):
    """The attention weights (..., R, S) of some queries, and their tangents.

    Attributes:
        queries: the rows of the queries, a slice.
        keys: the visible keys, a slice.
        dscores: the tangents of the scores, minus `mean`.
        mean: their sums (..., R, 1), weighted by the weights.
    """

    queries: slice
    keys: slice
    weights: Array
    dscores: Array
    mean: Array
    dweights: Array


class _Operands(NamedTuple):
    """Queries, keys and values (B, K, H / K or 1, T, D), and their tangents or gradients."""

    q: Array
    k: Array
    v: Array
    dq: Array
    dk: Array
    dv: Array

    def block(self, block: _Block) -> _Operands:
        """Return views of the queries and keys of a block."""
        of = (block.queries, block.keys, block.keys) * 2
        return _Operands(*(array[..., rows, :] for array, rows in zip(self, of)))


def _blocks(operands: _Operands, options: ScoreOptions, off_by_one: bool) -> Iterator[_Block]:
    """Yield blocks of queries with their visible keys, attention weights, and the tangents of these."""
    q, k, _, dq, dk, _ = operands
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    step = max(1, MAX_BLOCK_SCORES // (q.shape[1] * q.shape[2] * n_keys))
    for start in range(0, n_queries, step):
        queries, offset = slice(start, min(start + step, n_queries)), options.offset
        keys = slice(0, n_keys if offset is None else offset + queries.stop)
        some, dsome = (options.scale * x[..., queries, :] for x in (q, dq))
        visible, dvisible = (x[..., keys, :].swapaxes(-1, -2) for x in (k, dk))
        scores, dscores = some @ visible, some @ dvisible
        dscores += dsome @ visible
        moved = options._replace(offset=None if offset is None else offset + start)
        four_axes = (len(scores), -1, *scores.shape[-2:])
        weights = kernels.softmax(mask_scores(scores.reshape(four_axes), moved, None), off_by_one).reshape(scores.shape)
        mean = _dots(weights, dscores)
        dscores -= mean
        yield _Block(queries, keys, weights, dscores, mean, weights * dscores)


def _add_attention_gradients(totals: _Operands, x: _Operands, block: _Block, grad: Array, scale: float) -> None:
    """Set a block's query gradients in `totals`, add key and value ones, from the tangent's gradient (..., R, E)."""
    _, _, weights, dscores, mean, dweights = block
    to_dweights, to_weights = (grad @ values.swapaxes(-1, -2) for values in (x.v, x.dv))
    grad_mean = _dots(to_dweights, weights)
    to_dweights -= grad_mean
    to_weights += to_dweights * dscores  # since dweights = weights * (dscores + mean - <weights, dscores + mean>)
    to_weights -= grad_mean * mean  # without effect if the weights sum to 1
    to_dscores = scale * weights * to_dweights
    to_scores = scale * weights * (to_weights - _dots(weights, to_weights))
    totals.q[...] = to_scores @ x.k + to_dscores @ x.dk
    totals.dq[...] = to_dscores @ x.k
    transposed = [a.swapaxes(-1, -2) for a in (to_scores, to_dscores, weights, dweights)]
    _add_over_heads(totals.k, transposed[0] @ x.q + transposed[1] @ x.dq)
    _add_over_heads(totals.dk, transposed[1] @ x.q)
    _add_over_heads(totals.v, transposed[3] @ grad)
    _add_over_heads(totals.dv, transposed[2] @ grad)


def _add_over_heads(total: Array, change: Array) -> None:
    """Add gradients (B, K, H / K, S, D), summed over H / K, in place to those of shared key heads (B, K, 1, S, D)."""
    total += change if change.shape[2] == 1 else change.sum(axis=2, keepdims=True)
