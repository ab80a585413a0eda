"""Tricycle: deep learning from scratch, from a Tensor to a GPT, on NumPy and CuPy."""

from tricycle import activations, einsum, experts, extra_ops, losses, softmaxes, state, tensor_methods, transforms  # noqa: F401  (they add methods and names)
from tricycle.decoding import sublayers  # noqa: F401  (it adds the fused sublayers of blocks)
from tricycle.kernels import explanation  # noqa: F401  (it adds a function)
from tricycle.numpy_protocol import from_dlpack
from tricycle.state_spaces import mamba  # noqa: F401  (it makes the blocks of a `MambaConfig`)
from tricycle.tensor import Tensor, no_grad, to_tensor

__version__ = "0.1.0"
__all__ = ["Tensor", "from_dlpack", "no_grad", "to_tensor"]
