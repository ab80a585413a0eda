"""The autoencoders that are compared. All take and give images (B, height, width, 1)."""

from __future__ import annotations

import math

import numpy as np

from tricycle.layers import Sequential
from tricycle.sequences.autoencoders import Autoencoder, Reshape, VariationalAutoencoder

# Hidden layers by the number of an image's pixels: of dense models their widths, of convolutional ones the channels.
WIDTHS = {64: (128, 64), 784: (256, 128)}
CHANNELS = {64: (16, 32), 784: (16, 32)}


def new_model(
    kind: str,
    shape: tuple[int, int, int],
    code_size: int,
    generator: np.random.Generator,
    deviation: float | None = None,
) -> Autoencoder:
    """
    Args:
        kind: "dense" or "convolutional".
        deviation: of a variational one; a plain one unless given.
    """
    owner = Autoencoder if deviation is None else VariationalAutoencoder
    options = {} if deviation is None else {"deviation": deviation}
    n_pixels = math.prod(shape)
    if kind == "convolutional":
        model = owner.convolutional(shape, CHANNELS[n_pixels], code_size, generator=generator, **options)
    else:
        model = owner.dense((n_pixels, *WIDTHS[n_pixels], code_size), generator=generator, **options)
        model.encoder = Sequential(Reshape(n_pixels), model.encoder)
        model.decoder = Sequential(model.decoder, Reshape(*shape))
    return model
