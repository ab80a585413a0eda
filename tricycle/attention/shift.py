"""Each token, or its keys, mixed with those of the one before it."""

from __future__ import annotations

import numpy as np

from tricycle import kernels
from tricycle.attention.cache import Cache, previous_tokens
from tricycle.autograd import NeedsGrad
from tricycle.devices import Array
from tricycle.layers import Layer
from tricycle.ops import as_tensor, check_device, check_width, floating, positive
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, record


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

    def forward(self, x: Operand, cache: Cache | None = None) -> Tensor:
        """(B, T, C) to the same shape.

        Args:
            cache: knows the token before the first, and remembers the last; no gradient flows through it.
        """
        x = as_tensor(x, self.mix)
        check_width("TokenShift", x, self.mix.size)
        check_device("TokenShift", x.array, self.mix.array)
        array, mix = floating(x.array), self.mix.array
        earlier = previous_tokens(array, cache, "latest")

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array | None]:
            dx = dmix = None
            if needs_grad[0]:
                dx = grad.copy()
                dx[:, :-1] += mix * grad[:, 1:]
            if needs_grad[1]:
                dmix = kernels.sum_rows((grad * earlier).reshape(-1, mix.size))
            return dx, dmix

        y = (array + mix * earlier).astype(array.dtype, copy=False)
        return record(y, (x, self.mix), backward, "token_shift")


class KeyShift(Layer):
    """k_t + mix * (k_(t-1) - k_t) of the keys of heads, with a learned mix for each channel.

    In each head the mix starts at 0 in the first channel and rises evenly to 1 in the last. So a query that looks for
    its like meets it in the keys of the token behind it, too: one layer then finds what followed an earlier occurrence
    of a token, as an induction head does.

    Source: Olsson et al. 2022, "In-context learning and induction heads", section "smeared keys", with one mix a head.

    Args:
        n_heads: of keys.
        head_size: D.
    """

    def __init__(self, n_heads: int, head_size: int) -> None:
        positive("KeyShift", n_heads=n_heads, head_size=head_size)
        rising = np.linspace(0, 1, head_size, dtype=np.float32)
        self.mix = Parameter(np.tile(rising, n_heads), "scale")

    def forward(self, keys: Operand, cache: Cache | None = None) -> Tensor:
        """(B, T, heads * D) to the same shape.

        Args:
            cache: knows the keys before the first, and remembers the last; no gradient flows through it.
        """
        keys = as_tensor(keys, self.mix)
        check_width("KeyShift", keys, self.mix.size)
        check_device("KeyShift", keys.array, self.mix.array)
        array, mix = floating(keys.array), self.mix.array
        earlier = previous_tokens(array, cache, "latest_keys")

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array | None]:
            dkeys = dmix = None
            if needs_grad[0]:
                dkeys = (1 - mix) * grad
                dkeys[:, :-1] += mix * grad[:, 1:]
            if needs_grad[1]:
                dmix = kernels.sum_rows((grad * (earlier - array)).reshape(-1, mix.size))
            return dkeys, dmix

        y = (array + mix * (earlier - array)).astype(array.dtype, copy=False)
        return record(y, (keys, self.mix), backward, "key_shift")
