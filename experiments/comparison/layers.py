"""One layer of each kind at the same width, (B, T, C) to (B, T, C).

Shapes: B batch, T tokens, C channels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tricycle.blocks import MultiHeadSelfAttention
from tricycle.extra_ops import concatenate
from tricycle.layers import Dense, Layer
from tricycle.sequences.attentions import ScaledDotProductAttention
from tricycle.sequences.convolution import Conv1d
from tricycle.sequences.recurrent import new_recurrent
from tricycle.tensor import Tensor


class CausalConvolution(Layer):
    """A causal convolution of kernel size k: each output depends on its position and the k - 1 before it."""

    def __init__(self, size: int, kernel_size: int, generator: np.random.Generator) -> None:
        self.room = kernel_size - 1
        self.convolution = Conv1d(size, size, kernel_size, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the causal convolution (B, T, C) of x (B, T, C)."""
        nothing = Tensor(x.xp.zeros((len(x), self.room, x.shape[-1]), x.dtype), requires_grad=False)
        return self.convolution(concatenate([nothing, x], axis=1))


class Recurrence(Layer):
    """A recurrent layer that returns only its outputs, not its final state."""

    def __init__(self, cell: str, size: int, generator: np.random.Generator, **options: Any) -> None:
        self.run = new_recurrent(cell, size, size, generator=generator, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (B, T, C) of all steps for x (B, T, C), from a zero state."""
        return self.run(x)[0]


class TextbookAttention(Layer):
    """Single-head self-attention in plain operations, which stores all T x T weights."""

    def __init__(self, size: int, generator: np.random.Generator) -> None:
        self.parts = [Dense(size, size, generator=generator) for _ in range(3)]
        self.projection = Dense(size, size, generator=generator)
        self.attention = ScaledDotProductAttention()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, T, C) of self-attention without a mask for x (B, T, C)."""
        return self.projection(self.attention(*(part(x) for part in self.parts)))


# From width, context window and generator to the layer.
LAYERS: dict[str, Callable[[int, int, np.random.Generator], Layer]] = {
    "CNN, k = 3": lambda size, window, generator: CausalConvolution(size, 3, generator),
    "CNN, k = 7": lambda size, window, generator: CausalConvolution(size, 7, generator),
    "RNN": lambda size, window, generator: Recurrence("rnn", size, generator),
    "GRU": lambda size, window, generator: Recurrence("gru", size, generator),
    "LSTM": lambda size, window, generator: Recurrence("lstm", size, generator),
    "self-attention": lambda size, window, generator: MultiHeadSelfAttention(
        size, 1, window, causal=False, generator=generator
    ),
    "self-attention, all weights at once": lambda size, window, generator: TextbookAttention(size, generator),
}
