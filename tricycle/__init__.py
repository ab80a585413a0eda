"""Tricycle: deep learning from scratch, from a Tensor to a GPT, on NumPy and CuPy."""

from tricycle import einsum, extra_ops, tensor_methods  # noqa: F401  (they add operators and methods to Tensor)
from tricycle.tensor import Tensor, no_grad, to_tensor

__version__ = "0.1.0"
__all__ = ["Tensor", "no_grad", "to_tensor"]
