"""Convolution layers, computed as matrix products of unfolded windows (im2col).

Shapes: B batch, S sizes of an image (height and width) or a sequence (time), O sizes of the result, K the product of
the kernel's sizes, C channels (the last axis, as everywhere in Tricycle).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle.create_graph import rule
from tricycle.devices import Array, array_module
from tricycle.functions import linear
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Generator, Layer, new_generator
from tricycle.ops import as_floating, as_tensor, check_last_axis, check_positive, register
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, record

Sizes = tuple[int, ...]


@register
def unfold(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Extract sliding windows (im2col): (B, *S, C) to (B, *O, K * C), O = (S + 2 padding - kernel) // stride + 1.

    Args:
        padding: the number of zeros added at both ends of each axis.

    Raises:
        ValueError: the number of axes is wrong, or the kernel is larger than the padded input.
    """
    room = [n + 2 * p - k for n, p, k in zip(x.shape[1:-1], padding, kernel)]
    if x.ndim != len(kernel) + 2 or min(room) < 0:
        wanted = f"({', '.join(['batch', *['size'] * len(kernel), 'channels'])}), no smaller than the kernel {kernel}"
        raise ValueError(f"unfold: expected shape {wanted}, got {x.shape}")
    backward = lambda grad, needs_grad: (_fold(grad, x.shape, kernel, stride, padding),)
    return record(_unfold(as_floating(x.array), kernel, stride, padding), (x,), backward, "unfold", x.is_batched)


@register
def fold(columns: Tensor, sizes: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes) -> Tensor:
    """Sum sliding windows (B, *O, K * C) into (B, *sizes, C), the transpose of `unfold` (col2im)."""
    shape = (columns.shape[0], *sizes, columns.shape[-1] // int(np.prod(kernel)))
    backward = lambda grad, needs_grad: (_unfold(grad, kernel, stride, padding),)
    array = _fold(as_floating(columns.array), shape, kernel, stride, padding)
    return record(array, (columns,), backward, "fold", columns.is_batched)


@rule("tricycle.sequences.convolution.unfold")
def _unfold_rule(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of x: the windows' gradients added up by `fold`."""
    return [fold(grad, v.x.shape[1:-1], v.kernel, v.stride, v.padding)]


@rule("tricycle.sequences.convolution.fold")
def _fold_rule(node: Tensor, grad: Tensor, v: Any) -> list[Tensor]:
    """Return the gradient of the windows: that of the result, extracted by `unfold`."""
    return [unfold(grad, v.kernel, v.stride, v.padding)]


def _unfold(array: Array, kernel: Sizes, stride: Sizes, padding: Sizes) -> Array:
    """Return windows (B, *O, K * C) of an array (B, *S, C), padded with zeros, as a new array."""
    xp = array_module(array)
    padded = xp.pad(array, [(0, 0), *((p, p) for p in padding), (0, 0)])
    n_items, *sizes, channels = padded.shape
    places = [(n - k) // s + 1 for n, k, s in zip(sizes, kernel, stride)]
    batch, *steps, last = padded.strides
    strides = (batch, *(step * s for step, s in zip(steps, stride)), *steps, last)
    windows = xp.lib.stride_tricks.as_strided(padded, (n_items, *places, *kernel, channels), strides)
    return windows.reshape(n_items, *places, math.prod(kernel) * channels)


def _fold(columns: Array, shape: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes) -> Array:
    """Sum windows (B, *O, K * C) into a new array of `shape` (B, *S, C), without the padding."""
    (n_items, *sizes, channels), places = shape, columns.shape[1:-1]
    windows = columns.reshape(n_items, *places, *kernel, channels)
    wider = [n + 2 * p for n, p in zip(sizes, padding)]
    padded = array_module(columns).zeros((n_items, *wider, channels), columns.dtype)
    for offset in np.ndindex(*kernel):
        under = [slice(first, first + s * (n - 1) + 1, s) for first, s, n in zip(offset, stride, places)]
        padded[(slice(None), *under)] += windows[(..., *offset, slice(None))]
    return padded[(slice(None), *(slice(p, p + n) for p, n in zip(padding, sizes)))]


class Conv1d(Layer):
    """A 1-d convolution over sequences, (B, T, from_size) to (B, O, to_size).

    O = (T + 2 padding - kernel_size) // stride + 1. The weights have the shape (K * from_size, to_size).

    Args:
        from_size, to_size: the numbers of input and output channels.
        kernel_size, stride, padding: one number for all axes, or one for each.
        bias: add a learned vector, initialized to 0.

    Raises:
        ValueError: a size is below 1 or a padding below 0; on a call, the shape does not fit.
    """

    n_axes = 1

    def __init__(
        self,
        from_size: int,
        to_size: int,
        kernel_size: int | Sizes,
        stride: int | Sizes = 1,
        padding: int | Sizes = 0,
        bias: bool = True,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        self.from_size, self.to_size = from_size, to_size
        self.kernel, self.stride = self._each("kernel_size", kernel_size, 1), self._each("stride", stride, 1)
        self.padding = self._each("padding", padding, 0)
        check_positive(type(self).__name__, from_size=from_size, to_size=to_size)
        shape = self._weight_shape(int(np.prod(self.kernel)))
        self.weights = Parameter(initialiser(shape, new_generator(generator)), "matrix")
        self.bias = Parameter(np.zeros(to_size, np.float32), "bias") if bias else None

    def _weight_shape(self, n_places: int) -> Sizes:
        """Return the shape of the weights, (n_places * channels in, channels out)."""
        return n_places * self.from_size, self.to_size

    def _each(self, name: str, value: int | Sizes, least: int) -> Sizes:
        """Return one size per axis, from a number or that many; ValueError for other counts or sizes below `least`."""
        sizes = (value,) * self.n_axes if isinstance(value, int) else tuple(value)
        if len(sizes) != self.n_axes or not all(isinstance(n, int) and n >= least for n in sizes):
            wanted = f"whole numbers from {least} on, one or {self.n_axes}"
            raise ValueError(f"{type(self).__name__}: expected {name} to be {wanted}, got {value!r}")
        return sizes

    def _checked(self, x: Operand) -> Tensor:
        """Return x as a Tensor; ValueError if its last axis is not `from_size` long."""
        x = as_tensor(x, self.weights)
        check_last_axis(f"{type(self).__name__}(from_size={self.from_size})", x, self.from_size)
        return x

    def forward(self, x: Operand) -> Tensor:
        """Convolve x (B, *S, from_size) and add the bias: (B, *O, to_size), O = (S + 2 padding - K) // stride + 1."""
        columns = unfold(self._checked(x), self.kernel, self.stride, self.padding)
        return linear(columns, self.weights, self.bias, type(self).__name__.lower())


class Conv2d(Conv1d):
    """A 2-d convolution over images, (B, height, width, from_size); for the arguments see `Conv1d`."""

    n_axes = 2


class ConvTranspose2d(Conv2d):
    """A transposed 2-d convolution, which upsamples images.

    Sizes O become (O - 1) * stride - 2 padding + kernel_size + output_padding. The weights have the shape (from_size,
    K * to_size).

    Args:
        output_padding: added to the output's sizes, because a convolution maps several input sizes to the same output.
    """

    def __init__(self, *arguments: Any, output_padding: int | Sizes = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.output_padding = self._each("output_padding", output_padding, 0)

    def _weight_shape(self, n_places: int) -> Sizes:
        """Return the shape of the weights, (channels in, n_places * channels out)."""
        return self.from_size, n_places * self.to_size

    def forward(self, x: Operand) -> Tensor:
        """Upsample x (B, *O, C) to sizes (O - 1) * stride - 2 padding + kernel_size + output_padding; add the bias.

        Raises:
            ValueError: x has other axes, or an output size is below 1.
        """
        x = self._checked(x)
        columns = linear(x, self.weights, name="convtranspose2d")
        each = zip(x.shape[1:-1], self.stride, self.padding, self.kernel, self.output_padding)
        sizes = tuple((n - 1) * s - 2 * p + k + extra for n, s, p, k, extra in each)
        if x.ndim != self.n_axes + 2 or min(sizes) < 1:
            expected = f"shape (batch, height, width, {self.from_size}) and output sizes of 1 or more"
            raise ValueError(f"ConvTranspose2d: expected {expected}, got {x.shape} and {sizes}")
        y = fold(columns, sizes, self.kernel, self.stride, self.padding)
        return y if self.bias is None else y + self.bias
