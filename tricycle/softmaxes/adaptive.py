"""`AdaptiveSoftmax`: a softmax whose temperature adapts to the entropy of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tricycle import extra_ops, kernels
from tricycle.devices import Array, array_module
from tricycle.functions import RowSoftmax, Softmax
from tricycle.kernels import upcast
from tricycle.tensor import Tensor


class AdaptiveSoftmax(RowSoftmax):
    """softmax(beta x) over the last axis, with an inverse temperature beta that grows with the entropy of softmax(x).

    Attention then stays sharp over more keys than in training. beta is a polynomial of the entropy (in nats), at least
    1, and 1 for low entropies.

    Source: Velickovic et al. 2024, "softmax is not enough (for sharp out-of-distribution)", with its coefficients as
    defaults; `tricycle_lab.temperature` fits others.

    Args:
        coefficients: of the polynomial, highest power first.
        threshold: the entropy above which the polynomial is used.
        stop_gradient: whether beta is a constant in the backward pass.
    """

    name = "adaptive_softmax"

    def __init__(
        self,
        coefficients: Sequence[float] = (-0.037, 0.481, -2.3, 4.917, -1.791),
        threshold: float = 0.5,
        stop_gradient: bool = False,
    ) -> None:
        self.coefficients = tuple(float(c) for c in coefficients)
        if not self.coefficients or not all(map(math.isfinite, self.coefficients)):
            raise ValueError(f"AdaptiveSoftmax: expected finite coefficients, got {self.coefficients}")
        self.threshold = threshold
        self.stop_gradient = stop_gradient

    def row_softmax(self, scores: Array) -> Array:
        """Return softmax(beta scores) over the last axis, with beta of each row as of `inverse_temperature`."""
        return kernels.softmax(scores * self.inverse_temperature(scores)[0]).astype(scores.dtype, copy=False)

    def row_softmax_backward(self, grad: Array, scores: Array, weights: Array) -> Array:
        """Return the gradient of the scores from that of the weights, also through beta unless `stop_gradient`."""
        beta, slope, plain, log_plain, entropy = self.inverse_temperature(scores)
        dproduct = kernels.softmax_backward(grad, weights)
        dscores = beta * dproduct
        if not self.stop_gradient:
            xp = array_module(scores)
            dbeta = (dproduct * xp.where(weights > 0, scores, 0)).sum(axis=-1, keepdims=True)
            dscores -= dbeta * slope * plain * (log_plain + entropy)
        return dscores

    def row_softmax_of_tensor(self, scores: Tensor) -> Tensor:
        """Compute `row_softmax` of a Tensor by differentiable operations, for gradients of its gradient."""
        softmax = Softmax()
        plain = softmax(scores)
        entropy = -(plain * extra_ops.log(extra_ops.where(plain > 0, plain, 1))).sum(axis=-1, keepdims=True)
        beta: Any = 0
        for c in self.coefficients:
            beta = beta * entropy + c
        beta = extra_ops.where((entropy > self.threshold).array & (beta > 1).array, beta, 1)
        beta = beta.detach() if self.stop_gradient else beta
        visible = scores > -math.inf  # infinity times a gradient of 0 is NaN
        return softmax(extra_ops.where(visible, extra_ops.where(visible, scores, 0) * beta, -math.inf))

    def inverse_temperature(self, scores: Array) -> tuple[Array, ...]:
        """Return beta, d beta / d entropy, softmax, log softmax, entropy (nats); (..., 1), the softmaxes (..., S)."""
        xp = array_module(scores)
        plain = kernels.softmax(upcast(scores))
        log_plain = xp.log(xp.where(plain > 0, plain, 1))
        entropy = -(plain * log_plain).sum(axis=-1, keepdims=True)
        value = slope = xp.zeros_like(entropy)
        for c in self.coefficients:  # Horner's scheme, for the value and the derivative
            value, slope = value * entropy + c, slope * entropy + value
        used = (entropy > self.threshold) & (value > 1)
        return xp.where(used, value, 1), xp.where(used, slope, 0), plain, log_plain, entropy
