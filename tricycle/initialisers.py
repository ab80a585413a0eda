"""First values of weights: functions from a shape and a generator to a float32 array."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# The name in quotes, for NumPy imports its random generators when they are first named, which takes time.
Initialiser = Callable[[tuple[int, ...], "np.random.Generator"], np.ndarray]


def zeros(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    return np.zeros(shape, np.float32)


def normal(std: float) -> Initialiser:
    return lambda shape, generator: generator.standard_normal(shape, dtype=np.float32) * np.float32(std)


def xavier(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Uniform in +-sqrt(6 / (from_size + to_size)) for a shape (from_size, to_size) (Glorot and Bengio 2010)."""
    limit = math.sqrt(6 / (shape[0] + shape[-1]))
    return generator.uniform(-limit, limit, shape).astype(np.float32)
