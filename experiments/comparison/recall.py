"""The recall task over a distance: data and models.

A sequence begins with a few tokens of noise; then comes the token to remember; then noise, until a question mark asks
for it. Noise has an alphabet of its own, so all that is hard is the distance.

Shapes: B batch, T tokens, C channels.
"""

import math
from collections.abc import Callable

import numpy as np

from experiments.comparison.layers import CausalConvolution, Recurrence
from tricycle.blocks import TransformerBlock
from tricycle.configs import ModelConfig
from tricycle.extra_ops import maximum
from tricycle.initialisers import normal, xavier
from tricycle.layers import Dense, Embedding, Layer, LayerNorm, Sequential
from tricycle.sequences.seq2seq import SinusoidalPositions
from tricycle.tensor import Operand, Tensor

N_CLASSES = 10  # tokens 0 to 9 are those to remember
N_NOISE = 10  # tokens 10 to 19
QUESTION = N_CLASSES + N_NOISE
MOST_BEFORE = 4  # tokens of noise before the one to remember, drawn for each batch from 0 on
N_LAYERS = 4  # convolutions of a CNN
N_HEADS = 4


def new_batch(distance: int, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (B, T) that end with QUESTION, and the tokens to recall (B,), `distance` before it; B is `size`."""
    before = int(generator.integers(0, MOST_BEFORE + 1))
    tokens = generator.integers(N_CLASSES, N_CLASSES + N_NOISE, (size, before + distance + 1))
    tokens[:, before] = generator.integers(0, N_CLASSES, size)
    tokens[:, -1] = QUESTION
    return tokens, tokens[:, before].copy()


def orthogonal(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Return a random orthogonal float32 matrix (n, n) (Saxe et al. 2014)."""
    q, r = np.linalg.qr(generator.standard_normal(shape))
    return (q * np.sign(np.diag(r))).astype(np.float32)


class Residual(Layer):
    """A residual connection around a layer with ReLU: x + max(layer(x), 0)."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return x + relu(layer(x))."""
        return x + maximum(self.layer(x), 0.0)


def cnn(kernel_size: int) -> Callable:
    """Return a function (size, window, generator) that builds a stack of residual causal convolutions."""
    return lambda size, window, generator: Sequential(
        *(Residual(CausalConvolution(size, kernel_size, generator)) for _ in range(N_LAYERS))
    )


def recurrent(cell: str, initialiser: Callable = xavier, forget: float = 0.0) -> Callable:
    """Return a function (size, window, generator) to build a recurrent layer; `forget` is an LSTM's initial bias.

    Args:
        forget: where the bias of an LSTM's forget gate starts.
    """

    def new(size: int, window: int, generator: np.random.Generator) -> Layer:
        layer = Recurrence(cell, size, generator, initialiser=initialiser)
        if forget:
            bias = layer.state_dict()["run.runs.0.0.input_bias"]  # the parameter's own memory; gates i, f, g, o
            bias[size : 2 * size] = forget
        return layer

    return new


def attention(size: int, window: int, generator: np.random.Generator) -> Layer:
    """Return a transformer encoder block of `size` channels with positions up to `window`, no causal mask."""
    config = ModelConfig(embedding_dim=size, n_heads=N_HEADS, context_window=window)
    block = TransformerBlock(config, causal=False, generator=generator)
    return Sequential(SinusoidalPositions(window, size), block, LayerNorm(size))


# From width, context window and generator to what stands between embedding and output.
BODIES: dict[str, Callable[[int, int, np.random.Generator], Layer]] = {
    "CNN, k = 3": cnn(3),
    "CNN, k = 7": cnn(7),
    "RNN": recurrent("rnn"),
    "RNN, orthogonal": recurrent("rnn", orthogonal),
    "GRU": recurrent("gru"),
    "LSTM": recurrent("lstm"),
    "LSTM, open": recurrent("lstm", forget=3.0),  # 0.95 of the state stays at each step
    "self-attention": attention,
}


class RecallModel(Layer):
    """An embedding, a body, and an output layer at the position of the question."""

    def __init__(self, kind: str, width: int, window: int, generator: np.random.Generator) -> None:
        self.embedding = Embedding(QUESTION + 1, width, normal(0.1), generator)
        self.body = BODIES[kind](width, window, generator)
        self.output = Dense(width, N_CLASSES, generator=generator)

    def forward(self, tokens: Operand) -> Tensor:
        """Return the logits (B, N_CLASSES) of tokens (B, T)."""
        return self.output(self.body(self.embedding(tokens))[:, -1])


def new_model(kind: str, parameters: int, window: int, generator: np.random.Generator) -> RecallModel:
    """Return the widest model of a kind with at most `parameters`, width a multiple of N_HEADS; ValueError if none.

    Raises:
        ValueError: there is none.
    """
    size = lambda width: RecallModel(kind, width, window, np.random.default_rng(0)).n_parameters
    width = N_HEADS * max(1, int(math.sqrt(parameters) / N_HEADS))  # no body has fewer than width^2
    while width > 0 and size(width) > parameters:
        width -= N_HEADS
    if not width:
        raise ValueError(f"expected --parameters to be at least {size(N_HEADS)} for {kind}, got {parameters}")
    return RecallModel(kind, width, window, generator)
