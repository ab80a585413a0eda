"""Autoencoders: an encoder makes a small code of its input, a decoder the input of the code.

Shapes: B batch, Z size of the code, T time, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np

from tricycle.activation import ReLU
from tricycle.extra_ops import exp
from tricycle.layers import Dense, Generator, Layer, Sequential, new_generator
from tricycle.loss import MeanSquaredError
from tricycle.ops import as_tensor
from tricycle.sequences.convolution import Conv2d, ConvTranspose2d
from tricycle.sequences.recurrent import new_recurrent
from tricycle.tensor import Operand, Tensor


class Reshape(Layer):
    """Items of another shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


class Autoencoder(Layer):
    """decode(encode(x)), trained to give x back through a code that is smaller than x.

    Args:
        encoder: x to the code (B, Z).
        decoder: the code to something like x.
        generator: a NumPy generator or a seed, for what is drawn in training (nothing, unless variational).
    """

    _numbers_per_code = 1

    def __init__(self, encoder: Layer, decoder: Layer, generator: Generator = None) -> None:
        self.encoder, self.decoder, self.generator = encoder, decoder, new_generator(generator)

    @classmethod
    def dense(cls, sizes: Sequence[int], generator: Generator = None, **options: Any) -> Self:
        """Dense layers with ReLU between them.

        Args:
            sizes: from the input's to the code's, such as (64, 32, 2); the decoder goes back the same way.

        Raises:
            ValueError: fewer than two sizes.
        """
        if len(sizes) < 2:
            raise ValueError(f"{cls.__name__}.dense: expected sizes from the input's to the code's, got {sizes!r}")
        generator, ends = new_generator(generator), [*sizes[:-1], cls._numbers_per_code * sizes[-1]]
        return cls(_dense(ends, generator), _dense(sizes[::-1], generator), generator=generator, **options)

    @classmethod
    def convolutional(
        cls,
        shape: tuple[int, int, int],
        channels: Sequence[int],
        code_size: int,
        generator: Generator = None,
        **options: Any,
    ) -> Self:
        """Convolutions that halve an image each, a dense layer to the code, and the same way back.

        Args:
            shape: (height, width, C) of an image.
            channels: after each convolution.
            code_size: Z.
        """
        generator, down, up = new_generator(generator), list[Any](), list[Any]()
        sizes, before = list(shape[:2]), shape[2]
        for after in channels:
            halved = [-(-n // 2) for n in sizes]
            extra = tuple(n - (2 * half - 1) for n, half in zip(sizes, halved))
            down += [Conv2d(before, after, 3, stride=2, padding=1, generator=generator), ReLU()]
            back = ConvTranspose2d(after, before, 3, stride=2, padding=1, output_padding=extra, generator=generator)
            up = [ReLU(), back, *up]
            sizes, before = halved, after
        flat = math.prod(sizes) * before
        encoder = Sequential(*down, Reshape(flat), Dense(flat, cls._numbers_per_code * code_size, generator=generator))
        decoder = Sequential(Dense(code_size, flat, generator=generator), Reshape(*sizes, before), *up)
        return cls(encoder, decoder, generator=generator, **options)

    def encode(self, x: Operand) -> Tensor:
        """The code (B, Z)."""
        return self.encoder(as_tensor(x))

    def decode(self, code: Operand) -> Tensor:
        return self.decoder(as_tensor(code))

    def forward(self, x: Operand) -> Tensor:
        """Something like x, of its shape."""
        return self.decode(self.encode(x))

    def loss(self, x: Operand, target: Operand | None = None) -> Tensor:
        """The mean squared error.

        Args:
            target: what should come out, x unless given; to learn to remove noise, x without it.
        """
        return MeanSquaredError()(x if target is None else target, self(x))


def _dense(sizes: Sequence[int], generator: np.random.Generator) -> Sequential:
    steps: list[Layer | ReLU] = []
    for before, after in pairwise(sizes):
        steps += [ReLU(), Dense(before, after, generator=generator)]
    return Sequential(*steps[1:])


class VariationalAutoencoder(Autoencoder):
    """An autoencoder whose codes are spread like standard normal numbers, so that `decode` makes new items of such.

    The encoder gives a mean and the log of a variance for each number of the code; in training the code is drawn from
    there, as mean + deviation * noise, so that gradients reach both (Kingma and Welling 2014).

    Args:
        encoder: x to (B, 2 Z).
        deviation: the standard deviation of x around what is decoded; the smaller, the more exact are items, and the
            worse do codes keep to the normal distribution.
    """

    _numbers_per_code = 2

    def __init__(self, encoder: Layer, decoder: Layer, deviation: float = 0.3, generator: Generator = None) -> None:
        if not deviation > 0:
            raise ValueError(f"VariationalAutoencoder: expected a deviation above 0, got {deviation!r}")
        super().__init__(encoder, decoder, generator)
        self.deviation = deviation

    def posterior(self, x: Operand) -> tuple[Tensor, Tensor]:
        """Means and logs of variances of the codes, both (B, Z)."""
        both = self.encoder(as_tensor(x))
        size = both.shape[-1] // 2
        return both[..., :size], both[..., size:]

    def encode(self, x: Operand) -> Tensor:
        """The mean of the code (B, Z)."""
        return self.posterior(x)[0]

    def sample_code(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        """A code; the mean itself where not training."""
        if not self.training:
            return mean
        noise = mean.xp.asarray(self.generator.standard_normal(mean.shape), dtype=mean.dtype)
        return mean + exp(log_variance * 0.5) * noise

    def forward(self, x: Operand) -> Tensor:
        return self.decode(self.sample_code(*self.posterior(x)))

    def loss(self, x: Operand, target: Operand | None = None) -> Tensor:
        """-log p(x | code) but for a constant, and the divergence of the code's distribution from the standard normal.

        The mean over items, in nats an item: the negative evidence lower bound.
        """
        x = as_tensor(x)
        mean, log_variance = self.posterior(x)
        decoded = self.decode(self.sample_code(mean, log_variance))
        error = MeanSquaredError()(x if target is None else target, decoded) * (x.size / len(x))
        divergence = (mean * mean + exp(log_variance) - log_variance - 1).sum() * (0.5 / len(x))
        return error * (0.5 / self.deviation**2) + divergence


class RecurrentAutoencoder(Autoencoder):
    """The code of a sequence is made of a recurrent encoder's last state; a recurrent decoder sees it at each step.

    Args:
        input_size: C.
        hidden_size: of both runs.
        code_size: Z.
        cell: "rnn", "gru" or "lstm".
    """

    def __init__(
        self, input_size: int, hidden_size: int, code_size: int, cell: str = "gru", generator: Generator = None
    ) -> None:
        generator = new_generator(generator)
        encoder = new_recurrent(cell, input_size, hidden_size, generator=generator)
        super().__init__(encoder, new_recurrent(cell, code_size, hidden_size, generator=generator))
        self.to_code = Dense(hidden_size, code_size, generator=generator)
        self.output = Dense(hidden_size, input_size, generator=generator)

    def encode(self, x: Operand, lengths: Any = None) -> Tensor:
        """(B, T, C) to (B, Z).

        Args:
            lengths: (B,), how many steps are no padding; all unless given.
        """
        final = self.encoder(x, lengths)[1]
        return self.to_code((final[0] if isinstance(final, tuple) else final)[-1])

    def decode(self, code: Operand, n_steps: int = 1) -> Tensor:
        """(B, Z) to (B, n_steps, C)."""
        code = as_tensor(code)
        steps = code[:, None] + code.xp.zeros((len(code), n_steps, 1), code.dtype)
        return self.output(self.decoder(steps)[0])

    def forward(self, x: Operand, lengths: Any = None) -> Tensor:
        x = as_tensor(x)
        return self.decode(self.encode(x, lengths), x.shape[1])
