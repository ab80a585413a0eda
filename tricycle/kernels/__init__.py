"""Reference kernels in NumPy and CuPy: products, activations, norms, softmax, losses and optimizer updates.

`kernels.gelu(x)` runs the first provider that accepts x (`dispatch.py`); `kernels.gelu.reference(x)` the code here.
Shapes: N rows (all leading axes), C channels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import KERNELS as KERNELS
from tricycle.kernels.dispatch import kernel, upcasting_kernel
from tricycle.kernels.dispatch import upcast as upcast
from tricycle.kernels.reference.attention import ScoreOptions as ScoreOptions
from tricycle.kernels.reference.attention import attention as attention
from tricycle.kernels.reference.attention import attention_backward as attention_backward

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
explain: Callable[..., Any]  # which provider runs for given arguments, and why: `explanation.py`
LARGE = 2**18  # from this number of elements on, threads share elementwise functions and reductions
FEW_ROWS = 16  # up to this number of rows a matrix product is limited by the memory bandwidth of the other matrix


@kernel
def matmul_operand(x: Array, precision: str) -> Array:
    """Return x as an operand of matrix products at a precision: x itself, or a 16-bit copy where that is faster."""
    return x


@kernel
def matmul_operand_and_sums(x: Array, precision: str) -> tuple[Array, Array]:
    """Return `matmul_operand(x, precision)` and `sum_rows(x)` of x (N, C), for the backward of a linear layer."""
    return matmul_operand.reference(x, precision), sum_rows.reference(x)


@kernel
def to_compute_dtype(x: Array, precision: str) -> Array:
    """Return x in the dtype of activations at a precision: its own, or a 16-bit dtype where that is faster."""
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
    """Compute a (N, K) @ b (K, M) + bias (M,) in at least float32, into `out` if given; cast to `dtype`.

    The matrices may be transposed views. The result has `dtype`, by default that of the operands, or float32 if these
    have 16 bits; sums have at least float32. The precision "tf32" may round float32 operands to 11 bits.
    """
    product = array_module(a).matmul(upcast(a), upcast(b), out=out)
    if bias is not None:
        product += bias
    return product if dtype is None else product.astype(dtype, copy=False)


@upcasting_kernel(0)
def sum_rows(x: Array) -> Array:
    """Return the sum (C,) over the rows of x (N, C), in at least float32."""
    return x.sum(axis=0)


@upcasting_kernel(0)
def sum_squares(x: Array) -> Array:
    """Return the sum of the squares of all elements, as a 0-d array of at least float32."""
    return x.ravel() @ x.ravel()


@upcasting_kernel(1)
def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)) elementwise from exp(-|x|), which cannot overflow."""
    xp = array_module(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, small) / (1 + small)


@upcasting_kernel(1)
def gelu(x: Array) -> Array:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel 2016), as GPT-2 does."""
    return 0.5 * x * (1 + array_module(x).tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


@upcasting_kernel(2)
def gelu_with_derivative(x: Array) -> tuple[Array, Array | None]:
    """Return gelu(x) and its derivative, or None for the derivative: `gelu_backward` then recomputes it from x."""
    t = array_module(x).tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))
    slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * (1 - t * t) * slope)


@kernel
def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array:
    """Return the gradient of x from that of gelu(x): grad times `slope`, if None times the derivative at x."""
    return multiply.reference(grad, gelu_with_derivative.reference(x)[1] if slope is None else slope)


@upcasting_kernel(1)
def swiglu(x: Array) -> Array:
    """Compute a * b * sigmoid(b) for [a, b] = x, halves of the last axis (Shazeer 2020)."""
    half = x.shape[-1] // 2
    b = x[..., half:]
    return x[..., :half] * (b * sigmoid(b))


@upcasting_kernel(1)
def swiglu_backward(grad: Array, x: Array) -> Array:
    """Return the gradient of x = [a, b] from that of swiglu(x) = a b sigmoid(b), recomputing the sigmoids."""
    x, half = upcast(x), x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    gate = sigmoid(b)
    dx = array_module(x).concatenate([grad * (b * gate), grad * a * gate * (1 + b * (1 - gate))], axis=-1)
    return dx.astype(grad.dtype, copy=False)


@upcasting_kernel(1)
def multiply(a: Array, b: Array) -> Array:
    """Compute a * b, elementwise, in a's dtype if that has 16 bits; b may be a 0-d array."""
    return a * b


@kernel
def empty(like: Array, shape: tuple[int, ...]) -> Array:
    """Return an uninitialized array of the dtype and device of `like`; a provider may use memory of deleted arrays."""
    return array_module(like).empty_like(like, order="C", shape=shape)


@kernel
def add(a: Array, b: Array, out: Array | None = None) -> Array:
    """Compute a + b for arrays of one shape; write it into `out` if given, which may be a or b."""
    return a + b if out is None else array_module(a).add(a, b, out=out)


@kernel
def dropout_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Draw a mask on the host, 1 / keep with probability `keep`, else 0; return it in dtype, device of `like`."""
    mask = array_module(like).asarray(generator.random(shape, dtype=np.float32) < keep).astype(like.dtype)
    mask /= keep
    return mask


@upcasting_kernel(1)
def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Apply RoPE to x (B, T, H, D): rotate channels i and i + D/2 by angles with the given cos and sin (T, D/2)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return array_module(x).concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@upcasting_kernel(1)
def softmax(x: Array, off_by_one: bool = False) -> Array:
    """Compute softmax over the last axis, or softmax1 with `off_by_one` (1 added to the sum); a row of -inf gives 0."""
    xp = array_module(x)
    if not x.size:
        return x.copy()
    shift = xp.maximum(x.max(axis=-1, keepdims=True), 0 if off_by_one else np.finfo(x.dtype).min)
    with np.errstate(over="ignore"):  # differences beyond the range of the dtype correctly give 0
        y = xp.exp(x - shift)
    total = y.sum(axis=-1, keepdims=True)
    if off_by_one:  # the 1 equals an additional score of 0
        total += xp.exp(-shift)
    return y / xp.maximum(total, 1)  # below 1 only in a row of -inf


@upcasting_kernel(1)
def softmax_backward(grad: Array, y: Array) -> Array:
    """Return the gradient of x, given the gradient of y = softmax(x) or softmax1(x), and y."""
    return y * (grad - (grad * y).sum(axis=-1, keepdims=True))  # dy_i/dx_j = y_i (delta_ij - y_j)


@upcasting_kernel(1)
def log_softmax(x: Array) -> Array:
    """Compute log softmax(x) over the last axis."""
    if not x.size:
        return x.copy()
    xp, shifted = array_module(x), x - x.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


@kernel
def layer_norm(
    x: Array, gain: Array, bias: Array | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> tuple[Array, Array, Array]:
    """Return y = (x - mean) / std * gain + bias in `dtype`, mean, 1 / std (..., 1); RMS norm unless `subtract_mean`."""
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
    """Return the gradients of x (in its dtype), gain and bias from that of y, with mean and scale of `layer_norm`."""
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
    """Return the sum of weight * label-smoothed cross-entropy of logits (N, V), and its gradient, None without.

    labels, weights: (N,); a weight of 0 ignores its row. smoothing: the weight that all labels share.
    """
    xp, dtype, logits = array_module(logits), logits.dtype, upcast(logits)
    places = xp.arange(len(labels)), labels
    shifted = logits - logits.max(axis=-1, keepdims=True)
    slope = xp.exp(shifted)
    total, truth = slope.sum(axis=-1), shifted[places]
    if smoothing:
        truth = (1 - smoothing) * truth + smoothing * shifted.mean(axis=-1)
    # `where`, because the loss of an ignored row may be infinite, and 0 times infinity is NaN
    costs = xp.where(weights == 0, 0, xp.log(total) - truth)
    slope *= (weights / total)[:, None]
    if smoothing:
        slope -= (weights * (smoothing / logits.shape[1]))[:, None]
    slope[places] -= weights * (1 - smoothing)
    return (costs * weights).sum(), slope.astype(dtype, copy=False) if with_gradient else None


@upcasting_kernel(0)
def embedding_backward(grad: Array, ids: Array, n_rows: int) -> Array:
    """Return the gradient (n_rows, C), at least float32, of an embedding table from that (N, C) of its rows `ids`."""
    table = array_module(grad).zeros((n_rows, grad.shape[-1]), grad.dtype)
    add_at.reference(table, ids, grad)
    return table


@kernel
def add_at(total: Array, index: Any, array: Array) -> None:
    """Add to total[index] in place, and to an element that the index selects repeatedly each of its numbers."""
    sums = upcast(total)  # many numbers of 16 bits are too small for their sum
    array_module(total).add.at(sums, index, upcast(array))
    if sums is not total:
        total[...] = sums


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
    """Make an AdamW update of weights and moments in place by grad * factor (none if <= 0); `step` counts from 1."""
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
    """Return results of jobs (function, n_elements, may run in any thread, uses only one thread), perhaps parallel."""
    return [job[0]() for job in jobs]


@kernel
def compute_in_chunks(like: Array, function: Callable[..., Any], operands: Any, whole_axes: Any = ()) -> Array:
    """Return function(*operands), perhaps called for chunks in parallel, see `in_chunks`; `like` is an operand."""
    return function(*operands)


def in_chunks(function: Callable[..., Array], *operands: Any, whole_axes: Sequence[int] = ()) -> Array:
    """Return function(*operands) of arrays that broadcast, and numbers; large arrays in chunks, divided among threads.

    The function is elementwise, except along `whole_axes` (>= 0): chunks do not divide these, and it keeps them.
    """
    for operand in operands:
        if getattr(operand, "size", 0) >= LARGE:
            return compute_in_chunks(operand, function, operands, whole_axes)
    return function(*operands)
