"""`QuantizedHeads`: the keys or values of a KV cache in int8, and attention to them.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.autograd import grad_enabled_for
from tricycle.devices import ARRAY_MODULES, Array, array_module
from tricycle.functions import Softmax
from tricycle.kernels import ScoreOptions
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.quantized import MAX_INT8
from tricycle.ops import as_floating
from tricycle.tensor import Tensor, record

# Channels that share a scale. With 32, the KL divergence of SmolLM2's predictions is half that with 64 channels.
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 32


@Kernel
def quantized_attention(
    q: Array, k: QuantizedHeads, v: QuantizedHeads, score_options: ScoreOptions, off_by_one: bool
) -> Array:
    """Return attention (B, T, H, D) of q to quantized keys and values, by softmax, or softmax1 with `off_by_one`."""
    out: Array = kernels.attention(q, k.dequantize(), v.dequantize(), score_options, off_by_one)[0]
    return out


class QuantizedHeads:
    """Keys or values (B, S, K, D) in int8, with a bfloat16 scale for each block of at most 32 channels of a head.

    It supports what a KV cache does with arrays: slicing, assignment to slices, and `copy`. Infinity or NaN makes all
    elements of its block NaN.

    Args:
        values: int8 (B, S, K, D).
        scales: uint16 (B, S, K, N), the bits of bfloat16 numbers, so that ml_dtypes is not needed; an element is its
            value times the scale of its block of D / N channels.
    """

    ndim = 4
    dtype = np.dtype(np.int8)

    def __init__(self, values: Array, scales: Array) -> None:
        self.values, self.scales = values, scales
        self.shape: tuple[int, ...] = values.shape

    @classmethod
    def allocate(cls, like: Array, n_tokens: int) -> QuantizedHeads:
        """Return uninitialized QuantizedHeads of `n_tokens`, with batch, heads, device of `like` (B, T, K, D)."""
        xp, (n_items, _, n_heads, size) = array_module(like), like.shape
        shape = n_items, n_tokens, n_heads
        # Blocks of equal size, so that the scales need at most an eighth of the memory of the values.
        block_size = next((n for n in range(MAX_BLOCK_SIZE, MIN_BLOCK_SIZE - 1, -1) if size % n == 0), size)
        return cls(xp.empty((*shape, size), cls.dtype), xp.empty((*shape, size // block_size), np.uint16))

    @property
    def nbytes(self) -> int:
        """The size of values and scales in bytes."""
        return int(self.values.nbytes + self.scales.nbytes)

    def __len__(self) -> int:
        """Return the number of batch items."""
        return self.shape[0]

    def __getitem__(self, index: Any) -> QuantizedHeads:
        """Return some items and tokens, by slices as views; the index selects no heads."""
        if isinstance(index, np.ndarray):
            index = array_module(self.values).asarray(index)
        return QuantizedHeads(self.values[index], self.scales[index])

    def __setitem__(self, index: Any, new: Array | QuantizedHeads) -> None:
        """Store keys or values in place, quantizing arrays to int8 and a scale per block; no heads are selected."""
        if isinstance(new, QuantizedHeads):
            self.values[index], self.scales[index] = new.values, new.scales
            return
        xp, blocks = array_module(new), self._blocks(new.astype(np.float32))
        scales = xp.abs(blocks).max(axis=-1) / np.float32(MAX_INT8)
        scales = xp.where(xp.isfinite(scales), scales, np.float32(np.nan))
        bits = ((scales.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)  # rounded up, or a value could exceed 127
        scales = _bfloat16_to_float32(bits)[..., None]
        rounded = xp.rint(blocks / xp.where(scales > 0, scales, 1))
        self.values[index] = xp.where(xp.isnan(scales), 0, rounded).reshape(new.shape)
        self.scales[index] = bits

    def copy(self) -> QuantizedHeads:
        """Return a copy that owns its memory."""
        return QuantizedHeads(self.values.copy(), self.scales.copy())

    def dequantize(self) -> Array:
        """Return the keys or values as a float32 array."""
        return (self._blocks(self.values) * _bfloat16_to_float32(self.scales)[..., None]).reshape(self.shape)

    def _blocks(self, x: Array) -> Array:
        """Reshape x (..., D) to (..., N, D / N), for the N blocks of a head."""
        return x.reshape(*x.shape[:-1], self.scales.shape[-1], -1)

    def attention(self, op: Any, query: Tensor, value: Tensor, mask: Any, *options: Any) -> Tensor:
        """Return attention `op` of queries (B, T, H, D) to these keys and quantized values, which get no gradient.

        The kernel for quantized keys is called for softmax and softmax1 without a mask; others get float32 arrays.

        Args:
            op: an `Attention`, with `mask` and further `options` as of its method `forward`.
        """
        q, softmax = as_floating(query.array), op.softmax
        if mask is not None or type(softmax).attend is not Softmax.attend or grad_enabled_for(query):
            key, value = (Tensor(heads.dequantize(), False) for heads in (self, value.array))
            result: Tensor = op(query, key, value, mask, *options)
            return result
        out = quantized_attention(q, self, value.array, op.score_options(q, self), softmax.off_by_one)
        return record(out, (query,), None, "attention")


def _bfloat16_to_float32(bits: Array) -> Array:
    """Convert bfloat16 numbers, given as their bits in uint16, to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


ARRAY_MODULES[QuantizedHeads] = np  # as of QuantizedMatrix
