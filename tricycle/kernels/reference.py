"""The plain versions: short, right, the same on NumPy and CuPy. Every faster kernel is tested against these.

Shapes: B batch, T queries, S keys, H heads, D head size, C channels, N rows (all leading axes), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from tricycle.backend import Array, array_module

# The kernels: what may have a faster version.
__all__ = [
    "softmax", "softmax1", "softmax_backward", "log_softmax", "gelu", "gelu_with_slope", "gelu_backward",
    "relu_squared", "sigmoid", "multiply", "operand", "operand_and_sums", "activations", "matmul",
    "sum_rows", "sum_squares", "random_mask", "layer_norm", "layer_norm_backward", "embedding_backward",
    "cross_entropy", "cross_entropy_with_slope", "for_items", "attention_scores", "attention", "attention_backward",
    "row_attention", "row_attention_backward", "rotate", "adamw", "orthogonalise", "each", "repeated", "pipeline",
    "rnn", "rnn_backward", "gru", "gru_backward", "lstm", "lstm_backward",
]

Rows = Callable[[Array], Array]
RowsBackward = Callable[[Array, Array, Array], Array]
F = TypeVar("F", bound=Callable)

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


# -------------------------------------------------------------------- floats of 16 bits
def _wide(x: Any) -> Any:
    """Floats of 16 bits as float32; anything else as it is."""
    small = isinstance(getattr(x, "dtype", None), np.dtype) and x.dtype.itemsize == 2 and x.dtype.kind not in "biu"
    return x.astype(np.float32) if small else x


def _widening(n_narrow: int) -> Callable[[F], F]:
    """The kernel for arrays of 16 bits too: computed in float32.

    Args:
        n_narrow: so many of its results come in the dtype of its first array; the others (statistics, losses, sums,
            gradients of parameters) stay float32.
    """

    def decorate(kernel: Any) -> Any:
        @wraps(kernel)
        def run(first: Array, *others: Any) -> Any:
            wide = _wide(first)
            if wide is first:
                return kernel(first, *others)
            results = kernel(wide, *map(_wide, others))
            if not isinstance(results, tuple):
                return results.astype(first.dtype) if n_narrow else results
            return (*(result.astype(first.dtype) for result in results[:n_narrow]), *results[n_narrow:])

        return run

    return decorate


# -------------------------------------------------------------------- softmax and its kin, over the last axis
@_widening(1)
def softmax(x: Array) -> Array:
    """exp(x_i) / sum_j exp(x_j). A row that is -inf everywhere gives zeros."""
    return _normalised_exp(x, attend_nothing=False)


@_widening(1)
def softmax1(x: Array) -> Array:
    """exp(x_i) / (1 + sum_j exp(x_j)) (Miller 2023, "Attention is off by one")."""
    return _normalised_exp(x, attend_nothing=True)


def _normalised_exp(x: Array, attend_nothing: bool) -> Array:
    xp = array_module(x)
    if not x.size:
        return x.copy()
    shift = x.max(axis=-1, keepdims=True)
    if attend_nothing:  # the "1 +" is one more score of 0
        shift = xp.maximum(shift, 0)
    shift = xp.where(xp.isneginf(shift), xp.zeros_like(shift), shift)
    with np.errstate(over="ignore"):  # scores that lie further apart than the dtype reaches give 0, as they should
        y = xp.exp(x - shift)
    total = y.sum(axis=-1, keepdims=True)
    if attend_nothing:
        total += xp.exp(-shift)
    return y / xp.where(total == 0, xp.ones_like(total), total)


@_widening(1)
def softmax_backward(grad: Array, y: Array) -> Array:
    """The gradient of x for y = softmax(x), and for softmax1 too: both have dy_i/dx_j = y_i (delta_ij - y_j)."""
    return y * (grad - (grad * y).sum(axis=-1, keepdims=True))


@_widening(1)
def log_softmax(x: Array) -> Array:
    xp = array_module(x)
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


# -------------------------------------------------------------------- activations
@_widening(1)
def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), by exp(-|x|), which cannot overflow and keeps the precision of small results."""
    xp = array_module(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, small) / (1 + small)


@_widening(1)
def gelu(x: Array) -> Array:
    """Hendrycks and Gimpel 2016, the tanh form that GPT-2 uses."""
    xp = array_module(x)
    return 0.5 * x * (1 + xp.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


@_widening(2)
def gelu_with_slope(x: Array) -> tuple[Array, Array | None]:
    """gelu(x) and its derivative: both need the same tanh, and a product is all that is left for the backward.

    A faster version may give None for the derivative: then `gelu_backward` finds it again in less time than it takes to
    write and read it.
    """
    xp = array_module(x)
    t = xp.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))
    slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * (1 - t * t) * slope)


def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array:
    """The gradient of x, given that of gelu(x), and x or the derivative."""
    return multiply(grad, gelu_with_slope(x)[1] if slope is None else slope)


def relu_squared(x: Array) -> tuple[Array, Array]:
    """max(x, 0) squared, and its derivative."""
    positive = array_module(x).maximum(x, 0)
    return positive * positive, 2 * positive


@_widening(1)
def multiply(a: Array, b: Array) -> Array:
    """a b; b may be a 0-d array."""
    return a * b


# -------------------------------------------------------------------- matrices
def operand(x: Array, precision: str) -> Array:
    """x as a matrix product of that precision takes it: itself, or a copy of 16 bits where that is faster."""
    return x


def operand_and_sums(x: Array, precision: str) -> tuple[Array, Array]:
    """That of (N, C), and its `sum_rows`: a gradient is multiplied, and summed for the bias."""
    return operand(x, precision), sum_rows(x)


def activations(x: Array, precision: str) -> Array:
    """x in the dtype that activations have at that precision: its own, or one of 16 bits where that is faster."""
    return x


def matmul(
    a: Array, b: Array, bias: Array | None = None, out: Array | None = None, dtype: Any = None,
    precision: str = "float32",
) -> Array:
    """a b + bias for matrices (N, K) and (K, M), either of which may be a transposed view, and a bias (M,).

    Args:
        out: where the result goes, if that is known; (N, M), whatever it holds.
        dtype: of the result; that of the operands unless given, float32 if these have 16 bits. Sums have 32 at least.
        precision: "tf32" may round float32 operands to 11 bits for the product.
    """
    if a.dtype.itemsize == 2 or b.dtype.itemsize == 2:
        a, b = a.astype(np.float32), b.astype(np.float32)
    product = array_module(a).matmul(a, b, out=out)
    if bias is not None:
        product += bias
    return product if dtype is None else product.astype(dtype, copy=False)


@_widening(0)
def sum_rows(x: Array) -> Array:
    """(N, C) to (C,)."""
    return x.sum(axis=0)


@_widening(0)
def sum_squares(x: Array) -> Array:
    """The sum of the squares of all elements, a 0-d array."""
    return x.ravel() @ x.ravel()


def random_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Zeros and 1 / keep, each element kept with probability `keep`, on the device and in the dtype of `like`.

    A host generator decides, so a run can be repeated and resumed on any device.
    """
    mask = array_module(like).asarray(generator.random(shape, dtype=np.float32) < keep).astype(like.dtype)
    mask /= keep
    return mask


# -------------------------------------------------------------------- normalisation, over the last axis
@_widening(1)
def layer_norm(x: Array, gain: Array, bias: Array | None, eps: float, centred: bool) -> tuple[Array, Array, Array]:
    """Layer norm (Ba et al. 2016), or RMS norm (Zhang and Sennrich 2019) where not `centred`.

    Args:
        x: (..., C).
        gain, bias: (C,).
        eps: added to the variance (or mean square).

    Returns:
        y: (..., C), and the mean and 1 / deviation of each row (..., 1), which the backward needs.
    """
    xp = array_module(x)
    mean = x.mean(axis=-1, keepdims=True) if centred else xp.zeros_like(x[..., :1])
    difference = x - mean
    scale = 1 / xp.sqrt((difference * difference).mean(axis=-1, keepdims=True) + eps)
    y = difference * scale * gain
    return (y if bias is None else y + bias), mean, scale


@_widening(1)
def layer_norm_backward(
    grad: Array, x: Array, gain: Array, mean: Array, scale: Array, centred: bool
) -> tuple[Array, Array, Array]:
    """The gradients of x, gain and bias."""
    rows = tuple(range(x.ndim - 1))
    normal = (x - mean) * scale
    inner = grad * gain
    dx = inner - normal * (inner * normal).mean(axis=-1, keepdims=True)
    if centred:
        dx -= inner.mean(axis=-1, keepdims=True)
    return dx * scale, (grad * normal).sum(axis=rows), grad.sum(axis=rows)


# -------------------------------------------------------------------- tables and losses
@_widening(0)
def embedding_backward(grad: Array, ids: Array, n_rows: int) -> Array:
    """The gradient of a table whose rows `ids` (N,) gave an output with gradient `grad` (N, C)."""
    xp = array_module(grad)
    table = xp.zeros((n_rows, grad.shape[-1]), grad.dtype)
    xp.add.at(table, ids, grad)
    return table


def cross_entropy(logits: Array, labels: Array, weights: Array, smoothing: float = 0.0) -> Array:
    """Sum over rows of weight * -log softmax(logits)[label], a 0-d array.

    Args:
        logits: (N, V).
        labels: (N,) whole numbers in 0..V-1.
        weights: (N,), 0 for rows that do not count.
        smoothing: the share of a row's weight that all labels have in common.
    """
    return cross_entropy_with_slope(logits, labels, weights, smoothing)[0]


def cross_entropy_with_slope(
    logits: Array, labels: Array, weights: Array, smoothing: float = 0.0
) -> tuple[Array, Array]:
    """The same, and its derivative by the logits (N, V): both need the same exponentials."""
    xp, dtype, logits = array_module(logits), logits.dtype, _wide(logits)
    places = xp.arange(len(labels)), labels
    shifted = logits - logits.max(axis=-1, keepdims=True)
    slope = xp.exp(shifted)
    total = slope.sum(axis=-1)
    # where, for a row that does not count may cost infinitely much, and 0 times that is not 0
    truth = shifted[places] if not smoothing else (1 - smoothing) * shifted[places] + smoothing * shifted.mean(axis=-1)
    costs = xp.where(weights == 0, 0, xp.log(total) - truth)
    slope *= (weights / total)[:, None]
    if smoothing:
        slope -= (weights * (smoothing / logits.shape[1]))[:, None]
    slope[places] -= weights * (1 - smoothing)
    return (costs * weights).sum(), slope.astype(dtype, copy=False)


# -------------------------------------------------------------------- attention
# q: (B, T, H, D). k, v: (B, S, H, D). offset: query t sees the keys up to t + offset; None: all of them.
# mask: added to the scores, 0 or -inf, (B or 1, H or 1, T or 1, S); None: nothing is hidden beside that.
def hidden(xp, n_queries: int, n_keys: int, offset: int) -> Array:
    """(T, S) booleans: True where a query does not see a key."""
    return xp.arange(n_keys) > xp.arange(offset, offset + n_queries)[:, None]


@_widening(1)
def attention(
    q: Array, k: Array, v: Array, offset: int | None, nothing: bool, mask: Array | None = None
) -> tuple[Array, Array]:
    """softmax(q k^T / sqrt(D)) v for every item and head (Vaswani et al. 2017, section 3.2.1).

    Args:
        nothing: beside the keys there is one more, with a score of 0 and a value of zeros, which makes it softmax1.

    Returns:
        out: (B, T, H, D), zeros where a query sees no key, and the log of each row's sum of exponentials (B, H, T),
        -inf there, which the backward needs.
    """
    xp = array_module(q)
    scores = attention_scores(q, k, offset, mask)
    largest = scores.max(axis=-1, keepdims=True)
    largest = xp.maximum(largest, 0) if nothing else xp.where(xp.isneginf(largest), 0, largest)
    weights = xp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if nothing:
        total += xp.exp(-largest)
    empty = total == 0
    total = xp.where(empty, 1, total)
    return _mix(xp, weights / total, v), xp.where(empty, -xp.inf, largest + xp.log(total))[..., 0]


def attention_backward(
    grad: Array, q: Array, k: Array, v: Array, out: Array, log_total: Array, offset: int | None,
    dq: Array, dk: Array, dv: Array, mask: Array | None = None,
) -> None:
    """Write the gradients of q, k and v into dq, dk and dv, whose memory may be strided and hold anything."""
    xp = array_module(q)
    grad, q, k, v, out, mask = map(_wide, (grad, q, k, v, out, mask))
    shift = xp.where(xp.isneginf(log_total), 0, log_total)[..., None]
    weights = xp.exp(attention_scores(q, k, offset, mask) - shift)
    # sum_s weight_s dweight_s is the product of the output with its own gradient
    inner = (_heads_first(grad) * _heads_first(out)).sum(axis=-1, keepdims=True)
    _write_gradients(xp, grad, q, k, v, weights, lambda dweights: weights * (dweights - inner), dq, dk, dv)


@_widening(1)
def row_attention(
    q: Array, k: Array, v: Array, offset: int | None, rows: Rows, mask: Array | None = None
) -> Array:
    """rows(q k^T / sqrt(D)) v for every item and head, with any function of rows of scores in softmax's place.

    Args:
        rows: from scores (..., T, S), -inf where a key is hidden, to weights of that shape.
    """
    xp = array_module(q)
    return _mix(xp, rows(attention_scores(q, k, offset, mask)), v)


def row_attention_backward(
    grad: Array, q: Array, k: Array, v: Array, offset: int | None, rows: Rows, rows_backward: RowsBackward,
    dq: Array, dk: Array, dv: Array, mask: Array | None = None,
) -> None:
    """Write the gradients of q, k and v.

    Args:
        rows_backward: from the gradient of the weights, the scores and the weights to the gradient of the scores.
    """
    xp = array_module(q)
    grad, q, k, v, mask = map(_wide, (grad, q, k, v, mask))
    scores = attention_scores(q, k, offset, mask)
    weights = rows(scores)
    _write_gradients(xp, grad, q, k, v, weights, lambda dweights: rows_backward(dweights, scores, weights), dq, dk, dv)


def for_items(q: Array, work: Callable[[slice], None]) -> None:
    """Let `work` do its part of a computation over a batch for all items; a faster version gives out single ones."""
    work(slice(0, len(q)))


def _heads_first(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)


@_widening(0)
def attention_scores(q: Array, k: Array, offset: int | None, mask: Array | None = None) -> Array:
    """q k^T / sqrt(D) (B, H, T, S), -inf where a key is hidden."""
    xp = array_module(q)
    scores = xp.matmul(_heads_first(q), k.transpose(0, 2, 3, 1)) / math.sqrt(q.shape[-1])
    if offset is not None:
        scores = xp.where(hidden(xp, q.shape[1], k.shape[1], offset), -xp.inf, scores)
    return scores if mask is None else scores + mask


def _mix(xp, weights: Array, v: Array) -> Array:
    """(B, H, T, S) and (B, S, H, D) to (B, T, H, D)."""
    return xp.ascontiguousarray(_heads_first(xp.matmul(weights, _heads_first(v))))


def _write_gradients(xp, grad: Array, q: Array, k: Array, v: Array, weights: Array, to_scores, dq, dk, dv) -> None:
    grad = _heads_first(grad)
    dscores = to_scores(xp.matmul(grad, v.transpose(0, 2, 3, 1))) / math.sqrt(q.shape[-1])
    _heads_first(dq)[...] = xp.matmul(dscores, _heads_first(k))
    _heads_first(dk)[...] = xp.matmul(dscores.swapaxes(-1, -2), _heads_first(q))
    _heads_first(dv)[...] = xp.matmul(weights.swapaxes(-1, -2), grad)


@_widening(1)
def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs (x_i, x_{i + D/2}) by an angle for each position (Su et al. 2021, RoFormer).

    Args:
        x: (B, T, H, D). cos, sin: (T, D/2).
    """
    xp = array_module(x)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# -------------------------------------------------------------------- optimiser
def adamw(
    weights: Array, grad: Array, first: Array, second: Array, step: int, learning_rate: float,
    betas: tuple[float, float], eps: float, decay: float, factor: Array | None = None,
) -> None:
    """One update of AdamW (Loshchilov and Hutter 2019, algorithm 2), in place on weights and both moments.

    Args:
        step: how many updates these weights will have had, this one included; a number or a 0-d array.
        factor: the gradient is multiplied by it, a 0-d array; where it is not above 0, nothing changes.
    """
    xp, changed = array_module(weights), (weights, first, second)
    before = [array.copy() for array in changed if factor is not None]
    grad = grad if factor is None else grad * factor
    beta1, beta2 = betas
    first *= beta1
    first += (1 - beta1) * grad
    second *= beta2
    second += (1 - beta2) * (grad * grad)
    if decay:
        weights *= 1 - learning_rate * decay
    deviation = xp.sqrt(second) / (1 - beta2**step) ** 0.5 + eps
    weights -= learning_rate / (1 - beta1**step) * first / deviation
    for array, old in zip(changed, before):
        array[...] = xp.where(xp.asarray(factor) > 0, array, old)


# How Newton and Schulz's iteration brings singular values near 1 in five steps, whatever they were (at most 1):
# x, x x^T x and (x x^T)^2 x with these weights (Amsel et al. 2025, "The Polar Express").
POLAR = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]


def each(like: Array, calls: Sequence[Callable[[], None]]) -> None:
    """Make some calls that do not depend on each other, long ones first.

    Args:
        like: an array of the kind that they compute with.
    """
    for call in calls:
        call()


def orthogonalise(x: Array, precision: str = "float32") -> Array:
    """Each matrix of (N, R, C) with all its singular values brought near 1: U V^T for U S V^T, about.

    Args:
        precision: of the products.
    """
    xp = array_module(x)
    if x.shape[1] > x.shape[2]:
        return orthogonalise(x.swapaxes(1, 2)).swapaxes(1, 2)
    x = x / (1.01 * xp.sqrt((x * x).sum(axis=(1, 2), keepdims=True)) + 1e-7)
    for a, b, c in POLAR:
        square = xp.matmul(x, x.swapaxes(1, 2))
        x = a * x + xp.matmul(b * square + c * xp.matmul(square, square), x)
    return x


# -------------------------------------------------------------------- recurrence
# One layer over a whole sequence: T steps, B items, H the width of the state, n H columns of gates side by side.
# gates: (T, B, n H), what the inputs give to them; afterwards their values. states: (S, T + 1, B, H), of which those
# before the first step are given. weights (H, n H) and bias (n H,), or None, make the part of the gates that comes from
# states[0], the output. active: (T, B, 1) booleans, or None: an item keeps its states over a step where it is not.
def repeated(matrix: Array) -> Array:
    """A matrix by which many others will be multiplied, `x @ matrix`, one after another."""
    return matrix


def pipeline(gates: Array, pieces: list[slice], first: Callable[[slice], None], then: Callable[[slice], None]) -> None:
    """Both for each piece, in order; `then` may need what `first` did for its piece and for those before."""
    for piece in pieces:
        first(piece)
        then(piece)


def _forward(step: Callable[..., None]) -> Callable[..., None]:
    """The kernel that calls step(gates[t], what the output before adds to them, states before, states after)."""

    @wraps(step)
    def run(gates, states, weights, bias, active, *options) -> None:
        xp = array_module(gates)
        for t in range(gates.shape[0]):
            before, after = states[:, t], states[:, t + 1]
            recurrent = before[0] @ weights
            if bias is not None:
                recurrent += bias
            step(gates[t], recurrent, before, after, *options)
            if active is not None:
                after[...] = xp.where(active[t], after, before)

    return run


def _backward(step: Callable[..., None]) -> Callable[..., None]:
    """The kernel that goes back in time.

    It takes the gradients of the states (S, T + 1, B, H). It writes those of what went into the gates (1, T, B, n H),
    or (2, T, B, n H) where the part from the input and that from the output before differ. In d_states (S, B, H) are
    the whole gradients of the last states, afterwards those of the first.

    step(gates[t], states before, states after, gradients of these, d) writes d, those of what went into the gates, and
    turns the states' gradients into those of the states before, but for what goes through the weights.
    """

    @wraps(step)
    def run(grad, gates, states, weights, active, d_gates, d_states, *options) -> None:
        xp, across, d_output = array_module(grad), weights.T, d_states[0]
        for t in reversed(range(gates.shape[0])):
            d, d_after = d_gates[:, t], None if active is None else d_states.copy()
            step(gates[t], states[:, t], states[:, t + 1], d_states, d, *options)
            if active is not None:
                d[...] = xp.where(active[t], d, 0)
                d_states[...] = xp.where(active[t], d_states, d_after)
            d_output += d[-1] @ across
            d_states += grad[:, t]

    return run


def _columns(x: Array, n: int) -> list[Array]:
    """Views of n equal parts of the last axis."""
    size = x.shape[-1] // n
    return [x[..., i * size : (i + 1) * size] for i in range(n)]


def _to_sigmoid(x: Array) -> None:
    """In place, as tanh(x / 2) / 2 + 1 / 2."""
    x *= 0.5
    array_module(x).tanh(x, out=x)
    x *= 0.5
    x += 0.5


@_forward
def rnn(gate: Array, recurrent: Array, before: Array, after: Array, relu: bool) -> None:
    """h' = tanh(gate), or max(gate, 0) (Elman 1990)."""
    xp = array_module(gate)
    gate += recurrent
    after[0] = xp.maximum(gate, 0) if relu else xp.tanh(gate)


@_backward
def rnn_backward(gate: Array, before: Array, after: Array, d_states: Array, d: Array, relu: bool) -> None:
    h = after[0]
    d[0] = d_states[0] * ((h > 0) if relu else 1 - h * h)
    d_states[...] = 0


@_forward
def gru(gate: Array, recurrent: Array, before: Array, after: Array) -> None:
    """h' = (1 - z) n + z h with gates r, z, n, where n = tanh(its input + r * its recurrent part) (Cho et al. 2014).

    states[1] takes that recurrent part, which the backward needs.
    """
    (r, z, n), n_r_z = _columns(gate, 3), 2 * gate.shape[-1] // 3
    r_z = gate[:, :n_r_z]
    r_z += recurrent[:, :n_r_z]
    _to_sigmoid(r_z)
    after[1] = recurrent[:, n_r_z:]
    n += r * recurrent[:, n_r_z:]
    array_module(n).tanh(n, out=n)
    after[0] = n + z * (before[0] - n)


@_backward
def gru_backward(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
    (r, z, n), (dr, dz, dn), dh = _columns(gate, 3), _columns(d[0], 3), d_states[0]
    rest = 1 - z
    dz[...] = dh * (before[0] - n) * z * rest
    dn[...] = dh * rest * (1 - n * n)
    dr[...] = dn * after[1] * r * (1 - r)
    d[1] = d[0]
    d[1, :, -n.shape[-1] :] *= r
    dh *= z


@_forward
def lstm(gate: Array, recurrent: Array, before: Array, after: Array) -> None:
    """c' = f c + i g and h' = o tanh(c') with gates i, f, g, o; states h and c, and tanh(c'), which the backward needs.

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """
    xp, (i, f, g, o), new = array_module(gate), _columns(gate, 4), after[1]
    gate += recurrent
    candidate = xp.tanh(g)
    _to_sigmoid(gate)  # of whole rows is faster than of three parts
    g[...] = candidate
    xp.multiply(f, before[1], out=new)
    new += i * g
    xp.multiply(o, xp.tanh(new, out=after[2]), out=after[0])


@_backward
def lstm_backward(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
    xp, (i, f, g, o), (di, df, dg, do) = array_module(gate), _columns(gate, 4), _columns(d[0], 4)
    dh, dc, tanh_c, d_gate = d_states[0], d_states[1], after[2], d[0]
    slope = 1 - gate
    slope *= gate
    _columns(slope, 4)[2][...] = 1 - g * g
    xp.multiply(dh, tanh_c, out=do)
    dh *= o
    dc += dh * (1 - tanh_c * tanh_c)
    for out, factor in ((di, g), (df, before[1]), (dg, i)):
        xp.multiply(dc, factor, out=out)
    d_gate *= slope
    dc *= f
    dh[...] = 0
