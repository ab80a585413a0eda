"""Each token mixed with the one before it."""

from __future__ import annotations

import numpy as np

from tricycle import kernels
from tricycle.attention.cache import KeyValueCache
from tricycle.devices import Array
from tricycle.layers import Layer
from tricycle.ops import Wanted, as_tensor, check_device, check_width, floating, positive
from tricycle.tensor import Operand, Parameter, Tensor, record


class TokenShift(Layer):
    """x_t + mix * x_(t-1), with a learned mix for each channel that starts at 0.

    With it one layer of attention can look for what followed an earlier occurrence of a token; without, it takes two.

    Source: Peng et al. 2023, "RWKV".

    Args:
        size: C.
    """

    def __init__(self, size: int) -> None:
        positive("TokenShift", size=size)
        self.mix = Parameter(np.zeros(size, np.float32), "scale")

    def forward(self, x: Operand, cache: KeyValueCache | None = None) -> Tensor:
        """(B, T, C) to the same shape.

        Args:
            cache: knows the token before the first, and remembers the last; no gradient flows through it.
        """
        x = as_tensor(x, self.mix)
        check_width("TokenShift", x, self.mix.size)
        check_device("TokenShift", x.array, self.mix.array)
        array, mix = floating(x.array), self.mix.array
        earlier = x.xp.zeros_like(array)
        earlier[:, 1:] = array[:, :-1]
        if cache is not None:
            if cache.latest is not None:
                earlier[:, :1] = cache.latest
            cache.latest = array[:, -1:]

        def backward(grad: Array, wanted: Wanted) -> tuple[Array | None, Array | None]:
            dx = dmix = None
            if wanted[0]:
                dx = grad.copy()
                dx[:, :-1] += mix * grad[:, 1:]
            if wanted[1]:
                dmix = kernels.sum_rows((grad * earlier).reshape(-1, mix.size))
            return dx, dmix

        y = (array + mix * earlier).astype(array.dtype, copy=False)
        return record(y, (x, self.mix), backward, "token_shift")
