"""The gradient exercises: tasks, Tricycle's own ops, and common mistakes. `exercises.py` writes and grades them.

Students write functions of NumPy arrays in float64. `grad` is the gradient of the result `y`, in the shape of `y`. The
functions return the gradients of all floating-point inputs, in the shapes of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tricycle.activation import ReLU
from tricycle.attention import Attention
from tricycle.einsum import matmul
from tricycle.extra_ops import mean
from tricycle.functions import Sigmoid, Softmax
from tricycle.layers import LayerNorm, RMSNorm
from tricycle.loss import CrossEntropy
from tricycle.ops import multiply
from tricycle.tensor import Tensor

Gradients = tuple[np.ndarray, ...]
EPS = 1e-5


@dataclass(frozen=True)
class Exercise:
    """One exercise: a function that computes gradients of an op.

    Attributes:
        name: of the student's function.
        arguments: the names of the arguments after `grad`; the last one is the result, `y`.
        task: the formula with shapes, and the requested gradients.
        op: Tricycle's op of the input Tensors.
        location: the file and name of `op`.
        inputs: creates two lists of input arrays of different shapes from a random generator.
        mistakes: functions with the signature of the student's that make a common mistake, and messages about it.
    """

    name: str
    arguments: str
    task: str
    op: Callable[..., Tensor]
    location: str
    inputs: Callable[[np.random.Generator], list[list[np.ndarray]]]
    mistakes: tuple[tuple[Callable[..., Any], str], ...] = ()

    def code(self) -> str:
        """Return code to complete: function of `grad` and arguments, task as docstring, raises NotImplementedError."""
        lines = [f"    {line}" if line else "" for line in self.task.splitlines()]
        body = "\n".join(lines).strip()
        return f'def {self.name}(grad, {self.arguments}):\n    """{body}\n    """\n    raise NotImplementedError\n'


# -------------------------------------------------------------------- ops of more than one class
def normalized(layer: Any, x: Tensor, **parameters: Tensor) -> Tensor:
    """Set these parameters on a norm layer, which stays changed, and return its result for `x`."""
    vars(layer).update(parameters)
    return layer(x)


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute non-causal attention of one head without a batch: (T, D), (S, D), (S, E) to (T, E)."""
    tensors = (tensor.reshape(1, tensor.shape[0], 1, tensor.shape[1]) for tensor in (q, k, v))
    return Attention(causal=False)(*tensors).reshape(q.shape[0], v.shape[1])


# -------------------------------------------------------------------- mistakes
def _softmax(x: np.ndarray) -> np.ndarray:
    """Return softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _norm(grad: Any, x: Any, gain: Any, centred: bool, by_mean: bool, by_scale: bool, with_gain: bool = True) -> Any:
    """Return a norm's gradients of x, gain (and bias if centred); flags set to False omit terms, as a mistake."""
    deviation = x - x.mean(-1, keepdims=True) if centred else x
    scale = np.sqrt((deviation**2).mean(-1, keepdims=True) + EPS)
    hat = deviation / scale
    dhat = grad * gain if with_gain else grad
    dx = dhat.copy()
    if centred and by_mean:
        dx -= dhat.mean(-1, keepdims=True)
    if by_scale:
        dx -= hat * (dhat * hat).mean(-1, keepdims=True)
    dbias = (grad.sum(0),) if centred else ()
    return (dx / scale, (grad * hat).sum(0), *dbias)


def _attention(grad: Any, q: Any, k: Any, v: Any, scaled: bool, through_softmax: bool) -> Any:
    """Return attention's gradients of q, k and v; flags set to False omit the scale or the softmax, as a mistake."""
    scale = 1 / np.sqrt(q.shape[-1])
    w = _softmax(q @ k.T * scale)
    dw = grad @ v.T
    ds = w * (dw - (dw * w).sum(-1, keepdims=True)) if through_softmax else dw
    ds = ds * scale if scaled else ds
    return ds @ k, ds.T @ q, w.T @ grad


DIAGONAL = (
    "each y depends on every x of its row, because they share a denominator; the missing term is "
    "- y * the row's sum of grad * y"
)
CONSTANT_SCALE = "the standard deviation depends on x, too: its gradient is missing"
CONSTANT_MEAN = "the mean depends on x, too: its gradient is missing"
CONSTANT_BOTH = f"{CONSTANT_MEAN}; and {CONSTANT_SCALE}"
NO_GAIN = "the gradient of the normalized x is grad * gain"
NO_DIVISION = "a mean over C values divides the gradient by C"
NOT_TRANSPOSED = "a transposition is missing: the gradient of a is grad @ b.T, (N, M) @ (M, K)"
ALL_ROWS = "rows are independent: sum over the last axis only, with keepdims=True"
NO_MEAN = "the loss is a mean: divide by the number of rows"
NO_LABEL = "the term of the label is missing: subtract 1 from its probability"
WRONG_SIGN = "the sign is wrong: a larger logit of the label reduces the loss"
NOT_SCALED = "the scores are divided by sqrt(D), so divide their gradient, too"
NO_SOFTMAX = "grad @ v.T is the gradient of the weights; the gradient of the softmax is missing"

# -------------------------------------------------------------------- the exercises
EXERCISES = (
    Exercise(
        "multiply",
        "a, b, y",
        "y = a * b. a: (N, C); b: (C,), multiplied with every row of a.\n\nReturn the gradients of a and of b.",
        multiply,
        "tricycle/ops.py:multiply",
        lambda r: [[r.normal(size=(3, 4)), r.normal(size=4)], [r.normal(size=(5, 2)), r.normal(size=2)]],
        (
            (lambda grad, a, b, y: (grad * a, (grad * b).sum(0)), "a and b are swapped: the gradient of a is grad * b"),
            (
                lambda grad, a, b, y: (grad * b, (grad * a).mean(0)),
                "gradients of broadcast values are summed over the rows, not averaged",
            ),
        ),
    ),
    Exercise(
        "mean_of_rows",
        "x, y",
        "y = x.mean(axis=-1). x: (N, C); y: (N,).\n\nReturn the gradient of x.",
        lambda x: mean(x, -1),
        "tricycle/extra_ops.py:mean",
        lambda r: [[r.normal(size=(3, 4))], [r.normal(size=(2, 7))]],
        ((lambda grad, x, y: grad[:, None] + 0 * x, NO_DIVISION),),
    ),
    Exercise(
        "matmul",
        "a, b, y",
        "y = a @ b. a: (N, K); b: (K, M); y: (N, M).\n\nReturn the gradients of a and of b.",
        matmul,
        "tricycle/einsum.py:matmul",
        lambda r: [[r.normal(size=(3, 4)), r.normal(size=(4, 2))], [r.normal(size=(3, 3)), r.normal(size=(3, 3))]],
        ((lambda grad, a, b, y: (grad @ b, a @ grad) if a.shape == b.shape else None, NOT_TRANSPOSED),),
    ),
    Exercise(
        "relu",
        "x, y",
        "y = max(x, 0), elementwise.\n\nReturn the gradient of x.",
        ReLU(),
        "tricycle/activation.py:ReLU",
        lambda r: [[r.normal(size=(3, 4)) + 0.1], [r.normal(size=7) - 0.1]],
        (
            (lambda grad, x, y: grad * (grad > 0), "the condition is x > 0, not grad > 0"),
            (lambda grad, x, y: grad * y, "the derivative is 1 where x > 0: return grad there, not grad * y"),
        ),
    ),
    Exercise(
        "sigmoid",
        "x, y",
        "y = 1 / (1 + exp(-x)), elementwise.\n\nReturn the gradient of x. It can be computed from y.",
        Sigmoid(),
        "tricycle/functions.py:Sigmoid",
        lambda r: [[r.normal(size=(3, 4))], [3 * r.normal(size=7)]],
        ((lambda grad, x, y: grad * x * (1 - x), "the derivative is y * (1 - y), with the result y instead of x"),),
    ),
    Exercise(
        "softmax",
        "x, y",
        "y = exp(x) / sum of exp(x), over the last axis. x, y: (N, C)."
        "\n\nReturn the gradient of x. It can be computed from y.",
        Softmax(),
        "tricycle/functions.py:Softmax",
        lambda r: [[r.normal(size=(3, 4))], [2 * r.normal(size=(2, 6))]],
        (
            (lambda grad, x, y: grad * y * (1 - y), DIAGONAL),
            (lambda grad, x, y: grad * y, DIAGONAL),
            (lambda grad, x, y: y * (grad - (grad * y).sum()), ALL_ROWS),
            (lambda grad, x, y: grad - (grad * y).sum(-1, keepdims=True), "a factor y is missing"),
        ),
    ),
    Exercise(
        "cross_entropy",
        "labels, logits, y",
        "y = the mean over rows of -log softmax(logits)[label]. labels: (N,), integers; logits: (N, V)."
        "\n\nReturn the gradient of logits. y and grad are scalars.",
        CrossEntropy(),
        "tricycle/loss.py:CrossEntropy",
        lambda r: [
            [r.integers(0, 4, 3), r.normal(size=(3, 4))],
            [r.integers(0, 6, 5), 2 * r.normal(size=(5, 6))],
        ],
        (
            (lambda grad, t, x, y: grad * (_softmax(x) - np.eye(x.shape[1])[t]), NO_MEAN),
            (lambda grad, t, x, y: grad * _softmax(x) / len(t), NO_LABEL),
            (lambda grad, t, x, y: grad * (np.eye(x.shape[1])[t] - _softmax(x)) / len(t), WRONG_SIGN),
        ),
    ),
    Exercise(
        "rms_norm",
        "x, gain, y",
        f"y = x / sqrt(mean of x^2 over the last axis + {EPS}) * gain. x: (N, C); gain: (C,)."
        "\n\nReturn the gradients of x and of gain.",
        lambda x, gain: normalized(RMSNorm(x.shape[-1], eps=EPS), x, gain=gain),
        "tricycle/layers.py:RMSNorm",
        lambda r: [[r.normal(size=(3, 4)), 1 + r.random(4)], [r.normal(size=(2, 6)), 1 + r.random(6)]],
        (
            (lambda grad, x, gain, y: _norm(grad, x, gain, False, False, False), CONSTANT_SCALE),
            (lambda grad, x, gain, y: _norm(grad, x, gain, False, False, True, False), NO_GAIN),
        ),
    ),
    Exercise(
        "layer_norm",
        "x, gain, bias, y",
        f"y = (x - mean) / sqrt(variance + {EPS}) * gain + bias, both over the last axis. x: (N, C); gain, bias: (C,)."
        "\n\nReturn the gradients of x, of gain and of bias.",
        lambda x, gain, bias: normalized(LayerNorm(x.shape[-1], eps=EPS), x, gain=gain, bias=bias),
        "tricycle/layers.py:LayerNorm",
        lambda r: [
            [r.normal(size=(3, 4)), 1 + r.random(4), r.normal(size=4)],
            [2 + r.normal(size=(2, 6)), 1 + r.random(6), r.normal(size=6)],
        ],
        (
            (lambda grad, x, gain, bias, y: _norm(grad, x, gain, True, False, False), CONSTANT_BOTH),
            (lambda grad, x, gain, bias, y: _norm(grad, x, gain, True, True, False), CONSTANT_SCALE),
            (lambda grad, x, gain, bias, y: _norm(grad, x, gain, True, False, True), CONSTANT_MEAN),
            (lambda grad, x, gain, bias, y: _norm(grad, x, gain, True, True, True, False), NO_GAIN),
        ),
    ),
    Exercise(
        "attention",
        "q, k, v, y",
        "y = softmax(q k^T / sqrt(D)) v, one head without a mask. q: (T, D); k: (S, D); v: (S, E); y: (T, E)."
        "\n\nReturn the gradients of q, of k and of v.",
        one_head,
        "tricycle/attention/attend.py:Attention",
        lambda r: [
            [r.normal(size=(3, 4)), r.normal(size=(5, 4)), r.normal(size=(5, 2))],
            [r.normal(size=(2, 3)), r.normal(size=(2, 3)), r.normal(size=(2, 3))],
        ],
        (
            (lambda grad, q, k, v, y: _attention(grad, q, k, v, False, True), NOT_SCALED),
            (lambda grad, q, k, v, y: _attention(grad, q, k, v, True, False), NO_SOFTMAX),
        ),
    ),
)
