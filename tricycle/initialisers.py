"""Weight initializers: functions from a shape and a random generator to a float32 array."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# Quoted, because naming np.random makes NumPy import it, which takes time.
Initialiser = Callable[[tuple[int, ...], "np.random.Generator"], np.ndarray]


def zeros(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return float32 zeros of this shape; the generator is not used."""
    return np.zeros(shape, np.float32)


def normal(std: float) -> Initialiser:
    """Return an initializer that draws float32 from a normal distribution with mean 0 and this standard deviation."""
    return lambda shape, generator: generator.standard_normal(shape, dtype=np.float32) * np.float32(std)


def xavier(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Draw float32 uniformly in +-sqrt(6 / (from_size + to_size)), shape (from_size, to_size) (Glorot, Bengio 2010)."""
    limit = math.sqrt(6 / (shape[0] + shape[-1]))
    return generator.uniform(-limit, limit, shape).astype(np.float32)
