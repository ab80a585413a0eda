"""The plain kernels: functions of arrays, right on NumPy and CuPy, against which every faster version is tested.

Calling `kernels.gelu` runs a faster version where one is registered for the type of its first array (`dispatch.py`);
`kernels.gelu.reference` is the plain one. Shapes: N rows (all leading axes), C channels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import KERNELS as KERNELS
from tricycle.kernels.dispatch import kernel, upcast, upcasting_kernel
from tricycle.kernels.reference.attention import ScoreOptions as ScoreOptions
from tricycle.kernels.reference.attention import attention as attention
from tricycle.kernels.reference.attention import attention_backward as attention_backward

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
explain: Callable[..., Any]  # which version runs for some arguments, and why: `explanation.py`
FEW_ROWS = 16  # a product with so few rows takes the time in which the other matrix comes from memory


@kernel
def matmul_operand(x: Array, precision: str) -> Array:
    """x as a matrix product of that precision takes it: itself, or a copy of 16 bits where that is faster."""
    return x


@kernel
def matmul_operand_and_sums(x: Array, precision: str) -> tuple[Array, Array]:
    """`matmul_operand` of (N, C), and its `sum_rows`: a gradient is multiplied, and summed for the bias."""
    return matmul_operand.reference(x, precision), sum_rows.reference(x)


@kernel
def to_compute_dtype(x: Array, precision: str) -> Array:
    """x in the dtype that is computed in at that precision: its own, or one of 16 bits where that is faster."""
    return x


@kernel
def matmul(
    a: Array,
    b: Array,
    bias: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> Array:
    """a b + bias (M,) for matrices (N, K) and (K, M), which may be transposed views, written into `out` if given.

    The result has `dtype`, or that of the operands, float32 if these have 16 bits; sums have at least float32. "tf32"
    as precision may round float32 operands to 11 bits for the product.
    """
    product = array_module(a).matmul(upcast(a), upcast(b), out=out)
    if bias is not None:
        product += bias
    return product if dtype is None else product.astype(dtype, copy=False)


@upcasting_kernel(0)
def sum_rows(x: Array) -> Array:
    """(N, C) to (C,)."""
    return x.sum(axis=0)


@upcasting_kernel(0)
def sum_squares(x: Array) -> Array:
    """The sum of the squares of all elements, a 0-d array."""
    return x.ravel() @ x.ravel()


@upcasting_kernel(1)
def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), by exp(-|x|), which cannot overflow and keeps the precision of small results."""
    xp = array_module(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, small) / (1 + small)


@upcasting_kernel(1)
def gelu(x: Array) -> Array:
    """Hendrycks and Gimpel 2016, the tanh form that GPT-2 uses."""
    return 0.5 * x * (1 + array_module(x).tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


@upcasting_kernel(2)
def gelu_with_derivative(x: Array) -> tuple[Array, Array | None]:
    """gelu(x) and its derivative, or None for it: then `gelu_backward` computes it again from x."""
    t = array_module(x).tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))
    slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * (1 - t * t) * slope)


@kernel
def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array:
    """The gradient of x, given that of gelu(x), and x or the derivative."""
    return multiply.reference(grad, gelu_with_derivative.reference(x)[1] if slope is None else slope)


@upcasting_kernel(1)
def swiglu(x: Array) -> Array:
    """a b sigmoid(b) for [a, b] = x along the last axis (Shazeer 2020)."""
    half = x.shape[-1] // 2
    b = x[..., half:]
    return x[..., :half] * (b * sigmoid(b))


@upcasting_kernel(1)
def swiglu_backward(grad: Array, x: Array) -> Array:
    """The gradient of x, given that of swiglu(x). The sigmoids are computed again, and need no memory."""
    x = upcast(x)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    gate = sigmoid(b)
    dx = array_module(x).empty(x.shape, grad.dtype)
    dx[..., :half], dx[..., half:] = grad * (b * gate), grad * a * gate * (1 + b * (1 - gate))
    return dx


@upcasting_kernel(1)
def multiply(a: Array, b: Array) -> Array:
    """a b; b may be a 0-d array."""
    return a * b


@kernel
def add(a: Array, b: Array, out: Array | None = None) -> Array:
    """a + b of one shape, written into `out` where that is given; it may be a or b."""
    return a + b if out is None else array_module(a).add(a, b, out=out)


@kernel
def dropout_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Draw 1 / keep with probability `keep`, else 0, on the host, for arrays like `like`: the same on any device."""
    mask = array_module(like).asarray(generator.random(shape, dtype=np.float32) < keep).astype(like.dtype)
    mask /= keep
    return mask


@upcasting_kernel(1)
def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (x_i, x_{i + D/2}) of (B, T, H, D) by angles (T, D/2) (Su et al. 2021, "RoFormer")."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return array_module(x).concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@upcasting_kernel(1)
def softmax(x: Array, off_by_one: bool = False) -> Array:
    """exp(x_i) / sum_j exp(x_j), or softmax1, with 1 added to the sum. A row that is -inf everywhere gives zeros."""
    xp = array_module(x)
    if not x.size:
        return x.copy()
    shift = x.max(axis=-1, keepdims=True)
    shift = xp.maximum(shift, 0) if off_by_one else xp.where(xp.isneginf(shift), 0, shift)
    with np.errstate(over="ignore"):  # scores further apart than the dtype reaches give 0, as they should
        y = xp.exp(x - shift)
    total = y.sum(axis=-1, keepdims=True)
    if off_by_one:  # the 1 is one more score of 0
        total += xp.exp(-shift)
    return y / xp.where(total == 0, 1, total)


@upcasting_kernel(1)
def softmax_backward(grad: Array, y: Array) -> Array:
    """The gradient of x for y = softmax(x) or softmax1(x): both have dy_i/dx_j = y_i (delta_ij - y_j)."""
    return y * (grad - (grad * y).sum(axis=-1, keepdims=True))


@upcasting_kernel(1)
def log_softmax(x: Array) -> Array:
    if not x.size:
        return x.copy()
    xp, shifted = array_module(x), x - x.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


@kernel
def layer_norm(
    x: Array, gain: Array, bias: Array | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> tuple[Array, Array, Array]:
    """Layer norm (Ba et al. 2016), or RMS norm (Zhang and Sennrich 2019) where not `subtract_mean`, of x (..., C).

    Returns y in `dtype` or that of x, and for the backward the mean and 1 / deviation of each row (..., 1).
    """
    xp, dtype, x = array_module(x), dtype or x.dtype, upcast(x)
    mean = x.mean(axis=-1, keepdims=True) if subtract_mean else xp.zeros_like(x[..., :1])
    difference = x - mean
    scale = 1 / xp.sqrt((difference * difference).mean(axis=-1, keepdims=True) + eps)
    y = difference * scale * gain
    return (y if bias is None else y + bias).astype(dtype, copy=False), mean, scale


@kernel
def layer_norm_backward(
    grad: Array, x: Array, gain: Array, mean: Array, scale: Array, subtract_mean: bool
) -> tuple[Array, Array, Array]:
    """The gradients of x, in its dtype, of gain and of bias."""
    dtype, rows = x.dtype, tuple(range(x.ndim - 1))
    grad, x = upcast(grad), upcast(x)
    normal, inner = (x - mean) * scale, grad * gain
    dx = inner - normal * (inner * normal).mean(axis=-1, keepdims=True)
    if subtract_mean:
        dx -= inner.mean(axis=-1, keepdims=True)
    return (dx * scale).astype(dtype, copy=False), (grad * normal).sum(axis=rows), grad.sum(axis=rows)


@kernel
def cross_entropy(
    logits: Array, labels: Array, weights: Array, smoothing: float = 0.0, with_gradient: bool = True
) -> tuple[Array, Array | None]:
    """The sum over rows of weight * -log softmax(logits)[label], for logits (N, V), labels (N,) and weights (N,).

    A weight is 0 where a row does not count; `smoothing` is the part of it that all labels share. With it comes the
    derivative by the logits (N, V), which needs the same exponentials, or None without `with_gradient`.
    """
    xp, dtype, logits = array_module(logits), logits.dtype, upcast(logits)
    places = xp.arange(len(labels)), labels
    shifted = logits - logits.max(axis=-1, keepdims=True)
    slope = xp.exp(shifted)
    total, truth = slope.sum(axis=-1), shifted[places]
    if smoothing:
        truth = (1 - smoothing) * truth + smoothing * shifted.mean(axis=-1)
    # where, for a row that does not count may cost infinitely much, and 0 times that is not 0
    costs = xp.where(weights == 0, 0, xp.log(total) - truth)
    slope *= (weights / total)[:, None]
    if smoothing:
        slope -= (weights * (smoothing / logits.shape[1]))[:, None]
    slope[places] -= weights * (1 - smoothing)
    return (costs * weights).sum(), slope.astype(dtype, copy=False) if with_gradient else None


@upcasting_kernel(0)
def embedding_backward(grad: Array, ids: Array, n_rows: int) -> Array:
    """The gradient of a table whose rows `ids` (N,) gave an output with gradient `grad` (N, C)."""
    xp = array_module(grad)
    table = xp.zeros((n_rows, grad.shape[-1]), grad.dtype)
    xp.add.at(table, ids, grad)
    return table


@kernel
def adamw(
    weights: Array,
    grad: Array,
    first: Array,
    second: Array,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    factor: Array | float | None = None,
) -> None:
    """Update `step`, from 1, of AdamW (Loshchilov and Hutter 2019, algorithm 2), in place on weights and both moments.

    `factor` multiplies the gradient; where it is not above 0, nothing changes. Both may be 0-d arrays.
    """
    xp = array_module(weights)
    changed = (weights, first, second)
    weights, first, second = (upcast(array) if factor is None else upcast(array).copy() for array in changed)
    grad = upcast(grad) if factor is None else upcast(grad) * factor
    beta1, beta2 = betas
    first *= beta1
    first += (1 - beta1) * grad
    second *= beta2
    second += (1 - beta2) * (grad * grad)
    if decay:
        weights *= 1 - learning_rate * decay
    deviation = xp.sqrt(second) / (1 - beta2**step) ** 0.5 + eps
    weights -= learning_rate / (1 - beta1**step) * first / deviation
    for array, new in zip(changed, (weights, first, second)):
        if new is not array:
            array[...] = new if factor is None else xp.where(xp.asarray(factor) > 0, new, array)


@kernel
def run_independent(like: Array, jobs: Sequence[tuple[Callable[[], Any], int, bool, bool]]) -> list[Any]:
    """Call functions that do not depend on each other, which compute with arrays like `like`; return their results.

    A job is a function, the number of elements that it computes with, whether it may run in any thread, at the same
    time as others, and whether it uses one thread only.
    """
    return [job[0]() for job in jobs]
