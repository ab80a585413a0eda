"""Gradient clipping by itself, for training loops of one's own: `tricycle.training.apply` clips, too."""

from __future__ import annotations

import math
from typing import Any

from tricycle.devices import array_module
from tricycle.layers import Layer
from tricycle.optimisers import gradient_norm


def clip_gradients(model: Layer, max_norm: float) -> Any:
    """Scale all gradients, in place, to a common norm of at most `max_norm`; return the norm before."""
    if not max_norm > 0:
        raise ValueError(f"clip_gradients: expected a max_norm above 0, got {max_norm!r}")
    norm: Any = gradient_norm(model)
    is_long = (max_norm < norm) & (norm < math.inf)
    if is_long is not False:
        factor = max_norm / norm if is_long is True else array_module(norm).where(is_long, max_norm / norm, 1)
        for grad in [p.grad for p in model.parameters() if p.grad is not None]:
            grad.array *= factor
    return norm
