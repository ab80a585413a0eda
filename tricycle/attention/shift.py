"""Token shift: layers that mix each token or its keys with the previous one. Shapes: (B, T, C)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.attention.attend import SHIFTS
from tricycle.attention.cache import KeyValueCache
from tricycle.autograd import NeedsGrad
from tricycle.create_graph import unfused
from tricycle.devices import Array, array_module
from tricycle.extra_ops import concatenate
from tricycle.layers import Layer
from tricycle.ops import as_floating, as_tensor, check_device, check_last_axis, check_positive
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, record

KEY_QUERY_CORRELATION = 0.7  # the initial correlation of keys and queries in layers with a key shift


class TokenShift(Layer):
    """Token shift: x_t + mix x_(t-1), with a learned mix for each channel, initially 0 (Peng et al. 2023, "RWKV").

    One attention layer can then find what followed an earlier occurrence of a token, which otherwise takes two.
    """

    _name = "token_shift"

    def __init__(self, size: int) -> None:
        check_positive("TokenShift", size=size)
        self.mix = Parameter(np.zeros(size, np.float32), "scale")

    def forward(self, x: Operand, cache: KeyValueCache | None = None) -> Tensor:
        """Return x_t + mix x_(t-1) (KeyShift: + mix (x_(t-1) - x_t)); x_(-1) is 0, or the cache's, which is updated."""
        x = as_tensor(x, self.mix)
        check_last_axis(type(self).__name__, x, self.mix.size)
        if x.ndim != 3:
            raise ValueError(f"{type(self).__name__}: expected shape (batch, tokens, channels), got {x.shape}")
        check_device(type(self).__name__, x.array, self.mix.array)
        array, mix = as_floating(x.array), self.mix.array
        earlier = previous_tokens(array, cache, self._name)
        added, own = self._mixed(array, earlier, mix)

        def backward(grad: Array, needs_grad: NeedsGrad, *layer: Any) -> tuple[Array | None, Array | None]:
            dx = dmix = None
            if needs_grad[0]:
                dx = own * grad if own is not None else grad.copy()
                dx[:, :-1] += mix * grad[:, 1:]
            if needs_grad[1]:
                dmix = kernels.sum_rows((grad * added).reshape(-1, mix.size))
            return dx, dmix

        y = (array + mix * added).astype(array.dtype, copy=False)
        return record(y, (x, self.mix), backward, self._name, None, (self,))

    def _mixed(self, array: Any, earlier: Any, mix: Any) -> tuple[Any, Any]:
        """Return (earlier, None): the array that `mix` multiplies, and the derivative of y_t by x_t (None for 1)."""
        return earlier, None


class KeyShift(TokenShift):
    """Key shift: k_t + mix (k_(t-1) - k_t) for the keys of all heads, with a learned mix for each channel.

    In each head the initial mix rises linearly from 0 in the first channel to 1 in the last. A query then also matches
    the key after an equal token: one layer can find what followed an earlier occurrence of a token, as an induction
    head does (Olsson et al. 2022, "smeared keys", with one mix per head).
    """

    _name = "key_shift"

    def __init__(self, n_heads: int, head_size: int) -> None:
        check_positive("KeyShift", n_heads=n_heads, head_size=head_size)
        rising = np.linspace(0, 1, head_size, dtype=np.float32)
        self.mix = Parameter(np.tile(rising, n_heads), "scale")

    def _mixed(self, array: Any, earlier: Any, mix: Any) -> tuple[Any, Any]:
        """Return (earlier - array, 1 - mix): the array that `mix` multiplies, and the derivative of y_t by x_t."""
        return earlier - array, 1 - mix

    @staticmethod
    def correlate_keys(attention: Any) -> None:
        """Change key weights in place to correlate with the weights of the first query head of each group."""
        weights, n_heads, n_key_heads = attention.qkv.weights.array, attention.n_heads, attention.n_key_heads
        heads = weights.reshape(len(weights), n_heads + 2 * n_key_heads, attention.head_size)
        queries = heads[:, 0 : n_heads : n_heads // n_key_heads]
        keys = heads[:, n_heads : n_heads + n_key_heads]
        keys[...] = KEY_QUERY_CORRELATION * queries + math.sqrt(1 - KEY_QUERY_CORRELATION**2) * keys


def previous_tokens(x: Array, cache: KeyValueCache | None, name: str) -> Array:
    """Return x (B, T, C) shifted right by one in each text, first `last[name]` of its cache or 0; update `last[name]`.

    The cache of each text stores its last token as `last[name]`, which is updated.
    """
    earlier = array_module(x).zeros_like(x)
    earlier[:, 1:] = x[:, :-1]
    for rows, text in () if cache is None else cache.texts(x.shape[1]):
        earlier[:, rows.start] = text.last[name][:, 0] if name in text.last else 0
        text.last[name] = x[:, rows.stop - 1 : rows.stop]
    return earlier


@unfused("tricycle.attention.shift.TokenShift.forward")
def _token_shift(node: Tensor, variables: Any) -> Tensor:
    """Recompute a token shift or key shift by operations on Tensors, so that its gradient is differentiable."""
    x, mix = node.args
    earlier = concatenate([0 * x[:, :1], x[:, :-1]], axis=1)
    return x + mix * node._saved[0]._mixed(x, earlier, mix)[0]


SHIFTS["token_shift"] = TokenShift
SHIFTS["key_shift"] = KeyShift
