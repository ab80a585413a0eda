"""Autoencoders: dense, convolutional, variational and recurrent.

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
    """A layer that reshapes each item of a batch."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Return x in the shape (B, *shape)."""
        return x.reshape(len(x), *self.shape)


class Autoencoder(Layer):
    """An autoencoder: decode(encode(x)) is trained to reconstruct x from a smaller code.

    Args:
        encoder: a layer from x to the code (B, Z).
        decoder: a layer from the code to the shape of x.
        generator: a NumPy generator or a seed, used in training only by the variational autoencoder.
    """

    _numbers_per_code = 1

    def __init__(self, encoder: Layer, decoder: Layer, generator: Generator = None) -> None:
        self.encoder, self.decoder, self.generator = encoder, decoder, new_generator(generator)

    @classmethod
    def dense(cls, sizes: Sequence[int], generator: Generator = None, **options: Any) -> Self:
        """Return a new autoencoder of dense layers with ReLU, `sizes` (2 or more, or ValueError) to code and back.

        Args:
            sizes: the widths from the input to the code, such as (64, 32, 2); the decoder has them in reverse.
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
        """Return a new mirrored autoencoder of (H, W, C) images: 3x3 stride-2 convolutions, ReLU, a dense layer.

        Args:
            shape: (height, width, C) of an image.
            channels: the number of channels after each convolution.
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
        """Return the codes (B, Z) of a batch of inputs x."""
        return self.encoder(as_tensor(x))

    def decode(self, code: Operand) -> Tensor:
        """Return the reconstruction from codes (B, Z)."""
        return self.decoder(as_tensor(code))

    def forward(self, x: Operand) -> Tensor:
        """Return the reconstruction of x, in the shape of x."""
        return self.decode(self.encode(x))

    def loss(self, x: Operand, target: Operand | None = None) -> Tensor:
        """Return the mean squared error between the reconstruction of x and `target`, by default x.

        Args:
            target: the desired output; x if not given. For a denoising autoencoder, the clean version of x.
        """
        return MeanSquaredError()(x if target is None else target, self(x))


def _dense(sizes: Sequence[int], generator: np.random.Generator) -> Sequential:
    """Return Dense layers of these sizes with ReLU between them, not at the ends."""
    steps: list[Layer | ReLU] = []
    for before, after in pairwise(sizes):
        steps += [ReLU(), Dense(before, after, generator=generator)]
    return Sequential(*steps[1:])


class VariationalAutoencoder(Autoencoder):
    """A variational autoencoder (Kingma and Welling 2014), which generates new items by decoding normal random codes.

    The encoder predicts a mean and a log variance for each number of the code. In training the code is sampled with the
    reparameterization trick, mean + standard deviation * noise, so both get gradients.

    Args:
        encoder: a layer from x to (B, 2 Z).
        output_std: the standard deviation of x around the decoder's output; smaller values give more exact
            reconstructions, and codes that follow the normal distribution less closely.
    """

    _numbers_per_code = 2

    def __init__(self, encoder: Layer, decoder: Layer, output_std: float = 0.3, generator: Generator = None) -> None:
        if not output_std > 0:
            raise ValueError(f"VariationalAutoencoder: expected output_std above 0, got {output_std!r}")
        super().__init__(encoder, decoder, generator)
        self.output_std = output_std

    def posterior(self, x: Operand) -> tuple[Tensor, Tensor]:
        """Return the means and log variances of the codes, both (B, Z)."""
        both = self.encoder(as_tensor(x))
        size = both.shape[-1] // 2
        return both[..., :size], both[..., size:]

    def encode(self, x: Operand) -> Tensor:
        """Return the means of the codes (B, Z)."""
        return self.posterior(x)[0]

    def sample_code(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        """Sample codes with the reparameterization trick; in evaluation mode return the means."""
        if not self.training:
            return mean
        noise = mean.xp.asarray(self.generator.standard_normal(mean.shape), dtype=mean.dtype)
        return mean + exp(log_variance * 0.5) * noise

    def forward(self, x: Operand) -> Tensor:
        """Return the reconstruction of x from sampled codes, in evaluation mode from their means."""
        return self.decode(self.sample_code(*self.posterior(x)))

    def loss(self, x: Operand, target: Operand | None = None) -> Tensor:
        """Return the negative ELBO without a constant, in nats per item: squared error / (2 std^2) + KL to N(0, I)."""
        x = as_tensor(x)
        mean, log_variance = self.posterior(x)
        decoded = self.decode(self.sample_code(mean, log_variance))
        error = MeanSquaredError()(x if target is None else target, decoded) * (x.size / len(x))
        divergence = (mean * mean + exp(log_variance) - log_variance - 1).sum() * (0.5 / len(x))
        return error * (0.5 / self.output_std**2) + divergence


class RecurrentAutoencoder(Autoencoder):
    """An autoencoder of sequences: the encoder's last state gives the code, which the decoder gets at each step.

    Args:
        input_size: C.
        hidden_size: of encoder and decoder.
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
        """Return the codes (B, Z) of sequences (B, T, C), projected from the final state of the last recurrent layer.

        Args:
            lengths: (B,), the number of steps of each sequence before the padding; all steps if not given.
        """
        final = self.encoder(x, lengths)[1]
        return self.to_code((final[0] if isinstance(final, tuple) else final)[-1])

    def decode(self, code: Operand, n_steps: int = 1) -> Tensor:
        """Return sequences (B, n_steps, C) from codes (B, Z), which are the decoder's input at every step."""
        code = as_tensor(code)
        steps = code[:, None] + code.xp.zeros((len(code), n_steps, 1), code.dtype)
        return self.output(self.decoder(steps)[0])

    def forward(self, x: Operand, lengths: Any = None) -> Tensor:
        """Return the reconstruction (B, T, C) of sequences (B, T, C); steps after `lengths` are not encoded."""
        x = as_tensor(x)
        return self.decode(self.encode(x, lengths), x.shape[1])
